"""The control loop's core: turns actions into limited targets, and recovers or holds on errors."""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator

import numpy as np

from dzrobot.envs.franka.franka_config import FrankaConfig
from dzrobot.envs.franka.motion.action_spaces import CartesianSpace, TargetSpace
from dzrobot.envs.franka.motion.start_path import (
    arrived_within,
    check_reach,
    check_unmoved,
    hangs_still,
    is_at,
    is_near,
    kept_pose,
    plan_start_path,
    rests,
    risen_within,
)
from dzrobot.envs.franka.safeguards.arm_check import (
    check_resting,
    check_sag,
    check_start,
    unfinished,
)
from dzrobot.envs.franka.safeguards.limits import (
    Abort,
    CommandTimeout,
    LimitedTarget,
    RefusalError,
    check_contact,
    check_joints,
    classify,
    on_silence,
)
from dzrobot.envs.franka.safeguards.self_collision import SelfCollision, collision_on_the_way
from dzrobot.envs.franka.workcells import Arm, Clock, ControllerEndedError
from dzrobot.envs.panda.poses import Array, distance_between, towards
from dzrobot.envs.panda.state import ArmState, Mode, in_action_axes
from dzrobot.errors import RobotError, StoppedError

_log = logging.getLogger(__name__)

_SETTLE_S = 2.0
_LATE = 1.5
"""Periods without a target after which a reference has begun to come to rest by itself."""


