"""What an episode of an evaluation costs, part by part: processor seconds of all threads.

The page is counted with it, as what it shows is decoded when it is written.
"""

import importlib
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import gymnasium as gym

from dzrobot.errors import ConfigError, counted, find
from dzrobot.policies.base import Action, Ask, Observations, Plan
from dzrobot.policies.wrapping import Wrapper
from dzrobot.progress import progress_bar
from dzrobot.registration import SUITES
from dzrobot.rollout.environment import KeptEnvironment
from dzrobot.rollout.evaluation.comparison import read_results
from dzrobot.rollout.evaluation.evaluate import EvalProgress, evaluate
from dzrobot.rollout.evaluation.planning import EvaluationRequest, Opened, RunOptions, prepare
from dzrobot.rollout.footage import Wanted
from dzrobot.rollout.pages.predicted import decode_predictions
from dzrobot.rollout.pages.write import write_page
from dzrobot.rollout.policy_spec import PolicySpec
from dzrobot.rollout.protocol import PROTOCOLS, EvalSpec, plan_episodes
from dzrobot.rollout.records import RecordFile
from dzrobot.training.bench.document import (
    EPISODES,
    OPENING,
    WHOLE,
    BenchSettings,
    Measurement,
)

_Function = TypeVar("_Function", bound=Callable[..., Any])

RESET = "reset"
EPISODE_PARTS = (RESET, "plans", "images", "physics", "predictions", "films", "bookkeeping")
"""What an episode consists of."""

PAGE_PARTS = ("page: decoding", "page")

_SEAMS = {
    "dzrobot.rollout.predictions:PredictingActor.act": "predictions",
    "dzrobot.rollout.predictions:PredictingActor.finish": "predictions",
    "dzrobot.rollout.footage:EpisodeVideo.add": "films",
    "dzrobot.rollout.footage:EpisodeVideo.close": "films",
    "mujoco:mjv_updateScene": "images",
    "mujoco:mjr_render": "images",
    "mujoco:mjr_readPixels": "images",
}
"""Functions -> the part that their time is counted for, but what is inside of another's."""

FORMS: Mapping[str, Wanted] = {"--videos all": "all", "--videos none": "none"}
"""How episodes are run; the first is the default, which keeps predictions."""


@dataclass
class Account:
    """Shares out time: it is counted for the innermost part that runs."""

    clock: Callable[[], float] = time.process_time
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    _open: list[str] = field(default_factory=lambda: ["bookkeeping"])
    _since: float = field(init=False)

    def __post_init__(self) -> None:
        self._since = self.clock()

    def settle(self) -> dict[str, float]:
        """Return what was counted since the last call."""
        self._count()
        found, self.seconds = dict(self.seconds), defaultdict(float)
        return found

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time of the block for ``name``; all that a reset does is the reset's."""
        self._count()
        whole = self._open[-1] in (RESET, OPENING)
        self._open.append(self._open[-1] if whole else name)
        try:
            yield
        finally:
            self._count()
            self._open.pop()

    def of(self, name: str, function: _Function) -> _Function:
        """Return ``function``, whose time is counted for ``name``."""

        @wraps(function)
        def counted_function(*given: Any, **named: Any) -> Any:
            with self.part(name):
                return function(*given, **named)

        return counted_function  # type: ignore[return-value]

    def _count(self) -> None:
        now = self.clock()
        self.seconds[self._open[-1]] += now - self._since
        self._since = now


class _Counted(Wrapper):
    """A policy whose plans are counted."""

    def __init__(self, policy: Any, account: Account) -> None:
        super().__init__(policy)
        self._account = account

    def act_batch(self, observations: Observations, sessions: Sequence[str]) -> list[Action]:
        """Return the actions of the policy."""
        with self._account.part("plans"):
            return self.policy.act_batch(observations, sessions)

    def plan(self, asks: Sequence[Ask]) -> list[Plan]:
        """Return the plans of the policy."""
        with self._account.part("plans"):
            return self.policy.plan(asks)


