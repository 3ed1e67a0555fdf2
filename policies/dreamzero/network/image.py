"""The CLIP image encoder of the first frame.

Legend of shape suffixes: B frames, N tokens, D width.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from dzrobot.policies.dreamzero.network.config import ImageConfig
from dzrobot.policies.dreamzero.network.layers import drawn, embedding

_PIXEL_MEAN = (0.48145466, 0.4578275, 0.40821073)
_PIXEL_STD = (0.26862954, 0.26130258, 0.27577711)


_EPS = 1e-5


class _Attention(nn.Module):
    """Attention among all tokens."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.k_proj, self.v_proj, self.q_proj, self.out_proj = (
            nn.Linear(dim, dim) for _ in range(4)
        )

    def forward(self, x_BND: Tensor) -> Tensor:
        """Return the update of the tokens."""
        query, key, value = (
            project(x_BND).unflatten(-1, (self._heads, -1)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        read_BHNK = nn.functional.scaled_dot_product_attention(query, key, value)
        out_BND: Tensor = self.out_proj(read_BHNK.transpose(1, 2).flatten(2))
        return out_BND


class _Block(nn.Module):
    """Attention and feed-forward, each after a norm."""

    def __init__(self, config: ImageConfig) -> None:
        super().__init__()
        dim = config.vision_dim
        self.self_attn = _Attention(dim, config.vision_heads)
        self.layer_norm1, self.layer_norm2 = (nn.LayerNorm(dim, eps=_EPS) for _ in range(2))
        hidden = dim * config.vision_mlp_ratio
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(dim, hidden), "fc2": nn.Linear(hidden, dim)})

    def forward(self, x_BND: Tensor) -> Tensor:
        """Return the tokens after the block."""
        x_BND = x_BND + self.self_attn(self.layer_norm1(x_BND))
        hidden = nn.functional.gelu(self.mlp["fc1"](self.layer_norm2(x_BND)))
        out_BND: Tensor = x_BND + self.mlp["fc2"](hidden)
        return out_BND


def _vision(config: ImageConfig) -> nn.Module:
    """Return the weights under the names that the transformers library gives them."""
    dim, patch = config.vision_dim, config.patch_size
    embeddings = nn.Module()
    embeddings.class_embedding = nn.Parameter(drawn(dim, over=dim**0.5))
    embeddings.patch_embedding = nn.Conv2d(3, dim, patch, stride=patch, bias=False)
    embeddings.position_embedding = embedding(
        (config.image_size // patch) ** 2 + 1, dim, times=0.02
    )
    encoder = nn.Module()
    encoder.layers = nn.ModuleList(_Block(config) for _ in range(config.vision_layers))
    return nn.ModuleDict(
        {
            "embeddings": embeddings,
            "pre_layrnorm": nn.LayerNorm(dim, eps=_EPS),
            "encoder": encoder,
            "post_layernorm": nn.LayerNorm(dim, eps=_EPS),
        }
    )


class ImageEncoder(nn.Module):
    """Frames to the tokens before the last block (docs/model.md, section 6.2).

    The last block, the final norm, the projection and the logit scale are never run; they are kept
    because a checkpoint holds them and must be written back whole.
    """

    def __init__(self, config: ImageConfig) -> None:
        """Build the encoder of ``config`` with newly initialized weights."""
        super().__init__()
        self.vision: Any = _vision(config)
        self.register_buffer("head", torch.zeros(config.vision_dim, config.embed_dim))
        self.register_buffer("log_scale", torch.zeros(()))
        self._size = config.image_size

    def forward(self, frame_B3HW: Tensor) -> Tensor:
        """Return (B, N, D): the class token and one token per patch.

        Args:
            frame_B3HW: Frames in [-1, 1], of any height and width.
        """
        embeddings = self.vision.embeddings
        weight = embeddings.patch_embedding.weight
        patches_BDHW = embeddings.patch_embedding(self.pixels(frame_B3HW).to(weight.dtype))
        patches_BND = patches_BDHW.flatten(2).transpose(1, 2)
        class_B1D = embeddings.class_embedding.expand(len(patches_BND), 1, -1)
        hidden_BND: Tensor = torch.cat([class_B1D, patches_BND], dim=1)
        hidden_BND = hidden_BND + embeddings.position_embedding.weight
        hidden_BND = self.vision.pre_layrnorm(hidden_BND)
        for layer in self.vision.encoder.layers[:-1]:
            hidden_BND = layer(hidden_BND)
        return hidden_BND

    def compiled_layers(self) -> Iterator[nn.Module]:
        """Yield the blocks that run: to be compiled."""
        yield from self.vision.encoder.layers[:-1]

    def pixels(self, frame_B3HW: Tensor) -> Tensor:
        """Return the frames as the encoder sees them: (B, 3, S, S) float32, normalized."""
        # In float32: bf16 weights of the bicubic kernel would cost a gray level.
        pixels_B3SS = nn.functional.interpolate(
            frame_B3HW.float(), size=(self._size, self._size), mode="bicubic", align_corners=False
        )
        mean, std = _pixel_statistics(pixels_B3SS.device)
        return (pixels_B3SS * 0.5 + 0.5 - mean) / std


# Never dropped: recorded work reads them by address.
@cache
def _pixel_statistics(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of red, green and blue; sent to a device once."""
    # Kept tables may first be asked for in inference mode and later be needed in training.
    with torch.inference_mode(mode=False):
        mean, std = (
            torch.tensor(values, device=device)[:, None, None]
            for values in (_PIXEL_MEAN, _PIXEL_STD)
        )
        return mean, std
