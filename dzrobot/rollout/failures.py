"""Foreign code, such as simulators, policies and their factories, may raise anything."""

import errno
import traceback
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from dzrobot.errors import DzrobotError, StoppedError

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""A disk that is full is no fault of an episode: the run ends, and can be resumed."""


@dataclass(frozen=True)
class EpisodeError:
    """An episode ended in an exception."""

    error: str
    details: str
    no_room: bool = False
    """Whether the disk is the cause, not the episode."""


class ErrorCapture:
    """Keeps what foreign code raises in its block: simulators and policies may raise anything."""

    def __init__(self) -> None:
        self.failure: EpisodeError | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        # A stop is no accident of one episode: it ends the run.
        if not isinstance(error, Exception) or isinstance(error, StoppedError):
            return False
        text = str(error) if isinstance(error, DzrobotError) else f"{type(error).__name__}: {error}"
        no_room = isinstance(error, OSError) and error.errno in _NO_ROOM
        self.failure = EpisodeError(text, "".join(traceback.format_exception(error)), no_room)
        return True
