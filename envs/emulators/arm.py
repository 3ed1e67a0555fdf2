"""The emulated arm: joints that follow commands, and the reflexes that stop them at their limits.

Position and velocity commands move a reference, which the arm's own controller follows; torque
commands move the joints, with gravity compensated but for what Desk does not know. How the joints
move is decided by :class:`~dzrobot.envs.emulators.dynamics.Dynamics`. A reflex brakes them.
Self-collision triggers no reflex beyond the arm's own base.
"""

from dataclasses import dataclass, field

import numpy as np

from dzrobot.envs.emulators import arm as reflexes
from dzrobot.envs.emulators import dynamics
from dzrobot.envs.emulators.dynamics import (
    DT,
    Dynamics,
    Faults,
    PlainDynamics,
    SensorNoise,
    Surroundings,
)
from dzrobot.envs.emulators.fci_protocol import Command, Generator, RobotMode
from dzrobot.envs.emulators.kinematics import FR3, TORQUE_RATE, ArmDescription, Array, Posture
from dzrobot.envs.panda.poses import damped_inverse, pose_difference

_TOLERANCE = 1.01
"""Rounding that the arm forgives, as a share of each limit."""

_DT = 1e-3
_COLUMN_RADIUS_M, _COLUMN_HEIGHT_M = 0.12, 0.45
"""The arm's own base and shoulder, which the hand must not enter."""


def torque_steps(before: Array, commanded: Array, limit: Array) -> tuple[str, ...]:
    """Return the errors of a commanded torque (7,), given the one before and the largest."""
    found = []
    if (np.abs(commanded - before) > TORQUE_RATE * _DT * _TOLERANCE).any():
        found.append("controller_torque_discontinuity")
    if (np.abs(commanded) > limit).any():
        found.append("tau_j_range_violation")
    return tuple(found)


@dataclass(frozen=True)
class _Smoothness:
    """Largest rate, its largest change, and that one's, of a kind of commanded motion."""

    velocity: Array
    acceleration: Array
    jerk: Array


def _smoothness(description: ArmDescription, *, cartesian: bool) -> _Smoothness:
    if cartesian:
        # Our own conversion of poses to joints blurs the jerk of the end effector: it has no limit
        # here.
        velocity, acceleration = description.cartesian_velocity, description.cartesian_acceleration
        return _Smoothness(velocity, acceleration, np.full(2, np.inf))
    return _Smoothness(
        description.joint_velocity, description.joint_acceleration, description.joint_jerk
    )


def discontinuities(
    generator: Generator, rates: tuple[Array, Array, Array], description: ArmDescription
) -> tuple[str, ...]:
    """Return the errors of a commanded motion: too fast, or not smooth.

    Args:
        generator: What is commanded.
        rates: Velocity, acceleration and jerk in its own units: of joints (7,), or of the end
            effector, (2,), meters then radians.
        description: Of the arm.
    """
    cartesian = generator in (Generator.POSE, Generator.TWIST)
    limits = _smoothness(description, cartesian=cartesian)
    kind = "cartesian_motion_generator_" if cartesian else "joint_motion_generator_"
    velocity, acceleration, jerk = rates
    if (np.abs(velocity) > limits.velocity * _TOLERANCE).any():
        return (f"{kind}velocity_limits_violation",)
    if (np.abs(acceleration) > limits.acceleration * _TOLERANCE).any():
        return (f"{kind}velocity_discontinuity",)
    if (np.abs(jerk) > limits.jerk * _TOLERANCE).any():
        return (f"{kind}acceleration_discontinuity",)
    return ()


def outside(generator: Generator, arm: "EmulatedArm") -> tuple[str, ...]:
    """Return the error of joints beyond their range."""
    description = arm.description
    if not ((arm.q < description.joint_low) | (arm.q > description.joint_high)).any():
        return ()
    match generator:
        case Generator.NONE:
            return ("joint_position_limits_violation",)
        case Generator.POSE | Generator.TWIST:
            return ("cartesian_motion_generator_joint_position_limits_violation",)
    return ("joint_motion_generator_position_limits_violation",)