class _CountedEnvironment(gym.Wrapper[Any, Any, Any, Any]):
    """An environment whose resets and steps are counted; the first reset opens its simulator."""

    takes_missing_frames = True

    def __init__(self, env: gym.Env[Any, Any], account: Account) -> None:
        super().__init__(env)
        self._account, self._part = account, OPENING

    def reset(self, **how: Any) -> tuple[Any, dict[str, Any]]:
        """Reset the environment."""
        part, self._part = self._part, RESET
        with self._account.part(part):
            return self.env.reset(**how)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Do one step."""
        with self._account.part("physics"):
            return self.env.step(action)


@contextmanager
def _counting(account: Account) -> Iterator[None]:
    """Count what :data:`_SEAMS` names while the block runs."""
    with ExitStack() as patched:
        for name, part in _SEAMS.items():
            module, _, path = name.partition(":")
            owner: Any = importlib.import_module(module)
            *classes, attribute = path.split(".")
            for one in classes:
                owner = getattr(owner, one)
            own = getattr(owner, attribute)
            patched.callback(setattr, owner, attribute, own)
            setattr(owner, attribute, account.of(part, own))
        yield


@dataclass(frozen=True)
class FormCost:
    """What was counted of one way to run episodes."""

    episodes: tuple[Mapping[str, float], ...]
    """Seconds by part, for each episode."""

    page: Mapping[str, float]
    """Seconds by part of the page of all of them."""

    successes: int
    actions: tuple[str, ...]
    """Hashes of the actions."""

    def values(self, part: str) -> tuple[float, ...]:
        """Return the seconds of ``part`` wherever it occurs; of the page, a mean an episode."""
        if part in PAGE_PARTS:
            return (self.page.get(part, 0.0) / len(self.episodes),)
        found = [one.get(part, 0.0) for one in self.episodes]
        # A task is opened once, and resets after that.
        return tuple(n for n in found if n or part not in (OPENING, RESET))

    def mean(self, part: str) -> float:
        """Return the mean of :meth:`values`; 0.0 without any."""
        values = self.values(part)
        return sum(values) / len(values) if values else 0.0

    @property
    def seconds(self) -> float:
        """Mean of an episode in an open task, with its share of the page."""
        return sum(self.mean(part) for part in (*EPISODE_PARTS, *PAGE_PARTS))


def asked_episodes(settings: BenchSettings) -> tuple[EvalSpec, EvalSpec]:
    """Return the protocol's whole evaluation, and what of it is measured.

    Some of the tasks, evenly spread, with at least two episodes each where there are as many: a
    reset in an open task is another than the first.

    Raises:
        UnknownNameError: there is no such protocol.
    """
    suite = settings.env.removeprefix("dzrobot/").removesuffix("-v0")
    suites = (suite,) if suite in SUITES else ()
    named = None if settings.protocol is None else find(PROTOCOLS, "protocol", settings.protocol)
    whole = EvalSpec.named(named, suites, None if suites else settings.env)
    tasks = sorted({case.task_id for case in plan_episodes(whole)})
    count = min(len(tasks), max(1, settings.repeats // 2))
    chosen = tuple(tasks[index * len(tasks) // count] for index in range(count))
    each = -(-settings.repeats // count)
    return whole, replace(whole, tasks=chosen if suites else None, episodes=each)


def measure_episodes(settings: BenchSettings, folder: Path) -> tuple[list[Measurement], list[str]]:
    """Return the parts of an episode in every form, and what the protocol's evaluation will take.

    Raises:
        ConfigError: an episode failed, or none of the protocol's fits.
    """
    whole, measured = asked_episodes(settings)
    opened = prepare(EvaluationRequest(spec=measured, policy=_policy(settings)))
    cases = plan_episodes(whole)
    tasks = len({(case.env, case.task_id) for case in cases})
    with _episodes_shown(1 + len(FORMS) * len(opened.plan.cases)) as ended:
        # What is built once in a process is not an episode's.
        _run(opened, folder / "ahead", "all", ended, first=True)
        costs = {
            form: _run(opened, folder / videos, videos, ended) for form, videos in FORMS.items()
        }
    found = []
    for form, cost in costs.items():
        for part in (OPENING, *EPISODE_PARTS, *PAGE_PARTS):
            if values := cost.values(part):
                found.append(_measured(f"{form}: {part}", values))
        found.append(_measured(f"{form}: {WHOLE}", (cost.seconds,)))
        hours = (tasks * cost.mean(OPENING) + len(cases) * cost.seconds) / 3600
        found.append(
            Measurement(
                name=f"{form}: {whole.protocol.name}, {counted(len(cases), 'episode')}",
                unit="h", values=(hours,), better="less",
            )
        )  # fmt: skip
    kinds = {cost.actions for cost in costs.values()}
    if len(kinds) != 1:
        raise ConfigError("the ways to run an evaluation gave other actions: report this")
    first = next(iter(costs.values()))
    notes = [
        f"Processor seconds of all threads, an episode ({first.successes} of "
        f"{len(first.episodes)} succeeded). The protocol opens {counted(tasks, 'task')}. "
        "Actions were the same in all forms."
    ]
    return found, notes


def _policy(settings: BenchSettings) -> PolicySpec:
    named = PolicySpec(embodiment=settings.embodiment, device=settings.device)
    return named if settings.checkpoint is None else replace(named, name=settings.checkpoint)


@contextmanager
def _episodes_shown(total: int) -> Iterator[Callable[[], None]]:
    """Yield what is called after each of ``total`` episodes, and says how long the rest takes."""
    done = itertools.count(1)
    with progress_bar(EPISODES, every=10) as show:
        show(0, total)
        yield lambda: show(next(done), total)


def _run(
    opened: Opened, folder: Path, videos: Wanted, ended: Callable[[], None], *, first: bool = False
) -> FormCost:
    """Run the episodes of a plan and write their page; with ``first``, only the first episode."""
    account, episodes = Account(), list[dict[str, float]]()

    def mark(far: EvalProgress) -> None:
        if far.record is not None and far.record.error is not None:
            raise ConfigError(f"an episode failed: {far.record.error}")
        found = account.settle()
        if far.record is not None:
            episodes.append(found)
            ended()

    only = frozenset({opened.plan.cases[0].name}) if first else None
    kept = KeptEnvironment(lambda env: _CountedEnvironment(env, account))
    options = RunOptions(workers=0, videos=videos, environment=kept, only=only)
    counted_policy = replace(opened, policy=_Counted(opened.policy, account))
    try:
        with _counting(account):
            evaluate(counted_policy, folder, options, mark)
    finally:
        kept.close()
    account.settle()
    with account.part(PAGE_PARTS[0]):
        decode_predictions(read_results(folder))
    with account.part(PAGE_PARTS[1]):
        write_page([folder], folder / "page")
    records = RecordFile(folder, writable=False).records.values()
    return FormCost(
        tuple(episodes), account.settle(), sum(bool(record.success) for record in records),
        tuple(str(record.action_sha256) for record in records),
    )  # fmt: skip


def _measured(name: str, values: tuple[float, ...]) -> Measurement:
    return Measurement(name=name, unit="s", values=values, better="less")
