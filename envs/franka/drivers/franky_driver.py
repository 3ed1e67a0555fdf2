"""The driver process of the Franka arm, on the franky library.

The library may make the thread that builds its robot real-time, and everything it is asked waits:
this is the only thread here. Between calls it moves the reference along its trajectory.
"""

import contextlib
import logging
import time
from pathlib import Path
from typing import Any

import numpy as np

from dzrobot.envs.driver_process import DisconnectedError
from dzrobot.envs.franka.drivers.franky_library import (
    FrankyErrors,
    error_names,
    library,
    library_errors,
)
from dzrobot.envs.franka.franka_config import FrankaConfig
from dzrobot.envs.franka.safeguards.arm_check import ArmReport, joint_limits_in, kind_in
from dzrobot.envs.franka.safeguards.limits import CommandTimeout, MotionGuard
from dzrobot.envs.franka.workcells import ControllerEndedError, Space
from dzrobot.envs.panda.poses import Array, distance_between
from dzrobot.envs.panda.state import ArmState, Mode
from dzrobot.envs.panda.trajectories import ArmTrajectory, JointTrajectory, PoseTrajectory
from dzrobot.errors import RobotError, as_sentence

_log = logging.getLogger(__name__)

HAND_OVER_S = 3.0
"""How long a connection is tried for: an arm sees its last client go only after a moment."""

RECOVER_S = 2.0
_ACCEPT_S = 0.5
_TAKEN_S = 1.0
_ENDED_S = 0.5
_REST_S = 0.5
"""How long a controller of torques may take to come to rest from a motion: until then an arm with a
load that it was not told of sinks; after it the arm holds by itself."""

_RESTS_RAD_S = 0.02
_HANDED_OVER_S = 0.005
"""An arm whose joints are no faster than this is at rest, and is given up within this time."""

_MOVING_PERIOD_S = 0.003
_RESTING_PERIOD_S = 0.02


