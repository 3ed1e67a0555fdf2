"""Who looks after the arm: the operator, the stop that stands, what may continue without them."""

import logging

from dzrobot.envs.franka.config import FrankaConfig
from dzrobot.envs.franka.operator.operator import ArmPhase, Operator
from dzrobot.envs.franka.safeguards.limits import (
    HARDWARE_FAULTS,
    RECOVERS_ALONE,
    SAFETY_STOPS,
    Abort,
)
from dzrobot.envs.franka.safeguards.stop_file import Stop, Stops
from dzrobot.errors import StoppedError

_log = logging.getLogger(__name__)


class Attendance:
    """Whose word an arm waits for.

    Args:
        config: Whose arm it is.
        operator: The person beside the arm. None: nobody can be asked.
    """

    def __init__(self, config: FrankaConfig, operator: Operator | None) -> None:
        self.operator = operator
        self.unattended = False
        """Whether nobody is asked, and a lost frame or a slow policy ends an episode only."""

        self.stops = Stops(config.address, config.lock_folder)

    def admit(self) -> None:
        """Return when no stop stands: there was none, or a person has acknowledged it.

        Raises:
            StoppedError: one stands, and nobody can be asked.
        """
        stop = self.stops.standing()
        if stop is None:
            return
        if self.unattended and stop.abort in RECOVERS_ALONE:
            _log.warning("continuing after %s", stop)
        elif self.operator is not None and self.asks:
            self.operator.confirm(
                ArmPhase.STOPPED, f"The arm was stopped ({stop}). Look at it, then press Enter."
            )
        else:
            raise StoppedError(self.refusal(stop))
        self.stops.acknowledge()

    def refusal(self, stop: Stop) -> str:
        """Return why nothing moves, and what ends that."""
        return (
            f"the arm was stopped ({stop}). Nothing moves until a person has looked: "
            f"{self.stops.remedy}"
        )

    def stopped(self, abort: Abort, message: str) -> StoppedError:
        """Let a stop stand; return the error that says so, and what ends it."""
        self.stops.put(abort, message)
        standing = self.stops.standing()
        # Somebody else may have ended it already.
        return StoppedError(message if standing is None else self.refusal(standing))

    @property
    def asks(self) -> bool:
        """Whether somebody is asked."""
        return self.operator is not None and not self.unattended

    def ask(self, phase: ArmPhase, question: str) -> None:
        """Return when the operator agrees; at once where nobody is to be asked.

        Raises:
            StoppedError: they stopped the arm instead.
        """
        if self.operator is not None and self.asks:
            self.operator.confirm(phase, question)

    def show(self, phase: ArmPhase, text: str = "") -> None:
        """Tell the operator what the arm is doing."""
        if self.operator is not None:
            self.operator.show(phase, text)

    def about(self, abort: Abort, message: str) -> dict[str, str]:
        """Return what ``info`` says of an abort.

        ``fault``: why the episode is no result; ``stop``: why the run is over. Both may be empty.
        """
        fault = f"{abort}: {message}" if abort in HARDWARE_FAULTS else ""
        stop = ""
        if abort is not Abort.NONE and not self._may_go_on(abort):
            standing = self.stops.standing()
            stop = "" if standing is None else self.refusal(standing)
        return {"fault": fault, "stop": stop}

    def _may_go_on(self, abort: Abort) -> bool:
        if abort in SAFETY_STOPS:
            return False
        if self.unattended:
            return abort in RECOVERS_ALONE
        return self.operator is not None
