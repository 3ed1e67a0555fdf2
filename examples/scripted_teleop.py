"""A program in place of a person at a device: steers an arm to a known cube and lifts it.

    dzrobot record --workcell emulated --teleop scripted_teleop:ScriptedOperator --episodes 10 \
        --unattended --output lift-set

It produces the readings of a SpaceMouse: a deadman, motions along the axes of the base, a gripper
that is open or closed. Like a human hand, it is unsteady and sometimes releases the deadman.
``scripted_teleop:HelpingOperator`` takes over from a policy (``--policy``) again and again.
"""

from typing import Any

import numpy as np

from dzrobot.envs.franka.pick_expert import CLOSE, DrivenPickArm, PickExpert, motion_of
from dzrobot.envs.teleop.device import Gives, TeleopReading

TREMBLE = 0.1
"""Standard deviation of the added motion noise, as a fraction of the largest step."""

PAUSE_EVERY = 25
"""Number of readings after which the deadman is released for one."""

WATCHES, HELPS = 30, 60
"""Readings for which a helping operator lets the policy act, and then steers."""


class ScriptedOperator:
    """A device that reads the simulated scene.

    Args:
        env: Environment of an arm with a known scene, such as ``workcell="emulated"``.
    """

    gives: Gives = "motion"
    has_deadman = True

    def __init__(self, env: Any) -> None:
        self._env = env.unwrapped
        self._expert = PickExpert(DrivenPickArm(self._env))
        self._generator = np.random.default_rng(0)
        self._readings = 0

    def check(self) -> None:
        """Do nothing: no library is needed."""

    def open(self) -> None:
        """Do nothing: there is no device to open."""

    def close(self) -> None:
        """Do nothing: there is nothing to release."""

    def read(self) -> TeleopReading:
        """Return the current reading."""
        self._readings += 1
        # The deadman must be released once at the start of an episode.
        rests = self._expert.begins or self._readings % PAUSE_EVERY == 0
        move = self._expert.move()
        motion = motion_of(move, self._env.arm.state().pose, self._env.config.action)
        motion[:3] += self._generator.normal(0.0, TREMBLE, 3)
        return TeleopReading(
            active=not rests,
            motion=tuple(float(number) for number in motion.clip(-1.0, 1.0)),
            closed=move.gripper == CLOSE,
        )


class HelpingOperator(ScriptedOperator):
    """The same beside a policy: watches it for a while, helps for a while, and so on.

    Args:
        env: As above.
    """

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self._looks = 0

    def read(self) -> TeleopReading:
        """Return the current reading."""
        self._looks += 1
        if self._looks % (WATCHES + HELPS) < WATCHES:
            return TeleopReading(active=False, motion=(0.0,) * 6)
        return super().read()
