"""A leader arm of Dynamixel servos, which are read and never commanded."""

import math
import time
from collections.abc import Sequence
from typing import Any

from dzrobot.envs.teleop.device import TeleopReading
from dzrobot.envs.teleop.settings import LeaderConfig
from dzrobot.errors import RobotError

PACKAGES = ("dynamixel_sdk", "serial")

_PRESENT_POSITION, _BYTES = 132, 4
"""Address and length in the control table of the X series, whose protocol is 2.0."""

_PER_TURN = 4096
_PROTOCOL = 2.0
_HALF = 0.5


class LeaderSource:
    """Reads the servos' angles.

    Args:
        config: Where they are, and how they stand to the robot's joints.
    """

    def __init__(self, config: LeaderConfig) -> None:
        self._config = config
        extra = () if config.deadman_id is None else (config.deadman_id,)
        self._ids = (*config.ids, config.gripper_id, *extra)
        self._port: Any = None
        self._group: Any = None

    def open(self) -> None:
        """Open the port, and look for every servo.

        Raises:
            RobotError: it cannot be opened, or servos do not answer.
        """
        import dynamixel_sdk
        import serial

        config = self._config
        port = dynamixel_sdk.PortHandler(config.port)
        try:
            is_open = port.setBaudRate(config.baud_rate)
        except serial.SerialException as error:
            raise RobotError(
                f"the port {config.port} cannot be opened ({error}); `ls /dev/serial/by-id` lists "
                "what is connected, and this user has to be in the group dialout"
            ) from error
        if not is_open:
            raise RobotError(f"baud_rate={config.baud_rate} is none that a port takes, as 57600 is")
        self._port = port
        packets = dynamixel_sdk.PacketHandler(_PROTOCOL)
        missing, deadline_s = list(self._ids), time.monotonic() + config.silent_s
        while missing and time.monotonic() < deadline_s:
            missing = [
                number
                for number in missing
                if packets.ping(port, number)[1] != dynamixel_sdk.COMM_SUCCESS
            ]
        if missing:
            self.close()
            raise RobotError(
                f"on {config.port} at {config.baud_rate} baud no servo answers as "
                f"{', '.join(map(str, missing))}: look at the servos' power and cable, and at "
                "baud_rate and ids"
            )
        self._group = dynamixel_sdk.GroupSyncRead(port, packets, _PRESENT_POSITION, _BYTES)
        for number in self._ids:
            self._group.addParam(number)

    def poll(self) -> TeleopReading:
        """Read all servos.

        Raises:
            RobotError: one does not answer.
        """
        config, angles = self._config, self.angles()
        joints = tuple(
            sign * (angles[number] - offset)
            for number, sign, offset in zip(
                config.ids, config.signs, config.offsets_rad, strict=True
            )
        )
        pulled = _share(
            angles[config.gripper_id], config.gripper_open_rad, config.gripper_closed_rad
        )
        held = 1.0
        if config.deadman_id is not None:
            lever = angles[config.deadman_id]
            held = _share(lever, config.deadman_rest_rad, config.deadman_held_rad)
        return TeleopReading(
            active=held > _HALF,
            joints=joints,
            closed=pulled > _HALF,
            shown={f"servo {number}": angle for number, angle in angles.items()},
        )

    def angles(self) -> dict[int, float]:
        """Return what every servo shows (rad), by id.

        Raises:
            RobotError: one does not answer.
        """
        import dynamixel_sdk

        deadline_s = time.monotonic() + self._config.silent_s
        # Noise on the cable costs a packet now and then.
        while (result := self._group.txRxPacket()) != dynamixel_sdk.COMM_SUCCESS:
            if time.monotonic() > deadline_s:
                message = self._group.ph.getTxRxResult(result)
                raise RobotError(f"its servos do not answer: {message}")
        turns = {
            number: self._group.getData(number, _PRESENT_POSITION, _BYTES) for number in self._ids
        }
        return {
            number: math.tau / _PER_TURN * (value - (1 << 32) * (value >= 1 << 31))
            for number, value in turns.items()
        }

    def close(self) -> None:
        """Let the port go."""
        port, self._port = self._port, None
        if port is not None:
            port.closePort()


def offsets_at(
    config: LeaderConfig, shown: Sequence[float], joints: Sequence[float]
) -> tuple[float, ...]:
    """Return the ``offsets_rad`` (7,) with which a leader that shows one posture shows another.

    Args:
        config: Its settings until now.
        shown: Joints (7,) that it shows, rad.
        joints: Joints (7,) that it is to show, rad: of the posture it stands in.
    """
    return tuple(
        offset + sign * (now - at)
        for offset, sign, now, at in zip(
            config.offsets_rad, config.signs, shown, joints, strict=True
        )
    )


def _share(value: float, rest: float, whole: float) -> float:
    return (value - rest) / (whole - rest)
