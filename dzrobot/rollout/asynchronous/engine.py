"""Executing one plan while the next is made: an actor whose rows are indexed by control step.

Source: Black et al., arXiv 2506.07339. A request is sent with the observation of a control step;
when its answer is there, as many of its rows are dropped as were executed meanwhile, counted, not
estimated. Steps without a row are held; they drop nothing, since nothing of the plan has passed.
"""

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dzrobot.embodiments.action_conventions import hold_command
from dzrobot.errors import ConfigError
from dzrobot.modality.window import Observation
from dzrobot.policies.base import (
    DEFAULT_SESSION,
    Action,
    Leftover,
    Method,
    Plan,
    Policy,
    When,
    check_continuing,
)
from dzrobot.rollout.asynchronous.execution import (
    DECAY,
    Execution,
    Latency,
    Schedule,
    forecast,
    steps_of,
)
from dzrobot.rollout.episode import Actor, Measures
from dzrobot.rollout.protocol import EpisodeSpec

Think = Callable[[], Plan]

METHODS: dict[Execution, Method] = {"rtc": "guided", "trained": "trained"}
_REMEMBERED = 16
"""Answers that the next one's time is foretold from: four rounds of a window of four plans, whose
first costs another time than the rest."""


@dataclass(frozen=True, eq=False)
class EngineAnswer:
    """What came back of a request."""

    plan: Plan
    taken_s: float


class Desk:
    """Where one plan at a time is made."""

    @property
    def busy(self) -> bool:
        """Return whether a request has no answer yet."""
        raise NotImplementedError

    def submit(self, step: int, think: Think) -> None:
        """Take the request of control step ``step``."""
        raise NotImplementedError

    def answer(self, step: int) -> EngineAnswer | None:
        """Return the answer if it is there at ``step``, and be free again."""
        raise NotImplementedError

    def clear(self) -> None:
        """Forget the request, if there is one; when this returns, nothing is computed."""
        raise NotImplementedError


class VirtualDesk(Desk):
    """Computes at once, and hands the answer out when its time has come on the virtual clock."""

    def __init__(
        self, latency: Latency, hz: float, key: tuple[object, ...], *, first_free: bool = False
    ) -> None:
        """Start.

        Args:
            latency: What plans take.
            hz: Control steps per second.
            key: Of the episode; the latency of a plan is drawn from it and the plan's number.
            first_free: Whether the first plan takes no time.
        """
        self._latency, self._hz, self._key, self._first_free = latency, hz, key, first_free
        self._count = 0
        self._waiting: tuple[int, EngineAnswer] | None = None

    @property
    def busy(self) -> bool:
        """Return whether a request has no answer yet."""
        return self._waiting is not None

    def submit(self, step: int, think: Think) -> None:
        """Make the plan now, for later."""
        began = time.perf_counter()
        plan = think()
        computed_s = time.perf_counter() - began
        taken_s = self._latency.seconds((*self._key, self._count), self._hz, computed_s)
        if self._first_free and not self._count:
            taken_s = 0.0
        self._count += 1
        self._waiting = step + steps_of(taken_s, self._hz), EngineAnswer(plan, taken_s)

    def answer(self, step: int) -> EngineAnswer | None:
        """Return the answer if its time has come."""
        if self._waiting is None or step < self._waiting[0]:
            return None
        (_, answer), self._waiting = self._waiting, None
        return answer

    def clear(self) -> None:
        """Forget the request."""
        self._waiting = None


