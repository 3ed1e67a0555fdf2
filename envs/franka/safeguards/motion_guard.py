"""When the arm's driver ends a motion by itself: at a stop, or when the program falls silent."""

from pathlib import Path

from dzrobot.envs.franka.franka_config import LimitsConfig
from dzrobot.envs.franka.safeguards.limits import CommandTimeout
from dzrobot.envs.franka.safeguards.stop_file import stop_stands
from dzrobot.errors import StoppedError


class MotionGuard:
    """Watches the stop, and how long the program has been silent; all times are the arm's.

    Args:
        limits: How long the program may be silent.
        stop: File of the arm's stop. None: there is none.
    """

    def __init__(self, limits: LimitsConfig, stop: Path | None) -> None:
        self._limits = limits
        self._stop = stop
        self.stopped = False
        """Whether a stop has stood since the motion began."""

        self._heard_s = 0.0
        self._done = CommandTimeout.NONE

    def begin(self, now_s: float) -> None:
        """Begin a motion.

        Raises:
            StoppedError: a stop stands.
        """
        self.stopped = False
        self.check()
        self.hear(now_s)

    def hear(self, now_s: float) -> None:
        """Note that the program has spoken."""
        self._heard_s = now_s
        if not self.stopped:
            self._done = CommandTimeout.NONE

    def check(self) -> None:
        """Raise :class:`StoppedError` if a stop stands, or stood since the motion began."""
        if self.stopped or self._stands():
            raise StoppedError("the arm was stopped; its driver holds it")

    def due(self, now_s: float) -> CommandTimeout:
        """Return what is to be done now; each thing is asked for once."""
        silent_s = now_s - self._heard_s
        if silent_s >= self._limits.stop_after_s:
            due = CommandTimeout.STOP
        elif self._stands():
            # It lasts until the next motion, though somebody else may acknowledge it before the
            # program has seen it.
            self.stopped, due = True, CommandTimeout.HOLD
        elif silent_s >= self._limits.deadman_s:
            due = CommandTimeout.HOLD
        else:
            due = CommandTimeout.NONE
        if due in (CommandTimeout.NONE, self._done):
            return CommandTimeout.NONE
        self._done = due
        return due

    def _stands(self) -> bool:
        return self._stop is not None and stop_stands(self._stop)
