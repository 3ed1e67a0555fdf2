"""One evaluation on a Ray cluster: actors with a policy and simulators, one driver with the folder.

An actor is what an evaluation is on one machine: a policy, on a GPU of its own if it needs one, and
the workers that step its environments. The driver hands out cases as actors have room for them, and
writes what comes back: machines share no file system. Episodes of an actor that is lost run
elsewhere.
"""

import logging
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from pathlib import Path
from threading import Lock
from typing import Any

from dzrobot import files
from dzrobot.cluster import Cluster, Needs, own_error
from dzrobot.errors import ProtocolError, printable
from dzrobot.policies.dreamzero.options import chosen_device
from dzrobot.rollout.evaluation.card import refuse_other_code, refuse_unlike
from dzrobot.rollout.evaluation.planning import EvaluationRequest, Opened, RunOptions, prepare
from dzrobot.rollout.evaluation.workers import WORKER_DIED, pool_opener
from dzrobot.rollout.policy_spec import PolicySpec
from dzrobot.rollout.policy_use import RUNS_FILE
from dzrobot.rollout.predictions import prediction_files, undecoded_files
from dzrobot.rollout.protocol import EnvironmentKey, EpisodeSpec, environment_key
from dzrobot.rollout.queue import LocalQueue
from dzrobot.rollout.records import ERROR_FOLDER, LOCK_FILE, Record, storing

_log = logging.getLogger(__name__)

PATIENCE_S = 600.0
"""Seconds after which a run ends that has no actor, or none that answers."""

FAREWELL_S = 60.0
"""Seconds that actors have at the end to say how busy they were."""

MOST_RESTARTS = 20
"""How often Ray starts an actor again that was lost."""

MOST_LOSSES = 3
"""How often a case may lose the process that runs it; the next loss is the case's fault."""

_FOLDER = "dzrobot-actor-"
"""Beginning of the names of the actors' folders for what is not sent yet."""

Variables = Sequence[Mapping[str, str]]
"""Environment variables of simulators, in turn."""


@dataclass(frozen=True, kw_only=True)
class _Delivery:
    """One finished episode."""

    record: Record
    files: Mapping[str, bytes]
    """By path below the results folder."""

    is_lost: bool
    """Whether a process died that ran it, so that it has no result."""


