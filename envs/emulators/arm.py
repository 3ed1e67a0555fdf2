"""The emulated arm: joints that follow commands, limits that trip reflexes.

Position and velocity commands are followed exactly; torque commands move a diagonal inertia with
viscous friction, with gravity compensated. There is no contact and no self-collision.
"""

from dataclasses import dataclass, field

import numpy as np

from dzrobot.envs.emulators import kinematics
from dzrobot.envs.emulators.kinematics import Array
from dzrobot.envs.emulators.wire import ERRORS, ROBOT_STATE, Generator, RobotMode

DT = 1e-3
INERTIA = np.array([1.2, 1.2, 0.9, 0.9, 0.25, 0.2, 0.1])
FRICTION = np.array([1.5, 1.5, 1.2, 1.2, 0.5, 0.4, 0.3])


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

    q: Array = field(default_factory=lambda: kinematics.READY.copy())
    dq: Array = field(default_factory=lambda: np.zeros(7))
    ddq: Array = field(default_factory=lambda: np.zeros(7))
    flange_to_ee: Array = field(default_factory=kinematics.flange_to_hand)
    external_force: Array = field(default_factory=lambda: np.zeros(6))
    mode: RobotMode = RobotMode.IDLE
    errors: set[str] = field(default_factory=set)
    reflex_reason: set[str] = field(default_factory=set)
    generator: Generator | None = None
    controller: int = 3
    clock_ms: int = 0
    success_rate: float = 0.0
    torque: Array = field(default_factory=lambda: np.zeros(7))

    def step(self, target: Target | None) -> None:
        """Advance 1 ms towards ``target``; None in motion means a missed command."""
        self.clock_ms += 1
        if self.generator is None:
            self.dq[:] = 0
            self.ddq[:] = 0
            return
        before = self.dq.copy()
        if target is None:
            # A real arm extrapolates a missed command with constant acceleration.
            self.dq = self.dq + self.ddq * DT
            self.q = self.q + self.dq * DT
        else:
            self._follow(target)
            self.ddq = (self.dq - before) / DT
        if np.any(self.q < kinematics.JOINT_LOW) or np.any(self.q > kinematics.JOINT_HIGH):
            self.q = np.clip(self.q, kinematics.JOINT_LOW, kinematics.JOINT_HIGH)
            self.trip("joint_position_limits_violation")

    def trip(self, *errors: str) -> None:
        """Stop with a reflex and these error bits."""
        self.errors |= set(errors)
        self.reflex_reason = set(errors)
        self.halt(RobotMode.REFLEX)

    def halt(self, mode: RobotMode) -> None:
        """Leave any motion and show ``mode``."""
        self.mode = mode
        self.generator = None
        self.controller = 3
        self.dq[:] = 0
        self.ddq[:] = 0
        self.torque[:] = 0

    @property
    def pose(self) -> Array:
        """Pose of the end effector in the base frame, (4, 4)."""
        return kinematics.forward(self.q, self.flange_to_ee)

    def message(self) -> bytes:
        """Return the state datagram."""
        state = np.zeros((), ROBOT_STATE)
        state["message_id"] = self.clock_ms
        pose = _flat(self.pose)
        for name in ("O_T_EE", "O_T_EE_d", "O_T_EE_c"):
            state[name] = pose
        state["F_T_EE"] = state["F_T_NE"] = _flat(self.flange_to_ee)
        state["EE_T_K"] = state["NE_T_EE"] = _flat(np.eye(4))
        state["m_ee"] = 0.73
        elbow = (self.q[2], -1.0 if self.q[3] < 0 else 1.0)
        state["elbow"] = state["elbow_d"] = state["elbow_c"] = elbow
        state["q"] = state["q_d"] = state["theta"] = self.q
        state["dq"] = state["dq_d"] = state["dtheta"] = self.dq
        state["ddq_d"] = self.ddq
        state["tau_J"] = state["tau_J_d"] = self.torque
        matrix = kinematics.jacobian(self.q, self.flange_to_ee)
        state["O_dP_EE_d"] = state["O_dP_EE_c"] = matrix @ self.dq
        state["tau_ext"] = matrix.T @ self.external_force
        state["O_F_ext"] = self.external_force
        rotation = self.pose[:3, :3]
        state["K_F_ext"] = np.concatenate(
            [rotation.T @ self.external_force[:3], rotation.T @ self.external_force[3:]]
        )
        state["O_ddP_O"] = (0.0, 0.0, -9.81)
        state["generator_mode"] = 0 if self.generator is None else int(self.generator) + 1
        state["controller_mode"] = self.controller
        state["errors"] = [name in self.errors for name in ERRORS]
        state["reflex_reason"] = [name in self.reflex_reason for name in ERRORS]
        state["robot_mode"] = int(self.mode)
        state["success_rate"] = self.success_rate
        return state.tobytes()

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
        return kinematics.damped_inverse(kinematics.jacobian(self.q, self.flange_to_ee), difference)

    def _apply(self, torque: Array) -> None:
        push = kinematics.jacobian(self.q, self.flange_to_ee).T @ self.external_force
        self.torque = np.clip(torque, -kinematics.JOINT_TORQUE, kinematics.JOINT_TORQUE)
        acceleration = (self.torque + push - FRICTION * self.dq) / INERTIA
        self.dq = self.dq + acceleration * DT
        self.q = self.q + self.dq * DT


def _flat(pose: Array) -> Array:
    flat: Array = pose.flatten(order="F")
    return flat
