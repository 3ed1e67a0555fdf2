"""What an environment states of itself in attributes of ``env.unwrapped``, found once."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, runtime_checkable

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from dzrobot.embodiments.action_conventions import HandMotion
from dzrobot.embodiments.registry import EMBODIMENTS
from dzrobot.embodiments.spec import Embodiment
from dzrobot.errors import ConfigError

_BLIND = (gym.wrappers.TimeLimit, gym.wrappers.OrderEnforcing)
"""Wrappers of Gymnasium that hand every observation on without a look at it."""


@runtime_checkable
class FrameSkippingEnv(Protocol):
    """An environment that can leave out the images of an observation, and the time they take."""

    def omit_frames(self) -> None:
        """Leave all ``video.*`` out of the observation of the next step, and of no other."""
        ...


@runtime_checkable
class HoldingEnv(Protocol):
    """An environment whose robot is held when its policy fails."""

    def policy_failed(self, ended: str, reason: str) -> dict[str, Any]:
        """Hold the robot, end the episode, and return the last info.

        Args:
            ended: `INVALID_ACTION` or `POLICY_ERROR`.
            reason: What the policy did.
        """
        ...


@runtime_checkable
class AttendedArm(Protocol):
    """An environment that drives an arm, real or emulated, which people stand beside."""

    is_real: bool
    """Whether it is reached at an address; one that is emulated here is not."""

    judged_by_operator: bool
    """Whether a person says if an episode succeeded."""

    def attend(self, operator: Any, *, unattended: bool = False) -> None:
        """Say who looks after the arm, before the first reset.

        Raises:
            ConfigError: the arm is a real one, and no person does.
        """
        ...

    def rest(self) -> None:
        """Stop the arm at once, from any thread."""
        ...

    def operator_stop(self) -> Exception:
        """Stop the arm for a person, from any thread; nothing moves until one has looked.

        Returns:
            What says so, and what ends it.
        """
        ...

    def images(self) -> Mapping[str, NDArray[np.uint8]]:
        """Return the newest image (H, W, 3) of every camera."""
        ...

    def reported(self, info: dict[str, Any], outcome: Any) -> dict[str, Any]:
        """Return ``info`` with a person's verdict."""
        ...


@dataclass(frozen=True, kw_only=True)
class EnvironmentFacts:
    """What an environment states in attributes of ``env.unwrapped``; all may be absent."""

    embodiment: Embodiment | None = None
    """Robot whose keys, sizes and actions it has."""

    control_hz: float | None = None
    """Steps per second; None: the embodiment's."""

    init_states: int | None = None
    """Initial states of its task, numbered from 0; None: it has no numbers."""

    task: str | None = None
    """Instruction, where it is known before the first reset."""

    hand: HandMotion | None = None
    """Which numbers of state and action move its hand, and what they mean."""

    hand_position: slice | None = None
    """Where in the concatenated state the position of the hand is, in meters."""

    prompt: str | None = None
    """Where its instructions come from, where there is more than one source."""

    opengl: str | None = None
    """Backend that it draws with, where the images may depend on it."""

    moves_an_arm: bool = False
    """Whether it drives an arm, real or emulated."""

    is_real: bool = False
    """Whether metal moves."""

    omits_frames: bool = False
    """Whether it can leave out the images of an observation."""

    holds: bool = False
    """Whether its robot is held when its policy fails."""

    remote: Mapping[str, Any] | None = None
    """What a result depends on of an environment that a server makes; None: it runs here."""

    workcell: Mapping[str, Any] | None = None
    """What a result depends on of the arm's workcell; None: no arm."""

    perturbations: tuple[str, ...] = ()
    """Axes along which its scene can be made harder."""

    libraries: tuple[str, ...] = ()
    """Distributions whose versions a result depends on, beyond those of every evaluation."""

    @property
    def robot(self) -> Embodiment | None:
        """Robot that policies for it are made for: the built-in description, if its tag has one.

        A workcell may depart from that, in the axes of its actions for example; see
        :mod:`dzrobot.embodiments.action_conventions`. What its steps are measured from is its own
        choice: a checkpoint says what it was trained with.
        """
        own = self.embodiment
        if own is None:
            return None
        return replace(EMBODIMENTS.get(own.tag, own), action_anchor=own.action_anchor)


def facts_of(env: gym.Env[Any, Any]) -> EnvironmentFacts:
    """Return what ``env`` states; it need not have been reset.

    Raises:
        ConfigError: its embodiment is something else.
    """
    inner = env.unwrapped
    # Attributes of foreign classes, by the names that docs/extend/environment.md promises.
    stated = {
        field.name: value
        for field in fields(EnvironmentFacts)
        if (value := getattr(inner, field.name, None)) is not None
    }
    own, hand = stated.get("embodiment"), stated.get("hand")
    if own is not None and not isinstance(own, Embodiment):
        raise ConfigError(
            f"{type(inner).__name__}.embodiment is a {type(own).__name__}; give an Embodiment, "
            "such as load_embodiment('libero_sim')"
        )
    if own is not None:
        stated.setdefault("control_hz", own.timing.control_hz)
    # `hand` is a common name: environments keep the state of a gripper, for example, under it.
    if isinstance(hand, HandMotion):
        stated["hand_position"] = hand.position
    else:
        stated.pop("hand", None)
    is_arm = isinstance(inner, AttendedArm)
    stated |= {"moves_an_arm": is_arm, "is_real": is_arm and stated.get("is_real", False)}
    stated["omits_frames"] = isinstance(inner, FrameSkippingEnv)
    stated["holds"] = isinstance(inner, HoldingEnv)
    return EnvironmentFacts(**stated)


def omitter(env: gym.Env[Any, Any], facts: EnvironmentFacts) -> Callable[[], None] | None:
    """Return what makes ``env`` leave out the images of its next step; None where it cannot.

    A wrapper may need every image, as one does that records or stacks them. So all of them have to
    be known not to: those that ``gym.make`` adds, and those with a true attribute
    ``takes_missing_frames``.

    Args:
        env: The environment, wrapped or not; what it says of itself is on ``env.unwrapped``.
        facts: What it states.
    """
    inner: Any = env.unwrapped
    if not facts.omits_frames:
        return None
    while isinstance(env, gym.Wrapper):
        # Of the class: an instance would answer for what it wraps.
        if not isinstance(env, _BLIND) and not getattr(type(env), "takes_missing_frames", False):
            return None
        env = env.env
    omit: Callable[[], None] = inner.omit_frames
    return omit
