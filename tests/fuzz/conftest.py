"""Counts of bad inputs, per test; the summary of a run adds them up per file."""

import random

import pytest
from harness import COUNTS, HEAVY


def pytest_process_begins():
    """Have the nursery that needs torch as a copy, before tests have opened anything."""
    HEAVY.copy_this_process()


@pytest.fixture(autouse=True)
def counted(record_property):
    """Write down how many bad inputs a test gave, and how many were answered."""
    COUNTS.update(tried=0, held=0)
    yield
    for name, count in COUNTS.items():
        record_property(name, count)


@pytest.fixture(params=["sample", pytest.param("all", marks=pytest.mark.long)])
def some(request):
    """Return what chooses of the bad inputs of a test: a fifth of them, seeded by its name.

    The long form tries all. Each is a command in a process of its own.
    """

    def choose(inputs):
        inputs = list(inputs)
        if request.param == "all":
            return inputs
        numbers = range(len(inputs))
        chosen = random.Random(request.node.nodeid).sample(numbers, -(-len(inputs) // 5))
        return [inputs[number] for number in sorted(chosen)]

    return choose
