"""The emulated arm: joints that follow commands, limits that trip reflexes.

Position and velocity commands are followed exactly; torque commands move coupled inertias against
viscous and dry friction, with gravity compensated but for what Desk does not know. A reflex brakes
the joints. There is no self-collision beyond the arm's own base.
"""

from dataclasses import dataclass, field

import numpy as np

from dzrobot.envs.emulators import dynamics, kinematics, reflexes
from dzrobot.envs.emulators.dynamics import SensorNoise
from dzrobot.envs.emulators.faults import Faults
from dzrobot.envs.emulators.kinematics import Array, Posture, posture
from dzrobot.envs.emulators.settings import Settings
from dzrobot.envs.emulators.wire import Generator, RobotMode

DT = 1e-3
BRAKING = 12.0
"""How fast the brakes slow a joint (rad/s^2)."""

_INERTIA_PERIOD_MS = 20
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


@dataclass
class EmulatedArm:
    """Joint state, modes and errors of one arm; ``step`` advances it by one millisecond."""

    faults: Faults = field(default_factory=Faults)
    settings: Settings = field(default_factory=Settings)
    q: Array = field(default_factory=lambda: kinematics.READY.copy())
    dq: Array = field(default_factory=lambda: np.zeros(7))
    ddq: Array = field(default_factory=lambda: np.zeros(7))
    push: Array = field(default_factory=lambda: np.zeros(6))
    """Wrench (N, then Nm) that somebody exerts on the hand, base axes."""

    mode: RobotMode = RobotMode.IDLE
    errors: set[str] = field(default_factory=set)
    reflex_reason: set[str] = field(default_factory=set)
    generator: Generator | None = None
    controller: int = 3
    clock_ms: int = 0
    success_rate: float = 0.0
    torque: Array = field(default_factory=lambda: np.zeros(7))
    seed: int = 0

    def __post_init__(self) -> None:
        """Compute what follows from the joints."""
        self.noise = SensorNoise(self.seed)
        self._push_until_ms = 0
        self._rate = self._change = np.zeros(7)
        self._steady_ms = _STEADY_MS
        self.refresh()
        self._inverse_inertia = dynamics.inverse_inertia(self.posture, 0.0)

    def refresh(self) -> None:
        """Recompute what follows from joints, frames and surroundings."""
        self.posture: Posture = posture(self.q, self.settings.flange_to_ee)
        self.wrench = self._wrench()
        """External wrench at the hand, base axes, (6,): N, then Nm."""

        self.measured_wrench = self._measured_wrench()
        """Estimated wrench in the stiffness frame's axes, (6,), with its bias and noise."""

        noise = self.faults.noise * self.noise.at("torque", self.clock_ms)
        self.measured_torque: Array = self.posture.jacobian.T @ self.wrench + noise
        """Estimated external joint torque (7,), with noise."""

    def step(self, target: Target | None) -> None:
        """Advance 1 ms towards ``target``; None in motion means a missed command."""
        self.clock_ms += 1
        if self.clock_ms == self._push_until_ms:
            self.push = np.zeros(6)
        if self.generator is None:
            self._brake()
        else:
            self._advance(self.generator, target)
        self.refresh()
        if self.generator is not None and (found := reflexes.contacts(self)):
            self.trip(*found)

    def begin(self, generator: Generator, controller: int) -> None:
        """Begin a motion."""
        self.mode, self.generator, self.controller = RobotMode.MOVE, generator, controller
        self.reflex_reason = set()
        self.success_rate = 1.0
        self.dq, self.ddq = np.zeros(7), np.zeros(7)
        self._rate = self._change = np.zeros(6 if generator in _CARTESIAN else 7)
        self._steady_ms = 0

    def push_until(self, wrench: Array, seconds: float) -> None:
        """Let somebody push the hand with ``wrench`` (6,) for some seconds."""
        self.push, self._push_until_ms = wrench, self.clock_ms + round(1000 * seconds)

    def guide(self, joints: Array) -> None:
        """Let somebody guide an arm at rest by hand; one that moves by itself is left alone."""
        if self.generator is None:
            self.q, self.dq = joints.copy(), np.zeros(7)

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
        self.ddq[:] = 0
        self.torque = np.zeros(7)

    @property
    def pose(self) -> Array:
        """Pose of the end effector in the base frame, (4, 4)."""
        return self.posture.pose

    def _advance(self, generator: Generator, target: Target | None) -> None:
        before = self.dq
        if target is None:
            self._steady_ms = 0
            # A real arm extrapolates a missed command with constant acceleration.
            self.dq = self.dq + self.ddq * DT
            self.q = self.q + self.dq * DT
        else:
            if self.faults.limits and generator is Generator.NONE:
                found = reflexes.torque_steps(self.torque, target.torque)
                if found:
                    self.trip(*found)
                    return
            self._follow(target)
            self.ddq = (self.dq - before) / DT
            if generator is not Generator.NONE and (found := self._unsmooth(generator)):
                self.q, self.dq = self.q - self.dq * DT, before
                self.trip(*found)
                return
        outside = reflexes.outside(generator, self)
        if outside:
            self.q = np.clip(self.q, kinematics.JOINT_LOW, kinematics.JOINT_HIGH)
            self.dq = np.zeros(7)
            self.trip(*outside)

    def _unsmooth(self, generator: Generator) -> tuple[str, ...]:
        """Return the errors of the motion just commanded."""
        rate = self.dq
        if generator in _CARTESIAN:
            rate = self.posture.jacobian @ self.dq
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
        return reflexes.discontinuities(generator, rates)

    def _follow(self, target: Target) -> None:
        match target.generator:
            case Generator.JOINT_POSITION:
                self._move_to(target.joints)
            case Generator.JOINT_VELOCITY:
                self._move_to(self.q + target.joint_velocity * DT)
            case Generator.POSE:
                difference = kinematics.pose_difference(target.pose, self.pose)
                self._move_to(self.q + self._joint_change(difference))
            case Generator.TWIST:
                self._move_to(self.q + self._joint_change(target.twist * DT))
            case Generator.NONE:
                self._apply(target.torque)

    def _move_to(self, joints: Array) -> None:
        self.dq = (joints - self.q) / DT
        self.q = joints.copy()

    def _joint_change(self, difference: Array) -> Array:
        return kinematics.damped_inverse(self.posture.jacobian, difference)

    def _apply(self, torque: Array) -> None:
        if self.clock_ms % _INERTIA_PERIOD_MS == 0:
            self._inverse_inertia = dynamics.inverse_inertia(
                self.posture, self.faults.payload_kg + self.settings.load_kg
            )
        self.torque = torque
        push = self.posture.jacobian.T @ self.wrench
        driven = torque + push - dynamics.VISCOUS * self.dq
        free = self.dq + DT * (self._inverse_inertia @ driven)
        slip = DT * self.faults.friction * self._inverse_inertia.diagonal() * dynamics.COULOMB
        self.dq = dynamics.after_friction(free, slip)
        self.q = self.q + self.dq * DT

    def _brake(self) -> None:
        if not self.dq.any():
            return
        self.dq = dynamics.after_friction(self.dq, np.full(7, BRAKING * DT))
        low, high = kinematics.JOINT_LOW, kinematics.JOINT_HIGH
        self.q = np.clip(self.q + self.dq * DT, low, high)

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
        here = self.wrench.reshape(2, 3)
        if lever.any():
            here = here - np.stack([np.zeros(3), np.cross(lever, here[0])])
        noise = self.faults.noise * self.noise.at("wrench", self.clock_ms)
        measured: Array = (here @ rotation).ravel() + self.faults.wrench_bias + noise
        return measured
