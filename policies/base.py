"""What a policy is: observation in, action out, one session per concurrent episode."""

import logging
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from dzrobot.embodiments.spec import HOLD_ZERO, Embodiment, History, Part
from dzrobot.errors import ConfigError, ErrorCapture, ModalityError, SessionError
from dzrobot.modality.window import Observation

_log = logging.getLogger(__name__)

Action = NDArray[np.float32]

Observations = Sequence[Observation] | Mapping[str, Any]
"""One observation for each session, or a vector environment's: arrays with a leading axis over its
environments, and a sequence of instructions."""

DEFAULT_SESSION = "default"


@runtime_checkable
class Policy(Protocol):
    """Chooses one action per observation; chunking and history are its own business."""

    def act(self, obs: Observation, *, session: str = DEFAULT_SESSION) -> Action:
        """Return the action (A,) float32, in physical units, for one step of ``session``.

        Args:
            obs: What the robot sees: images (H, W, 3) uint8, states (D,) float32, the text.
            session: Which episode it belongs to.
        """
        ...

    def reset(self, session: str = DEFAULT_SESSION, *, episode: int | None = None) -> None:
        """Start a new episode in ``session``; nothing of the one before survives.

        A policy that also has ``end_all()`` ends all sessions with it, see :func:`end_all`.

        Args:
            session: Name of the session; other sessions are not affected.
            episode: Number that keyed noise depends on; counted up by itself when None.
        """
        ...


@runtime_checkable
class _EndsAll(Protocol):
    def end_all(self) -> None: ...


def end_all(policy: Policy | None) -> None:
    """End all sessions of ``policy``, if there is one, at the end of a run.

    A class without a method ``end_all`` gets ``reset()`` instead, which ended all sessions in
    earlier versions. What it raises is logged: no result depends on it.
    """
    if policy is None:
        return
    with ErrorCapture() as caught:
        if isinstance(policy, _EndsAll) and callable(policy.end_all):
            policy.end_all()
        else:
            policy.reset()
    if caught.failure is not None:
        _log.warning("the policy's sessions were not ended: %s", caught.failure.error)


@runtime_checkable
class BatchPolicy(Policy, Protocol):
    """A policy that serves several sessions in one call."""

    def act_batch(self, observations: Observations, sessions: Sequence[str]) -> list[Action]:
        """Return one action (A,) float32 for each session.

        Args:
            observations: One for each session, or those of a vector environment.
            sessions: Names, which must all differ.
        """
        ...


@runtime_checkable
class PlanningPolicy(Policy, Protocol):
    """A policy that hands out whole plans, and can be served to clients that execute them."""

    embodiment: Embodiment

    @property
    def history(self) -> History:
        """Return which frames of the past the policy is to be shown."""
        ...

    def infer_batch(
        self, observations: Observations, sessions: Sequence[str]
    ) -> list[dict[str, Any]]:
        """Return ``actions`` (H, A) float32 and ``timing`` in milliseconds for each session.

        Everything is checked before anything changes: an error leaves all sessions as they were.
        """
        ...

    def evict(self, session: str) -> None:
        """End ``session`` and free its memory."""
        ...

    def stage(self, session: str) -> int:
        """Return where in its episode a session stands; those of one stage share a call."""
        ...

    def footprint(self, session: str) -> "Footprint":
        """Return the memory that an open session takes, and what is left."""
        ...


@runtime_checkable
class ChunkedPolicy(Policy, Protocol):
    """A policy that knows beforehand whether it will have to plan."""

    def plans_next(self, *, session: str = DEFAULT_SESSION) -> bool:
        """Return whether the next action of ``session``, which has been reset, takes a plan."""
        ...


@dataclass(kw_only=True)
class PlanningTotals:
    """What a policy has planned so far, in all sessions."""

    seconds: float = 0.0
    """Time that it took, from observation to actions."""

    plans: int = 0
    calls: int = 0
    """Calls of the network; plans that are made together share one."""

    def add(self, seconds: float, plans: int, calls: int) -> None:
        """Count plans that were made in ``calls`` of the network."""
        self.seconds += seconds
        self.plans += plans
        self.calls += calls


@runtime_checkable
class MeasuredPolicy(Policy, Protocol):
    """A policy that knows how much time it has taken."""

    planning: PlanningTotals


@runtime_checkable
class SelectivePolicy(Policy, Protocol):
    """A policy that knows beforehand whose images it will look at.

    Where it says that it will not, an environment may leave all images of that observation out. An
    observation without images, where they are looked at, is refused like any that does not fit.
    """

    def reads_frames(self, *, session: str = DEFAULT_SESSION, asked: bool | None = None) -> bool:
        """Return whether the images of the next observation are looked at, then or later.

        Args:
            session: Which episode; it has been reset.
            asked: Whether a plan may be requested from that observation, where somebody else
                decides it, see :class:`AsyncPolicy`. None: the policy plans when it acts.
        """
        ...


