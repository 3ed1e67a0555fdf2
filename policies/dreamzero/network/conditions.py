"""Modalities of a robot's own: vectors that condition the network beside the published state.

A state part of an embodiment may name an encoder, ``Part(encoder="my_lab:Touch")``. It is called
with the width of the part and the width of the transformer and returns a :class:`torch.nn.Module`
that maps normalized numbers (B, S, dim) to (B, S, width), one row for each block of a sample. What
it returns is added to the state tokens behind a gate that starts at zero: a network that has just
been given a condition computes to the bit what it computed before.

Its weights are called ``action_head.model.conditions.<name of the part>.*``, and are trained,
sharded, saved, averaged and exported like all others.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from dzrobot.embodiments.spec import Part
from dzrobot.errors import ConfigError, preview
from dzrobot.importing import load_reference
from dzrobot.policies.dreamzero.network.dit import CausalDiT


class Condition(nn.Module):
    """An encoder behind a gate of zeros."""

    def __init__(self, part: Part, width: int) -> None:
        """Build the encoder that ``part`` names.

        Raises:
            ConfigError: It is not a module, or keeps numbers that would not be saved.
            UnknownNameError: There is no such module or name.
        """
        super().__init__()
        assert part.encoder is not None, "a condition has an encoder"
        make = load_reference(part.encoder, f"encoder of {part.key}", Callable)
        encoder = make(part.dim, width)
        if not isinstance(encoder, nn.Module):
            raise ConfigError(
                f"{part.encoder}({part.dim}, {width}), the encoder of {part.key}, returned a "
                f"{type(encoder).__name__}: return a torch.nn.Module"
            )
        if buffers := [name for name, _ in encoder.named_buffers()]:
            raise ConfigError(
                f"{part.encoder}, the encoder of {part.key}, keeps the buffers {preview(buffers)}, "
                "which training would neither update nor save: make them parameters, or compute "
                "them in forward (LayerNorm in place of BatchNorm)"
            )
        self.encoder = encoder
        self.gate = nn.Parameter(torch.zeros(width))
        self._part = part

    def forward(self, x_BSK: Tensor) -> Tensor:
        """Return (B, S, width), zero until the gate has been trained.

        Args:
            x_BSK: Normalized numbers (B, S, dim).

        Raises:
            ConfigError: The numbers or what the encoder returns have another shape.
        """
        key, dim = self._part.key, self._part.dim
        if x_BSK.shape[-1] != dim:
            raise ConfigError(f"{key} has {x_BSK.shape[-1]} numbers instead of {dim}")
        made: Tensor = self.encoder(x_BSK)
        wanted = (*x_BSK.shape[:-1], len(self.gate))
        if made.shape != wanted:
            raise ConfigError(
                f"the encoder of {key} returned the shape {tuple(made.shape)} for "
                f"{tuple(x_BSK.shape)}: return {tuple(wanted)}"
            )
        return made * self.gate

    def again(self) -> "Condition":
        """Return another one, with newly initialized weights."""
        return Condition(self._part, len(self.gate))


def attach(network: CausalDiT, conditions: Sequence[Part]) -> None:
    """Give ``network`` the conditions of a robot, with newly initialized weights.

    Raises:
        ConfigError: See :class:`Condition`.
        UnknownNameError: See :class:`Condition`.
    """
    for part in conditions:
        network.conditions[part.name] = Condition(part, network.config.dim)
