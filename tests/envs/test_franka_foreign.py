"""The unmodified driver against simulators of the arm that nobody here wrote.

Each runs in an environment of its own in the folder ``DZROBOT_FRANKA_SIM``, named like its package:
they pin different versions of MuJoCo. ``make test-arm-foreign`` makes them. They keep real time, so
the bounds are wide: what is shown is that arm, hand, controllers and stop work with another
implementation of the robot's protocol.
"""

import contextlib
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from emulated import need_libraries

from dzrobot.embodiments.registry import load_embodiment
from dzrobot.envs.franka.arm_model import forward, pose_and_jacobian
from dzrobot.envs.franka.camera_config import CameraConfig
from dzrobot.envs.franka.drivers.franky_arm import FrankyArm
from dzrobot.envs.franka.emulated import hand_at
from dzrobot.envs.franka.env import FrankaEnv
from dzrobot.envs.franka.franka_config import DROID_HOME, FrankaConfig, ResetConfig
from dzrobot.envs.franka.workcells import Frame, RealWorkcell
from dzrobot.errors import RobotError, StoppedError

pytestmark = [pytest.mark.foreign, pytest.mark.timeout(600)]

FOLDER = os.environ.get("DZROBOT_FRANKA_SIM")
READY_S = 120.0
REST_S = 3.0

SERVERS = {
    "franky_sim": ("-m", "franky_sim.run_server", "-s", "mujoco", "--hostname"),
    "franka_sim": (
        "-c",
        "import sys; from franka_sim import FrankaSimServer; "
        "FrankaSimServer(host=sys.argv[1], physics='mujoco', enforce_motion_limits=True).start()",
    ),
}
"""Package -> what its Python is called with; an address follows."""

NEEDED = "franky_sim"
"""The one that runs everywhere; the other has to download a model of the arm."""

STEPS = 50
AT_HOME = {
    tag: hand_at(joints)["position"]
    for tag, joints in (("franka_pnp", ResetConfig().joints), ("oxe_droid", DROID_HOME))
}
"""Where the hand is once a reset has brought the joints home."""


LISTENS_S = 60.0
ROBOT_PORT = 1337


def server(folder, package, host):
    """Return the command that starts a simulator."""
    return [str(Path(folder) / package / "bin/python"), *SERVERS[package], host]


def fault_of(folder, package, host, log):
    """Start a simulator for a moment; return why it cannot run, or nothing where it listens."""
    words = server(folder, package, host)
    with (
        log.open("w") as said,
        subprocess.Popen(words, stdout=said, stderr=subprocess.STDOUT) as peer,
    ):
        deadline = time.monotonic() + LISTENS_S
        try:
            while peer.poll() is None and time.monotonic() < deadline:
                with contextlib.suppress(OSError), socket.create_connection((host, ROBOT_PORT)):
                    return ""
                time.sleep(0.5)
        finally:
            peer.kill()
    said = log.read_text()
    errors = list(re.finditer(r"^[\w.]+(?:Error|Exception): ", said, re.MULTILINE))
    last = said[errors[-1].start() :] if errors else said.strip().rpartition("\n")[2]
    shown = " ".join(last.split())[:400] or "it says nothing"
    return f"{shown} (after {LISTENS_S:g} s)" if peer.returncode == -9 else shown


class SimulatedWorkcell(RealWorkcell):
    """A real one to its drivers; the simulator shares this machine with the tests."""

    patience = 10.0


class NoisyCamera:
    """Sends noise, for none of these simulators has cameras."""

    def __init__(self, key):
        self.config = CameraConfig(key=key, serial="none")
        self._number = 0
        self._random = np.random.default_rng(0)

    def open(self):
        pass

    def close(self):
        pass

    def latest(self):
        self._number += 1
        now = time.monotonic()
        image = self._random.integers(0, 256, (48, 64, 3), np.uint8)
        return Frame(np.kron(image, np.ones((10, 10, 1), np.uint8)), self._number, now, now, now)


@pytest.fixture(scope="module", params=SERVERS)
def address(request, tmp_path_factory):
    """Start a simulator, and return where it is."""
    need_libraries()
    if FOLDER is None:
        pytest.skip("opt-in: DZROBOT_FRANKA_SIM names no folder with franky_sim and franka_sim")
    host = f"127.17.{os.getpid() % 250}.{2 + list(SERVERS).index(request.param)}"
    log = tmp_path_factory.mktemp("simulator") / "log"
    if why := fault_of(FOLDER, request.param, host, log):
        left_out = pytest.fail if request.param == NEEDED else pytest.skip
        left_out(f"{request.param} cannot run here: {why}")
    words = server(FOLDER, request.param, host)
    with log.open("w") as said, subprocess.Popen(words, stdout=said, stderr=said) as peer:
        try:
            yield host
        finally:
            peer.kill()


