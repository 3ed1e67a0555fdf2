"""Faults of arm, gripper, cameras and policy: what the environment does, and how fast."""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from emulated import need_libraries, printer, rows

from dzrobot.envs.emulators.dynamics import Faults
from dzrobot.envs.franka.emulated import EmulatedWorkcell
from dzrobot.envs.franka.make import connectable, load_workcell
from dzrobot.envs.mujoco.lift_scene import EMPTY_SCENE
from dzrobot.errors import DzrobotError, RobotError, SafetyError, StoppedError

pytestmark = pytest.mark.robot

FORWARD = (0.3, 0, 0, 0, 0, 0, 0)
STILL = (0,) * 7
HZ = 20.0
LONGEST_REST_S = 1.5
"""An arm rests this long after the fault was noticed, at the latest (its own time)."""


@dataclass(frozen=True)
class Fault:
    """One fault: how it is made, what must follow, how it ends."""

    name: str
    inject: Callable
    expected: str
    """The abort, or what of several comes first; or "" when the episode continues."""

    clear: Callable = lambda cell, env: None
    action: tuple = FORWARD
    refuses_reset: str = ""
    """What the next reset says while the fault lasts."""

    steps: int = 40
    check: Callable = lambda info: True


def trip(*errors):
    return lambda cell, env: cell.emulators.call("trip", *errors)


def faults(**values):
    return lambda cell, env: cell.emulators.set(**values)


def both(*calls):
    return lambda cell, env: [call(cell, env) for call in calls]


def press(cell, env):
    cell.emulators.call("press_user_stop")


def release(cell, env):
    cell.emulators.call("release_user_stop")
    wait(0.02)(cell, env)


def wait(seconds):
    return lambda cell, env: cell.clock.sleep_until(cell.clock.now() + seconds)


def call(name, *arguments):
    return lambda cell, env: cell.emulators.call(name, *arguments)


def mode(name):
    return both(call("mode", name), wait(0.02))


def nothing(cell, env):
    pass


LOST = "stale_state|connection"
"""A connection is gone when a state is 0.25 s of the arm's time old, or when the client library has
waited for one for a second of the machine's: on a busy machine that may come first."""

SCENE = os.environ.get("ARM_SCENE", EMPTY_SCENE)
"""What stands around the arm: nothing, or ``lift``, a table with a cube in MuJoCo."""

FROZEN = "stale_state" if SCENE == EMPTY_SCENE else LOST
"""With a scene, 0.25 s of the arm's time take longer than the library's second."""

BIAS = Faults().wrench_bias
DOWN = (0, 0, -0.5, 0, 0, 0, 0)
CLOSE = (0.3, 0, 0, 0, 0, 0, -1)
NAN = (0.3, np.nan, 0, 0, 0, 0, 0)
INFINITE = (0.3, np.inf, 0, 0, 0, 0, 0)
RECOVERED = {"steps": 6, "check": lambda info: info["recoveries"] == 1}