class FrankyDriver(FrankyErrors):
    """One arm.

    Args:
        address: Of its controller.
        config: Controller, thresholds, load.
        stop: File of the arm's stop: while it is there the driver holds the arm. None: there is
            none.
        patience: See :class:`~dzrobot.envs.driver_process.DriverProcess`.
    """

    def __init__(
        self, address: str, config: FrankaConfig, stop: Path | None, patience: float = 1.0
    ) -> None:
        self._patience = patience
        self._address = address
        self._config = config
        self._robot: Any = None
        self._tracker: Any = None
        self._compliant = False
        self._moving = False
        self._ended = ""
        self._lost = ""
        self._space = Space.CARTESIAN
        self._trajectory: ArmTrajectory | None = None
        self._reference = np.eye(4)
        self._rate = np.zeros(6)
        self._clock_s = -1.0
        self._fresh_at_s = 0.0
        self._guard = MotionGuard(config.limits, stop)

    def open(self) -> None:
        """Connect, and set what the workcell says about the arm."""
        franky = library()
        deadline = time.monotonic() + HAND_OVER_S
        while self._robot is None:
            try:
                self._robot = self._construct(franky)
            except franky.NetworkException as error:
                if time.monotonic() > deadline:
                    raise RobotError(
                        f"{as_sentence(error)} Check the address, enable FCI in Desk and unlock "
                        "the brakes; if the lamp is green another program may be connected: end it"
                    ) from error
                time.sleep(0.2)
        settings, load = self._config.controller, self._config.load
        self._robot.set_collision_behavior(
            np.array(settings.collision_torque_nm), np.array(settings.collision_force_n)
        )
        if load is not None:
            self._robot.set_load(load.mass_kg, list(load.center_m), list(load.inertia_kg_m2))
        if self._config.end_effector is not None:
            # The library wants columns one after another.
            self._robot.set_ee(self._config.end_effector.pose.T.ravel().tolist())

    def state(self) -> ArmState:
        """Return the newest state; ``fresh_at_s`` by this machine's clock."""
        raw = self._raw()
        self._guard.hear(self._clock_s)
        franky = library()
        jacobian = np.asarray(self._robot.model.zero_jacobian(franky.Frame.EndEffector, raw))
        wrench = np.asarray(raw.K_F_ext_hat_K, np.float64)
        mode = _modes(franky)[raw.robot_mode]
        return ArmState(
            pose=np.array(raw.O_T_EE.matrix, np.float64),
            twist=jacobian @ np.asarray(raw.dq, np.float64),
            force_n=wrench[:3].copy(),
            torque_nm=wrench[3:].copy(),
            joints=np.array(raw.q, np.float64),
            flange_to_ee=np.array(raw.F_T_EE.matrix, np.float64),
            joint_speeds=np.array(raw.dq, np.float64),
            mode=mode,
            errors=error_names(raw.current_errors),
            controlled=self._is_controlled(mode),
            robot_time_s=self._clock_s,
            success_rate=float(raw.control_command_success_rate),
            fresh_at_s=self._fresh_at_s,
        )

    def about(self) -> ArmReport:
        """Return what the arm says of itself.

        Raises:
            RobotError: its model cannot be read.
        """
        raw = self._raw()
        # Libraries for the controllers of a Panda have no such model.
        urdf = str(getattr(self._opened, "model_urdf", "") or "")
        return ArmReport(
            kind=kind_in(urdf) if urdf else "",
            joint_limits=joint_limits_in(urdf) if urdf else None,
            nominal_to_ee=np.array(raw.NE_T_EE.matrix, np.float64),
            hand_kg=float(raw.m_ee),
            load_kg=float(raw.m_load),
        )

    def recover(self) -> None:
        """Clear errors and see them cleared."""
        franky = library()
        self._end_motion()
        try:
            self._opened.recover_from_errors()
        except franky.CommandException as error:
            raise RobotError(
                f"the arm's errors cannot be cleared from here: {as_sentence(error)} Release the "
                "user stop, or recover by hand in Desk"
            ) from error
        # The answer may be read from a state sent before the recovery, so it must be awaited.
        deadline = time.monotonic() + RECOVER_S * self._patience
        while self._opened.has_errors:
            if time.monotonic() > deadline:
                shown = ", ".join(error_names(self._opened.state.current_errors))
                raise RobotError(f"the arm still shows {shown}: recover by hand in Desk")
            time.sleep(0.005)

    def start(self, space: Space) -> None:
        """Start the controller where the arm is; one of poses that runs goes on as it is."""
        franky = library()
        self._guard.begin(self._clock_s)
        if space is self._space is Space.CARTESIAN and self._tracker and self._is_commanded():
            self._trajectory = None
            self._put(self._reference, np.zeros(6))
            return
        self._end_motion()
        self._space, self._compliant = space, False
        if self._config.controller.kind == "impedance":
            self._tracker = self._make_tracker(franky)
        self._moving, self._ended = True, ""
        state = self._opened.state
        here = state.O_T_EE.matrix if space is Space.CARTESIAN else state.q
        self.command(np.array(here, np.float64), 0.0)
        self._await_control(franky)

    def home(self, joints: Array, dynamics: float) -> None:
        """Begin to move the joints (7,) home; the state shows when they have arrived."""
        franky = library()
        self._guard.begin(self._clock_s)
        # A planned motion cannot take over from a controller of torques.
        self.stop()
        # That takes a while: a stop may have been set, and the program could not speak.
        self._raw()
        self._guard.begin(self._clock_s)
        motion = franky.JointMotion(franky.JointState(joints), relative_dynamics_factor=dynamics)
        self._opened.move(motion, asynchronous=True)
        self._moving, self._ended = True, ""
        # An arm that refuses says so as soon as it is asked.
        deadline = time.monotonic() + _ACCEPT_S * self._patience
        while self._is_planned() and self._raw().robot_mode != franky.RobotMode.Move:
            if time.monotonic() > deadline:
                return
            time.sleep(_MOVING_PERIOD_S)
        if self._ended:
            raise ControllerEndedError(f"the arm refused to move its joints: {self._ended}")

    def command(self, target: Array, over_s: float, speeds: Array | None = None) -> None:
        """Move the reference to ``target``, evenly, within ``over_s`` of the arm's clock.

        ``speeds`` are those of the joints there, where targets are joint angles. A guided arm is
        held where it is: its reference is there at once.

        A controller that has died takes targets silently: this raises.
        """
        self._check_commanded()
        goal = np.array(target, np.float64)
        if self._space is Space.GUIDED:
            self._put(goal, np.zeros(7))
            self._set_compliant(False)
        elif over_s > 0 and self._tracker is not None:
            self._raw()
            self._trajectory = self._new_trajectory(goal, over_s, speeds)
            self._advance()
        else:
            self._trajectory = None
            self._put(goal, np.zeros(6 if self._space is Space.CARTESIAN else 7))

    def make_compliant(self, joints: Array) -> None:
        """Yield to a person's hand at ``joints`` (7,), until the next command."""
        self._check_commanded()
        self._put(np.array(joints, np.float64), np.zeros(7))
        self._set_compliant(True)

    def _check_commanded(self) -> None:
        """Raise ControllerEndedError where nothing takes a target, StoppedError after a stop."""
        self._guard.hear(self._clock_s)
        self._guard.check()
        if self._tracker is not None:
            if not self._tracker.is_running:
                self._note_end()
        elif not self._moving:
            self._ended = self._ended or "it was not started"
        if not self._is_commanded():
            raise ControllerEndedError(f"the controller had ended: {self._ended}")

    def keep_alive(self) -> None:
        """Hear that the program runs."""
        self._guard.hear(self._clock_s)

    def stop(self) -> None:
        """Come to rest."""
        franky = library()
        try:
            if self._tracker is not None and self._tracker.is_running:
                self._tracker.stop(franky.TorqueStopMotion(max_duration=self._rest_s()))
            elif self._moving:
                self._opened.stop()
        except (franky.ControlException, franky.CommandException) as error:
            _log.info("stopping: %s", str(error))
        self._end_motion()

    def _rest_s(self) -> float:
        """Return how long the controller may take to come to rest (s, the arm's clock).

        An arm that rests already is handed over to its own position control with the torques that
        carry what it holds; ramped down they would let a load sink that the arm does not know.
        """
        rests = float(np.abs(self._opened.state.dq).max()) <= _RESTS_RAD_S
        return _HANDED_OVER_S if rests else _REST_S

    def tick(self) -> float:
        """Advance the reference, and watch the arm's clock."""
        if self._robot is None or self._lost:
            return _RESTING_PERIOD_S
        try:
            self._raw()
            self._guard_motion()
            self._advance()
        except DisconnectedError as error:
            self._lost = str(error)
        except ControllerEndedError as error:
            _log.info("%s", str(error))
        return _RESTING_PERIOD_S if self._trajectory is None else _MOVING_PERIOD_S

    def close(self) -> None:
        """Come to rest and let the connection go."""
        if self._robot is not None and not self._lost:
            with contextlib.suppress(*library_errors()):
                self.stop()
        self._tracker = self._robot = None

    @property
    def _opened(self) -> Any:
        if self._lost:
            raise DisconnectedError(self._lost)
        if self._robot is None:
            raise DisconnectedError(
                "the arm is not connected, or no longer; the next reset() connects it"
            )
        return self._robot

    def _construct(self, franky: Any) -> Any:
        kind = franky.RealtimeConfig
        enforced = self._config.controller.realtime == "enforce"
        return franky.Robot(
            self._address, realtime_config=kind.Enforce if enforced else kind.Ignore
        )

    def _make_tracker(self, franky: Any) -> Any:
        settings, limits = self._config.controller, self._config.limits
        box = {
            "lower_joint_limits": np.array(limits.joints_low),
            "upper_joint_limits": np.array(limits.joints_high),
            "max_delta_tau": settings.max_delta_tau,
        }
        joints, home = np.array(self._opened.state.q, np.float64), self._config.reset.joints
        reach = settings.posture_reach_rad
        posture = joints if home is None else np.clip(home, joints - reach, joints + reach)
        try:
            if self._space is Space.GUIDED:
                friction = franky.FrictionCompensationParams(
                    coulomb=list(settings.guided_friction_nm)
                )
                return franky.JointImpedanceTracker(
                    self._opened, stiffness=_gains(settings.guided_stiffness), friction=friction,
                    **box,
                )  # fmt: skip
            if self._space is Space.JOINTS:
                return franky.JointImpedanceTracker(
                    self._opened,
                    stiffness=_gains(settings.joint_stiffness),
                    damping=_gains(settings.joint_damping),
                    cartesian_stiffness=_gains(settings.cartesian_stiffness),
                    cartesian_damping=_gains(settings.cartesian_damping),
                    **box,
                )
            return franky.CartesianImpedanceTracker(
                self._opened,
                translational_stiffness=settings.translational_stiffness,
                rotational_stiffness=settings.rotational_stiffness,
                translational_error_clip=np.full(3, settings.error_clip_m),
                rotational_error_clip=np.full(3, settings.error_clip_rad),
                posture_task=franky.PostureTask(posture, settings.posture_stiffness), **box,
            )  # fmt: skip
        except (franky.ControlException, franky.CommandException) as error:
            raise ControllerEndedError(f"the arm refused the controller: {error}") from error

    def _await_control(self, franky: Any) -> None:
        """Return when the arm has taken the controller; it may refuse it a moment after the call.

        Raises:
            ControllerEndedError: it refused.
        """
        deadline = time.monotonic() + _TAKEN_S * self._patience
        while self._tracker is not None and self._raw().robot_mode != franky.RobotMode.Move:
            if not self._tracker.is_running:
                self._note_end()
                raise ControllerEndedError(f"the arm refused the controller: {self._ended}")
            if time.monotonic() > deadline:
                raise ControllerEndedError("the arm answered, but did not take the controller")
            time.sleep(_MOVING_PERIOD_S)

    def _raw(self) -> Any:
        """Return the library's state, and note when the arm's clock advanced."""
        try:
            raw = self._opened.state
        except library_errors() as error:
            self._lost = f"the arm does not answer: {error}"
            raise DisconnectedError(self._lost) from error
        seconds = raw.time.to_sec()
        if seconds != self._clock_s:
            self._clock_s, self._fresh_at_s = seconds, time.monotonic()
        return raw

    def _is_commanded(self) -> bool:
        return self._moving and (self._tracker is None or bool(self._tracker.is_running))

    def _is_controlled(self, mode: Mode) -> bool:
        if self._tracker is not None:
            return bool(self._tracker.is_running)
        # A planned motion ends when it arrives: idle is as good as moving.
        return self._is_planned() and mode in (Mode.IDLE, Mode.MOVE)

    def _is_planned(self) -> bool:
        """Return whether a planned motion runs or has arrived, and was not refused."""
        franky = library()
        if self._moving and self._tracker is None:
            try:
                self._opened.poll_motion()
            except (franky.ControlException, franky.CommandException) as error:
                self._moving, self._ended = False, str(error)
        return self._moving

    def _guard_motion(self) -> None:
        """Hold, or give control up, where a stop stands or the program has fallen silent."""
        if not self._moving:
            return
        match self._guard.due(self._clock_s):
            case CommandTimeout.HOLD:
                self._halt()
            case CommandTimeout.STOP:
                self.stop()

    def _halt(self) -> None:
        """End the motion, and hold the arm; joints brake evenly."""
        if self._tracker is None:
            self.stop()
            return
        state = self._opened.state
        limits, reference = self._config.limits, self._reference
        if self._space is Space.CARTESIAN:
            here = np.array(state.O_T_EE.matrix, np.float64)
            # A loaded hand hangs below its reference: holds of the measured pose, one after
            # another, would let it sink. After a stop it moves no farther.
            kept = not self._guard.stopped and distance_between(here, reference) <= limits.first_m
            self._trajectory = None
            self._put(reference if kept else here, np.zeros(6))
            return
        here = np.array(state.q, np.float64)
        if self._compliant or np.abs(here - reference).max() > limits.joint_step_rad:
            self._trajectory = None
            self._put(here, np.zeros(7))
            self._set_compliant(False)
            return
        rate, braking = self._rate, limits.joint_acceleration_rad_s2
        self._trajectory = JointTrajectory(
            reference, reference, self._clock_s, _MOVING_PERIOD_S, rate, rate, braking
        )

    def _advance(self) -> None:
        trajectory = self._trajectory
        if trajectory is None:
            return
        reference, rate = trajectory.at(self._clock_s)
        if trajectory.is_over(self._clock_s):
            self._trajectory = None
        self._put(reference, rate)

    def _new_trajectory(self, goal: Array, over_s: float, speeds: Array | None) -> ArmTrajectory:
        """Return the trajectory from the current reference to ``goal``, starting now."""
        if self._space is Space.CARTESIAN:
            return PoseTrajectory(self._reference, goal, self._clock_s, over_s, self._rate)
        start, before = self._reference, self._rate
        if self._trajectory is not None:
            # The reference has advanced since the last tick.
            start, before = self._trajectory.at(self._clock_s)
        after = np.zeros(7) if speeds is None else np.array(speeds, np.float64)
        braking = self._config.limits.joint_acceleration_rad_s2
        return JointTrajectory(start, goal, self._clock_s, over_s, before, after, braking)

    def _put(self, reference: Array, rate: Array) -> None:
        """Hand a reference to the controller."""
        franky = library()
        self._reference, self._rate = reference, rate
        if self._tracker is not None and self._space is not Space.CARTESIAN:
            led = self._config.controller.speed_feedforward
            self._tracker.set_target(reference, rate if led else np.zeros(7))
            return
        if self._tracker is not None:
            self._tracker.set_target(franky.Affine(reference), franky.Twist(rate[:3], rate[3:]))
            return
        factor = self._config.controller.dynamics
        motion = franky.CartesianMotion(franky.Affine(reference), relative_dynamics_factor=factor)
        try:
            self._opened.poll_motion()
            self._opened.move(motion, asynchronous=True)
        except (franky.ControlException, franky.CommandException) as error:
            self._moving, self._ended = False, f"the motion was refused: {error}"
            raise ControllerEndedError(self._ended) from error

    def _set_compliant(self, compliant: bool) -> None:
        """Make the joints compliant or stiff; the library blends the gains."""
        if compliant is self._compliant:
            return
        self._compliant, settings = compliant, self._config.controller
        if compliant:
            damping = np.array(settings.guided_damping)
            self._tracker.set_gains(stiffness=np.zeros(7), damping=damping)
        else:
            self._tracker.set_gains(stiffness=_gains(settings.guided_stiffness))

    def _note_end(self) -> None:
        """Keep why the controller ended."""
        franky = library()
        self._trajectory = None
        try:
            self._opened.poll_motion()
        except (franky.ControlException, franky.CommandException) as error:
            self._ended = str(error)

    def _end_motion(self) -> None:
        """Take what the library kept about the last motion's end, so that the next can begin."""
        franky = library()
        self._tracker = self._trajectory = None
        self._moving = False
        try:
            self._opened.join_motion(_ENDED_S * self._patience)
        except (franky.ControlException, franky.CommandException) as error:
            _log.info("the last motion ended: %s", str(error))


def _gains(values: tuple[float, ...] | None) -> Array | None:
    return None if values is None else np.array(values, np.float64)


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
