"""What the tests of an emulated arm share."""

import math

import pytest


@pytest.fixture(scope="module")
def cell():
    """An emulated arm and cameras that keep no time, for all tests of a file."""
    from emulated import KeptCell, need_libraries

    need_libraries()
    cell = KeptCell(rate=math.inf)
    yield cell
    cell.end()
