"""One episode: the same loop for a simulator and a real robot, in one process or many.

Images that are not read need not be rendered: without a GPU, rendering is nine tenths of a
simulator's step, and a policy that executes eight actions of each plan reads one image of eight.
"""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field

from dzrobot.declared import at_the_door
from dzrobot.documents import shorten
from dzrobot.embodiments.action_conventions import check_conventions
from dzrobot.errors import (
    DzrobotError,
    EpisodeError,
    ErrorCapture,
    InvalidActionError,
    ModalityError,
    preview,
)
from dzrobot.modality.window import Observation
from dzrobot.policies.base import DEFAULT_SESSION, Action, Plan, Policy
from dzrobot.policies.wrapping import adapted
from dzrobot.rollout.environment import EnvironmentFacts, facts_of, omitter
from dzrobot.rollout.protocol import EpisodeRules

_Count = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
_Amount = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
_Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
# JSON has lists where these values are tuples.
_Counts = Annotated[tuple[_Count, ...], Field(strict=False)]
_Amounts = Annotated[tuple[_Amount, ...], Field(strict=False)]


@dataclass(frozen=True, kw_only=True)
class Measures:
    """Timing and motion of one episode; checked when it is read back."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    hz: _Amount
    """Control steps per second."""

    latency_s: _Amounts
    """Time that each plan took, in order; numbers for ``--latency file:``."""

    delay_steps: _Counts
    """Steps that passed before each of them was there."""

    held_steps: _Count
    """Steps without a plan: the robot was commanded to stay as it is."""

    stale_steps: _Count
    """Steps of a plan while a newer observation had been submitted already."""

    late: _Count
    """Plans that came later than foreseen: rows before the seam were not what they begin with."""

    reaction_mean_s: _Amount | None
    """Age of the observation that an executed action was planned from; None: none was."""

    reaction_p95_s: _Amount | None
    seam_jump: _Amount | None
    """Median jump between plans over the median step within one."""

    jerk: _Amount | None
    """Mean jerk of the hand in m/s^3; None where its position is unknown."""

    smoothness: _Number | None
    """Log dimensionless jerk of the hand; higher is smoother."""

    path_ratio: _Amount | None
    """Length of the hand's path over the distance of its ends."""


LONGEST_CLASS = 100
"""Characters of a failure class."""

Watch = Callable[[Observation], None]
"""Called with the first observation and after every step, once the environment shows it."""


class Actor:
    """What chooses the actions of one episode. Override :meth:`act`."""

    def begin(self, env: Any) -> None:
        """Start a new episode.

        Args:
            env: The environment, which has just been reset; None: it is in another process.
        """

    def act(self, observation: Observation) -> tuple[Action, float]:
        """Return the action (A,) and how long it took to choose, in milliseconds."""
        raise NotImplementedError(f"{type(self).__name__} does not override act")

    def reads_frames(self) -> bool:
        """Return whether the images of the next observation are looked at, then or later."""
        return True

    def measures(self) -> Measures | None:
        """Return what was measured of an episode in which time passes while it chooses."""
        return None

    @property
    def plan_ms(self) -> Sequence[float]:
        """Return the times of those actions of this episode for which a plan was made."""
        return ()

    @property
    def clipped(self) -> float | None:
        """Return the mean of :attr:`Plan.clipped` over the episode's plans; None: it is unknown."""
        return None

    def note(self, spent_ms: float) -> None:
        """Take in how long an action took that was chosen for several actors together."""

    def finish(self) -> EpisodeError | None:
        """Keep what is kept of an episode that is over; return what that raised, if anything."""
        return None