class Control:
    """Commands one arm within its limits.

    Args:
        arm: What is commanded.
        config: Limits and scales.
        clock: What silence is measured by.
        space: What targets of an episode are. None: poses of the hand.
        stop: Returns the stop that stands, whoever has set it. None: there is none.
    """

    def __init__(
        self,
        arm: Arm,
        config: FrankaConfig,
        clock: Clock,
        space: TargetSpace | None = None,
        *,
        stop: Callable[[], object | None] | None = None,
    ) -> None:
        # Resets are commanded in Cartesian space, whatever an episode is commanded in.
        self._cartesian: TargetSpace = CartesianSpace(config)
        self._acts_in = space or self._cartesian
        self._space: TargetSpace = self._cartesian
        self._arm = arm
        self._config = config
        self._clock = clock
        # The watchdog and an operator may hold the arm while a step is under way.
        self._lock = threading.RLock()
        self._last: Array | None = None
        self._rested_from: Array | None = None
        """The last target of an arm at rest: taken again, it is not followed down by a sag more."""

        self._last_action_s = 0.0
        self._silence = CommandTimeout.NONE
        self._latched = threading.Event()
        self._stop = stop or (lambda: None)
        self._pace = 1.0
        self._steps = 0
        self._homing = False
        self.has_traveled = False
        """Whether the arm was moved towards a start, since motion was allowed last."""
        joints = config.reset.joints
        self._collision: SelfCollision | None = None
        self._joints: Array | None = None if joints is None else np.array(joints, np.float64)
        self.recoveries = 0

    @property
    def last_target(self) -> Array | None:
        """The target that was commanded last, a pose or joint angles; None when not in control."""
        return None if self._last is None else self._last.copy()

    def latch(self) -> None:
        """Stop for an operator: the arm holds at once and nothing moves until :meth:`unlatch`."""
        self._latched.set()
        self.hold()

    def unlatch(self) -> None:
        """Allow motion again, from the next reset on."""
        self._latched.clear()
        self.has_traveled = False

    def check_latch(self) -> None:
        """Raise :class:`RefusalError` while a stop stands, in this program or for the arm."""
        if (stop := self._stop()) is not None:
            raise RefusalError(Abort.OPERATOR_STOP, f"the arm was stopped ({stop})")
        if self._latched.is_set():
            raise RefusalError(Abort.OPERATOR_STOP, "an operator has stopped the arm")

    def act_in(self, space: TargetSpace) -> None:
        """Let targets of the next episodes be of another space."""
        self._acts_in = space

    def prepare(self) -> None:
        """Load what the limits need, before anything is opened; see :meth:`TargetSpace.prepare`.

        Raises:
            MissingDependencyError: the way of a reset is checked in a simulator that is not
                installed, and the arm is a real one.
        """
        self._acts_in.prepare()
        self._collision = self._collision or collision_on_the_way(self._config)

    def begin(self, start: Array) -> float:
        """Begin an episode where the arm is, and return how far that is from its start (m).

        Args:
            start: Pose (4, 4) that it is to begin at.

        Raises:
            RefusalError: the arm is outside its workspace, or not at its start any more.
        """
        with self._lock:
            self._pace, self._steps, self.recoveries = 1.0, 0, 0
            self.resume()
        return check_start(self._arm.state(), start, self._config)

    def resume(self) -> None:
        """Take control where the arm is, in the current episode.

        Raises:
            RefusalError: the arm is outside its workspace, or an operator has stopped it.
        """
        with self._lock:
            self.check_latch()
            last = self._rested_from if self._last is None else self._last
            self._rested_from = None
            goes_on = self._space is self._acts_in and self._arm.state().controlled
            if last is None or not goes_on:
                self._take_over(self._acts_in)
                # The last target, if it is known: a loaded arm hangs a little below it.
                last = self._space.first(last, self._arm.state())
            self._last = last
            self._arm.command(last)
            self._note_action()
        self._settle()
        if self._joints is None:
            self._joints = self._arm.state().joints

    def travel(self, goal: Array, risen: Callable[[], None] | None = None) -> None:
        """Bring the arm to ``goal`` (4, 4), slowly: first up, then over.

        It is under control from here on, whatever is raised: see :meth:`hold`.

        Args:
            goal: Where to.
            risen: Called once the hand has risen.

        Raises:
            RobotError: it does not arrive or is stopped; or it is too far, out of reach, or would
                come too near to an obstacle: then nothing has moved.
            RefusalError: something was touched, or an operator has stopped the arm.
        """
        self._settle_at_last()
        with self._lock:
            self.check_latch()
            state = self._arm.state()
            last = self._last = self._last if state.controlled else None
            check_reach(state, goal, self._config.reset)
        pressed = check_resting(self._at_rest(), self._config.limits)
        with self._lock:
            self.check_latch()
            state = self._arm.state()
            path = plan_start_path(state, self._joints, goal, self._config, self._collision)
            path.check_rising(state, pressed)
            self._take_over(self._cartesian)
            began = self._arm.state()
            self._last, self.has_traveled = kept_pose(last, began, self._config), True
            # At once: moved there within one period it would ask for more speed than a reset may.
            self._arm.command(self._last)
            self._note_action()
            check_unmoved(state, began, self._config.limits)
        deadline = self._clock.now() + self._config.reset.timeout_s
        if path.clear is not None:
            self._move_home(path.clear, deadline)
        self._move_to(path.lifted, deadline, risen_within(self._config))
        if risen is not None:
            risen()
        if self._joints is not None:
            self._move_home(self._joints, deadline)
        self._move_to(goal, deadline, arrived_within(self._config.reset))

    def apply(self, action: Array, state: ArmState) -> LimitedTarget:
        """Command what the limits leave of an action's motion and return it.

        Raises:
            RefusalError: nothing may be commanded, or the controller has ended for good.
        """
        with self._lock:
            last = self._last_allowed(state)
            pace = self._pace
            if self._config.is_slow or self._steps < self._config.slow_first_steps:
                pace = min(pace, self._config.slow_pace)
            if self._clock.now() - self._last_action_s > _LATE * self._config.period_s:
                rested = self._space.rested(last)
                last = last if rested is None else rested.target
            limited = self._space.limit(action, state, last, pace)
            self._note_action()
            self._steps += 1
            try:
                self._send(limited)
            except ControllerEndedError as error:
                held = self._recover(self._arm.state(), str(error))
                return LimitedTarget(held, (*limited.by, "recovered"))
            self._last = limited.target
            return limited

    def check(self, action: Array) -> None:
        """Raise :class:`RefusalError` where no arm could carry out the motion of an action."""
        self._acts_in.check(action)

    def keep_target(self, state: ArmState) -> None:
        """Keep the last target while an action does not move the arm yet.

        Raises:
            RefusalError: nothing may be commanded.
        """
        with self._lock:
            rested = self._space.rested(self._last_allowed(state))
            if rested is not None:
                self._arm.command(rested.target, rested.over_s)
                self._last = rested.target
            self._note_action()

    def place(self, state: ArmState) -> Array:
        """Return where the arm is, in the space of an episode's targets."""
        return self._acts_in.place(state)

    def in_action_axes(self, twist: Array, state: ArmState) -> Array:
        """Return translation and rotation (6,) along the base axes as an action has them."""
        action = self._config.action
        last = self.last_target
        anchor = state.pose if last is None or action.anchor == "measured" else last
        return in_action_axes(anchor, twist, action)

    def examine(self, state: ArmState) -> None:
        """Check the arm's state after a step; recover from harmless errors.

        Raises:
            RefusalError: the episode cannot continue.
        """
        with self._lock:
            self.check_latch()
            if state.mode is Mode.USER_STOPPED:
                raise RefusalError(Abort.USER_STOP, "the user stop is pressed")
            if state.errors or not state.controlled:
                self._recover(state, "the controller has ended")
            self._check_state(state)

    def hold(self) -> None:
        """Hold the pose the arm is at, when in control; never raises for a dead controller."""
        with self._lock:
            if self._last is None:
                return
            try:
                if self._homing:
                    # A planned motion of the joints takes no pose to hold.
                    self._last = None
                    self._arm.stop()
                else:
                    self._hold_measured()
            except StoppedError:
                # The arm's driver holds it already.
                return
            except RobotError as error:
                _log.warning("the arm cannot be held, so it has stopped by itself: %s", str(error))
                self._last = None

    @contextlib.contextmanager
    def held_on_error(self) -> Iterator[None]:
        """Hold the pose the arm is at if the block raises."""
        with contextlib.ExitStack() as guard:
            guard.callback(self.hold)
            yield
            guard.pop_all()

    def release(self) -> None:
        """Give control up and come to rest, at once."""
        with self._lock:
            self._last, self._rested_from, self.has_traveled = None, None, False
            self._arm.stop()

    def rest(self) -> None:
        """Give control up once the arm hangs still at its last target, so that nothing sinks.

        An arm that a stop holds, or that does not come to rest, is given up all the same.
        """
        with contextlib.suppress(RefusalError):
            self._settle_at_last()
        self._rest()

    def rest_for_person(self) -> None:
        """Give control up, as :meth:`rest` does, before a person reaches in.

        Raises:
            RefusalError: an operator has stopped the arm.
            RobotError: the hand hangs farther below its target than ``limits.sag_m``; the arm goes
                on holding it.
        """
        self._settle_at_last()
        with self._lock:
            state, last = self._arm.state(), self._last
            if last is not None and state.controlled:
                check_sag(last, state, self._config.limits)
            self._rest()

    def _rest(self) -> None:
        with self._lock:
            last = self._last
            self.release()
            self._rested_from = last

    def _settle_at_last(self) -> None:
        """Wait until the arm hangs still, at its last target where it is under control."""
        with self._lock:
            self.check_latch()
            state, last = self._arm.state(), self._last
            rested = None if last is None or not state.controlled else self._space.rested(last)
            if rested is not None:
                self._arm.command(rested.target, rested.over_s)
                self._last = rested.target
        self._settle()

    def check_silence(self) -> CommandTimeout:
        """Hold or stop the arm when no action has come for long; return what was done."""
        with self._lock:
            if self._last is None:
                return self._silence
            silence = on_silence(self._clock.now() - self._last_action_s, self._config.limits)
            if silence is not self._silence:
                self._silence = silence
                if silence is CommandTimeout.HOLD:
                    self.hold()
                elif silence is CommandTimeout.STOP:
                    self.release()
            return silence

    def _last_allowed(self, state: ArmState) -> Array:
        """Return the last target, or raise RefusalError where nothing may be commanded."""
        self.check_commanded()
        if self._last is None:
            raise RefusalError(Abort.CONTROLLER, "the arm is not under control")
        self._check_state(state)
        return self._last

    def _check_state(self, state: ArmState) -> None:
        check_contact(state.force_n, state.torque_nm, self._config.limits)
        check_joints(state.joints, self._config.limits)

    def check_commanded(self) -> None:
        """Raise :class:`RefusalError` while a stop stands, or where control was given up."""
        self.check_latch()
        if self.check_silence() is CommandTimeout.STOP:
            limit = self._config.limits.stop_after_s
            raise RefusalError(
                Abort.WATCHDOG, f"no action came for {limit} s, so control was given up"
            )

    def _note_action(self) -> None:
        self._last_action_s = self._clock.now()
        self._silence = CommandTimeout.NONE

    def _take_over(self, space: TargetSpace) -> None:
        """Take control for targets of ``space``; a controller that takes such targets goes on."""
        if self._space.space is not space.space and self._arm.state().controlled:
            # One controller rests before another begins.
            self._arm.stop()
        self._take(space)

    def _take(self, space: TargetSpace) -> None:
        """Take control for targets of ``space``, where the arm is."""
        self._last = None
        self._space = space
        self._arm.start(space.space)
        space.begin(self._arm.state())

    def _send(self, limited: LimitedTarget) -> None:
        """Command a target, or let a person's hand move the arm from there."""
        target, over_s = limited.target, self._config.period_s
        if limited.compliant:
            self._arm.make_compliant(target)
        elif limited.speeds is not None:
            self._arm.command(target, over_s, limited.speeds)
        else:
            self._arm.command(target, over_s)

    def _hold_measured(self) -> Array:
        held = self._space.held(self._last, self._arm.state())
        self._arm.command(held.target, held.over_s)
        self._last = held.target
        return held.target

    def _recover(self, state: ArmState, message: str) -> Array:
        """Recover from the errors of ``state`` and hold; RefusalError where that is not to be."""
        self._examine_dead(state, message)
        try:
            held = self._hold_measured()
        except ControllerEndedError as error:
            raise RefusalError(Abort.REFLEX, f"no recovery: {error}") from error
        # The recovery took its time, not whoever acts.
        self._note_action()
        return held

    def _examine_dead(self, state: ArmState, message: str) -> None:
        """Recover from the errors of ``state``, or raise RefusalError."""
        if state.mode is Mode.USER_STOPPED:
            raise RefusalError(Abort.USER_STOP, "the user stop is pressed")
        shown = ", ".join(state.errors) or "no error"
        abort = classify(state.errors) if state.errors else Abort.CONTROLLER
        if abort is not Abort.NONE:
            raise RefusalError(abort, f"{message}; the arm says {state.description}")
        if self.recoveries >= self._config.limits.recoveries:
            raise RefusalError(Abort.REFLEX, f"{shown} after {self.recoveries} recoveries")
        self.recoveries += 1
        self._pace *= self._config.limits.recovery_pace
        _log.warning("recovering from %s, now at %.0f %% speed", shown, 100 * self._pace)
        try:
            # A new controller begins where the arm is.
            self._last = None
            self._arm.recover()
            self._take(self._space)
        except RobotError as error:
            raise RefusalError(Abort.REFLEX, f"{shown} and no recovery: {error}") from error

    def _at_rest(self) -> Iterator[ArmState]:
        """Yield states for a while: what passes by itself is not a load."""
        deadline = self._clock.now() + _SETTLE_S
        while True:
            yield self._arm.state()
            if self._clock.now() >= deadline:
                return
            with self._lock:
                self.check_latch()
                self._note_action()
            self._clock.sleep_until(self._clock.now() + self._config.period_s)

    def _move_to(self, waypoint: Array, deadline_s: float, within: tuple[float, float]) -> None:
        """Bring the hand to a pose, as near as that (m and rad)."""
        while not self._arrived(waypoint, within):
            self._check_deadline(deadline_s)
            self._travel_step(waypoint)

    def _move_home(self, joints: Array, deadline_s: float) -> None:
        """Bring the joints home by one planned motion, then take control again."""
        reset, period = self._config.reset, self._config.period_s
        if is_near(joints, state := self._arm.state(), reset):
            return
        try:
            with self.held_on_error():
                with self._lock:
                    self.check_latch()
                    self._homing = True
                    self._arm.home(joints, reset.joint_dynamics)
                    self._note_action()
                moving = True
                while moving:
                    self._check_deadline(deadline_s)
                    self._clock.sleep_until(self._clock.now() + period)
                    with self._lock:
                        self.check_commanded()
                        before, state = state, self._arm.state()
                        self._check_travel(state)
                        self._note_action()
                    moving = not is_near(joints, state, reset) or not rests(before, state)
                with self._lock:
                    self.check_latch()
                    self._homing = False
                    self._take(self._cartesian)
                    self._last = self._arm.state().pose
                    self._note_action()
        finally:
            self._homing = False

    def _settle(self) -> None:
        """Wait until the arm rests, or for a while."""
        deadline, state = self._clock.now() + _SETTLE_S, self._arm.state()
        while self._clock.now() < deadline:
            with self._lock:
                self.check_latch()
                self._note_action()
            self._clock.sleep_until(self._clock.now() + self._config.period_s)
            before, state = state, self._arm.state()
            if hangs_still(before, state):
                return

    def _check_deadline(self, deadline_s: float) -> None:
        if self._clock.now() > deadline_s:
            raise RobotError(
                f"the arm has not reached its start pose in {self._config.reset.timeout_s} s: "
                f"{unfinished(self._arm.state(), self._config.limits)}"
            )

    def _arrived(self, goal: Array, within: tuple[float, float]) -> bool:
        target = self._last
        commanded = target is not None and distance_between(target, goal) <= 1e-9
        return commanded and is_at(goal, self._arm.state(), within)

    def _travel_step(self, goal: Array) -> None:
        """Advance the moving target by one period."""
        reset, limits, period = self._config.reset, self._config.limits, self._config.period_s
        with self._lock:
            self.check_commanded()
            target = self._last
            if target is None:
                raise RefusalError(Abort.CONTROLLER, "the arm is not under control")
            # A target that runs ahead of an arm that is blocked would build up force.
            if distance_between(self._arm.state().pose, target) < limits.step_m:
                target = towards(
                    target, goal, meters=reset.speed_m_s * period, radians=reset.turn_rad_s * period
                )
            self._last = target
            self._arm.command(target, period)
            self._note_action()
        self._clock.sleep_until(self._clock.now() + period)
        self._check_travel(self._arm.state())

    def _check_travel(self, state: ArmState) -> None:
        """Check the arm's state during a reset."""
        check_contact(state.force_n, state.torque_nm, self._config.limits)
        if state.errors or not state.controlled:
            raise RobotError(
                f"the arm stopped on its way to the start pose; it says {state.description}"
            )
