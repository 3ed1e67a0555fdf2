"""Weights of the transformer's blocks in eight bits, by torchao: less memory, and other numbers.

Inexact, so it is asked for by name. Embeddings, heads, encoders and autoencoder stay as they are:
they are few, and actions enter and leave through them.
"""

from typing import Literal

import torch
from torch import nn

from dzrobot.errors import ConfigError
from dzrobot.importing import required
from dzrobot.policies.dreamzero.network.libraries import members

Quantization = Literal["int8", "fp8"]
"""``int8``: weights in 8-bit integers with a scale for each output; matrix products in the
network's dtype. ``fp8``: weights and activations in 8-bit floats (e4m3), scaled by row; matrix
products in 8 bits as well."""

_FP8_CAPABILITY = (8, 9)
"""Of the first GPUs that multiply 8-bit floats: Ada, Hopper, Blackwell."""


def multiplies_fp8(device: torch.device) -> bool:
    """Return whether ``device`` is a GPU with products in float8."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _FP8_CAPABILITY


def check_quantization(kind: Quantization, device: torch.device, dtype: torch.dtype) -> None:
    """Raise where ``kind`` cannot be had, before anything is loaded.

    Raises:
        MissingDependencyError: torchao is not installed.
        ConfigError: The device cannot, or the dtype does not go with it.
    """
    required(f"quantize={kind!r}", "quantize", "torchao")
    if kind == "int8":
        return
    if not multiplies_fp8(device):
        raise ConfigError(
            f"quantize='fp8' needs a GPU that multiplies 8-bit floats (Ada, Hopper or newer), and "
            f"{device} does not; choose 'int8', or leave it out"
        )
    if dtype != torch.bfloat16:
        raise ConfigError(
            f"quantize='fp8' gives bfloat16, and the network computes in "
            f"{str(dtype).removeprefix('torch.')}: choose bfloat16, or quantize='int8'"
        )


def quantize_block(block: nn.Module, kind: Quantization) -> None:
    """Quantize the linear layers of ``block``, where it lies."""
    quantize, int8, fp8, by_row = members(
        "torchao.quantization", "quantize_", "Int8WeightOnlyConfig",
        "Float8DynamicActivationFloat8WeightConfig", "PerRow",
    )  # fmt: skip
    quantize(block, int8() if kind == "int8" else fp8(granularity=by_row()))


def quantized_bytes(layer: nn.Linear, itemsize: int) -> list[int]:
    """Return the bytes of each tensor of ``layer`` then, of ``itemsize`` a number that stays."""
    bias = 0 if layer.bias is None else layer.bias.numel()
    # A byte a weight, and at most five for scale and zero point of each output.
    return [layer.weight.numel(), 5 * layer.out_features, itemsize * bias]