FAULTS = (
    Fault("cartesian reflex (contact)", trip("cartesian_reflex"), "collision"),
    Fault("joint reflex (contact)", trip("joint_reflex"), "collision"),
    Fault("self-collision", trip("self_collision_avoidance_violation"), "collision"),
    Fault("joint limit", trip("joint_position_limits_violation"), "reflex"),
    Fault("power limit", trip("power_limit_violation"), "reflex"),
    Fault("communication error", trip("communication_constraints_violation"), "", **RECOVERED),
    Fault("joint velocity", trip("joint_velocity_violation"), "", **RECOVERED),
    Fault("torque discontinuity", trip("controller_torque_discontinuity"), "", **RECOVERED),
    Fault("harmless and contact at once",
          trip("joint_velocity_violation", "joint_reflex"), "collision"),
    Fault("user stop", press, "user_stop", release, refuses_reset="user stop"),
    Fault("manual recovery needed",
          both(faults(manual_recovery=True), trip("joint_reflex")), "collision",
          faults(manual_recovery=False), refuses_reset="by hand"),
    Fault("20 % packet loss", faults(packet_loss=0.2), "", faults(packet_loss=0.0), steps=10,
          check=lambda info: info["success_rate"] < 0.97),
    Fault("100 % packet loss", faults(packet_loss=1.0), "reflex", faults(packet_loss=0.0),
          check=lambda info: info["recoveries"] == 3),
    Fault("state frozen 0.4 s", call("freeze", 0.4), FROZEN),
    Fault("state frozen 2 s", call("freeze", 2.0), FROZEN,
          wait(1.6)),
    Fault("connection closed", call("drop_client"), LOST),
    Fault("arm switched off", lambda cell, env: cell.emulators.kill_arm(), LOST,
          lambda cell, env: cell.emulators.start_arm(), refuses_reset="refused"),
    Fault("motions refused at start", both(faults(reject_moves=3), trip("joint_reflex")),
          "collision", faults(reject_moves=0),
          refuses_reset="refused the controller"),
    Fault("pushed with 45 N",
          call("push", 0, 45, 0, 0, 0, 0, 0.2), "force", wait(0.3)),
    Fault("gripper fails twice", faults(gripper_fails=2), "gripper", action=CLOSE),
    Fault("gripper fails once", faults(gripper_fails=1), "", action=CLOSE, steps=8),
    Fault("gripper takes 0.5 s", faults(gripper_latency_s=0.5), "",
          faults(gripper_latency_s=0.0), CLOSE, steps=10),
    Fault("gripper stuck", faults(gripper_stuck=True), "gripper", faults(gripper_stuck=False),
          CLOSE, steps=80),
    Fault("cameras unplugged", lambda cell, env: cell.emulators.kill_cameras(), "stale_frame",
          lambda cell, env: cell.emulators.start_cameras()),
    Fault("virtual wall", faults(walls_m=[-1, -1, 0.6, 1, 1, 2]), "reflex", faults(walls_m=None)),
    Fault("instability", trip("instability_detected"), "reflex"),
    Fault("torque out of range", trip("tau_j_range_violation"), "reflex"),
    Fault("refused after a recovery",
          both(faults(reject_moves=1), trip("joint_velocity_violation")), "reflex"),
    Fault("user stop for a moment", both(press, release), "controller"),
    Fault("brakes locked", mode("brakes_locked"), "controller", mode("idle"),
          refuses_reset="unlock the joints"),
    Fault("hand guiding", mode("guiding"), "controller", mode("idle"),
          refuses_reset="white lamp"),
    Fault("FCI switched off", faults(fci=False), LOST, faults(fci=True),
          refuses_reset="FCI"),
    Fault("safety function refuses settings",
          both(faults(refuse_settings=True), call("drop_client")), LOST,
          faults(refuse_settings=False), refuses_reset="refused"),
    Fault("5 % packet loss", faults(packet_loss=0.05), "", faults(packet_loss=0.0), steps=10,
          check=lambda info: info["success_rate"] < 0.99),
    Fault("struck with 150 N", call("push", 0, 150, 0, 0, 0, 0, 0.2), "collision", wait(0.3)),
    Fault("leaned on with 15 N", call("push", 0, 15, 0, 0, 0, 0, 0.5), "", steps=20),
    Fault("presses on a table", faults(table_m=0.475), "", faults(table_m=None), DOWN, steps=20),
    Fault("0.3 kg that Desk does not know", faults(payload_kg=0.3), "", faults(payload_kg=0.0),
          STILL, steps=20),
    Fault("wrench bias of 45 N", faults(wrench_bias=[0, 45, 0, 0, 0, 0]), "force",
          faults(wrench_bias=BIAS)),
    Fault("five times the noise", faults(noise=5.0), "", faults(noise=1.0), steps=20),
    Fault("three times the friction", faults(friction=3.0), "", faults(friction=1.0), steps=20),
    Fault("hand not homed", faults(homed=False), "gripper", faults(homed=True), CLOSE,
          refuses_reset="homed"),
    Fault("nothing between the fingers", nothing, "", action=CLOSE, steps=20),
    Fault("an object between the fingers", faults(object_width_m=0.04), "",
          faults(object_width_m=None), CLOSE, steps=20),
    Fault("slow policy, 0.2 s", wait(0.2), "", steps=2),
    Fault("NaN in an action", nothing, "invalid_action", action=NAN),
    Fault("infinity in an action", nothing, "invalid_action", action=INFINITE),
    Fault("operator stop", lambda cell, env: env.operator_stop(), "operator_stop"),
    Fault("no action for 0.6 s", wait(0.6), "", steps=2),
    Fault("no action for 2 s", wait(2.0), "watchdog"),
)  # fmt: skip

SHORT = {
    "cartesian reflex (contact)", "communication error", "user stop", "100 % packet loss",
    "state frozen 0.4 s", "connection closed", "pushed with 45 N", "gripper fails twice",
    "cameras unplugged", "refused after a recovery", "presses on a table", "NaN in an action",
    "operator stop", "no action for 2 s",
}  # fmt: skip
"""One or more of every kind."""


