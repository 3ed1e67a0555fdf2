"""No silent default: whatever does not fit is refused, and the message says how to mend it."""

import numpy as np
import pytest
import torch

from dzrobot.errors import ModalityError
from dzrobot.modality.video import draw_augmentation

FRAMES = np.zeros((3, 256, 256, 3), np.uint8)
STATE = np.zeros((1, 8), np.float32)
ACTIONS = np.zeros((16, 7), np.float32)
GONE = object()

CHANGES = {
    "libero_sim: video.wrist_image missing": {"video.wrist_image": GONE},
    "libero_sim: state.state missing": {"state.state": GONE},
    "libero_sim: annotation.task missing": {"annotation.task": GONE},
    "unexpected video.wrist.": {"video.wrist": FRAMES},
    "unexpected state.stat. Did you mean 'state.state'": {"state.stat": STATE},
    "unexpected reward": {"reward": 1.0},
    "video.image is torch.float32: give uint8": {"video.image": FRAMES.astype(np.float32)},
    "video.image is a list: give a numpy array": {"video.image": FRAMES.tolist()},
    r"video.image has shape \(3, 128, 128, 3\)": {"video.image": FRAMES[:, ::2, ::2]},
    r"video.image has shape \(3, 3, 256, 256\)": {"video.image": FRAMES.transpose(0, 3, 1, 2)},
    r"video.image has shape \(256, 256, 3\)": {"video.image": FRAMES[0]},
    r"video.wrist_image has \(2,\) frames, video.image \(3,\)": {"video.wrist_image": FRAMES[:2]},
    r"state.state has shape \(1, 7\): give \(rows, 8\)": {"state.state": STATE[:, :7]},
    r"state.state has shape \(8,\)": {"state.state": STATE[0]},
    "state.state is float64: give float32": {"state.state": STATE.astype(np.float64)},
    "state.state holds nan at row 0, number 0": {"state.state": STATE * np.nan},
    "action.actions holds inf": {"action.actions": ACTIONS + np.inf},
    "action.actions has 15 rows: give 16 for each of the 1 state": {"action.actions": ACTIONS[:15]},
    "instruction is a bytes": {"annotation.task": b"go"},
    "instruction ' ' is empty": {"annotation.task": " "},
    r"instruction list '\[\]' must begin with a text": {"annotation.task": "[]"},
}


@pytest.mark.sampled
@pytest.mark.parametrize(("message", "change"), CHANGES.items(), ids=CHANGES)
def test_encode_refuses(libero, window_maker, message, change):
    window = {**window_maker(libero.embodiment), **change}
    window = {key: value for key, value in window.items() if value is not GONE}
    with pytest.raises(ModalityError, match=message):
        libero.encode(window)


def test_all_action_parts_or_none(droid, window_maker):
    window = window_maker(droid.embodiment, actions=True)
    del window["action.gripper_position"]
    with pytest.raises(ModalityError, match=r"action.gripper_position missing"):
        droid.encode(window)


def test_parts_of_unequal_length(droid, window_maker):
    window = window_maker(droid.embodiment, actions=True)
    window["state.gripper_position"] = window["state.gripper_position"][:1]
    with pytest.raises(ModalityError, match=r"equally many rows: .*position 2, .*position 1"):
        droid.encode(window)


def test_vectors_take_no_views(libero, window_maker):
    with pytest.raises(ModalityError, match=r"unexpected video.image"):
        libero.encode_vectors(window_maker(libero.embodiment))


def test_one_augmentation_per_sample(small):
    views = {key: torch.zeros(2, 1, 60, 80, 3, dtype=torch.uint8) for key in ("video.image",)}
    views["video.wrist_image"] = views["video.image"]
    with pytest.raises(ModalityError, match="1 augmentations for 2 samples"):
        small.encode_video(views, [draw_augmentation(0, 0)])


def chunk(**fields):
    return np.zeros((24, 32), np.float32) + np.float32(fields.get("value", 0))


REFERENCE = np.zeros(7, np.float32)


@pytest.mark.parametrize(
    ("message", "predicted", "state"),
    [
        (r"shape \(..., steps, 32\), got \(24, 8\)", chunk()[:, :8], {}),
        ("chunk holds numbers that are not finite", chunk(value=np.nan), {}),
        ("give the last raw state.joint_position; given: none", chunk(), {}),
        (r"has shape \(6,\): give \(7,\)", chunk(), {"state.joint_position": REFERENCE[:6]}),
        ("finite float32", chunk(), {"state.joint_position": REFERENCE * np.nan}),
        ("finite float32", chunk(), {"state.joint_position": REFERENCE.astype(float)}),
    ],
)
def test_decode_refuses(droid, message, predicted, state):
    with pytest.raises(ModalityError, match=message):
        droid.decode(predicted, state)
