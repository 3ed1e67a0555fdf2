"""The autoencoder of the diffusers library behind the calls of our own."""

from typing import Any

from torch import Tensor, nn

from dzrobot.policies.dreamzero.network.config import VaeConfig


class _Side(nn.Module):
    def __init__(self, side: nn.Module) -> None:
        super().__init__()
        self.side = side

    def forward(self, x: Tensor, held: list[Any], first: bool | None = None) -> Tensor:
        named = {} if first is None else {"first_chunk": first}
        out: Tensor = self.side(x, feat_cache=held, feat_idx=[0], **named)
        return out


class LibraryCoder(nn.Module):
    """What ``WanCoder`` is, with the library's layers."""

    def __init__(self, config: VaeConfig) -> None:
        """Build it with newly initialized weights."""
        from diffusers import AutoencoderKLWan

        super().__init__()
        channels = 3 * config.patch_size**2
        coder = AutoencoderKLWan(
            base_dim=config.dim,
            decoder_base_dim=config.dec_dim,
            z_dim=config.z_dim,
            dim_mult=list(config.dim_mult),
            num_res_blocks=config.num_res_blocks,
            temperal_downsample=list(config.temporal_downsample),
            is_residual=config.version == "2.2",
            in_channels=channels,
            out_channels=channels,
        )
        self.encoder, self.decoder = _Side(coder.encoder), _Side(coder.decoder)
        self.quant_conv, self.post_quant_conv = coder.quant_conv, coder.post_quant_conv

    def load(self, state: dict[str, Tensor]) -> None:
        """Take over the weights of a ``WanCoder``."""
        residual = any("down_blocks.0.resnets" in name for name in state)
        named = {}
        for name, tensor in state.items():
            for side in ("encoder.", "decoder."):
                if name.startswith(side):
                    name = f"{side}side.{name.removeprefix(side)}"
            named[name.replace("upsamplers.0", "upsampler") if residual else name] = tensor
        self.load_state_dict(named)
