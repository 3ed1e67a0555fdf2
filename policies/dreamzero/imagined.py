"""The video that the plans of an episode predict, decoded only where it is asked for."""

from collections.abc import Iterator
from threading import Lock

import torch
from torch import Tensor

from dzrobot.policies.dreamzero.network.graphs import Graphs
from dzrobot.policies.dreamzero.network.vae import Decoding, Vae


class ImaginedVideo:
    """What was predicted since the network last started over, a part for each plan.

    The decoder carries frames over from part to part, like the encoder. Each part is decoded once:
    what is carried stays here from the first question on.
    """

    def __init__(self, parts: list[Tensor]) -> None:
        """Begin at the first of ``parts``, the normalized latents (C, F, Y, X) of each plan."""
        self.parts = parts
        self._decoding: Decoding | None = None
        self._lock = Lock()
        self._part = 0
        """Number of the part that is being decoded."""

        self._done = 0
        """How many of its latents have been decoded."""

        self._frames: list[Tensor] = []
        """Their frames (3, T, H, W), one tensor for each time the decoder was called."""

    def frames(
        self, part: int, vae: Vae, graphs: Graphs | None = None, *, without: int = 0
    ) -> Tensor:
        """Return the frames (3, T, H, W) in [-1, 1] of ``part``: the last decoded, or a later one.

        Threads may call it at the same time.

        Args:
            part: Number of the plan, counted since the network last started over.
            vae: The decoder.
            graphs: See :class:`~dzrobot.policies.dreamzero.network.vae.Decoding`.
            without: How many frames to leave out at the end of the part, fewer than it has. Latents
                of these alone are decoded only if a later part is asked for.
        """
        with self._lock:
            if self._decoding is None:
                self._decoding = Decoding(vae, graphs)
            assert part >= self._part, "in order"
            for number in range(self._part, part + 1):
                if number > self._part:
                    self._part, self._done, self._frames = number, 0, []
                latents, stride = self.parts[number], vae.config.temporal_stride
                # The first latent of a video stands for one frame.
                missing = 0 if number else stride - 1
                wanted = stride * latents.shape[1] - missing - (without if number == part else 0)
                needed = -(-(wanted + missing) // stride)
                if needed > self._done:
                    more = self._decoding.more(latents[None], self._done, needed)
                    self._frames.append(more[0].clamp(-1, 1))
                    self._done = needed
            return torch.cat(self._frames, dim=1)[:, :wanted]

    def tensors(self) -> Iterator[Tensor]:
        """Yield what takes memory besides the parts."""
        if self._decoding is not None:
            yield from self._decoding.tensors()
        yield from self._frames
