"""Reads arm, gripper and cameras, and builds observations in the keys of an embodiment."""

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np

from dzrobot.envs.driver_process import DisconnectedError
from dzrobot.envs.franka.camera_config import CameraConfig
from dzrobot.envs.franka.franka_config import FrankaConfig
from dzrobot.envs.franka.safeguards.limits import Abort, RefusalError, check_fresh
from dzrobot.envs.franka.workcells import Arm, Camera, Clock, Frame, Image
from dzrobot.envs.panda.poses import Array
from dzrobot.envs.panda.quantities import ArmLayout, Moment
from dzrobot.envs.panda.state import ArmState, GripperState
from dzrobot.errors import RobotError

_FRESH_FRAMES_S = 10.0
_POLL_S = 0.01


@dataclass(frozen=True)
class Reading:
    """Everything the sensors said at one moment."""

    state: ArmState
    gripper: GripperState
    frames: Mapping[str, Frame]
    """Newest frame by view key."""

    at_s: float

    @property
    def state_age_s(self) -> float:
        """Since when the arm's clock has not advanced."""
        return self.at_s - self.state.fresh_at_s

    @property
    def frame_ages_s(self) -> dict[str, float]:
        """Age of the newest frame by view key."""
        return {key: self.at_s - frame.at_s for key, frame in self.frames.items()}

    def info(self) -> dict[str, Any]:
        """Return what an environment's ``info`` says of it, besides what is observed."""
        info = {
            "is_grasped": self.gripper.is_grasped,
            "robot_time_s": self.state.robot_time_s,
            "success_rate": self.state.success_rate,
            "state_age_s": self.state_age_s,
            "time_s": self.at_s,
            "state_time_s": self.state.fresh_at_s,
        }
        for key, frame in sorted(self.frames.items()):
            info[f"frame_age_s.{key}"] = self.at_s - frame.at_s
            info[f"frame_number.{key}"] = frame.number
            info[f"frame_time_s.{key}"] = frame.at_s
        return info


_MOVED_M = 0.06
"""How far the hand moves before every camera must have seen it."""


class FrozenImages:
    """Notices a camera that goes on sending one and the same image while the hand moves.

    Args:
        allowed_s: How long it may; 0: for ever.
    """

    def __init__(self, allowed_s: float) -> None:
        self._allowed_s = allowed_s
        self._shown: dict[str, tuple[Frame, Array]] = {}
        """The first frame of the image that a view shows, and where the hand was."""

        self._newest: dict[str, int] = {}

    def check(self, reading: Reading) -> None:
        """Look at a reading.

        Raises:
            RefusalError: an image is frozen.
        """
        place = reading.state.pose[:3, 3]
        for key, frame in reading.frames.items():
            if not self._allowed_s or self._newest.get(key) == frame.number:
                continue
            self._newest[key] = frame.number
            first, began = self._shown.get(key, (frame, place))
            if first is frame or not np.array_equal(first.image, frame.image):
                self._shown[key] = frame, place
                continue
            still_s, moved_m = frame.at_s - first.at_s, float(np.linalg.norm(place - began))
            if still_s >= self._allowed_s and moved_m >= _MOVED_M:
                raise RefusalError(
                    Abort.STALE_FRAME,
                    f"{key} has not changed for {still_s:.1f} s while the hand moved "
                    f"{moved_m:.2f} m: the camera sends one image again and again. Unplug it and "
                    "plug it in again",
                )


def fit(image: Image, config: CameraConfig, size: tuple[int, int]) -> Image:
    """Return the cropped image at ``size`` (height, width), a fresh (H, W, 3) uint8 array."""
    top, left, bottom, right = config.box(size)
    cropped = image[top:bottom, left:right]
    # Bilinear, as the published recordings of this embodiment were made.
    resized = cv2.resize(cropped, size[::-1], interpolation=cv2.INTER_LINEAR)
    return np.array(resized, np.uint8)


