"""Demonstrations: a policy with privileges acts, and its successes become a LeRobot dataset.

Attempts are numbered; attempt ``k`` starts from seed ``first_seed + k`` and its noise is keyed by
that seed, so the dataset does not depend on the number of workers or on interruptions.
"""

import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Set
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import gymnasium as gym
import numpy as np

from dzrobot.cluster import Cluster, Needs
from dzrobot.declared import Flag
from dzrobot.documents import read_json, shorten
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.embodiments.spec import Embodiment
from dzrobot.errors import ConfigError, DatasetError, ErrorCapture, ProtocolError
from dzrobot.files import explained, write_json
from dzrobot.process import end_with_parent, log_escaped, searching_here_last
from dzrobot.recording import EpisodeWriter, formats
from dzrobot.rollout.demonstrations.record import (
    DONE,
    EXECUTED,
    NO_START,
    NoisyActions,
    RecordedEpisode,
    why_it_failed,
)
from dzrobot.rollout.demonstrations.tally import RecordingGoal, Tally, record_attempts
from dzrobot.rollout.environment import (
    accepted,
    accepts_same,
    check_fits,
    look_at,
    made_environment,
    needed_robot,
    sized,
)
from dzrobot.rollout.episode import EpisodeResult, run_episode
from dzrobot.rollout.policy_spec import EXPERT, PrivilegedActor, load_factory
from dzrobot.rollout.protocol import EpisodeRules

PLAN_FILE = formats.COLLECTION

SIMULATOR = Needs(cpus=1)
"""What an attempt occupies on a cluster."""

MOST_RETRIES = 5
"""How often Ray runs an attempt again whose process is lost."""


@dataclass(frozen=True, kw_only=True)
class CollectionPlan:
    """What to collect; it fixes the dataset to the bit, and is kept in the dataset's ``meta/``."""

    env: Annotated[str, Flag("Gymnasium id, such as dzrobot/lift-v0")]
    """Gymnasium id."""

    env_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments for ``gym.make``."""

    embodiment: Annotated[str | None, Flag(
        "robot whose columns and image size the dataset has (default: what the environment says)",
        alias="robot",
    )] = None  # fmt: skip
    """Robot whose columns the dataset has: a tag, or ``module:NAME``. None: the environment's."""

    policy: Annotated[str, Flag("expert, or module:factory")] = "expert"
    """``expert``, or ``module:factory``; the factory takes the environment."""

    episodes: Annotated[int, Flag("successes to keep", least=1)] = 10
    """Successful episodes to keep."""

    noise: Annotated[float, Flag("std of noise on executed actions", least=0, most=1)] = 0.0
    """Standard deviation of what is added to the first six numbers of each executed action. The
    dataset keeps the policy's own action: what to do from where the noise has led, and in the
    column ``executed_action`` what was done."""

    hold_steps: Annotated[int, Flag("steps to record after success", least=0)] = 0
    """Steps recorded after success, so that the end of a task is in the data too."""

    max_steps: Annotated[int, Flag("longest attempt", least=1)] = 150
    """Steps after which an attempt counts as failed."""

    first_seed: Annotated[int, Flag(
        "of the first attempt; each takes the next",
        name="seed", alias="first-seed", least=0, most=2**32 - 1,
    )] = 1_000_000  # fmt: skip
    """Seed of attempt 0; far from the seeds of evaluations."""

    starts: Annotated[tuple[int, ...], Flag(
        "stored initial states to begin from in turn, such as 20-49 (default: seed's)",
        kind="numbers",
    )] = ()  # fmt: skip
    """Stored initial states that attempts begin from in turn, so that others are left to
    evaluations. Empty: the seed chooses among all."""

    def init_state_id(self, seed: int) -> int | None:
        """Return the stored initial state of the attempt of ``seed``; None: the seed decides."""
        return self.starts[(seed - self.first_seed) % len(self.starts)] if self.starts else None


@dataclass(frozen=True)
class Attempt:
    """One attempt as a worker hands it back."""

    outcome: EpisodeResult
    """Its success is that the goal held for as long as the plan says."""

    frames: list[tuple[dict[str, Any], np.ndarray, dict[str, Any]]]
    """What was seen and what was chosen, and further columns; empty of a failure."""


