"""The real Franka, through the franky library (``pip install 'dzrobot[franka]'``)."""

import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from dzrobot.envs.franka.arm import ArmState, ControllerEndedError, DisconnectedError, Mode
from dzrobot.envs.franka.cells import Cell
from dzrobot.envs.franka.config import ControllerConfig, FrankaConfig
from dzrobot.envs.franka.gripper import FrankyGripper
from dzrobot.envs.franka.poses import Array
from dzrobot.envs.franka.worker import Worker
from dzrobot.errors import MissingDependencyError, RobotError

T = TypeVar("T")

_log = logging.getLogger(__name__)

_CONNECT_S = 10.0
_HAND_OVER_S = 3.0
_ALIVE_S = 0.5
_CALL_S = 1.5
_STOP_S = 4.0
_RECOVER_S = 2.0

WHEEL_INDEX = "https://timschneider42.github.io/franky/whl/by-robot-server-version"


class FrankyArm:
    """A Franka arm; everything it is asked runs on one thread with a time limit.

    Args:
        cell: Where the arm is.
        config: Controller, reflex thresholds, gripper.
    """

    def __init__(self, cell: Cell, config: FrankaConfig) -> None:
        self._cell = cell
        self._config: ControllerConfig = config.controller
        self._gripper = FrankyGripper(lambda: cell.address, config.gripper)
        self._worker: Worker | None = None
        self._robot: Any = None
        self._tracker: Any = None
        self._moving = False
        self._last_time_s = -1.0
        self._fresh_at_s = 0.0

    @property
    def gripper(self) -> FrankyGripper:
        """The hand."""
        return self._gripper

    def connect(self) -> None:
        """Connect, or connect anew where the arm stopped answering."""
        if self._worker is not None:
            with contextlib.suppress(DisconnectedError):
                if self._is_alive():
                    return
            # Hand and arm share a controller: what cut one off has cut the other off too.
            self._gripper.close()
        self._abandon()
        self._cell.open()
        self._worker = Worker("arm")
        try:
            self._robot = self._worker.do(self._open, _CONNECT_S)
        except RobotError as error:
            self._abandon()
            raise RobotError(
                f"no connection to the arm at {self._cell.address}: {error}. Is another program "
                "connected to it?"
            ) from error

    def state(self) -> ArmState:
        """Return the newest state."""
        return self._do(self._read, _CALL_S)

    def recover(self) -> None:
        """Clear errors and see them cleared."""
        self._do(self._recover, _RECOVER_S + _CALL_S)

    def start(self) -> None:
        """Start the controller at the measured pose."""
        self._do(self._start, _CALL_S)

    def command(self, target: Array) -> None:
        """Send one target, and see that it was taken."""
        self._do(lambda: self._send(target), _CALL_S)

    def stop(self) -> None:
        """Come to rest; an arm that is gone has come to rest by itself."""
        if self._worker is None:
            return
        with contextlib.suppress(DisconnectedError):
            self._do(self._rest, _STOP_S)

    def close(self) -> None:
        """Stop, disconnect, and let the workcell go."""
        self.stop()
        self._gripper.close()
        if self._worker is not None:
            with contextlib.suppress(RobotError):
                # The library's objects end on the thread that made them.
                self._worker.do(self._forget, _CALL_S)
            self._worker.end()
            self._worker = None
        self._cell.close()

    def _is_alive(self) -> bool:
        """Return whether the arm's clock advances: a lost connection shows its last state on."""
        first = self.state().robot_time_s
        deadline = time.monotonic() + _ALIVE_S
        while time.monotonic() < deadline:
            if self.state().robot_time_s != first:
                return True
            time.sleep(0.01)
        return False

    def _do(self, job: Callable[[], T], timeout_s: float) -> T:
        if self._worker is None:
            raise DisconnectedError(
                "the arm is not connected; the environment's reset() connects it"
            )
        franky = _library()
        try:
            return self._worker.do(job, timeout_s)
        except DisconnectedError:
            self._abandon()
            raise
        except (ControllerEndedError, MissingDependencyError):
            raise
        except RobotError as error:
            if isinstance(error.__cause__, TimeoutError):
                self._abandon()
                raise DisconnectedError(str(error)) from error
            raise
        except (franky.NetworkException, franky.ProtocolException) as error:
            self._abandon()
            raise DisconnectedError(f"the arm does not answer: {error}") from error
        except RuntimeError as error:
            # After a network error the library raises a plain RuntimeError, for ever.
            self._abandon()
            raise DisconnectedError(f"the connection to the arm is broken: {error}") from error

    def _abandon(self) -> None:
        """Leave the thread and its broken objects behind."""
        if self._worker is not None:
            self._worker.submit(self._forget)
            self._worker.end(timeout_s=0.5)
        self._worker = None
        self._moving = False

    def _forget(self) -> None:
        self._tracker = None
        self._robot = None

    # Everything below runs on the arm's own thread.

    @property
    def _opened(self) -> Any:
        """The library's robot; never kept in a variable.

        An error that someone keeps would keep the variables of its frames, and with them the
        connection, which the arm gives to one client only.
        """
        if self._robot is None:
            raise DisconnectedError("the arm is not connected; reset() connects it")
        return self._robot

    def _open(self) -> Any:
        franky = _library()
        deadline = time.monotonic() + _HAND_OVER_S
        while True:
            try:
                return self._construct(franky)
            except franky.NetworkException as error:
                # The arm serves one client, and takes a moment to see that the last one has gone.
                if "interrupted" not in str(error) or time.monotonic() > deadline:
                    raise RobotError(
                        f"{error} Check the address, enable FCI in Desk and unlock the brakes"
                    ) from error
                time.sleep(0.2)

    def _construct(self, franky: Any) -> Any:
        settings = self._config
        kind = franky.RealtimeConfig
        try:
            robot = franky.Robot(
                self._cell.address,
                default_torque_threshold=settings.collision_torque_nm,
                default_force_threshold=settings.collision_force_n,
                realtime_config=kind.Enforce if settings.realtime == "enforce" else kind.Ignore,
            )
        except franky.IncompatibleVersionException as error:
            raise RobotError(version_hint(str(error))) from error
        except franky.RealtimeException as error:
            raise RobotError(
                f"{error}; install a PREEMPT_RT kernel, or set controller.realtime: ignore"
            ) from error
        robot.relative_dynamics_factor = settings.dynamics
        return robot

    def _read(self) -> ArmState:
        raw = self._opened.state
        seconds = raw.time.to_sec()
        if seconds != self._last_time_s:
            self._last_time_s, self._fresh_at_s = seconds, time.monotonic()
        franky = _library()
        jacobian = np.asarray(self._opened.model.zero_jacobian(franky.Frame.EndEffector, raw))
        wrench = np.asarray(raw.K_F_ext_hat_K, np.float64)
        mode = _modes(franky)[raw.robot_mode]
        return ArmState(
            pose=np.array(raw.O_T_EE.matrix, np.float64),
            twist=jacobian @ np.asarray(raw.dq, np.float64),
            force_n=wrench[:3].copy(),
            torque_nm=wrench[3:].copy(),
            joints=np.array(raw.q, np.float64),
            mode=mode,
            errors=error_names(raw.current_errors),
            controlled=self._is_controlled(mode),
            robot_time_s=seconds,
            success_rate=float(raw.control_command_success_rate),
            fresh_at_s=self._fresh_at_s,
        )

    def _is_controlled(self, mode: Mode) -> bool:
        if self._tracker is not None:
            return bool(self._tracker.is_running)
        # A planned motion ends when it arrives: idle is as good as moving.
        return self._moving and mode in (Mode.IDLE, Mode.MOVE)

    def _recover(self) -> None:
        franky = _library()
        self._end_motion()
        try:
            self._opened.recover_from_errors()
        except franky.CommandException as error:
            raise RobotError(
                f"the arm's errors cannot be cleared from here: {error} Release the user stop, or "
                "recover by hand in Desk"
            ) from error
        # The answer may be read from a state sent before the recovery, so only waiting tells.
        deadline = time.monotonic() + _RECOVER_S
        while self._opened.has_errors:
            if time.monotonic() > deadline:
                shown = ", ".join(error_names(self._opened.state.current_errors))
                raise RobotError(f"the arm still shows {shown}: recover by hand in Desk")
            time.sleep(0.005)

    def _start(self) -> None:
        franky = _library()
        self._end_motion()
        if self._config.kind == "impedance":
            settings = self._config
            try:
                self._tracker = franky.CartesianImpedanceTracker(
                    self._opened,
                    translational_stiffness=settings.translational_stiffness,
                    rotational_stiffness=settings.rotational_stiffness,
                    translational_error_clip=np.full(3, settings.error_clip_m),
                    rotational_error_clip=np.full(3, settings.error_clip_rad),
                    max_delta_tau=settings.max_delta_tau,
                )
            except (franky.ControlException, franky.CommandException) as error:
                raise ControllerEndedError(f"the arm refused the controller: {error}") from error
        self._moving = True
        self._send(np.array(self._opened.state.O_T_EE.matrix, np.float64))

    def _send(self, target: Array) -> None:
        franky = _library()
        pose = franky.Affine(np.asarray(target, np.float64))
        if self._tracker is not None:
            self._tracker.set_target(pose)
            # A controller that died takes targets silently.
            if not self._tracker.is_running:
                raise ControllerEndedError(f"the controller had ended{self._reason(franky)}")
            return
        if not self._moving:
            raise ControllerEndedError("the controller was not started")
        try:
            self._opened.poll_motion()
            self._opened.move(franky.CartesianMotion(pose), asynchronous=True)
        except (franky.ControlException, franky.CommandException) as error:
            self._moving = False
            raise ControllerEndedError(f"the motion was refused: {error}") from error

    def _reason(self, franky: Any) -> str:
        try:
            self._opened.poll_motion()
        except (franky.ControlException, franky.CommandException) as error:
            return f": {error}"
        return ""

    def _rest(self) -> None:
        franky = _library()
        try:
            if self._tracker is not None and self._tracker.is_running:
                self._tracker.stop()
            elif self._moving:
                self._opened.stop()
        except (franky.ControlException, franky.CommandException) as error:
            _log.info("stopping: %s", str(error))
        self._end_motion()

    def _end_motion(self) -> None:
        """Take what the library kept about the last motion's end, so that the next can begin."""
        franky = _library()
        self._tracker = None
        self._moving = False
        try:
            self._opened.join_motion(0.5)
        except (franky.ControlException, franky.CommandException) as error:
            _log.info("the last motion ended: %s", str(error))


