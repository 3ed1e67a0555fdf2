"""The emulated arm in a MuJoCo scene: contact, grasping and collision come from physics.

Arm, hand, table and cube are robosuite's (:mod:`dzrobot.envs.mujoco.lift_scene`), other objects
LIBERO's; rotor inertia and friction of the joints are those of the arm without a scene. Gravity of
arm and hand is compensated, what the hand holds weighs.
"""

import math
from typing import Any

import numpy as np

from dzrobot.envs.emulators.dynamics import COULOMB, DT, ROTOR_INERTIA, VISCOUS, Surroundings
from dzrobot.envs.emulators.faults import GRIPPER_WIDTH_M
from dzrobot.envs.emulators.table_objects import thing_of
from dzrobot.envs.mujoco.lift_scene import (
    ARM,
    BASE,
    FINGERS,
    OBJECT,
    READY,
    TABLE,
    TABLE_TOP_M,
    load_model,
    load_mujoco,
)
from dzrobot.envs.panda import kinematics
from dzrobot.envs.panda.kinematics import Array, Posture

FOLLOWING = 100.0
"""How stiffly the arm's own controller follows a reference (rad/s); it is critically damped."""

ESTIMATE_S = 5e-3
"""Time constant of the arm's estimate of external torque."""

FINGER_GAIN = 500.0
"""Force of a finger's motor per speed that it lacks (N s/m)."""

FINGER_APPROACH = 40.0
"""Speed that a finger is asked for, per distance to its goal (1/s)."""

FINGER_DAMPING = 1.0
ARRIVED_M = 2e-4
"""Fingers this close to the width that they were asked for have arrived."""

_STILL_M_S = 2e-3
_STILL_MS = 40
_JOINTS = slice(0, 7)
_ALONG = np.array([1.0, -1.0])
"""How the joints of the two fingers open."""


class ScenePhysics:
    """Arm and hand over a table with an object on it.

    Args:
        scene: ``lift``, or the name of an object of LIBERO.

    Raises:
        ConfigError: LIBERO has no such object.
        MissingDependencyError: mujoco or robosuite is not installed.
        SimulatorError: one of them has the wrong version.
    """

    def __init__(self, scene: str) -> None:
        self._mujoco = mujoco = load_mujoco()
        self._thing = thing_of(scene)
        self._model = model = load_model(self._thing, drawn=False)
        self._data = mujoco.MjData(model)
        assert [model.joint(number).name for number in range(10)] == [*ARM, *FINGERS, OBJECT]
        model.dof_armature[_JOINTS] = ROTOR_INERTIA
        model.dof_damping[_JOINTS] = VISCOUS
        self.fingers = PhysicalFingers(model, self._data)
        self._object = int(model.joint(OBJECT).qposadr[0])
        self._object_dof = int(model.joint(OBJECT).dofadr[0])
        self._inertia = np.zeros((model.nv, model.nv))
        self._torque = np.zeros(model.nv)
        # Constraints of contacts come last among their kinds.
        self._contact = int(mujoco.mjtConstraint.mjCNSTR_CONTACT_FRICTIONLESS)
        self._share = -math.expm1(-DT / ESTIMATE_S)
        self.touch: Array = np.zeros(7)
        self.q: Array = READY.copy()
        self.dq: Array = np.zeros(7)
        self._reference_speeds = self.dq
        self._set_friction(1.0)
        self.prepare(0)
        self.put(READY)

    @property
    def goal_holds(self) -> bool:
        """Whether the object is lifted: the cube as in robosuite's Lift."""
        height: float = self._data.qpos[self._object + 2]
        return bool(height - TABLE_TOP_M > self._thing.lifted_m(self._half))

    def follow(self, joints: Array, speeds: Array, around: Surroundings) -> None:
        """Follow a reference like a stiff spring, with the torque that the joints have."""
        mujoco, model, data = self._mujoco, self._model, self._data
        mujoco.mj_step1(model, data)
        wanted = FOLLOWING**2 * (joints - self.q) + 2.0 * FOLLOWING * (speeds - self.dq)
        wanted += (speeds - self._reference_speeds) / DT
        self._reference_speeds = speeds.copy()
        mujoco.mj_fullM(model, self._inertia, data.qM)
        torque = self._inertia[_JOINTS, _JOINTS] @ wanted
        torque += data.qfrc_bias[_JOINTS] - data.qfrc_passive[_JOINTS]
        limit = kinematics.JOINT_TORQUE
        self._finish(np.clip(torque, -limit, limit), around)

    def drive(self, torque: Array, around: Surroundings) -> None:
        """Apply torques."""
        self._mujoco.mj_step1(self._model, self._data)
        self._reference_speeds = self.dq
        self._finish(torque, around)

    def put(self, joints: Array) -> None:
        """Be elsewhere."""
        data = self._data
        data.qpos[_JOINTS], data.qvel[_JOINTS] = joints, 0.0
        self.q, self.dq = joints.copy(), np.zeros(7)
        self._reference_speeds = np.zeros(7)

    def prepare(self, start: int) -> None:
        """Put the object on the table."""
        placed = self._thing.start(start)
        self._thing.fit(self._model, placed.half)
        self._half = placed.half
        place = np.subtract(TABLE, BASE) + placed.position
        self._data.qpos[self._object : self._object + 7] = [*place, *placed.quaternion]
        self._data.qvel[self._object_dof : self._object_dof + 6] = 0.0

    def visible(self, posture: Posture) -> Array:
        """Return joints of the scene (16,) and half of the object's extents (3,)."""
        return np.concatenate([self._data.qpos, self._half])

    def _finish(self, torque: Array, around: Surroundings) -> None:
        """Move everything by a millisecond, after the first half of a step."""
        mujoco, model, data = self._mujoco, self._model, self._data
        self._set_friction(around.friction)
        data.qfrc_applied[_JOINTS] = torque + around.torque
        self.fingers.push()
        mujoco.mj_step2(model, data)
        self.q, self.dq = data.qpos[_JOINTS].copy(), data.qvel[_JOINTS].copy()
        self._feel()

    def _feel(self) -> None:
        """Estimate what the scene exerts, from the forces of all contacts."""
        mujoco, data = self._mujoco, self._data
        felt = np.zeros(7)
        if data.ncon:
            contact = data.efc_type >= self._contact
            mujoco.mj_mulJacTVec(self._model, data, self._torque, data.efc_force * contact)
            felt = self._torque[_JOINTS]
        self.touch = self.touch + self._share * (felt - self.touch)

    def _set_friction(self, share: float) -> None:
        self._model.dof_frictionloss[_JOINTS] = share * COULOMB


