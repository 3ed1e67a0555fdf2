"""How an episode failed, in the words that the environments of this package use.

An environment says it in ``info["failure_class"]``, at every step as if the episode ended there;
one of another package may use words of its own, or leave the key out.
"""

from enum import StrEnum

NEAR_SHARE = 1 / 3
"""Less than this share of the way left counts as near the goal."""


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
    """It is held where the episode ended, on the way."""

    NEAR_GOAL = "time ran out near the goal"
    """Less than `NEAR_SHARE` of the way was left, and it was not dropped."""

    GOAL_LOST = "goal held, then lost"
    """The goal, or a part of it that did not hold at the start, came to hold and does no more."""