def contacts(arm: "EmulatedArm") -> tuple[str, ...]:
    """Return the errors of a moving arm: contact above its thresholds, speed, walls, itself."""
    settings, found = arm.settings, []
    if (np.abs(arm.measured_torque) > settings.collision_torque).any():
        found.append("joint_reflex")
    if (np.abs(arm.measured_wrench) > settings.collision_force).any():
        found.append("cartesian_reflex")
    if not arm.faults.limits:
        return tuple(found)
    if (np.abs(arm.dq) > arm.description.joint_velocity * _TOLERANCE).any():
        found.append("joint_velocity_violation")
    twist = arm.posture.jacobian @ arm.dq
    speeds = np.hypot.reduce(twist.reshape(2, 3), axis=1)
    if (speeds > arm.description.cartesian_velocity).any():
        found.append("cartesian_velocity_violation")
    x, y, z = arm.posture.pose[:3, 3].tolist()
    walls = arm.faults.walls_m
    if walls is not None and not all(
        low <= value <= high
        for low, value, high in zip(walls[:3], (x, y, z), walls[3:], strict=True)
    ):
        found.append("cartesian_position_limits_violation")
    if x * x + y * y < _COLUMN_RADIUS_M**2 and z < _COLUMN_HEIGHT_M:
        found.append("self_collision_avoidance_violation")
    return tuple(found)


LARGEST_LOAD_KG = 3.0
_JOINT_STIFFNESS = (0.0, 14250.0)
_TRANSLATION_STIFFNESS = (10.0, 3000.0)
_ROTATION_STIFFNESS = (1.0, 300.0)

SIZES = {
    Command.SET_COLLISION_BEHAVIOR: 52,
    Command.SET_JOINT_IMPEDANCE: 7,
    Command.SET_CARTESIAN_IMPEDANCE: 6,
    Command.SET_EE_TO_K: 16,
    Command.SET_NE_TO_EE: 16,
    Command.SET_LOAD: 13,
}
"""Numbers in the body of each setter."""

ONLY_AT_REST = (
    Command.SET_JOINT_IMPEDANCE,
    Command.SET_CARTESIAN_IMPEDANCE,
    Command.SET_EE_TO_K,
    Command.SET_NE_TO_EE,
    Command.SET_LOAD,
)


