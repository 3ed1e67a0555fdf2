"""What the screen says of cameras, fingers and forces: neither too little nor too much."""

import numpy as np
import pytest

from dzrobot.embodiments.registry import load_embodiment
from dzrobot.envs.franka import diagnostics
from dzrobot.envs.franka.env import FrankaEnv
from dzrobot.envs.franka.fake_devices import FakeArm, FakeCamera, FakeGripper
from dzrobot.envs.franka.franka_config import FrankaConfig
from dzrobot.envs.franka.safeguards.arm_check import ArmReport, load_at_rest
from dzrobot.recording import EpisodeWriter
from dzrobot.rollout.arm.recording_run import SLOW
from dzrobot.rollout.demonstrations.record import CallableActor, RecordedEnv, record_episode
from dzrobot.rollout.protocol import EpisodeRules

PERIOD_S = 0.1
FINGERS_S = 0.35
VIEWS = load_embodiment("franka_pnp").video_keys


def action(*numbers):
    return np.array([*numbers, *[0.0] * (7 - len(numbers))], np.float32)


class SlowFingers(FakeGripper):
    """They move for :data:`FINGERS_S`."""

    def __init__(self, clock):
        super().__init__()
        self._clock, self._done_s = clock, 0.0

    def request(self, *, opened):
        super().request(opened=opened)
        self._done_s = self._clock.now() + FINGERS_S

    def state(self):
        self.busy = self._clock.now() < self._done_s
        return super().state()


class StreamingCamera(FakeCamera):
    """Sends a frame a period of its stream, but for those that are lost."""

    def __init__(self, key, arm):
        super().__init__(key, arm)
        self._began_s, self._clock = arm.clock.now(), arm.clock
        self.lost = ()
        self._last = None

    def latest(self):
        due = int((self._clock.now() - self._began_s) * self.config.fps)
        while due in self.lost:
            due -= 1
        if self._last is None or due > self._last[0]:
            came_s = self._began_s + due / self.config.fps
            frame = super().latest()
            self._last = due, type(frame)(frame.image, due, came_s, came_s, came_s)
        return self._last[1]


def make(camera=FakeCamera, **values):
    arm = FakeArm()
    arm.gripper = SlowFingers(arm.clock)
    cameras = [camera(key, arm) for key in VIEWS]
    known = {"reward": {"rule": "none"}, "task": "open and close"}
    config = FrankaConfig.model_validate(known | values)
    return FrankaEnv(arm, cameras, config, clock=arm.clock), arm, cameras


def test_waits_for_fingers_are_no_slowness_of_the_loop(tmp_path):
    env, _, _ = make()
    actions = iter([action(0, 0, 0, 0, 0, 0, way) for way in (-1, 1) * 3 for _ in range(5)])
    with EpisodeWriter(tmp_path / "set", env.embodiment, fps=10) as writer:
        recorded = RecordedEnv(env, writer)
        done = record_episode(
            recorded, CallableActor(lambda _: next(actions)), writer,
            EpisodeRules(seed=0, max_steps=30), keep_all=True,
        )  # fmt: skip
    assert recorded.elapsed_s > 30 * PERIOD_S + 5 * FINGERS_S
    assert (done.frames, done.late_steps) == (30, 0)
    assert done.measured_hz == pytest.approx(10.0, rel=0.01)
    assert done.measured_hz > SLOW * 10.0


def test_a_camera_that_repeats_one_image_ends_the_episode_as_a_fault():
    env, arm, cameras = make()
    env.reset()
    cameras[1].stuck = True
    # An arm that rests may well be shown by one image.
    for _ in range(20):
        *_, truncated, info = env.step(action())
        assert not truncated
    began = arm.state().pose
    while not truncated:
        *_, truncated, info = env.step(action(0.5))
    assert info["abort"] == "stale_frame"
    moved_m = np.linalg.norm(arm.state().pose[:3, 3] - began[:3, 3])
    assert 0.06 - 1e-9 <= moved_m < 0.08
    assert info["abort_message"].startswith("video.wrist_image has not changed for")
    assert info["fault"].startswith("stale_frame")


def test_a_camera_that_sees_the_arm_move_is_not_frozen():
    env, _, _ = make()
    env.reset()
    for _ in range(30):
        assert not env.step(action(0.3))[3]


def test_a_repeated_image_is_allowed_where_the_workcell_says_so():
    env, _, cameras = make(limits={"frozen_image_s": 0})
    env.reset()
    cameras[0].stuck = True
    for _ in range(30):
        assert not env.step(action(0.3))[3]


@pytest.mark.parametrize(("lost", "waits"), [(0, False), (1, False), (2, True), (3, True)])
def test_a_frame_that_is_overdue_is_waited_for_and_not_acted_upon(lost, waits):
    env, arm, cameras = make(StreamingCamera)
    env.reset()
    for _ in range(3):
        env.step(action())
    camera, read_s = cameras[0], arm.clock.now() + PERIOD_S
    fps, began_s = camera.config.fps, camera._began_s
    due = int((read_s - began_s) * fps)
    camera.lost = tuple(range(due - lost + 1, due + 1))
    shown_s, next_s = (began_s + number / fps for number in (due - lost, due + 1))
    assert (read_s - shown_s > 1.5 / fps) == waits
    *_, truncated, info = env.step(action())
    assert not truncated
    expected_s = next_s if waits else read_s
    assert arm.clock.now() == pytest.approx(expected_s + 0.01, abs=0.0101)
    assert info["frame_age_s.video.image"] <= 1.5 / fps


def test_a_stream_that_ends_is_not_waited_for_forever():
    env, arm, cameras = make(StreamingCamera)
    env.reset()
    env.step(action())
    began = arm.clock.now()
    cameras[0].lost = range(10_000)
    info = {"abort": ""}
    while not info["abort"]:
        *_, info = env.step(action())
    assert info["abort"] == "stale_frame"
    assert arm.clock.now() - began < env.config.limits.frame_age_s + PERIOD_S


class Weighing(FakeArm):
    """Knows what hangs on it, for the doctor."""

    def about(self):
        return ArmReport("fr3", None, np.eye(4), hand_kg=0.7, load_kg=0.0)


@pytest.mark.parametrize(
    ("force", "torque", "verdict"),
    [(1.9, 0.4, "ok"), (3.0, 0.4, "warn"), (1.9, 1.0, "warn"), (5.1, 0.4, "fail"),
     (1.0, 1.6, "fail")],
)  # fmt: skip
def test_a_wrench_at_rest_is_warned_of_before_it_fails(force, torque, verdict):
    arm = Weighing()
    arm.connect()
    arm.force_n, arm.torque_nm = np.array([0, 0, force]), np.array([torque, 0, 0])
    *_, wrench = diagnostics._hand(arm, FrankaConfig())
    assert (wrench.what, wrench.verdict) == ("wrench", verdict)
    assert f"{force:.1f} N and {torque:.2f} Nm at the hand" in wrench.found
    # A reset says the same of it.
    assert wrench.found.startswith(load_at_rest(arm.state(), FrankaConfig().limits))
    assert ("a load of about" in wrench.found) == (verdict != "ok")
