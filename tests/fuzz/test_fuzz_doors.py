"""Hostile files and messages at doors that strangers reach: one message each, and no more."""

import os

import doors
import pytest

SAMPLE = {
    "hdf5": 20, "starts": 50, "groot": 12, "results": 25, "environments": 50, "modules": 30,
    "checkpoints": 15, "datasets": 6, "configurations": 20, "exits": 6, "setups": 10,
}  # fmt: skip
"""Door -> cases of a short run."""

NEEDS = {"hdf5": "h5py", "groot": "zmq"}


def held(name, seed, each, folder):
    pytest.importorskip(NEEDS.get(name, "json"), reason=f"{NEEDS.get(name)} is not installed")
    counts = doors.tried(doors.DOORS[name], seed, each, folder)
    assert counts == {"held": each}, counts


@pytest.mark.parametrize("name", doors.DOORS)
def test_a_sample_of_what_strangers_send_is_refused_or_read(name, tmp_path):
    held(name, 1, SAMPLE[name], tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", doors.DOORS)
def test_more_of_what_strangers_send_is_refused_or_read(name, tmp_path):
    for seed in (2, 3):
        held(name, seed, 20 * SAMPLE[name], tmp_path)


def test_the_loop_sees_what_does_not_hold(tmp_path):
    """A reader of each fault, and one that ends its process."""

    class RawError(doors.DzrobotError):
        __str__ = Exception.__str__

    def raw():
        raise RawError("a\x1b[2J")

    def door(_draw, _folder):
        yield "good", False, lambda: None
        yield "taken", True, lambda: None
        yield "raw", False, raw
        yield "spends", False, lambda: len(b"x" * 400 * 2**20)
        yield "ends", False, lambda: os._exit(3)
        yield "untyped", False, lambda: [][1]

    counts = doors.tried(door, 0, 6, tmp_path)
    assert counts["held"] == counts["taken"] == counts["raw control characters"] == 1
    assert counts["ended with 3"] == counts["untyped IndexError"] == 1
    assert sum(number for fault, number in counts.items() if fault.endswith("MiB")) == 1
