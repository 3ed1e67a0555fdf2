"""Observations to tensors and actions back to units: the one path for training and acting."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NotRequired, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dzrobot.embodiments.spec import (
    MAX_ACTION_DIM,
    MAX_STATE_DIM,
    Embodiment,
    Normalization,
    Part,
)
from dzrobot.errors import InvalidActionError, ModalityError, StatisticsError, preview
from dzrobot.modality.stats import BEYOND, Bounds, Statistics
from dzrobot.modality.video import Augmentation, encode_views
from dzrobot.modality.window import Window, array, check_keys, prompt_of, rows

Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class _Scale:
    """Bounds of one part as float32, and what its constant numbers become.

    ``(dim,)``, or ``(horizon, dim)`` where every step of a block has its own.
    """

    low: Floats
    high: Floats
    normalization: Normalization

    @classmethod
    def of(cls, bounds: Bounds, part: Part) -> "_Scale":
        low, high = (np.asarray(value, dtype=np.float32) for value in (bounds.low, bounds.high))
        return cls(low, high, part.normalization)

    def normalize(self, values: Floats) -> Floats:
        """Map ``[low, high]`` to [-1, 1]; what lies outside goes beyond.

        A number that never varied passes through under ``q99`` and becomes 0 under ``min_max``.

        Args:
            values: ``(..., n, dim)``: the first n steps of a block, or whole blocks.
        """
        low, high = self.along(values)
        constant = low == high
        width = np.where(constant, np.float32(1), high - low)
        scaled = np.float32(2) * (values - low) / width - np.float32(1)
        kept = values if self.normalization == "q99" else np.zeros_like(values)
        return np.where(constant, kept, scaled).astype(np.float32)

    def restore(self, values: Floats) -> Floats:
        """Map [-1, 1] to ``[low, high]``, without clipping; steps as of :meth:`normalize`."""
        low, high = self.along(values)
        half = (values + np.float32(1)) / np.float32(2)
        return half * (high - low) + low

    def along(self, values: Floats) -> tuple[Floats, Floats]:
        """Return both bounds; rows for those of ``values`` if steps have their own."""
        if self.low.ndim == 1:
            return self.low, self.high
        steps = values.shape[-2]
        blocks = -(-steps // len(self.low))
        low, high = (np.tile(bound, (blocks, 1))[:steps] for bound in (self.low, self.high))
        return low, high


class Vectors:
    """Normalizes, concatenates, pads and masks; and the way back."""

    def __init__(self, embodiment: Embodiment, statistics: Statistics) -> None:
        """Prepare the bounds.

        Raises:
            StatisticsError: ``statistics`` belong to another embodiment.
        """
        self._embodiment = embodiment
        for part in (*embodiment.state, *embodiment.action):
            shape = (
                np.shape(statistics.bounds[part.key].low) if part.key in statistics.bounds else ()
            )
            if shape not in ((part.dim,), (embodiment.timing.action_horizon, part.dim)):
                raise StatisticsError(
                    f"the statistics of {statistics.tag!r} do not fit {part.key} ({part.dim} "
                    f"numbers) of {embodiment.tag!r}: read them with "
                    "Statistics.from_metadata(path, embodiment)."
                )
        self._scales = {
            part.key: _Scale.of(statistics.bounds[part.key], part)
            for part in (*embodiment.state, *embodiment.action)
        }

    def encode_state(self, window: Mapping[str, object]) -> tuple[Floats, Bools]:
        """Return the normalized state vector ``(S, 64)`` and the mask of its real numbers.

        Zeros, a row for each block of a sample, where recordings have no state.
        """
        if not self._embodiment.state:
            return _pad(np.zeros((self._embodiment.timing.blocks, 0), np.float32), MAX_STATE_DIM)
        raw = {part.key: rows(window, part) for part in self._embodiment.state}
        _check_lengths(raw)
        count = len(next(iter(raw.values())))
        parts = [self._normalized(part, raw[part.key]) for part in self._embodiment.state_vector]
        return _pad(np.concatenate([np.zeros((count, 0), np.float32), *parts], 1), MAX_STATE_DIM)

    def outside(self, state: Mapping[str, object]) -> float | None:
        """Return which share of the newest state's numbers lie beyond; see `Pipeline.outside`."""
        beyond: list[Bools] = []
        for part in self._embodiment.state:
            scale, values = self._scales[part.key], rows(state, part)[-1:]
            low, high = scale.along(values)
            beyond.append((np.abs(scale.normalize(values)) > 1 + 2 * BEYOND)[:, low != high])
        numbers = np.concatenate(beyond, axis=None) if beyond else np.zeros(0, bool)
        return float(numbers.mean()) if len(numbers) else None

    def encode_conditions(self, window: Mapping[str, object]) -> dict[str, Floats]:
        """Return the normalized state parts with an encoder by key, each ``(S, dim)``."""
        parts = self._embodiment.conditions
        return {part.key: self._normalized(part, rows(window, part)) for part in parts}

    def _normalized(self, part: Part, values: Floats) -> Floats:
        return np.clip(self._scales[part.key].normalize(values), -1, 1)

    def encode_action(self, window: Mapping[str, object]) -> tuple[Floats, Bools]:
        """Return the normalized actions ``(S * horizon, 32)`` and the mask of their real numbers.

        Relative parts first lose the state at the start of their block. Zeros where recordings have
        no actions.
        """
        if not self._embodiment.action:
            return _pad(np.zeros((self._embodiment.timing.actions, 0), np.float32), MAX_ACTION_DIM)
        raw = {part.key: rows(window, part) for part in self._embodiment.action}
        _check_lengths(raw)
        parts = [
            self._scales[part.key].normalize(self._relative(part, raw[part.key], window))
            for part in self._embodiment.action
        ]
        return _pad(np.clip(np.concatenate(parts, axis=1), -1, 1), MAX_ACTION_DIM)

    def encode_targets(self, targets: Floats, state: Mapping[str, object]) -> Floats:
        """Return decoded actions ``(k, action_dim)`` as the network would have predicted them.

        Undoes :meth:`decode`, for another state as well: relative parts are measured from it.

        Args:
            targets: In physical units, two-way grippers as predicted.
            state: As of :meth:`decode`.

        Returns:
            ``(k, 32)``, not clipped.
        """
        parts = []
        start = 0
        for part in self._embodiment.action:
            values = targets[:, start : start + part.dim]
            if part.reference is not None:
                values = values - _reference(part, state, ())
            parts.append(self._scales[part.key].normalize(values))
            start += part.dim
        return _pad(np.concatenate(parts, axis=1), MAX_ACTION_DIM)[0]

    def decode(self, chunk: Floats, state: Mapping[str, object]) -> dict[str, Floats]:
        """Return the actions in physical units, by key, each ``(..., H, dim)`` float32.

        Args:
            chunk: ``(..., H, 32)``, predicted, in [-1, 1]; the padding is dropped.
            state: Raw last state by key, ``(..., dim)``; only the references are read.

        Raises:
            InvalidActionError: a number is not finite.
            ModalityError: wrong shape, or reference missing.
        """
        if chunk.ndim < 2 or chunk.shape[-1] != MAX_ACTION_DIM:
            raise ModalityError(
                f"an action chunk has shape (..., steps, {MAX_ACTION_DIM}), got {chunk.shape}"
            )
        if not np.isfinite(chunk).all():
            raise InvalidActionError(
                "the predicted chunk holds numbers that are not finite: nothing to execute"
            )
        actions = {}
        start = 0
        for part in self._embodiment.action:
            values = self._scales[part.key].restore(chunk[..., start : start + part.dim])
            if part.reference is not None:
                values = values + _reference(part, state, chunk.shape[:-2])[..., None, :]
            actions[part.key] = values
            start += part.dim
        return actions

    def joined(self, actions: Mapping[str, Floats]) -> Floats:
        """Return ``actions`` concatenated to ``(..., H, action_dim)``, grippers as predicted."""
        return np.concatenate([actions[part.key] for part in self._embodiment.action], axis=-1)

    def _relative(self, part: Part, values: Floats, window: Mapping[str, object]) -> Floats:
        """Return ``values``, with the reference at each block's start taken off if there is one."""
        horizon = self._embodiment.timing.action_horizon
        anchors = rows(
            window, self._embodiment.state[0] if part.reference is None else self._state(part)
        )
        if len(values) != len(anchors) * horizon:
            raise ModalityError(
                f"{part.key} has {len(values)} rows: give {horizon} for each of the {len(anchors)} "
                "state rows"
            )
        if part.reference is None:
            return values
        blocks = values.reshape(len(anchors), horizon, part.dim) - anchors[:, None]
        return blocks.reshape(values.shape)

    def _state(self, part: Part) -> Part:
        return next(state for state in self._embodiment.state if state.key == part.reference)


