"""Images: an independent resize, crops, tiles and colors."""

import colorsys
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from dzrobot.embodiments.registry import EMBODIMENTS
from dzrobot.errors import ConfigError
from dzrobot.modality.video import (
    ADJUSTMENTS,
    Augmentation,
    AugmentConfig,
    adjust_colors,
    draw_augmentation,
    encode_views,
    tile,
)

PLAIN = Augmentation(crop=(0.0, 0.0))


def triangle_weights(source: int, target: int) -> np.ndarray:
    """Antialiased bilinear weights ``(target, source)``: triangles as wide as the scale, or 1."""
    scale = source / target
    support = max(scale, 1.0)
    weights = np.zeros((target, source))
    for i in range(target):
        center = (i + 0.5) * scale
        distance = np.abs(np.arange(source) + 0.5 - center) / support
        weights[i] = np.clip(1 - distance, 0, None)
    return weights / weights.sum(1, keepdims=True)


def plain_resize(frames: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """``(T, H, W, 3)`` uint8 to the gray levels before truncation, in double precision."""
    rows = triangle_weights(frames.shape[1], size[0])
    columns = triangle_weights(frames.shape[2], size[1])
    return np.einsum("ih,thwc,jw->tijc", rows, frames.astype(float), columns, optimize=True)


def sized(resolution, size, tag="libero_sim"):
    robot = EMBODIMENTS[tag]
    views = tuple(replace(view, resolution=resolution, size=size) for view in robot.views)
    return replace(robot, views=views)


def noise(resolution, frames=2, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (frames, *resolution, 3), dtype=np.uint8)


@pytest.mark.parametrize(
    ("resolution", "size"),
    [((64, 64), (64, 64)), ((60, 80), (32, 48)), ((30, 40), (64, 80)), ((61, 77), (33, 47))],
)
def test_evaluation_equals_a_plain_resize_of_the_center(resolution, size):
    robot = sized(resolution, size)
    frames = noise(resolution)
    height, width = (int(0.95 * n) for n in resolution)
    top, left = round((resolution[0] - height) / 2), round((resolution[1] - width) / 2)
    expected = plain_resize(frames[:, top : top + height, left : left + width], size)
    image = encode_views(dict.fromkeys(robot.video_keys, torch.from_numpy(frames)), robot)
    levels = image[:, :, : size[1]].numpy() - expected
    assert levels.max() <= 1e-3
    assert levels.min() >= -1 - 1e-3


def test_any_leading_shape():
    robot = sized((30, 40), (32, 48))
    frames = torch.from_numpy(noise((30, 40), frames=12)).reshape(2, 3, 2, 30, 40, 3)
    views = dict.fromkeys(robot.video_keys, frames)
    images = encode_views(views, robot)
    assert images.shape == (2, 3, 2, 32, 96, 3)
    one = encode_views(dict.fromkeys(robot.video_keys, frames[1, 2]), robot)
    assert torch.equal(images[1, 2], one)


def test_crop_moves_over_every_place():
    """A fraction of 0 is the first place, just below 1 the last; all views share it."""
    robot = sized((40, 60), (38, 57))
    frames = torch.from_numpy(noise((40, 60)))
    for (row, top), (column, left) in itertools.product(
        enumerate((0.0, 0.4, 0.999)), enumerate((0.0, 0.26, 0.5, 0.999))
    ):
        views = dict.fromkeys(robot.video_keys, frames)
        image = encode_views(views, robot, [replace(PLAIN, crop=(top, left))])
        # The crop is as large as the view, so nothing is interpolated.
        expected = frames[:, row : row + 38, column : column + 57]
        levels = image[:, :, :57].int() - expected.int()
        assert set(levels.unique().tolist()) <= {-1, 0}
        assert torch.equal(image[:, :, :57], image[:, :, 57:])


def test_tiles_repeat_pixels_and_leave_black():
    views = {key: torch.full((1, 2, 2, 3), i) for i, key in enumerate("abc", start=1)}
    image = tile(views, (("a",), ("b", None), (None, "c")))[0, :, :, 0]
    assert image.tolist() == [
        [1, 1, 1, 1], [1, 1, 1, 1],
        [2, 2, 0, 0], [2, 2, 0, 0],
        [0, 0, 3, 3], [0, 0, 3, 3],
    ]  # fmt: skip
    wide = tile({"a": torch.tensor([[[[1], [2]]]])}, (("a",), ("a", "a")))[0, :, :, 0]
    assert wide.tolist() == [[1, 1, 2, 2], [1, 2, 1, 2]]


def plain_colors(frame: np.ndarray, draw: Augmentation) -> np.ndarray:
    """One frame ``(H, W, 3)`` in [0, 1], pixel by pixel in double precision."""
    gray = np.array([0.2989, 0.587, 0.114])

    def blend(x, other, factor):
        return np.clip(factor * x + (1 - factor) * other, 0, 1)

    def turn(x):
        out = np.empty_like(x)
        for index in np.ndindex(x.shape[:2]):
            hue, saturation, value = colorsys.rgb_to_hsv(*x[index])
            out[index] = colorsys.hsv_to_rgb((hue + draw.hue) % 1, saturation, value)
        return out

    steps = {
        "brightness": lambda x: blend(x, 0, draw.brightness),
        "contrast": lambda x: blend(x, (x @ gray).mean(), draw.contrast),
        "saturation": lambda x: blend(x, (x @ gray)[..., None], draw.saturation),
        "hue": turn,
    }
    for name in draw.order:
        frame = steps[name](frame)
    return frame


@pytest.mark.parametrize("sample", range(24))
def test_colors_equal_a_plain_reference(sample):
    draw = draw_augmentation(11, sample)
    frames = noise((9, 13), frames=2, seed=sample) / 255
    # Grays, black, white and pure colors have edge cases of their own in the hue.
    frames[0, 0, :7] = list(itertools.product((0, 1), repeat=3))[:7]
    frames[0, 1, :3] = [[0.5] * 3, [1.0] * 3, [0.2, 0.2, 0.9]]
    moved = adjust_colors(torch.from_numpy(frames).float().permute(0, 3, 1, 2), draw)
    expected = np.stack([plain_colors(frame, draw) for frame in frames])
    np.testing.assert_allclose(moved.permute(0, 2, 3, 1).numpy(), expected, atol=5e-6)


def test_training_images_equal_a_plain_reference():
    """Crop, resize, color and truncation together: at most one gray level apart."""
    robot = sized((40, 60), (32, 48))
    for sample in range(4):
        draw = draw_augmentation(3, sample)
        frames = noise((40, 60), seed=sample)
        views = dict.fromkeys(robot.video_keys, torch.from_numpy(frames))
        image = encode_views(views, robot, [draw])[:, :, :48].numpy().astype(float)
        top, left = (int(place * (room + 1)) for place, room in zip(draw.crop, (2, 3), strict=True))
        resized = plain_resize(frames[:, top : top + 38, left : left + 57], (32, 48)) / 255
        expected = np.stack([plain_colors(frame, draw) for frame in resized])
        levels = np.abs(image - np.floor(expected * 255))
        assert levels.max() <= 1
        assert levels.mean() <= 0.01


def test_neutral_factors_change_nothing():
    frames = torch.from_numpy(noise((9, 13)) / 255).float().permute(0, 3, 1, 2)
    torch.testing.assert_close(adjust_colors(frames, PLAIN), frames, rtol=0, atol=1e-6)


def test_draws_depend_on_seed_and_sample_alone():
    draws = {(seed, i): draw_augmentation(seed, i) for seed in (0, 1) for i in range(200)}
    assert len(set(draws.values())) == len(draws)
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002 - the global generator must not matter
    for (seed, i), draw in draws.items():
        assert draw_augmentation(seed, i) == draw


def test_draws_fill_their_ranges():
    draws = [draw_augmentation(5, i) for i in range(2000)]
    for name, low, high in (
        ("brightness", 0.7, 1.3),
        ("contrast", 0.6, 1.4),
        ("saturation", 0.5, 1.5),
        ("hue", -0.08, 0.08),
    ):
        values = np.array([getattr(draw, name) for draw in draws])
        assert low <= values.min() < low + 0.02 * (high - low)
        assert high - 0.02 * (high - low) < values.max() <= high
        assert abs(values.mean() - (low + high) / 2) < 0.05 * (high - low)
    places = np.array([draw.crop for draw in draws])
    assert 0 <= places.min() < 0.01
    assert 0.99 < places.max() < 1
    assert {draw.order for draw in draws} == set(itertools.permutations(ADJUSTMENTS))


def test_ranges_are_checked():
    with pytest.raises(ConfigError, match="contrast=2 must lie from 0 to 1"):
        AugmentConfig(contrast=2)
    with pytest.raises(ConfigError, match=r"hue=0.6 must lie from 0 to 0.5"):
        AugmentConfig(hue=0.6)
    still = draw_augmentation(0, 0, AugmentConfig(brightness=0, contrast=0, saturation=0, hue=0))
    assert (still.brightness, still.contrast, still.saturation, still.hue) == (1, 1, 1, 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")
@pytest.mark.parametrize("tag", EMBODIMENTS)
def test_accelerator_equals_the_processor(tag):
    robot = EMBODIMENTS[tag]
    views = {
        view.key: torch.from_numpy(noise((2, *view.resolution), seed=i)).reshape(
            2, 2, *view.resolution, 3
        )
        for i, view in enumerate(robot.views)
    }
    draws = [draw_augmentation(1, i) for i in range(2)]
    for augmentations in (None, draws):
        expected = encode_views(views, robot, augmentations)
        there = {key: frames.cuda() for key, frames in views.items()}
        levels = (encode_views(there, robot, augmentations).cpu().int() - expected.int()).abs()
        assert levels.max() <= 1
        assert levels.float().mean() <= 0.05
