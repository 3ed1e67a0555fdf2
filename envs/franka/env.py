"""A Franka arm with cameras as a Gymnasium environment."""

import atexit
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np

from dzrobot.envs.episodes import DRAWN, InitialStates, observation_space
from dzrobot.envs.franka.arm_episode import (
    ArmEpisode,
    ArmEpisodeFacts,
    lasting_facts,
    refusal_of,
    reset_abort,
    rule_for,
)
from dzrobot.envs.franka.franka_config import FrankaConfig
from dzrobot.envs.franka.motion.action_spaces import joint_box, target_space
from dzrobot.envs.franka.motion.controller import Control
from dzrobot.envs.franka.motion.guidance import Guidance
from dzrobot.envs.franka.motion.start_path import (
    POLL_S,
    check_gripper,
    home_gripper,
    open_gripper,
    rises_first,
)
from dzrobot.envs.franka.operator.operator import (
    ArmPhase,
    Consent,
    Operator,
    OperatorVerdict,
    Watchdog,
)
from dzrobot.envs.franka.safeguards.limits import (
    SAFETY_STOPS,
    Abort,
    LimitedTarget,
    RefusalError,
    check_finite,
    check_fresh,
    check_near,
    check_shape,
)
from dzrobot.envs.franka.safeguards.lock_and_stop import ArmLock
from dzrobot.envs.franka.sensing import Reading, Sensors
from dzrobot.envs.franka.workcells import (
    Arm,
    Camera,
    Clock,
    RateLimiter,
    Scene,
    SystemClock,
)
from dzrobot.envs.panda.poses import Array
from dzrobot.envs.panda.quantities import GRIPPERS
from dzrobot.envs.panda.state import Mode
from dzrobot.errors import ConfigError, RobotError, StoppedError, as_sentence

_log = logging.getLogger(__name__)

Observation = dict[str, Any]
Info = dict[str, Any]
StepResult = tuple[Observation, float, bool, bool, Info]


