"""The CLIP image encoder of the first frame.

Legend of shape suffixes: B frames, N tokens, D width.
"""

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor, nn

from dzrobot.policies.dreamzero.network.config import ImageConfig
from dzrobot.policies.dreamzero.network.libraries import members

_PIXEL_MEAN = (0.48145466, 0.4578275, 0.40821073)
_PIXEL_STD = (0.26862954, 0.26130258, 0.27577711)


class ImageEncoder(nn.Module):
    """Frames to the tokens before the last block (docs/model.md, section 6.2).

    The last block, the final norm, the projection and the logit scale are never run; they are kept
    because a checkpoint holds them and must be written back whole.
    """

    def __init__(self, config: ImageConfig) -> None:
        """Build the encoder of ``config`` with newly initialized weights."""
        CLIPVisionConfig, CLIPVisionModel = members(
            "transformers", "CLIPVisionConfig", "CLIPVisionModel"
        )
        super().__init__()
        model = CLIPVisionModel(
            CLIPVisionConfig(
                hidden_size=config.vision_dim,
                intermediate_size=config.vision_dim * config.vision_mlp_ratio,
                num_hidden_layers=config.vision_layers,
                num_attention_heads=config.vision_heads,
                image_size=config.image_size,
                patch_size=config.patch_size,
                hidden_act="gelu",
                layer_norm_eps=1e-5,
            )
        )
        # Transformers 5.5, which LeRobot 0.6 pins, has the same modules one level further down.
        self.vision = dict(model.named_children()).get("vision_model", model)
        # All positions are used in order. An index table that no checkpoint holds would be left
        # without values when the network is built on the meta device.
        del self.vision.embeddings.position_ids
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
            hidden_BND = layer(hidden_BND, attention_mask=None)
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
