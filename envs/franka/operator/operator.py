"""The person beside the arm: what they are asked and shown, and what they say."""

from enum import StrEnum
from typing import Protocol


class OperatorVerdict(StrEnum):
    """What is known about the task."""

    OPEN = ""
    SUCCESS = "success"
    FAILURE = "failure"
    DISCARDED = "discarded"


class ArmPhase(StrEnum):
    """What the arm is doing, as an operator sees it."""

    STOPPED = "stopped"
    STAND_CLEAR = "stand clear"
    MOVING = "moving to the start"
    SCENE = "scene ready?"
    RUNNING = "running"
    PAUSED = "paused"
    JUDGING = "judging"
    DONE = "done"


class Operator(Protocol):
    """A person beside the robot."""

    def start(self) -> None:
        """Begin to listen; twice is harmless."""
        ...

    def show(self, phase: ArmPhase, text: str) -> None:
        """Take note of what the arm is doing."""
        ...

    def confirm(self, phase: ArmPhase, question: str) -> None:
        """Return when they agree.

        Raises:
            StoppedError: they stopped the arm instead, or have left.
        """
        ...

    def verdict(self) -> OperatorVerdict:
        """Return what was said since the last call."""
        ...

    def judge(self) -> OperatorVerdict:
        """Return the verdict on the episode that is over, asking for it.

        Raises:
            StoppedError: they stopped the arm instead, or have left.
        """
        ...

    def reason(self) -> str:
        """Return why the episode failed that they called a failure; empty if they do not say."""
        ...

    def wants_stop(self) -> bool:
        """Return whether a stop was asked for since the last call."""
        ...

    def wants_pause(self) -> bool:
        """Return whether the arm is to rest until they say otherwise."""
        ...

    def notes(self) -> list[str]:
        """Return what was noted since the last call."""
        ...

    def close(self) -> None:
        """Stop listening; twice is harmless."""
        ...
