"""Tells when code is being compiled, which takes minutes, and how long it took on this machine."""

import hashlib
import logging
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from dzrobot.documents import read_json
from dzrobot.errors import ConfigError
from dzrobot.files import cache_folder, write_json

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CompileNotice:
    """Says what is compiled, as soon as that begins, and how long it took before.

    Times are kept in ``compile_times`` of the cache folder, by what is compiled.
    """

    what: str
    """What is compiled, for people."""

    key: str
    """All that its code depends on, besides torch and the device."""

    device: torch.device
    """What it is compiled for."""

    is_on: bool
    """Whether this process compiles anything and should say so."""

    clock: Callable[[], float] = time.monotonic

    @contextmanager
    def watching(self, work: str) -> Iterator[None]:
        """Say it if ``work``, which is done inside, compiles something.

        Args:
            work: Name of the work, such as ``training step``.
        """
        if not self.is_on:
            yield
            return
        # Imported here: it takes a second that those who compile nothing need not wait.
        from torch._dynamo.callback import callback_handler

        watch = _Watch(self, work)
        callback_handler.register_start_callback(watch.begin)
        callback_handler.register_end_callback(watch.end)
        try:
            yield
        finally:
            for callbacks, own in (
                (callback_handler.start_callbacks, watch.begin),
                (callback_handler.end_callbacks, watch.end),
            ):
                # A reset of the compiler forgets them.
                if own in callbacks:
                    callbacks.remove(own)
        watch.close()

    def file(self, work: str) -> Path:
        """Return where the times of ``work`` are kept."""
        name = (
            torch.cuda.get_device_name(self.device)
            if self.device.type == "cuda"
            else platform.processor() or platform.machine()
        )
        parts = (self.key, work, torch.__version__, name)
        digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
        return cache_folder() / "compile_times" / f"{digest}.json"


class _Watch:
    """What is compiled during one piece of work."""

    def __init__(self, notice: CompileNotice, work: str) -> None:
        self._notice, self._work = notice, work
        self._began = self._seconds = 0.0
        self._told = False

    def begin(self, _: object) -> None:
        """Take note that the compiler has begun, and say so the first time."""
        self._began = self._notice.clock()
        if not self._told:
            self._told = True
            before = _before(self._notice.file(self._work))
            _log.info(
                "compiling %s; this %s takes minutes%s", self._notice.what, self._work, before
            )

    def end(self, _: object) -> None:
        """Take note that the compiler has ended."""
        self._seconds += self._notice.clock() - self._began

    def close(self) -> None:
        """Say how long it took, if there was anything, and keep that."""
        if not self._told:
            return
        _log.info("compiled %s in %.0f s", self._notice.what, self._seconds)
        file = self._notice.file(self._work)
        longest = max(self._seconds, (_times(file) or {}).get("longest", 0.0))
        # A folder that cannot be written costs the next run its estimate.
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json(file, {"last": self._seconds, "longest": longest})


def _times(file: Path) -> dict[str, float] | None:
    try:
        return read_json(file, dict[str, float], ConfigError)
    except ConfigError:
        return None


def _before(file: Path) -> str:
    """Return how long it took before, as text."""
    times = _times(file)
    if times is None or not {"last", "longest"} <= times.keys():
        return ": it was not compiled on this machine before"
    longest = f", {times['longest']:.0f} s at most" if times["longest"] > times["last"] else ""
    return f" at first: {times['last']:.0f} s last time on this machine{longest}"
