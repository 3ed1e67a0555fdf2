"""How near the arm's links come to each other, by the shapes of robosuite's Panda in MuJoCo."""

import numpy as np

from dzrobot.envs.emulators.scene import ARM, FINGERS, load_model, load_mujoco
from dzrobot.envs.franka.poses import Array
from dzrobot.errors import MissingDependencyError, SimulatorError

_CHAIN = (
    ("link0",), ("link1",), ("link2",), ("link3",), ("link4",), ("link5",), ("link6",),
    ("right_gripper",), ("finger_joint1_tip", "finger_joint2_tip"),
)  # fmt: skip
"""Bodies along the arm that have a shape, which link 7 has not; neighbors touch by design."""

_APART = 2
_OPEN_M = 0.04


class SelfCollision:
    """Distances between links that are no neighbors; hand with open fingers included.

    Args:
        margin_m: Distance that is to be kept.

    Raises:
        MissingDependencyError: mujoco or robosuite is not installed.
        SimulatorError: one of them has the wrong version.
    """

    def __init__(self, margin_m: float) -> None:
        try:
            self._mujoco = mujoco = load_mujoco()
        except (MissingDependencyError, SimulatorError) as error:
            raise type(error)(
                f"limits.self_collision_m={margin_m} is looked at in a simulator: {error} To go "
                "without, say so: limits: {self_collision_m: 0}"
            ) from error
        self._margin_m = margin_m
        self._model = model = load_model(drawn=False)
        self._data = mujoco.MjData(model)
        for name, width in zip(FINGERS, (_OPEN_M, -_OPEN_M), strict=True):
            self._data.qpos[model.joint(name).qposadr[0]] = width
        self._joints = [int(model.joint(name).qposadr[0]) for name in ARM]
        shapes = [[self._shape(body) for body in bodies] for bodies in _CHAIN]
        self._pairs = [
            (one, other)
            for number, here in enumerate(shapes)
            for there in shapes[number + _APART :]
            for one in here
            for other in there
        ]

    def deficit_m(self, joints: Array) -> float:
        """Return by how much the nearest two links are nearer than the margin (m); 0: they are not.

        Args:
            joints: Joint angles (7,), rad.
        """
        mujoco, model, data = self._mujoco, self._model, self._data
        data.qpos[self._joints] = joints
        mujoco.mj_kinematics(model, data)
        margin, worst = self._margin_m, 0.0
        for one, other in self._pairs:
            apart = np.linalg.norm(data.geom_xpos[one] - data.geom_xpos[other])
            if apart - model.geom_rbound[one] - model.geom_rbound[other] < margin:
                distance = mujoco.mj_geomDistance(model, data, one, other, margin, None)
                worst = max(worst, margin - min(margin, float(distance)))
        return worst

    def _shape(self, body: str) -> int:
        model = self._model
        (shape,) = (
            geom for geom in range(model.ngeom)
            if model.geom_bodyid[geom] == model.body(body).id and model.geom_contype[geom]
        )  # fmt: skip
        return int(shape)
