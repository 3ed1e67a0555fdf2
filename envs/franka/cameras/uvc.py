"""USB video cameras, such as a webcam or a ZED, through OpenCV."""

import os
import stat
import time
from pathlib import Path
from typing import Any

from dzrobot.envs.driver_process import DriverProcess, Latest
from dzrobot.envs.franka.camera_config import CameraConfig
from dzrobot.envs.franka.cameras.camera import FRAME_S, DriverCamera, Shot, StreamDriver
from dzrobot.errors import RobotError

_SELECT_TIMEOUT_S = 1
"""How long OpenCV waits for a frame of a camera in one call."""

_MANUAL, _AUTOMATIC = 1.0, 3.0
"""Linux's words for exposure: by hand; by the camera, at its fixed aperture."""

_EXPOSURE_UNITS_PER_MS = 10.0
"""USB video cameras count in 100 us."""

_DISCOVERY_S = 3.0
_BY_ID = Path("/dev/v4l/by-id")


class UvcDriver(StreamDriver):
    """The stream of one camera, or of a video file, which is played at its rate, again and again.

    Args:
        config: Device, stream, exposure.
        patience: How many times longer than usual a frame is waited for.
        latest: Where frames are published.
    """

    def __init__(self, config: CameraConfig, patience: float, latest: Latest | None = None) -> None:
        super().__init__(patience, latest)
        self._config = config
        self._capture: Any = None
        self._played_s: float | None = None
        # Read by OpenCV when it is loaded, which is therefore done later.
        os.environ["OPENCV_VIDEOIO_V4L_SELECT_TIMEOUT"] = str(_SELECT_TIMEOUT_S)

    def find(self, timeout_s: float) -> None:
        """Wait for the device, open it and look whether it does what is asked."""
        path = Path(self._config.place)
        deadline = time.monotonic() + timeout_s
        while not path.exists():
            if time.monotonic() > deadline:
                raise RobotError(
                    f"no {self._config.name}; found: {', '.join(list_uvc()) or 'none'}. Check the "
                    "cable and `device` in `cameras` of the workcell"
                )
            time.sleep(0.1)
        try:
            self.begin()
            # The first image shows its size.
            self.next()
        except RuntimeError as error:
            raise RobotError(f"{self._config.name}: {error}") from error
        self._is_open, self._heard_s = True, time.monotonic()

    def begin(self) -> None:
        """Open the device, and set size, rate and what is fixed."""
        import cv2

        config = self._config
        path = Path(config.place)
        is_device = path.exists() and stat.S_ISCHR(path.stat().st_mode)
        backend = cv2.CAP_V4L2 if is_device else cv2.CAP_FFMPEG
        self._capture = capture = cv2.VideoCapture(str(path), backend)
        if not capture.isOpened():
            raise RobotError(
                f"{config.name} cannot be opened: close other programs that hold it, and see that "
                "you may read it (group video)"
            )
        self._played_s = time.monotonic() if path.is_file() else None
        if is_device:
            self._set_stream()
        self._set_exposure()

    def next(self) -> Shot | None:
        """Return the next frame."""
        import cv2

        config = self._config
        if self._played_s is not None and (due_s := self._played_s - time.monotonic()) > 0:
            time.sleep(min(due_s, FRAME_S))
            return None
        came, image = self._capture.read()
        now_s = time.monotonic()
        if not came:
            raise RuntimeError("it delivers no more frames")
        if self._played_s is not None:
            self._played_s += 1.0 / config.fps
        wide = config.width * (1 if config.stereo is None else 2)
        if image.shape != (config.height, wide, 3):
            raise RuntimeError(
                f"it delivers {image.shape[1]}x{image.shape[0]} pixels, and {wide}x{config.height} "
                f"were asked for: set width and height; `v4l2-ctl -d {config.place} "
                "--list-formats-ext` lists what it offers"
            )
        first = config.width if config.stereo == "right" else 0
        half = cv2.cvtColor(image[:, first : first + config.width], cv2.COLOR_BGR2RGB)
        stamp_s = self._capture.get(cv2.CAP_PROP_POS_MSEC) / 1000.0
        return Shot(half, self._exposed_s(stamp_s, now_s), stamp_s)

    def end(self) -> None:
        """Close the device."""
        capture, self._capture = self._capture, None
        if capture is not None:
            capture.release()

    def _exposed_s(self, stamp_s: float, now_s: float) -> float:
        """Return when a frame was exposed; when it arrived, if the device does not report it.

        Linux stamps the frames of a camera by the clock that this machine's time is measured by. A
        frame of long ago is one, and no error of the clock: it is as old as that.
        """
        is_camera = self._capture.getBackendName() == "V4L2"
        return stamp_s if is_camera and 0.0 < stamp_s <= now_s else now_s

    def _set_stream(self) -> None:
        import cv2

        config, capture = self._config, self._capture
        if config.pixels is not None:
            capture.set(cv2.CAP_PROP_FOURCC, cv2.VideoWriter.fourcc(*config.pixels))
        capture.set(cv2.CAP_PROP_FRAME_WIDTH, config.width * (1 if config.stereo is None else 2))
        capture.set(cv2.CAP_PROP_FRAME_HEIGHT, config.height)
        capture.set(cv2.CAP_PROP_FPS, config.fps)
        rate = capture.get(cv2.CAP_PROP_FPS)
        if rate > 0 and abs(rate - config.fps) > 0.5:
            raise RobotError(
                f"{config.name} was asked for {config.fps} frames per second and says {rate:g}: "
                f"`v4l2-ctl -d {config.place} --list-formats-ext` lists what it offers"
            )

    def _set_exposure(self) -> None:
        """Set what is fixed and read it back; leave the rest to the camera.

        Raises:
            RobotError: the device has no such value, or says another.
        """
        import cv2

        fixed, capture = self._config.fixed, self._capture
        by_hand = "exposure_ms" in fixed
        # A camera that never chooses by itself has no such switch.
        capture.set(cv2.CAP_PROP_AUTO_EXPOSURE, _MANUAL if by_hand else _AUTOMATIC)
        capture.set(cv2.CAP_PROP_AUTO_WB, 0.0 if "white_balance_k" in fixed else 1.0)
        for name, of, per_unit in (
            ("exposure_ms", cv2.CAP_PROP_EXPOSURE, _EXPOSURE_UNITS_PER_MS),
            ("gain", cv2.CAP_PROP_GAIN, 1.0),
            ("white_balance_k", cv2.CAP_PROP_WB_TEMPERATURE, 1.0),
        ):
            if name not in fixed:
                continue
            taken = capture.set(of, fixed[name] * per_unit)
            reported = capture.get(of) / per_unit
            if not taken or abs(reported - fixed[name]) * per_unit > 0.5:
                raise RobotError(
                    f"{self._config.name} does not offer {name}={fixed[name]:g}"
                    f"{f' and says {reported:g}' if taken else ''}: "
                    f"`v4l2-ctl -d {self._config.place} --list-ctrls` lists the values it has, "
                    "with their ranges (exposure in 100 us)"
                )


def list_uvc() -> list[str]:
    """Return the video devices of this machine, RealSense cameras left out."""
    named = [path for path in _BY_ID.glob("*-video-index0") if "RealSense" not in path.name]
    return sorted(map(str, named))


class UvcCamera(DriverCamera):
    """A webcam, a ZED or another USB video camera, through OpenCV."""

    def _start(self, memory: int) -> tuple[DriverProcess, float]:
        driver = DriverProcess(
            self._config.name, UvcDriver, self._config, self._patience,
            memory=memory, patience=self._patience,
        )  # fmt: skip
        return driver, _DISCOVERY_S