@pytest.fixture(scope="module", params=["franka_pnp", "oxe_droid"])
def env(request, address, tmp_path_factory):
    config = FrankaConfig.model_validate(
        {
            "address": address, "embodiment": request.param, "reward": {"rule": "none"},
            "limits": {"self_collision_m": 0.0, "state_age_s": 2.0, "hold_after_s": 2.0},
            "gripper": {"homing": True, "timeout_s": 60.0},
            "reset": {"timeout_s": 400.0, "speed_m_s": 0.3, "position": AT_HOME[request.param]},
            "lock_folder": str(tmp_path_factory.mktemp("lock")),
        }
    )  # fmt: skip
    cameras = [NoisyCamera(key) for key in load_embodiment(request.param).video_keys]
    env = FrankaEnv(FrankyArm(SimulatedWorkcell(address), config), cameras, config)
    env.attend(None, unattended=True)
    deadline = time.monotonic() + READY_S
    while True:
        try:
            env.reset(seed=0)
            break
        except RobotError as error:
            if "refused" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(1.0)
    yield env
    with contextlib.suppress(StoppedError):
        env.close()


def still(env):
    """Return the action that keeps the arm where it is."""
    if env.config.embodiment == "franka_pnp":
        return np.zeros(7, np.float32)
    return np.array([*env.last_target, 0.0], np.float32)


def moving(env, base, step):
    """Return the action (A,) of a small circle, with the hand closed in the middle of it."""
    closes, angle = STEPS // 3 < step < 2 * STEPS // 3, step / 8
    if env.config.embodiment == "franka_pnp":
        sideways = 0.3 * np.cos(angle), 0.3 * np.sin(angle)
        return np.array([*sideways, 0, 0, 0, 0, -1 if closes else 1])
    return base + np.array([*[0.1 * np.sin(angle)] * 7, 1.0 if closes else 0.0], np.float32)


def test_its_pose_is_that_of_our_kinematics(env):
    state = env.arm.state()
    expected = forward(state.joints, state.flange_to_ee)
    np.testing.assert_allclose(state.pose[:3, 3], expected[:3, 3], atol=1e-3)
    np.testing.assert_allclose(state.pose[:3, :3], expected[:3, :3], atol=5e-3)
    jacobian = pose_and_jacobian(state.joints, state.flange_to_ee)[1]
    np.testing.assert_allclose(state.twist, jacobian @ state.joint_speeds, atol=1e-3)


def test_a_reset_arrives_and_the_arm_holds_there(env):
    observation, _ = env.reset(seed=0)
    pose = env.config.reset.start_pose(0)
    reached = env.arm.state().pose
    assert np.linalg.norm(reached[:3, 3] - pose[:3, 3]) < env.config.reset.tolerance_m
    for _ in range(10):
        observation, *_, truncated, info = env.step(still(env))
        assert not truncated, info["abort_message"]
    assert set(observation) == set(env.embodiment.observation_keys)
    assert np.linalg.norm(env.arm.state().pose[:3, 3] - reached[:3, 3]) < 5e-3


def test_fifty_actions_are_carried_out_and_the_hand_closes_and_opens(env):
    env.reset(seed=0)
    base, widths, places = still(env), [], []
    for step in range(STEPS):
        *_, truncated, info = env.step(moving(env, base, step).astype(np.float32))
        assert not truncated, info["abort_message"]
        widths.append(env.arm.gripper.state().width_m)
        places.append(env.arm.state().pose[:3, 3])
    assert np.ptp(places, axis=0).max() > 0.03
    assert np.ptp(widths) > 0.05
    assert (info["recoveries"], info["abort"]) == (0, "")


def test_a_stop_brings_it_to_rest_and_holds_until_a_person_ends_it(env):
    env.reset(seed=0)
    base = still(env)
    for step in range(6):
        env.step(moving(env, base, step).astype(np.float32))
    env.operator_stop()
    time.sleep(REST_S)
    resting = env.arm.state()
    assert np.abs(resting.joint_speeds).max() < 0.02
    with pytest.raises(StoppedError):
        env.reset()
    np.testing.assert_allclose(env.arm.state().joints, resting.joints, atol=5e-3)
    env.acknowledge()
    env.reset(seed=0)


if __name__ == "__main__":
    # `make test-arm-foreign` says first which of them run here.
    with tempfile.TemporaryDirectory() as folder:
        for number, package in enumerate(SERVERS, start=2):
            why = fault_of(sys.argv[1], package, f"127.18.0.{number}", Path(folder) / package)
            said = f"cannot run here: {why}" if why else "runs here"
            sys.stdout.write(f"{package} {said}\n")
            sys.stdout.flush()
