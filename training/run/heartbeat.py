"""A heartbeat per process: what each one does, so that a run that hangs is found and named.

Every process writes what it does into a file of the run's folder; the main one reads them all, and
the second one watches over the main one. Processes go through a step together, so a run hangs when
none of them has gone on for minutes. What takes long by nature (compiling, encoding, a checkpoint,
an export, an evaluation) is marked as such, and while one process does it, no time is too long.
"""

import faulthandler
import json
import logging
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from dzrobot import files
from dzrobot.documents import read_json
from dzrobot.errors import DzrobotError, ProtocolError

_log = logging.getLogger(__name__)

PERIOD_S = 10.0
"""Between two beats."""

HUNG = 75
"""Exit code of a run that hung: a temporary failure, as sysexits.h has it."""

FOLDER = "heartbeat"
"""In the run's folder: a file per process, and what became of the last one that hung."""

HANG_FILE = "hang.txt"

_SLOWER = 10
"""How many times longer than ever before something may take before it counts as a hang."""

_TOLD_S = 300.0
"""Between two remarks about what takes long by nature."""

_ASLEEP_S = 60.0
"""Without looking, for so long: this process was stopped itself, perhaps the whole job was."""

Clock = Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class Beat:
    """What one process does."""

    launch: str
    rank: int
    host: str
    pid: int
    step: int
    """Optimizer step that it works on."""

    phase: str
    is_long: bool
    """Whether that may take any time."""

    gone_on: int
    """How many phases of its steps it has begun: equal in processes that are at the same place."""

    changes: int
    """The same, with what took long by nature."""

    written: int
    """How many beats it has written."""

    @property
    def place(self) -> str:
        """For messages: which process it is."""
        return f"rank {self.rank} ({self.host}, process {self.pid})"


@dataclass(frozen=True)
class Member:
    """One process of a run."""

    launch: str = ""
    """Name of the run, the same in all its processes; files of an earlier one are left out."""

    rank: int = 0
    size: int = 1
    """How many processes there are."""

    @property
    def watched(self) -> tuple[int, ...]:
        """Ranks that it watches: the main one all, the second one the main one."""
        return tuple(range(self.size)) if self.rank == 0 else (0,) if self.rank == 1 else ()


@dataclass
class _Change:
    """The last beat of a process, and when it was seen to go on, and to be alive."""

    beat: Beat
    moved: float
    seen: float


@dataclass
class Watch:
    """Judges the beats of all processes.

    Args:
        member: Who watches.
        patience_s: Without any going on, longer is a hang; ten times the longest so far is not.
        clock: Seconds.
    """

    member: Member
    patience_s: float
    clock: Clock

    _changed: dict[int, _Change] = field(default_factory=dict, init=False)
    """By rank."""

    _slowest: float = field(default=0.0, init=False)
    _told: float = field(default=-_TOLD_S, init=False)
    _looked: float = field(default=0.0, init=False)

    def look(self, beats: dict[int, Beat]) -> str:
        """Return what hangs, empty while nothing does.

        Args:
            beats: The newest of each process, by rank.
        """
        now = self.clock()
        if now - self._looked > _ASLEEP_S:
            self._changed.clear()
        self._looked = now
        for beat in beats.values():
            self._note(beat, now)
        known = [beats[rank] for rank in self.member.watched if rank in beats]
        # What a process does that has not been heard of yet is not known.
        if not known or len(known) < len(self.member.watched):
            return ""
        still = {beat.rank: now - self._changed[beat.rank].moved for beat in known}
        if busy := [beat for beat in known if beat.is_long]:
            self._tell(busy, still, now)
            for beat in known:
                # Waiting for those is not slowness of its own.
                if not beat.is_long:
                    self._changed[beat.rank].moved = now
            return ""
        patience = max(self.patience_s, _SLOWER * self._slowest)
        silent = [beat for beat in known if now - self._changed[beat.rank].seen > patience]
        if silent:
            return f"no sign of life for {_minutes(patience)}: " + "; ".join(
                f"{beat.place}, last seen in step {beat.step}: {beat.phase}" for beat in silent
            )
        # Only the main process knows whether any of the others is at something long.
        if self.member.rank != 0 or min(still.values()) <= patience:
            return ""
        return f"no process has gone on for {_minutes(patience)}: {_where(known)}"

    def _note(self, beat: Beat, now: float) -> None:
        last = self._changed.get(beat.rank)
        if last is None:
            self._changed[beat.rank] = _Change(beat, moved=now, seen=now)
            return
        if beat.changes != last.beat.changes:
            if not last.beat.is_long:
                self._slowest = max(self._slowest, now - last.moved)
            last.moved = now
        if beat.written != last.beat.written:
            last.seen = now
        last.beat = beat

    def _tell(self, busy: list[Beat], still: dict[int, float], now: float) -> None:
        beat = max(busy, key=lambda one: still[one.rank])
        if still[beat.rank] < _TOLD_S or now - self._told < _TOLD_S:
            return
        self._told = now
        _log.info(
            "%s has been at this for %s: %s; that may take long, and the others wait",
            beat.place, _minutes(still[beat.rank]), beat.phase,
        )  # fmt: skip


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min"


def _where(beats: list[Beat]) -> str:
    """Return what each process does; those that are behind the others come first."""
    least = min(beat.gone_on for beat in beats)
    behind = [beat for beat in beats if beat.gone_on == least]
    doing = Counter((beat.step, beat.phase) for beat in beats if beat.gone_on > least)
    first = "; ".join(f"{beat.place} in step {beat.step}: {beat.phase}" for beat in behind[:8])
    if not doing:
        return f"all are at the same place, {first}"
    others = ", ".join(f"{count} in step {n}: {phase}" for (n, phase), count in doing.items())
    return f"behind is {first}; the others: {others}"


