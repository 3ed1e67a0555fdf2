"""Counts of bad inputs, per test; the summary of a run adds them up per file."""

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
