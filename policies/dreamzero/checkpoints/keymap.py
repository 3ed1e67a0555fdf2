"""Names of weights: published checkpoints on one side, the libraries' modules on the other.

One table per component, read in both directions (docs/model.md, sections 0 and 6.1).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dzrobot.errors import preview
from dzrobot.policies.dreamzero.checkpoints.names import DIT, IMAGE, TEXT, VAE
from dzrobot.policies.dreamzero.network.image import ImageEncoder
from dzrobot.policies.dreamzero.network.prompt import TextEncoder
from dzrobot.policies.dreamzero.network.vae import Vae

PREFIXES = {"model": DIT, "text_encoder": TEXT, "image_encoder": IMAGE, "vae": VAE}
"""Sub-module of the network -> prefix of its weights in a published checkpoint."""


@dataclass(frozen=True)
class Entry:
    """One published tensor and the module's tensors it is made of."""

    official: str
    """Name in a published checkpoint."""

    library: tuple[str, ...]
    """Names in the module's state dict; several are concatenated along their first axis."""

    leading: int = 0
    """Axes of length one that the published tensor has in front."""

    def shape(self, shapes: Mapping[str, torch.Size]) -> tuple[int, ...]:
        """Return the published shape, given those of the module's tensors."""
        first = shapes[self.library[0]]
        rows = sum(shapes[name][0] for name in self.library) if first else 0
        return (*(1,) * self.leading, rows, *first[1:]) if first else ()

    def split(self, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the module's tensors of the published one."""
        tensor = tensor.reshape(tensor.shape[self.leading :])
        parts = tensor.chunk(len(self.library)) if len(self.library) > 1 else (tensor,)
        yield from zip(self.library, parts, strict=True)

    def join(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the published tensor of a module's state dict."""
        parts = [tensors[name] for name in self.library]
        joined = torch.cat(parts) if len(parts) > 1 else parts[0]
        return joined[(None,) * self.leading] if self.leading else joined


def entries(module: nn.Module, names: Sequence[str]) -> list[Entry]:
    """Return the table of one component, or of the network: its prefixed components together.

    Args:
        module: The component or network.
        names: Those of its state dict.
    """
    children = dict(module.named_children())
    match module:
        case TextEncoder():
            table = list(_renamed(names, _text_modules(module)))
        case ImageEncoder():
            table = [*_image_tensors(), *_renamed(names, _image_modules(module)), *_qkv(module)]
        case Vae():
            table = list(_renamed(names, _vae_modules(module)))
        case _ if children and children.keys() <= PREFIXES.keys():
            table = [
                Entry(
                    PREFIXES[child] + e.official, tuple(f"{child}.{key}" for key in e.library),
                    e.leading,
                )
                for child, component in children.items()
                for e in entries(component, _within(names, f"{child}."))
            ]  # fmt: skip
        case _:
            table = [Entry(name, (name,)) for name in names]
    unnamed = set(names) - {name for entry in table for name in entry.library}
    assert not unnamed, f"no published name for {preview(unnamed)}"
    return table


def _within(names: Sequence[str], prefix: str) -> list[str]:
    return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]


def _renamed(names: Sequence[str], modules: Mapping[str, str]) -> Iterator[Entry]:
    """Yield an entry for each tensor whose sub-module is in ``modules``: library -> official."""
    for name in names:
        path, _, leaf = name.rpartition(".")
        if path in modules:
            yield Entry(f"{modules[path]}.{leaf}", (name,))


def _text_modules(encoder: TextEncoder) -> dict[str, str]:
    modules = {"stack.embed_tokens": "token_embedding", "stack.final_layer_norm": "norm"}
    for i in range(len(encoder.stack.block)):
        attention, ffn = f"stack.block.{i}.layer.0", f"stack.block.{i}.layer.1"
        modules |= {f"{attention}.SelfAttention.{x}": f"blocks.{i}.attn.{x}" for x in "qkvo"}
        modules |= {
            f"{attention}.SelfAttention.relative_attention_bias": (
                f"blocks.{i}.pos_embedding.embedding"
            ),
            f"{attention}.layer_norm": f"blocks.{i}.norm1",
            f"{ffn}.layer_norm": f"blocks.{i}.norm2",
            f"{ffn}.DenseReluDense.wi_0": f"blocks.{i}.ffn.gate.0",
            f"{ffn}.DenseReluDense.wi_1": f"blocks.{i}.ffn.fc1",
            f"{ffn}.DenseReluDense.wo": f"blocks.{i}.ffn.fc2",
        }
    return modules


def _image_tensors() -> list[Entry]:
    embeddings = "vision.embeddings"
    return [
        Entry("log_scale", ("log_scale",)),
        Entry("visual.head", ("head",)),
        Entry("visual.cls_embedding", (f"{embeddings}.class_embedding",), leading=2),
        Entry("visual.pos_embedding", (f"{embeddings}.position_embedding.weight",), leading=1),
    ]


def _image_modules(encoder: ImageEncoder) -> dict[str, str]:
    modules = {
        "vision.embeddings.patch_embedding": "visual.patch_embedding",
        "vision.pre_layrnorm": "visual.pre_norm",
        "vision.post_layernorm": "visual.post_norm",
    }
    names = {
        "layer_norm1": "norm1",
        "layer_norm2": "norm2",
        "self_attn.out_proj": "attn.proj",
        "mlp.fc1": "mlp.0",
        "mlp.fc2": "mlp.2",
    }
    for i in range(len(encoder.vision.encoder.layers)):
        for library, official in names.items():
            modules[f"vision.encoder.layers.{i}.{library}"] = f"visual.transformer.{i}.{official}"
    return modules


def _qkv(encoder: ImageEncoder) -> Iterator[Entry]:
    for i in range(len(encoder.vision.encoder.layers)):
        for leaf in ("weight", "bias"):
            attention = f"vision.encoder.layers.{i}.self_attn"
            yield Entry(
                f"visual.transformer.{i}.attn.to_qkv.{leaf}",
                tuple(f"{attention}.{x}_proj.{leaf}" for x in "qkv"),
            )


def _vae_modules(vae: Vae) -> dict[str, str]:
    modules = {"quant_conv": "conv1", "post_quant_conv": "conv2"}
    for side in ("encoder", "decoder"):
        modules |= {
            f"{side}.conv_in": f"{side}.conv1",
            f"{side}.norm_out": f"{side}.head.0",
            f"{side}.conv_out": f"{side}.head.2",
            **_residual(f"{side}.mid_block.resnets.0", f"{side}.middle.0"),
            **_residual(f"{side}.mid_block.resnets.1", f"{side}.middle.2"),
        }
        for leaf in ("norm", "to_qkv", "proj"):
            modules[f"{side}.mid_block.attentions.0.{leaf}"] = f"{side}.middle.1.{leaf}"
    stages, blocks = len(vae.config.dim_mult), vae.config.num_res_blocks
    flat = vae.config.version == "2.1"
    for stage in range(stages):
        down, up = f"encoder.down_blocks.{stage}", f"decoder.up_blocks.{stage}"
        for j in range(blocks + 1):
            n = stage * (blocks + 1) + j
            library = f"encoder.down_blocks.{n}" if flat else f"{down}.resnets.{j}"
            official = f"encoder.downsamples.{n if flat else f'{stage}.downsamples.{j}'}"
            if j < blocks:
                modules |= _residual(library, official)
            else:
                modules |= _resample(library if flat else f"{down}.downsampler", official)
        for j in range(blocks + 2):
            n = stage * (blocks + 2) + j
            official = f"decoder.upsamples.{n if flat else f'{stage}.upsamples.{j}'}"
            if j <= blocks:
                modules |= _residual(f"{up}.resnets.{j}", official)
            else:
                modules |= _resample(f"{up}.upsamplers.0", official)
    return {f"coder.{library}": official for library, official in modules.items()}


def _residual(library: str, official: str) -> dict[str, str]:
    return {
        f"{library}.norm1": f"{official}.residual.0",
        f"{library}.conv1": f"{official}.residual.2",
        f"{library}.norm2": f"{official}.residual.3",
        f"{library}.conv2": f"{official}.residual.6",
        f"{library}.conv_shortcut": f"{official}.shortcut",
    }


def _resample(library: str, official: str) -> dict[str, str]:
    return {
        f"{library}.resample.1": f"{official}.resample.1",
        f"{library}.time_conv": f"{official}.time_conv",
    }
