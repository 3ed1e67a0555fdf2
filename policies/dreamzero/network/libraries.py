"""The libraries that networks are built of, loaded where one is built: that takes seconds."""

import importlib
from typing import Any

import torch


def members(library: str, *names: str) -> list[Any]:
    """Return what ``names`` stand for in ``library``, which is loaded if it is not yet.

    A network is often built on the meta device. What a library computes while it is loaded has to
    lie in memory all the same.
    """
    with torch.device("cpu"):
        module = importlib.import_module(library)
        return [getattr(module, name) for name in names]
