"""USB video cameras through OpenCV, on recorded streams: a file, and a pipe that falls silent."""

import os
import threading
import time

import cv2
import gymnasium as gym
import numpy as np
import pytest

from dzrobot.embodiments.registry import load_embodiment
from dzrobot.envs.driver_process import DisconnectedError
from dzrobot.envs.franka import diagnostics
from dzrobot.envs.franka.camera_config import CameraConfig
from dzrobot.envs.franka.cameras.uvc import UvcCamera, UvcDriver
from dzrobot.envs.franka.env import FrankaEnv
from dzrobot.envs.franka.fake_devices import READY, FakeArm
from dzrobot.envs.franka.franka_config import FrankaConfig
from dzrobot.envs.franka.make import make_franka
from dzrobot.envs.franka.streaming import stream_together
from dzrobot.envs.franka.workcells import RealWorkcell, SystemClock
from dzrobot.errors import ConfigError, RobotError
from dzrobot.recording.media import read_png

LONG_S = 120.0
"""How long a busy machine may take."""

SIZE = {"width": 320, "height": 240, "fps": 30}
LEFT, RIGHT = (200, 60, 20), (20, 60, 200)
"""RGB of the two images side by side."""


def stereo_image():
    image = np.zeros((240, 640, 3), np.uint8)
    image[:, :320], image[:, 320:] = LEFT[::-1], RIGHT[::-1]
    return image


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    path = tmp_path_factory.mktemp("uvc") / "stereo.avi"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"MJPG"), 30, (640, 240))
    for _ in range(90):
        writer.write(stereo_image())
    writer.release()
    return str(path)


def config_of(device, **values):
    return CameraConfig.model_validate(
        {"key": "video.image", "kind": "uvc", "device": device, "stereo": "left", **SIZE, **values}
    )


def test_a_recorded_stereo_stream_is_played_at_its_rate_and_one_half_taken(recording):
    camera = UvcCamera(config_of(recording, stereo="right"))
    camera.open()
    try:
        first = camera.latest()
        assert first.image.shape == (240, 320, 3)
        # As far as JPEG keeps colors.
        np.testing.assert_allclose(first.image[120, 160], RIGHT, atol=8)
        assert first.at_s <= time.monotonic()
        deadline = time.monotonic() + LONG_S
        while (last := camera.latest()).number < first.number + 10:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        # Never faster than the camera would be; how much slower is the machine's affair.
        assert last.at_s - first.at_s > 0.7 * (last.number - first.number - 1) / SIZE["fps"]
    finally:
        camera.close()


@pytest.mark.parametrize(
    ("device", "values", "message"),
    [
        (63, {}, r"no camera /dev/video63 \(video.image\); found: none"),
        ("", {"stereo": None}, "640x240 pixels, and 320x240 were asked for"),
        ("", {"exposure_ms": 10}, "does not offer exposure_ms=10: `v4l2-ctl"),
    ],
)
def test_what_a_camera_is_not_is_refused_at_once(recording, device, values, message):
    driver = UvcDriver(config_of(device or recording, **values), 1.0)
    with pytest.raises(RobotError, match=message):
        driver.find(0.0)
    driver.close()


class Webcam:
    """OpenCV's capture of a camera that rounds its gain to tens."""

    def __init__(self, *_):
        self.values = {}

    def isOpened(self):  # noqa: N802 (OpenCV's name)
        return True

    def set(self, name, value):
        self.values[name] = round(value, -1) if name == cv2.CAP_PROP_GAIN else value
        return True

    def get(self, name):
        return self.values.get(name, 0.0)


def test_fixed_values_are_set_in_the_cameras_units_and_read_back(recording, monkeypatch):
    monkeypatch.setattr(cv2, "VideoCapture", Webcam)
    driver = UvcDriver(config_of(recording, exposure_ms=12.5, gain=20, white_balance_k=4600), 1.0)
    driver.begin()
    said = driver._capture.values
    assert said[cv2.CAP_PROP_EXPOSURE] == 125
    assert said[cv2.CAP_PROP_AUTO_EXPOSURE] == 1.0
    assert said[cv2.CAP_PROP_WB_TEMPERATURE] == 4600
    assert said[cv2.CAP_PROP_AUTO_WB] == 0.0
    with pytest.raises(RobotError, match="does not offer gain=13 and says 10"):
        UvcDriver(config_of(recording, gain=13), 1.0).begin()