@dataclass(kw_only=True)
class PolicyActor(Actor):
    """A policy of this process, as an actor."""

    policy: Policy
    session: str = DEFAULT_SESSION
    noise_key: int | None = None
    """Number of the episode for keyed noise; None: the policy counts."""

    _plan_ms: list[float] = field(default_factory=list, init=False)
    _clipped: list[float] = field(default_factory=list, init=False)
    _plan: Plan | None = field(default=None, init=False)

    @property
    def plan_ms(self) -> Sequence[float]:
        """Return the times of those actions of this episode for which a plan was made."""
        return self._plan_ms

    @property
    def clipped(self) -> float | None:
        """Return the mean of :attr:`Plan.clipped` over the episode's plans; None: it is unknown."""
        return float(np.mean(self._clipped)) if self._clipped else None

    def begin(self, env: Any) -> None:
        """Start a new episode in the session."""
        self.policy.reset(self.session, episode=self.noise_key)
        self._plan_ms, self._clipped, self._plan = [], [], None

    def act(self, observation: Observation) -> tuple[Action, float]:
        """Return the policy's action and its time."""
        began = time.perf_counter()
        action = self.policy.act(observation, session=self.session)
        spent = 1000 * (time.perf_counter() - began)
        self.note(spent)
        return action, spent

    def note(self, spent_ms: float) -> None:
        """Remember how long an action took, if a plan was made for it."""
        plan = self.policy.last_plan(self.session)
        if plan is not self._plan:
            self._plan = plan
            self._plan_ms.append(spent_ms)
            if plan is not None and plan.clipped is not None:
                self._clipped.append(plan.clipped)

    def reads_frames(self) -> bool:
        """Return whether the policy looks at the images of the next observation."""
        return self.policy.reads_frames(session=self.session)


INVALID_ACTION = "invalid_action"
POLICY_ERROR = "policy_error"
"""How an episode ended whose policy gave an invalid action, or raised."""

POLICY_FAILED = "the policy failed"
"""Failure class of such an episode."""

_OF_THE_MACHINE = (OSError, EOFError, MemoryError)
_OF_A_GPU = {"AcceleratorError", "OutOfMemoryError"}
"""Names of torch's errors, which is not imported here."""


@dataclass(frozen=True, kw_only=True)
class PolicyFailure:
    """What a policy did that ended its episode."""

    ended: str
    """`INVALID_ACTION` or `POLICY_ERROR`."""

    error: str
    details: str = ""
    """Traceback of what it raised."""


class PolicyFailedError(Exception):
    """Raised by an actor whose policy is elsewhere, and has failed there."""

    def __init__(self, failure: PolicyFailure) -> None:
        super().__init__(failure.error)
        self.failure = failure


@dataclass(frozen=True, kw_only=True)
class EpisodeResult:
    """What came of one episode."""

    task: str
    """The instruction."""

    init_state_id: int | None
    """Which numbered initial state it began from; None: the environment has none."""

    steps: int
    """Actions that were executed."""

    success: bool
    """Whether the goal held at any step."""

    ended: str
    """``success``, ``time limit``, ``invalid_action`` or ``policy_error`` where the policy failed,
    or the environment's own reason."""

    failure_class: str | None = None
    """How it failed, in the environment's words; None of a success, and where it does not say. Of a
    success it says that the goal held no longer at the end."""

    fault: str = ""
    """Why the episode does not count as a result: hardware failed, or a person discarded it."""

    stop: str = ""
    """Why the run is over: the arm was stopped, and a person looks before anything moves."""

    policy_failure: PolicyFailure | None = None
    """What the policy did that ended the episode. None: it did not fail."""

    action_sha256: str
    """SHA-256 of the float32 bytes of all actions, in order."""

    policy_ms: Mapping[str, float]
    """Median and 95th percentile of the time to choose an action."""

    plan_ms: Mapping[str, float] | None = None
    """The same of the actions for which a plan was made; of the others the policy had a plan. None:
    it does not show its plans."""

    env_ms: Mapping[str, float]
    """Median and 95th percentile of a step, and the time of the reset."""

    wall_s: float
    """Seconds from before the reset to the end."""

    robot: Mapping[str, Any] | None = None
    """What the environment says of its robot besides, as plain values."""

    measures: Measures | None = None
    """Timing of an episode in which time passes while the policy thinks."""

    clipped: float | None = None
    """Share of state numbers, over its plans, that lie clearly beyond the policy's statistics; None
    where the policy does not say."""


@dataclass
class _Clock:
    policy_ms: list[float] = field(default_factory=list)
    env_ms: list[float] = field(default_factory=list)
    reset_ms: float = 0.0