def _reference(part: Part, state: Mapping[str, object], lead: tuple[int, ...]) -> Floats:
    if part.reference is None or part.reference not in state:
        raise ModalityError(
            f"{part.key} is relative: give the last raw {part.reference}; given: {preview(state)}"
        )
    value = array(state, part.reference)
    if value.shape != (*lead, part.dim):
        raise ModalityError(f"{part.reference} has shape {value.shape}: give {(*lead, part.dim)}")
    if value.dtype != np.float32 or not np.isfinite(value).all():
        raise ModalityError(f"{part.reference} must be finite float32, got {value.dtype} {value}")
    return value


def _check_lengths(raw: Mapping[str, Floats]) -> None:
    if len({len(values) for values in raw.values()}) > 1:
        lengths = ", ".join(f"{key} {len(values)}" for key, values in raw.items())
        raise ModalityError(f"parts of one window need equally many rows: {lengths}")


def _pad(values: Floats, width: int) -> tuple[Floats, Bools]:
    padded = np.zeros((len(values), width), dtype=np.float32)
    padded[:, : values.shape[1]] = values
    mask = np.zeros(padded.shape, dtype=np.bool_)
    mask[:, : values.shape[1]] = True
    return padded, mask


class EncodedVectors(TypedDict):
    """All of a sample but its images. S state rows, A actions."""

    state: Tensor
    """``(S, 64)`` float32 in [-1, 1], zero beyond the real numbers."""

    state_mask: Tensor
    """``(S, 64)`` bool, true for real numbers."""

    conditions: dict[str, Tensor]
    """State parts with an encoder of their own: key to ``(S, dim)`` float32 in [-1, 1]."""

    prompt: str
    negative_prompt: str

    action: NotRequired[Tensor]
    """``(A, 32)`` float32 in [-1, 1], zero beyond the real numbers."""

    action_mask: NotRequired[Tensor]
    """``(A, 32)`` bool, true for real numbers."""

    has_real_action: NotRequired[Tensor]
    """``()`` bool: false for recordings without actions, whose ``action`` is zero."""