class FrankaEnv(gym.Env[Observation, np.ndarray]):
    """Pick and place with a Franka, in the keys of ``config.embodiment``.

    Whatever the embodiment's parts name of :mod:`dzrobot.envs.panda.quantities` is observed and
    commanded. With ``franka_pnp``:

    Observation:
        ``video.image``, ``video.wrist_image``: ``(128, 128, 3)`` uint8 RGB.
        ``state.state``: ``(19,)`` float32: gripper width (1, m), force (3, N), position (3, m),
            roll, pitch and yaw (3, rad), torque (3, Nm), velocity (6, m/s and rad/s). Position and
            angles are those of the hand in the frame of the pose the episode began at; force,
            torque and velocity have the hand's axes.
        ``annotation.task``: the instruction.

    Action, ``(7,)`` in [-1, 1]: translation (1 = 0.03 m), rotation as roll, pitch, yaw (1 = 0.1
    rad), both from the target before, or from the measured pose (``config.action.anchor``), in the
    axes ``config.action.frame``; then the gripper: at or above +0.5 a closed hand opens, at or
    below -0.5 an open one closes. A hand that changes does so first: the arm waits until the
    fingers have moved, ``config.gripper.settle_s`` at most. Numbers beyond their range are cut, and
    refused beyond 1.5 times that; ``info["executed_action"]`` is then the action (A,) that was
    carried out, as it is where the arm is slow. Every target passes the limits of ``config.limits``
    before it reaches the arm; ``info["limited"]`` names those that cut it. A step lasts one period
    of ``config.control_hz``, counted from the end of the one before or of that wait; time the
    policy takes is part of it.

    With ``oxe_droid``, ``(8,)``: seven joint angles (rad) to be at, and the gripper: above 0.5
    closes, else opens; see :class:`~dzrobot.envs.franka.motion.action_spaces.JointSpace`.

    Nothing connects or moves before the first reset, which a real arm refuses unless an operator is
    asked, or ``unattended`` says that no person need be; it is slow until ``config.full_speed``. An
    episode terminates when the task is done, and is truncated with ``info["abort"]`` when it cannot
    continue safely. The arm then holds its pose, and no reset moves it, in this program or the
    next, until a person has looked: an operator who is asked, :meth:`acknowledge`, or ``dzrobot
    acknowledge ADDRESS``. ``info["fault"]`` says why an episode does not count (a camera, the
    connection, the hand, the watchdog; discarded), and ``info["stop"]`` why the next reset
    will refuse.

    Args:
        arm: The arm and its gripper.
        cameras: One for each view.
        config: The workcell.
        clock: What the control rate is kept by.
        operator: A person who is asked, judges and stops; needed by ``reward.rule = "operator"``.
        scene: Is set up by every reset; needed by ``reward.rule = "scene"``. None: people do that.
        render_mode: ``"rgb_array"`` or None.
        unattended: See :meth:`attend`.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012

    libraries = ("franky-control", "pyrealsense2", "pyrobotiqgripper")
    """Drivers whose version belongs to a result."""

    def __init__(  # noqa: PLR0913 (drivers, then what a test replaces)
        self,
        arm: Arm,
        cameras: Sequence[Camera],
        config: FrankaConfig,
        *,
        clock: Clock | None = None,
        operator: Operator | None = None,
        scene: Scene | None = None,
        render_mode: str | None = None,
        unattended: bool = False,
    ) -> None:
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise ConfigError(f"render_mode={render_mode!r} must be 'rgb_array' or None")
        self.arm = arm
        self.config = config
        self.render_mode = render_mode
        self._clock: Clock = clock or SystemClock()
        self._consent = Consent(config, operator, unattended=unattended)
        self._sensors = Sensors(arm, cameras, config, self._clock)
        self.layout = self._sensors.layout
        """What its actions and states are made of."""

        space = target_space(self.layout.motion, config)
        self._control = Control(
            arm, config, self._clock, space, stop=self._consent.stop_latch.active
        )
        self.scene = scene
        """The scene around the arm, if a program knows it; privileged information."""

        self._rule = rule_for(config.reward, scene)
        self._lasting = lasting_facts(config, self.workcell, self.libraries)
        self._lock = ArmLock(config.address, config.lock_folder) if config.address else None
        self._watchdog: Watchdog | None = None
        self._starts = InitialStates(DRAWN)
        self._episode: ArmEpisode | None = None
        self._guidance: Guidance | None = None
        self.embodiment = embodiment = self._sensors.embodiment
        self.control_hz = config.control_hz
        self.init_states = DRAWN
        self.hand = self.layout.hand_motion(config.action)
        self.is_real = config.address is not None
        self.address = config.address
        self.judged_by_operator = config.reward.rule == "operator"
        self.observation_space = observation_space(embodiment, self.layout.state_limits)
        self.action_space = self.layout.action_space(
            joint_box(config), (config.limits.workspace_low, config.limits.workspace_high)
        )
        self.remake: Callable[[], FrankaEnv] | None = None
        """Makes another environment of the same workcell, for copies; set by ``make_franka``."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and deep-copy as a new environment of the same workcell, not yet connected."""
        if self.remake is None:
            raise TypeError(
                "a FrankaEnv made from drivers cannot be copied or pickled, as they cannot; make "
                "it from plain values with gym.make('Franka-PnP-v0', ...) or make_franka(...)"
            )
        return self.remake, ()

    @property
    def last_target(self) -> Array | None:
        """The pose (4, 4) or joint angles (7,) commanded last; None when not in control."""
        return self._control.last_target

    @property
    def task(self) -> str:
        """The instruction."""
        return self.config.task

    @property
    def workcell(self) -> dict[str, Any]:
        """What a result depends on of the workcell: all of it but where the devices are."""
        return self.config.result_settings()

    def attend(self, operator: Operator | None, *, unattended: bool = False) -> None:
        """Say who looks after the arm, before the first reset.

        Args:
            operator: Asked before anything moves, and heard all the time, such as
                :class:`~dzrobot.envs.franka.operator.console.OperatorConsole`. None: no person.
            unattended: Whether no person is asked, and an episode that a lost frame or a slow
                policy has ended is followed by the next. Other stops hold all the same.

        Raises:
            ConfigError: the arm is a real one, and neither is given.
        """
        self._consent.operator = operator
        self._consent.unattended = unattended
        self._consent.check_attended()

    def be_guided(self, engaged: Callable[[], bool]) -> None:
        """Let a person guide the arm by hand in the episodes that follow, instead of actions.

        The motion of an action then counts for nothing, its gripper as ever, and
        ``info["executed_action"]`` is the action (A,) that leads to where the person has brought
        the arm.

        Args:
            engaged: Asked at every step whether the person guides it now; else the arm is stiff.

        Raises:
            ConfigError: the controller cannot yield.
        """
        self._guidance = Guidance(self.config, self.layout, engaged)
        self._control.act_in(self._guidance.space)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Connect what is not, open the hand, and bring the arm to a start pose, slowly.

        Where there is an operator, they are asked before it moves and before the episode begins.
        A reset that fails leaves the arm holding where it is.

        Raises:
            RobotError: something cannot be reached; says what to do.
            ArmBusyError: another program drives the arm.
            StoppedError: a stop is set, or the arm was stopped during the reset.
            SafetyError: the arm must not move.
            ModalityError: an unknown option or initial state.
            ConfigError: the arm is a real one, no person can be asked, and ``unattended`` was not
                set; or the reward needs an operator, and there is none.
            MissingDependencyError: limits.self_collision_m needs a simulator.
        """
        super().reset(seed=seed)
        self._consent.check_attended()
        start = self._starts.choose(seed, options)
        self._episode = None
        operator = self._consent.operator
        if operator is None and self.config.reward.rule == "operator":
            raise ConfigError(
                "reward.rule='operator' needs a person who judges: run this in a terminal, or give "
                "FrankaEnv an operator"
            )
        self._control.prepare()
        if self._lock is not None:
            self._lock.acquire()
        # At the end of the program the arm is stopped, and no driver's thread is left running.
        atexit.unregister(self.close)
        atexit.register(self.close)
        if operator is not None:
            operator.start(self._consent.stop_latch.path)
        self.arm.watch_stop(self._consent.stop_latch.path)
        if self._watchdog is None:
            self._watchdog = Watchdog(
                self._control.check_silence, self.arm.keep_alive, operator, self.operator_stop
            )
        # Unlatched first: a stop that comes meanwhile is found by the check.
        self._control.unlatch()
        self._consent.check_stop()
        self._sensors.open(self._consent.refuse_stopped)
        self._clear_errors()
        with contextlib.ExitStack() as guard:
            guard.push(self._end_reset)
            reading, off_m = self._approach(start)
        pace = RateLimiter(self._clock, self.config.period_s)
        self._episode = ArmEpisode(
            start, reading, pace, ArmEpisodeFacts(self.config, self._lasting, start_off_m=off_m)
        )
        self._consent.show(ArmPhase.RUNNING, self.task)
        return self._observe(reading), self._info(
            OperatorVerdict.OPEN, LimitedTarget(self._control.place(reading.state), ())
        )

    def step(self, action: np.ndarray) -> StepResult:
        """Carry out one action (A,) and return what the sensors say one period later.

        Raises:
            SafetyError: the action has another shape.
            ResetNeeded: there is no episode.
        """
        episode = self._running()
        before = episode.reading.state
        with self._control.held_on_error():
            values = check_shape(action, self.embodiment.action_dim, self.layout.action_description)
        limited = LimitedTarget(self._control.place(episode.reading.state), ("refused",))
        try:
            with self._control.held_on_error():
                limited = self._act(check_finite(values))
                episode.pace.wait()
                episode.reading = self._read_until(self._sensors.is_current)
                self._sensors.check_frozen(episode.reading)
                episode.facts.check_commands()
                if self._consent.operator is not None and self._consent.operator.wants_pause():
                    self._pause(episode)
        except (RefusalError, StoppedError, RobotError) as error:
            return self._abort(refusal_of(error), limited)
        observation = self._observe(episode.reading)
        outcome = self._rule.judge(observation, episode.reading.state)
        operator = self._consent.operator
        if operator is not None:
            # What a person says counts, whatever the rule.
            outcome = operator.verdict() or outcome
        if self._guidance is not None:
            after = episode.reading.state
            limited = self._guidance.shown(values, before, after, limited)
        return self._result(observation, outcome, limited)

    def render(self) -> np.ndarray | None:  # type: ignore[override]
        """Return the newest exterior image (H, W, 3) uint8; after an abort, the last one."""
        if self.render_mode is None:
            gym.logger.warn("render() needs render_mode='rgb_array' in gym.make.")
            return None
        if self._episode is None:
            raise gym.error.ResetNeeded("the arm is connected by the first reset().")
        image: np.ndarray = self._observe(self._episode.reading)[self.embodiment.video_keys[0]]
        return image

    def in_action_axes(self, twist: Array) -> Array:
        """Return translation and rotation (6,) along the base axes as an action has them now.

        Raises:
            ResetNeeded: there is no episode.
        """
        return self._control.in_action_axes(twist, self._running().reading.state)

    def images(self) -> Mapping[str, np.ndarray]:
        """Return the newest image (H, W, 3) uint8 RGB of every camera that is open."""
        return self._sensors.images()

    def reported(self, info: Info, outcome: OperatorVerdict) -> Info:
        """Return ``info`` as it is when ``outcome`` is what came of the episode."""
        fault = (
            "discarded by the operator" if outcome is OperatorVerdict.DISCARDED else info["fault"]
        )
        return info | {
            "is_success": outcome is OperatorVerdict.SUCCESS,
            "reset_reason": outcome.value,
            "fault": fault,
        }

    def rest(self) -> None:
        """Give control up between episodes; the arm comes to rest."""
        self._control.rest()

    def operator_stop(self) -> StoppedError:
        """Hold at once, from any thread; the episode ends and no reset moves until acknowledged.

        Returns:
            What says so, and what ends it.
        """
        self._control.latch()
        stopped = self._consent.set_stop(Abort.OPERATOR_STOP, "the operator stopped the arm")
        # A reset may have unlatched it before the stop was set.
        self._control.latch()
        return stopped

    def policy_failed(self, ended: str, reason: str) -> Info:
        """Hold, and end the episode as a failure of its policy.

        Args:
            ended: ``invalid_action`` or ``policy_error``; ``info["abort"]``.
            reason: What the policy did.

        Returns:
            The last info of the episode.

        Raises:
            ResetNeeded: there is no episode.
        """
        at = self._control.place(self._running().reading.state)
        self._control.hold()
        return self._abort(RefusalError(Abort(ended), reason), LimitedTarget(at, ("refused",)))[-1]

    def acknowledge(self) -> None:
        """Clear a stop: a person has checked the arm, and the next reset may move it."""
        self._consent.stop_latch.acknowledge()
        self._control.unlatch()

    def close(self) -> None:
        """Stop the arm and let everything go; twice, or before the first reset, is harmless."""
        atexit.unregister(self.close)
        self._episode = None
        watchdog, self._watchdog = self._watchdog, None
        operator = self._consent.operator
        # From the last to the first: whatever one of them raises, the others are done too.
        with contextlib.ExitStack() as ending:
            if self._lock is not None:
                ending.callback(self._lock.release)
            if operator is not None:
                ending.callback(operator.close)
            ending.callback(self._sensors.close)
            ending.callback(self._control.release)
            if watchdog is not None:
                ending.callback(watchdog.end)

    def _running(self) -> ArmEpisode:
        episode = self._episode
        if episode is None:
            raise gym.error.ResetNeeded("the arm is connected by the first reset().")
        if episode.abort is not Abort.NONE:
            raise gym.error.ResetNeeded(
                f"the episode was cut short ({episode.abort}: {episode.message}); call reset()."
            )
        return episode

    def _clear_errors(self) -> None:
        state = self.arm.state()
        if state.mode is Mode.USER_STOPPED:
            raise self._consent.set_stop(Abort.USER_STOP, "the user stop is pressed: release it")
        if state.errors or state.mode is Mode.REFLEX:
            _log.warning("clearing %s", ", ".join(state.errors) or "a reflex")
            self.arm.recover()
        if self._consent.is_asked:
            self._control.rest()
            if self.arm.state().errors:
                self.arm.recover()

    def _approach(self, start: int) -> tuple[Reading, float]:
        """Bring the arm to its start, with consent.

        Returns:
            The first reading there, and how far from the start the hand is (m).
        """
        consent = self._consent
        question = "The arm will move to its start. Stand clear, press Enter."
        consent.confirm(ArmPhase.STAND_CLEAR, question)
        gripper, settings = self.arm.gripper, self.config.gripper
        home_gripper(gripper, consent, settings)
        consent.show(ArmPhase.MOVING)
        place = self.config.reset.start_pose(start)

        check = self._control.check_latch
        opens = partial(open_gripper, gripper, settings, self._clock, check)
        low = rises_first(self.arm.state(), gripper.state(), self.config)
        if not low:
            opens()
        self._control.travel(place, opens if low else None)
        if consent.is_asked:
            # No person reaches into the workspace of an arm that follows a controller.
            self._control.rest_for_person()
            consent.confirm(ArmPhase.SCENE, "Set the scene, stand clear, press Enter.")
        if self.scene is not None:
            self.scene.prepare(start)
        self._rule.begin()
        if consent.operator is not None:
            consent.operator.verdict()
        off_m = self._control.begin(place)
        return self._sensors.read_fresh(), off_m

    def _end_reset(self, _: object, error: BaseException | None, __: object) -> None:
        """Hold after a failed reset, and set a stop if a person must check the arm.

        Raises:
            StoppedError: the reset failed for such a reason.
        """
        if error is None:
            return
        moved = self._control.has_traveled
        self._control.hold()
        if isinstance(error, RefusalError):
            error = self._sensors.cause(error)
        abort = reset_abort(error, moved=moved)
        if abort is None:
            return
        _log.warning("the reset was cut short (%s): %s", abort, str(error))
        stopped = self._consent.set_stop(abort, str(error))
        if abort in SAFETY_STOPS:
            raise stopped from error

    def _pause(self, episode: ArmEpisode) -> None:
        """Rest until the operator continues; what is seen then is fresh."""
        began = self._clock.now()
        try:
            self._control.rest_for_person()
            question = "Paused. Press Enter to continue."
        except RobotError as error:
            said = as_sentence(error)
            question = f"Not paused, the arm holds: {said} Stay out; press Enter to continue."
        self._consent.confirm(ArmPhase.PAUSED, question)
        self._control.resume()
        episode.reading = self._sensors.read_fresh()
        episode.pace.begin_slot()
        episode.paused_s += self._clock.now() - began
        episode.facts.restart()
        self._consent.show(ArmPhase.RUNNING, self.task)

    def _act(self, action: Array) -> LimitedTarget:
        # First: an arm that is coming to rest since it was given up may send no state meanwhile.
        self._control.check_commanded()
        # The policy may have taken long: limits are measured from where the arm is now.
        now = self._sensors.read()
        check_fresh(now.state_age_s, now.frame_ages_s.values(), self.config.limits)
        is_open, threshold = now.gripper.is_open, self.config.gripper.threshold
        motion, fingers = action[self.layout.motion_at], action[[self.layout.gripper_at]]
        low, high = GRIPPERS[self.layout.gripper]
        # All of it, before the hand does anything.
        self._control.check(motion)
        check_near(fingers, low, high, "the gripper's")
        if self.layout.changes_gripper(action, is_open=is_open, threshold=threshold):
            self._control.keep_target(now.state)
            self.arm.gripper.request(opened=not is_open)
            if self.config.gripper.settle_s > 0:
                now = self._await_gripper()
        limited = self._control.apply(motion, now.state)
        cut = float(np.clip(fingers[0], low, high))
        return limited.carrying_out(action, self.layout.motion_at, self.layout.gripper_at, cut)

    def _await_gripper(self) -> Reading:
        """Let the arm wait for the fingers, and return what the sensors say then."""
        episode, began = self._running(), self._clock.now()
        deadline = began + self.config.gripper.settle_s

        def rest(reading: Reading) -> bool:
            self._control.keep_target(reading.state)
            return not reading.gripper.is_busy or self._clock.now() >= deadline

        reading = self._read_until(rest)
        episode.pace.begin_slot()
        episode.paused_s += self._clock.now() - began
        return reading

    def _read_until(self, ready: Callable[[Reading], bool]) -> Reading:
        """Return the first reading that is ``ready``; RefusalError where one is not allowed."""
        while True:
            reading = self._sensors.read()
            self._control.examine(reading.state)
            check_fresh(reading.state_age_s, reading.frame_ages_s.values(), self.config.limits)
            check_gripper(reading.gripper, self.config.gripper)
            if ready(reading):
                return reading
            self._clock.sleep_until(self._clock.now() + POLL_S)

    def _abort(self, refusal: RefusalError, limited: LimitedTarget) -> StepResult:
        """End the episode with the last observation that could be made; the arm holds."""
        episode = self._running()
        refusal = self._sensors.cause(refusal)
        episode.abort, episode.message = refusal.abort, str(refusal)
        _log.warning("episode cut short (%s): %s", refusal.abort, str(refusal))
        self._consent.stop_latch.set(refusal.abort, str(refusal))
        observation = self._observe(episode.reading)
        return self._result(observation, OperatorVerdict.OPEN, limited)

    def _result(
        self, observation: Observation, outcome: OperatorVerdict, limited: LimitedTarget
    ) -> StepResult:
        success = outcome is OperatorVerdict.SUCCESS
        aborted = self._episode is not None and self._episode.abort is not Abort.NONE
        terminated = outcome is OperatorVerdict.FAILURE or (success and self.config.stop_on_success)
        if self._episode is not None:
            state, recoveries = self._episode.reading.state, self._control.recoveries
            self._episode.facts.note(state, limited.by, recoveries)
        info = self._info(outcome, limited)
        truncated = aborted or outcome is OperatorVerdict.DISCARDED
        return observation, float(success), terminated and not truncated, truncated, info

    def _observe(self, reading: Reading) -> Observation:
        origin = reading.state.pose if self._episode is None else self._episode.origin
        return self._sensors.observation(reading, origin)

    def _info(self, outcome: OperatorVerdict, limited: LimitedTarget) -> Info:
        episode = self._episode
        assert episode is not None, "made by reset"
        ended = outcome is not OperatorVerdict.SUCCESS or self.config.stop_on_success
        info: Info = {
            "task": self.task,
            **episode.info(),
            **self._consent.info(episode.abort, episode.message),
            "limited": ",".join(limited.by),
            "target": limited.target.copy(),
            "recoveries": self._control.recoveries,
        }
        info["robot"] = episode.facts.plain(info)
        if limited.executed_action is not None:
            info["executed_action"] = limited.executed_action
        reason = episode.abort.value or (outcome.value if ended else "")
        return self.reported(info, outcome) | {"reset_reason": reason}
