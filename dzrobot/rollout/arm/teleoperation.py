"""A person who steers a robot by a device: what it says becomes actions of an environment.

Nothing moves without the operator: while the deadman is held, actions come from the device;
otherwise the robot is held still.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from dzrobot.embodiments.action_conventions import HandMotion, check_holds, hold_command
from dzrobot.envs.franka.arm_model import FLANGE_TO_HAND, pose_and_jacobian
from dzrobot.envs.franka.env import FrankaEnv
from dzrobot.envs.franka.operator.console import KEYS_HELP
from dzrobot.envs.franka.operator.keyboard import Keyboard, terminal
from dzrobot.envs.franka.workcells import Clock, RateLimiter, SystemClock
from dzrobot.envs.panda.poses import damped_inverse
from dzrobot.envs.panda.quantities import CLOSED_ABOVE, ArmLayout
from dzrobot.envs.teleop.device import DeviceLostError, TeleopDevice, TeleopReading
from dzrobot.errors import ConfigError
from dzrobot.modality.window import Observation
from dzrobot.policies.base import Action
from dzrobot.rollout.arm.attended import ENDED, EndedByDriver
from dzrobot.rollout.demonstrations.takeover import HelpedPolicy
from dzrobot.rollout.environment import bounds_of, facts_of, needed_robot
from dzrobot.rollout.episode import Actor

KEYS = {
    "w": (0, 1.0), "s": (0, -1.0), "a": (1, 1.0), "d": (1, -1.0), "r": (2, 1.0), "f": (2, -1.0),
    "u": (3, 1.0), "j": (3, -1.0), "i": (4, 1.0), "k": (4, -1.0), "o": (5, 1.0), "l": (5, -1.0),
}  # fmt: skip
"""Key -> action number and its sign."""

GRIPPER_KEY, END_KEY = "g", "x"

KEYBOARD_NUMBERS = 7
"""Numbers of an action: translation, rotation, gripper."""

KEYBOARD_HELP = (
    "w/s a/d r/f move, u/j i/k o/l turn, g opens or closes the gripper, x ends the episode; "
    f"{KEYS_HELP}"
)

Array = NDArray[np.float64]

NEAR_RAD = 0.2
"""A leader whose joints are farther than this from the arm's does not take over."""

FAR_RAD = 0.8
"""One that is farther than this is no longer followed: it ran away, or somebody moved it meanwhile.
"""

FASTEST_M_S, FASTEST_RAD_S = 0.3, 1.0
"""What a motion of 1 asks of an arm that takes joint angles; as ``franka_pnp`` takes it."""

LEAD_RAD = 0.2
"""How far joints that move a hand are asked to be ahead of where they are."""

LOST = "device lost"
"""How an episode ended whose device went silent."""

_STILL_HELD = "the deadman was held as the episode began: let it go once, and it steers"

_log = logging.getLogger(__name__)


@runtime_checkable
class TurnsMotions(Protocol):
    """An environment whose actions have other axes than the robot's base."""

    def in_action_axes(self, twist: Array) -> Array:
        """Return translation and rotation (6,) along the base axes as an action has them now."""
        ...


class Commands(Protocol):
    """What a reading is as an action of one environment."""

    gripper_at: int
    """Number of the action that moves the gripper."""

    def gripper(self, closed: bool) -> float:
        """Return the action's number that closes or opens the gripper."""
        ...

    def is_closed(self, action: Action) -> bool:
        """Return whether ``action`` (A,) closes the gripper."""
        ...

    def refusal(self, reading: TeleopReading, seen: Observation, *, follows: bool) -> str:
        """Return why the robot cannot follow the device; empty where it can.

        Args:
            reading: What the device says.
            seen: Where the robot is.
            follows: Whether it does so already.
        """
        ...

    def steer(self, action: Action, reading: TeleopReading, seen: Observation) -> None:
        """Write the motion of ``reading`` into ``action`` (A,), which holds the robot still."""
        ...


