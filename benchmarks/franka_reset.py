"""Resets from all over the workspace: 500 places that a policy can be at, in simulated time.

``python benchmarks/franka_reset.py`` prints, by kind of place, how many resets arrived, were
refused before anything moved, or failed on the way, and the seconds of arm time.

The arm moves by kinematics alone: it follows its targets exactly, as far as the limits of the
emulated FR3 allow, with the transforms of the emulator's description, not of the safety layer.
"""

import argparse
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from dzrobot.envs.emulators.kinematics import FR3
from dzrobot.envs.franka.arm_model import FLANGE_TO_HAND
from dzrobot.envs.franka.fake_devices import FakeClock, FakeGripper
from dzrobot.envs.franka.franka_config import FrankaConfig
from dzrobot.envs.franka.motion.controller import Control
from dzrobot.envs.franka.motion.reach import JointBox, solve_within
from dzrobot.envs.franka.workcells import Space
from dzrobot.envs.panda.poses import between, damped_inverse, pose_difference, rotation_of
from dzrobot.envs.panda.state import ArmState, Mode
from dzrobot.errors import DzrobotError

TICK_S = 0.02
STEPS = 40
"""Poses that are solved along the line from the start to a place."""

ELBOW = 0.05
"""Share of the elbow's way back to its posture per tick."""

JOINT_SPEED = 0.1 * FR3.joint_velocity
HAND_SPEED = 0.5
TOLERANCE_RAD = 1e-9


class KinematicArm:
    """An arm that follows at once, within its joint limits.

    Args:
        joints: Where it begins.
        clock: What it moves by.
        posture: What its elbow is drawn to, joint angles (7,).
    """

    gripper = FakeGripper()

    def __init__(self, joints, clock, posture):
        self._joints, self._clock, self._posture = joints.copy(), clock, posture
        self._goal, self._home = None, None
        self._moved_s = clock.now()
        self._speeds = np.zeros(7)
        self._twist = np.zeros(6)
        self.moved = False

    def state(self):
        """Return the state."""
        while self._moved_s + TICK_S <= self._clock.now() + 1e-9:
            self._moved_s += TICK_S
            self._tick()
        return ArmState(
            pose=FR3.forward(self._joints, FR3.flange_to_hand), twist=self._twist.copy(),
            force_n=np.zeros(3), torque_nm=np.zeros(3), joints=self._joints.copy(),
            flange_to_ee=FR3.flange_to_hand, joint_speeds=self._speeds, mode=Mode.IDLE, errors=(),
            controlled=self._goal is not None or self._home is not None,
            robot_time_s=self._clock.now(), success_rate=1.0, fresh_at_s=self._clock.now(),
        )  # fmt: skip

    def _tick(self):
        before = self._joints
        if self._home is not None:
            reach = JOINT_SPEED * TICK_S
            self._joints = np.clip(self._home, before - reach, before + reach)
        elif self._goal is not None:
            at = FR3.posture(before, FR3.flange_to_hand)
            away = pose_difference(self._goal, at.pose)
            away *= min(1.0, HAND_SPEED * TICK_S / max(1e-12, float(np.linalg.norm(away[:3]))))
            draw = ELBOW * (self._posture - before)
            change = damped_inverse(at.jacobian, away - at.jacobian @ draw, 0.02) + draw
            self._joints = np.clip(before + change, FR3.joint_low, FR3.joint_high)
        self._speeds = (self._joints - before) / TICK_S
        self._twist = FR3.posture(self._joints, FR3.flange_to_hand).jacobian @ self._speeds
        self.moved |= bool(np.abs(self._joints - before).max() > TOLERANCE_RAD)

    def start(self, space=Space.CARTESIAN):
        """Hold the pose it is at."""
        self._goal, self._home = self.state().pose, None

    def command(self, target, over_s=0.0, speeds=None):
        """Move towards a pose."""
        self._goal = target.copy()

    def home(self, joints, dynamics):
        """Move the joints."""
        self._home, self._goal = joints.copy(), None

    def stop(self):
        """Come to rest."""
        self._goal = self._home = None


@dataclass
class Kind:
    """What came of the resets from one kind of place."""

    results: Counter = field(default_factory=Counter)
    seconds: list = field(default_factory=list)
    reasons: Counter = field(default_factory=Counter)


def place(generator, config, number):
    """Return kind and joints (7,) of a place that a policy gets to on a straight line from home."""
    limits, start = config.limits, config.reset.pose
    tilt = np.array(limits.tilt)
    low = np.concatenate([limits.workspace_low, -tilt])
    high = np.concatenate([limits.workspace_high, tilt])
    at = generator.uniform(low, high)
    # One of two: some of its coordinates are at the box's ends.
    ends = generator.integers(0, 4, 6) if number % 2 else np.full(6, 3)
    at = np.where(ends == 0, low, np.where(ends == 1, high, at))
    sides = int((ends[:3] < 2).sum())
    goal = np.eye(4)
    goal[:3, :3], goal[:3, 3] = rotation_of(at[3:]) @ start[:3, :3], at[:3]
    home, margin = np.array(config.reset.joints), limits.joint_margin_rad
    box = JointBox(
        np.array(limits.joints_low) + margin, np.array(limits.joints_high) - margin, home
    )
    joints = home
    for share in np.linspace(0.0, 1.0, STEPS + 1)[1:]:
        found = solve_within(joints, between(start, goal, share), FLANGE_TO_HAND, box)
        if found is None:
            return "end of reach", joints
        joints = found
    return ("inside", "face", "edge", "corner")[sides], joints


def reset_from(joints, config, number):
    """Return what came of a reset, its seconds of arm time, and why it did not arrive."""
    clock = FakeClock()
    arm = KinematicArm(joints, clock, np.array(config.reset.joints))
    control = Control(arm, config, clock)
    began = clock.now()
    try:
        control.travel(config.reset.start_pose(number))
    except DzrobotError as error:
        result = "failed" if arm.moved else "refused"
        return result, clock.now() - began, str(error).split(":")[0]
    return "arrived", clock.now() - began, ""


def experiment(count, seed=0):
    """Return :class:`Kind` by the name of the kind of place."""
    config, generator = FrankaConfig(), np.random.default_rng(seed)
    kinds = {}
    for number in range(count):
        name, joints = place(generator, config, number)
        result, seconds, reason = reset_from(joints, config, number)
        kind = kinds.setdefault(name, Kind())
        kind.results[result] += 1
        if result == "arrived":
            kind.seconds.append(seconds)
        else:
            kind.reasons[reason] += 1
    return kinds


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--places", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    kinds = experiment(arguments.places, arguments.seed)
    print("| from | resets | arrived | refused | failed | seconds: median, longest | why not |")
    print("|---|---|---|---|---|---|---|")
    for name in sorted(kinds):
        kind = kinds[name]
        took = f"{np.median(kind.seconds):.1f}, {max(kind.seconds):.1f}" if kind.seconds else ""
        counts = " | ".join(str(kind.results[key]) for key in ("arrived", "refused", "failed"))
        why = ", ".join(f"{reason} ({count})" for reason, count in kind.reasons.most_common())
        print(f"| {name} | {kind.results.total()} | {counts} | {took} | {why} |")


if __name__ == "__main__":
    main()
