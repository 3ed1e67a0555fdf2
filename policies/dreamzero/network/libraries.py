"""The libraries that networks are built of, loaded where one is built: that takes seconds."""

import gc
import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_TALKATIVE = (
    "torchao",
    "torch.utils._pytree",
    "diffusers.quantizers.torchao.torchao_quantizer",
)
"""Loggers that, where torchao is installed, say which kernels and formats they do without."""


def members(library: str, *names: str) -> list[Any]:
    """Return what ``names`` stand for in ``library``, which is loaded if it is not yet.

    A network is often built on the meta device. What a library computes while it is loaded has to
    lie in memory all the same.
    """
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.ERROR)
    with torch.device("cpu"), _uncollected():
        module = importlib.import_module(library)
        return [getattr(module, name) for name in names]


@contextmanager
def _uncollected() -> Iterator[None]:
    """Look for no garbage meanwhile.

    Loading makes a million objects that stay. To look through them again and again took a fifth
    of diffusers' 7 processor seconds.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
