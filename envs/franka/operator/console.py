"""The operator's terminal: what the arm is doing, which keys do what, and an event log."""

import contextlib
import json
import logging
import threading
import time
from collections import deque
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from dzrobot.envs.franka.operator.keyboard import Keyboard, terminal
from dzrobot.envs.franka.operator.operator import JUDGE, ArmPhase, OperatorVerdict
from dzrobot.errors import StoppedError
from dzrobot.files import open_to_append

KEYS = {
    " ": "stop",
    "c": "success",
    "b": "failure",
    "z": "discard",
    "p": "pause",
    "n": "note",
}
"""Key -> what it does, in every phase."""

KEYS_HELP = "space stops the arm; c success, b failure, z discard, p pause, n note"

_VERDICTS = {
    "c": OperatorVerdict.SUCCESS,
    "b": OperatorVerdict.FAILURE,
    "z": OperatorVerdict.DISCARDED,
}
_ENTER = "\r\n"
_NO_ANSWER = _ENTER + "yYsSfFdDrRxX"
"""Keys that a person may take for an answer to the question for a verdict."""
_ERASE = "\x7f\x08"
_POLL_S = 0.02
_SHOWN_EVENTS = 6
_COLORS = {
    ArmPhase.STOPPED: "bold white on red",
    ArmPhase.STAND_CLEAR: "bold yellow",
    ArmPhase.SCENE: "bold yellow",
    ArmPhase.MOVING: "bold red",
    ArmPhase.RUNNING: "bold green",
    ArmPhase.PAUSED: "bold cyan",
    ArmPhase.JUDGING: "bold magenta",
}


