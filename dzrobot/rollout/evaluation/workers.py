"""Processes that step environments, and the one process in which the policy acts for all of them.

Only this file knows that there are processes. Each runs :func:`run_episode` as a single process
would; its actor asks the main process for every action. A simulator is opened in the process that
steps it.
"""

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Self

from dzrobot.code_identity import check_unchanged, package_code
from dzrobot.errors import EpisodeError, ErrorCapture, ProtocolError, SetupError, StoppedError
from dzrobot.files import write_text
from dzrobot.modality.window import Observation
from dzrobot.policies.base import (
    DEFAULT_SESSION,
    Action,
    Policy,
    end_all,
)
from dzrobot.process import end_with_parent, log_escaped, searching_here_last
from dzrobot.rollout.environment import KeptEnvironment
from dzrobot.rollout.episode import (
    Actor,
    EpisodeResult,
    PolicyActor,
    PolicyFailedError,
    PolicyFailure,
    choose,
    plan_times,
    run_episode,
)
from dzrobot.rollout.evaluation.planning import (
    EvaluationRequest,
    Opened,
    OpenEngine,
    Predicting,
    RunOptions,
    Variables,
    predicting,
)
from dzrobot.rollout.footage import EpisodeVideo, Photographed, Wanted, photo_file
from dzrobot.rollout.perturbation import AblatedImages, PerturbedEpisodes
from dzrobot.rollout.policy_spec import PrivilegedActor
from dzrobot.rollout.policy_use import measured
from dzrobot.rollout.predictions import PredictingActor
from dzrobot.rollout.protocol import EnvironmentKey, EpisodeSpec, environment_key
from dzrobot.rollout.queue import (
    CaseQueue,
    Gathering,
)
from dzrobot.rollout.records import ERROR_FOLDER, Record, storing

WORKER_DIED = "the worker process died"
"""How the error of an episode begins whose process was lost: killed, or out of memory."""


MakeActor = Callable[[Policy, str, EpisodeSpec], Actor]
"""Makes the actor of one episode, in a session of the policy."""


@dataclass(frozen=True)
class _Asked:
    observation: Observation


@dataclass(frozen=True)
class _Answer:
    action: Action
    spent_ms: float
    reads_frames: bool
    """Whether the next observation's images are read."""


@dataclass(frozen=True)
class _Finished:
    outcome: EpisodeResult
    video: str | None


@dataclass(frozen=True, kw_only=True)
class EpisodeRunner:
    """Runs the episodes of an evaluation; sent to every process that steps environments."""

    request: EvaluationRequest
    arguments: Mapping[str, Mapping[str, Any]]
    """Keyword arguments beyond the task, by environment."""

    drawing: frozenset[str]
    """Environments that draw images for people."""

    folder: Path
    """Results folder; videos and tracebacks go below it."""

    videos: Wanted
    photos: bool
    """Whether a photo of every initial state is kept."""

    def play(
        self, case: EpisodeSpec, actor: Actor | None, kept: KeptEnvironment
    ) -> tuple[EpisodeResult, str | None]:
        """Run ``case``; without an actor, its privileged policy acts. Return outcome and video."""
        request, films = self.request, self.videos != "none"
        env = kept.of(case, self.arguments[case.env], render=films and case.env in self.drawing)
        if self.photos:
            env = Photographed(env, photo_file(self.folder, case.name))
        if request.perturbation is not None:
            env = PerturbedEpisodes(env, request.perturbation, case)
        if request.ablation != "none":
            env = AblatedImages(env, request.ablation, case)
        actor = actor or PrivilegedActor(str(request.policy.in_worker), case.noise_key)
        stop = request.spec.protocol.stop_at_success
        if not films:
            return run_episode(env, actor, case, stop_at_success=stop), None
        video = EpisodeVideo(self.folder, case.name, env)
        outcome = run_episode(env, actor, case, stop_at_success=stop, watch=video.add)
        keep = self.videos == "all" or not outcome.success
        ending = "success" if outcome.success else "failure"
        return outcome, video.close(keep=keep, ending=ending)