@dataclass
class Settings:
    """Thresholds, frames and load; the values of an arm just switched on.

    Stiffness is checked and not kept: the emulated arm follows position commands exactly.
    """

    contact_torque: Array = field(default_factory=lambda: np.full(7, 20.0))
    collision_torque: Array = field(default_factory=lambda: np.full(7, 20.0))
    contact_force: Array = field(default_factory=lambda: np.full(6, 20.0))
    collision_force: Array = field(default_factory=lambda: np.full(6, 20.0))
    flange_to_hand: Array = field(default_factory=lambda: FR3.flange_to_hand)
    hand_to_ee: Array = field(default_factory=lambda: np.eye(4))
    ee_to_stiffness: Array = field(default_factory=lambda: np.eye(4))
    load_kg: float = 0.0
    load_center: Array = field(default_factory=lambda: np.zeros(3))
    load_inertia: Array = field(default_factory=lambda: np.zeros(9))

    @property
    def flange_to_ee(self) -> Array:
        """Pose (4, 4) of the end effector in the flange frame."""
        return self._flange_to_ee

    def __post_init__(self) -> None:
        """Compute the pose that every millisecond needs."""
        self._flange_to_ee: Array = self.flange_to_hand @ self.hand_to_ee

    def take(self, command: Command, values: Array) -> bool:
        """Keep what a setter says; False where the arm would call it invalid."""
        if len(values) != SIZES[command] or not np.isfinite(values).all():
            return False
        match command:
            case Command.SET_COLLISION_BEHAVIOR:
                return self._take_thresholds(values)
            case Command.SET_JOINT_IMPEDANCE:
                return _within(values, _JOINT_STIFFNESS)
            case Command.SET_CARTESIAN_IMPEDANCE:
                return _within(values[:3], _TRANSLATION_STIFFNESS) and _within(
                    values[3:], _ROTATION_STIFFNESS
                )
            case Command.SET_LOAD:
                return self._take_load(values)
        return self._take_frame(command, values.reshape(4, 4, order="F"))

    def _take_thresholds(self, values: Array) -> bool:
        # Lower and upper, while accelerating and at constant speed: torques, then forces.
        torques, forces = values[:28].reshape(4, 7), values[28:].reshape(4, 6)
        if (torques <= 0).any() or (forces <= 0).any():
            return False
        self.contact_torque, self.collision_torque = torques[2], torques[3]
        self.contact_force, self.collision_force = forces[2], forces[3]
        return True

    def _take_load(self, values: Array) -> bool:
        if not 0.0 <= values[0] <= LARGEST_LOAD_KG:
            return False
        self.load_kg = float(values[0])
        self.load_center, self.load_inertia = values[1:4], values[4:]
        return True

    def _take_frame(self, command: Command, pose: Array) -> bool:
        rotation = pose[:3, :3]
        if not np.allclose(rotation @ rotation.T, np.eye(3), atol=1e-4):
            return False
        if command == Command.SET_NE_TO_EE:
            self.hand_to_ee, self._flange_to_ee = pose, self.flange_to_hand @ pose
        else:
            self.ee_to_stiffness = pose
        return True


def _within(values: Array, limits: tuple[float, float]) -> bool:
    return bool((values >= limits[0]).all() and (values <= limits[1]).all())


BRAKING = 12.0
"""How fast the brakes slow a joint (rad/s^2)."""

_STEADY_MS = 3
_CARTESIAN = (Generator.POSE, Generator.TWIST)


@dataclass
class Target:
    """What the client last commanded, in the units of its motion generator."""

    generator: Generator
    joints: Array
    joint_velocity: Array
    pose: Array
    twist: Array
    torque: Array


