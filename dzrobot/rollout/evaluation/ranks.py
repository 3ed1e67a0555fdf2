"""One evaluation by several processes, on one machine or many, started by torchrun.

They meet in the key-value store that torchrun opens (torch's TCPStore). The main process (rank 0)
holds the results folder and says which cases have no result yet. Every process claims one after
the other, in one atomic operation each, so that none is run twice; results and the files of an
episode go to the main process through the store, so that no file system need be shared. Every
process shows now and then that it lives: what one claimed that no longer does is claimed again.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar, Self
from uuid import uuid4

from pydantic import ConfigDict

from dzrobot import files, process
from dzrobot.documents import parse_json
from dzrobot.errors import ConfigError, ProtocolError
from dzrobot.rollout.evaluation.card import refuse_unlike
from dzrobot.rollout.footage import PREDICTION_FOLDER, VIDEO_FOLDER, prediction_files
from dzrobot.rollout.protocol import Count, EpisodeSpec
from dzrobot.rollout.queue import EnvironmentKey, WaitingCases
from dzrobot.rollout.records import ERROR_FOLDER, Record, storing

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

BEAT_S = 1.0
"""Seconds between two signs of life."""

LOST_AFTER_S = 30.0
"""Seconds without one after which a process counts as lost. A process that only was slow loses
nothing but time: of two results of one case, which are equal, the first is kept."""

PATIENCE_S = 600.0
"""Seconds that processes wait for each other at the start."""

POLL_S = 0.2
"""Seconds after which a process without work looks again."""

PART = 4 * 1024**2
"""Bytes of one value in the store, which takes up to 8 MiB."""

_STORED = "stored"
"""Value of a case whose record is on the disk."""

_LEFT = "left"
"""Last sign of life of a process that ends."""

_FOLDERS = (VIDEO_FOLDER, PREDICTION_FOLDER, ERROR_FOLDER)

Clock = Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class _Start:
    """What the main process says at the beginning of an evaluation."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    card: dict[str, Any]
    waiting: tuple[Count, ...]
    """Places of the cases without a result."""


