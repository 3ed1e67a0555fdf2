"""What a policy is: observations in, actions or whole plans out, a session per episode."""

import logging
import math
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from dzrobot.embodiments.spec import Embodiment, History
from dzrobot.errors import ConfigError, ErrorCapture, ModalityError, SessionError, preview
from dzrobot.modality.window import Observation

_log = logging.getLogger(__name__)

Action = NDArray[np.float32]
Image = NDArray[np.uint8]

Observations = Sequence[Observation] | Mapping[str, Any]
"""One observation for each session, or a vector environment's: arrays with a leading axis over its
environments, and a sequence of instructions."""

DEFAULT_SESSION = "default"

When = Literal["acting", "planning", "moving"]
"""What an observation is for. ``acting``: it is given to :meth:`Policy.act`, which plans when no
action is left. Where the caller asks for plans, ``planning``: one may be asked for from it;
``moving``: none is, the robot goes on with the one before."""


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

    clipped: float | None = None
    """Share of the state's numbers that lie clearly beyond the policy's statistics, so that the
    network was shown a bound in their place. None: it does not say."""

    @classmethod
    def of(cls, actions: NDArray[np.float32], timing: Mapping[str, float] | None = None) -> Self:
        """Return a plan of which only ``actions`` (H, A) are known, and perhaps ``timing``."""
        return cls(actions=actions, targets=actions, normalized=actions, timing=timing or {})


@dataclass(frozen=True, eq=False, kw_only=True)
class ImaginedLatents:
    """The video that a plan predicts, as its network predicts it: small, and not decoded."""

    latents: NDArray[np.float32]
    """(C, F, Y, X), normalized."""

    starts: bool
    """Whether a video begins with it. Otherwise it goes on with that of the plan before, whose
    decoder carries frames over."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Memory of the device that a policy's network runs on, in bytes."""

    session: int
    """Bytes that one session takes."""

    free: int
    """Still free."""


