"""Dynamics of the emulated arm: inertia, friction, load, noise and contact, with or without MuJoCo.

:class:`Dynamics` is what an arm's joints and fingers are moved by. Here is the one without a scene,
:class:`PlainDynamics`; :mod:`dzrobot.envs.emulators.dynamics` has one with objects.

Masses are those of the URDF that the client gets, so both sides compute the same dynamics; gravity
of the arm and of the declared load is compensated, as the real arm does.
"""

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from dzrobot.envs.emulators import kinematics
from dzrobot.envs.emulators.kinematics import FR3, ArmDescription, Array, Posture
from dzrobot.envs.emulators.scenes import EMPTY, table_object_of
from dzrobot.envs.mujoco.lift_scene import (
    ARM,
    BASE,
    COULOMB,
    FINGERS,
    LINK_INERTIA_M2,
    OBJECT,
    READY,
    ROTOR_INERTIA,
    TABLE,
    TABLE_TOP_M,
    VISCOUS,
    ArmMechanics,
    load_model,
    load_mujoco,
)

GRIPPER_WIDTH_M = 0.08
"""Widest opening of the emulated hand."""


@dataclass
class Faults:
    """Switches that tests and ``dzrobot emulate`` may turn while the server runs."""

    user_stop: bool = False
    """The user stop is pressed: motions are refused and recovery fails."""

    manual_recovery: bool = False
    """Error recovery answers that a person must recover by hand."""

    packet_loss: float = 0.0
    """Share of commands that are lost, in [0, 1]."""

    loss_seed: int = 0
    """Seed of the loss sequence."""

    reject_moves: int = 0
    """How many of the next Move requests are refused."""

    version: int | None = None
    """Robot server version to claim instead of the real one."""

    comm_violation_after: int | None = 20
    """Missed commands in a row that trip a communication error, as on the arm; None never does."""

    limits: bool = True
    """Trip the reflexes of velocity, acceleration, torque and Cartesian limits."""

    walls_m: tuple[float, ...] | None = None
    """Box of virtual walls set up in Desk: lowest x, y, z, then highest (m)."""

    refuse_settings: bool = False
    """A safety function is active: every setter is refused."""

    fci: bool = True
    """The control interface is enabled in Desk; without it connections are refused."""

    payload_kg: float = 0.0
    """Mass at the hand that Desk does not know."""

    table_m: float | None = None
    """Height of a table under the hand; None: there is none."""

    friction: float = 1.0
    """Dry friction, as a share of the usual."""

    noise: float = 1.0
    """Sensor noise, as a share of the usual."""

    wrench_bias: tuple[float, ...] = (0.4, -0.3, 0.6, 0.02, -0.03, 0.01)
    """What the estimated wrench at the hand shows without any contact (N, then Nm)."""

    gripper_fails: int = 0
    """How many of the next gripper requests fail (the client raises)."""

    gripper_latency_s: float = 0.0
    """Extra time before each gripper request is answered (s)."""

    gripper_stuck: bool = False
    """The fingers do not move and requests are never answered."""

    homed: bool = True
    """The hand has been homed; before, it knows no widest opening and does not grasp."""

    object_width_m: float | None = None
    """Width of an object between the fingers (m); None means nothing to grasp."""

    def lost(self, sequence: int) -> bool:
        """Return whether the command to state ``sequence`` is lost; the same answer every time."""
        if self.packet_loss <= 0:
            return False
        draw = np.random.default_rng((self.loss_seed, sequence)).random()
        return bool(draw < self.packet_loss)


DT = 1e-3
GRAVITY = 9.81
TABLE_STIFFNESS = 2e4
TABLE_DAMPING = 200.0

NOISE = {
    "q": [2e-6] * 7,
    "dq": [2e-4] * 7,
    "torque": [0.03] * 7,
    "wrench": [0.12] * 3 + [0.012] * 3,
}
"""Standard deviations by purpose: rad, rad/s, Nm, N then Nm."""

_ROWS = 1 << 13
_INERTIA_PERIOD_MS = 20
_LATER = np.triu_indices(7, 1)
_BEYOND_BOTH = np.maximum.outer(np.arange(7), np.arange(7))


