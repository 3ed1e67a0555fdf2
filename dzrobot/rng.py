"""Random numbers keyed by what they are for: equal keys give equal numbers, in any process.

A key begins with its purpose, so that two uses of one seed never share their numbers. The keys of
this package are part of its results: a changed key changes scores, weights and sample orders.
"""

import hashlib

import numpy as np


def keyed_number(*key: object) -> int:
    """Return a number in [0, 2^64) that is a function of ``key``, whose parts are joined by "/"."""
    text = "/".join(map(str, key))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def keyed_seed(*key: object) -> int:
    """Return a number in [0, 2^31), as simulators take seeds, that is a function of ``key``."""
    return (keyed_number(*key) & 0xFFFF_FFFF) >> 1


def torch_seed(*key: object) -> int:
    """Return a number in [-2^63, 2^63), as torch takes seeds, that is a function of ``key``."""
    number = keyed_number(*key)
    return number - (1 << 64) if number >> 63 else number


def numpy_generator(*key: object) -> np.random.Generator:
    """Return a new generator that is a function of ``key``."""
    return np.random.default_rng(keyed_number(*key))


def seed_sequence(purpose: str, *numbers: int) -> np.random.SeedSequence:
    """Return the seeds of ``purpose`` and ``numbers``, where drawing them must be cheap.

    No digest is taken, so that one generator per sample of a dataset costs little.
    """
    return np.random.SeedSequence([int.from_bytes(purpose.encode()), *numbers])