@dataclass(frozen=True, kw_only=True)
class Abilities:
    """What a policy can do beyond choosing an action."""

    plans: bool = False
    """Whether it makes whole plans, also while the robot executes the one before."""

    batches: bool = False
    """Whether several sessions can share a call."""

    serves: bool = False
    """Whether it can be served to clients that execute its plans themselves."""

    continues: Mapping[Method, int] = field(default_factory=dict)
    """Most rows of a running plan that a new one can be made to begin with, by method."""

    predicts: bool = False
    """Whether it predicts a video with every plan."""

    defers: bool = False
    """Whether another thread may compute its images while it goes on planning."""

    encodes: bool = False
    """Whether it shows what an image is to its network."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Ask:
    """The question for one plan."""

    session: str = DEFAULT_SESSION
    """Name of the session that the plan is for."""

    observation: Observation
    """What the robot sees now; from a client of a server, also stacks of frames (T, H, W, 3)."""

    leftover: Leftover | None = None
    """What the robot executes in the meantime; None: the plan starts over."""


@dataclass(eq=False)
class _Running:
    """What the base class keeps of a session."""

    seen: Observation | None = None
    plan: Plan | None = None
    rows: deque[Action] = field(default_factory=deque)
    """Rows of the plan that are still to be executed."""


class Policy:
    """Chooses one action per observation. Override :meth:`plan`, or :meth:`act` alone.

    All that lasts for an episode belongs to its session, so that several episodes can run at once.
    A class that overrides :meth:`reset`, :meth:`end_all` or :meth:`evict` calls the base class's
    too. Not to be called from two threads at once, but for :meth:`observe` beside :meth:`plan`.
    """

    embodiment: Embodiment | None = None
    """The robot that it acts as; needed for serving and for predicted video."""

    execute: int | None = None
    """Rows of each plan that :meth:`act` executes; None: all."""

    history: History = "off"
    """Which frames of the past it is to be shown."""

    planning: PlanningTotals | None = None
    """What it has planned so far; None: it does not count."""

    def __repr__(self) -> str:
        """Return the class and the robot that it acts as."""
        robot = "any robot" if self.embodiment is None else self.embodiment.tag
        return f"<{type(self).__name__} of {robot}>"

    @property
    def can(self) -> Abilities:
        """Return what it can do: by default, what its class overrides."""
        kind = type(self)
        plans = kind.plan is not Policy.plan
        return Abilities(
            plans=plans,
            batches=plans or kind.act_batch is not Policy.act_batch,
            serves=plans,
            predicts=kind.imagine is not Policy.imagine,
            encodes=kind.encode_images is not Policy.encode_images,
        )

    def reset(self, session: str = DEFAULT_SESSION, *, episode: int | None = None) -> None:
        """Start a new episode in ``session``; nothing of the one before survives.

        Args:
            session: Its name; other sessions are not affected.
            episode: Number that keyed noise depends on; counted up by itself when None.
        """
        check_session(session)
        self.__kept.pop(session, None)

    def end_all(self) -> None:
        """End all sessions; called at the end of a run."""
        self.__kept.clear()

    def evict(self, session: str) -> None:
        """End ``session`` and free its memory."""
        self.__kept.pop(session, None)

    def act(self, obs: Observation, *, session: str = DEFAULT_SESSION) -> Action:
        """Return the action (A,) float32, in physical units, for one step of ``session``.

        Args:
            obs: What the robot sees: images (H, W, 3) uint8, states (D,) float32, the text.
            session: Which episode it belongs to.
        """
        return self._executed([obs], [session])[0]

    def act_batch(self, observations: Observations, sessions: Sequence[str]) -> list[Action]:
        """Return one action (A,) float32 for each session; those without a plan plan together.

        Args:
            observations: One for each session, or those of a vector environment.
            sessions: Names, which must all differ.
        """
        if type(self).act is Policy.act:
            return self._executed(observations, sessions)
        given = observations_of(observations, len(sessions))
        return [self.act(obs, session=name) for obs, name in zip(given, sessions, strict=True)]

    def observe(self, obs: Observation, *, session: str = DEFAULT_SESSION) -> None:
        """Take in ``obs``, what the robot of ``session`` sees at this step; the newest is kept."""
        self._session(session).seen = obs

    def ask(self, *, session: str = DEFAULT_SESSION, leftover: Leftover | None = None) -> Ask:
        """Return the question for a plan from the newest observation on; nothing is computed.

        Args:
            session: The session that has observed.
            leftover: What the robot executes in the meantime; None: the plan starts over.

        Raises:
            ConfigError: The policy cannot continue a plan in this way.
            SessionError: Nothing was observed in the session.
        """
        check_leftovers(self, [leftover])
        seen = self._session(session).seen
        if seen is None:
            raise SessionError(f"session {session!r} has observed nothing: call observe first")
        return Ask(session=session, observation=seen, leftover=leftover)

    def plan(self, asks: Sequence[Ask]) -> list[Plan]:
        """Return the plan of each question, made together.

        What was observed after a question was asked plays no part in its answer. Everything is
        checked before anything changes: an error leaves all sessions as they were.

        Args:
            asks: Questions, each of another session.

        Raises:
            ConfigError: The policy cannot continue a plan as it is asked to.
            ModalityError: An observation does not fit.
            SessionError: An episode is over.
        """
        raise NotImplementedError(f"{type(self).__name__} overrides neither act nor plan")

    def infer(self, obs: Observation, *, session: str = DEFAULT_SESSION) -> dict[str, Any]:
        """Return ``actions`` (H, A) float32 of a plan for ``obs``, and ``timing`` in milliseconds.

        The plan is one of ``session``; the caller executes as much of it as it likes.
        """
        return self.infer_batch([obs], [session])[0]

    def infer_batch(
        self, observations: Observations, sessions: Sequence[str]
    ) -> list[dict[str, Any]]:
        """Return plans as of :meth:`infer` for ``observations`` of ``sessions``, made together."""
        names = check_sessions(sessions)
        given = observations_of(observations, len(names))
        check_count(given, names)
        asks = [Ask(session=name, observation=obs) for name, obs in zip(names, given, strict=True)]
        return [{"actions": plan.actions, "timing": dict(plan.timing)} for plan in self.plan(asks)]

    def reads_frames(self, *, session: str = DEFAULT_SESSION, when: When = "acting") -> bool:
        """Return whether the images of the next observation are looked at, then or later.

        Where they are not, an environment may leave all of them out. One without images, where they
        are looked at, is to be refused like any that does not fit.

        Args:
            session: The session, which has been reset.
            when: What the observation will be for.
        """
        return True

    def plans_next(self, *, session: str = DEFAULT_SESSION) -> bool:
        """Return whether the next action of ``session``, which has been reset, takes a plan."""
        kept = self.__kept.get(session)
        return kept is None or not kept.rows

    def report(self) -> str:
        """Return what is to be said after a run, as the latency of a server; empty: nothing."""
        return ""

    def last_plan(self, session: str = DEFAULT_SESSION) -> Plan | None:
        """Return the plan that ``session`` executes; None: there is none, or it does not say."""
        kept = self.__kept.get(session)
        return None if kept is None else kept.plan

    def stage(self, session: str) -> int:
        """Return where in its episode a session stands; those of one stage share a call."""
        return 0

    def footprint(self, session: str) -> Footprint:
        """Return the memory that an open session takes, and what is left."""
        return Footprint(session=0, free=0)

    def imagine(self, session: str = DEFAULT_SESSION) -> Image:
        """Return the video (T, H, W, 3) uint8, views tiled, of the last plan of ``session``.

        Raises:
            ConfigError: The policy predicts no video.
        """
        raise ConfigError(f"{type(self).__name__} predicts no video")

    def imagine_later(self, session: str = DEFAULT_SESSION) -> Callable[[int], Image]:
        """Return what computes :meth:`imagine` of ``session``, called once, plan after plan.

        The function takes how many frames to leave out at the end, fewer than there are.
        """
        video = self.imagine(session)
        return lambda without: video[: len(video) - without]

    def imagine_latents(self, session: str = DEFAULT_SESSION) -> ImaginedLatents:
        """Return what :meth:`imagine` decodes of the last plan of ``session``.

        Raises:
            ConfigError: The policy predicts no video, or only as images.
        """
        raise ConfigError(f"{type(self).__name__} hands out no latents of a video")

    def encode_images(self, images: Image) -> NDArray[np.float32]:
        """Return the latents (N, ...) of images (N, H, W, 3), views tiled, each by itself.

        Raises:
            ConfigError: The policy does not encode images.
        """
        raise ConfigError(f"{type(self).__name__} does not encode images")

    @cached_property
    def __kept(self) -> dict[str, _Running]:
        return {}

    def _session(self, name: str) -> _Running:
        check_session(name)
        return self.__kept.setdefault(name, _Running())

    def _executed(self, observations: Observations, sessions: Sequence[str]) -> list[Action]:
        """Return the next row of each session's plan; plans are made where none is left."""
        names = check_sessions(sessions)
        given = observations_of(observations, len(names))
        check_count(given, names)
        for obs, name in zip(given, names, strict=True):
            self.observe(obs, session=name)
        due = [name for name in names if self.plans_next(session=name)]
        if due:
            plans = self.plan([self.ask(session=name) for name in due])
            for name, plan in zip(due, plans, strict=True):
                running = self._session(name)
                running.plan, running.rows = plan, deque(plan.actions[: self.execute])
        return [self._session(name).rows.popleft() for name in names]


