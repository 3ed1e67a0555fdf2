"""Samples to batches, and the pictures of a batch to one tensor on the training device."""

from collections.abc import Sequence
from typing import TypedDict

import torch
from torch import Tensor

from dzrobot.modality.augment import AugmentConfig, draw_augmentation
from dzrobot.training.data.mixture import Sample, TrainingData


class TrainingBatch(TypedDict):
    """One micro-batch; see :mod:`dzrobot.training.data` for the shapes."""

    views: dict[int, dict[str, Tensor]]
    state: Tensor
    state_mask: Tensor
    action: Tensor
    action_mask: Tensor
    has_real_action: Tensor
    prompt: list[str]
    sample_id: Tensor
    source: Tensor
    slot: Tensor
    step: int
    skipped: int


def collate(samples: Sequence[Sample]) -> TrainingBatch:
    """Return ``samples``, all of one step, as one batch."""
    groups: dict[int, list[dict[str, Tensor]]] = {}
    for sample in samples:
        groups.setdefault(sample.source, []).append(sample.views)
    vectors = [sample.vectors for sample in samples]
    return TrainingBatch(
        views={
            source: {key: torch.stack([views[key] for views in group]) for key in group[0]}
            for source, group in sorted(groups.items())
        },
        state=torch.stack([sample["state"] for sample in vectors]),
        state_mask=torch.stack([sample["state_mask"] for sample in vectors]),
        action=torch.stack([sample["action"] for sample in vectors]),
        action_mask=torch.stack([sample["action_mask"] for sample in vectors]),
        has_real_action=torch.stack([sample["has_real_action"] for sample in vectors]),
        prompt=[sample["prompt"] for sample in vectors],
        sample_id=torch.tensor([sample.place.sample_id for sample in samples]),
        source=torch.tensor([sample.source for sample in samples]),
        slot=torch.tensor([sample.place.slot for sample in samples]),
        step=samples[0].place.step,
        skipped=sum(sample.skipped for sample in samples),
    )


def encode_views(
    batch: TrainingBatch,
    data: TrainingData,
    *,
    augment: AugmentConfig | None,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Return the tiled pictures of a batch, (B, T, H', W', 3) uint8 on ``device``.

    Args:
        batch: From the loader.
        data: What the loader reads; its seed keys the augmentation together with the sample id.
        augment: Ranges of crop and colour; None for the centre crop of evaluation.
        device: Where the work is done.
    """
    images: Tensor | None = None
    for source, views in batch["views"].items():
        rows = torch.nonzero(batch["source"] == source).flatten()
        moved = {key: frames.to(device, non_blocking=True) for key, frames in views.items()}
        draws = None
        if augment is not None:
            ids = batch["sample_id"][rows].tolist()
            draws = [draw_augmentation(data.seed, number, augment) for number in ids]
        encoded = data.sources[source].pipeline.encode_video(moved, draws)
        if images is None:
            images = encoded.new_empty(len(batch["source"]), *encoded.shape[1:])
        images[rows.to(encoded.device)] = encoded
    assert images is not None, "a batch holds at least one sample"
    return images
