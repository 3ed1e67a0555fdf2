"""Looks after the arm while no action comes, and listens to the operator all the time."""

import logging
import threading
from collections.abc import Callable

from dzrobot.envs.franka.operator.operator import Operator
from dzrobot.errors import DzrobotError

_log = logging.getLogger(__name__)

PERIOD_S = 0.05


class Watchdog:
    """Checks twenty times a second that actions come, and whether the operator wants to stop.

    Args:
        check_silence: Holds or stops the arm when no action has come for long.
        operator: Whose wish to stop is a stop. None: nobody is there.
        stop: Stops the arm for the operator.
    """

    def __init__(
        self,
        check_silence: Callable[[], object],
        operator: Operator | None,
        stop: Callable[[], object],
    ) -> None:
        self._check_silence = check_silence
        self._operator = operator
        self._stop = stop
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="franka-watchdog", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop looking."""
        self._stopping.set()
        self._thread.join(5.0)

    def _run(self) -> None:
        while not self._stopping.wait(PERIOD_S):
            try:
                if self._operator is not None and self._operator.wants_stop():
                    self._stop()
                self._check_silence()
            except DzrobotError as error:
                # The next step meets the same error, with someone there to read it.
                _log.warning("the watchdog could not hold the arm: %s", str(error))
