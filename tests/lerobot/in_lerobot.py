"""Runs inside an environment of LeRobot's: ``python in_lerobot.py open|tools|resume FOLDER``."""

import sys
from pathlib import Path

import numpy as np
from lerobot.datasets.lerobot_dataset import LeRobotDataset

NAME = "local/recording"


def read(root):
    """Read every item, with the task and the state of each."""
    dataset = LeRobotDataset(NAME, root=root, video_backend="pyav")
    for number in range(len(dataset)):
        item = dataset[number]
        assert item["task"], number
        assert int(item["index"]) == number
    return dataset


def resume(root):
    """Add an episode of black pictures with LeRobot's own writer."""
    dataset = LeRobotDataset.resume(NAME, root=root)
    features = dataset.meta.features
    standard = {"timestamp", "frame_index", "episode_index", "index", "task_index"}
    for _ in range(20):
        frame = {"task": "another task"}
        for name, feature in features.items():
            if name in standard:
                continue
            kind = feature["dtype"]
            kind = "uint8" if kind in ("image", "video") else kind
            frame[name] = np.zeros(tuple(feature["shape"]), dtype=kind)
        dataset.add_frame(frame)
    dataset.save_episode()
    dataset.finalize()


def tools(root):
    """Delete, split and merge."""
    from lerobot.datasets.dataset_tools import delete_episodes, merge_datasets, split_dataset

    aside = Path(root).parent / f"{Path(root).name}-edited"
    dataset = read(root)
    shorter = delete_episodes(dataset, [1], output_dir=aside / "shorter", repo_id=NAME)
    halves = split_dataset(dataset, {"a": [0], "b": [1, 2]}, output_dir=aside / "halves")
    merged = merge_datasets([*halves.values()], output_repo_id=NAME, output_dir=aside / "merged")
    assert shorter.num_episodes == dataset.num_episodes - 1
    assert merged.num_frames == len(dataset)
    assert len(read(aside / "merged")) == len(dataset)


if __name__ == "__main__":
    action, root = sys.argv[1:]
    if action == "resume":
        resume(root)
    elif action == "tools":
        tools(root)
    sys.stdout.write(f"{len(read(root))} frames\n")