class HandCommands:
    """Steps of the hand, for a device that shows a motion.

    Args:
        hand: Which numbers of the action they are.
        env: Says how its action's axes lie now, where they are not those of the base.

    Raises:
        ConfigError: it does not.
    """

    def __init__(self, hand: HandMotion, env: gym.Env[Any, Any]) -> None:
        self._hand = hand
        self.gripper_at = hand.gripper
        inner = env.unwrapped
        self._turned: Callable[[Array], Array] = lambda twist: twist
        if isinstance(inner, TurnsMotions):
            self._turned = inner.in_action_axes
        elif hand.frame != "base":
            raise ConfigError(
                f"actions of {type(inner).__name__} have the axes {hand.frame!r}, and it has no "
                "method in_action_axes(twist) that turns a motion into them"
            )

    def gripper(self, closed: bool) -> float:
        """Return the sign that closes or opens."""
        return float(self._hand.closes if closed else -self._hand.closes)

    def is_closed(self, action: Action) -> bool:
        """Return whether the sign is that which closes."""
        return bool(action[self.gripper_at] * self._hand.closes > 0)

    def refusal(self, reading: TeleopReading, seen: Observation, *, follows: bool) -> str:
        """Return nothing: a motion begins wherever the hand is."""
        return ""

    def steer(self, action: Action, reading: TeleopReading, seen: Observation) -> None:
        """Write the motion; one that is too large keeps its direction."""
        twist = self._turned(_limited(reading))
        twist /= max(1.0, float(np.abs(twist).max()))
        action[self._hand.translation] = twist[:3]
        action[self._hand.turn] = twist[3:]


class JointCommands:
    """Joint angles of a Franka: those of a leader arm in the same posture, or that move its hand.

    Args:
        layout: Where they are in the action.
        space: Box of actions. A leader may be turned farther than the arm can follow.
        hz: Actions per second.
    """

    def __init__(self, layout: ArmLayout, space: gym.spaces.Box, hz: float) -> None:
        self._layout = layout
        self._step = np.repeat((FASTEST_M_S, FASTEST_RAD_S), 3) / hz
        at = layout.motion_at
        self._low, self._high = space.low[at], space.high[at]
        self.gripper_at = layout.gripper_at

    def gripper(self, closed: bool) -> float:
        """Return 1 for closed, 0 for open."""
        return float(closed)

    def is_closed(self, action: Action) -> bool:
        """Return whether the position asked for is a closed one."""
        return bool(action[self.gripper_at] > CLOSED_ABOVE)

    def refusal(self, reading: TeleopReading, seen: Observation, *, follows: bool) -> str:
        """Return which joint of the leader is too far from the arm's."""
        if reading.joints is None:
            return ""
        away = np.abs(np.array(reading.joints) - self._measured(seen))
        worst = int(np.argmax(away))
        if away[worst] <= (FAR_RAD if follows else NEAR_RAD):
            return ""
        return (
            f"joint {worst + 1} of the leader is {away[worst]:.2f} rad from the arm's, which holds "
            f"still: bring the leader within {NEAR_RAD} rad"
        )

    def steer(self, action: Action, reading: TeleopReading, seen: Observation) -> None:
        """Write the joints, each as far as the arm can go."""
        at = self._layout.motion_at
        if reading.joints is not None:
            joints = np.array(reading.joints)
        else:
            before = action[at].astype(np.float64)
            _, jacobian = pose_and_jacobian(before, FLANGE_TO_HAND)
            joints = before + damped_inverse(jacobian, self._step * _limited(reading))
            # Joints that something holds back are not to be asked for more and more.
            measured = self._measured(seen)
            joints = np.clip(joints, measured - LEAD_RAD, measured + LEAD_RAD)
        action[at] = np.clip(joints, self._low, self._high)

    def _measured(self, seen: Observation) -> Array:
        """Return the arm's joints (7,), rad."""
        held = hold_command(self._layout.robot, seen, None)
        return held[self._layout.motion_at].astype(np.float64)


