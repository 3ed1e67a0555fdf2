"""What is usually wrong with recorded states and actions, and what mends it.

Plain arithmetic: recordings are compared with what a replay of them gives, step by step. Steps are
compared, not places, so that what came before a step does not count against it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dzrobot.embodiments.action_conventions import HandMotion
from dzrobot.envs.panda.poses import rotation_about, rotation_of, rotation_vector

Array = NDArray[np.floating[Any]]

LAGS = (-1, 1, -2, 2)
"""Rows by which actions may be off from observations."""

MOST_STEPS = 1_000_000
"""More than an episode has."""

RATES = (2, 3, 4)
"""How many times too slow or too fast a recording may be."""

AGREES = 0.1
"""Relative difference of steps below which recording and replay are the same motion."""

_STILL = (1e-3, 1e-2, 1e-3)
"""Steps (m, rad, the fingers' units) that count as motion: below, a difference is none."""

_SAME_RAD = 0.5
"""Rotation vectors that differ by less stand for the same motion: antipodes are a turn apart."""

_FULL_TURN = 2 * np.pi


@dataclass(frozen=True)
class Misfit:
    """Differences between recorded and replayed steps, each relative to the larger motion."""

    translation: float
    rotation: float
    fingers: float

    @property
    def parts(self) -> tuple[float, float, float]:
        """Return all three."""
        return self.translation, self.rotation, self.fingers

    @property
    def total(self) -> float:
        """Root of the mean square of the three."""
        return float(np.sqrt(np.mean(np.square(self.parts))))


Change = Callable[[Array, Array], Array]
"""Takes actions (T, A) and states (T, S); returns the actions as they were meant, (T', A)."""


@dataclass(frozen=True, kw_only=True)
class Repair:
    """One way in which a recording may differ from what the environment takes."""

    what: str
    """Name of the fault."""

    note: str
    """What was found, for a person."""

    change: Change = lambda actions, states: actions
    """Undoes it."""

    recorded_every: int = 1
    """Recorded rows from one that is compared to the next."""

    replayed_every: int = 1
    """Replayed steps from one that is compared to the next."""

    lag: int = 0
    """Replayed step that belongs to the first recorded row."""

    changes_rows: bool = False
    """Whether a repaired recording has another number of actions."""

    def then(self, other: "Repair") -> "Repair":
        """Return both, this one first; what changes the number of rows comes last."""
        first, last = sorted((self, other), key=lambda repair: repair.changes_rows)
        return Repair(
            what=f"{self.what}, {other.what}",
            note=f"{self.note}; {other.note}",
            change=lambda actions, states: last.change(first.change(actions, states), states),
            recorded_every=self.recorded_every * other.recorded_every,
            replayed_every=self.replayed_every * other.replayed_every,
            lag=self.lag + other.lag,
            changes_rows=self.changes_rows or other.changes_rows,
        )


UNCHANGED = Repair(what="", note="")
"""Nothing is wrong."""


@dataclass(frozen=True)
class RotationReading:
    """A way to read the three numbers of a rotation."""

    note: str
    matrix: Callable[[Array], Array]
    """Takes (3,), returns (3, 3)."""


_READINGS = {
    "rotation vector": rotation_about,
    "euler": rotation_of,
}

READINGS = (
    RotationReading("in reversed order (z, y, x)", lambda v: rotation_about(v[::-1])),
    RotationReading("as roll, pitch, yaw about fixed axes", rotation_of),
    RotationReading(
        "as Euler angles in reversed order", lambda v: rotation_of(np.asarray(v)[::-1])
    ),
    RotationReading("as a rotation vector", rotation_about),
    RotationReading("inverted", lambda v: rotation_about(-np.asarray(v))),
)
"""What recordings hold instead of what the environment does, the likelier first."""


def as_stated(hand: HandMotion) -> RotationReading:
    """Return how the environment writes rotations."""
    return RotationReading("as the environment does", _READINGS[hand.rotation_form])


def angle(one: Array, other: Array) -> float:
    """Return the angle (rad) between two rotations (3, 3)."""
    return float(np.linalg.norm(rotation_vector(one @ other.T)))


def steps_of(states: Array, hand: HandMotion, reading: RotationReading) -> tuple[Array, ...]:
    """Return the steps between states (T, S): translation, rotation vector and fingers."""
    turned = [reading.matrix(row) for row in states[:, hand.rotation]]
    turns = [rotation_vector(b @ a.T) for a, b in pairwise(turned)]
    return (
        np.diff(states[:, hand.position], axis=0),
        np.array(turns).reshape(-1, 3),
        np.diff(states[:, hand.fingers], axis=0),
    )


def misfit(
    recorded: Array, replayed: Array, hand: HandMotion, reading: RotationReading, repair: Repair
) -> Misfit:
    """Return how far recorded states (T, S) differ in their steps from replayed ones (T', S)."""
    ours = steps_of(recorded[:: repair.recorded_every], hand, reading)
    theirs = steps_of(replayed[:: repair.replayed_every], hand, as_stated(hand))
    shares = []
    for one, other, still in zip(ours, theirs, _STILL, strict=True):
        one, other = aligned(one, other, repair.lag)
        floor = still * np.sqrt(max(len(one), 1))
        size = max(np.linalg.norm(one), np.linalg.norm(other), floor)
        shares.append(float(np.linalg.norm(one - other) / size))
    return Misfit(*shares)


def aligned(recorded: Array, replayed: Array, lag: int = 0) -> tuple[Array, Array]:
    """Return both, cut so that recorded row t is beside replayed row t + ``lag``."""
    one, other = recorded[max(0, -lag) :], replayed[max(0, lag) :]
    count = min(len(one), len(other))
    return one[:count], other[:count]


def scale_of(recorded: Sequence[Array], replayed: Sequence[Array]) -> float:
    """Return the factor that makes replayed steps the recorded ones, by least squares."""
    over = under = 0.0
    for one, other in map(aligned, recorded, replayed):
        over += float((one * other).sum())
        under += float((other**2).sum())
    return over / under if under > 0 else 0.0


def gripper_repairs(hand: HandMotion) -> Iterator[Repair]:
    """Yield what may be wrong with the gripper's number."""
    closes, opens = ("closes", "opens") if hand.closes > 0 else ("opens", "closes")

    def mapped(formula: Callable[[Array], Array]) -> Change:
        return lambda actions, _: _with(actions, hand.gripper, formula(actions[:, hand.gripper]))

    yield Repair(
        what="gripper sign",
        note=f"+1 {opens} in the recording and {closes} in the environment: change the sign of "
        f"action[{hand.gripper}]",
        change=mapped(lambda g: -g),
    )
    for sign, high in ((1.0, closes), (-1.0, opens)):
        yield Repair(
            what="gripper range",
            note=f"action[{hand.gripper}] is 0 or 1, where 1 {high}; the environment takes -1 and "
            f"+1, and +1 {closes}: use {'2 g - 1' if sign > 0 else '1 - 2 g'}",
            change=mapped(lambda g, sign=sign: sign * (2 * g - 1)),  # type: ignore[misc]
        )


def turn_repairs(hand: HandMotion) -> Iterator[Repair]:
    """Yield what may be wrong with the turn of an action, but for its scale."""
    yield Repair(
        what="rotation order",
        note="an action's rotation is written z, y, x: reverse its three numbers",
        change=lambda actions, _: _with(actions, hand.turn, actions[:, hand.turn][:, ::-1]),
    )
    yield Repair(
        what="rotation sign",
        note="an action's rotation turns the other way: change its sign",
        change=lambda actions, _: _with(actions, hand.turn, -actions[:, hand.turn]),
    )


_AXES = "xyz"


def axis_repairs(hand: HandMotion) -> Iterator[Repair]:
    """Yield translations whose axes are exchanged, or of which some point the other way."""
    start = hand.translation.start

    def moved(order: Sequence[int], signs: Sequence[float]) -> Change:
        return lambda actions, _: _with(
            actions, hand.translation, actions[:, hand.translation][:, list(order)] * signs
        )

    for order in ((1, 0, 2), (2, 1, 0), (0, 2, 1), (1, 2, 0), (2, 0, 1)):
        names = ", ".join(_AXES[one] for one in np.argsort(order))
        yield Repair(
            what="translation axes exchanged",
            note=f"action[{start}:{start + 3}] is written {names}: order its three numbers x, y, z",
            change=moved(order, (1, 1, 1)),
        )
    for signs in ((-1, 1, 1), (1, -1, 1), (1, 1, -1), (-1, -1, 1), (-1, -1, -1)):
        axes = [axis for axis, sign in enumerate(signs) if sign < 0]
        names = ", ".join(_AXES[axis] for axis in axes)
        numbers = ", ".join(f"action[{start + axis}]" for axis in axes)
        yield Repair(
            what="translation mirrored",
            note=f"an action's translation goes the other way along {names}: change the sign of "
            f"{numbers}",
            change=moved((0, 1, 2), signs),
        )


def row_repairs() -> Iterator[Repair]:
    """Yield rows by which actions may stand off from observations.

    Where the first actions are missing, the first that is there is taken for them.
    """
    for lag in LAGS:
        which, way = ("before", "up") if lag > 0 else ("after", "down")
        rows = "row" if abs(lag) == 1 else f"row {abs(lag)}"
        yield Repair(
            what=f"off by {'one' if abs(lag) == 1 else abs(lag)}",
            note=f"each observation is in the row of the action of the {rows} {which} it: move the "
            f"actions {abs(lag)} {way}",
            change=lambda actions, _, lag=lag: np.concatenate(  # type: ignore[misc]
                [np.repeat(actions[:1], max(0, -lag), axis=0), actions]
            ),
            lag=max(0, lag),
            changes_rows=lag < 0,
        )


def motion_repairs(hand: HandMotion, reading: RotationReading) -> Iterator[Repair]:
    """Yield what else may be wrong with an action's motion as a whole, but for its scale."""
    for rate in RATES:
        yield Repair(
            what="frame rate",
            note=f"each row lasts {rate} steps of the environment: it was recorded {rate} times "
            "slower",
            change=lambda actions, _, rate=rate: np.repeat(actions, rate, axis=0),  # type: ignore[misc]
            replayed_every=rate,
            changes_rows=True,
        )
        yield Repair(
            what="frame rate",
            note=f"{rate} rows last one step of the environment: it was recorded {rate} times "
            "faster",
            change=lambda actions, _, rate=rate: actions[::rate],  # type: ignore[misc]
            recorded_every=rate,
            changes_rows=True,
        )
    yield Repair(
        what="action frame",
        note="translation and rotation are along the hand's axes, the environment takes them along "
        "the base's",
        change=lambda actions, states: _in_base_axes(actions, states, hand, reading),
    )


def absolute_repairs(hand: HandMotion, reading: RotationReading) -> Iterator[Repair]:
    """Yield actions that are poses instead of differences of poses."""
    yield Repair(
        what="absolute instead of delta",
        note="actions are target poses, the environment takes differences: subtract the state's "
        f"pose and divide by {hand.translation_m:g} m and {hand.rotation_rad:g} rad",
        change=lambda actions, states: differences(actions, states, hand, reading),
    )


def looks_absolute(actions: Array, states: Array, hand: HandMotion) -> bool:
    """Return whether translations (T, 3) lie where the hand is, and move with it."""
    away = np.linalg.norm(actions[:, hand.translation] - states[:, hand.position], axis=1)
    from_zero = np.linalg.norm(states[:, hand.position], axis=1)
    return bool(np.median(away) < 0.25 * np.median(from_zero))


def scaled(part: slice, factor: float) -> Change:
    """Return what multiplies ``part`` of an action by ``factor``."""
    return lambda actions, _: _with(actions, part, factor * actions[:, part])


def differences(actions: Array, states: Array, hand: HandMotion, reading: RotationReading) -> Array:
    """Return actions (T, A) that are target poses as differences from the states (T, S)."""
    moves = (actions[:, hand.translation] - states[:, hand.position]) / hand.translation_m
    turns = [
        rotation_vector(reading.matrix(target) @ reading.matrix(now).T) / hand.rotation_rad
        for target, now in zip(actions[:, hand.turn], states[:, hand.rotation], strict=True)
    ]
    return _with(_with(actions, hand.translation, moves), hand.turn, np.array(turns))


def _in_base_axes(
    actions: Array, states: Array, hand: HandMotion, reading: RotationReading
) -> Array:
    turned = np.array([reading.matrix(row) for row in states[: len(actions), hand.rotation]])
    for part in (hand.translation, hand.turn):
        actions = _with(actions, part, np.einsum("tij,tj->ti", turned, actions[:, part]))
    return actions


def _with(actions: Array, part: slice | int, values: Array) -> Array:
    changed = actions.copy()
    changed[:, part] = values
    return changed


def antipodal(recorded: Array, replayed: Array) -> bool:
    """Return whether two rotation vectors (3,) are one rotation by the other way around.

    A rotation by an angle about an axis is the rotation by the rest of a full turn about the
    opposite axis.
    """
    length = float(np.linalg.norm(replayed))
    if length < 1e-6:
        return False
    other_way = replayed * (1 - _FULL_TURN / length)
    return bool(np.linalg.norm(recorded - other_way) < _SAME_RAD)
