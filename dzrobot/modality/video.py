"""Frames of several cameras to one image: crop, resize, color, tile."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from dzrobot.embodiments.spec import Embodiment, View
from dzrobot.errors import ModalityError
from dzrobot.modality.augment import Augmentation, adjust_colors
from dzrobot.modality.window import check_frames, check_keys


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
        frames = {
            view.key: _frames(samples[view.key][index], view, embodiment.crop_scale, augmentation)
            for view in embodiment.views
        }
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


def _frames(
    frames: Tensor, view: View, crop_scale: float, augmentation: Augmentation | None
) -> Tensor:
    """Crop, resize and recolor the frames ``(T, H, W, 3)`` of one view of one sample."""
    height, width = (int(crop_scale * size) for size in view.resolution)
    places = (None, None) if augmentation is None else augmentation.crop
    top = _corner(view.resolution[0] - height, places[0])
    left = _corner(view.resolution[1] - width, places[1])
    cropped = frames[:, top : top + height, left : left + width].permute(0, 3, 1, 2).contiguous()
    resized = interpolate(cropped / 255.0, size=view.size, mode="bilinear", antialias=True)
    if augmentation is not None:
        resized = adjust_colors(resized, augmentation)
    # Truncated, not rounded: the checkpoints saw images made this way.
    return (resized * 255.0).to(torch.uint8).permute(0, 2, 3, 1).contiguous()


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
