"""Keyed random numbers: as they were drawn for the results and weights that exist."""

import hashlib

import numpy as np
import torch

from dzrobot.rng import keyed_seed, numpy_generator, seed_sequence, torch_seed


def test_seeds_and_generators_follow_from_the_digest_of_the_key():
    digest = hashlib.sha256(b"env/3/libero_goal/2").digest()
    assert keyed_seed("env", 3, "libero_goal", 2) == int.from_bytes(digest[:4], "little") >> 1
    drawn = numpy_generator("env", 3, "libero_goal", 2).random(3)
    again = np.random.default_rng(int.from_bytes(digest[:8], "little")).random(3)
    np.testing.assert_array_equal(drawn, again)


def test_torch_takes_the_same_eight_bytes_with_their_sign():
    signs = set()
    for number in range(20):
        digest = hashlib.sha256(f"policy noise/{number}".encode()).digest()
        seed = int.from_bytes(digest[:8], "little", signed=True)
        signs.add(seed < 0)
        expected = torch.rand(3, generator=torch.Generator().manual_seed(seed))
        drawn = torch.rand(
            3, generator=torch.Generator().manual_seed(torch_seed("policy noise", number))
        )
        assert torch.equal(drawn, expected)
    assert signs == {True, False}


def test_a_purpose_has_its_own_numbers():
    ours = np.random.default_rng(seed_sequence("sample", 1, 2)).random(3)
    published = np.random.default_rng([int.from_bytes(b"sample"), 1, 2]).random(3)
    np.testing.assert_array_equal(ours, published)
    assert not np.array_equal(ours, np.random.default_rng(seed_sequence("blocks", 1, 2)).random(3))
