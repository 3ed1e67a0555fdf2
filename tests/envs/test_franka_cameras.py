"""Cameras of a workcell: what is fixed of their exposure, against the real client libraries."""

import time
from types import SimpleNamespace

import pytest
from emulated import need_libraries

from dzrobot.envs.emulators.launcher import EmulatorLauncher, LauncherAddress
from dzrobot.envs.emulators.scenes import SERIALS
from dzrobot.envs.franka.camera_config import CameraConfig
from dzrobot.envs.franka.cameras.realsense import ColorSettings, RealSenseCamera, list_cameras
from dzrobot.envs.franka.make import make_franka
from dzrobot.errors import ConfigError, RobotError

EXTERIOR, WRIST = SERIALS
PATIENCE = 10.0


@pytest.fixture(scope="module")
def bench():
    need_libraries()
    with EmulatorLauncher(LauncherAddress.for_process(5)) as running:
        yield running


def camera_of(bench, serial=EXTERIOR, **values):
    config = CameraConfig.model_validate(
        {"key": "video.image", "serial": serial, "width": 320, "height": 240, **values}
    )
    return RealSenseCamera(config, bench.camera_settings, patience=PATIENCE)


def brightness(camera):
    """Return how bright a frame is that was asked for now."""
    before, deadline = camera.latest().number, time.monotonic() + 60
    # What was on its way when the values were set is passed over.
    while camera.latest().number < before + 3:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return float(camera.latest().image.mean())


@pytest.mark.robot
def test_exposure_and_gain_are_fixed_locked_or_left_to_the_camera(bench):
    seen = {}
    for name, values in {
        "dark": {"exposure_ms": 8.3, "gain": 32, "white_balance_k": 5000},
        # The camera goes on with the values it has been told.
        "locked": {"lock_exposure": True, "settle_s": 0.0},
        "free": {"white_balance_k": 2800},
    }.items():
        camera = camera_of(bench, **values)
        camera.open()
        seen[name] = brightness(camera)
        camera.close()
    # Half the exposure and half the gain.
    assert seen["dark"] == pytest.approx(seen["free"] / 4, rel=0.15)
    assert seen["locked"] == pytest.approx(seen["dark"], rel=0.02)


@pytest.mark.robot
@pytest.mark.long
def test_cameras_are_listed_with_what_may_be_fixed_and_its_range(bench):
    (device, _) = list_cameras(bench.camera_settings(), SERIALS)
    assert device.offers == (
        "exposure_ms 0.1 to 1000 ms in steps of 0.1, gain 0 to 128 in steps of 1, "
        "white_balance_k 2800 to 6500 K in steps of 10"
    )


@pytest.mark.robot
def test_a_value_that_a_camera_does_not_offer_is_refused_with_its_range(bench):
    camera = camera_of(bench, exposure_ms=2000, gain=0.5, white_balance_k=5005)
    with pytest.raises(RobotError) as caught:
        camera.open()
    text = str(caught.value)
    assert f"camera {EXTERIOR} (video.image) does not offer exposure_ms=2000" in text
    assert "it offers 0.1 to 1000 ms in steps of 0.1" in text
    assert "gain=0.5; it offers 0 to 128 in steps of 1" in text
    assert "white_balance_k=5005; it offers 2800 to 6500 K in steps of 10" in text


class DepthSensor:
    """The library's sensor of a D405, whose color stream counts in us; it keeps hundreds."""

    def __init__(self):
        self.values = {}

    def query_sensors(self):
        return [self]

    def get_stream_profiles(self):
        import pyrealsense2 as rs

        return [SimpleNamespace(stream_type=lambda: rs.stream.color)]

    def is_depth_sensor(self):
        return True

    def supports(self, option):
        import pyrealsense2 as rs

        return option is not rs.option.white_balance

    def get_option_range(self, _option):
        return SimpleNamespace(min=0.0, max=165000.0, step=1.0)

    def set_option(self, option, value):
        self.values[option] = 100.0 * (value // 100) if value > 100 else value

    def get_option(self, option):
        return self.values[option]


def test_what_a_camera_makes_of_a_value_is_read_back_and_compared():
    need_libraries()
    import pyrealsense2 as rs

    def config(exposure_ms, **more):
        return CameraConfig(key="video.image", serial="1", exposure_ms=exposure_ms, gain=16, **more)

    settings = ColorSettings(sensor := DepthSensor(), "camera 1")
    settings.check(config(8.3))
    settings.fix(config(8.3))
    assert sensor.values[rs.option.exposure] == 8300
    assert sensor.values[rs.option.enable_auto_exposure] == 0
    with pytest.raises(RobotError, match=r"was told 8350 for its exposure_ms, .* and says 8300"):
        settings.fix(config(8.35))
    with pytest.raises(RobotError, match="exposure_ms=200; it offers 0 to 165 ms in steps of"):
        settings.check(config(200))
    with pytest.raises(RobotError, match="does not offer white_balance_k at all: leave it out"):
        settings.check(config(8.3, white_balance_k=4600))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lock_exposure": True, "white_balance_k": 4600}, "leave one of them out"),
        ({"exposure_ms": 10}, "exposure_ms and gain go together"),
        ({"gain": 10}, "exposure_ms and gain go together"),
        ({"exposure_ms": 0, "gain": 1}, "exposure_ms"),
    ],
)
def test_exposure_that_says_two_things_or_half_a_thing_is_refused(values, message):
    views = [{"key": key, "serial": key} | values for key in ("video.image", "video.wrist_image")]
    with pytest.raises(ConfigError, match=message):
        make_franka(cameras=views)