class Sensors:
    """Reads the arm, its gripper and the cameras.

    Args:
        arm: The arm, with its gripper.
        cameras: One for each view.
        config: Embodiment, crops, task, and the frame of the velocity.
        clock: What ages are measured by.

    Raises:
        ConfigError: the embodiment has parts that an arm has not.
    """

    def __init__(
        self, arm: Arm, cameras: Sequence[Camera], config: FrankaConfig, clock: Clock
    ) -> None:
        self.embodiment = config.robot
        self.layout = ArmLayout.of(self.embodiment)
        self._arm = arm
        self._cameras = tuple(cameras)
        self._config = config
        self._clock = clock
        self.check_frozen = FrozenImages(config.limits.frozen_image_s).check
        # A camera counts its frames as they are taken; a preview looks from threads of its own.
        self._looking = threading.Lock()

    def open(self, refuse_stopped: Callable[[], None]) -> None:
        """Connect what is not connected.

        Args:
            refuse_stopped: Raises if the arm was stopped; asked after each wait.

        Raises:
            RobotError: something does not answer, or there are no cameras.
        """
        self._arm.connect()
        refuse_stopped()
        self._arm.gripper.connect()
        refuse_stopped()
        keys = sorted(camera.config.key for camera in self._cameras)
        if keys != sorted(self.embodiment.video_keys):
            raise RobotError(
                f"the cameras deliver {keys or 'nothing'}, needed is each of "
                f"{', '.join(self.embodiment.video_keys)} once: give cameras=[{{'key': ..., "
                "'serial': ...}, ...]; `dzrobot doctor franka` lists cameras"
            )
        # Each looks for its device in a process of its own, which takes seconds.
        with ThreadPoolExecutor(len(self._cameras)) as pool:
            list(pool.map(lambda camera: camera.open(), self._cameras))
        refuse_stopped()

    def close(self) -> None:
        """Close the cameras, then the arm."""
        for camera in self._cameras:
            camera.close()
        self._arm.close()

    def images(self) -> dict[str, np.ndarray]:
        """Return the newest image (H, W, 3) uint8 of every camera that delivers one."""
        found: dict[str, np.ndarray] = {}
        for camera in self._cameras:
            with contextlib.suppress(RobotError), self._looking:
                found[camera.config.key] = camera.latest().image
        return found

    def read(self) -> Reading:
        """Return what every sensor says now, waiting for none."""
        state = self._arm.state()
        with self._looking:
            frames = {str(camera.config.key): camera.latest() for camera in self._cameras}
        return Reading(state, self._arm.gripper.state(), frames, self._clock.now())

    def is_current(self, reading: Reading) -> bool:
        """Return whether every frame is the newest that its stream should have sent by now."""
        periods = self._config.limits.frame_periods
        return all(
            reading.at_s - reading.frames[camera.config.key].came_s <= periods / camera.config.fps
            for camera in self._cameras
        )

    def read_fresh(self) -> Reading:
        """Return a reading whose frames were taken after the call.

        Raises:
            RobotError: a camera has stopped sending.
        """
        began = self._clock.now()
        while True:
            reading = self.read()
            late = [key for key, frame in reading.frames.items() if frame.at_s < began]
            if not late:
                return reading
            if reading.at_s - began > _FRESH_FRAMES_S:
                raise RobotError(
                    f"no new frame of {', '.join(late)} in {_FRESH_FRAMES_S} s: check the camera "
                    "and its cable, then reset again"
                )
            self._clock.sleep_until(self._clock.now() + _POLL_S)

    def cause(self, refusal: RefusalError) -> RefusalError:
        """Return ``refusal``, or for a hand that fails because its arm is lost, that of the arm.

        A hand hangs on the power and the network of its arm. Where both fall silent it is chance
        which library notices first, so a failing hand is blamed only once the arm has spoken again.
        Waits for that ``limits.state_age_s`` at most; call it when the arm holds.
        """
        if refusal.abort is not Abort.GRIPPER:
            return refusal
        began = self._clock.now()
        try:
            while (state := self._arm.state()).fresh_at_s <= began:
                check_fresh(self._clock.now() - state.fresh_at_s, (), self._config.limits)
                self._clock.sleep_until(self._clock.now() + _POLL_S)
        except RefusalError as lost:
            return lost
        except DisconnectedError as lost:
            return RefusalError(Abort.CONNECTION, str(lost))
        return refusal

    def observation(self, reading: Reading, origin: Array) -> dict[str, Any]:
        """Return the observation, in arrays of its own.

        Args:
            reading: What the sensors said.
            origin: Pose (4, 4) the episode began at.
        """
        observation: dict[str, Any] = {}
        for camera in self._cameras:
            key = camera.config.key
            size = self.embodiment.view(key).resolution
            observation[key] = fit(reading.frames[key].image, camera.config, size)
        moment = Moment(reading.state, reading.gripper, origin, self._config.action)
        observation.update(self.layout.read(moment))
        observation[self.embodiment.language] = self._config.task
        return observation
