"""Defects of recordings that make them useless for training, found while recording or reading."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from dzrobot.embodiments.spec import HOLD_ZERO, Embodiment, Gripper, Part
from dzrobot.embodiments.timing import Timing, valid_anchors

BLANK_DEVIATION = 1.0
"""In the 255 steps of an image's brightness; below, the image is all one color."""

_STRIDE = 4
"""Every fourth row and column of an image is enough to tell."""

STILL_S = 1.0
"""How long an image may stay the same to the bit while the robot moves."""

MOVED = 1e-3
"""Change of a number of the state (m, rad) that is a motion."""


def is_blank(image: np.ndarray) -> bool:
    """Return whether ``image`` (H, W, 3) is all one color: a covered or dead camera."""
    return float(image[::_STRIDE, ::_STRIDE].std()) < BLANK_DEVIATION


def too_short(frames: int, timing: Timing) -> bool:
    """Return whether an episode of so many rows holds no training sample of ``timing``."""
    return not len(valid_anchors(frames, timing))


def idle(actions: np.ndarray, states: np.ndarray) -> Iterator[str]:
    """Yield what is wrong with the numbers of an episode.

    Args:
        actions: (rows, A).
        states: (rows, S).
    """
    if len(actions) < 2:
        return
    if not actions.any():
        yield "every action is zero: nothing was asked of the robot"
    elif not np.ptp(actions, axis=0).any():
        yield "every action is the same: nothing was asked of the robot"
    if not (np.ptp(states, axis=0) > 0).any():
        yield "no number of the state ever changes: the robot was not read, or never moved"


_OTHER_UNIT = 20
"""Numbers that move so many times as far as those they belong to are in another unit."""

_SIDE = 0.05
"""A threshold lies at least this share of the way from the middles of the values on both sides."""

_OFF = 0.45
"""A value is near a command that is at most this share of the way to the other one from it."""

_NEAR = 0.1
"""At least this share of the values on a side of the threshold is near that side's command."""


def unfit(robot: Embodiment, rows: Mapping[str, np.ndarray]) -> Iterator[str]:
    """Yield where the description of a robot does not fit recorded numbers.

    Args:
        robot: Whose grippers and references are compared.
        rows: (rows, D) of every state and action part, by key.
    """
    for part in robot.action:
        values = rows[part.key]
        if not len(values):
            continue
        if part.gripper is not None:
            at = part.gripper.index % part.dim
            for fault in _gripper_faults(part.gripper, values[:, at].astype(np.float64)):
                number = f" number {at}" if part.dim > 1 else ""
                yield f"{part.key}{number} (column {part.feature}): {fault}"
        for use, key in (("reference", part.reference), ("hold", part.hold)):
            if key not in (None, HOLD_ZERO) and (use == "reference" or key != part.reference):
                yield from _unit_faults(part, use, key, values, rows[key])


def _gripper_faults(gripper: Gripper, values: np.ndarray) -> Iterator[str]:
    """Yield why a gripper's ``threshold``, ``low`` and ``high`` do not make what was recorded."""
    low, high, threshold = gripper.low, gripper.high, gripper.threshold
    least, most = float(values.min()), float(values.max())
    stated = (
        f"recorded from {least:g} to {most:g}, described as Gripper(threshold={threshold:g}, "
        f"low={low:g}, high={high:g})"
    )
    remedy = (
        "give the three in the data's own unit, or leave gripper out where the hand is commanded "
        "continuously"
    )
    above = values > threshold
    if above.all() or not above.any():
        command, near = (high, most) if above.all() else (low, least)
        if _used_both_ways(values, abs(high - low)):
            yield f"{stated}: every command would be {command:g}; {remedy}"
        elif min(abs(near - low), abs(near - high)) > abs(high - low) / 2:
            yield f"{stated}: no value is near low or high; {remedy}"
        return
    allowed = _OFF * abs(high - low)
    for name, command, side in (("low", low, values[~above]), ("high", high, values[above])):
        if (np.abs(side - command) <= allowed).mean() < _NEAR:
            where = "above" if name == "high" else "up to"
            yield (
                f"{stated}: values {where} the threshold are about {np.median(side):g}, not "
                f"{name}; {remedy}"
            )
            return
    lower, upper = float(np.median(values[~above])), float(np.median(values[above]))
    if not _SIDE <= (threshold - lower) / (upper - lower) <= 1 - _SIDE:
        yield (
            f"{stated}: the threshold is not between {lower:g} and {upper:g}, the two sides' "
            f"middles, but next to one of them; {remedy}"
        )


def _used_both_ways(values: np.ndarray, range_: float) -> bool:
    """Return whether numbers that lie on one side of a threshold open and close a hand."""
    least, spread = values.min(), np.ptp(values)
    if spread <= range_ / 2:
        # A hand that is not moved has noise, which is rarely at both ends of its own range.
        middle = np.abs(values - (least + spread / 2)) < spread / 4
        return bool(spread > range_ / 100 and middle.mean() < 0.5)
    return True


def _unit_faults(
    part: Part, use: str, key: str, actions: np.ndarray, states: np.ndarray
) -> Iterator[str]:
    """Yield that an action and the state it is measured from, or held at, have other units."""
    moved, measured = (np.ptp(table.astype(np.float64), axis=0) for table in (actions, states))
    both = (moved > 0) & (measured > 0)
    if not both.any():
        return
    ratios = moved[both] / measured[both]
    if ratios.min() > _OTHER_UNIT or ratios.max() < 1 / _OTHER_UNIT:
        yield (
            f"{part.key} (column {part.feature}): moves {np.median(ratios):.2g} times as far as "
            f"{key}, its {use}: the two are not in one unit, or the column holds differences "
            f"already, which have no {use}"
        )


class EpisodeWatch:
    """Looks at an episode row by row.

    Args:
        robot: Whose keys they have.
        hz: Rows per second.
    """

    def __init__(self, robot: Embodiment, hz: float) -> None:
        self._robot = robot
        self._hz = hz
        self._actions: list[np.ndarray] = []
        self._states: list[np.ndarray] = []
        self._before: dict[str, tuple[np.ndarray, int]] = {}
        """The image that a view shows, and since which row."""

        self._blank = dict.fromkeys(robot.video_keys, 0)
        self._still = dict.fromkeys(robot.video_keys, 0)

    def see(self, observation: Mapping[str, Any], action: np.ndarray) -> None:
        """Look at one row."""
        row = len(self._actions)
        self._actions.append(np.asarray(action, np.float32))
        self._states.append(np.concatenate([observation[key] for key in self._robot.state_keys]))
        for key in self._robot.video_keys:
            image = np.asarray(observation[key])
            self._blank[key] += is_blank(image)
            shown, since = self._before.get(key, (None, row))
            if shown is None or not np.array_equal(shown, image):
                self._before[key] = (image.copy(), row)
            elif np.abs(self._states[row] - self._states[since]).max() > MOVED:
                self._still[key] = max(self._still[key], row - since)

    def warnings(self) -> list[str]:
        """Return what was found."""
        rows = len(self._actions)
        found = list(idle(np.array(self._actions), np.array(self._states))) if rows else []
        for key, blank in self._blank.items():
            if 2 * blank > rows:
                found.append(f"{key} is all one color in {blank} of {rows} images")
        for key, still in self._still.items():
            if still >= STILL_S * self._hz:
                found.append(
                    f"{key} did not change for {still / self._hz:.1f} s while the robot moved"
                )
        return found
