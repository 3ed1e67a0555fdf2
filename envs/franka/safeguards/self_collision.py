"""Distances of the arm's links to each other and to obstacles, measured in MuJoCo.

The shapes are those of robosuite's Panda.
"""

from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import Any

import numpy as np

from dzrobot.envs.franka.franka_config import (
    FrankaConfig,
    LimitsConfig,
    MountConfig,
    ObstacleConfig,
)
from dzrobot.envs.mujoco.lift_scene import ARM, FINGERS, load_model, load_mujoco
from dzrobot.envs.panda.poses import Array
from dzrobot.errors import MissingDependencyError, SimulatorError
from dzrobot.progress import waiting

_CHAIN = (
    ("link0",), ("link1",), ("link2",), ("link3",), ("link4",), ("link5",), ("link6",),
    ("right_gripper",), ("finger_joint1_tip", "finger_joint2_tip"),
)  # fmt: skip
"""Bodies along the arm that have a shape, which link 7 has not; neighbors touch by design."""

_NAMES = (
    "the base", "link 1", "link 2", "link 3", "link 4", "link 5", "link 6", "the hand",
    "the fingers",
)  # fmt: skip
"""What messages call them."""

_APART = 2
_BESIDE_MOUNTS = 6
"""The links before this one of :data:`_CHAIN` must keep away from what the hand carries."""

_FREE = 2
"""The first link that can come near anything else: those before it do not move."""

_OPEN_M = 0.04

_Pairs = list[tuple[int, int]]


class SelfCollision:
    """Distances between links that are not neighbors, and from links to obstacles.

    The hand is included, with open fingers.

    Args:
        limits: Which distances are to be kept, and the obstacles.

    Raises:
        MissingDependencyError: mujoco or robosuite is not installed.
        SimulatorError: one of them has the wrong version.
    """

    def __init__(self, limits: LimitsConfig) -> None:
        try:
            self._mujoco = mujoco = load_mujoco()
        except (MissingDependencyError, SimulatorError) as error:
            setting = "limits.obstacles are checked" if limits.obstacles else (
                f"limits.self_collision_m={limits.self_collision_m} is checked"
            )  # fmt: skip
            raise type(error)(
                f"{setting} in a simulator: {error} To go without, say so: limits: "
                "{self_collision_m: 0}, and no obstacles"
            ) from error
        boxes = [f"obstacle {number}" for number in range(len(limits.obstacles))]
        mounts = [f"mount {number}" for number in range(len(limits.mounts))]
        self._model = model = _model_with(limits.obstacles, limits.mounts)
        self._data = mujoco.MjData(model)
        for name, width in zip(FINGERS, (_OPEN_M, -_OPEN_M), strict=True):
            self._data.qpos[model.joint(name).qposadr[0]] = width
        self._joints = [int(model.joint(name).qposadr[0]) for name in ARM]
        shapes = [[self._shape(body) for body in bodies] for bodies in _CHAIN]
        called = [box.name for box in limits.obstacles] + [mount.name for mount in limits.mounts]
        self._called = {
            shape: _NAMES[number] for number, some in enumerate(shapes) for shape in some
        }
        for name, text in zip((*boxes, *mounts), called, strict=True):
            self._called[model.geom(name).id] = text
        mounted = [model.geom(name).id for name in mounts]
        links: _Pairs = [
            pair
            for number, here in enumerate(shapes)
            for there in shapes[number + _APART :]
            for pair in product(here, there)
        ]
        links += product(mounted, (shape for some in shapes[:_BESIDE_MOUNTS] for shape in some))
        free = [*mounted, *(shape for some in shapes[_FREE:] for shape in some)]
        others: _Pairs = list(product(free, (model.geom(name).id for name in boxes)))
        self._checks = (
            (limits.self_collision_m, links if limits.self_collision_m else []),
            (limits.obstacle_m, others),
        )

    def deficits_m(self, joints: Array) -> tuple[float, float]:
        """Return by how much links are too near to each other, and to obstacles (m); 0: not.

        Args:
            joints: Joint angles (7,), rad.
        """
        data = self._data
        data.qpos[self._joints] = joints
        self._mujoco.mj_kinematics(self._model, data)
        own, obstacle = (self._worst(margin, pairs) for margin, pairs in self._checks)
        return own, obstacle

    def nearest(self, joints: Array) -> str:
        """Return the names of the two that are too near to each other by most, at joints (7,)."""
        self.deficits_m(joints)
        short = [
            (self._short(margin, pair), pair) for margin, pairs in self._checks for pair in pairs
        ]
        one, other = max(short)[1]
        return f"{self._called[one]} and {self._called[other]}"

    def _worst(self, margin: float, pairs: Sequence[tuple[int, int]]) -> float:
        return max((self._short(margin, pair) for pair in pairs), default=0.0)

    def _short(self, margin: float, pair: tuple[int, int]) -> float:
        """Return by how much two shapes are nearer than ``margin``; 0: they are not."""
        model, data, (one, other) = self._model, self._data, pair
        apart = np.linalg.norm(data.geom_xpos[one] - data.geom_xpos[other])
        if apart - model.geom_rbound[one] - model.geom_rbound[other] >= margin:
            return 0.0
        distance = self._mujoco.mj_geomDistance(model, data, one, other, margin, None)
        return margin - min(margin, float(distance))

    def _shape(self, body: str) -> int:
        model = self._model
        (shape,) = (
            geom for geom in range(model.ngeom)
            if model.geom_bodyid[geom] == model.body(body).id and model.geom_contype[geom]
        )  # fmt: skip
        return int(shape)


@cache
def _model_with(obstacles: tuple[ObstacleConfig, ...], mounts: tuple[MountConfig, ...]) -> Any:
    """Return the compiled arm, what it carries and boxes around it, which nothing changes."""
    boxes = {
        f"obstacle {number}": (np.add(box.low, box.high) / 2, np.subtract(box.high, box.low) / 2)
        for number, box in enumerate(obstacles)
    }
    carried = {
        f"mount {number}": (mount.low, mount.high, mount.radius_m)
        for number, mount in enumerate(mounts)
    }
    return load_model(drawn=False, boxes=boxes, mounts=carried)


def collision_of(limits: LimitsConfig, *, links: bool) -> SelfCollision | None:
    """Return what measures distances; None if none is to be kept.

    Args:
        limits: Which are.
        links: Whether links are kept apart from each other, besides from obstacles.
    """
    if limits.obstacles or (links and limits.self_collision_m > 0):
        kept = limits if links else limits.model_copy(update={"self_collision_m": 0.0})
        # The first one imports the simulator, which takes seconds, before the screen is drawn.
        with waiting("loading the shapes of the arm"):
            return SelfCollision(kept)
    return None


def collision_on_the_way(config: FrankaConfig) -> SelfCollision | None:
    """Return what measures distances on the way of a reset; None where they are not looked at.

    Raises:
        MissingDependencyError: the simulator is not installed, and the arm is a real one.
        SimulatorError: it has the wrong version.
    """
    try:
        return collision_of(config.limits, links=True)
    except (MissingDependencyError, SimulatorError):
        if config.address is not None or config.limits.obstacles:
            raise
        # Nothing of metal can be hit.
        return None