@at_the_door
def run_episode(
    env: gym.Env[Any, Any],
    policy: Policy | Actor | Any,
    rules: EpisodeRules | None = None,
    *,
    stop_at_success: bool = True,
    watch: Watch | None = None,
) -> EpisodeResult:
    """Reset ``env``, let ``policy`` act until the episode is over, and return what came of it.

    Images that are not looked at are not drawn, where the policy knows that it will not and the
    environment can leave them out: see :mod:`dzrobot.rollout.episode`.

    A policy that gives no action the environment could carry out (a NaN, an infinity, another
    shape), or that raises once it has acted, has failed: the episode ends without success,
    ``policy_failure`` says why, and an arm holds. What environment, devices, a policy server or
    the machine raise is raised here, as is what a policy raises before its first action.

    Args:
        env: Any Gymnasium environment whose observations the policy takes, and whose info holds
            ``is_success``.
        policy: A policy, in its default session; a plain object with ``act`` and ``reset``, see
            :func:`~dzrobot.policies.wrapping.adapted`; or an actor. An environment that was cut
            short says why in its info: ``fault`` when it does not count, ``stop`` when no other may
            follow.
            What ``robot`` and ``failure_class`` of its last info hold is kept beside the result.
        rules: Where to begin and when to stop; by default the environment says both.
        stop_at_success: Whether the episode is over once the goal holds.
        watch: Called with the first observation and after every step; it looks at every image.

    Raises:
        ModalityError: the environment does not say whether the goal holds.
        ConfigError: policy and environment say that they read actions differently.
    """
    facts = facts_of(env)
    rules = rules or EpisodeRules()
    actor = _actor_of(policy, facts)
    digest, clock = hashlib.sha256(), _Clock()
    began = time.perf_counter()
    starts = {} if rules.init_state_id is None else {"init_state_id": rules.init_state_id}
    observation, info = env.reset(seed=rules.seed, options=starts or None)
    clock.reset_ms = 1000 * (time.perf_counter() - began)
    actor.begin(env)
    omit = omitter(env, facts) if watch is None else None
    watch = watch or _blind
    watch(observation)
    steps, success, over, failure = 0, False, False, None
    while not over:
        chosen = _chosen(actor, observation, env, is_first=steps == 0)
        if isinstance(chosen, PolicyFailure):
            failure, info = chosen, _held(env, facts, info, chosen)
            break
        action, spent = chosen
        digest.update(action.tobytes())
        clock.policy_ms.append(spent)
        if omit is not None and not actor.reads_frames():
            omit()
        stepped = time.perf_counter()
        observation, _, terminated, truncated, info = env.step(action)
        clock.env_ms.append(1000 * (time.perf_counter() - stepped))
        watch(observation)
        steps += 1
        success = success or bool(_stated(info, "is_success"))
        over = terminated or truncated or (success and stop_at_success)
        over = over or steps == rules.max_steps
    return EpisodeResult(
        task=str(_stated(info, "task")),
        init_state_id=info.get("init_state_id", rules.init_state_id),
        steps=steps,
        success=success,
        ended="success" if success else _reset_reason(info) or "time limit",
        failure_class=_failure_class(info) if success or failure is None else POLICY_FAILED,
        fault=str(info.get("fault", "")),
        stop=str(info.get("stop", "")),
        policy_failure=failure,
        action_sha256=digest.hexdigest(),
        policy_ms=percentiles(clock.policy_ms),
        plan_ms=plan_times(actor.plan_ms),
        env_ms={**percentiles(clock.env_ms), "reset": round(clock.reset_ms, 3)},
        wall_s=round(time.perf_counter() - began, 3),
        robot=info.get("robot"),
        measures=actor.measures(),
        clipped=actor.clipped,
    )


def _actor_of(policy: Policy | Actor | Any, facts: EnvironmentFacts) -> Actor:
    """Return what acts; compare what policy and environment say of their robots, where they do."""
    if isinstance(policy, Actor):
        return policy
    acting = adapted(policy)
    if acting.embodiment is not None and facts.embodiment is not None:
        check_conventions(facts.embodiment, acting.embodiment)
    return PolicyActor(policy=acting)