@pytest.fixture(scope="module")
def workcell():
    need_libraries()
    values = {
        "control_hz": HZ,
        "action": {"translation_m": 0.03},
        "gripper": {"timeout_s": 2.5},
        "reset": {"speed_m_s": 0.5, "lift_m": 0.0},
        "limits": {"stop_after_s": 1.5, "hold_after_s": 0.3, "step_rad": 0.18, "turn_rad_s": 4.0},
        "reward": {"rule": "none"},
    }
    if SCENE != EMPTY_SCENE:
        # The hand is above what the exterior camera sees, and rendered images have no noise.
        values["limits"]["frozen_image_s"] = 0
    cell = EmulatedWorkcell(rate=math.inf, scene=SCENE)
    env = connectable(cell, load_workcell("emulated:empty", values))
    yield cell, env
    env.close()


@pytest.fixture(scope="module")
def under_way():
    """The last fault, if its test has left an episode under way; it saves every other reset."""
    return []


@pytest.fixture
def say(request, capsys):
    return printer(request, capsys)


@dataclass
class Row:
    fault: str
    did: str
    noticed_s: float
    at_rest_s: float | None
    next_reset: str


def at_rest(cell, env, since):
    """Return when the speed fell below 1 cm/s, counted from ``since``; None: unreadable."""
    deadline = cell.clock.now() + LONGEST_REST_S
    while cell.clock.now() < deadline:
        try:
            state = env.arm.state()
        except RobotError:
            return None
        if np.linalg.norm(state.twist[:3]) < 0.01:
            return cell.clock.now() - since
        wait(0.005)(cell, env)
    return float("inf")


def begin(env):
    """Begin an episode that works."""
    env.reset()
    for _ in range(5):
        *_, info = env.step(np.array(FORWARD, np.float32))
        assert info["abort"] == "", info["abort_message"]


def run(fault, cell, env):
    """Let ``fault`` happen in the episode under way; end in the next one."""
    since = cell.clock.now()
    fault.inject(cell, env)
    truncated = False
    for _ in range(fault.steps):
        _, _, _, truncated, info = env.step(np.array(fault.action, np.float32))
        if truncated:
            break
    noticed = cell.clock.now() - since
    assert info["abort"] in fault.expected.split("|"), info["abort_message"]
    assert truncated == bool(fault.expected)
    assert info["reset_reason"] == info["abort"]
    assert fault.check(info), info
    rest = at_rest(cell, env, since) if truncated else None
    assert rest is None or rest < noticed + LONGEST_REST_S
    said = "works"
    if fault.expected:
        with pytest.raises(StoppedError, match=fault.expected):
            env.reset()
        env.acknowledge()
        said = "works once acknowledged"
    if fault.refuses_reset:
        with pytest.raises(DzrobotError, match=fault.refuses_reset):
            env.reset()
        said = f"refused ({fault.refuses_reset}), then works once acknowledged"
    fault.clear(cell, env)
    env.acknowledge()
    begin(env)
    did = f"ends: {info['abort']}" if truncated else f"continues ({info['recoveries']} recoveries)"
    return Row(fault.name, did, noticed if truncated else 0.0, rest, said)


def test_there_are_as_many_faults_as_were_asked_for():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 45


@pytest.mark.parametrize("fault", rows(FAULTS, [fault.name for fault in FAULTS], SHORT))
def test_every_fault_ends_well_and_the_next_reset_works(fault, workcell, under_way, say):
    if not under_way:
        # The first fault, or the one before this has failed.
        workcell[1].acknowledge()
        begin(workcell[1])
    under_way.clear()
    try:
        row = run(fault, *workcell)
    except BaseException:
        # The next fault must not meet what is left of this one.
        fault.clear(*workcell)
        raise
    under_way.append(fault.name)
    rest = "-" if row.at_rest_s is None else f"{row.at_rest_s:.2f} s"
    noticed = f"{row.noticed_s:.2f} s" if row.noticed_s else "-"
    said = f"{row.fault:<32} {row.did:<26} noticed {noticed:>6}, at rest {rest:>6}; next reset "
    say(f"\n{said}{row.next_reset}")


def test_action_of_another_shape_is_an_error_and_the_arm_holds(workcell):
    _, env = workcell
    env.acknowledge()
    env.reset()
    with pytest.raises(SafetyError, match="7 numbers"):
        env.step(np.zeros(6))
    env.step(np.array(STILL, np.float32))


def test_robot_of_another_version_is_refused_with_the_line_to_install(workcell):
    cell, env = workcell
    env.acknowledge()
    cell.emulators.set(version=9)
    cell.emulators.call("drop_client")
    wait(1.2)(cell, env)
    with pytest.raises(RobotError, match=r"pip install franky-control --extra-index-url .*/9/"):
        env.reset()
    cell.emulators.set(version=None)
    env.reset()