class GuidedCommands:
    """What holds an arm still that a person guides by hand: the arm itself shows where to go.

    Args:
        layout: Where the gripper is in the action.
    """

    def __init__(self, layout: ArmLayout) -> None:
        self.gripper_at = layout.gripper_at
        self._open, self._closed = (
            (0.0, 1.0) if layout.gripper == "gripper_position" else (1.0, -1.0)
        )

    def gripper(self, closed: bool) -> float:
        """Return the number that closes or opens the gripper."""
        return self._closed if closed else self._open

    def is_closed(self, action: Action) -> bool:
        """Return whether the number is nearer to the one that closes."""
        at = float(action[self.gripper_at])
        return abs(at - self._closed) < abs(at - self._open)

    def refusal(self, reading: TeleopReading, seen: Observation, *, follows: bool) -> str:
        """Return nothing: the arm is where it is."""
        return ""

    def steer(self, action: Action, reading: TeleopReading, seen: Observation) -> None:
        """Leave the action: the environment asks whether the arm is guided."""


def _limited(reading: TeleopReading) -> Array:
    """Return the motion (6,) with a translation and a rotation of at most 1 in any direction."""
    twist = np.array(reading.motion, np.float64)
    for part in (twist[:3], twist[3:]):
        part /= max(1.0, float(np.linalg.norm(part)))
    return twist


def commands_for(env: gym.Env[Any, Any], device: TeleopDevice) -> Commands:
    """Return what readings of ``device`` are in ``env``.

    Raises:
        ConfigError: the environment's actions are of another kind.
    """
    facts = facts_of(env)
    robot = needed_robot(type(env.unwrapped).__name__, facts)
    if device.gives == "guidance":
        if not isinstance(env.unwrapped, FrankaEnv):
            raise ConfigError(
                f"{type(env.unwrapped).__name__} has no arm that a hand could guide: choose a "
                "workcell, or another device"
            )
        return GuidedCommands(env.unwrapped.layout)
    if device.gives == "motion" and facts.hand is not None:
        return HandCommands(facts.hand, env)
    layout = getattr(env.unwrapped, "layout", None)
    if device.gives == "motion" and not isinstance(layout, ArmLayout):
        raise ConfigError(
            f"nothing says how actions of {robot.tag!r} move a hand, which is what this device "
            "does: give the environment an attribute hand, a HandMotion"
        )
    layout = layout or ArmLayout.of(robot)
    if layout.motion != "joint_position":
        raise ConfigError(
            f"actions of {robot.tag!r} are {layout.motion}, and a leader arm shows joint angles: "
            "choose an environment of joint angles, such as dzrobot/Franka-DROID-v0, or another "
            "device"
        )
    return JointCommands(layout, bounds_of(env), facts.control_hz or robot.timing.control_hz)