def choose(
    actor: Actor, observation: Observation, *, is_first: bool
) -> tuple[Action, float] | PolicyFailure:
    """Return the action of ``actor`` and its time (ms), or how its policy failed.

    Args:
        actor: What acts.
        observation: What it sees.
        is_first: Whether nothing was done in this episode yet; what is raised then does not
            count as a result.
    """

    def passes(error: BaseException) -> bool:
        known = isinstance(error, InvalidActionError | PolicyFailedError)
        return known or is_first or not _is_of_the_policy(error)

    try:
        with ErrorCapture(passes) as caught:
            return actor.act(observation)
    except InvalidActionError as error:
        return PolicyFailure(ended=INVALID_ACTION, error=str(error))
    except PolicyFailedError as error:
        return error.failure
    raised = caught.raised
    return PolicyFailure(ended=POLICY_ERROR, error=raised.error, details=raised.details)


def _is_of_the_policy(error: BaseException) -> bool:
    """Return whether an error is what a policy did, and not the setup, a device or the machine."""
    if isinstance(error, DzrobotError):
        return isinstance(error, ModalityError)
    names = {kind.__name__ for kind in type(error).__mro__}
    return not isinstance(error, _OF_THE_MACHINE) and not names & _OF_A_GPU


def _chosen(
    actor: Actor, observation: Observation, env: gym.Env[Any, Any], *, is_first: bool
) -> tuple[NDArray[np.float32], float] | PolicyFailure:
    """Return an action that ``env`` takes, and its time (ms); or how the policy failed."""
    chosen = choose(actor, observation, is_first=is_first)
    if isinstance(chosen, PolicyFailure):
        return chosen
    action, spent = chosen
    try:
        vector = np.ascontiguousarray(action, np.float32)
    except (TypeError, ValueError, RuntimeError):  # torch's, of a tensor with a gradient
        vector = None
    shape = env.action_space.shape
    if vector is None or vector.shape != shape or not np.isfinite(vector).all():
        kind = "" if vector is None else f" of the shape {vector.shape}"
        text = f"the policy returned {shorten(action)}{kind}; an action is {shape} finite numbers"
        return PolicyFailure(ended=INVALID_ACTION, error=text)
    return vector, spent


def _held(
    env: Any, facts: EnvironmentFacts, info: Mapping[str, Any], failure: PolicyFailure
) -> dict[str, Any]:
    """Return the last info of an episode that its policy has ended; a robot is held."""
    if facts.holds:
        held: dict[str, Any] = env.unwrapped.policy_failed(failure.ended, failure.error)
        return held
    return {**info, "reset_reason": failure.ended}


def _blind(_: Observation) -> None:
    """Look at nothing."""


def _stated(info: Mapping[str, Any], key: str) -> Any:
    if key not in info:
        raise ModalityError(
            f"the environment's info has no {key!r}, only {preview(info, 12)}; every step must say "
            "is_success and task"
        )
    return info[key]


def _reset_reason(info: Mapping[str, Any]) -> str:
    """Return what the environment says ended the episode; empty: time ran out."""
    given = info.get("reset_reason", "")
    if not isinstance(given, str):
        raise ModalityError(
            f"the environment's info has reset_reason={given!r}, a {type(given).__name__}; it is "
            "the text of what ended the episode, '' where nothing but time did"
        )
    return given


def _failure_class(info: Mapping[str, Any]) -> str | None:
    given = info.get("failure_class")
    if given is None:
        return None
    if not isinstance(given, str) or not 0 < len(given) <= LONGEST_CLASS:
        raise ModalityError(
            f"the environment's info has failure_class={preview([given], 1)}; it is None or a text "
            f"of 1 to {LONGEST_CLASS} characters"
        )
    return str(given)


def plan_times(plan_ms: Sequence[float]) -> Mapping[str, float] | None:
    """Return median and 95th percentile of the time of a plan; None where none were shown."""
    return percentiles(plan_ms) if plan_ms else None


def percentiles(times: Sequence[float]) -> dict[str, float]:
    """Return the median and the 95th percentile of ``times``, to the microsecond."""
    if not times:
        return {"p50": 0.0, "p95": 0.0}
    middle, high = np.percentile(times, [50, 95])
    return {"p50": round(float(middle), 3), "p95": round(float(high), 3)}