class ThreadDesk(Desk):
    """Makes plans on a thread of its own while real time passes, as beside an arm."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="plans")
        self._future: Future[EngineAnswer] | None = None

    @property
    def busy(self) -> bool:
        """Return whether a request has no answer yet."""
        return self._future is not None

    def submit(self, step: int, think: Think) -> None:
        """Have the plan made."""
        self._future = self._pool.submit(_timed, think)

    def answer(self, step: int) -> EngineAnswer | None:
        """Return the answer if it is there; what was raised on the thread is raised here."""
        if self._future is None or not self._future.done():
            return None
        done, self._future = self._future, None
        return done.result()

    def clear(self) -> None:
        """Wait for the plan that is being made, and forget it."""
        if self._future is not None:
            # Its outcome is not used: even an error would belong to an episode that is over.
            self._future.exception()
        self._future = None


def _timed(think: Think) -> EngineAnswer:
    began = time.perf_counter()
    plan = think()
    return EngineAnswer(plan, time.perf_counter() - began)


@dataclass(kw_only=True)
class _Log:
    """What is measured step by step."""

    positions: list[NDArray[np.float32]] = field(default_factory=list)
    executed: list[list[NDArray[np.float32]]] = field(default_factory=list)
    ages: list[float] = field(default_factory=list)
    latency_s: list[float] = field(default_factory=list)
    delays: list[int] = field(default_factory=list)
    clipped: list[float] = field(default_factory=list)
    held: int = 0
    stale: int = 0
    late: int = 0

    def measures(self, hz: float) -> Measures:
        ages = np.asarray(self.ages) / hz
        path = np.asarray(self.positions, np.float64)
        return Measures(
            hz=hz,
            latency_s=tuple(round(taken, 6) for taken in self.latency_s),
            delay_steps=tuple(self.delays),
            held_steps=self.held,
            stale_steps=self.stale,
            late=self.late,
            reaction_mean_s=float(ages.mean()) if self.ages else None,
            reaction_p95_s=float(np.percentile(ages, 95)) if self.ages else None,
            seam_jump=seam_jump([np.asarray(rows) for rows in self.executed]),
            jerk=jerk(path, hz),
            smoothness=log_dimensionless_jerk(path, hz),
            path_ratio=path_ratio(path),
        )


@dataclass(frozen=True, eq=False)
class _Running:
    """A plan and where it stands: its row is the number of rows executed until now less ``lag``."""

    plan: Plan
    lag: int
    planned_at: int


class Engine:
    """One episode: observations in, one action per control step out.

    Args:
        policy: Whose session has just been reset.
        schedule: How plans are executed.
        desk: Where they are made.
        session: Of the policy.
        hand: Where in the concatenated state the hand's position is; None: unknown.
    """

    def __init__(
        self,
        policy: Policy,
        schedule: Schedule,
        desk: Desk,
        *,
        session: str = DEFAULT_SESSION,
        hand: slice | None = None,
    ) -> None:
        self._policy, self._schedule, self._desk = policy, schedule, desk
        self._session, self._hand = session, hand
        self._sync = schedule.options.execution == "sync"
        self._step = 0
        self._plan: Plan | None = None
        self._row = self._end = 0
        """Next row of the plan, and the one after its last."""

        self._planned_at = 0
        """Step of the observation that the plan was made from."""

        self._asked_at = self._foreseen = self._moved = 0
        """Step of the open request, the delay it counts on, and rows executed since."""

        self._running: list[_Running] = []
        """Plans of an ensemble that have a row for the coming step, oldest first."""

        self._executed = 0
        """Rows executed in this episode; steps that were held are none."""

        self._taken_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._plans = 0
        self._last: Action | None = None
        self._log = _Log()

    def act(self, observation: Observation) -> Action:
        """Return the action (A,) of this control step."""
        self._policy.observe(observation, session=self._session)
        if self._hand is not None:
            keys = self._schedule.robot.state_keys
            state = np.concatenate([np.ravel(observation[key]) for key in keys])
            self._log.positions.append(state[self._hand])
        self._collect()
        if self._due():
            self._ask()
            self._collect()
        action = self._next(observation)
        self._step += 1
        return action

    def reads_frames(self) -> bool:
        """Return whether the images of the next observation are looked at, then or later."""
        asked = self._moved >= self._schedule.execute if self._desk.busy else self._due()
        when: When = "planning" if asked else "moving"
        return self._policy.reads_frames(session=self._session, when=when)

    def measures(self) -> Measures:
        """Return what was measured until now."""
        return self._log.measures(self._schedule.hz)

    @property
    def clipped(self) -> float | None:
        """Return the mean of :attr:`Plan.clipped` until now; None: the policy does not say it."""
        return float(np.mean(self._log.clipped)) if self._log.clipped else None

    def _due(self) -> bool:
        """Return whether it is time to ask for the next plan."""
        if self._desk.busy:
            return False
        return self._row >= self._end or (not self._sync and self._row >= self._schedule.execute)

    def _ask(self) -> None:
        left = self._end - self._row
        self._foreseen = 0 if self._sync else forecast(self._taken_s, self._schedule)
        leftover = self._leftover(min(self._foreseen, left))
        if leftover is not None:
            self._foreseen = leftover.delay
        ask = self._policy.ask(session=self._session, leftover=leftover)
        self._asked_at, self._moved = self._step, 0
        self._desk.submit(self._step, lambda: self._policy.plan([ask])[0])

    def _leftover(self, delay: int) -> Leftover | None:
        """Return what the coming plan is to continue; None where it starts over."""
        options = self._schedule.options
        method = METHODS.get(options.execution)
        if method is None or self._plan is None:
            return None
        delay = min(delay, self._policy.can.continues.get(method, 0))
        if not delay:
            return None
        return Leftover(
            targets=self._plan.targets[self._row : self._end],
            delay=delay,
            method=method,
            strength=options.strength,
            weights=options.weights,
        )

    def _collect(self) -> None:
        """Go over to the plan that was asked for, if it is there."""
        answer = self._desk.answer(self._step)
        if answer is None:
            return
        log = self._log
        log.latency_s.append(answer.taken_s)
        log.delays.append(self._step - self._asked_at)
        log.late += not self._sync and self._moved > self._foreseen
        log.executed.append([])
        if answer.plan.clipped is not None:
            log.clipped.append(answer.plan.clipped)
        if self._plans == 1:
            # The first one of an episode starts cold, and says nothing of those to come.
            self._taken_s.clear()
        self._plans += 1
        self._taken_s.append(answer.taken_s)
        self._plan, self._planned_at = answer.plan, self._asked_at
        self._end = min(len(answer.plan.actions), self._schedule.horizon)
        if self._sync:
            self._end = min(self._end, self._schedule.execute)
        self._row = min(self._moved, self._end)
        # Only an ensemble looks at what was planned before.
        kept = self._running if self._schedule.options.execution == "ensemble" else []
        self._running = [
            *kept, _Running(answer.plan, self._executed - self._row, self._planned_at),
        ]  # fmt: skip

    def _next(self, observation: Observation) -> Action:
        if self._plan is None or self._row >= self._end:
            self._log.held += 1
            self._last = hold_command(self._schedule.robot, observation, self._last)
            return self._last
        log = self._log
        self._last, normalized, age = self._rows_of_step()
        log.executed[-1].append(normalized)
        log.ages.append(age)
        log.stale += self._desk.busy
        self._row, self._moved = self._row + 1, self._moved + 1
        self._executed += 1
        return self._last

    def _rows_of_step(self) -> tuple[Action, NDArray[np.float32], float]:
        """Return the action of this step, as predicted, and the age of its observation in steps."""
        horizon, executed = self._schedule.horizon, self._executed
        self._running = [
            one for one in self._running
            if executed - one.lag < min(len(one.plan.actions), horizon)
        ]  # fmt: skip
        newest = self._running[-1]
        if len(self._running) == 1:
            plan, row = newest.plan, self._row
            return plan.actions[row], plan.normalized[row], self._step - newest.planned_at
        decay = self._schedule.options.decay
        weights = ensemble_weights(len(self._running), DECAY if decay is None else decay)
        targets = weights @ [one.plan.targets[executed - one.lag] for one in self._running]
        normalized = weights @ [one.plan.normalized[executed - one.lag] for one in self._running]
        age = float(weights @ [self._step - one.planned_at for one in self._running])
        # Grippers are averaged as they were predicted, and made commands then.
        action = self._schedule.robot.commands(targets.astype(np.float32))
        return action, normalized.astype(np.float32), age


@dataclass(kw_only=True)
class EngineActor(Actor):
    """A policy of this process, as an actor in whose world time passes while it thinks."""

    policy: Policy
    schedule: Schedule
    desk: Desk
    session: str = DEFAULT_SESSION
    noise_key: int | None = None
    hand: slice | None = None
    engine: Engine = field(init=False)

    def __post_init__(self) -> None:
        self._renew()

    def begin(self, env: Any) -> None:
        """Start a new episode in the session; a plan that is still being made is dropped."""
        self.desk.clear()
        self.policy.reset(self.session, episode=self.noise_key)
        self._renew()

    def act(self, observation: Observation) -> tuple[Action, float]:
        """Return the action and the time that this process spent on it."""
        began = time.perf_counter()
        action = self.engine.act(observation)
        return action, 1000 * (time.perf_counter() - began)

    def reads_frames(self) -> bool:
        """Return whether the images of the next observation are looked at, then or later."""
        return self.engine.reads_frames()

    def measures(self) -> Measures:
        """Return what was measured of the episode."""
        return self.engine.measures()

    @property
    def clipped(self) -> float | None:
        """Return the share of state numbers beyond the policy's statistics; None: it is unknown."""
        return self.engine.clipped

    def _renew(self) -> None:
        self.engine = Engine(
            self.policy, self.schedule, self.desk, session=self.session, hand=self.hand
        )


