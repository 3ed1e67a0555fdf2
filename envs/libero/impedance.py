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
from dzrobot.envs.panda.joint_targets import DROID_GAINS, JOINT_LIMITS, TARGETS
from dzrobot.envs.panda.poses import Array
from dzrobot.envs.panda.state import FINGER_SPEED_M_S, OPEN_M
from dzrobot.envs.panda.trajectories import JointTrajectory

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
    target: Array
    """Joint angles (7,) that were commanded last."""
    _speeds: Array
    _way: JointTrajectory

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        low, high = (np.array(limits) for limits in JOINT_LIMITS["fr3"])
        self._low, self._high = low + TARGETS.room_rad, high - TARGETS.room_rad
        self._profile = TARGETS.profile(1.0 / self.control_freq)
        self._most_change = TARGETS.max_delta_tau * 1000.0 * float(self.sim.model.opt.timestep)
        self._pull = np.zeros(7)
        self.reset_goal()

    def set_goal(self, action: Array, set_qpos: Array | None = None) -> None:
        """Take joint angles (7,) to be at, rad; the target goes there within its limits."""
        self.update()
        goal = np.clip(action, self._low, self._high)
        reach = TARGETS.step_rad
        goal = np.clip(goal, self.joint_pos - reach, self.joint_pos + reach)
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
        self._way = self._to(self.target, self.target, self._speeds, self._speeds)

    def _to(self, start: Array, goal: Array, before: Array, after: Array) -> JointTrajectory:
        period, braking = self._profile.period_s, self._profile.acceleration
        now = float(self.sim.data.time)
        return JointTrajectory(start, goal, now, period, before, after, braking)


class _DroidArm:
    """Mixed into an environment of robosuite: its arm moves as that of the drivers."""

    robots: list[Any]
    model_timestep: float

    def _load_robots(self) -> None:
        super()._load_robots()  # type: ignore[misc]
        robot = self.robots[0]
        _weigh(robot.robot_model)
        robot.gripper.format_action = self._fingers

    def _reset_internal(self) -> None:
        super()._reset_internal()  # type: ignore[misc]
        robot = self.robots[0]
        robot.controller = _controller_class()(**robot.controller_config)

    def _fingers(self, action: Array) -> Array:
        """Return robosuite's numbers (2,) a physics step on; above 0 closes, below 0 opens."""
        gripper = self.robots[0].gripper
        step = 2.0 * FINGER_SPEED_M_S / OPEN_M * self.model_timestep
        change = np.array([-1.0, 1.0]) * step * np.sign(action)
        gripper.current_action = np.clip(gripper.current_action + change, -1.0, 1.0)
        numbers: Array = gripper.current_action
        return numbers


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
