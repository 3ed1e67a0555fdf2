"""The errors a user is meant to read.

Each message answers three questions: what was given, what is allowed, what to do. The command line
prints the message alone and exits with code 2.
"""

import difflib
import errno
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar

T = TypeVar("T")


class DzrobotError(Exception):
    """Base of every error that is the user's to fix.

    Its message is fit for a terminal: control characters in it, which may come from others' files
    or servers, are escaped, whoever wrote the message.
    """

    def __str__(self) -> str:
        """Return the message, in lines without control characters."""
        return "\n".join(printable(line, len(line)) for line in super().__str__().split("\n"))


class UnknownNameError(DzrobotError):
    """A name that is in no table: an environment, embodiment, recipe, suite, key."""


class ConfigError(DzrobotError):
    """A configuration that cannot be run; lists every fault at once."""


class ModalityError(DzrobotError):
    """An observation, window or chunk that does not fit the embodiment."""


class InvalidActionError(ModalityError):
    """An action that no robot can carry out: another shape, or a number that is not finite."""


class StatisticsError(DzrobotError):
    """Normalization statistics that are missing, stale or of the wrong size."""


class CheckpointError(DzrobotError):
    """A checkpoint that is incomplete, foreign, damaged or does not fit what was asked."""


class SessionError(DzrobotError):
    """A session of a policy that is not open, or too many of them."""


class SessionLostError(SessionError):
    """A session that ended before its episode did: what it remembered is gone."""


class ServerError(DzrobotError):
    """A policy server that cannot be reached, refuses, or answers what is no answer."""


class DatasetError(DzrobotError):
    """A dataset that cannot be read as asked."""


class SimulatorError(DzrobotError):
    """A simulator, its assets or its rendering that is not ready."""


class SetupError(SimulatorError):
    """What a simulator needs of the machine is not there: every episode would fail alike."""


class RobotError(DzrobotError):
    """The robot, its gripper or a camera refused, failed or went away."""


class ArmBusyError(RobotError):
    """Another program drives the arm: no episode of this run can begin."""


class SafetyError(DzrobotError):
    """A command that must not reach the robot."""


class StoppedError(SafetyError):
    """The arm was stopped: nothing moves until a person has looked and said so."""


class ProtocolError(DzrobotError):
    """Results, messages or files of unlike protocols that must not be mixed."""


class MissingDependencyError(DzrobotError, ImportError):
    """An optional package that the asked-for feature needs; names the extra to install."""


_MOST = 30
"""Known names that an error lists."""


def find(table: Mapping[str, T], kind: str, name: str) -> T:
    """Return ``table[name]``; otherwise raise :class:`UnknownNameError` with the nearest name."""
    if name in table:
        return table[name]
    raise UnknownNameError(
        f"unknown {kind} {name!r}.{suggest(name, table)} Known: {preview(table, _MOST)}."
    )


def counted(number: int, thing: str) -> str:
    """Return a number with its noun: ``1 episode``, ``2 episodes``."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def in_units(size: int) -> str:
    """Return a number of bytes as people read it: ``512 B``, ``1.5 KiB``, ``24 MiB``."""
    amount, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if amount < 1000:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.0f} {unit}" if amount >= 100 else f"{amount:.3g} {unit}"


def suggest(name: str, known: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?`` for the nearest known name, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def refuse_unknown(what: str, given: Iterable[str], known: Collection[str]) -> None:
    """Check that all ``given`` names of arguments are ``known``.

    Raises:
        UnknownNameError: One is not; names the nearest.
    """
    for name in given:
        if name not in known:
            raise UnknownNameError(
                f"{what} takes no argument {name!r}.{suggest(name, known)} Known: "
                f"{', '.join(known) or 'none'}."
            )


def preview(names: Iterable[object], limit: int = 4) -> str:
    """Return the first names in order, and how many more there are."""
    ordered = sorted(printable(str(name), 200) for name in names)
    shown = ", ".join(ordered[:limit]) or "none"
    return shown if len(ordered) <= limit else f"{shown} and {len(ordered) - limit} more"


def printable(text: str, limit: int = 400) -> str:
    """Return ``text`` as one line of about ``limit`` characters at most, for a terminal.

    Control characters and spaces that look like another are escaped: text from outside must not
    move the cursor or set colors.
    """
    cut = text if len(text) <= limit else f"{text[: limit - 3]}..."
    if cut.isprintable():
        return cut
    return "".join(_escaped(letter) for letter in cut)


def _escaped(letter: str) -> str:
    # Not at the top: every command imports this module.
    import unicodedata

    kind = unicodedata.category(letter)
    is_escaped = letter != " " and kind.startswith(("C", "Z"))
    return letter.encode("unicode_escape").decode("ascii") if is_escaped else letter


NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""A disk that is full is not a fault of an episode: the run ends, and can be resumed."""


@dataclass(frozen=True)
class EpisodeError:
    """An episode ended in an exception."""

    error: str
    details: str
    no_room: bool = False
    """Whether the disk is the cause, not the episode."""

    place: str = ""
    """File or folder that the disk refused; empty where the system did not say."""

    of_setup: bool = False
    """Whether the machine or the installation is the cause, which no other episode would escape."""


def ends_the_run(error: BaseException) -> bool:
    """Return whether the arm was stopped, or another program drives it."""
    return isinstance(error, StoppedError | ArmBusyError)


def as_sentence(error: object) -> str:
    """Return the text of ``error`` with a full stop, for more to follow; some texts end in one."""
    return f"{str(error).strip().rstrip('.')}."


class ErrorCapture:
    """Keeps what foreign code raises in its block: simulators and policies may raise anything.

    ``sys.exit`` is an error there like any other: a command's exit code is its own.

    Args:
        passes: Errors that are raised all the same. A stop, or an arm that another program drives,
            does not concern one episode alone: it ends the run.
    """

    def __init__(self, passes: Callable[[BaseException], bool] = ends_the_run) -> None:
        self.failure: EpisodeError | None = None
        self._passes = passes

    @property
    def raised(self) -> EpisodeError:
        """Return what was raised, after a block that returns unless something is."""
        if self.failure is None:
            raise RuntimeError("nothing was raised: ask for what is kept in `failure`")
        return self.failure

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception | SystemExit) or self._passes(error):
            return False
        text = str(error) if isinstance(error, DzrobotError) else f"{type(error).__name__}: {error}"
        no_room = isinstance(error, OSError) and error.errno in NO_ROOM
        place = printable(str(error.filename or "")) if isinstance(error, OSError) else ""
        of_setup = isinstance(error, SetupError | MissingDependencyError)
        details = "".join(traceback.format_exception(error))
        self.failure = EpisodeError(text, details, no_room, place, of_setup)
        return True