class OperatorConsole:
    """A person at the terminal: asked before anything moves, heard all the time.

    Args:
        title: What the screen is headed with.
        log: File that takes one JSON object per event, with its time. None: no log.
        keyboard: What they type on. None: the terminal.
        screen: Where it is shown. None: standard output.
    """

    def __init__(
        self,
        title: str = "dzrobot",
        *,
        log: Path | None = None,
        keyboard: Keyboard | None = None,
        screen: Console | None = None,
    ) -> None:
        self.footer = ""
        """A last line, such as where the images are."""

        self._title = title
        self._log = log
        self._keyboard = keyboard or terminal()
        self._owned = keyboard is None
        self._screen = screen or Console()
        self._live: Live | None = None
        self._phase = ArmPhase.CONNECTING
        self._text = ""
        self._progress = ""
        self._typed: str | None = None
        self._note_due = False
        self._notes: list[str] = []
        self._stops = 0
        self._left = False
        self._events: deque[str] = deque(maxlen=_SHOWN_EVENTS)
        self._warnings = _Warnings(self)
        self._writing = threading.Lock()

    def start(self, stop: Path) -> None:
        """Listen to the terminal, and draw."""
        self._keyboard.stops(stop)
        if self._owned:
            self._keyboard.check()
        if self._live is None:
            self._live = Live(
                get_renderable=self._drawn, console=self._screen, refresh_per_second=8,
                transient=True,
            )  # fmt: skip
            self._live.start()
            self._warnings.attach()
        # After the screen, as the reader of keys is a process that has to start.
        if self._owned:
            self._keyboard.open()

    def show(self, phase: ArmPhase, text: str) -> None:
        """Show what the arm is doing."""
        self._phase, self._text = phase, text
        self.note_event("phase", phase=phase.value, text=text)

    def progress(self, text: str) -> None:
        """Show how far the run is."""
        self._progress = text
        self.note_event("progress", text=text)

    def confirm(self, phase: ArmPhase, question: str) -> None:
        """Return when Enter is pressed."""
        stops = self._ask(phase, question)
        while not self._keyboard.take(_ENTER):
            self._wait(phase, stops)
        self.note_event("answer", phase=phase.value, answer="enter")

    def judge(self, question: str = JUDGE) -> OperatorVerdict:
        """Return the verdict on the episode that is over, once one is given."""
        stops = self._ask(ArmPhase.JUDGING, question)
        while not (verdict := self.verdict()):
            self._wait(ArmPhase.JUDGING, stops)
            if other := self._keyboard.take(_NO_ANSWER):
                self.note_event("ignored", key=_named(other[-1]), text="type c, b or z")
        return verdict

    def reason(self) -> str:
        """Return why an episode failed, as typed up to Enter."""
        self._ask(ArmPhase.JUDGING, "Why did it fail? Type it; Enter ends it, alone: no reason.")
        text = self._read_line(ArmPhase.JUDGING) or ""
        self.note_event("reason", text=text)
        return text.strip()

    def verdict(self) -> OperatorVerdict:
        """Return the newest verdict."""
        keys = self._keyboard.take("".join(_VERDICTS))
        if not keys:
            return OperatorVerdict.OPEN
        verdict = _VERDICTS[keys[-1]]
        self.note_event("verdict", verdict=verdict.value)
        return verdict

    def wants_stop(self) -> bool:
        """Return whether space was pressed, or the terminal was closed."""
        if self._typed is not None:
            # The arm rests while a note is typed, and a note has spaces.
            return False
        if self._keyboard.gone and not self._left:
            self._left = True
            reason = "the terminal was closed"
        elif self._keyboard.take(" "):
            reason = "space"
        else:
            return False
        self._stops += 1
        self.note_event("stop", reason=reason)
        return True

    def wants_pause(self) -> bool:
        """Return whether a pause was asked for, or a note, which is typed in one."""
        keys = self._keyboard.take("pn")
        self._note_due = self._note_due or "n" in keys
        return bool(keys)

    def notes(self) -> list[str]:
        """Return what was noted since the last call."""
        found, self._notes = self._notes, []
        return found

    def close(self) -> None:
        """Give the terminal back."""
        if self._live is not None:
            # A terminal that was closed takes no last image.
            with contextlib.suppress(OSError):
                self._live.stop()
            self._warnings.detach()
        self._live = None
        if self._owned:
            self._keyboard.close()
            # Space stops the arm by itself: the program may have ended before it looked.
            self.wants_stop()

    def note_event(self, event: str, **facts: str) -> None:
        """Write one event to the log, and show it."""
        now = datetime.now().astimezone()
        shown = ", ".join(value for value in facts.values() if value)
        self._events.append(f"{now:%H:%M:%S}  {event}: {shown}")
        if self._log is None:
            return
        line: dict[str, Any] = {
            "time": now.isoformat(timespec="milliseconds"),
            "monotonic_s": round(time.monotonic(), 3),
            "event": event,
            **facts,
        }
        with self._writing, open_to_append(self._log) as file:
            file.write(json.dumps(line) + "\n")

    def _ask(self, phase: ArmPhase, question: str) -> int:
        """Show a question; return how often the arm had been stopped before it."""
        stops = self._stops
        # What was typed before the question is no answer to it.
        self._keyboard.take(_ENTER + "".join(_VERDICTS))
        self._phase, self._text = phase, question
        self.note_event("question", phase=phase.value, text=question)
        return stops

    def _wait(self, phase: ArmPhase, stops: int) -> None:
        """Let a moment pass; take a note where one was asked for.

        Raises:
            StoppedError: space was pressed, or the terminal was closed.
        """
        if self._note_due or "n" in self._keyboard.take("pn"):
            self._note_due = False
            self._take_note(phase)
        time.sleep(_POLL_S)
        self.wants_stop()
        if self._stops > stops or self._keyboard.gone:
            raise StoppedError("the operator stopped the arm")

    def _take_note(self, phase: ArmPhase) -> None:
        text = self._read_line(phase)
        if text is not None:
            self._notes.append(text)
            self.note_event("note", text=text, phase=phase.value)

    def _read_line(self, phase: ArmPhase) -> str | None:
        """Read a line of text while the arm rests; None: the terminal was closed."""
        self._typed = ""
        # From here on a space is a space.
        self._keyboard.type_text(True)
        self.note_event("typing", phase=phase.value)
        try:
            while not self._keyboard.gone:
                keys = self._keyboard.take()
                for count, key in enumerate(keys, start=1):
                    if key in _ENTER:
                        self._keyboard.press(keys[count:])
                        return self._typed
                    self._typed = self._typed[:-1] if key in _ERASE else self._typed + key
                time.sleep(_POLL_S)
            return None
        finally:
            self._typed = None
            self._keyboard.type_text(False)

    def _drawn(self) -> RenderableType:
        style = _COLORS.get(self._phase, "bold")
        lines = [Text(f" {self._phase.value.upper()} ", style=style), Text(self._text)]
        if self._typed is not None:
            lines.append(Text(f"> {self._typed}_ (Enter ends it)", style="cyan"))
        lines += [Text(line) for line in (self._progress, "", *self._events) if line]
        lines.append(Text(KEYS_HELP, style="dim"))
        if self._log is not None:
            lines.append(Text(f"log: {self._log}", style="dim"))
        if self.footer:
            lines.append(Text(self.footer, style="dim"))
        return Panel(Group(*lines), title=self._title, title_align="left")


def _named(key: str) -> str:
    return "Enter" if key in _ENTER else key


class _Warnings(logging.Handler):
    """Takes the package's warnings to the operator's screen and log; else they would tear it."""

    def __init__(self, console: OperatorConsole) -> None:
        super().__init__(logging.WARNING)
        self._console = console
        self._logger = logging.getLogger("dzrobot")
        self._propagated = True

    def attach(self) -> None:
        self._propagated, self._logger.propagate = self._logger.propagate, False
        self._logger.addHandler(self)

    def detach(self) -> None:
        self._logger.removeHandler(self)
        self._logger.propagate = self._propagated

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._console.note_event("warning", text=record.getMessage())
        except OSError:
            self.handleError(record)
