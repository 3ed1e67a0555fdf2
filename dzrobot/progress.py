"""What a command is busy with, how far and how long still: a terminal sees it move.

A log gets lines.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

PATIENCE_S = 10.0
"""Seconds after which a log says that something is waited for."""

HINT_S = 8.0
"""Seconds after which it is said why a wait may be long."""

MOVES_HZ = 4.0
"""Times per second that a terminal is drawn; drawing takes time from the work."""

EVERY_S = 30.0
"""Seconds between lines of a log."""

Clock = Callable[[], float]


class Show(Protocol):
    """Takes how far the work is."""

    def __call__(self, done: int, total: int, text: str | None = None) -> None:
        """Show ``done`` of ``total``, with ``text`` instead of the work's name."""
        ...


class TimeLeft:
    """Estimates the time left; what was done before the first report does not count as speed."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._first: tuple[float, int] | None = None

    def estimate(self, done: int, total: int) -> str:
        """Return ``h:mm:ss left``, or how long since the first report while nothing was done."""
        now = self._clock()
        if self._first is None:
            self._first = (now, done)
        began, before = self._first
        if done <= before:
            return f"{span(now - began)} so far"
        return f"{span((now - began) * (total - done) / (done - before))} left"


@dataclass(kw_only=True)
class Lines:
    """What a log gets of one piece of work: lines, so many seconds apart."""

    what: str
    console: Console
    first: float = EVERY_S
    """Seconds until the first line; shorter work has none."""

    every: float = EVERY_S
    """Seconds between lines."""

    hint: str = ""
    """Why the work may take long, told with the first line after `HINT_S`."""

    clock: Clock = time.monotonic

    def __post_init__(self) -> None:
        self._began, self._left = self.clock(), TimeLeft(self.clock)
        self._due = self._began + self.first
        self._text = self.what
        self._far: tuple[int, int] | None = None

    def show(self, done: int, total: int, text: str | None = None) -> None:
        """Take how far the work is."""
        self._text = text or self.what
        self._far = (done, total)
        # What was done before the first report does not count as speed.
        self._left.estimate(done, total)
        self.beat()

    def beat(self) -> None:
        """Write a line if one is due."""
        now = self.clock()
        if now < self._due:
            return
        self._due = now + self.every
        line = f"{self._text}: {span(now - self._began)} so far"
        if self._far is not None:
            done, total = self._far
            line = f"{self._text}: {done} of {total}, {self._left.estimate(done, total)}"
        if self.hint and now - self._began >= HINT_S:
            line, self.hint = f"{line} ({self.hint})", ""
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def waiting(what: str, hint: str = "", console: Console | None = None) -> Iterator[None]:
    """Say what is being loaded, compiled or waited for while the block runs, with the time so far.

    A terminal shows it at once, a log after `PATIENCE_S`. Nothing is printed within the block.

    Args:
        what: Such as ``loading the policy``.
        hint: Why it may take long, told after `HINT_S`.
        console: Where to; standard error by default.
    """
    console = console or Console(stderr=True)
    if console.is_terminal:
        with _moving(console, what, hint):
            yield
        return
    with _beating(Lines(what=what, console=console, first=PATIENCE_S, hint=hint)):
        yield


@contextmanager
def progress_bar(
    what: str, console: Console | None = None, every: float = EVERY_S, hint: str = ""
) -> Iterator[Show]:
    """Yield what shows progress while the block runs.

    Args:
        what: Name of the work.
        console: Where to; standard error by default. If it is not a terminal it gets lines.
        every: Seconds between lines; shorter work has none.
        hint: Why the first piece may take long, told after `HINT_S`.
    """
    console = console or Console(stderr=True)
    if not console.is_terminal:
        lines = Lines(what=what, console=console, first=every, every=every, hint=hint)
        with _beating(lines):
            yield lines.show
        return
    with _moving(console, what, hint) as (bar, task):
        is_known = False

        def show(done: int, total: int, text: str | None = None) -> None:
            nonlocal is_known
            if not is_known:
                # What was done before does not count as speed.
                bar.reset(task, total=total, completed=done, hint=hint, before=done)
                is_known = True
            bar.update(task, description=text or what, total=total, completed=done)

        yield show


_bars: dict[int, Progress] = {}
"""What moves on a terminal, by the identity of its file: work within work adds a line to it."""


@contextmanager
def _moving(console: Console, what: str, hint: str) -> Iterator[tuple[Progress, TaskID]]:
    place = id(console.file)
    if (outer := _bars.get(place)) is not None:
        task = outer.add_task(what, total=None, hint=hint, before=0)
        try:
            yield outer, task
        finally:
            outer.remove_task(task)
        return
    bar = _new_bar(console)
    task = bar.add_task(what, total=None, hint=hint, before=0)
    _bars[place] = bar
    try:
        with bar:
            yield bar, task
    finally:
        del _bars[place]


def _new_bar(console: Console) -> Progress:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False, table_column=Column(overflow="fold")),
        _OfKnownWork(BarColumn()),
        _OfKnownWork(MofNCompleteColumn()),
        TimeElapsedColumn(),
        _OfKnownWork(TimeRemainingColumn()),
        _Hint(),
    )
    # What is printed goes where it went before, into a file too.
    return Progress(
        *columns, console=console, transient=True, redirect_stdout=sys.stdout.isatty(),
        refresh_per_second=MOVES_HZ,
    )  # fmt: skip


class _OfKnownWork(ProgressColumn):
    """A column of work whose size is known."""

    def __init__(self, inner: ProgressColumn) -> None:
        super().__init__()
        self._inner = inner

    def render(self, task: Task) -> Text:
        """Return the column; nothing of work whose size is not known, nor of a time that is not."""
        unknown = isinstance(self._inner, TimeRemainingColumn) and task.time_remaining is None
        nothing = task.total is None or unknown
        return Text() if nothing else self._inner(task)  # type: ignore[return-value]


class _Hint(ProgressColumn):
    """Why nothing has been finished yet."""

    def render(self, task: Task) -> Text:
        """Return the hint of a task that is slow to begin."""
        begun = task.completed > task.fields["before"]
        slow = not begun and (task.elapsed or 0) >= HINT_S
        return Text(task.fields["hint"] if slow else "")


@contextmanager
def _beating(lines: Lines) -> Iterator[None]:
    """Ask ``lines`` every second whether one is due."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(1.0):
            lines.beat()

    thread = threading.Thread(target=beat, daemon=True, name="progress")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def span(seconds: float) -> str:
    """Return seconds as ``h:mm:ss``."""
    return str(timedelta(seconds=round(seconds)))