class Teleoperator(Actor):
    """A person with a device, as an actor; see :class:`~dzrobot.rollout.episode.Actor`.

    Whoever else chooses actions, a policy that a person watches over, asks :meth:`wanted`.

    Args:
        device: What they steer with; open while :func:`steering` lasts.
        env: What is steered; it need not have been reset.
        clock: What the rate of a simulator is kept by, which would else be as fast as it can.

    Raises:
        ConfigError: the device does not fit the robot, or an arm has no deadman.
    """

    def __init__(
        self, device: TeleopDevice, env: gym.Env[Any, Any], *, clock: Clock | None = None
    ) -> None:
        facts = facts_of(env)
        self._robot = needed_robot(type(env.unwrapped).__name__, facts)
        check_holds(self._robot, "while no person steers")
        if facts.moves_an_arm and not device.has_deadman:
            raise ConfigError(
                "an arm is steered only while a button is held: name the device's deadman in its "
                "settings"
            )
        self.lost: DeviceLostError | None = None
        """Why the device says nothing any more."""

        self.device = device
        """What they steer with."""

        self._commands = commands_for(env, device)
        inner = env.unwrapped
        if device.gives == "guidance" and isinstance(inner, FrankaEnv):
            inner.be_guided(lambda: self._engaged)
        self._rate = None
        if not facts.moves_an_arm:
            hz = facts.control_hz or self._robot.timing.control_hz
            self._rate = RateLimiter(clock or SystemClock(), 1.0 / hz)
        self.begin(env)

    def begin(self, env: Any) -> None:
        """Start a new episode, with an open gripper; nothing moves before the deadman is held.

        One that is still held from the episode before asks for nothing: it has to be let go first.
        """
        self._engaged, self._closed, self._presses = False, False, 0
        self._let_go = not self.device.has_deadman
        self._refusal, self._ends = "", False
        self._last: Action | None = None
        if self._rate is not None:
            self._rate.restart()

    def wanted(self, seen: Observation, last: Action | None) -> Action | None:
        """Return the action (A,) that the person wants, None while the deadman is not held.

        Args:
            seen: The newest observation.
            last: The action before, whoever chose it: the gripper stays as it asked. None: there
                was none, and the gripper is open.

        Raises:
            DeviceLostError: the device says nothing any more.
        """
        reading = self.device.read()
        self._ends = self._ends or reading.ends
        self._let_go = self._let_go or not reading.active
        if not reading.active or not self._follows(reading, seen, last):
            self._engaged = False
            return None
        if reading.closed is not None:
            self._take_trigger(reading.closed)
        elif (reading.presses - self._presses) % 2:
            self._closed = not self._closed
        self._presses = reading.presses
        action = hold_command(self._robot, seen, last)
        self._commands.steer(action, reading, seen)
        action[self._commands.gripper_at] = self._commands.gripper(self._closed)
        return action

    def act(self, observation: Observation) -> tuple[Action, float]:
        """Return what the person wants, or what holds the robot still; at the rate of control."""
        self.keep_time()
        began, steered = time.perf_counter(), self._engaged
        action = None
        try:
            action = self.wanted(observation, self._last)
        except DeviceLostError as error:
            self.lost, self._engaged = error, False
        if action is None:
            action = self._held(observation, stopping=steered)
        self._last = action
        return action, 1000 * (time.perf_counter() - began)

    def keep_time(self) -> None:
        """Wait for the next step of a simulator, which would else be as fast as it can."""
        if self._rate is not None:
            self._rate.wait()

    def stopped(self, seen: Observation, last: Action | None) -> Action:
        """Return what holds the robot where it is now (A,), the gripper as ``last`` asked."""
        held = hold_command(self._robot, seen, None)
        if last is not None:
            held[self._commands.gripper_at] = last[self._commands.gripper_at]
        return held

    def why_over(self) -> str:
        """Return why the person's episode is over; empty while it is not."""
        return LOST if self.lost is not None else ENDED if self._ends else ""

    def _follows(self, reading: TeleopReading, seen: Observation, last: Action | None) -> bool:
        """Follow the device, or begin to follow it so that nothing jumps."""
        refusal = _STILL_HELD
        if self._let_go:
            refusal = self._commands.refusal(reading, seen, follows=self._engaged)
        if refusal and not self._refusal:
            _log.warning("%s", refusal)
        self._refusal = refusal
        if refusal or self._engaged:
            return not refusal
        # A button that was pressed meanwhile asked for nothing.
        self._engaged, self._presses = True, reading.presses
        self._agreed = self._told_trigger = False
        self._closed = last is not None and self._commands.is_closed(last)
        return True

    def _take_trigger(self, closed: bool) -> None:
        """Let the gripper follow a trigger, once it has stood where the gripper is.

        Elsewhere as it takes over, it would drop what is held, or close on what no person watches.
        """
        if not self._agreed and closed != self._closed:
            if not self._told_trigger:
                there, here = ("closed", "open") if closed else ("open", "closed")
                _log.warning(
                    "the trigger is %s and the gripper %s, which stays so: bring the trigger there "
                    "once, and the gripper follows", there, here,
                )  # fmt: skip
            self._told_trigger = True
            return
        self._agreed, self._closed = True, closed

    def _held(self, seen: Observation, *, stopping: bool) -> Action:
        """Return what holds the robot still; where it just moved, where it is now."""
        at = self._commands.gripper_at
        held = hold_command(self._robot, seen, None if stopping else self._last)
        held[at] = self._commands.gripper(self._closed)
        return held


