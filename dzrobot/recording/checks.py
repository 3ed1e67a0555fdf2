"""Defects of an episode that make it useless for training, detected while recording or reading."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from dzrobot.embodiments.spec import Embodiment
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
