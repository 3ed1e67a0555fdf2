"""Worker processes that end with the one that started them, however that one ends."""

import ctypes
import multiprocessing
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Let the kernel kill this process when the one that started it is gone.

    A worker in the middle of a long episode reads no pipe, so that it would not notice for as long
    as the episode takes. Elsewhere than on Linux, and there too, a closed pipe ends it later.
    """
    parent = multiprocessing.parent_process()
    if parent is None or sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # It may have ended before the kernel was told.
    if os.getppid() != parent.pid:
        os._exit(1)