@dataclass
class RemoteActor(Actor):
    """The policy of the main process, seen from a worker."""

    connection: Connection
    _reads: bool = True

    def act(self, observation: Observation) -> tuple[Action, float]:
        """Return the action that the main process chose, and its time."""
        self.connection.send(_Asked(observation))
        answer: _Answer | PolicyFailure = self.connection.recv()
        if isinstance(answer, PolicyFailure):
            raise PolicyFailedError(answer)
        self._reads = answer.reads_frames
        return answer.action, answer.spent_ms

    def reads_frames(self) -> bool:
        """Return whether the main process looks at the images of the next observation."""
        return self._reads


def _work(
    connection: Connection, runner: EpisodeRunner, code: str, environment: Mapping[str, str]
) -> None:
    """Be a worker: run the cases that come in until None comes or the main process is gone."""
    # Ctrl-C reaches every process of the terminal; the main one decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    log_escaped()
    os.environ.update(environment)
    actor = None if runner.request.policy.in_worker else RemoteActor(connection)
    kept = KeptEnvironment()
    # A simulator that has raised is in no known state: the process ends with its first exception.
    with ErrorCapture() as caught:
        check_unchanged(code)
        while True:
            case = None
            with contextlib.suppress(EOFError):
                case = connection.recv()
            if case is None:
                kept.close()
                break
            connection.send(_Finished(*runner.play(case, actor, kept)))
    if caught.failure is not None:
        # If the main process is gone, this was its end, not ours.
        with contextlib.suppress(OSError):
            connection.send(caught.failure)


@dataclass
class _Worker:
    """One process as the main one sees it."""

    number: int
    runner: EpisodeRunner
    variables: Variables
    case: EpisodeSpec | None = None
    actor: Actor = field(default_factory=Actor)
    """Acts for it; one that is not asked where each environment has its own policy."""

    has_acted: bool = False
    """Whether an action was chosen in the episode."""

    last_key: EnvironmentKey | None = None
    process: Any = field(init=False)
    connection: Connection = field(init=False)

    def __post_init__(self) -> None:
        self.start()

    @property
    def session(self) -> str:
        return f"worker-{self.number}"

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        own = self.variables
        variables = {**os.environ, **(own[self.number % len(own)] if own else {})}
        self.process = context.Process(
            target=_work,
            args=(theirs, self.runner, package_code().content, variables),
            name=f"dzrobot {self.session}",
            daemon=True,
        )
        with searching_here_last():
            self.process.start()
        # With our copy open, the end of the process would never be noticed.
        theirs.close()
        self.last_key = None

    def give(self, case: EpisodeSpec) -> None:
        self.case, self.has_acted = case, False
        self.last_key = environment_key(case)
        self.send(case)

    def send(self, message: object) -> None:
        # A dead process is noticed by the next receive(), which says how it died.
        with contextlib.suppress(OSError):
            self.connection.send(message)

    def stop(self, *, patient: bool) -> None:
        if patient and self.process.is_alive():
            self.send(None)
            self.process.join(timeout=10)
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.connection.close()

    def receive(self) -> Any:
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            # OSError: it was killed in the middle of a message.
            self.process.join(timeout=10)
            code = self.process.exitcode
            how = f"with exit code {code}"
            if code is not None and code < 0:
                how = f"by signal {-code} ({signal.strsignal(-code)})"
            return EpisodeError(f"{WORKER_DIED} {how}", "")


_Asking = tuple[_Worker, Observation]
"""A worker that waits for its action, and what it sees."""


