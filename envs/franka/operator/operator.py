"""The operator beside the arm: their interface, their consent, and the watchdog."""

import logging
import threading
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from dzrobot.envs.franka.franka_config import FrankaConfig
from dzrobot.envs.franka.safeguards.limits import (
    HARDWARE_FAULTS,
    RECOVERS_ALONE,
    SAFETY_STOPS,
    Abort,
)
from dzrobot.envs.franka.safeguards.lock_and_stop import Stop, StopLatch
from dzrobot.errors import ConfigError, DzrobotError, StoppedError


class OperatorVerdict(StrEnum):
    """What is known about the task."""

    OPEN = ""
    SUCCESS = "success"
    FAILURE = "failure"
    DISCARDED = "discarded"


class ArmPhase(StrEnum):
    """What the arm is doing, as an operator sees it."""

    CONNECTING = "connecting"
    STOPPED = "stopped"
    STAND_CLEAR = "stand clear"
    MOVING = "moving to the start"
    SCENE = "scene ready?"
    RUNNING = "running"
    PAUSED = "paused"
    JUDGING = "judging"
    DONE = "done"


JUDGE = "Success (c), failure (b), or discard (z)?"
"""What is asked about an episode that is over."""


class Operator(Protocol):
    """A person beside the robot."""

    def start(self, stop: Path) -> None:
        """Begin to listen; twice is harmless.

        Args:
            stop: File that is the arm's stop. What they stop by sets it, without this process.
        """
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

    def judge(self, question: str = JUDGE) -> OperatorVerdict:
        """Return the verdict on the episode that is over, asking for it.

        Args:
            question: What is asked; the keys are the same whatever it says.

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


_log = logging.getLogger(__name__)

PERIOD_S = 0.05


class Watchdog:
    """Holds or stops the arm when actions cease, or when the operator wants it stopped.

    It checks both twenty times a second, and says that this program runs.

    Args:
        check_silence: Holds or stops the arm when no action has come for too long.
        keep_alive: Tells the arm's driver that this program runs.
        operator: The person who may stop the arm. None: no person is there.
        stop: Stops the arm for the operator.
    """

    def __init__(
        self,
        check_silence: Callable[[], object],
        keep_alive: Callable[[], object],
        operator: Operator | None,
        stop: Callable[[], object],
    ) -> None:
        self._check_silence = check_silence
        self._keep_alive = keep_alive
        self._operator = operator
        self._stop = stop
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="franka-watchdog", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop checking."""
        self._stopping.set()
        self._thread.join(5.0)

    def _run(self) -> None:
        while not self._stopping.wait(PERIOD_S):
            try:
                self._keep_alive()
                if self._operator is not None and self._operator.wants_stop():
                    self._stop()
                self._check_silence()
            except DzrobotError as error:
                # The next step meets the same error, with someone there to read it.
                _log.warning("the watchdog could not hold the arm: %s", str(error))


class Consent:
    """Whether the arm may move: asks the operator, and remembers a stop until it is acknowledged.

    Args:
        config: The workcell.
        operator: The person beside the arm. None: no person can be asked.
        unattended: Whether no person is asked, and a lost frame or a slow policy ends one
            episode only.
    """

    def __init__(
        self, config: FrankaConfig, operator: Operator | None, *, unattended: bool = False
    ) -> None:
        self._address = config.address
        self.operator = operator
        self.unattended = unattended
        self.stop_latch = StopLatch(config.address, config.lock_folder)

    @property
    def is_asked(self) -> bool:
        """Whether an operator is asked before the arm moves."""
        return self.operator is not None and not self.unattended

    def check_attended(self) -> None:
        """Check that somebody is asked before a real arm moves, or that no person need be.

        Raises:
            ConfigError: neither.
        """
        if self._address is None or self.operator is not None or self.unattended:
            return
        raise ConfigError(
            f"no person can be asked before the arm at {self._address} moves. At the command line: "
            "run this in a terminal, or add --unattended. In Python: give it an operator, "
            "env.unwrapped.attend(OperatorConsole()), or let it move unasked, "
            "gym.make(..., unattended=True)"
        )

    def confirm(self, phase: ArmPhase, question: str) -> None:
        """Return when the operator agrees; at once if no person is to be asked.

        Raises:
            StoppedError: the operator stopped the arm instead, or a stop was set meanwhile.
        """
        if self.operator is not None and self.is_asked:
            self.operator.confirm(phase, question)
        self.refuse_stopped()

    def refuse_stopped(self) -> None:
        """Raise :class:`StoppedError` while a stop stands."""
        if (stop := self.stop_latch.active()) is not None:
            raise StoppedError(self._refusal(stop))

    def show(self, phase: ArmPhase, text: str = "") -> None:
        """Show the operator what the arm is doing."""
        if self.operator is not None:
            self.operator.show(phase, text)

    def check_stop(self) -> None:
        """Return if no stop is set, or once the operator has acknowledged it.

        Raises:
            StoppedError: a stop is set, and no person can be asked.
        """
        stop = self.stop_latch.active()
        if stop is None:
            return
        if self.unattended and stop.abort in RECOVERS_ALONE:
            _log.warning("continuing after %s", stop)
        elif self.operator is not None and self.is_asked:
            self.operator.confirm(
                ArmPhase.STOPPED, f"The arm was stopped ({stop}). Look at it, then press Enter."
            )
        else:
            raise StoppedError(self._refusal(stop))
        self.stop_latch.acknowledge()

    def set_stop(self, abort: Abort, message: str) -> StoppedError:
        """Set a stop; return the error that says so, and how to clear it."""
        self.stop_latch.set(abort, message)
        stop = self.stop_latch.active()
        # Another program may have cleared it already.
        return StoppedError(message if stop is None else self._refusal(stop))

    def info(self, abort: Abort, message: str) -> dict[str, str]:
        """Return what ``info`` says about an abort.

        ``fault``: why the episode does not count as a result; ``stop``: why the run is
        over. Both may be empty.
        """
        fault = f"{abort}: {message}" if abort in HARDWARE_FAULTS else ""
        stop = None
        if abort is not Abort.NONE and not self._may_continue(abort):
            stop = self.stop_latch.active()
        return {"fault": fault, "stop": "" if stop is None else self._refusal(stop)}

    def _refusal(self, stop: Stop) -> str:
        first = ""
        if stop.abort is Abort.USER_STOP:
            first = "release the button of the user stop if it is still pressed, then "
        return (
            f"the arm was stopped ({stop}). Nothing moves until a person has looked: "
            f"{first}{self.stop_latch.remedy}"
        )

    def _may_continue(self, abort: Abort) -> bool:
        if abort in SAFETY_STOPS:
            return False
        if self.unattended:
            return abort in RECOVERS_ALONE
        return self.operator is not None
