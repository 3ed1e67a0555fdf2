"""robosuite's Panda with the joints, the hand and the law of the arm that the drivers command.

An arm of DROID follows joint angles softly and late. What a policy learns here is the same there
only where both follow by one law, against the same inertia and friction.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from dzrobot.envs.mujoco.lift_scene import (
    COULOMB,
    FINGER_INERTIA,
    HAND_INERTIA,
    LINK_INERTIA_M2,
    ROTOR_INERTIA,
    VISCOUS,
)
from dzrobot.envs.panda.joint_targets import (
    DROID_GAINS,
    HAND_SPEED_M_S,
    HAND_TURN_RAD_S,
    JOINT_ACCELERATION_RAD_S2,
    JOINT_LIMITS,
    JOINT_ROOM_RAD,
    JOINT_SPEED_RAD_S,
    JOINT_STEP_RAD,
    MAX_DELTA_TAU,
    JointProfile,
)
from dzrobot.envs.panda.poses import Array
from dzrobot.envs.panda.trajectories import JointTrajectory

FINGER_SPEED_M_S = 0.3
"""How fast the distance between the fingers changes: that of the drivers."""

_FINGER_TRAVEL_M = 0.08
_FINGER_JOINT = {"armature": "0.05", "damping": "20", "frictionloss": "0.05"}
"""robosuite's fingers lag by 0.1 s and stay 2 mm short of open (kg, N s/m, N)."""


class _Impedance:
    """Mixed into robosuite's joint controller: goals are joint angles, followed by DROID's law."""

    sim: Any
    joint_pos: Array
    joint_vel: Array
    J_full: Array
    """The hand's Jacobian, (6, 7)."""
    torque_compensation: Array
    control_freq: float
    new_update: bool
    torques: Array | None
    update: Callable[[], None]

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        low, high = (np.array(limits) for limits in JOINT_LIMITS["fr3"])
        self._low, self._high = low + JOINT_ROOM_RAD, high - JOINT_ROOM_RAD
        self._profile = JointProfile(
            period_s=1.0 / self.control_freq,
            speed=np.array(JOINT_SPEED_RAD_S),
            acceleration=JOINT_ACCELERATION_RAD_S2,
            hand_speed_m_s=HAND_SPEED_M_S,
            hand_turn_rad_s=HAND_TURN_RAD_S,
        )
        self.target, self._speeds = self.joint_pos.copy(), np.zeros(7)
        self._way = self._resting(self.target)
        self._most_change = MAX_DELTA_TAU * 1000.0 * float(self.sim.model.opt.timestep)
        self._pull = np.zeros(7)

    def set_goal(self, action: Array, set_qpos: Array | None = None) -> None:
        """Take joint angles (7,) to be at, rad; the target goes there within its limits."""
        self.update()
        goal = np.clip(action, self._low, self._high)
        goal = np.clip(goal, self.joint_pos - JOINT_STEP_RAD, self.joint_pos + JOINT_STEP_RAD)
        before, since = self._way.at(self.sim.data.time)
        target, speeds, _ = self._profile.towards(
            self.target, goal, self._speeds, self.J_full, pace=1.0
        )
        self._way = self._to(before, target, since, speeds)
        self.target, self._speeds = target, speeds

    def run_controller(self) -> Array:
        """Return the torques (7,) for the next physics step, Nm."""
        self.update()
        reference, _ = self._way.at(self.sim.data.time)
        wanted = DROID_GAINS.torque(self.J_full, reference - self.joint_pos, self.joint_vel)
        most = self._most_change
        self._pull = self._pull + np.clip(wanted - self._pull, -most, most)
        self.torques = self._pull + self.torque_compensation
        self.new_update = True
        return self.torques

    def reset_goal(self) -> None:
        """Rest where the joints are."""
        self.target, self._speeds = self.joint_pos.copy(), np.zeros(7)
        self._way = self._resting(self.target)

    def _resting(self, at: Array) -> JointTrajectory:
        return self._to(at, at, np.zeros(7), np.zeros(7))

    def _to(self, start: Array, goal: Array, before: Array, after: Array) -> JointTrajectory:
        period, braking = self._profile.period_s, self._profile.acceleration
        now = float(self.sim.data.time)
        return JointTrajectory(start, goal, now, period, before, after, braking)


class _DroidArm:
    """Mixed into an environment of robosuite: its arm moves as that of the drivers."""

    robots: list[Any]

    def _load_robots(self) -> None:
        super()._load_robots()  # type: ignore[misc]
        robot = self.robots[0]
        _weigh(robot.robot_model)
        robot.gripper.format_action = _Fingers(robot.gripper).towards

    def _reset_internal(self) -> None:
        super()._reset_internal()  # type: ignore[misc]
        robot = self.robots[0]
        robot.controller = _controller_class()(**robot.controller_config)


class _Fingers:
    """What the fingers are asked for, at the speed of the drivers' hand."""

    def __init__(self, gripper: Any) -> None:
        self._gripper = gripper

    def towards(self, action: Array) -> Array:
        """Return robosuite's numbers (2,) a physics step on; above 0 closes, below 0 opens."""
        step = 2.0 * FINGER_SPEED_M_S / _FINGER_TRAVEL_M * _PHYSICS_S
        change = np.array([-1.0, 1.0]) * step * np.sign(action)
        gripper = self._gripper
        gripper.current_action = np.clip(gripper.current_action + change, -1.0, 1.0)
        result: Array = gripper.current_action
        return result


_PHYSICS_S = 0.002


@cache
def droid_arm(environment_class: type) -> type:
    """Return an environment of robosuite whose arm moves as that of the drivers."""
    return type(environment_class.__name__, (_DroidArm, environment_class), {})


@cache
def _controller_class() -> type:
    base = import_module("robosuite.controllers.joint_pos").JointPositionController
    return type("HybridImpedance", (_Impedance, base), {})


def _weigh(robot_model: Any) -> None:
    """Give joints and links the inertia and friction that they have for the drivers."""
    for name, values in (
        ("armature", ROTOR_INERTIA), ("damping", VISCOUS), ("frictionloss", COULOMB),
    ):  # fmt: skip
        robot_model.set_joint_attribute(attrib=name, values=values)
    for body in robot_model.worldbody.iter("body"):
        name, inertial = body.get("name", "").partition("_")[2], body.find("inertial")
        if inertial is None:
            continue
        turning = _inertia_of(name, float(inertial.get("mass")))
        if turning is not None:
            inertial.set("diaginertia", " ".join(f"{value:.6g}" for value in turning))
    for joint in robot_model.worldbody.iter("joint"):
        if "finger" in joint.get("name", ""):
            for name, value in _FINGER_JOINT.items():
                joint.set(name, value)


def _inertia_of(body: str, mass: float) -> tuple[float, ...] | None:
    """Return the inertia (3,) of a body about its axes (kg m^2); None: robosuite's stays."""
    if body.startswith("link") and body != "link0":
        return (LINK_INERTIA_M2 * mass,) * 3
    return {
        "right_hand": (1e-6,) * 3,
        "right_gripper": HAND_INERTIA,
        "leftfinger": FINGER_INERTIA,
        "rightfinger": FINGER_INERTIA,
    }.get(body)
