"""Somebody at a device, as a program: steers an arm with a known scene to the cube and lifts it.

    dzrobot record --workcell emulated --teleop scripted_teleop:ScriptedOperator --episodes 10 \
        --unattended --output lift-set

It goes the way of a SpaceMouse: readings with a deadman, motions in the axes of the base, a gripper
that is open or closed. It is not quite steady, as no hand is, and lets go of the deadman at times.
"""

from typing import Any

import numpy as np

from dzrobot.envs.franka.pick_expert import CLOSE, PickExpert, motion_of
from dzrobot.envs.teleop.device import Gives, TeleopReading

TREMBLE = 0.1
"""Standard deviation of the hand's unsteadiness, in shares of the largest step."""

PAUSE_EVERY = 25
"""Readings after which the deadman is let go for one."""


class ScriptedOperator:
    """A device that looks at the scene.

    Args:
        env: Of an arm whose scene is known, such as ``workcell="emulated"``.
    """

    gives: Gives = "motion"
    has_deadman = True

    def __init__(self, env: Any) -> None:
        self._env = env.unwrapped
        self._expert = PickExpert(self._env)
        self._generator = np.random.default_rng(0)
        self._readings = 0

    def check(self) -> None:
        """It needs no library of its own."""

    def open(self) -> None:
        """It is always there."""

    def close(self) -> None:
        """Nothing is held."""

    def read(self) -> TeleopReading:
        """Return how the hand is to move now."""
        self._readings += 1
        # Whoever begins an episode has to let go of the deadman first.
        rests = self._expert.begins or self._readings % PAUSE_EVERY == 0
        move = self._expert.move()
        motion = motion_of(move, self._env.arm.state().pose, self._env.config.action)
        motion[:3] += self._generator.normal(0.0, TREMBLE, 3)
        return TeleopReading(
            active=not rests,
            motion=tuple(float(number) for number in motion.clip(-1.0, 1.0)),
            closed=move.gripper == CLOSE,
        )