def collect(
    plan: CollectionPlan,
    root: Path,
    *,
    format: tuple[str, bool] = ("v2.1", False),  # noqa: A002
    workers: int | Cluster = 1,
    report: Callable[[Tally], None] = lambda _: None,
) -> Tally:
    """Record ``plan.episodes`` successes in ``root``; run again after an interruption to resume.

    Args:
        plan: What to collect.
        root: Folder of the dataset.
        format: Version of the dataset and whether images are stored as video.
        workers: Processes that simulate at the same time, or a cluster, with one for every CPU.
        report: Called after every attempt.

    Raises:
        UnknownNameError: no such environment, argument of it, policy or embodiment.
        ProtocolError: ``root`` holds a collection of another plan, or an attempt raised.
        DatasetError: too few attempts succeed, or the disk is full; then the same call resumes.
    """
    plan, robot = _served(plan)
    load_factory(_policy_name(plan))
    version, video = format
    goal = RecordingGoal(
        episodes=plan.episodes, first_seed=plan.first_seed,
        advice="lower --noise, or raise --max-steps",
    )  # fmt: skip
    with (
        EpisodeWriter(root, robot, fps=robot.timing.control_hz, version=version, video=video)
        as writer,
        _pool(workers) as pool,
    ):  # fmt: skip
        _keep_plan(plan, root, robot)
        made = _made_ahead(plan, pool, Tally.of(root, writer.episodes).seeds)
        return record_attempts(
            writer, lambda seed: _committed(writer, made(seed), seed), goal,
            report=lambda _, tally: report(tally),
        )  # fmt: skip


def _committed(writer: EpisodeWriter, attempt: Attempt, seed: int) -> RecordedEpisode:
    """Add the episode of a success to the dataset."""
    outcome = attempt.outcome
    if outcome.success:
        for frame in attempt.frames:
            writer.add_frame(*frame)
        start = NO_START if outcome.init_state_id is None else outcome.init_state_id
        writer.save_episode(success=True, seed=seed, init_state_id=start)
    return RecordedEpisode(
        outcome, outcome.steps, kept=outcome.success, reason=why_it_failed(outcome)
    )


class DemonstrationEnv(gym.Wrapper[Any, Any, Any, Any]):
    """Keeps what was seen and what was chosen, and ends when the goal has held for long enough.

    Args:
        env: What is done there may differ from what was chosen: see :class:`NoisyActions`.
        plan: How long the goal is to hold, and how long an attempt may take.
    """

    def __init__(self, env: gym.Env[Any, Any], plan: CollectionPlan) -> None:
        super().__init__(env)
        self._plan = plan
        self._seen: Any = None
        self._held = 0
        self.frames: list[tuple[dict[str, Any], np.ndarray, dict[str, Any]]] = []

    @property
    def succeeded(self) -> bool:
        """Whether the goal has held for long enough."""
        return self._held > self._plan.hold_steps

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an attempt."""
        self._seen, info = self.env.reset(seed=seed, options=options)
        self._held, self.frames = 0, []
        return self._seen, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Carry out ``action`` and keep it with what it was chosen from."""
        seen = self._seen
        self._seen, reward, terminated, truncated, info = self.env.step(action)
        self.frames.append((seen, action, {EXECUTED: info[DONE]} if DONE in info else {}))
        self._held = self._held + 1 if info["is_success"] else 0
        steps, plan = len(self.frames), self._plan
        late = steps >= plan.max_steps and self._held == 0
        late = late or steps >= plan.max_steps + plan.hold_steps
        return self._seen, reward, terminated or self.succeeded, truncated or late, info


def run_attempt(plan: CollectionPlan, seed: int) -> Attempt:
    """Run one attempt from ``seed`` in this process's environment."""
    env = DemonstrationEnv(NoisyActions(_environment(plan), plan.noise), plan)
    rules = EpisodeRules(seed=seed, init_state_id=plan.init_state_id(seed))
    actor = PrivilegedActor(_policy_name(plan), seed)
    outcome = run_episode(env, actor, rules, stop_at_success=False)
    return Attempt(replace(outcome, success=env.succeeded), env.frames if env.succeeded else [])


def _policy_name(plan: CollectionPlan) -> str:
    return EXPERT if plan.policy == "expert" else plan.policy


def _made_ahead(
    plan: CollectionPlan, pool: "_AttemptPool", done: Set[int]
) -> Callable[[int], Attempt]:
    """Return what makes the attempt of a seed while those of the next seeds run beside it.

    Args:
        plan: What to collect.
        pool: Where attempts run.
        done: Seeds that are not made again.
    """
    waiting: dict[int, Callable[[], Attempt]] = {}

    def made(seed: int) -> Attempt:
        for number in range(seed, seed + 2 * pool.size):
            if number not in waiting and number not in done:
                waiting[number] = pool.start(plan, number)
        with ErrorCapture() as caught:
            attempt = waiting.pop(seed)()
        if caught.failure is not None:
            raise ProtocolError(
                f"the attempt of seed {seed} raised {caught.failure.error}; earlier ones are kept"
            )
        return attempt

    return made


