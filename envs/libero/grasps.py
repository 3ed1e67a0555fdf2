"""Where to hold an object: across its narrow side, or by its rim."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dzrobot.envs.libero.scene import Boxes

Array = NDArray[np.float64]

OPENING_M = 0.08
"""Distance of the open finger pads."""

SPARE_M = 0.01
"""What must be left of it around an object."""

DEEP_M = 0.03
"""How far below an object's top the pads hold it, where it is tall enough."""

RIM_M = 0.02
"""The same for a rim."""

_CLEAR_M = 0.02
_SECTOR = np.deg2rad(12)


@dataclass(frozen=True)
class Grasp:
    """A vertical grasp."""

    offset: Array
    """From the object's position to the point between the pads, (3,) m."""

    yaw: float
    """Direction in which the fingers close, rad about the vertical; half a turn makes no odds."""


def choose_grasp(
    shape: Boxes, position: Array, obstacles: Boxes, yaw: float, failed: Sequence[Grasp]
) -> Grasp | None:
    """Return the best grasp, or None where every way is wider than the hand.

    Args:
        shape: The object's.
        position: The object's, (3,) m.
        obstacles: What the fingers should keep away from.
        yaw: Direction in which the fingers close now, rad.
        failed: Grasps that were tried; their like are avoided.
    """
    grasps = [*_across(shape, position)] or [*_by_the_rim(shape, position)]

    def cost(item: tuple[Grasp, float]) -> float:
        grasp, width = item
        room = min(obstacles.distance(_probes(position + grasp.offset, grasp.yaw)), _CLEAR_M)
        again = sum(_alike(grasp, other) for other in failed)
        return 10 * width - 60 * room + 0.4 * abs(half_turn(grasp.yaw - yaw)) + 3.0 * again

    return min(grasps, key=cost)[0] if grasps else None


def half_turn(angle: float) -> float:
    """Return ``angle`` less as many half turns as bring it into [-pi/2, pi/2)."""
    return float((angle + np.pi / 2) % np.pi - np.pi / 2)


def _across(shape: Boxes, position: Array) -> Iterator[tuple[Grasp, float]]:
    corners = shape.corners
    bottom, top = corners[:, 2].min(), corners[:, 2].max()
    height = max(top - DEEP_M, (bottom + top) / 2)
    # Only what the pads will touch decides how wide the object is.
    boxes = corners.reshape(-1, 8, 3)
    touched = (boxes[..., 2].min(1) < height + 0.01) & (boxes[..., 2].max(1) > height - 0.01)
    points = boxes[touched].reshape(-1, 3)[:, :2]
    if not len(points):
        return
    for yaw in np.deg2rad(np.arange(0, 180, 7.5)):
        closing = np.array([np.cos(yaw), np.sin(yaw)])
        aside = np.array([-closing[1], closing[0]])
        along, across = points @ closing, points @ aside
        width = float(np.ptp(along))
        if width < OPENING_M - SPARE_M:
            center = (along.max() + along.min()) / 2 * closing
            center = center + (across.max() + across.min()) / 2 * aside
            yield Grasp(np.array([*center, height]) - position, float(yaw)), width


def _by_the_rim(shape: Boxes, position: Array) -> Iterator[tuple[Grasp, float]]:
    corners = shape.corners
    center = (corners[:, :2].min(0) + corners[:, :2].max(0)) / 2
    away = corners[:, :2] - center
    angles, radii = np.arctan2(away[:, 1], away[:, 0]), np.linalg.norm(away, axis=1)
    for angle in np.deg2rad(np.arange(0, 360, 15)):
        turned = np.abs((angles - angle + np.pi) % (2 * np.pi) - np.pi) < _SECTOR
        if not turned.any():
            continue
        rim = float(corners[turned, 2].max())
        upper = turned & (corners[:, 2] > rim - 0.01)
        radius = float(radii[upper].mean())
        point = center + radius * np.array([np.cos(angle), np.sin(angle)])
        yield Grasp(np.array([*point, rim - RIM_M]) - position, float(angle)), 0.0


def _probes(point: Array, yaw: float) -> Array:
    """Return points on the open fingers and on the palm of a hand at ``point``, (M, 3)."""
    closing = np.array([np.cos(yaw), np.sin(yaw), 0.0])
    aside = np.array([-closing[1], closing[0], 0.0])
    reach = OPENING_M / 2 + 0.01
    fingers = [
        point + side * reach * closing + lateral * aside + (0, 0, up)
        for side in (-1, 1)
        for lateral in (-0.01, 0.01)
        for up in (-0.008, 0.02, 0.05)
    ]
    palm = [
        point + along * closing + lateral * aside + (0, 0, up)
        for along in (-0.1, -0.05, 0.0, 0.05, 0.1)
        for lateral in (-0.03, 0.03)
        for up in (0.06, 0.1, 0.15)
    ]
    return np.array([*fingers, *palm])


def _alike(one: Grasp, other: Grasp) -> bool:
    return bool(
        np.linalg.norm(one.offset[:2] - other.offset[:2]) < 0.015
        and abs(half_turn(one.yaw - other.yaw)) < 0.2
    )
