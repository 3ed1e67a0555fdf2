"""Tiny checkpoints of both variants, written once."""

import json

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


@pytest.fixture(scope="session")
def continuing_checkpoint(tmp_path_factory, libero):
    """Return a checkpoint that says it was trained to be given up to four actions."""
    folder = tmp_path_factory.mktemp("continuing") / "tiny"
    options = TinyOptions(dtype=torch.float32, with_passport=True)
    write_tiny_checkpoint(folder, libero, options)
    file = folder / "dzrobot_passport.json"
    passport = json.loads(file.read_text())
    file.write_text(json.dumps({**passport, "rtc_training_max_delay": 4}))
    return folder