class EmulatedArm:
    """Joint state, modes and errors of one arm; ``step`` advances it by one millisecond.

    Args:
        faults: Switches shared with whoever injects faults.
        dynamics: What its joints are moved by. None: no scene, and references are followed exactly.
        clock_ms: The time it begins at.
        seed: Of its sensor noise.
    """

    def __init__(
        self,
        faults: Faults | None = None,
        dynamics: Dynamics | None = None,
        clock_ms: int = 0,
        seed: int = 0,
    ) -> None:
        self.faults = faults or Faults()
        self.dynamics = dynamics or PlainDynamics(self.faults)
        self.description = self.dynamics.description
        self.settings = Settings(flange_to_hand=self.description.flange_to_hand)
        self.reference_q: Array = self.dynamics.q.copy()
        self.reference_dq: Array = np.zeros(7)
        """What the arm's own controller follows: joint angles and speeds, (7,)."""

        self.ddq: Array = np.zeros(7)
        """Acceleration of the reference."""

        self.push: Array = np.zeros(6)
        """Wrench (N, then Nm) that somebody exerts on the hand, base axes."""

        self.mode = RobotMode.IDLE
        self.errors: set[str] = set()
        self.reflex_reason: set[str] = set()
        self.generator: Generator | None = None
        self.controller = 3
        self.clock_ms = clock_ms
        self.success_rate = 0.0
        self.torque: Array = np.zeros(7)
        self.noise = SensorNoise(seed)
        self._push_until_ms = 0
        self._rate: Array = np.zeros(7)
        self._change: Array = np.zeros(7)
        self._steady_ms = _STEADY_MS
        self.refresh()

    @property
    def q(self) -> Array:
        """Joint angles (7,), rad."""
        return self.dynamics.q

    @property
    def dq(self) -> Array:
        """Joint speeds (7,), rad/s."""
        return self.dynamics.dq

    def refresh(self) -> None:
        """Recompute what follows from joints, frames and surroundings."""
        frame = self.settings.flange_to_ee
        self.posture: Posture = self.description.posture(self.q, frame)
        same = np.array_equal(self.q, self.reference_q)
        self.reference: Posture = (
            self.posture if same else self.description.posture(self.reference_q, frame)
        )
        """Where the hand would be with the joints at their reference."""

        self.wrench = self._wrench()
        """Wrench that people and faults exert on the hand, base axes, (6,): N, then Nm."""

        self.measured_wrench = self._measured_wrench()
        """Estimated wrench in the stiffness frame's axes, (6,), with its bias and noise."""

        noise = self.faults.noise * self.noise.at("torque", self.clock_ms)
        outer = self.posture.jacobian.T @ self.wrench
        self.measured_torque: Array = outer + self.dynamics.touch + noise
        """Estimated external joint torque (7,), with noise."""

    def step(self, target: Target | None) -> None:
        """Advance 1 ms towards ``target``; None in motion means a missed command."""
        self.clock_ms += 1
        if self.clock_ms == self._push_until_ms:
            self.push = np.zeros(6)
        if self.generator is None:
            self._brake()
        elif self.generator is Generator.NONE:
            self._drive(target)
        else:
            self._advance(self.generator, target)
        self._keep_within()
        self.refresh()
        if self.generator is not None and (found := reflexes.contacts(self)):
            self.trip(*found)

    def begin(self, generator: Generator, controller: int) -> None:
        """Begin a motion."""
        self.mode, self.generator, self.controller = RobotMode.MOVE, generator, controller
        self.reflex_reason = set()
        self.success_rate = 1.0
        self.reference_dq, self.ddq = np.zeros(7), np.zeros(7)
        self._rate = self._change = np.zeros(6 if generator in _CARTESIAN else 7)
        self._steady_ms = 0

    def push_until(self, wrench: Array, seconds: float) -> None:
        """Let somebody push the hand with ``wrench`` (6,) for some seconds."""
        self.push, self._push_until_ms = wrench, self.clock_ms + round(1000 * seconds)

    def guide(self, joints: Array) -> None:
        """Let somebody guide an arm at rest by hand; one that moves by itself is left alone."""
        if self.generator is None:
            self.dynamics.put(joints)
            self._let_go()

    def trip(self, *errors: str) -> None:
        """Stop with a reflex and these error bits."""
        self.errors |= set(errors)
        self.reflex_reason = set(errors)
        self.halt(RobotMode.REFLEX)

    def halt(self, mode: RobotMode) -> None:
        """Leave any motion, brake, and show ``mode``."""
        self.mode = mode
        self.generator = None
        self.controller = 3
        self.ddq = np.zeros(7)
        self.torque = np.zeros(7)
        self._let_go()

    @property
    def pose(self) -> Array:
        """Pose of the end effector in the base frame, (4, 4)."""
        return self.posture.pose

    def _let_go(self) -> None:
        """Let the reference be where the joints are."""
        self.reference_q, self.reference_dq = self.q.copy(), self.dq.copy()

    def _around(self) -> Surroundings:
        payload = self.faults.payload_kg + self.settings.load_kg
        torque = self.posture.jacobian.T @ self.wrench
        return Surroundings(self.posture, torque, payload, self.faults.friction)

    def _track(self) -> None:
        """Let the arm's own controller follow the reference."""
        self.dynamics.follow(self.reference_q, self.reference_dq, self._around())

    def _drive(self, target: Target | None) -> None:
        # Where a command was missed, the arm keeps the torque before.
        torque = self.torque if target is None else target.torque
        if self.faults.limits and (
            found := reflexes.torque_steps(self.torque, torque, self.description.joint_torque)
        ):
            self.trip(*found)
            self._track()
            return
        self.torque = torque
        before = self.dq
        self.dynamics.drive(torque, self._around())
        self.ddq = (self.dq - before) / DT
        self._let_go()

    def _advance(self, generator: Generator, target: Target | None) -> None:
        at, before = self.reference_q, self.reference_dq
        if target is None:
            self._steady_ms = 0
            # A real arm extrapolates a missed command with constant acceleration.
            self.reference_dq = before + self.ddq * DT
            self.reference_q = at + self.reference_dq * DT
        else:
            self.reference_q = self._goal(target)
            self.reference_dq = (self.reference_q - at) / DT
            self.ddq = (self.reference_dq - before) / DT
            if found := self._unsmooth(generator):
                self.reference_q, self.reference_dq = at, before
                self.trip(*found)
        self._track()

    def _keep_within(self) -> None:
        """Stop joints beyond their range."""
        if self.generator is not None and (found := reflexes.outside(self.generator, self)):
            self.trip(*found)
        low, high = self.description.joint_low, self.description.joint_high
        inside: Array = np.clip(self.reference_q, low, high)
        self.reference_dq[inside != self.reference_q] = 0.0
        self.reference_q = inside

    def _unsmooth(self, generator: Generator) -> tuple[str, ...]:
        """Return the errors of the motion just commanded."""
        rate = self.reference_dq
        if generator in _CARTESIAN:
            rate = self.reference.jacobian @ rate
        change = (rate - self._rate) / DT
        jerk = (change - self._change) / DT
        self._rate, self._change = rate, change
        self._steady_ms += 1
        # Right after a missed command the arm's own guess is what does not fit.
        if not self.faults.limits or self._steady_ms < _STEADY_MS:
            return ()
        rates = (rate, change, jerk)
        if len(rate) == 6:
            rates = tuple(np.hypot.reduce(value.reshape(2, 3), axis=1) for value in rates)
        return reflexes.discontinuities(generator, rates, self.description)

    def _goal(self, target: Target) -> Array:
        """Return where the joints (7,) are to be next."""
        match target.generator:
            case Generator.JOINT_POSITION:
                return target.joints.copy()
            case Generator.JOINT_VELOCITY:
                return self.reference_q + target.joint_velocity * DT
            case Generator.POSE:
                difference = pose_difference(target.pose, self.reference.pose)
            case _:
                difference = target.twist * DT
        change = damped_inverse(self.reference.jacobian, difference)
        return self.reference_q + change

    def _brake(self) -> None:
        if self.reference_dq.any():
            slowed = dynamics.after_friction(self.reference_dq, np.full(7, BRAKING * DT))
            self.reference_dq = slowed
            self.reference_q = self.reference_q + slowed * DT
        self._track()

    def _wrench(self) -> Array:
        """Return what somebody, the table and a load that Desk does not know exert on the hand."""
        wrench = self.push.copy()
        wrench[2] -= (self.faults.payload_kg - self.settings.load_kg) * dynamics.GRAVITY
        height = float(self.posture.pose[2, 3])
        sinking = -float(self.posture.jacobian[2] @ self.dq)
        wrench[2] += dynamics.table_force(height, self.faults.table_m, sinking)
        return wrench

    def _measured_wrench(self) -> Array:
        frame = self.posture.pose @ self.settings.ee_to_stiffness
        rotation = frame[:3, :3]
        lever = frame[:3, 3] - self.posture.pose[:3, 3]
        here = (self.wrench + self._felt()).reshape(2, 3)
        if lever.any():
            here = here - np.stack([np.zeros(3), np.cross(lever, here[0])])
        noise = self.faults.noise * self.noise.at("wrench", self.clock_ms)
        measured: Array = (here @ rotation).ravel() + self.faults.wrench_bias + noise
        return measured

    def _felt(self) -> Array:
        """Return the wrench (6,) at the hand that explains what the joints feel of the scene."""
        touch = self.dynamics.touch
        if not touch.any():
            return np.zeros(6)
        return damped_inverse(self.posture.jacobian.T, touch)