@pytest.fixture
def pipe(tmp_path, monkeypatch):
    """Yield a stream of images that falls silent when it is told to, but never ends."""
    monkeypatch.setenv("OPENCV_FFMPEG_CAPTURE_OPTIONS", "analyzeduration;100000|probesize;20000")
    path, silent, over = tmp_path / "stream.mjpg", threading.Event(), threading.Event()
    os.mkfifo(path)
    data = cv2.imencode(".jpg", stereo_image())[1].tobytes()

    def write():
        with path.open("wb", buffering=0) as file:
            while not silent.wait(1 / 30):
                try:
                    file.write(data)
                except BrokenPipeError:
                    return
            over.wait()

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    yield str(path), silent
    silent.set()
    over.set()


def test_droids_arm_stops_when_a_usb_camera_hangs_and_waits_for_none(recording, pipe):
    path, silent = pipe
    views = load_embodiment("oxe_droid").video_keys
    cameras = [
        {"key": key, "kind": "uvc", "device": device, "stereo": "left", **SIZE}
        for key, device in zip(views, (recording, recording, path), strict=True)
    ]
    limits = {
        "frame_age_s": 3.0, "state_age_s": LONG_S, "hold_after_s": LONG_S,
        "stop_after_s": 2 * LONG_S, "self_collision_m": 0.0, "tilt": (1.0, 1.0, 1.5),
    }  # fmt: skip
    named = gym.make("Franka-DROID-v0", cameras=cameras, limits=limits, reward={"rule": "none"})
    drivers = named.unwrapped._sensors._cameras
    assert [type(camera) for camera in drivers] == [UvcCamera] * 3
    clock = SystemClock()
    env = FrankaEnv(FakeArm(clock=clock), drivers, named.unwrapped.config, clock=clock)
    try:
        observation, _ = env.reset(seed=0)
        for key in views:
            assert observation[key].shape == (180, 320, 3)
            np.testing.assert_allclose(observation[key][90, 160], LEFT, atol=8)
        action = np.array([*READY, 0.0], np.float32)
        assert not env.step(action)[3]
        silent.set()
        deadline = time.monotonic() + LONG_S
        truncated = False
        while not truncated:
            assert time.monotonic() < deadline
            *_, truncated, info = env.step(action)
        assert info["abort"] == "stale_frame"
        # OpenCV waits for the pipe and answers nobody: that process is ended, and only it.
        with pytest.raises(DisconnectedError):
            drivers[2].driver.call("fault", timeout_s=0.2)
        assert drivers[0].driver.is_running()
    finally:
        env.close()


@pytest.mark.long
def test_the_doctor_lets_usb_cameras_stream_and_keeps_what_the_policy_sees(
    recording, tmp_path, monkeypatch
):
    # None is connected here, and no library is asked for one.
    monkeypatch.setattr(diagnostics, "list_uvc", lambda: ["/dev/v4l/by-id/usb-Spare-video-index0"])
    monkeypatch.setattr(diagnostics, "list_cameras", None)
    cameras = [
        config_of(recording).model_dump() | {"key": "video.image"},
        config_of(63).model_dump() | {"key": "video.wrist_image"},
    ]
    config = FrankaConfig.model_validate({"cameras": cameras})
    found = []
    (spare,) = diagnostics._cameras(RealWorkcell("127.0.0.1"), config, found)
    heard = stream_together(found, None, 0.5)
    here, gone = diagnostics.stream_lines(heard, config.robot, tmp_path)
    for camera in found:
        camera.close()
    assert (spare.verdict, spare.found) == ("warn", "kind: uvc, in no view")
    assert here.what == "video.image"
    assert "of 30 frames per second" in here.found
    assert "what the policy sees" in here.found
    seen = read_png(tmp_path / "video.image.png")
    np.testing.assert_allclose(seen[64, 64], LEFT, atol=8)
    assert gone.verdict == "fail"
    assert "no camera /dev/video63" in gone.found


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "uvc"}, "kind: uvc takes `device`"),
        ({"kind": "uvc", "device": 0, "serial": "1"}, "and no `serial`"),
        ({"kind": "uvc", "device": -1}, "or a number from 0"),
        ({"kind": "uvc", "device": 0, "lock_exposure": True}, "lock_exposure is for RealSense"),
        ({}, "a RealSense camera takes `serial`"),
        ({"serial": "1", "stereo": "left"}, "stereo: only cameras of kind: uvc"),
    ],
)
def test_a_camera_of_one_kind_takes_nothing_of_the_other(values, message):
    views = [{"key": key} | values for key in ("video.image", "video.wrist_image")]
    with pytest.raises(ConfigError, match=message):
        make_franka(cameras=views)


def test_an_emulated_arm_whose_time_stands_still_has_no_cameras_of_this_world():
    views = [
        {"key": key, "kind": "uvc", "device": number}
        for number, key in enumerate(("video.image", "video.wrist_image"))
    ]
    with pytest.raises(ConfigError, match="leave `cameras` out for emulated ones"):
        make_franka(workcell="emulated:empty", cameras=views)