class Engines:
    """The actors of a run in whose world time passes while the policy thinks.

    Args:
        schedule: How plans are executed.
        seed: Of the run; the latencies of an episode are drawn from it and the episode's place.
        hands: Where in the concatenated state the hand's position is, by environment.
    """

    def __init__(self, schedule: Schedule, seed: int, hands: Mapping[str, slice | None]) -> None:
        self.schedule = schedule
        self._seed, self._hands = seed, hands
        # One for all episodes: the policy is not to be called from two threads.
        self._desk = ThreadDesk()

    def actor(self, policy: Policy, session: str, case: EpisodeSpec) -> EngineActor:
        """Return the actor of one episode."""
        latency = self.schedule.options.latency
        return EngineActor(
            policy=policy,
            schedule=self.schedule,
            desk=self._desk if latency is None else self._virtual(latency, case),
            session=session,
            noise_key=case.noise_key,
            hand=self._hands[case.env],
        )

    def _virtual(self, latency: Latency, case: EpisodeSpec) -> VirtualDesk:
        key = (self._seed, case.suite, case.task_id, case.episode)
        first_free = self.schedule.options.first_plan == "free"
        return VirtualDesk(latency, self.schedule.hz, key, first_free=first_free)


def ensemble_weights(count: int, decay: float) -> NDArray[np.float64]:
    """Return the weights of ``count`` plans for one step, oldest first; their sum is 1.

    Source: Zhao et al., arXiv 2304.13705, section 4.2: exp(-decay i), the oldest has i = 0.
    """
    exponents = -decay * np.arange(count)
    weights = np.exp(exponents - exponents.max())
    return np.asarray(weights / weights.sum(), np.float64)


