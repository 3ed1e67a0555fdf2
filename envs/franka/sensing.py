"""From arm, gripper and cameras to one observation in the keys of ``franka_pnp``."""

import contextlib
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dzrobot.embodiments.hand import HandMotion
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.embodiments.spec import Embodiment
from dzrobot.envs.franka.arm import Arm, ArmState
from dzrobot.envs.franka.camera import Camera, Frame, fit
from dzrobot.envs.franka.clock import Clock
from dzrobot.envs.franka.config import ActionConfig, FrankaConfig
from dzrobot.envs.franka.control import in_hand_axes
from dzrobot.envs.franka.gripper import GripperState
from dzrobot.envs.franka.poses import Array, euler_of
from dzrobot.errors import RobotError

_HALF_TURN = 3.1416
STATE_LIMITS = (
    (-0.01, *[-1000.0] * 3, *[-2.0] * 3, *[-_HALF_TURN] * 3, *[-500.0] * 3, *[-10.0] * 6),
    (0.2, *[1000.0] * 3, *[2.0] * 3, *[_HALF_TURN] * 3, *[500.0] * 3, *[10.0] * 6),
)
"""Lowest and highest state, in its own order and units."""


def hand_motion(action: ActionConfig) -> HandMotion:
    """Return which numbers of this state and of an action move the hand."""
    return HandMotion(
        position=slice(4, 7),
        rotation=slice(7, 10),
        rotation_form="euler",
        fingers=slice(0, 1),
        translation=slice(0, 3),
        turn=slice(3, 6),
        gripper=6,
        closes=-1,
        translation_m=action.translation_m,
        rotation_rad=action.rotation_rad,
        frame=action.frame,
    )


_FRESH_FRAMES_S = 10.0


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


class Sensors:
    """Reads the arm, its gripper and the cameras.

    Args:
        arm: The arm, with its gripper.
        cameras: One for each view.
        config: Crops, task, and the frame of the velocity.
        clock: What ages are measured by.
    """

    def __init__(
        self, arm: Arm, cameras: Sequence[Camera], config: FrankaConfig, clock: Clock
    ) -> None:
        robot = load_embodiment("franka_pnp")
        self.embodiment: Embodiment = replace(
            robot,
            action_frame=config.action.frame,
            timing=replace(robot.timing, control_hz=config.control_hz),
        )
        self._arm = arm
        self._cameras = tuple(cameras)
        self._config = config
        self._clock = clock
        # A camera counts its frames as they are taken; a preview looks from threads of its own.
        self._looking = threading.Lock()

    def open(self) -> None:
        """Connect what is not connected.

        Raises:
            RobotError: something does not answer, or there are no cameras.
        """
        self._arm.connect()
        self._arm.gripper.connect()
        keys = sorted(camera.config.key for camera in self._cameras)
        if keys != sorted(self.embodiment.video_keys):
            raise RobotError(
                f"the cameras deliver {keys or 'nothing'}, needed is each of "
                f"{', '.join(self.embodiment.video_keys)} once: give cameras=[{{'key': ..., "
                "'serial': ...}, ...]; `dzrobot doctor franka` lists serial numbers"
            )
        # Each looks for its device in a process of its own, which takes seconds.
        with ThreadPoolExecutor(len(self._cameras)) as pool:
            list(pool.map(lambda camera: camera.open(), self._cameras))

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
            self._clock.sleep_until(self._clock.now() + 0.01)

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
        observation["state.state"] = self.vector(reading, origin)
        observation[self.embodiment.language] = self._config.task
        return observation

    def vector(self, reading: Reading, origin: Array) -> np.ndarray:
        """Return the state (19,) float32.

        Gripper width (1, m), force (3, N), position (3, m), roll, pitch and yaw (3, rad), torque
        (3, Nm), velocity (6, m/s and rad/s). Position and angles are those of the hand in the frame
        of the pose the episode began at; force, torque and velocity have the hand's axes.
        """
        state = reading.state
        relative = np.linalg.inv(origin) @ state.pose
        return np.concatenate(
            [
                [reading.gripper.width_m],
                state.force_n,
                relative[:3, 3],
                euler_of(relative[:3, :3]),
                state.torque_nm,
                in_hand_axes(state, self._config.action),
            ]
        ).astype(np.float32)
