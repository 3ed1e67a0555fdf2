"""Weights of the blocks in eight or four bits, by torchao: less memory, and other numbers.

Inexact, so it is asked for by name. Embeddings, heads, encoders and autoencoder stay as they are:
they are few, and actions enter and leave through them.
"""

import importlib
import logging
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn

from dzrobot.errors import ConfigError
from dzrobot.importing import required
from dzrobot.policies.dreamzero.options import Quantization

_FP8_CAPABILITY = (8, 9)
"""Compute capability of the first GPUs that multiply 8-bit floats: Ada, Hopper, Blackwell."""


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
    library = _torchao("torchao.quantization")
    if kind == "int8":
        form = library.Int8WeightOnlyConfig()
    else:
        form = library.Float8DynamicActivationFloat8WeightConfig(granularity=library.PerRow())
    library.quantize_(block, form)


_TALKATIVE = ("torchao", "torch.utils._pytree")
"""Loggers that say which kernels and formats torchao does without."""


def _torchao(module: str) -> Any:
    """Return a module of the library, loaded at the first call: that takes a second."""
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.ERROR)
    # A network may be in the making on the meta device; what is computed here has to be there.
    with torch.device("cpu"):
        return importlib.import_module(module)


def quantized_bytes(layer: nn.Linear, itemsize: int) -> list[int]:
    """Return the bytes of each tensor of ``layer`` then, of ``itemsize`` a number that stays."""
    bias = 0 if layer.bias is None else layer.bias.numel()
    # A byte a weight, and at most five for scale and zero point of each output.
    return [layer.weight.numel(), 5 * layer.out_features, itemsize * bias]


_NF4_BLOCK = 64
"""Weights that share a scale in four bits, as in the paper (arXiv 2305.14314)."""

_NF4_SCALES = 256
"""Scales that share one of their own; fewer in small layers."""

_FEWEST_SCALES = 32

NF4_BYTES = 0.5 + (1 + 4 / _NF4_SCALES) / _NF4_BLOCK
"""Bytes of a weight in four bits, its part of the scales included."""


def can_be_nf4(layer: nn.Linear) -> bool:
    """Return whether the weight of ``layer`` divides into blocks."""
    return layer.weight.numel() % (_NF4_BLOCK * _FEWEST_SCALES) == 0


def set_nf4(layer: nn.Linear, weight: Tensor, *, device: torch.device, dtype: torch.dtype) -> None:
    """Make ``weight`` the frozen weight of ``layer``, in four bits (NF4, arXiv 2305.14314).

    Its products are those of the rounded weight in the dtype of the input, which gets gradients.

    Args:
        layer: Where it goes.
        weight: (outputs, inputs), a floating dtype, on any device.
        device: Where it lies then.
        dtype: What it is rounded from.
    """
    weight = weight.to(device, dtype)
    library = _torchao("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
    scales = gcd(weight.numel() // _NF4_BLOCK, _NF4_SCALES)
    four_bit = library.to_nf4(weight, block_size=_NF4_BLOCK, scaler_block_size=scales)
    layer.weight = nn.Parameter(four_bit, requires_grad=False)
