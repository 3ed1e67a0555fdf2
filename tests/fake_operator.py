"""A person beside an arm who answers as a test has it."""

from pathlib import Path

from dzrobot.envs.franka.operator.operator import JUDGE, ArmPhase, OperatorVerdict
from dzrobot.errors import StoppedError


class FakeOperator:
    """A person who says what a test tells them to."""

    def __init__(self) -> None:
        self.said = OperatorVerdict.OPEN
        self.stops = False
        self.pauses = False
        self.because = ""
        self.refuses: ArmPhase | None = None
        """The question that is answered by a stop."""

        self.shown: list[ArmPhase] = []
        """What they were shown and asked, in order."""

        self.questions: list[str] = []
        """What they were asked, in order."""

    def start(self, stop: Path) -> None:
        """Listen."""

    def show(self, phase: ArmPhase, text: str) -> None:
        """Take note."""
        self.shown.append(phase)

    def confirm(self, phase: ArmPhase, question: str) -> None:
        """Agree, unless a test says otherwise."""
        self.shown.append(phase)
        self.questions.append(question)
        if phase is self.refuses:
            raise StoppedError(f"the operator answered {question!r} with a stop")

    def verdict(self) -> OperatorVerdict:
        """Return what was said, once."""
        said, self.said = self.said, OperatorVerdict.OPEN
        return said

    def judge(self, question: str = JUDGE) -> OperatorVerdict:
        """Return what was said; nothing is a failure."""
        return self.verdict() or OperatorVerdict.FAILURE

    def reason(self) -> str:
        """Return why an episode failed."""
        return self.because

    def wants_pause(self) -> bool:
        """Return whether a pause was asked for, once."""
        pauses, self.pauses = self.pauses, False
        return pauses

    def wants_stop(self) -> bool:
        """Return whether a stop was asked for, once."""
        stops, self.stops = self.stops, False
        return stops

    def notes(self) -> list[str]:
        """Return nothing."""
        return []

    def close(self) -> None:
        """Stop listening."""