class PhysicalFingers:
    """Two coupled fingers, each with a motor that has so much force and no more.

    Args:
        model: The scene.
        data: Its state.
    """

    def __init__(self, model: Any, data: Any) -> None:
        self._data = data
        joints = [model.joint(name) for name in FINGERS]
        self._positions = [int(joint.qposadr[0]) for joint in joints]
        self._dofs = [int(joint.dofadr[0]) for joint in joints]
        model.dof_damping[self._dofs] = FINGER_DAMPING
        self._data.qpos[self._positions] = _ALONG * GRIPPER_WIDTH_M / 2
        self._force_n = 0.0
        self._still_ms = 0
        self.move(GRIPPER_WIDTH_M, 0.1, 20.0)

    @property
    def width_m(self) -> float:
        """Distance between them."""
        first, second = self._data.qpos[self._positions]
        return float(np.clip(first - second, 0.0, GRIPPER_WIDTH_M))

    def move(self, goal_m: float, speed_m_s: float, force_n: float) -> None:
        """Begin to move."""
        self._goal_m, self._speed_m_s, self._force_n = goal_m, speed_m_s, force_n
        self._still_ms = 0

    def rest(self) -> None:
        """Stay."""
        self.move(self.width_m, self._speed_m_s, self._force_n)

    def advance(self, seconds: float) -> bool:
        """Return whether they have arrived or are held up; physics moves them."""
        return abs(self.width_m - self._goal_m) < ARRIVED_M or self._still_ms >= _STILL_MS

    def push(self) -> None:
        """Apply the motors' forces for the next millisecond."""
        opened = _ALONG * self._data.qpos[self._positions]
        speeds = _ALONG * self._data.qvel[self._dofs]
        fastest = self._speed_m_s / 2
        wanted = np.clip(FINGER_APPROACH * (self._goal_m / 2 - opened), -fastest, fastest)
        force = np.clip(FINGER_GAIN * (wanted - speeds), -self._force_n, self._force_n)
        if self._still_ms >= _STILL_MS and abs(self.width_m - self._goal_m) >= ARRIVED_M:
            # What holds them up is pressed with all the force that was asked for.
            force = np.sign(wanted) * self._force_n
        self._data.qfrc_applied[self._dofs] = _ALONG * force
        self._still_ms = self._still_ms + 1 if np.abs(speeds).max() < _STILL_M_S else 0
