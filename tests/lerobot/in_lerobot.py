"""Runs inside an environment of LeRobot's: ``python in_lerobot.py FOLDER RESULTS ACTION...``.

``FOLDER`` is a recording and is left as it is. Each action writes below ``RESULTS`` and prints one
line: its name and ``held``, or what was raised.
"""

import importlib
import inspect
import shutil
import sys
import traceback
from pathlib import Path

import numpy as np
from lerobot.datasets.lerobot_dataset import LeRobotDataset

NAME = "local/recording"
STANDARD = {"timestamp", "frame_index", "episode_index", "index", "task_index"}


def read(root):
    """Read every item, with the task and the number of each; return dataset and items."""
    dataset = LeRobotDataset(NAME, root=root, video_backend="pyav")
    items = [dataset[number] for number in range(len(dataset))]
    for number, item in enumerate(items):
        assert item["task"], number
        assert int(item["index"]) == number
    return dataset, items


def policy_features(features):
    """Return what LeRobot's policies are given of a dataset, by its own rule."""
    try:
        module = importlib.import_module("lerobot.utils.feature_utils")
        rule = module.dataset_to_policy_features
    except (ImportError, AttributeError):
        # Before 0.5.
        rule = importlib.import_module("lerobot.datasets.utils").dataset_to_policy_features
    return rule(features)


def action_open(root, results):
    """Read all, and keep what was read for a comparison."""
    dataset, items = read(root)
    theirs = set(policy_features(dataset.meta.features))
    assert "executed_action" in dataset.meta.features
    assert theirs == {"observation.state", "action", *dataset.meta.camera_keys}, theirs
    columns = {"episode": [int(item["episode_index"]) for item in items]}
    for name in ("observation.state", "action", *dataset.meta.camera_keys):
        columns[name] = np.stack([item[name].numpy() for item in items])
    np.savez(results / "items.npz", **columns)


def action_delete(root, results):
    """Take the middle episode out."""
    tools = importlib.import_module("lerobot.datasets.dataset_tools")
    whole, _ = read(root)
    tools.delete_episodes(whole, [1], output_dir=results / "delete", repo_id=NAME)
    assert read(results / "delete")[0].num_episodes == whole.num_episodes - 1


def action_split(root, results):
    """Make two of it."""
    tools = importlib.import_module("lerobot.datasets.dataset_tools")
    tools.split_dataset(read(root)[0], {"a": [0], "b": [1, 2]}, output_dir=results / "split")
    assert [read(results / "split" / name)[0].num_episodes for name in "ab"] == [1, 2]


def action_merge(root, results):
    """Make one of it and itself."""
    tools = importlib.import_module("lerobot.datasets.dataset_tools")
    whole, _ = read(root)
    tools.merge_datasets([whole, whole], output_repo_id=NAME, output_dir=results / "merge")
    assert read(results / "merge")[0].num_frames == 2 * whole.num_frames


def action_edit(root, results):
    """Add a column, take it out, give the task another name."""
    tools = importlib.import_module("lerobot.datasets.dataset_tools")
    whole, _ = read(root)
    described = {"dtype": "float32", "shape": (1,), "names": None}
    note = {"note": (np.zeros((len(whole), 1), np.float32), described)}
    more = tools.add_features(whole, note, output_dir=results / "more", repo_id=NAME)
    less = tools.remove_feature(more, "note", output_dir=results / "edit", repo_id=NAME)
    assert less.features.keys() == whole.features.keys()
    tools.modify_tasks(less, new_task="another task")
    assert {item["task"] for item in read(results / "edit")[1]} == {"another task"}


def action_resume(root, results):
    """Add an episode of black images with LeRobot's own writer."""
    copy = shutil.copytree(root, results / "resume")
    dataset = getattr(LeRobotDataset, "resume", LeRobotDataset)(NAME, root=copy)
    black = {
        name: np.zeros(tuple(feature["shape"]), kind(feature))
        for name, feature in dataset.meta.features.items()
        if name not in STANDARD
    }
    write(dataset, [[(black, "another task")] * 20])
    assert read(copy)[0].num_episodes == read(root)[0].num_episodes + 1


def action_create(root, results):
    """Write the same frames with LeRobot's own writer into a folder of its own."""
    whole, items = read(root)
    features = {k: v for k, v in whole.meta.features.items() if k not in STANDARD}
    video = any(feature["dtype"] == "video" for feature in features.values())
    robot = whole.meta.robot_type
    dataset = LeRobotDataset.create(
        NAME, whole.fps, features, results / "create", robot_type=robot, use_videos=video
    )
    episodes = [[] for _ in range(whole.num_episodes)]
    for item in items:
        frame = {name: as_written(item[name].numpy(), features[name]) for name in features}
        episodes[int(item["episode_index"])].append((frame, item["task"]))
    write(dataset, episodes)
    assert read(results / "create")[0].num_frames == whole.num_frames


def action_join(root, results):
    """Make one of it and what LeRobot's own writer made of the same frames."""
    tools = importlib.import_module("lerobot.datasets.dataset_tools")
    parts = [read(root)[0], read(results / "create")[0]]
    tools.merge_datasets(parts, output_repo_id=NAME, output_dir=results / "join")
    assert read(results / "join")[0].num_frames == 2 * parts[0].num_frames


def kind(feature):
    return "uint8" if feature["dtype"] in ("image", "video") else feature["dtype"]


def as_written(value, feature):
    if feature["dtype"] in ("image", "video"):
        value = np.rint(value.transpose(1, 2, 0) * 255)
    return value.astype(kind(feature)).reshape(feature["shape"])


def write(dataset, episodes):
    """Add episodes of (frame, task)."""
    apart = "task" in inspect.signature(dataset.add_frame).parameters
    for episode in episodes:
        for frame, task in episode:
            if apart:
                dataset.add_frame(dict(frame), task=task)
            else:
                dataset.add_frame({**frame, "task": task})
        dataset.save_episode()
    if hasattr(dataset, "finalize"):
        dataset.finalize()


def action_convert(root, results):
    """Bring v2.1 to v3.0."""
    script = "convert_dataset_v21_to_v30"
    try:
        module = importlib.import_module(f"lerobot.scripts.{script}")
        folder = results / NAME
    except ModuleNotFoundError:
        module = importlib.import_module(f"lerobot.datasets.v30.{script}")
        folder = results
    shutil.copytree(root, results / NAME)
    module.convert_dataset(NAME, root=folder, push_to_hub=False)
    shutil.move(results / NAME, results / "convert")
    read(results / "convert")


def main(root, results, *actions):
    """Try every action, each on its own."""
    for name in actions:
        try:
            globals()[f"action_{name}"](Path(root), Path(results))
            said = "held"
        except Exception as error:  # noqa: BLE001 (whatever LeRobot raises is the result)
            traceback.print_exc()
            said = f"{type(error).__name__}: {error}"
        sys.stdout.write(f"{name} {' '.join(said.split())}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