@dataclass(frozen=True, kw_only=True)
class _Delivery:
    """One finished episode, on its way to the main process; its files follow."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    record: Record
    files: tuple[str, ...]
    """Paths below the results folder."""

    def __post_init__(self) -> None:
        for name in self.files:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or path.parts[0] not in _FOLDERS:
                raise ValueError(f"{name!r} is no file of an episode")


class _Mailbox:
    """The store, by short operations alone: threads share it, and none is to wait for another."""

    def __init__(self, store: "Store", prefix: str) -> None:
        self._store, self._prefix = store, prefix

    def below(self, name: str) -> "_Mailbox":
        """Return the part of the store whose keys begin with ``name``."""
        return _Mailbox(self._store, f"{self._prefix}/{name}")

    def read(self, key: str) -> bytes | None:
        """Return a value, None if there is none."""
        with _reachable():
            key = f"{self._prefix}/{key}"
            return self._store.get(key) if self._store.check([key]) else None

    def has(self, key: str) -> bool:
        """Return whether a value is there now; one that another process drops is not waited for."""
        with _reachable():
            return bool(self._store.check([f"{self._prefix}/{key}"]))

    def write(self, key: str, value: str | bytes) -> None:
        """Set a value; when this returns, every process sees it."""
        with _reachable():
            self._store.set(f"{self._prefix}/{key}", value)  # type: ignore[arg-type]
            # set() does not wait for an answer; what is asked after it does.
            self._store.check([f"{self._prefix}/{key}"])

    def swap(self, key: str, expected: str, value: str) -> str:
        """Set a value if the present one is ``expected``, "" for none; return the one then."""
        with _reachable():
            found = self._store.compare_set(f"{self._prefix}/{key}", expected, value)
        return found.decode()

    def send(self, key: str, content: bytes) -> None:
        """Set a value of any size."""
        count = -(-len(content) // PART)
        for number in range(count):
            self.write(f"{key}/{number}", content[number * PART : (number + 1) * PART])
        # Last: who sees it finds all parts.
        self.write(key, str(count))

    def receive(self, key: str) -> bytes | None:
        """Return what was sent, None if nothing was."""
        count = self.read(key)
        if count is None:
            return None
        parts = [self.read(f"{key}/{number}") for number in range(int(count))]
        return b"".join(part for part in parts if part is not None)

    def drop(self, key: str) -> None:
        """Forget what was sent: the store lies in the memory of one process."""
        count = self.read(key)
        with _reachable():
            for number in range(int(count or 0)):
                self._store.delete_key(f"{self._prefix}/{key}/{number}")
            self._store.delete_key(f"{self._prefix}/{key}")


class Ranks:
    """The processes of one launch, seen from one of them; a context manager.

    Args:
        store: Where they meet.
        rank: Number of this process; 0 is the main one.
        size: How many there are.
        session: Tells this launch from an earlier one that used the same store.
        clock: Seconds; what is lost is decided by it.
    """

    def __init__(
        self,
        store: "Store",
        rank: int,
        size: int,
        *,
        session: str = "",
        clock: Clock = time.monotonic,
    ) -> None:
        self.rank, self.size, self.clock = rank, size, clock
        self._mail = _Mailbox(store, f"dzrobot/{session}")
        self._seen: dict[int, tuple[bytes | None, float]] = {}
        self._called = 0
        self._over = threading.Event()
        self._beats: threading.Thread | None = None

    @property
    def is_main(self) -> bool:
        """Return whether this process keeps the results and speaks for all."""
        return self.rank == 0

    def __enter__(self) -> Self:
        self._beats = threading.Thread(target=self._beat, daemon=True, name="signs of life")
        self._beats.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with suppress(ProtocolError):
            if self.is_main:
                self._mail.write("end", "")
            if self.is_main and kind is None:
                self._mail.write("finished", "")
                # The store may live in this process; and who comes late is to see that it lives.
                while not all(self.is_lost(other) for other in range(1, self.size)):
                    time.sleep(POLL_S)
        self._over.set()
        if self._beats is not None:
            self._beats.join()
        with suppress(ProtocolError):
            self._mail.write(f"beat/{self.rank}", _LEFT)

    def call(self, job: str) -> None:
        """Say to the other processes what is evaluated next."""
        self._mail.write(f"job/{self._called}", job)
        self._called += 1

    def jobs(self) -> Iterator[str]:
        """Yield what the main process calls for, until it ends."""
        while True:
            job = self._mail.read(f"job/{self._called}")
            if job is not None:
                self._called += 1
                yield job.decode()
            elif self._mail.read("end") is not None or self.is_lost(0):
                return
            else:
                time.sleep(POLL_S)

    def is_lost(self, rank: int) -> bool:
        """Return whether a process has ended, or has given no sign of life for long."""
        beat, now = self._mail.read(f"beat/{rank}"), self.clock()
        if rank not in self._seen or self._seen[rank][0] != beat:
            self._seen[rank] = beat, now
        return beat == _LEFT.encode() or now - self._seen[rank][1] > LOST_AFTER_S

    def main_queue(
        self,
        card: Mapping[str, Any],
        cases: Sequence[EpisodeSpec],
        waiting: Sequence[EpisodeSpec],
        output: Path,
    ) -> "MainQueue":
        """Return the queue of the main process; the others can begin.

        Args:
            card: What the results depend on; refused by a process that would get others.
            cases: Every case, in order.
            waiting: Those without a result.
            output: The results folder, for the files of episodes that others run.
        """
        mail = self._mail.below(f"evaluation/{self._called}")
        places = {case.name: place for place, case in enumerate(cases)}
        start = {"card": card, "waiting": [places[case.name] for case in waiting]}
        mail.send("start", json.dumps(start).encode())
        return MainQueue(self, mail, waiting, output)

    def helper_queue(
        self, card: Mapping[str, Any], cases: Sequence[EpisodeSpec], folder: Path
    ) -> "HelperQueue | None":
        """Return the queue of another process once the main one has begun; None: it has ended.

        Args:
            card: What results of this process depend on.
            cases: Every case, in order.
            folder: Of this process; files of an episode lie there until the main one has them.

        Raises:
            ProtocolError: results of this process would be others than the main one's.
        """
        mail = self._mail.below(f"evaluation/{self._called}")
        while (sent := mail.receive("start")) is None:
            if self.is_lost(0):
                return None
            time.sleep(POLL_S)
        start = parse_json(sent, _Start, "what the main process says", ProtocolError)
        here, advice = f"process {self.rank}", "Start all with the same command and versions."
        refuse_unlike(start.card, card, "the main process", f"in {here}", advice)
        return HelperQueue(self, mail, [cases[place] for place in start.waiting], folder)

    def _beat(self) -> None:
        count = 0
        # Without the store, the others have ended: the next use of it raises.
        with suppress(ProtocolError):
            while not self._over.is_set():
                self._mail.write(f"beat/{self.rank}", str(count))
                count += 1
                self._over.wait(BEAT_S)


class _SharedQueue:
    """Cases of which every process claims one at a time."""

    poll_s: float | None = POLL_S

    def __init__(self, group: Ranks, mail: _Mailbox, waiting: Sequence[EpisodeSpec]) -> None:
        self._ranks, self._mail = group, mail
        self._free = WaitingCases(waiting)
        self._elsewhere: dict[str, EpisodeSpec] = {}
        self._next_look = 0.0

    def take(self, last: EnvironmentKey | None) -> EpisodeSpec | None:
        """Return a case that is claimed for this process; None: all are claimed by living ones."""
        while self._free:
            case = self._free.take(last)
            if self._claim(case, ""):
                return case
            self._elsewhere[case.name] = case
        if self._ranks.clock() < self._next_look:
            return None
        self._next_look = self._ranks.clock() + POLL_S
        return next(self._abandoned(), None)

    def _abandoned(self) -> Iterator[EpisodeSpec]:
        """Claim and yield what processes had claimed that are lost."""
        for name, case in list(self._elsewhere.items()):
            owner = (self._mail.read(f"case/{name}") or b"").decode()
            if owner == _STORED:
                del self._elsewhere[name]
            elif self._ranks.is_lost(int(owner)) and self._claim(case, owner):
                del self._elsewhere[name]
                yield case

    def _claim(self, case: EpisodeSpec, owner: str) -> bool:
        own = str(self._ranks.rank)
        return self._mail.swap(f"case/{case.name}", owner, own) == own


class MainQueue(_SharedQueue):
    """The queue of the process that keeps the results."""

    def __init__(
        self, group: Ranks, mail: _Mailbox, waiting: Sequence[EpisodeSpec], output: Path
    ) -> None:
        super().__init__(group, mail, waiting)
        self._output = output
        self._left = {case.name for case in waiting}
        self._received = dict.fromkeys(range(1, group.size), 0)
        self._next_arrival = 0.0

    def is_open(self) -> bool:
        """Return whether a case has no result yet."""
        return bool(self._left)

    def arrived(self) -> Iterator[Record]:
        """Yield what others have finished, its files in the results folder."""
        if self._ranks.clock() < self._next_arrival:
            return
        self._next_arrival = self._ranks.clock() + POLL_S
        for rank in self._received:
            while (sent := self._mail.receive(_parcel(rank, self._received[rank]))) is not None:
                yield from self._unpacked(rank, sent)
                self._mail.drop(_parcel(rank, self._received[rank]))
                self._received[rank] += 1

    def conclude(self, record: Record) -> None:
        """Note that the record of a case is on the disk."""
        self._left.discard(record.case)
        self._mail.write(f"case/{record.case}", _STORED)

    def close(self) -> None:
        """Let the others stop: nothing more is wanted."""
        with suppress(ProtocolError):
            self._mail.write("over", "")

    def _unpacked(self, rank: int, sent: bytes) -> Iterator[Record]:
        parcel = parse_json(sent, _Delivery, f"what process {rank} delivers", ProtocolError)
        wanted = parcel.record.case in self._left
        for number, name in enumerate(parcel.files):
            key = f"{_parcel(rank, self._received[rank])}/file/{number}"
            if wanted:
                with storing(self._output):
                    files.write_bytes(self._output / name, self._mail.receive(key) or b"")
            self._mail.drop(key)
        if wanted:
            yield parcel.record
            self.conclude(parcel.record)


class HelperQueue(_SharedQueue):
    """The queue of a process whose results another one keeps."""

    def __init__(
        self, group: Ranks, mail: _Mailbox, waiting: Sequence[EpisodeSpec], folder: Path
    ) -> None:
        super().__init__(group, mail, waiting)
        self._folder = folder
        self._sent = 0
        self._next_question, self._open = 0.0, True

    def is_open(self) -> bool:
        """Return whether the main process wants more."""
        if self._open and self._ranks.clock() >= self._next_question:
            self._next_question = self._ranks.clock() + POLL_S
            self._open = self._mail.read("over") is None and not self._ranks.is_lost(0)
        return self._open

    def arrived(self) -> Iterator[Record]:
        """Yield nothing: what others finish goes to the main process."""
        yield from ()

    def conclude(self, record: Record) -> None:
        """Send a record and its files to the main process, once it has taken the one before."""
        # Not read: the main process may drop it between a question and the reading.
        while self._sent and self._mail.has(_parcel(self._ranks.rank, self._sent - 1)):
            if not self.is_open():
                return
            time.sleep(POLL_S)
        key = _parcel(self._ranks.rank, self._sent)
        paths = [path for path in _files_of(self._folder, record) if path.is_file()]
        names = [path.relative_to(self._folder).as_posix() for path in paths]
        for number, path in enumerate(paths):
            self._mail.send(f"{key}/file/{number}", path.read_bytes())
            path.unlink()
        parcel = {"record": asdict(record), "files": names}
        self._mail.send(key, json.dumps(parcel).encode())
        self._sent += 1


def join() -> Ranks:
    """Return the processes that were started together with this one.

    Raises:
        ConfigError: the environment does not say where they meet.
        ProtocolError: they do not find each other.
    """
    from torch.distributed.rendezvous import rendezvous

    process.end_with_launcher()
    size, rank = process.world_size(), process.rank()
    try:
        with _reachable():
            store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=PATIENCE_S)))
    except ValueError as error:
        raise ConfigError(
            f"WORLD_SIZE={size} says that processes were started together, but not where they "
            f"meet: {error}. Start them with torchrun, or unset WORLD_SIZE"
        ) from error
    return Ranks(store, rank, size, session=_session(_Mailbox(store, "dzrobot"), rank))


def _session(mail: _Mailbox, rank: int) -> str:
    """Return the name of this launch: torchrun keeps the store when it starts processes again.

    The main process makes one up; the others take it once they see that the main one lives, or
    that everything was done before they came.
    """
    if rank == 0:
        name = uuid4().hex
        mail.write("session", name)
        return name
    seen: dict[str, bytes] = {}
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        name = (mail.read("session") or b"").decode()
        beat = mail.read(f"{name}/beat/0")
        lives = beat is not None and seen.setdefault(name, beat) != beat
        if lives or mail.read(f"{name}/finished") is not None:
            return name
        time.sleep(POLL_S)
    raise ProtocolError(
        f"process {rank} waited {PATIENCE_S:.0f} s for the main one (rank 0); start all of them "
        "together"
    )


def _parcel(rank: int, number: int) -> str:
    return f"parcel/{rank}/{number}"


def _files_of(folder: Path, record: Record) -> tuple[Path, ...]:
    """Return where the files of an episode lie, those included that it may have."""
    video = () if record.video is None else (folder / record.video,)
    error = folder / ERROR_FOLDER / f"{record.case}.txt"
    return (*video, *prediction_files(folder, record.case), error)


@contextmanager
def _reachable() -> Iterator[None]:
    """Turn the end of the store into one message."""
    from torch.distributed import DistError

    try:
        yield
    except DistError as error:
        reason = str(error).partition("\n")[0]
        raise ProtocolError(
            f"the processes of this run do not reach each other any more ({reason}); the same "
            "command continues where it stopped"
        ) from error
