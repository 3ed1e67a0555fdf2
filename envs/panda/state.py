"""What the arm and its hand report: one state of each."""

from dataclasses import dataclass
from enum import StrEnum

from dzrobot.envs.panda.poses import Array


class Mode(StrEnum):
    """What the arm says it is doing."""

    IDLE = "idle"
    MOVE = "move"
    GUIDING = "guiding"
    REFLEX = "reflex"
    USER_STOPPED = "user_stopped"
    RECOVERY = "recovery"
    OTHER = "other"


REMEDIES = {
    Mode.IDLE: "it is ready (blue lamp)",
    Mode.MOVE: "another program moves it (green lamp): end that program",
    Mode.GUIDING: "it is guided by hand (white lamp): let go of the buttons, and leave "
    "Programming for Execution in Desk's side bar",
    Mode.REFLEX: "it has stopped by itself (red lamp): look at what it touched; the next reset "
    "clears it, after a person has looked",
    Mode.USER_STOPPED: "the user stop is pressed (white or yellow lamp): release it",
    Mode.RECOVERY: "it recovers from an error (red lamp): wait, or recover by hand in Desk",
    Mode.OTHER: "its brakes are locked or it is not in Execution (yellow or white lamp): in Desk "
    "unlock the joints, choose Execution, then Activate FCI in the menu at the top",
}
"""What each mode looks like on the arm, and what a person does about it."""


@dataclass(frozen=True)
class ArmState:
    """One state of the arm."""

    pose: Array
    """Of the hand's grasp point in the base frame, (4, 4)."""

    twist: Array
    """Measured velocity of the grasp point, base axes, (6,): m/s, then rad/s."""

    force_n: Array
    """External force at the hand, hand axes, (3,)."""

    torque_nm: Array
    """External torque at the hand, hand axes, (3,)."""

    joints: Array
    """Joint angles (7,), rad."""

    joint_speeds: Array
    """Measured joint speeds (7,), rad/s."""

    mode: Mode
    errors: tuple[str, ...]
    """Errors that are set now."""

    controlled: bool
    """Whether our controller is running."""

    robot_time_s: float
    """The arm's own clock."""

    success_rate: float
    """Share of control commands that arrived lately, in [0, 1]."""

    fresh_at_s: float
    """When the arm's clock was last seen to advance (environment clock)."""

    @property
    def is_ready(self) -> bool:
        """Whether the arm waits for a motion, and no error stands."""
        return self.mode is Mode.IDLE and not self.errors

    @property
    def said(self) -> str:
        """What the arm shows, and what a person does about it."""
        if self.mode is Mode.IDLE and self.errors:
            remedy = "an error stands; the next reset clears it, after a person has looked"
        else:
            remedy = REMEDIES[self.mode]
        return f"{self.mode}, {', '.join(self.errors) or 'no error'}: {remedy}"


@dataclass(frozen=True)
class GripperState:
    """What is known about the hand without asking it."""

    width_m: float
    """Distance between the fingers."""

    is_open: bool
    """What was last asked for."""

    is_busy: bool
    """Whether what was last asked for has not been carried out yet."""

    waiting_s: float
    """For how long a command has not been answered."""

    fault: str
    """Why the last command failed; empty when it did not."""

    is_grasped: bool = False
    """Whether something is held: closed fingers with nothing between them hold nothing."""

    is_homed: bool = True
    """Whether the hand knows how far it opens; before, it opens and grasps nothing."""