Method = Literal["guided", "trained"]
"""How a plan is made to begin with rows of the one before: any network is steered there, or one
that was trained for it is given them."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Leftover:
    """What a robot keeps executing while its next plan is made."""

    targets: NDArray[np.float32]
    """``Plan.targets`` (k, A) of the running plan, from the step of the newest observation on."""

    delay: int
    """How many of them will have been executed when the next plan is there, 1 to k."""

    method: Method = "guided"
    strength: float | None = None
    """Most that guidance is multiplied by; None: the number of solver steps."""

    weights: Literal["linear", "exp"] = "linear"
    """How the rows after ``delay`` lose their hold on the new plan."""

    def __post_init__(self) -> None:
        if not 0 < self.delay <= len(self.targets):
            raise ConfigError(
                f"delay={self.delay} with {len(self.targets)} rows left of the running plan: give "
                "1 to that many; without rows or delay, request without a leftover"
            )


@dataclass(frozen=True, eq=False, kw_only=True)
class Plan:
    """A whole plan; row i is meant for the step i steps after the observation it was made from."""

    actions: NDArray[np.float32]
    """(H, A) in physical units, as the environment takes them."""

    targets: NDArray[np.float32]
    """(H, A) in physical units, two-way grippers still as the numbers that were predicted."""

    normalized: NDArray[np.float32]
    """(H, A) as the network predicts them; differences of its numbers compare between parts."""

    timing: Mapping[str, float]
    """Where the time went, in milliseconds."""


@runtime_checkable
class AsyncPolicy(Policy, Protocol):
    """A policy that makes a plan while the robot executes the one before.

    :meth:`observe` is called at every step of the robot, also while another thread is in
    :meth:`result`. A request is made of what was observed until then, and nothing later.
    """

    embodiment: Embodiment

    def longest_delay(self, method: Method) -> int:
        """Return the most rows of a running plan that a new one can be made to begin with."""
        ...

    def observe(self, obs: Observation, *, session: str = DEFAULT_SESSION) -> None:
        """Take in what the robot sees at this step."""
        ...

    def request(self, *, session: str = DEFAULT_SESSION, leftover: Leftover | None = None) -> Any:
        """Return the question for a plan from the newest observation on; nothing is computed.

        Raises:
            ConfigError: the policy cannot continue plans in the way that is asked for.
        """
        ...

    def result(self, ticket: Any) -> Plan | None:
        """Return the plan that was requested; None if its episode is over."""
        ...


@runtime_checkable
class ContinuingPolicy(PlanningPolicy, Protocol):
    """A served policy whose plans can begin with rows of the plan that a client still executes."""

    def longest_delay(self, method: Method) -> int:
        """Return the most rows of a running plan that a new one can be made to begin with."""
        ...

    def plan_batch(
        self,
        observations: Observations,
        sessions: Sequence[str],
        leftovers: Sequence[Leftover | None],
    ) -> list[Plan]:
        """Return the plan of each session.

        Everything is checked before anything changes: an error leaves all sessions as they were.

        Args:
            observations: As of ``infer_batch``.
            sessions: One for each observation.
            leftovers: What each robot keeps executing meanwhile; None: the plan starts over.
        """
        ...


def check_continuing(policy: AsyncPolicy | ContinuingPolicy, method: Method, delay: int) -> None:
    """Check that ``policy`` can make plans that begin with ``delay`` rows of another.

    Raises:
        ConfigError: not with so many, or not at all.
    """
    longest = policy.longest_delay(method)
    if delay <= longest:
        return
    means = {
        "guided": "execution 'rtc' needs a network that can be steered, in this process or behind "
        "a server of dzrobot",
        "trained": "execution 'trained' needs a checkpoint whose passport has "
        f"rtc_training_max_delay={delay} or more: fine-tune with that, or use execution 'rtc'",
    }
    raise ConfigError(
        f"a plan is to begin with {delay} rows of the running one, and this policy can be given "
        f"{longest or 'none'}: {means[method]}"
    )


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Memory of the device that a policy's network runs on, in bytes."""

    session: int
    """Bytes that one session takes."""

    free: int
    """Still free."""


def observations_of(given: object, count: int) -> list[Any]:
    """Return the observations of a batch one by one; their content is not looked at.

    Args:
        given: A sequence of observations, or a vector environment's mapping of batches.
        count: How many there are to be.

    Raises:
        ModalityError: neither of both, or a batch of another length.
    """
    if isinstance(given, Mapping):
        for key, batch in given.items():
            length = len(batch) if _is_batch(batch) else None
            if length != count:
                raise ModalityError(
                    f"{key} of the batch holds {'one value' if length is None else length} for "
                    f"{count} sessions: give a vector environment's observation, or a list of one "
                    "observation for each session"
                )
        return [{key: batch[i] for key, batch in given.items()} for i in range(count)]
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise ModalityError(
            f"the observations are a {type(given).__name__}: give a list of one observation for "
            "each session, or a vector environment's observation"
        )
    return list(given)


