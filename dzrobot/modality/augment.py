"""Random crop, color and missing views for training: one draw per sample, for all its frames."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from dzrobot.errors import ConfigError
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
        for name in ("brightness", "contrast", "saturation"):
            if not 0 <= (value := getattr(self, name)) <= 1:
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
