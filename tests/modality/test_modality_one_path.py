"""Whatever comes in, observations or windows, is encoded to the same bits, for every robot.

That training's loader adds nothing to it is shown in tests/training/test_data_loader.py.
"""

import numpy as np
import torch

from dzrobot.modality.video import draw_augmentation
from dzrobot.modality.window import stacked


def equal(first, second):
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(equal(first[k], second[k]) for k in first)
    return first == second if isinstance(first, str) else torch.equal(first, second)


def test_observations_and_window_encode_alike(pipeline, window_maker):
    """All frames count; of state and instruction, the last."""
    robot = pipeline.embodiment
    window = window_maker(robot, frames=4)
    observations = [
        {
            **{key: window[key][t] for key in robot.video_keys},
            **{key: window[key][0] + np.float32(3 - t) for key in robot.state_keys},
            robot.language: window[robot.language] if t == 3 else "Wait",
        }
        for t in range(4)
    ]
    acted, trained = pipeline.encode(stacked(observations, robot)), pipeline.encode(window)
    assert acted.keys() == trained.keys()
    for key, value in acted.items():
        assert equal(value, trained[key]), key


def test_a_frame_encodes_alike_alone_and_among_others(pipeline, window_maker):
    robot = pipeline.embodiment
    window = window_maker(robot, frames=3)
    together = pipeline.encode(window)["images"]
    for t in range(3):
        one = {k: v[t : t + 1] if k in robot.video_keys else v for k, v in window.items()}
        assert torch.equal(pipeline.encode(one)["images"][0], together[t])


def test_augmented_batch_equals_its_samples(pipeline, window_maker):
    robot = pipeline.embodiment
    windows = [window_maker(robot, frames=2, seed=i) for i in range(2)]
    draws = [draw_augmentation(7, i) for i in range(2)]
    views = {
        key: torch.stack([torch.from_numpy(w[key]) for w in windows]) for key in robot.video_keys
    }
    together = pipeline.encode_video(views, draws)
    for i in range(2):
        alone = pipeline.encode_video({k: v[i] for k, v in views.items()}, draws[i : i + 1])
        assert torch.equal(alone, together[i])


def test_inputs_are_left_as_they_were(pipeline, window_maker):
    window = window_maker(pipeline.embodiment, actions=True)
    kept = {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in window.items()}
    for value in window.values():
        if isinstance(value, np.ndarray):
            value.flags.writeable = False
    pipeline.encode(window)
    for key, value in kept.items():
        np.testing.assert_array_equal(window[key], value)


def test_flipped_frames_are_taken_as_seen(libero, window_maker):
    window = window_maker(libero.embodiment)
    flipped = {**window, "video.image": window["video.image"][:, ::-1, ::-1]}
    copied = {**window, "video.image": flipped["video.image"].copy()}
    assert torch.equal(libero.encode(flipped)["images"], libero.encode(copied)["images"])