def check_session(name: object) -> None:
    """Raise :class:`SessionError` unless ``name`` can name a session."""
    if not isinstance(name, str) or not isinstance(name, Hashable):
        ending = "; to end all sessions, call end_all()" if name is None else ""
        raise SessionError(
            f"the session {str(name)[:40]} is a {type(name).__name__}: give a str, such as "
            f"'arm 1'{ending}"
        )


def check_sessions(names: object) -> list[str]:
    """Return the sessions of a batch.

    Raises:
        SessionError: not a sequence, none at all, one twice, or one that is no text.
    """
    if not isinstance(names, Sequence) or isinstance(names, str | bytes):
        raise SessionError(f"the sessions are a {type(names).__name__}: give a list of names")
    for name in names:
        check_session(name)
    if not names or len(set(names)) != len(names):
        raise SessionError(
            f"a batch for the sessions {', '.join(names) or 'none'}: give one each, every session "
            "once, and at least one"
        )
    return list(names)


def _is_batch(value: object) -> bool:
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


RECENT = 4
"""Frames of ``recent``, and of what is sent to a server at a time."""


def frame_offsets(embodiment: Embodiment, history: History) -> tuple[int, ...]:
    """Return the steps, from the newest frame, that the network is shown after its first call.

    Args:
        embodiment: Its horizon H is what one block of latent frames stands for.
        history: ``recent``: four frames spread over the last H, as published servers send them
            (-23, -16, -8, 0 for a horizon of 24). ``grid``: all frames that training takes from one
            block, with the closing frame of the block before. ``off``: the newest alone.
    """
    timing = embodiment.timing
    match history:
        case "off":
            return (0,)
        case "recent":
            span = timing.action_horizon - 1
            return tuple(math.floor(-span + i * span / (RECENT - 1)) for i in range(RECENT))
        case "grid":
            return (*(offset - timing.action_horizon for offset in timing.frame_offsets), 0)


def reads_next(offsets: Sequence[int], left: int, every: int) -> bool:
    """Return whether any coming plan is made from the next frame.

    Args:
        offsets: Steps from the newest frame that a plan is made from; see :func:`frame_offsets`.
        left: Steps from that frame to the one that the next plan is due at.
        every: Steps from plan to plan after that.
    """
    # The plan at step `left + i * every` is shown frames from there on back; the frame is step 0.
    return any(-offset >= left and (-offset - left) % every == 0 for offset in offsets)


_POSITIONS = 8
"""Most positions of a window that are tried; published ones have five or fewer."""


def walk_window(policy: PlanningPolicy, session: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Plan once at every position of the memory's window; yield (latent frame it begins at, plan).

    Positions differ in shape. A full window starts over; without memory there is one position. The
    observations are black.

    Args:
        policy: What plans; the session is left open.
        session: Which session is used; it is reset first.
    """
    policy.reset(session)
    yield 0, policy.infer_batch([blank(policy.embodiment, None)], [session])[0]
    if policy.history == "off":
        return
    later, position = blank(policy.embodiment, RECENT), -1
    for _ in range(_POSITIONS):
        if policy.stage(session) <= position:
            return
        position = policy.stage(session)
        yield position, policy.infer_batch([later], [session])[0]


def blank(robot: Embodiment, frames: int | None) -> Observation:
    """Return a black observation; with ``frames``, stacks of that many images."""
    stack = () if frames is None else (frames,)
    views: dict[str, Any] = {
        view.key: np.zeros((*stack, *view.resolution, 3), np.uint8) for view in robot.views
    }
    parts = {part.key: np.zeros(part.dim, np.float32) for part in robot.state}
    return {**views, **parts, robot.language: "warm up"}


def check_holds(robot: Embodiment, when: str, instead: str = "") -> None:
    """Raise ConfigError where nothing says how ``robot`` is left as it is."""
    if unknown := [part.key for part in robot.action if part.hold is None]:
        raise ConfigError(
            f"{', '.join(unknown)} of {robot.tag!r}: nothing says how it holds still {when}; give "
            f"the part hold={HOLD_ZERO!r} (differences from step to step) or a state key (absolute "
            f"numbers){instead}"
        )


def hold_command(
    robot: Embodiment, seen: Observation, last: NDArray[np.float32] | None
) -> NDArray[np.float32]:
    """Return the action (A,) that leaves ``robot`` as it is.

    Args:
        robot: Every part of its action says how; see ``Part.hold``.
        seen: The newest observation.
        last: The last command; None: there was none.
    """
    values, start = [], 0
    for part in robot.action:
        before = None if last is None else last[start : start + part.dim]
        values.append(_held(part, seen, before))
        start += part.dim
    return np.concatenate(values)


def _held(part: Part, seen: Observation, last: NDArray[np.float32] | None) -> NDArray[np.float32]:
    assert part.hold is not None, "see check_holds"
    if part.hold != HOLD_ZERO:
        return np.asarray(seen[part.hold] if last is None else last, np.float32)
    held = np.zeros(part.dim, np.float32)
    if part.gripper is not None and last is not None:
        held[part.gripper.index] = last[part.gripper.index]
    return held
