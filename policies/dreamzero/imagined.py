"""The video that the plans of an episode predict, decoded only where it is asked for."""

from collections.abc import Iterator
from threading import Lock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dzrobot.policies.base import Image, ImaginedLatents, Policy
from dzrobot.policies.dreamzero.network.graphs import Graphs
from dzrobot.policies.dreamzero.network.vae import Decoding, Vae
from dzrobot.policies.dreamzero.network.world_action import WorldActionModel


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


def as_images(frames: Tensor) -> Image:
    """Return decoded frames (3, T, H, W) in [-1, 1] as images (T, H, W, 3)."""
    pixels = ((frames.float() + 1) * 127.5).round().to(torch.uint8)
    return np.ascontiguousarray(pixels.permute(1, 2, 3, 0).cpu().numpy())


@torch.no_grad()
def encoded_images(
    network: WorldActionModel, images: Image, device: torch.device
) -> NDArray[np.float32]:
    """Return the normalized latents (N, C, Y, X) of images (N, H, W, 3), each by itself.

    Args:
        network: Of which the autoencoder has its weights.
        images: Views tiled.
        device: Where the autoencoder is.
    """
    frames = network.pixels(torch.from_numpy(images).to(device)[:, None])[:, :, 0]
    return network.vae.encode_first_frame(frames)[:, :, 0].float().cpu().numpy()


class VideoCoder(Policy):
    """The autoencoder of a checkpoint alone, which decodes what its policy has predicted.

    It encodes images as that policy does, and does not act.

    Args:
        network: Of which the autoencoder has its weights; the rest needs none.
    """

    def __init__(self, network: WorldActionModel) -> None:
        self._network = network
        self._device = next(network.vae.parameters()).device
        self._video = ImaginedVideo([])

    def encode_images(self, images: Image) -> NDArray[np.float32]:
        """Return the normalized latents (N, C, Y, X) of images (N, H, W, 3), each by itself."""
        return encoded_images(self._network, images, self._device)

    @torch.no_grad()
    def decode(self, given: ImaginedLatents, without: int) -> Image:
        """Return the video (T, H, W, 3) of a plan; every plan of an episode is given, in order.

        Args:
            given: What :meth:`Policy.imagine_latents` returned.
            without: How many frames to leave out at the end, fewer than there are.
        """
        if given.starts:
            self._video = ImaginedVideo([])
        latents = torch.from_numpy(given.latents.copy()).to(self._device)
        self._video.parts.append(latents)
        newest = len(self._video.parts) - 1
        return as_images(self._video.frames(newest, self._network.vae, without=without))
