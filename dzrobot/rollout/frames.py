"""Which images of an episode somebody looks at; the others need not be drawn.

Without a GPU, drawing is nine tenths of a simulator's step, and a policy that executes eight
actions of each plan looks at one image of eight.
"""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import gymnasium as gym

from dzrobot.policies.base import DEFAULT_SESSION, Policy, SelectivePolicy

_BLIND = (gym.wrappers.TimeLimit, gym.wrappers.OrderEnforcing)
"""Wrappers of Gymnasium that hand every observation on without a look at it."""


@runtime_checkable
class FrameSkippingEnv(Protocol):
    """An environment that can leave out the images of an observation, and the time they take."""

    def omit_frames(self) -> None:
        """Leave all ``video.*`` out of the observation of the next step, and of no other."""
        ...


@runtime_checkable
class SelectiveActor(Protocol):
    """An actor that knows beforehand whose images it will look at."""

    def reads_frames(self) -> bool:
        """Return whether the images of the next observation are looked at, then or later."""
        ...


def omitter(env: gym.Env[Any, Any]) -> Callable[[], None] | None:
    """Return what makes ``env`` leave out the images of its next step; None where it cannot.

    A wrapper may need every image, as one does that records or stacks them. So all of them have to
    be known not to: those that ``gym.make`` adds, and those with a true attribute
    ``takes_missing_frames``.

    Args:
        env: The environment, wrapped or not; what it says of itself is on ``env.unwrapped``.
    """
    inner = env.unwrapped
    if not isinstance(inner, FrameSkippingEnv):
        return None
    while isinstance(env, gym.Wrapper):
        # Asked of the class: an instance passes the question on to what it wraps.
        if not isinstance(env, _BLIND) and not getattr(type(env), "takes_missing_frames", False):
            return None
        env = env.env
    return inner.omit_frames


def reads_frames(actor: object) -> bool:
    """Return whether ``actor`` looks at the images of the next observation, then or later."""
    return actor.reads_frames() if isinstance(actor, SelectiveActor) else True


def policy_reads_frames(
    policy: Policy, session: str = DEFAULT_SESSION, *, asked: bool | None = None
) -> bool:
    """Return whether ``policy`` looks at the images of the next observation, then or later.

    Args:
        policy: One that does not know looks at all of them.
        session: Of the policy.
        asked: As of ``SelectivePolicy``.
    """
    if not isinstance(policy, SelectivePolicy):
        return True
    return policy.reads_frames(session=session, asked=asked)
