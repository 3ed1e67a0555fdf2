"""The hand at a start: homed, if a person agrees, and open before the arm moves."""

from collections.abc import Callable

from dzrobot.envs.franka.arm import GripperDevice
from dzrobot.envs.franka.clock import Clock
from dzrobot.envs.franka.config import GripperConfig
from dzrobot.envs.franka.operator.operator import ArmPhase
from dzrobot.envs.franka.safeguards.consent import Attendance
from dzrobot.envs.franka.safeguards.limits import Abort, RefusalError
from dzrobot.envs.panda.state import GripperState
from dzrobot.errors import RobotError

POLL_S = 0.02
"""How often fingers that move are looked at."""


def home_hand(hand: GripperDevice, people: Attendance, config: GripperConfig) -> None:
    """Let a hand that was never homed move its fingers all the way, if a person agrees.

    Raises:
        RobotError: nobody can be asked, and the workcell does not allow it.
        StoppedError: the person stopped instead.
    """
    if hand.state().is_homed:
        return
    if people.asks:
        people.ask(
            ArmPhase.STAND_CLEAR,
            "The hand was never homed: its fingers will close and open all the way, once. Take "
            "everything from between them, press Enter.",
        )
    elif not config.homing:
        raise RobotError(
            "the gripper has not been homed, and nobody can be asked: clear the fingers and "
            "set gripper: {homing: true}, which lets reset() move them all the way once, or "
            "home it in Desk"
        )
    people.show(ArmPhase.MOVING, "homing the hand")
    hand.home()


def open_hand(
    hand: GripperDevice, config: GripperConfig, clock: Clock, check_latch: Callable[[], None]
) -> None:
    """Open the hand before the arm moves: what it holds falls where it is, not on the way.

    Args:
        hand: What is opened.
        config: Its patience.
        clock: What that is measured by.
        check_latch: Raises where an operator has stopped the arm.

    Raises:
        RefusalError: it does not answer, or an operator has stopped the arm.
    """
    hand.request(opened=True)
    deadline = clock.now() + config.timeout_s
    while (state := hand.state()).is_busy and clock.now() < deadline:
        check_latch()
        check_hand(state, config)
        clock.sleep_until(clock.now() + POLL_S)
    check_hand(state, config)


def check_hand(state: GripperState, config: GripperConfig) -> None:
    """Raise :class:`RefusalError` where the hand has a fault, or answers nothing for too long."""
    timeout = config.timeout_s
    if state.fault or state.waiting_s > timeout:
        fault = state.fault or f"the gripper has not answered for {timeout} s"
        raise RefusalError(Abort.GRIPPER, fault)