class Heartbeat:
    """The beats of this process; see the module.

    Args:
        folder: Of the run. None: nothing is written or watched.
        member: Which process this is.
        patience_s: See :class:`Watch`; None: a hang is told, and the run is not ended.
        clock: Seconds.
    """

    def __init__(
        self,
        folder: Path | None = None,
        member: Member | None = None,
        *,
        patience_s: float | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._folder = None if folder is None else folder / FOLDER
        self._ends = patience_s is not None
        member = member or Member()
        self._watch = Watch(member, patience_s or 300.0, clock)
        self._lock = threading.Lock()
        self._beat = Beat(
            launch=member.launch, rank=member.rank, host=socket.gethostname(), pid=os.getpid(),
            step=0, phase="loading and encoding", is_long=True, gone_on=0, changes=0, written=0,
        )  # fmt: skip
        self._over = threading.Event()
        self.found = ""
        """What hung; empty while nothing does."""

    def at(self, phase: str, step: int | None = None, *, is_long: bool = False) -> None:
        """Say that this process goes on to ``phase`` of ``step``; None: of the same step."""
        with self._lock:
            self._beat = replace(
                self._beat, phase=phase, is_long=is_long, gone_on=self._beat.gone_on + 1,
                changes=self._beat.changes + 1, step=self._beat.step if step is None else step,
            )  # fmt: skip

    @contextmanager
    def long(self, phase: str) -> Iterator[None]:
        """Mark the block as what may take any time."""
        before = self._aside(phase, is_long=True)
        try:
            yield
        finally:
            self._aside(before.phase, is_long=before.is_long)

    def _aside(self, phase: str, *, is_long: bool) -> Beat:
        """Go to ``phase``, which is none of a step's; return what this process was at."""
        with self._lock:
            before = self._beat
            self._beat = replace(
                before, phase=phase, is_long=is_long, changes=before.changes + 1
            )  # fmt: skip
            return before

    def tick(self) -> str:
        """Write a beat and look at the others'; return what hangs, empty while nothing does."""
        if self._folder is None:
            return ""
        with self._lock:
            self._beat = replace(self._beat, written=self._beat.written + 1)
        with suppress(OSError):
            self._write(self._folder / f"rank_{self._beat.rank}.json")
        said = self._folder / HANG_FILE
        with suppress(OSError):
            launch, _, found = said.read_text(encoding="utf-8").partition("\n")
            if launch == self._beat.launch:
                self.found = self.found or found
        if not self.found and (found := self._watch.look(self._read())):
            self.found = found
            _log.error("%s", found)
            if self._ends:
                with suppress(OSError):
                    files.write_text(said, f"{self._beat.launch}\n{found}")
        return self.found

    def _write(self, path: Path) -> None:
        """Replace the file in one step; unlike results, it need not outlive the machine."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + files.TEMPORARY)
        temporary.write_text(json.dumps(asdict(self._beat)), encoding="utf-8")
        temporary.replace(path)

    def _read(self) -> dict[int, Beat]:
        beats = {}
        for rank in self._watch.member.watched:
            with suppress(DzrobotError, OSError):
                path = Path(self._folder or "", f"rank_{rank}.json")
                beat = read_json(path, Beat, ProtocolError)
                if beat.launch == self._beat.launch:
                    beats[rank] = beat
        return beats

    @contextmanager
    def running(self, *, compiles: bool = False) -> Iterator[None]:
        """Beat in the background during the block; a hang ends this process with :data:`HUNG`.

        Args:
            compiles: Whether torch compiles something in it, which may take any time.
        """
        if self._folder is None:
            yield
            return
        thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        thread.start()
        try:
            with _compiling_is_long(self) if compiles else nullcontext():
                yield
        finally:
            self._over.set()
            thread.join()

    def _run(self) -> None:
        while not self._over.wait(PERIOD_S):
            found = self.tick()
            if found and self._ends:
                self._end(found)

    def _end(self, found: str) -> None:
        """Write down where every thread of this process is, and end it."""
        assert self._folder is not None
        stacks = self._folder / f"rank_{self._beat.rank}.stacks.txt"
        with suppress(OSError), stacks.open("w", encoding="utf-8") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        sys.stderr.write(
            f"{self._beat.place} ends, because the run hangs: {found}. {stacks} says where it was. "
            "The last checkpoint is intact; runner.resume_dir=auto resumes from it\n"
        )
        sys.stderr.flush()
        logging.shutdown()
        os._exit(HUNG)


@contextmanager
def _compiling_is_long(heartbeat: Heartbeat) -> Iterator[None]:
    """Mark what torch compiles in the block, whenever it does."""
    # Imported here: it takes a second that those who compile nothing need not wait.
    from torch._dynamo.callback import callback_handler

    before: list[Beat] = []

    def begin(_: object) -> None:
        before.append(heartbeat._aside("compiling", is_long=True))

    def end(_: object) -> None:
        if before:
            was = before.pop()
            heartbeat._aside(was.phase, is_long=was.is_long)

    callback_handler.register_start_callback(begin)
    callback_handler.register_end_callback(end)
    try:
        yield
    finally:
        # A reset of the compiler forgets them.
        with suppress(ValueError):
            callback_handler.start_callbacks.remove(begin)
        with suppress(ValueError):
            callback_handler.end_callbacks.remove(end)
