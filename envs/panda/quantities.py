"""Named quantities that an arm measures and is commanded, as parts of an embodiment.

A part of an embodiment names its quantities (``Part.quantities``), or is one by its own name, as
``state.joint_position``. So one environment serves every embodiment of an arm.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import ArrayLike

from dzrobot.embodiments.action_conventions import HandMotion
from dzrobot.embodiments.spec import HOLD_ZERO, Embodiment, Part
from dzrobot.envs.panda.poses import Array, euler_of, quaternion_of
from dzrobot.envs.panda.state import OPEN_M, ActionConfig, ArmState, GripperState, in_hand_axes
from dzrobot.errors import ConfigError, suggest

CLOSED_ABOVE = 0.5
"""A gripper that is asked for a position above this closes, else it opens."""

_HALF_TURN = 3.1416


@dataclass(frozen=True)
class Moment:
    """What a state is read from."""

    state: ArmState
    gripper: GripperState
    origin: Array
    """Pose (4, 4) the episode began at."""

    action: ActionConfig
    """Axes of the hand's velocity."""

    @property
    def from_start(self) -> Array:
        """The hand's pose (4, 4) in the frame of the one the episode began at."""
        pose: Array = np.linalg.inv(self.origin) @ self.state.pose
        return pose


@dataclass(frozen=True)
class Measured:
    """One quantity that an arm measures."""

    low: tuple[float, ...]
    high: tuple[float, ...]
    """Lowest and highest values; there are as many as numbers."""

    read: Callable[[Moment], ArrayLike]

    @classmethod
    def within(cls, limit: float, dim: int, read: Callable[[Moment], ArrayLike]) -> "Measured":
        """Return ``dim`` numbers in [-``limit``, ``limit``]."""
        return cls((-limit,) * dim, (limit,) * dim, read)


def gripper_position(width_m: float, widest_m: float = OPEN_M) -> float:
    """Return how far fingers ``width_m`` apart are closed, as DROID has it: 0 open to 1 closed.

    ``widest_m`` is the distance between those of an open hand of the same kind.
    """
    return float(np.clip(1.0 - width_m / widest_m, 0.0, 1.0))


MEASURED: Mapping[str, Measured] = {
    "gripper_width": Measured((-0.01,), (0.2,), lambda at: [at.gripper.width_m]),
    "gripper_position": Measured(
        (0.0,), (1.0,), lambda at: [gripper_position(at.gripper.width_m, at.gripper.widest_m)]
    ),
    "joint_position": Measured.within(4.0, 7, lambda at: at.state.joints),
    "joint_velocity": Measured.within(10.0, 7, lambda at: at.state.joint_speeds),
    "position": Measured.within(2.0, 3, lambda at: at.state.pose[:3, 3]),
    "euler": Measured.within(_HALF_TURN, 3, lambda at: euler_of(at.state.pose[:3, :3])),
    "quaternion": Measured.within(1.0, 4, lambda at: quaternion_of(at.state.pose[:3, :3])),
    "position_from_start": Measured.within(2.0, 3, lambda at: at.from_start[:3, 3]),
    "euler_from_start": Measured.within(
        _HALF_TURN, 3, lambda at: euler_of(at.from_start[:3, :3])
    ),
    "force": Measured.within(1000.0, 3, lambda at: at.state.force_n),
    "torque": Measured.within(500.0, 3, lambda at: at.state.torque_nm),
    "twist": Measured.within(10.0, 6, lambda at: at.state.twist),
    "hand_velocity": Measured.within(10.0, 6, lambda at: in_hand_axes(at.state, at.action)),
}  # fmt: skip
"""Meters, radians, seconds, N and Nm. Poses are of the hand's grasp point in the base frame, as
``twist`` is, or in the frame of the pose the episode began at (``..._from_start``); ``euler`` is
roll, pitch, yaw about fixed axes, ``quaternion`` is x, y, z, w with w >= 0. Force and torque have
the hand's axes, ``hand_velocity`` those of ``action.frame``. ``gripper_position`` is 0 open to 1
closed."""