def end_all(policy: Policy | None) -> None:
    """End all sessions of ``policy``, if there is one, at the end of a run.

    What it raises is logged: no result depends on it.
    """
    if policy is None:
        return
    with ErrorCapture() as caught:
        policy.end_all()
    if caught.failure is not None:
        _log.warning("the policy's sessions were not ended: %s", caught.failure.error)


def robot_of(policy: Policy) -> Embodiment:
    """Return the robot that ``policy`` acts as.

    Raises:
        ConfigError: It does not say which.
    """
    if policy.embodiment is None:
        raise ConfigError(
            f"{type(policy).__name__} does not say which robot it acts as: set self.embodiment"
        )
    return policy.embodiment


def check_leftovers(policy: Policy, leftovers: Sequence[Leftover | None]) -> None:
    """Check that ``policy`` can continue these plans; see :func:`check_continuing`."""
    for left in leftovers:
        if left is not None:
            check_continuing(policy, left.method, left.delay)


def check_continuing(policy: Policy, method: Method, delay: int) -> None:
    """Check that ``policy`` can make plans that begin with ``delay`` rows of another.

    Raises:
        ConfigError: not with so many, or not at all.
    """
    longest = policy.can.continues.get(method, 0)
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


def check_count(given: Sequence[object], names: Sequence[str]) -> None:
    """Raise :class:`SessionError` unless there is one observation for each session."""
    if len(given) != len(names):
        raise SessionError(
            f"{len(given)} observations for the sessions {preview(names, 12)}; give one each, "
            "every session once"
        )


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
        SessionError: not a sequence, none at all, one twice, or one that is not text.
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


_WARM_UP = "warm up"
_POSITIONS = 8
"""Most positions of a window that are tried; published ones have five or fewer."""


def walk_window(policy: Policy, session: str) -> Iterator[tuple[int, Plan]]:
    """Plan once at every position of the memory's window; yield (latent frame it begins at, plan).

    Positions differ in shape. A full window starts over; without memory there is one position. The
    observations are black.

    Args:
        policy: What plans; the session is left open.
        session: Which session is used; it is reset first.
    """
    robot = robot_of(policy)
    policy.reset(session)
    yield 0, policy.plan([Ask(session=session, observation=blank(robot, None))])[0]
    if policy.history == "off":
        return
    later, position = blank(robot, RECENT), -1
    for _ in range(_POSITIONS):
        if policy.stage(session) <= position:
            return
        position = policy.stage(session)
        yield position, policy.plan([Ask(session=session, observation=later)])[0]


def blank(robot: Embodiment, frames: int | None) -> Observation:
    """Return a black observation; with ``frames``, stacks of that many images."""
    stack = () if frames is None else (frames,)
    views: dict[str, Any] = {
        view.key: np.zeros((*stack, *view.resolution, 3), np.uint8) for view in robot.views
    }
    parts = {part.key: np.zeros(part.dim, np.float32) for part in robot.state}
    return {**views, **parts, robot.language: _WARM_UP}


def is_warm_up(observation: Observation, robot: Embodiment) -> bool:
    """Return whether an observation is one of :func:`blank`, by its instruction."""
    return bool(observation[robot.language] == _WARM_UP)
