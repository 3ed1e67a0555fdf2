"""How far and how long still: a moving line on a terminal, a plain one now and then elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Show(Protocol):
    """Takes how far the work is."""

    def __call__(self, done: int, total: int, text: str | None = None) -> None:
        """Show ``done`` of ``total``, with ``text`` instead of the work's name."""
        ...


class TimeLeft:
    """Estimates the time left; what was done before the first report does not count as speed."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first: tuple[float, int] | None = None

    def estimate(self, done: int, total: int) -> str:
        """Return ``h:mm:ss``, or ``unknown`` while nothing was done since the first report."""
        now = self._clock()
        if self._first is None:
            self._first = (now, done)
        began, before = self._first
        if done <= before:
            return "unknown"
        return str(timedelta(seconds=round((now - began) * (total - done) / (done - before))))


@contextmanager
def progress_bar(what: str, console: Console | None = None, every: float = 30.0) -> Iterator[Show]:
    """Yield what shows progress while the block runs.

    Args:
        what: Name of the work.
        console: Where to; standard error by default. If it is not a terminal it gets lines.
        every: Seconds between lines; shorter work has none.
    """
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield _lines(what, console, every)
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)

        def show(done: int, total: int, text: str | None = None) -> None:
            if bar.tasks[task].total is None:
                # What was done before does not count as speed.
                bar.reset(task, total=total, completed=done)
            bar.update(task, description=text or what, total=total, completed=done)

        yield show


def _lines(what: str, console: Console, every: float) -> Show:
    left = TimeLeft()
    last = time.monotonic()

    def show(done: int, total: int, text: str | None = None) -> None:
        nonlocal last
        estimate = left.estimate(done, total)
        if time.monotonic() - last < every:
            return
        last = time.monotonic()
        line = f"{text or what}: {done} of {total}, {estimate} left"
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    return show