class WorkerPool:
    """Workers and the policy that acts for all of them; a context manager.

    Args:
        opened: The evaluation, its policy loaded.
        folder: Results folder.
        options: How it is run.
        engines: Makes the actors where time passes while the policy plans; None: it stands still.
        predicts: Whether what the policy predicts is kept in the results folder, and how.
    """

    def __init__(
        self,
        opened: Opened,
        folder: Path,
        options: RunOptions,
        *,
        engines: MakeActor | None = None,
        predicts: Predicting = "off",
    ) -> None:
        plan = opened.plan
        self._runner = EpisodeRunner(
            request=plan.request, arguments=plan.arguments, folder=folder,
            drawing=frozenset(name for name, facts in plan.facts.items() if facts.draws),
            videos=options.videos, photos=plan.moves_an_arm,
        )  # fmt: skip
        self._policy, self._batched = opened.policy, plan.request.batched
        self._engines, self._predicts, self._options = engines, predicts, options
        # One process holds the stop, the keyboard and the lock of an arm.
        self._count = 0 if plan.moves_an_arm else options.workers
        self._workers: list[_Worker] = []
        self._gathering: Gathering[_Asking] = Gathering(options.batch_window_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for worker in self._workers:
            worker.stop(patient=kind is None and worker.case is None)
        if kind is None:
            end_all(self._policy)

    def run(self, queue: CaseQueue) -> Iterator[Record]:
        """Yield the record of every case as it finishes; exceptions become records too."""
        if self._count == 0:
            yield from self._alone(queue)
            return
        while queue.is_open():
            self._hand_out(queue)
            busy = [worker for worker in self._workers if worker.case is not None]
            # No worker could take a case as long as all are busy.
            news = queue.news if len(busy) < self._count else ()
            held = [worker for worker, _ in self._gathering.held]
            heard = [worker for worker in busy if worker not in held]
            timeout = self._gathering.timeout(None)
            ready = wait([*(worker.connection for worker in heard), *news], timeout)
            asking: list[_Asking] = []
            concluded: list[Record] = []
            for worker in heard:
                if worker.connection not in ready:
                    continue
                match worker.receive():
                    case _Asked(observation):
                        asking.append((worker, observation))
                    case message:
                        concluded.append(self._concluded(worker, message))
            asking = self._gathered(asking, len(busy) - len(concluded))
            concluded += [self._concluded(*failed) for failed in self._answer(asking)]
            for record in concluded:
                yield record
                queue.conclude(record)

    def _gathered(self, asking: list[_Asking], askers: int) -> list[_Asking]:
        """Return who is answered now: who needs no plan, and those whose wait for others is over.

        Args:
            asking: Who has asked.
            askers: How many episodes run.
        """
        policy = self._policy
        if not self._options.batch_window_s or not self._batched:
            return asking
        at_once = []
        for worker, observation in asking:
            if policy is None or policy.plans_next(session=worker.session):
                self._gathering.add((worker, observation))
            else:
                at_once.append((worker, observation))
        return at_once + self._gathering.take(askers)

    def _hand_out(self, queue: CaseQueue) -> None:
        """Give every worker that has nothing to do a case of the environment it has open."""
        for number in range(self._count):
            worker = self._workers[number] if number < len(self._workers) else None
            if worker is not None and worker.case is not None:
                continue
            case = queue.take(None if worker is None else worker.last_key)
            if case is None:
                return
            if worker is None:
                worker = _Worker(number, self._runner, self._options.variables)
                self._workers.append(worker)
            worker.actor = self._actor(worker.session, case) or Actor()
            worker.actor.begin(None)
            worker.give(case)

    def _concluded(self, worker: _Worker, message: _Finished | EpisodeError) -> Record:
        assert worker.case is not None, "busy"
        case, worker.case = worker.case, None
        if isinstance(message, _Finished):
            outcome = replace(
                message.outcome, measures=worker.actor.measures(),
                plan_ms=plan_times(worker.actor.plan_ms), clipped=worker.actor.clipped,
            )  # fmt: skip
            ended = replace(message, outcome=outcome)
            return _record(self._runner.folder, case, ended, worker.actor)
        worker.stop(patient=False)
        worker.start()
        return _error_record(self._runner.folder, case, message)

    def _answer(self, asking: list[_Asking]) -> Iterator[tuple[_Worker, EpisodeError]]:
        """Send every asking worker its action; yield those for which the policy raised."""
        if not asking:
            return
        for group in [asking] if self._batched else [[one] for one in asking]:
            with ErrorCapture() as caught:
                answers = self._act(group)
            if caught.failure is not None:
                yield from ((worker, caught.failure) for worker, _ in group)
                continue
            for (worker, _), answer in zip(group, answers, strict=True):
                worker.send(answer)

    def _act(self, group: list[_Asking]) -> list[_Answer | PolicyFailure]:
        """Return for each worker its action, or how the policy failed.

        An error of a batched call cannot be attributed to one episode, so it is raised here.
        """
        policy = self._policy
        if len(group) > 1 and policy is not None:
            began = time.perf_counter()
            actions = policy.act_batch([o for _, o in group], [w.session for w, _ in group])
            spent = 1000 * (time.perf_counter() - began) / len(group)
            acted = [(action, spent) for action in actions]
            for worker, _ in group:
                worker.actor.note(spent)
        else:
            [(worker, observation)] = group
            chosen = choose(worker.actor, observation, is_first=not worker.has_acted)
            if isinstance(chosen, PolicyFailure):
                return [chosen]
            acted = [chosen]
        for worker, _ in group:
            worker.has_acted = True
        return [
            _Answer(*one, worker.actor.reads_frames())
            for (worker, _), one in zip(group, acted, strict=True)
        ]

    def _alone(self, queue: CaseQueue) -> Iterator[Record]:
        kept = self._options.environment or KeptEnvironment()
        with contextlib.ExitStack() as ending:
            # Whatever is raised, an arm lets go before anything else is done.
            ending.callback(kept.close)
            while queue.is_open():
                # In the order of the list, which people beside an arm go by.
                case = queue.take(None)
                if case is None:
                    wait(queue.news)
                    continue
                record, stop = self._played(kept, case)
                yield record
                queue.conclude(record)
                if stop:
                    raise StoppedError(stop)
            if self._options.environment is not None:
                ending.pop_all()

    def _played(self, kept: KeptEnvironment, case: EpisodeSpec) -> tuple[Record, str]:
        """Run ``case`` in this process; return its record, and why no other may follow."""
        actor, folder = self._actor(DEFAULT_SESSION, case), self._runner.folder
        with ErrorCapture() as caught:
            outcome, video = self._runner.play(case, actor, kept)
            return _record(folder, case, _Finished(outcome, video), actor), outcome.stop
        # An environment that has raised is in no known state; closed, it lets go of what the next
        # one needs.
        kept.close()
        return _error_record(folder, case, caught.raised), ""

    def _actor(self, session: str, case: EpisodeSpec) -> Actor | None:
        """Return what acts for ``case``; None where its environment has a policy of its own."""
        if self._policy is None:
            return None
        if self._engines is not None:
            return self._engines(self._policy, session, case)
        actor = PolicyActor(policy=self._policy, session=session, noise_key=case.noise_key)
        if self._predicts == "off":
            return actor
        return PredictingActor(
            inner=actor, folder=self._runner.folder, case=case.name,
            later=self._predicts == "later",
        )  # fmt: skip


def _record(folder: Path, case: EpisodeSpec, ended: _Finished, actor: Actor | None) -> Record:
    """Return the record of an episode that was run; what its policy raised is kept too.

    What ``actor`` predicted is kept first: the record says that the episode is done.
    """
    failure = None if actor is None else actor.finish()
    if failure is not None:
        return _error_record(folder, case, failure)
    if ended.outcome.policy_failure is not None:
        _keep_traceback(folder, case, ended.outcome.policy_failure.details)
    return Record.of(case, ended.outcome, ended.video)


def _error_record(folder: Path, case: EpisodeSpec, failure: EpisodeError) -> Record:
    """Return the record of an exception; its traceback is kept in the results folder.

    Raises:
        ProtocolError: the disk is full or cannot be written: no episode's fault.
        SetupError: nor is what no episode could escape.
    """
    if failure.of_setup:
        raise SetupError(f"{failure.error}\nNo episode was run with this setup.")
    if failure.no_room:
        raise ProtocolError(
            f"cannot write to {failure.place or folder}: {failure.error}; make room there, or "
            f"choose another folder, then run the same command again; {folder} keeps what is done"
        )
    _keep_traceback(folder, case, failure.details)
    return Record.failed(case, failure.error)


def _keep_traceback(folder: Path, case: EpisodeSpec, details: str) -> None:
    """Write what was raised into the results folder, if anything was."""
    if details:
        with storing(folder):
            write_text(folder / ERROR_FOLDER / f"{case.name}.txt", details)


def pool_opener(opened: Opened, options: RunOptions) -> OpenEngine:
    """Return what opens the workers of this process.

    Raises:
        ConfigError: predictions are asked for, and there are none.
    """
    plan, predicts, engines = opened.plan, predicting(opened, options), None
    if plan.schedule is not None:
        from dzrobot.rollout.asynchronous.engine import Engines

        hands = {name: facts.hand_position for name, facts in plan.facts.items()}
        engines = Engines(plan.schedule, plan.request.spec.seed, hands).actor
    # Beside an arm, nothing waits for a trace of kernels.
    device = None if plan.moves_an_arm else opened.card["policy"].get("device")

    @contextmanager
    def pool(folder: Path) -> Iterator[WorkerPool]:
        with (
            measured(opened.policy, device, folder),
            WorkerPool(opened, folder, options, engines=engines, predicts=predicts) as workers,
        ):
            yield workers

    return pool