@dataclass(frozen=True)
class Surroundings:
    """What acts on an arm during a millisecond, besides its commands."""

    posture: Posture
    """Where it is."""

    torque: Array
    """Joint torque (7,) of what people and faults exert on the hand (Nm)."""

    payload_kg: float
    """Mass at the hand."""

    friction: float
    """Dry friction, as a share of the usual."""


class Fingers(Protocol):
    """The two fingers of the hand."""

    @property
    def width_m(self) -> float:
        """Distance between them."""
        ...

    def move(self, goal_m: float, speed_m_s: float, force_n: float) -> None:
        """Begin to move to a width, with a largest force; then hold it, or what is in between."""
        ...

    def rest(self) -> None:
        """Stay where they are."""
        ...

    def advance(self, seconds: float) -> bool:
        """Return whether they have arrived, or are held up, after so much more time."""
        ...


class Dynamics(Protocol):
    """What an arm's joints and fingers are moved by, a millisecond at a time."""

    description: ArmDescription
    """Limits, masses and transforms of the arm."""

    q: Array
    """Joint angles (7,), rad."""

    dq: Array
    """Joint speeds (7,), rad/s."""

    touch: Array
    """Joint torque (7,) of what the scene exerts, as the arm estimates it (Nm)."""

    @property
    def fingers(self) -> Fingers:
        """The hand's fingers."""
        ...

    @property
    def goal_holds(self) -> bool:
        """Whether the scene's task is done."""
        ...

    def follow(self, joints: Array, speeds: Array, around: Surroundings) -> None:
        """Let the arm's own controller follow a reference: joint angles (7,) and speeds (7,)."""
        ...

    def drive(self, torque: Array, around: Surroundings) -> None:
        """Let the joints be moved by torques (7,); gravity is compensated."""
        ...

    def put(self, joints: Array) -> None:
        """Let the joints (7,) be elsewhere, at rest."""
        ...

    def prepare(self, start: int) -> None:
        """Put the scene's objects where an initial state has them."""
        ...

    def visible(self, posture: Posture) -> Array:
        """Return what cameras need to know, at most `timebase.LARGEST_SCENE` numbers."""
        ...


class PlainDynamics:
    """An arm and fingers without a scene: references are followed exactly, at no cost.

    Args:
        faults: Width of an object between the fingers.
        description: Its masses.
    """

    goal_holds = False

    def __init__(self, faults: Faults, description: ArmDescription = FR3) -> None:
        self.description = description
        self.q = kinematics.READY.copy()
        self.dq = np.zeros(7)
        self.touch = np.zeros(7)
        self.fingers = PlainFingers(faults)
        self._inverse_inertia: Array | None = None
        self._age_ms = 0

    def follow(self, joints: Array, speeds: Array, around: Surroundings) -> None:
        """Be where the reference is."""
        self.q, self.dq = joints.copy(), speeds.copy()
        self._inverse_inertia = None

    def drive(self, torque: Array, around: Surroundings) -> None:
        """Move coupled inertias against viscous and dry friction."""
        if self._inverse_inertia is None or self._age_ms >= _INERTIA_PERIOD_MS:
            self._inverse_inertia = inverse_inertia(
                self.description.link_mass, around.posture, around.payload_kg
            )
            self._age_ms = 0
        self._age_ms += 1
        driven = torque + around.torque - VISCOUS * self.dq
        free = self.dq + DT * (self._inverse_inertia @ driven)
        slip = DT * around.friction * self._inverse_inertia.diagonal() * COULOMB
        self.dq = after_friction(free, slip)
        self.q = self.q + self.dq * DT

    def put(self, joints: Array) -> None:
        """Be elsewhere."""
        self.q, self.dq = joints.copy(), np.zeros(7)

    def prepare(self, start: int) -> None:
        """Do nothing: there are no objects."""

    def visible(self, posture: Posture) -> Array:
        """Return position (m), yaw (rad) and width (m) of the hand, (5,)."""
        pose = posture.pose
        yaw = math.atan2(pose[1, 0], pose[0, 0])
        return np.array([*pose[:3, 3], yaw, self.fingers.width_m])


