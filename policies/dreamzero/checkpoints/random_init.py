"""Weights that are drawn when they are asked for, each from a generator of its own."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from dzrobot.policies.dreamzero.checkpoints.sources import TensorInfo
from dzrobot.rng import torch_seed


@dataclass(frozen=True)
class RandomInitSource(ABC):
    """A weight source without files: equal shapes, seed and names give equal tensors."""

    shapes: Mapping[str, tuple[int, ...]]
    seed: int
    dtype: torch.dtype = torch.float32

    origin: ClassVar[str]
    """What records call it."""

    key: ClassVar[str]
    """Begins the key of every generator: kinds of weights must not share their noise."""

    @property
    def layout(self) -> str:
        """Return what stands where a source of files names their layout."""
        return self.origin

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        """Return shape and dtype of each."""
        return {
            name: TensorInfo(shape=shape, dtype=self.dtype, file=Path(self.origin))
            for name, shape in self.shapes.items()
        }

    def stream(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the named tensors."""
        for name in names:
            generator = torch.Generator().manual_seed(torch_seed(f"{self.key}{self.seed}", name))
            yield name, self.draw(name, self.shapes[name], generator).to(self.dtype)

    @abstractmethod
    def draw(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return the tensor ``name`` in float32."""
