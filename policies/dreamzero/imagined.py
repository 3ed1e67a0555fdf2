"""The video that a session's plans predict, as latents and, where somebody asks, as frames."""

from collections.abc import Iterator

from torch import Tensor

from dzrobot.policies.dreamzero.network.vae import Decoding, Vae


class ImaginedVideo:
    """What was predicted since the network last started over, a part for each plan.

    The decoder carries frames over from part to part, like the encoder. Each part is decoded once:
    what is carried stays here from the first question on.
    """

    def __init__(self) -> None:
        """Begin without a part."""
        self.parts: list[Tensor] = []
        """Normalized latents (C, F, Y, X) of each plan."""

        self._decoding: Decoding | None = None
        self._decoded = 0
        self._newest: Tensor | None = None

    def newest_frames(self, vae: Vae) -> Tensor:
        """Return the frames (3, T, H, W) in [-1, 1] of the newest of at least one part."""
        if self._decoding is None:
            self._decoding = Decoding(vae)
        for latents in self.parts[self._decoded :]:
            self._newest = self._decoding.more(latents[None])[0].clamp(-1, 1)
            self._decoded += 1
        assert self._newest is not None, "at least one part"
        return self._newest

    def tensors(self) -> Iterator[Tensor]:
        """Yield what takes memory."""
        yield from self.parts
        if self._decoding is not None:
            yield from self._decoding.tensors()
        if self._newest is not None:
            yield self._newest