class PlainFingers:
    """Fingers that an object of some width may keep apart.

    Args:
        faults: Width of that object.
    """

    def __init__(self, faults: Faults) -> None:
        self.width_m = GRIPPER_WIDTH_M
        self._faults = faults
        self._goal_m = self.width_m
        self._speed_m_s = 0.0

    def move(self, goal_m: float, speed_m_s: float, force_n: float) -> None:
        """Begin to move."""
        self._goal_m, self._speed_m_s = goal_m, speed_m_s

    def rest(self) -> None:
        """Stay."""
        self._goal_m = self.width_m

    def advance(self, seconds: float) -> bool:
        """Move on."""
        object_m, goal = self._faults.object_width_m, self._goal_m
        if object_m is not None and goal < object_m <= self.width_m + 1e-9:
            goal = object_m
        step = self._speed_m_s * seconds
        if abs(self.width_m - goal) > step:
            self.width_m += step if goal > self.width_m else -step
            return False
        self.width_m = goal
        return True


class SensorNoise:
    """Sensor noise that a seed and the arm's clock decide.

    Args:
        seed: Of this arm.
    """

    def __init__(self, seed: int) -> None:
        self._tables = {
            name: np.array(sizes)
            * np.random.default_rng([seed, number]).standard_normal((_ROWS, len(sizes)))
            for number, (name, sizes) in enumerate(NOISE.items())
        }

    def at(self, purpose: str, clock_ms: int) -> Array:
        """Return what is added to a measurement at a time."""
        row: Array = self._tables[purpose][clock_ms % _ROWS]
        return row


def inverse_inertia(mass: Array, now: Posture, payload_kg: float) -> Array:
    """Return the inverse of the joint-space inertia, (7, 7), with ``payload_kg`` at the hand.

    Each link is its ``mass`` (7,) at its joint, with the inertia of a sphere.
    """
    lever = now.origins[:, None, :] - now.origins[None, :, :]
    moves = np.cross(now.axes[None], lever)
    moves[_LATER] = 0.0
    weighted = mass[:, None, None] * moves
    inertia = np.einsum("ija,ika->jk", weighted, moves)
    spheres = np.cumsum((LINK_INERTIA_M2 * mass)[::-1])[::-1]
    # Of two joints, the links beyond both turn with both.
    inertia += spheres[_BEYOND_BOTH] * (now.axes @ now.axes.T)
    tip = now.jacobian[:3]
    inertia += payload_kg * (tip.T @ tip)
    inverse: Array = np.linalg.inv(inertia + np.diag(ROTOR_INERTIA))
    return inverse


def after_friction(free: Array, slip: Array) -> Array:
    """Return joint speeds (7,) once dry friction has taken up to ``slip`` of each; it may stick."""
    slowed: Array = np.sign(free) * np.maximum(np.abs(free) - slip, 0.0)
    return slowed


def table_force(height_m: float, table_m: float | None, sinking_m_s: float) -> float:
    """Return the upward force (N) of a table on a hand whose grasp point is at ``height_m``."""
    if table_m is None or height_m >= table_m:
        return 0.0
    return max(0.0, TABLE_STIFFNESS * (table_m - height_m) + TABLE_DAMPING * sinking_m_s)


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
        description: Limits and masses of the arm.

    Raises:
        ConfigError: LIBERO has no such object.
        MissingDependencyError: mujoco or robosuite is not installed.
        SimulatorError: one of them has the wrong version.
    """

    def __init__(self, scene: str, description: ArmDescription = FR3) -> None:
        self._mujoco = mujoco = load_mujoco()
        self._table_object = table_object_of(scene)
        self.description = description
        mechanics = ArmMechanics(
            description.joint_low, description.joint_high, description.link_mass
        )
        self._model = model = load_model(self._table_object, drawn=False, mechanics=mechanics)
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
        return bool(height - TABLE_TOP_M > self._table_object.lifted_m(self._half))

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
        limit = self.description.joint_torque
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
        placed = self._table_object.start(start)
        self._table_object.fit(self._model, placed.half)
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


def dynamics_of(scene: str, faults: Faults, description: ArmDescription = FR3) -> Dynamics:
    """Return what moves an arm in a scene.

    Raises:
        MissingDependencyError: the scene needs a simulator that is not installed.
        SimulatorError: the simulator has the wrong version.
    """
    if scene == EMPTY:
        return PlainDynamics(faults, description)
    return ScenePhysics(scene, description)
