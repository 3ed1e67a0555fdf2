"""What a forked worker inherits open, it must neither use nor free.

File positions are shared with the parent, and a decoder that is freed may wait for threads that the
fork did not copy. So after a fork every holder of open files starts empty, and what it held is kept
untouched until the process ends.
"""

import os
import weakref
from typing import Protocol

_inherited: list[object] = []


class Holder(Protocol):
    """Something with open files."""

    def hand_over(self) -> object:
        """Return everything that is open, and begin anew with nothing."""
        ...


_holders: weakref.WeakSet[Holder] = weakref.WeakSet()


def watch(holder: Holder) -> None:
    """Make ``holder`` start empty in every process forked from now on."""
    _holders.add(holder)


def _after_fork() -> None:
    _inherited.extend(holder.hand_over() for holder in list(_holders))


os.register_at_fork(after_in_child=_after_fork)
