"""Add your own robot: describe it, add statistics, encode observations, decode actions.

    python examples/add_an_embodiment.py

Wherever a robot is named, use ``add_an_embodiment:UR5`` (the module must be on the import path or
in the current folder). Environments, datasets, statistics, policies and training follow from it.
"""

from typing import Any

import numpy as np
import torch

from dzrobot.embodiments.spec import Embodiment, Gripper, Part, View
from dzrobot.embodiments.templates import TWO_VIEWS, side_by_side
from dzrobot.embodiments.timing import Timing, valid_anchors, window
from dzrobot.modality.pipeline import Pipeline
from dzrobot.modality.stats import Statistics
from dzrobot.modality.video import draw_augmentation

UR5 = Embodiment(
    tag="ur5_tabletop",
    views=(
        View(key="video.front", feature="observation.images.front", resolution=(240, 320)),
        View(key="video.wrist", feature="observation.images.wrist", resolution=(240, 320)),
    ),
    state=(
        # One dataset column of seven numbers, read as two parts.
        Part(key="state.joints", feature="observation.state", dim=6, start=0),
        Part(key="state.gripper", feature="observation.state", dim=1, start=6),
    ),
    action=(
        # Joints are predicted relative to their angles at the start of the chunk.
        Part(key="action.joints", feature="action", dim=6, start=0, reference="state.joints"),
        Part(
            key="action.gripper",
            feature="action",
            dim=1,
            start=6,
            gripper=Gripper(threshold=0.5, low=0.0, high=1.0),
        ),
    ),
    tiles=side_by_side("video.front", "video.wrist"),
    prompt=TWO_VIEWS,
    timing=Timing(control_hz=10, action_horizon=16),
)


def record_episode(length: int, rng: np.random.Generator) -> dict[str, Any]:
    """Return a made-up episode; a real one comes from a LeRobot dataset or from the robot."""
    joints = np.cumsum(rng.normal(0, 0.02, (length, 6)), axis=0).astype(np.float32)
    gripper = (np.arange(length)[:, None] % 40 < 20).astype(np.float32)
    return {
        "video.front": rng.integers(0, 256, (length, 240, 320, 3), dtype=np.uint8),
        "video.wrist": rng.integers(0, 256, (length, 240, 320, 3), dtype=np.uint8),
        "state.joints": joints,
        "state.gripper": gripper,
        "action.joints": np.roll(joints, -1, axis=0),
        "action.gripper": np.roll(gripper, -1, axis=0),
    }


def statistics_by_hand(episode: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a ``metadata.json``; for a dataset, `dzrobot stats` writes one."""
    horizon = UR5.timing.action_horizon
    starts = range(0, len(episode["action.joints"]) - horizon, horizon)
    relative = [
        episode["action.joints"][t : t + horizon] - episode["state.joints"][t] for t in starts
    ]

    def ranges(values: np.ndarray) -> dict[str, list[float]]:
        low, high = np.quantile(values.astype(np.float64), (0.01, 0.99), axis=0)
        return {"q01": low.tolist(), "q99": high.tolist()}

    return {
        UR5.tag: {
            "statistics": {
                "state": {
                    "joints": ranges(episode["state.joints"]),
                    "gripper": ranges(episode["state.gripper"]),
                },
                "action": {
                    "joints": ranges(np.concatenate(relative)),
                    "gripper": ranges(episode["action.gripper"]),
                },
            },
            "embodiment_tag": UR5.tag,
            "relative_action_keys": ["joints"],
            "action_horizon": horizon,
        }
    }


def training_window(episode: dict[str, Any], t: int) -> dict[str, Any]:
    """Return the frames, states and actions of the training sample that starts at row ``t``."""
    rows = window(t, len(episode["state.joints"]), UR5.timing)
    return {
        **{key: episode[key][rows.video] for key in UR5.video_keys},
        **{key: episode[key][rows.state] for key in UR5.state_keys},
        **{key: episode[key][rows.action] for key in UR5.action_keys},
        UR5.language: "Put the Red Cup on the Plate",
    }


def main() -> None:
    """Run every step once."""
    episode = record_episode(80, np.random.default_rng(0))
    pipeline = Pipeline(UR5, Statistics.from_metadata(statistics_by_hand(episode), UR5))
    print(f"{UR5.tag}: state {UR5.state_dim}, action {UR5.action_dim}, {UR5.image_size} pixels")
    print(f"statistics {pipeline.statistics.fingerprint[:12]}")

    starts = valid_anchors(80, UR5.timing)
    print(f"training samples may start at rows {starts[0]} to {starts[-1]}")
    sample = pipeline.encode(training_window(episode, int(starts[0])))
    print({key: tuple(sample[key].shape) for key in ("images", "state", "action")})
    print(sample["prompt"])

    batch = {
        key: torch.from_numpy(np.stack([episode[key][:33], episode[key][33:66]]))
        for key in UR5.video_keys
    }
    images = pipeline.encode_video(batch, [draw_augmentation(seed=0, sample_id=i) for i in (0, 1)])
    print(f"two augmented samples: {tuple(images.shape)}")

    state = {key: episode[key][0] for key in UR5.state_keys}
    chunk = sample["action"][: UR5.timing.action_horizon]
    decoded = pipeline.decode(chunk, state)
    error = np.abs(decoded["action.joints"] - episode["action.joints"][:16]).max()
    print(f"a decoded chunk differs from the recorded joints by {error:.4f} rad (clipped tails)")
    print(f"commands: {pipeline.decode_actions(chunk, state).shape}")


if __name__ == "__main__":
    main()