MOTIONS: Mapping[str, int] = {
    "hand_step": 6, "joint_position": 7, "pose_euler": 6, "pose_quaternion": 7,
}  # fmt: skip
"""What moves the arm, and how many numbers it is. ``hand_step``: translation and rotation, each
number in [-1, 1]; see ``config.action``. ``joint_position``: joint angles to move to, rad.
``pose_euler``, ``pose_quaternion``: where the grasp point is to be in the base frame, position (m),
then roll, pitch, yaw (rad) or x, y, z, w, all as ``MEASURED`` has them."""

GRIPPERS: Mapping[str, tuple[float, float]] = {
    "gripper_change": (-1.0, 1.0),
    "gripper_position": (0.0, 1.0),
}
"""What moves the fingers, with its lowest and highest number. ``gripper_change``: at or above the
threshold a closed hand opens, at or below minus it an open one closes. ``gripper_position``: above
0.5 closed, else open."""

_PLACES = set(MOTIONS) - {"hand_step"}
_COMMANDED = {**MOTIONS, **dict.fromkeys(GRIPPERS, 1)}


@dataclass(frozen=True)
class ArmLayout:
    """Where an embodiment's quantities are in its state and action."""

    robot: Embodiment

    motion: str
    """Key of :data:`MOTIONS`."""

    motion_at: slice
    """Numbers of the action that move the hand."""

    gripper: str
    """Key of :data:`GRIPPERS`."""

    gripper_at: int
    """Number of the action that moves the gripper."""

    @classmethod
    def of(cls, robot: Embodiment) -> "ArmLayout":
        """Return where ``robot`` has what.

        Raises:
            ConfigError: a part names no quantity of an arm, or not exactly one motion and one
                gripper are commanded.
        """
        for part in robot.state:
            _check(part, {name: len(one.low) for name, one in MEASURED.items()}, "measures")
        found: dict[str, int] = {}
        start = 0
        for part in robot.action:
            _check(part, _COMMANDED, "is commanded")
            if part.hold == HOLD_ZERO and set(_names(part)) & _PLACES:
                raise ConfigError(
                    f"{part.key} says where to be, and zeros would not hold it there: give hold= "
                    "the state part that it equals while the arm rests"
                )
            for name in _names(part):
                found[name] = start
                start += _COMMANDED[name]
        motions, grippers = ([name for name in found if name in of] for of in (MOTIONS, GRIPPERS))
        if len(motions) != 1 or len(grippers) != 1 or len(found) != 2:
            raise ConfigError(
                f"the action of {robot.tag!r} is {', '.join(found)}; an arm takes one of "
                f"{', '.join(MOTIONS)} and one of {', '.join(GRIPPERS)}"
            )
        motion, gripper = motions[0], grippers[0]
        at = slice(found[motion], found[motion] + MOTIONS[motion])
        return cls(robot, motion, at, gripper, found[gripper])

    @property
    def state_limits(self) -> dict[str, tuple[tuple[float, ...], tuple[float, ...]]]:
        """Lowest and highest values of every state part, by key."""
        return {
            part.key: (
                tuple(value for name in _names(part) for value in MEASURED[name].low),
                tuple(value for name in _names(part) for value in MEASURED[name].high),
            )
            for part in self.robot.state
        }

    @property
    def action_description(self) -> str:
        """What an action is."""
        parts = [(at, name) for at, name in ((self.motion_at.start, self.motion),
                                             (self.gripper_at, self.gripper))]  # fmt: skip
        listed = ", ".join(f"{_COMMANDED[name]} {name}" for _, name in sorted(parts))
        return f"an action is {self.robot.action_dim} numbers: {listed}"

    def action_space(
        self, joints: tuple[ArrayLike, ArrayLike], workspace: tuple[ArrayLike, ArrayLike]
    ) -> spaces.Box:
        """Return the box (A,) of an action.

        Args:
            joints: Lowest and highest joint angles (7,) of a target, rad.
            workspace: Lowest and highest position (3,) of one, m.
        """
        low, high = np.full((2, self.robot.action_dim), ((-1.0,), (1.0,)), np.float32)
        if self.motion == "joint_position":
            low[self.motion_at], high[self.motion_at] = joints
        elif self.motion != "hand_step":
            turn = np.full(MOTIONS[self.motion] - 3, 1.0)
            turn *= _HALF_TURN if self.motion == "pose_euler" else 1.0
            low[self.motion_at] = np.concatenate([workspace[0], -turn])
            high[self.motion_at] = np.concatenate([workspace[1], turn])
        low[self.gripper_at], high[self.gripper_at] = GRIPPERS[self.gripper]
        return spaces.Box(low, high, dtype=np.float32)

    def read(self, moment: Moment) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
        """Return every state part, (dim,) float32, by key."""
        return {
            part.key: np.concatenate(
                [np.asarray(MEASURED[name].read(moment), np.float64) for name in _names(part)]
            ).astype(np.float32)
            for part in self.robot.state
        }

    def changes_gripper(self, action: Array, *, is_open: bool, threshold: float) -> bool:
        """Return whether ``action`` (A,) asks an open or closed hand to become the other.

        Args:
            action: Finite numbers.
            is_open: Which state of the gripper was requested last.
            threshold: Of ``config.gripper``; counts for ``gripper_change``.
        """
        value = float(action[self.gripper_at])
        if self.gripper == "gripper_position":
            return is_open == (value > CLOSED_ABOVE)
        return wants_change(value, is_open=is_open, threshold=threshold)

    def hand_motion(self, action: ActionConfig) -> HandMotion | None:
        """Return which numbers move the hand; None where state or action are of other kinds."""
        at = dict(self._state_slices())
        position = at.get("position_from_start") or at.get("position")
        rotation = at.get("euler_from_start") or at.get("euler")
        fingers = at.get("gripper_width")
        if self.motion != "hand_step" or not (position and rotation and fingers):
            return None
        first = self.motion_at.start
        return HandMotion(
            position=position,
            rotation=rotation,
            rotation_form="euler",
            fingers=fingers,
            translation=slice(first, first + 3),
            turn=slice(first + 3, first + 6),
            gripper=self.gripper_at,
            closes=-1 if self.gripper == "gripper_change" else 1,
            translation_m=action.translation_m,
            rotation_rad=action.rotation_rad,
            frame=action.frame,
        )

    def _state_slices(self) -> Iterator[tuple[str, slice]]:
        start = 0
        for part in self.robot.state:
            for name in _names(part):
                dim = len(MEASURED[name].low)
                yield name, slice(start, start + dim)
                start += dim


def wants_change(value: float, *, is_open: bool, threshold: float) -> bool:
    """Return whether the action number ``value`` (+1 opens) changes the hand.

    Between minus and plus ``threshold`` the hand keeps what it does, so a wavering policy does not
    make it chatter.
    """
    return value <= -threshold if is_open else value >= threshold


def _names(part: Part) -> tuple[str, ...]:
    return part.quantities or (part.name,)


def _check(part: Part, known: Mapping[str, int], does: str) -> None:
    for name in _names(part):
        if name not in known:
            raise ConfigError(
                f"{part.key} names {name!r}, which no arm {does}.{suggest(name, known)} Known: "
                f"{', '.join(known)}. Name them in the embodiment, as "
                "Part(..., quantities=('joint_position',))"
            )
    dim = sum(known[name] for name in _names(part))
    if dim != part.dim:
        raise ConfigError(
            f"{part.key} has {part.dim} numbers, and {', '.join(_names(part))} are {dim}"
        )