@dataclass(frozen=True)
class _AttemptPool:
    """Runs attempts at the same time, in processes of this machine or of a cluster."""

    size: int
    """Attempts that run at the same time."""

    start: Callable[[CollectionPlan, int], Callable[[], Attempt]]
    """Starts the attempt of a seed; returns what waits for it."""


@contextmanager
def _pool(workers: int | Cluster) -> Iterator[_AttemptPool]:
    """Yield processes of this machine, or those of a cluster, which starts lost ones again."""
    if isinstance(workers, Cluster):
        task = workers.remote(run_attempt, SIMULATOR, max_retries=MOST_RETRIES)
        result, room = workers.result, workers.room(SIMULATOR)
        yield _AttemptPool(room, lambda *words: partial(result, task.remote(*words)))
        return
    context = multiprocessing.get_context("spawn")
    processes = ProcessPoolExecutor(workers, context, _adopt, (dict(os.environ),))
    try:
        yield _AttemptPool(workers, lambda *words: _submitted(processes, words).result)
    finally:
        processes.shutdown(cancel_futures=True)


def _submitted(processes: ProcessPoolExecutor, words: tuple[Any, ...]) -> Future[Any]:
    # Its processes are started as they are needed.
    with searching_here_last():
        return processes.submit(run_attempt, *words)


def _adopt(environment: Mapping[str, str]) -> None:
    end_with_parent()
    log_escaped()
    os.environ.update(environment)


_environments: dict[str, Any] = {}


def _environment(plan: CollectionPlan) -> Any:
    """Return this process's environment; it is made once and reset for every attempt."""
    limit = plan.max_steps + plan.hold_steps + 1
    key = json.dumps([plan.env, limit, dict(plan.env_arguments)], sort_keys=True)
    if key not in _environments:
        _environments[key] = made_environment(
            plan.env, {"max_episode_steps": limit, **_arguments(plan)}
        )
    return _environments[key]


def _arguments(plan: CollectionPlan) -> dict[str, Any]:
    """Return the environment's arguments; where it can, it continues after a success.

    Raises:
        ConfigError: steps after success are asked for, and it cannot.
    """
    known, open_ended = accepted(plan.env)
    if "stop_on_success" in known or open_ended:
        return {"stop_on_success": False, **plan.env_arguments}
    if plan.hold_steps:
        raise ConfigError(
            f"--hold-steps {plan.hold_steps} records steps after success, but {plan.env} ends with "
            "it: it takes no argument stop_on_success; leave --hold-steps out"
        )
    return dict(plan.env_arguments)


def _served(plan: CollectionPlan) -> tuple[CollectionPlan, Embodiment]:
    """Return the plan with images of the size of the robot that is recorded, and that robot.

    Everything about the environment is checked before.

    Raises:
        DzrobotError: the environment cannot be made, or does not fit the robot.
    """
    facts = look_at(plan.env, None, plan.env_arguments)
    if facts.moves_an_arm:
        raise ConfigError(
            f"{plan.env} moves an arm, where a person decides: `dzrobot record` records it"
        )
    own = plan.embodiment
    robot = needed_robot(plan.env, facts) if own is None else load_embodiment(own)

    given = plan.env_arguments
    served = {**sized(plan.env, robot), **given}
    if not accepts_same(plan.env, served, given):
        plan = replace(plan, env_arguments=served)

    def check(env: gym.Env[Any, Any]) -> None:
        check_fits(plan.env, env, robot, needed=robot.observation_keys)

    look_at(plan.env, None, _arguments(plan), check)
    return plan, robot


def _keep_plan(plan: CollectionPlan, root: Path, robot: Embodiment) -> None:
    # More episodes of the same plan may be added later; everything else must stay as it was.
    wanted = asdict(plan) | {
        "episodes": None,
        "starts": list(plan.starts),
        "embodiment": plan.embodiment or robot.tag,
    }
    path = root / PLAN_FILE
    if not path.exists():
        with explained(f"record to {root}", DatasetError):
            write_json(path, wanted)
        return
    there = read_json(path, dict[str, Any], ProtocolError)
    different = [
        f"{name}: {shorten(there.get(name))} there, {shorten(wanted.get(name))} given"
        for name in {**wanted, **there}
        if there.get(name) != wanted.get(name)
    ]
    if different:
        raise ProtocolError(
            f"{root} was collected differently ({'; '.join(different)}): use another folder"
        )
