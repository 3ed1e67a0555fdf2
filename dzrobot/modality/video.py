"""Frames of several cameras to one image: crop, resize, color, tile."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from dzrobot.embodiments.spec import Embodiment, View
from dzrobot.errors import ConfigError, ModalityError
from dzrobot.modality.window import check_frames, check_keys
from dzrobot.rng import seed_sequence

Adjustment = Literal["brightness", "contrast", "saturation", "hue"]

ADJUSTMENTS: tuple[Adjustment, ...] = ("brightness", "contrast", "saturation", "hue")

_LUMA = (0.2989, 0.587, 0.114)


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    """How far colors may go; the defaults are those of the published checkpoints."""

    brightness: float = 0.3
    """Factor drawn from 1 - x to 1 + x."""

    contrast: float = 0.4
    """Factor drawn from 1 - x to 1 + x."""

    saturation: float = 0.5
    """Factor drawn from 1 - x to 1 + x."""

    hue: float = 0.08
    """Turn drawn from -x to x, in turns of the color circle."""

    view_dropout: float = 0.0
    """Share of samples in which one of ``dropped_views`` is black."""

    dropped_views: tuple[str, ...] = ()
    """Modality keys of the views that may be black."""

    def __post_init__(self) -> None:
        for name, value in (
            ("brightness", self.brightness),
            ("contrast", self.contrast),
            ("saturation", self.saturation),
        ):
            if not 0 <= value <= 1:
                raise ConfigError(f"{name}={value} must lie from 0 to 1")
        if not 0 <= self.hue <= 0.5:
            raise ConfigError(f"hue={self.hue} must lie from 0 to 0.5 turns")
        if not 0 <= self.view_dropout <= 1:
            raise ConfigError(f"view_dropout={self.view_dropout} must lie from 0 to 1")
        if bool(self.view_dropout) != bool(self.dropped_views):
            raise ConfigError(
                f"view_dropout={self.view_dropout} with dropped_views={self.dropped_views}: give "
                "both, the share and the views that may be black, or neither"
            )


PUBLISHED = AugmentConfig()


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """What one sample goes through."""

    crop: tuple[float, float]
    """Place of the crop among the possible rows and columns, each from 0 to 1 (excluded)."""

    brightness: float = 1.0
    contrast: float = 1.0
    saturation: float = 1.0
    hue: float = 0.0
    order: tuple[Adjustment, ...] = ADJUSTMENTS
    """In which the four adjustments follow each other."""


def draw_augmentation(seed: int, sample_id: int, config: AugmentConfig = PUBLISHED) -> Augmentation:
    """Return the augmentation of one sample: it depends on ``(seed, sample_id)`` alone.

    Args:
        seed: Seed of the run, 0 or more.
        sample_id: Number of the sample, unique over epochs, 0 or more.
        config: Ranges.
    """
    # The word keeps this stream apart from others keyed by the same two numbers.
    seeds = seed_sequence("augment", seed, sample_id)
    generator = np.random.Generator(np.random.Philox(seeds))
    top, left = generator.random(2)
    factors = [
        1 + (2 * generator.random() - 1) * reach
        for reach in (config.brightness, config.contrast, config.saturation)
    ]
    return Augmentation(
        crop=(float(top), float(left)),
        brightness=factors[0],
        contrast=factors[1],
        saturation=factors[2],
        hue=(2 * generator.random() - 1) * config.hue,
        order=tuple(ADJUSTMENTS[i] for i in generator.permutation(len(ADJUSTMENTS))),
    )


def draw_dropped_view(seed: int, sample_id: int, config: AugmentConfig) -> str | None:
    """Return the view that is black in one sample, if any; from a stream of its own.

    Args:
        seed: Seed of the run, 0 or more.
        sample_id: Number of the sample, unique over epochs, 0 or more.
        config: How often, and which.
    """
    if not config.view_dropout:
        return None
    generator = np.random.Generator(
        np.random.Philox(seed_sequence("view dropout", seed, sample_id))
    )
    if generator.random() >= config.view_dropout:
        return None
    return config.dropped_views[int(generator.integers(len(config.dropped_views)))]


def adjust_colors(frames: Tensor, augmentation: Augmentation) -> Tensor:
    """Return ``frames`` with the four adjustments applied in their order.

    Args:
        frames: ``(N, 3, H, W)`` float in [0, 1], red, green, blue.
        augmentation: Factors and order. Contrast turns about each frame's own mean gray.
    """
    steps: dict[Adjustment, Callable[[Tensor], Tensor]] = {
        "brightness": lambda x: _blend(x, 0.0, augmentation.brightness),
        "contrast": lambda x: _blend(x, _mean_gray(x), augmentation.contrast),
        "saturation": lambda x: _blend(x, _gray(x), augmentation.saturation),
        "hue": lambda x: _turn_hue(x, augmentation.hue),
    }
    for name in augmentation.order:
        frames = steps[name](frames)
    return frames


def _blend(frames: Tensor, other: Tensor | float, factor: float) -> Tensor:
    return (frames * factor + (1 - factor) * other).clamp_(0, 1)


def _gray(frames: Tensor) -> Tensor:
    red, green, blue = frames.unbind(1)
    return (red * _LUMA[0] + green * _LUMA[1] + blue * _LUMA[2]).unsqueeze(1)


def _mean_gray(frames: Tensor) -> Tensor:
    return _gray(frames).mean(dim=(1, 2, 3), keepdim=True)


def _turn_hue(frames: Tensor, turn: float) -> Tensor:
    """Turn hues in the hexagonal HSV model; value and saturation stay exact."""
    red, green, blue = frames.unbind(1)
    value = frames.amax(1)
    chroma = value - frames.amin(1)
    safe = torch.where(chroma == 0, torch.ones_like(chroma), chroma)
    sextant = torch.where(
        value == red,
        (green - blue) / safe,
        torch.where(value == green, 2 + (blue - red) / safe, 4 + (red - green) / safe),
    )
    sextant = sextant + 6 * turn
    channels = []
    for offset in (5, 3, 1):
        k = (sextant + offset) % 6
        channels.append(value - chroma * torch.minimum(k, 4 - k).clamp_(0, 1))
    return torch.stack(channels, 1)


def encode_views(
    views: Mapping[str, Tensor],
    embodiment: Embodiment,
    augmentations: Sequence[Augmentation] | None = None,
) -> Tensor:
    """Return the tiled images, ``(..., T, H', W', 3)`` uint8 on the device of the views.

    Each sample is computed by itself: a batch gives the same bits as its samples one by one.

    Args:
        views: By view key, ``(..., T, H, W, 3)`` uint8, all with the same leading sizes.
        embodiment: Says resolution, crop, size and tiling.
        augmentations: One per sample. None: center crop, colors untouched.

    Raises:
        ModalityError: a view missing or unknown, of another shape or type, or not one augmentation
            per sample.
    """
    lead = _check(views, embodiment)
    samples = {key: frames.reshape(-1, *frames.shape[-4:]) for key, frames in views.items()}
    count = lead.numel()
    if augmentations is not None and len(augmentations) != count:
        raise ModalityError(
            f"{len(augmentations)} augmentations for {count} samples: give one per sample"
        )
    images = []
    for index in range(count):
        augmentation = None if augmentations is None else augmentations[index]
        frames: dict[str, Tensor] = {}
        for alike in _alike(embodiment.views):
            parts = [samples[view.key][index] for view in alike]
            prepared = _frames(parts, alike[0], embodiment.crop_scale, augmentation)
            frames |= zip((view.key for view in alike), prepared, strict=True)
        images.append(tile(frames, embodiment.tiles))
    return torch.stack(images).reshape(*lead, *images[0].shape)


def tile(views: Mapping[str, Tensor], tiles: Sequence[Sequence[str | None]]) -> Tensor:
    """Return ``views``, each ``(..., h, w, 3)``, laid out in rows of ``tiles``.

    A row with fewer tiles than the widest repeats each pixel to fill the width; None is black.
    """
    blank = torch.zeros_like(next(iter(views.values())))
    widest = max(len(row) for row in tiles)
    rows = []
    for row in tiles:
        image = torch.cat([blank if key is None else views[key] for key in row], dim=-2)
        rows.append(image.repeat_interleave(widest // len(row), dim=-2))
    return torch.cat(rows, dim=-3)


def _alike(views: Sequence[View]) -> list[list[View]]:
    """Return the views in groups of equal sizes: those of a sample are cropped alike."""
    groups: dict[tuple[object, object], list[View]] = {}
    for view in views:
        groups.setdefault((view.resolution, view.size), []).append(view)
    return list(groups.values())


def _frames(
    parts: Sequence[Tensor], view: View, crop_scale: float, augmentation: Augmentation | None
) -> tuple[Tensor, ...]:
    """Crop, resize and recolor one sample's frames ``(T, H, W, 3)`` of views like ``view``."""
    height, width = (int(crop_scale * size) for size in view.resolution)
    places = (None, None) if augmentation is None else augmentation.crop
    top = _corner(view.resolution[0] - height, places[0])
    left = _corner(view.resolution[1] - width, places[1])
    crops = [part[:, top : top + height, left : left + width] for part in parts]
    whole = crops[0] if len(crops) == 1 else torch.cat(crops)
    cropped = whole.permute(0, 3, 1, 2).contiguous()
    resized = interpolate(cropped / 255.0, size=view.size, mode="bilinear", antialias=True)
    if augmentation is not None:
        resized = adjust_colors(resized, augmentation)
    # Truncated, not rounded: the checkpoints saw images made this way.
    done = (resized * 255.0).to(torch.uint8).permute(0, 2, 3, 1).contiguous()
    return done.chunk(len(parts))


def _corner(room: int, place: float | None) -> int:
    return round(room / 2) if place is None else int(place * (room + 1))


def _check(views: Mapping[str, Tensor], embodiment: Embodiment) -> torch.Size:
    """Return the leading sizes before T; raise if a view does not fit the embodiment."""
    check_keys(views, embodiment.video_keys, embodiment.tag)
    first = views[embodiment.video_keys[0]]
    for view in embodiment.views:
        frames = views[view.key]
        check_frames(frames, view, embodiment.tag)
        if frames.shape[:-3] != first.shape[:-3] or not frames.shape[:-3].numel():
            raise ModalityError(
                f"{view.key} has {tuple(frames.shape[:-3])} frames, {embodiment.video_keys[0]} "
                f"{tuple(first.shape[:-3])}: views need equally many, at least one"
            )
    return first.shape[:-4]