class _FedQueue:
    """Cases as they come from the driver, for the one process that runs them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reader, self._writer = Pipe(duplex=False)
        self._lock = Lock()
        self._results: dict[str, Future[_Delivery]] = {}
        self._is_open = True

    @property
    def news(self) -> tuple[Any, ...]:
        return (self._reader,)

    def is_open(self) -> bool:
        return self._is_open

    def put(self, case: EpisodeSpec) -> "Future[_Delivery]":
        """Let ``case`` run, unless it does already; return where its result will be."""
        with self._lock:
            if case.name not in self._results:
                self._results[case.name] = Future()
                self._writer.send(case)
            return self._results[case.name]

    def close(self) -> None:
        with self._lock:
            self._writer.close()

    def take(self, last: EnvironmentKey | None) -> EpisodeSpec | None:
        if not self._reader.poll():
            return None
        try:
            case: EpisodeSpec = self._reader.recv()
        except EOFError:
            self._is_open = False
            return None
        return case

    def conclude(self, record: Record) -> None:
        paths = [path for path in _files_of(self._folder, record) if path.is_file()]
        contents = {path.relative_to(self._folder).as_posix(): path.read_bytes() for path in paths}
        for path in paths:
            path.unlink()
        with self._lock:
            result = self._results.pop(record.case)
        is_lost = record.error is not None and record.error.startswith(WORKER_DIED)
        result.set_result(_Delivery(record=record, files=contents, is_lost=is_lost))


@contextmanager
def own_folder(root: Path) -> Iterator[Path]:
    """Yield a new folder in ``root`` that is removed at the end, or by the next one who needs one.

    Ray kills actors. A process that was killed holds no lock, so what it left is known by that.
    """
    taken = ProtocolError("in use by another actor")
    for left in root.glob(f"{_FOLDER}*"):
        if left.is_symlink():
            continue
        with suppress(ProtocolError, OSError), files.locked(left / LOCK_FILE, taken):
            shutil.rmtree(left, ignore_errors=True)
    # Unlocked, it has another name, so it is not taken for one that was left.
    new = Path(tempfile.mkdtemp(prefix="new-", dir=root))
    with files.locked(new / LOCK_FILE, taken):
        folder = new.rename(root / f"{_FOLDER}{new.name.removeprefix('new-')}")
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


class EvaluationActor:
    """A policy and its simulators, in a process that Ray starts and starts again.

    Args:
        request: What is evaluated.
        options: How it is run.
        place: Current folder of the driver, where relative paths lead, if it is here too.
    """

    def __init__(self, request: EvaluationRequest, options: RunOptions, place: Path) -> None:
        if place.is_dir():
            os.chdir(place)
        self._request = request
        self._options = replace(options, variables=_own_variables(options.variables))
        if self._options.variables and not options.workers:
            os.environ.update(self._options.variables[0])
        self._folder_lock = ExitStack()
        self._folder = self._folder_lock.enter_context(own_folder(Path(tempfile.gettempdir())))
        self._queue = _FedQueue(self._folder)
        self._preparing = Lock()
        self._prepared: Opened | None = None
        # The kernel kills workers that outlive the thread which started them: this one stays.
        self._thread = ThreadPoolExecutor(1)
        self._running: Future[None] | None = None

    def prepare(self) -> Opened:
        """Load all that is needed, once; return it without the policy itself."""
        with self._preparing:
            if self._prepared is None:
                prepared = prepare(self._request)
                opener = pool_opener(prepared, self._options)
                self._running = self._thread.submit(self._run, opener)
                self._prepared = prepared.elsewhere()
            return self._prepared

    def play(self, case: EpisodeSpec) -> _Delivery | None:
        """Run ``case``; return its record and files, or None if Ray has started this again.

        The driver may not know that yet; only a prepared actor has been compared with the others.
        """
        if self._running is None:
            return None
        result = self._queue.put(case)
        both: tuple[Future[Any], ...] = (result, self._running)
        wait(both, return_when=FIRST_COMPLETED)
        if not result.done():
            self._running.result()
        return result.result()

    def finish(self) -> bytes:
        """Close all; return the lines of how busy the policy was."""
        self._queue.close()
        if self._running is not None:
            self._running.result()
        uses = self._folder / RUNS_FILE
        content = uses.read_bytes() if uses.exists() else b""
        self._folder_lock.close()
        return content

    def _run(self, opener: Any) -> None:
        with opener(self._folder) as pool:
            for _ in pool.run(self._queue):
                pass


@dataclass(eq=False)
class _Seat:
    """One actor as the driver sees it."""

    handle: Any
    is_ready: bool = False
    running: int = 0
    last_key: EnvironmentKey | None = None


class ActorGroup:
    """The actors of one evaluation, which run its episodes.

    Args:
        cluster: Where they run.
        request: What is evaluated.
        options: How; ``workers`` are those of each actor.

    Raises:
        DzrobotError: something is unknown, missing, or does not fit together; or no actor starts.
    """

    def __init__(self, cluster: Cluster, request: EvaluationRequest, options: RunOptions) -> None:
        self._ray = cluster.ray
        self._output = Path()
        self._capacity = max(1, options.workers)
        needs = needs_of(request.policy, options.workers)
        # Threads: one for each case, and those of a case that was given out twice.
        kind = cluster.remote(
            EvaluationActor,
            needs,
            max_concurrency=2 * self._capacity + 2,
            max_restarts=MOST_RESTARTS,
            scheduling_strategy="SPREAD",
        )
        own = RunOptions(
            workers=options.workers,
            videos=options.videos,
            predictions=options.predictions,
            batch_window_s=options.batch_window_s,
            variables=options.variables,
        )
        self._seats = [
            _Seat(kind.remote(request, own, Path.cwd())) for _ in range(cluster.room(needs))
        ]
        self._pending: dict[Any, tuple[_Seat, EpisodeSpec | None]] = {}
        for seat in self._seats:
            self._call_ready(seat)
        self._first: Opened | None = None
        while self._first is None:
            assert not list(self._arrived()), "no case was given out"

    @property
    def opened(self) -> Opened:
        """What is evaluated, as the first actor has opened it; without the policy."""
        assert self._first is not None, "waited for"
        return self._first

    @contextmanager
    def engine(self, output: Path) -> Iterator["ActorGroup"]:
        """Yield this as the engine whose files go to ``output``; in the end, the actors end."""
        self._output = output
        try:
            yield self
            self._finish()
        finally:
            for seat in self._seats:
                self._ray.kill(seat.handle)

    def run(self, queue: LocalQueue) -> Iterator[Record]:
        """Yield the record of every case as it finishes."""
        losses: Counter[str] = Counter()
        while queue.is_open():
            self._hand_out(queue)
            for case, answer in self._arrived():
                if isinstance(answer, str):
                    answer = _Delivery(record=Record.failed(case, answer), files={}, is_lost=True)
                if answer.is_lost and losses[case.name] < MOST_LOSSES:
                    losses[case.name] += 1
                    queue.put_back(case)
                    continue
                with storing(self._output):
                    for name, content in answer.files.items():
                        files.write_bytes(self._output / name, content)
                yield answer.record
                queue.conclude(answer.record)

    def _hand_out(self, queue: LocalQueue) -> None:
        """Give a case to every actor that has room, the emptiest first."""
        while free := [s for s in self._seats if s.is_ready and s.running < self._capacity]:
            seat = min(free, key=lambda one: one.running)
            case = queue.take(seat.last_key)
            if case is None:
                return
            seat.running += 1
            seat.last_key = environment_key(case)
            self._pending[seat.handle.play.remote(case)] = seat, case

    def _arrived(self) -> Iterator[tuple[EpisodeSpec, "_Delivery | str"]]:
        """Wait for answers; yield for each case what came back, or why its actor was lost.

        Raises:
            ProtocolError: nothing comes any more.
        """
        refs = list(self._pending)
        some, _ = self._ray.wait(refs, timeout=PATIENCE_S) if refs else ([], [])
        if not some and not any(case for _, case in self._pending.values()):
            raise ProtocolError(
                f"no actor has started for {PATIENCE_S:.0f} s: others occupy the Ray cluster, its "
                "machines are gone, or actors end as soon as they start, out of memory for example "
                "(`ray status` and the warnings above say more); the same command continues"
            )
        ready, _ = self._ray.wait(refs, num_returns=len(refs), timeout=0)
        for ref in ready:
            seat, case = self._pending.pop(ref)
            answer = self._answer(ref)
            if case is not None:
                seat.running -= 1
                answer = "it was started again" if answer is None else answer
                if isinstance(answer, str) and seat.is_ready:
                    _log.warning("lost an actor, which Ray starts again: %s", answer)
                    self._call_ready(seat)
                yield case, answer
            elif isinstance(answer, str):
                # It stays closed: Ray has started it as often as it may.
                _log.warning("lost an actor for good: %s", answer)
            else:
                self._admit(seat, answer)

    def _answer(self, ref: Any) -> Any:
        """Return what an actor answered, or, as text, how it was lost."""
        errors = self._ray.exceptions
        try:
            return self._ray.get(ref)
        except errors.RayTaskError as error:
            raise own_error(error) from error
        except errors.RayError as error:
            return printable(f"{type(error).__name__}: {error}", 300)

    def _call_ready(self, seat: _Seat) -> None:
        """Ask an actor to prepare; Ray waits until it has started, here or elsewhere."""
        seat.is_ready = False
        asked = seat.handle.prepare.options(max_task_retries=-1).remote()
        self._pending[asked] = seat, None

    def _admit(self, seat: _Seat, prepared: Opened) -> None:
        """Let a prepared actor run cases.

        Raises:
            ProtocolError: its results would be others than those of the first one.
        """
        if self._first is None:
            self._first = prepared
        both = (self._first.card, prepared.card, "one actor", "in another")
        refuse_unlike(*both, "Install the same versions on all machines.")
        refuse_other_code(*both, "Install the same code on all machines.")
        seat.is_ready = True

    def _finish(self) -> None:
        """Keep how busy the policies were; of an actor that does not say it in time, nothing."""
        asked = [seat.handle.finish.remote() for seat in self._seats if seat.is_ready]
        told, _ = self._ray.wait(asked, num_returns=len(asked), timeout=FAREWELL_S)
        for answer in map(self._answer, told):
            if isinstance(answer, bytes):
                with storing(self._output):
                    for line in answer.decode().splitlines():
                        files.append_line(self._output / RUNS_FILE, line)


def needs_of(policy: PolicySpec, workers: int) -> Needs:
    """Return what an actor occupies: a GPU for each of its devices, else its workers' CPUs."""
    # Which device `auto` is, an actor sees for itself; it has a GPU where this machine has one.
    device = chosen_device(policy.device) if policy.computes else policy.device
    used = {one for one in (device, policy.cfg_device) if one not in (None, "auto", "cpu")}
    return Needs(cpus=0 if used else max(1, workers), gpus=len(used))


def shared_out(variables: Variables, gpu: int, count: int) -> Variables:
    """Return those of the simulators beside one of ``count`` GPUs of a machine, in turn."""
    return tuple(variables[gpu::count] or (variables[gpu % len(variables)],))


def _own_variables(variables: Variables) -> Variables:
    if not variables:
        return ()
    import ray

    here = ray.get_runtime_context()
    gpus = here.get_accelerator_ids().get("GPU", [])
    if not gpus:
        return variables
    [node] = [one for one in ray.nodes() if one["NodeID"] == here.get_node_id()]
    return shared_out(variables, int(gpus[0]), int(node["Resources"]["GPU"]))


def _files_of(folder: Path, record: Record) -> tuple[Path, ...]:
    """Return where the files of an episode lie, those included that it may have."""
    video = () if record.video is None else (folder / record.video,)
    error = folder / ERROR_FOLDER / f"{record.case}.txt"
    predicted = (*prediction_files(folder, record.case), *undecoded_files(folder, record.case))
    return (*video, *predicted, error)
