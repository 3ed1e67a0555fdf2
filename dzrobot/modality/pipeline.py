"""The one way from windows to tensors and from chunks to actions, for training and for acting."""

from collections.abc import Mapping, Sequence
from typing import NotRequired, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dzrobot.embodiments.spec import Embodiment
from dzrobot.modality.stats import Statistics
from dzrobot.modality.vectors import Vectors
from dzrobot.modality.video import Augmentation, encode_views
from dzrobot.modality.window import Window, array, check_keys, prompt_of


class EncodedVectors(TypedDict):
    """All of a sample but its images. S state rows, A actions."""

    state: Tensor
    """``(S, 64)`` float32 in [-1, 1], zero beyond the real numbers."""

    state_mask: Tensor
    """``(S, 64)`` bool, true for real numbers."""

    prompt: str
    negative_prompt: str

    action: NotRequired[Tensor]
    """``(A, 32)`` float32 in [-1, 1], zero beyond the real numbers."""

    action_mask: NotRequired[Tensor]
    """``(A, 32)`` bool, true for real numbers."""

    has_real_action: NotRequired[Tensor]
    """``()`` bool."""


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

        ``window`` holds ``state.*``, the instruction, and ``action.*`` or not; no views.

        Raises:
            ModalityError: as :meth:`encode`.
        """
        robot = self.embodiment
        with_actions = any(key in window for key in robot.action_keys)
        allowed = (*robot.state_keys, robot.language, *(robot.action_keys if with_actions else ()))
        check_keys(window, allowed, robot.tag)
        state, state_mask = self._vectors.encode_state(window)
        encoded = EncodedVectors(
            state=torch.from_numpy(state),
            state_mask=torch.from_numpy(state_mask),
            prompt=prompt_of(window[robot.language], robot),
            negative_prompt=robot.negative_prompt,
        )
        if with_actions:
            action, action_mask = self._vectors.encode_action(window)
            encoded["action"] = torch.from_numpy(action)
            encoded["action_mask"] = torch.from_numpy(action_mask)
            encoded["has_real_action"] = torch.tensor(True)
        return encoded

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
            ModalityError: wrong shape, a number not finite, or a reference missing.
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
        return self._vectors.command(targets)


def _tensor(values: NDArray[np.generic]) -> Tensor:
    # A frame buffer may be read-only or flipped (negative strides); torch takes neither.
    return torch.from_numpy(
        np.ascontiguousarray(values) if values.flags.writeable else values.copy()
    )