class EncodedSample(EncodedVectors):
    """One sample."""

    images: Tensor
    """``(T, H', W', 3)`` uint8, views tiled."""


class Pipeline:
    """Encodes windows of one embodiment and decodes predicted chunks."""

    def __init__(self, embodiment: Embodiment, statistics: Statistics) -> None:
        """Join a robot and its statistics.

        Raises:
            StatisticsError: ``statistics`` belong to another embodiment.
        """
        self.embodiment = embodiment
        self.statistics = statistics
        self._vectors = Vectors(embodiment, statistics)

    def encode(self, window: Window) -> EncodedSample:
        """Return the tensors of one window, with actions if it holds them.

        Raises:
            ModalityError: a key missing or unknown, a wrong shape or type, a number not finite.
        """
        views = {key: array(window, key) for key in self.embodiment.video_keys if key in window}
        rest = {key: value for key, value in window.items() if key not in views}
        images = self.encode_video({key: _tensor(frames) for key, frames in views.items()})
        return EncodedSample(images=images, **self.encode_vectors(rest))

    def encode_vectors(self, window: Window) -> EncodedVectors:
        """Return all but the images.

        ``window`` holds ``state.*``, the instruction, and ``action.*`` or not; no views. Of
        recordings without actions every window is one to train on.

        Raises:
            ModalityError: as :meth:`encode`.
        """
        robot = self.embodiment
        recorded = bool(robot.action)
        with_actions = not recorded or any(key in window for key in robot.action_keys)
        allowed = (*robot.state_keys, robot.language, *(robot.action_keys if with_actions else ()))
        check_keys(window, allowed, robot.tag)
        state, state_mask = self._vectors.encode_state(window)
        encoded = EncodedVectors(
            state=torch.from_numpy(state),
            state_mask=torch.from_numpy(state_mask),
            conditions={
                key: torch.from_numpy(values)
                for key, values in self._vectors.encode_conditions(window).items()
            },
            prompt=prompt_of(window[robot.language], robot),
            negative_prompt=robot.negative_prompt,
        )
        if with_actions:
            action, action_mask = self._vectors.encode_action(window)
            encoded["action"] = torch.from_numpy(action)
            encoded["action_mask"] = torch.from_numpy(action_mask)
            encoded["has_real_action"] = torch.tensor(recorded)
        return encoded

    def outside(self, state: Mapping[str, object]) -> float | None:
        """Return which share of a state's numbers lie clearly beyond their statistics.

        That is more than :data:`BEYOND` of the width outside. The network is shown the bound
        instead, so that a state in other units looks sane to it. Numbers that never varied in the
        training data do not count.

        Args:
            state: Raw state by key, ``(rows, dim)``; the last row counts.

        Returns:
            None where no number has a width.
        """
        return self._vectors.outside(state)

    def encode_video(
        self,
        views: Mapping[str, Tensor],
        augmentations: Sequence[Augmentation] | None = None,
    ) -> Tensor:
        """Return tiled images ``(..., T, H', W', 3)`` uint8; see :func:`video.encode_views`."""
        return encode_views(views, self.embodiment, augmentations)

    def decode(
        self, chunk: Tensor | NDArray[np.float32], state: Mapping[str, object]
    ) -> dict[str, NDArray[np.float32]]:
        """Return a predicted chunk in physical units, ``action.*`` to ``(..., H, dim)`` float32.

        Args:
            chunk: ``(..., H, 32)`` in [-1, 1].
            state: Raw last state by key, ``(..., dim)`` float32, as observed.

        Raises:
            InvalidActionError: a number is not finite.
            ModalityError: wrong shape, or a reference missing.
        """
        values = chunk.detach().float().cpu().numpy() if isinstance(chunk, Tensor) else chunk
        return self._vectors.decode(np.asarray(values, dtype=np.float32), state)

    def decode_actions(
        self, chunk: Tensor | NDArray[np.float32], state: Mapping[str, object]
    ) -> NDArray[np.float32]:
        """Return what the environment executes: ``(..., H, action_dim)``, grippers made two-way."""
        return self.commands(self.decode_targets(chunk, state))

    def decode_targets(
        self, chunk: Tensor | NDArray[np.float32], state: Mapping[str, object]
    ) -> NDArray[np.float32]:
        """Return a predicted chunk joined, ``(..., H, action_dim)``, grippers as predicted."""
        return self._vectors.joined(self.decode(chunk, state))

    def encode_targets(
        self, targets: NDArray[np.float32], state: Mapping[str, object]
    ) -> NDArray[np.float32]:
        """Return what the network would have to predict, ``(k, 32)``, to mean ``targets``.

        Args:
            targets: ``(k, action_dim)`` of :meth:`decode_targets`, from whatever state.
            state: Raw state that relative parts are measured from, as of :meth:`decode`.
        """
        return self._vectors.encode_targets(targets, state)

    def commands(self, targets: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return what the environment executes of joined actions: grippers made two-way."""
        return self.embodiment.commands(targets)


def _tensor(values: NDArray[np.generic]) -> Tensor:
    # A frame buffer may be read-only or flipped (negative strides); torch takes neither.
    return torch.from_numpy(
        np.ascontiguousarray(values) if values.flags.writeable else values.copy()
    )
