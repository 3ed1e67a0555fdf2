"""A termination request ends a command as Ctrl-C does: what it holds is put away first."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Terminated(KeyboardInterrupt):
    """SIGTERM, as a service manager or a cluster sends it."""


@contextmanager
def terminable() -> Iterator[None]:
    """Raise :class:`Terminated` in the block when SIGTERM comes.

    A line of results that is being written is finished: its file is closed, and so flushed, on the
    way out. Worker processes are ended by what started them.
    """

    def stop(_number: int, _frame: FrameType | None) -> None:
        # A second one, sent by an impatient manager, must not cut the tidying short.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