class Steered(EndedByDriver):
    """Ends an episode where the person who steers wants that, or their device is lost.

    Args:
        env: What they steer.
        person: Who steers.
    """

    def __init__(self, env: gym.Env[Any, Any], person: Teleoperator) -> None:
        super().__init__(env, lambda: bool(person.why_over()))
        self._person = person

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode.

        Raises:
            DeviceLostError: the device is lost; nothing moves.
        """
        if self._person.lost is not None:
            raise self._person.lost
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Carry out ``action``; end the episode if it is over."""
        observation, reward, terminated, truncated, info = super().step(action)
        if self._person.lost is not None and info.get("reset_reason") == ENDED:
            info = info | {"reset_reason": LOST, "fault": str(self._person.lost)}
        return observation, reward, terminated, truncated, info


@contextmanager
def steering(person: Teleoperator, env: gym.Env[Any, Any]) -> Iterator[gym.Env[Any, Any]]:
    """Open the person's device while the block runs, and yield ``env`` with it beside.

    Raises:
        RobotError: the device is not there; nothing has moved.
        DeviceLostError: it was lost meanwhile. Its episode was ended, as any other is.
    """
    try:
        person.device.open()
        yield Steered(env, person)
    finally:
        person.device.close()
    if person.lost is not None:
        raise person.lost


class WatchedPolicy(HelpedPolicy):
    """A policy under a person's hand, as an actor.

    While the person holds the deadman, their action is carried out and the policy does not act.
    When they let go, the policy begins anew from what it sees then: its plan was made for a place
    where the robot no longer is.

    Args:
        policy: Acts.
        person: Takes over.
    """

    def __init__(self, policy: Actor, person: Teleoperator) -> None:
        self.person = person
        """Takes over."""

        self._policy = policy
        self._env: Any = None
        self._last: Action | None = None

    def begin(self, env: Any) -> None:
        """Start a new episode; the policy acts first."""
        self._env, self._last, self.intervened = env, None, False
        self.person.begin(env)
        self._policy.begin(env)

    def act(self, observation: Observation) -> tuple[Action, float]:
        """Return the person's action while they steer, the policy's otherwise, and its time."""
        self.person.keep_time()
        began, before = time.perf_counter(), self.intervened
        try:
            wanted = self.person.wanted(observation, self._last)
        except DeviceLostError as error:
            # The episode is over after this step, and nothing moves in it.
            self.person.lost = error
            wanted = self.person.stopped(observation, self._last)
        self.intervened = wanted is not None and self.person.lost is None
        if wanted is None:
            if before:
                self._policy.begin(self._env)
            wanted, _ = self._policy.act(observation)
        self._last = wanted
        return wanted, 1000 * (time.perf_counter() - began)


class KeyboardActor(Actor):
    """Someone at the keyboard: each key press moves one number by ``pace`` for one step.

    Args:
        keyboard: What they type on. None: the terminal.
        pace: Size of an action number, in (0, 1].

    Raises:
        ConfigError: there is no terminal to type in.
    """

    def __init__(self, keyboard: Keyboard | None = None, pace: float = 0.5) -> None:
        self._keyboard = keyboard or terminal()
        self._owned = keyboard is None
        if self._owned:
            # Before a folder is made, or anything opened.
            self._keyboard.check()
        self._pace = pace
        self._open = True

    def begin(self, env: Any) -> None:
        """Listen; keys pressed before do not count."""
        if self._owned:
            self._keyboard.open()
        self._keyboard.take("".join(KEYS) + GRIPPER_KEY + END_KEY)
        self._open = True

    def act(self, observation: Observation) -> tuple[Action, float]:
        """Return what the keys pressed since the last step add up to."""
        action = np.zeros(KEYBOARD_NUMBERS, np.float32)
        for key in self._keyboard.take("".join(KEYS)):
            number, sign = KEYS[key]
            action[number] = sign * self._pace
        if len(self._keyboard.take(GRIPPER_KEY)) % 2:
            self._open = not self._open
        action[6] = 1.0 if self._open else -1.0
        return action, 0.0

    def wants_end(self) -> bool:
        """Return whether the key that ends an episode was pressed."""
        return bool(self._keyboard.take(END_KEY))
