"""What the physics know of a scene: the hand, the object to take, where it goes, and what is near.

All lengths are meters, all axes the world's.
"""

from collections.abc import Iterable
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
        """Return the height of the tallest box within ``margin`` of the way from start to end."""
        way = end[:2] - start[:2]
        steps = np.linspace(0.0, 1.0, 2 + int(np.linalg.norm(way) / 0.03))
        path = start[:2] + steps[:, None] * way
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
