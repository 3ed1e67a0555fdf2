"""What all environments here share: arguments by name, initial states, kinds of failure."""

import inspect
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import wraps
from typing import Any, ParamSpec

from dzrobot.errors import ModalityError, refuse_unknown

P = ParamSpec("P")

DRAWN = 2**31
"""How many there are where a start's number is all that it is drawn from."""


def named_arguments(init: Callable[P, None]) -> Callable[P, None]:
    """Make a constructor that ``gym.make`` calls name the nearest argument to an unknown one.

    Raises:
        UnknownNameError: The constructor takes no such argument.
    """
    known = [*inspect.signature(init).parameters][1:]

    @wraps(init)
    def checked(*args: P.args, **given: P.kwargs) -> None:
        refuse_unknown(type(args[0]).__name__, given, known)
        init(*args, **given)

    return checked


class InitialStates:
    """A cursor over ``count`` initial states.

    A seed names a state (``seed % count``), so that ``reset(seed=s)`` repeats itself and fixes
    every unseeded reset after it. ``options={"init_state_id": k}`` names one. Otherwise the next
    one follows, from 0 onwards.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._last = -1

    def choose(self, seed: int | None, options: Mapping[str, Any] | None) -> int:
        """Return the initial state of the next episode, in ``[0, count)``.

        Raises:
            ModalityError: ``options`` holds another name, or a state that does not exist.
        """
        options = options or {}
        if unknown := sorted(set(options) - {"init_state_id"}):
            raise ModalityError(
                f"reset got the options {', '.join(unknown)}; the only one is init_state_id."
            )
        if "init_state_id" in options:
            self._last = self._checked(options["init_state_id"])
        elif seed is not None:
            self._last = seed % self._count
        else:
            self._last = (self._last + 1) % self._count
        return self._last

    def _checked(self, wanted: Any) -> int:
        try:
            index = range(self._count).index(wanted)
        except ValueError as error:
            raise ModalityError(
                f"init_state_id={wanted!r} does not exist; this task has 0 to {self._count - 1}."
            ) from error
        return index


NEAR_SHARE = 1 / 3
"""Less than this share of the initial distance left counts as near the goal."""


class FailureClass(StrEnum):
    """Why the goal does not hold; from the least that was achieved to the most."""

    NEVER_REACHED = "never reached"
    """The gripper touched nothing that the goal asks to be moved."""

    NOT_GRASPED = "touched, not grasped"
    """It was touched and not taken hold of; of a drawer, door or knob: not moved far."""

    WRONG_OBJECT = "wrong object"
    """Something else was grasped, or another drawer, door or knob moved, and nothing else done."""

    DROPPED = "grasped, then dropped"
    """It was held, and is held no longer."""

    HELD = "held far from the goal"
    """It is held where the episode ended, short of the goal."""

    NEAR_GOAL = "time ran out near the goal"
    """Less than `NEAR_SHARE` of the distance was left, and it was not dropped."""

    GOAL_LOST = "goal held, then lost"
    """The goal, or a part of it that did not hold at the start, came to hold and does no more."""


def episode_info(
    task: str, start: int, failure: FailureClass | None, *, success: bool, ends: bool
) -> dict[str, Any]:
    """Return what ``info`` holds at every step; ``reset_reason`` is empty while it goes on.

    Args:
        task: The instruction.
        start: Number of the initial state.
        failure: How the episode failed if it ended now; None while the goal holds.
        success: Whether the goal holds.
        ends: Whether success ends the episode.
    """
    return {
        "is_success": success,
        "task": task,
        "init_state_id": start,
        "reset_reason": "success" if success and ends else "",
        "failure_class": None if failure is None else failure.value,
    }