def error_names(errors: Any) -> tuple[str, ...]:
    """Return the names of the errors that are set."""
    return tuple(
        name for name in dir(errors) if not name.startswith("_") and getattr(errors, name) is True
    )


def version_hint(message: str) -> str:
    """Return what to install for a robot server of another version."""
    numbers = [int(word) for word in message.replace(",", " ").split() if word.isdigit()]
    server = numbers[0] if numbers else "<N>"
    return (
        f"the arm speaks another protocol version ({message}). Install the library built for it: "
        f"pip install franky-control --extra-index-url {WHEEL_INDEX}/{server}/"
    )


def _modes(franky: Any) -> dict[Any, Mode]:
    modes = franky.RobotMode
    return {
        modes.Idle: Mode.IDLE,
        modes.Move: Mode.MOVE,
        modes.Guiding: Mode.GUIDING,
        modes.Reflex: Mode.REFLEX,
        modes.UserStopped: Mode.USER_STOPPED,
        modes.AutomaticErrorRecovery: Mode.RECOVERY,
        modes.Other: Mode.OTHER,
    }


def _library() -> Any:
    try:
        import franky
    except ImportError as error:
        raise MissingDependencyError(
            "the real Franka needs `pip install 'dzrobot[franka]'` on x86_64 Linux "
            "(the package is franky-control; plain `franky` is something else)"
        ) from error
    return franky
