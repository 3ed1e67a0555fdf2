"""The physics of a scene for the scripted expert: hand, object, destination, obstacles and grasps.

All lengths are meters, all axes the world's.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dzrobot.errors import SimulatorError

Array = NDArray[np.float64]

_ROBOT = ("robot0_", "gripper0_", "mount0_")


@dataclass(frozen=True, kw_only=True)
class Boxes:
    """``N`` boxes around the collision shapes of some bodies."""

    center: Array
    """(N, 3)."""

    axes: Array
    """(N, 3, 3): each box's axes in columns."""

    half: Array
    """(N, 3): half its edges."""

    @cached_property
    def corners(self) -> Array:
        """All corners, (8 N, 3)."""
        signs = np.array(np.meshgrid((-1, 1), (-1, 1), (-1, 1))).reshape(3, 8).T
        offsets = np.einsum("nij,nkj->nki", self.axes, signs[None] * self.half[:, None])
        corners: Array = (self.center[:, None] + offsets).reshape(-1, 3)
        return corners

    def distance(self, points: Array) -> float:
        """Return the smallest distance of ``points`` (M, 3) to any box: 0 inside one."""
        if not len(self.center):
            return float("inf")
        away = points[None] - self.center[:, None]
        local = np.einsum("nij,nmi->nmj", self.axes, away)
        outside = np.maximum(np.abs(local) - self.half[:, None], 0.0)
        return float(np.linalg.norm(outside, axis=-1).min())

    def top_between(self, start: Array, end: Array, margin: float) -> float:
        """Return the height of the tallest box within ``margin`` of the line from start to end."""
        offset = end[:2] - start[:2]
        steps = np.linspace(0.0, 1.0, 2 + int(np.linalg.norm(offset) / 0.03))
        path = start[:2] + steps[:, None] * offset
        corners = self.corners.reshape(-1, 8, 3)
        low, high = corners.min(1)[:, :2] - margin, corners.max(1)[:, :2] + margin
        inside = (path[None] > low[:, None]) & (path[None] < high[:, None])
        met = inside.all(-1).any(-1)
        return float(corners[met, :, 2].max()) if met.any() else -np.inf


@dataclass(frozen=True, kw_only=True)
class Destination:
    """Where the object's center has to go."""

    center: Array
    """(3,); the height is that of the surface it comes to rest on."""

    rim: float
    """Height that the hand must stay above."""


class TaskScene:
    """The physics of a robosuite environment, read when asked.

    Raises:
        SimulatorError: the goal is not to lift the one object, or to put it somewhere.
    """

    def __init__(self, env: Any) -> None:
        self._env = env
        self._model = env.sim.model
        self._data = env.sim.data
        self._names = _goal(env)
        self._body: int = self._model.body_name2id(self._object_model().root_body)

    @property
    def hand(self) -> Array:
        """Position of the point between the finger pads, (3,)."""
        position: Array = np.array(self._data.site_xpos[self._env.robots[0].eef_site_id])
        return position

    @property
    def hand_axes(self) -> Array:
        """Axes of the hand in columns, (3, 3); the fingers close along the first."""
        axes: Array = np.array(self._data.site_xmat[self._env.robots[0].eef_site_id])
        return axes.reshape(3, 3)

    @property
    def position(self) -> Array:
        """Position of the object, (3,)."""
        position: Array = np.array(self._data.body_xpos[self._body])
        return position

    @property
    def object(self) -> Boxes:
        """The object's shape."""
        return self._boxes(geoms_below(self._model, self._body))

    @property
    def obstacles(self) -> Boxes:
        """Everything that is neither the robot nor the object."""
        own = geoms_below(self._model, self._body)
        names = [self._model.geom_id2name(i) or "" for i in range(self._model.ngeom)]
        return self._boxes(
            i
            for i in range(self._model.ngeom)
            if i not in own
            and not names[i].startswith(_ROBOT)
            and np.any(self._model.geom_size[i] > 0)
            and self._model.geom_type[i] != 0  # the infinite floor
        )

    @property
    def destination(self) -> Destination | None:
        """Where the object goes; None where lifting it is all."""
        if self._names is None:
            return None
        _, place = self._names
        if place in self._env.object_sites_dict:
            site = self._env.object_sites_dict[place]
            center = np.array(self._data.get_site_xpos(place))
            half = float(np.asarray(site.size)[2])
            return Destination(center=center - (0.0, 0.0, half), rim=float(center[2]) + half)
        body = self._env.obj_body_id[place]
        corners = self._boxes(geoms_below(self._model, body)).corners
        center = np.array(self._data.body_xpos[body])
        return Destination(center=center, rim=float(corners[:, 2].max()))

    def _object_model(self) -> Any:
        return self._env.cube if self._names is None else self._env.get_object(self._names[0])

    def _boxes(self, geoms: Iterable[int]) -> Boxes:
        ids = [i for i in geoms if self._model.geom_contype[i]]
        axes = np.array(self._data.geom_xmat[ids]).reshape(-1, 3, 3)
        bounds = np.array(self._model.geom_aabb[ids]).reshape(-1, 6)
        center = self._data.geom_xpos[ids] + np.einsum("nij,nj->ni", axes, bounds[:, :3])
        return Boxes(center=center, axes=axes, half=bounds[:, 3:])


def geoms_below(model: Any, body: int) -> frozenset[int]:
    """Return the numbers of the shapes of ``body`` and of what hangs on it."""
    parents = model.body_parentid
    bodies = {body}
    # Parents come before their children in MuJoCo's order.
    for i in range(body + 1, model.nbody):
        if int(parents[i]) in bodies:
            bodies.add(i)
    return frozenset(i for i in range(model.ngeom) if int(model.geom_bodyid[i]) in bodies)


def _goal(env: Any) -> tuple[str, str] | None:
    """Return (object, place), or None for Lift."""
    if type(env).__name__ == "Lift":
        return None
    goals = env.parsed_problem["goal_state"]
    if len(goals) != 1 or len(goals[0]) != 3 or goals[0][0] not in ("in", "on"):
        raise SimulatorError(
            f"the expert puts one object into or onto something; this task asks for {goals}. It "
            "knows dzrobot/lift-v0, libero_object and libero_spatial."
        )
    return str(goals[0][1]), str(goals[0][2])


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
    """Return the best grasp, or None if every grasp is wider than the hand.

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
