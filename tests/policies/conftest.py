"""Tiny checkpoints of both variants, written once."""

import pytest
import torch

from dzrobot.embodiments.registry import load_embodiment
from dzrobot.policies.dreamzero.tiny import TinyOptions, write_tiny_checkpoint

VARIANTS = ("5b", "14b")


@pytest.fixture(scope="session")
def libero():
    return load_embodiment("libero_sim")


@pytest.fixture(scope="session")
def tiny_folders(tmp_path_factory, libero):
    root = tmp_path_factory.mktemp("tiny")
    for variant in VARIANTS:
        # Float32, so that nothing hides in rounding.
        options = TinyOptions(variant=variant, dtype=torch.float32)
        write_tiny_checkpoint(root / variant, libero, options)
    return root


# What sets the variants apart is in the network, whose tests take both in the short form too.
@pytest.fixture(params=["5b", pytest.param("14b", marks=pytest.mark.long)])
def tiny(request, tiny_folders):
    """Return the folder of an official checkpoint of each variant."""
    return tiny_folders / request.param