def check_policy(policy: Policy | None, schedule: Schedule) -> None:
    """Check that ``policy`` can be executed as ``schedule`` says.

    Raises:
        ConfigError: it makes no plans, or cannot continue one.
    """
    if policy is None or not policy.can.plans:
        raise ConfigError(
            "--execution and --latency are of plans: they need a checkpoint, 'remote', or a "
            "subclass of dzrobot.Policy that overrides plan"
        )
    method = METHODS.get(schedule.options.execution)
    if method is not None and schedule.delay != 0:
        check_continuing(policy, method, schedule.delay or 1)


_STILL_M = 1e-3
"""A hand that has moved less far has no path to speak of."""


def jerk(positions: NDArray[np.floating], hz: float) -> float | None:
    """Return the mean jerk in m/s^3 of positions (T, 3) in meters; None of fewer than four."""
    if len(positions) < 4:
        return None
    third = np.diff(np.asarray(positions, np.float64), n=3, axis=0)
    return float(np.linalg.norm(third, axis=1).mean() * hz**3)


def log_dimensionless_jerk(positions: NDArray[np.floating], hz: float) -> float | None:
    """Return the log dimensionless jerk of positions (T, 3); higher is smoother.

    Comparable between movements of different length and speed (Balasubramanian et al. 2015). None
    of fewer than four positions, and of a hand that rests or moves without any jerk.
    """
    if len(positions) < 4:
        return None
    path = np.asarray(positions, np.float64)
    peak = float(np.linalg.norm(np.diff(path, axis=0), axis=1).max()) * hz
    third = np.diff(path, n=3, axis=0) * hz**3
    spent = float((third**2).sum() / hz)
    duration = (len(path) - 1) / hz
    if not peak or not spent:
        return None
    return -math.log(duration**3 / peak**2 * spent)


def path_ratio(positions: NDArray[np.floating]) -> float | None:
    """Return the length of a path (T, 3) over the distance of its ends; None without distance."""
    path = np.asarray(positions, np.float64)
    if len(path) < 2:
        return None
    straight = float(np.linalg.norm(path[-1] - path[0]))
    if straight < _STILL_M:
        return None
    return float(np.linalg.norm(np.diff(path, axis=0), axis=1).sum()) / straight


def seam_jump(plans: Sequence[NDArray[np.floating]]) -> float | None:
    """Return how much farther actions jump from plan to plan than within one; medians.

    Args:
        plans: Executed rows (k, A) of every plan, in order, in normalized units.
    """
    plans = [np.asarray(plan, np.float64) for plan in plans if len(plan)]
    within = [np.linalg.norm(np.diff(plan, axis=0), axis=1) for plan in plans]
    usual = float(np.median(np.concatenate(within))) if any(map(len, within)) else 0.0
    seams = [np.linalg.norm(b[0] - a[-1]) for a, b in itertools.pairwise(plans)]
    if not seams or not usual:
        return None
    return float(np.median(seams)) / usual
