"""An arm with its operator: prompts, an orderly end of a run, and live camera images."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from dzrobot.envs.franka.operator.console import OperatorConsole
from dzrobot.envs.franka.operator.key_reader import is_closed
from dzrobot.envs.franka.operator.operator import Operator, OperatorVerdict
from dzrobot.envs.franka.operator.preview import Preview
from dzrobot.errors import RobotError, StoppedError
from dzrobot.process import Terminated
from dzrobot.recording.media import read_png
from dzrobot.rollout.environment import AttendedArm, OperatorOptions, facts_of

LEAVE_S = 5.0
"""How long a run may take to hold, stop and close the arm before it can be ended by force."""

SCENE = "scene"
"""Name of the photo on the page of the cameras."""

OPERATOR_STOP = "operator_stop"
"""``info["abort"]`` of an episode that the operator stopped."""

AFTER_STOP = (
    "You stopped this trial. Does it count: as a failure (b), as a success (c), or is it run again "
    "(z)?"
)
"""What is asked then, where the answer decides on a score."""

ENDED = "ended by key"
"""How an episode ended that its driver ended, with no word on whether it succeeded."""

_ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class Attended:
    """A run on an arm with its operator; use :func:`attended`."""

    attention: OperatorOptions
    console: OperatorConsole | None
    """None without a terminal."""

    _preview: Preview | None = None
    _arms: list[AttendedArm] = field(default_factory=list)
    _scene: Mapping[str, NDArray[np.uint8]] = field(default_factory=dict)

    def attend(self, env: Any) -> AttendedArm | None:
        """Say to an arm who looks after it, and return it; None: ``env`` drives none.

        Raises:
            ConfigError: the arm is a real one, and no person can be asked before it moves.
        """
        if not facts_of(env).moves_an_arm:
            return None
        arm: AttendedArm = env.unwrapped
        arm.attend(self.console, unattended=self.attention.unattended)
        return arm

    def opened(self, env: Any) -> Any:
        """Return ``env`` with the operator beside it; call it before the first reset.

        Raises:
            ConfigError: as :meth:`attend`.
        """
        arm = self.attend(env)
        if arm is None:
            return env
        self._arms = [arm]
        self._show_images(arm)
        if self.console is None:
            return env
        asks = not self.attention.unattended
        return Judged(
            env, self.console, asks=asks, asks_reason=self.attention.asks_reason,
            asks_after_stop=self.attention.asks_after_stop,
        )  # fmt: skip

    def progress(self, text: str) -> None:
        """Show how far the run is."""
        if self.console is not None:
            self.console.progress(text)

    def warn(self, text: str) -> None:
        """Show a warning on the operator's screen, where there is one."""
        if self.console is not None:
            self.console.note_event("warning", text=text)

    def show_scene(self, photo: Path | None) -> None:
        """Show the photo by which the scene is to be set; None: it is set anew.

        Args:
            photo: A PNG file. The page of the cameras shows it too, as ``scene``; black if None.

        Raises:
            DatasetError: it is not an image.
        """
        blank = np.zeros((64, 64, 3), np.uint8)
        self._scene = {SCENE: blank if photo is None else read_png(photo)}
        if photo is not None and self.console is not None:
            self.console.note_event("scene", set_it_as_in=str(photo))

    def rest(self) -> None:
        """Stop the arm at once, from any thread."""
        for arm in self._arms:
            # One that does not answer has stopped by itself, or its driver's end stops it.
            with contextlib.suppress(RobotError):
                arm.rest()

    def close(self) -> None:
        """Stop showing things; environments are closed by those who opened them."""
        if self._preview is not None:
            self._preview.close()
        if self.console is not None:
            self.console.close()

    def _show_images(self, arm: AttendedArm) -> None:
        if self.attention.preview is None:
            return
        if self._preview is None:
            self._preview = Preview(self.attention.preview, arm.images)
        self._preview.images = lambda: {**arm.images(), **self._scene}
        line = f"images: {self._preview.url}"
        if self.console is not None:
            self.console.footer = line
            self.console.note_event("images", url=self._preview.url)
        else:
            sys.stderr.write(f"{line}\n")


@contextlib.contextmanager
def attended(attention: OperatorOptions) -> Iterator[Attended]:
    """Involve the operator while the block runs.

    Ctrl-C, SIGTERM and SIGHUP end the block by KeyboardInterrupt; meanwhile the arm is stopped by
    another thread, so that it rests even while this one is busy.

    Raises:
        ConfigError: the preview's port cannot be had.
        Terminated: the block was ended by SIGTERM.
        StoppedError: the operator's terminal was closed, which is a stop.
    """
    if attention.log is not None:
        attention.log.parent.mkdir(parents=True, exist_ok=True)
    seen = sys.stdin.isatty() and sys.stdout.isatty()
    console = OperatorConsole(attention.title, log=attention.log) if seen else None
    people = Attended(attention, console)
    try:
        with leaving(people.rest):
            yield people
    except KeyboardInterrupt as ended:
        if ended.args == (signal.SIGTERM.name,):
            raise Terminated from ended
        if seen and is_closed(sys.stdin.fileno()):
            raise StoppedError("the terminal was closed, which stopped the arm") from ended
        raise
    finally:
        people.close()


@contextlib.contextmanager
def leaving(rest: Callable[[], None]) -> Iterator[None]:
    """Turn the signals that end a program into one KeyboardInterrupt; call ``rest`` first.

    What follows within :data:`LEAVE_S` changes nothing; a signal after that ends the program at
    once, as it would have without us.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    first_s: list[float] = []

    def leave(number: int, _: FrameType | None) -> None:
        if not first_s:
            first_s.append(time.monotonic())
            raise KeyboardInterrupt(signal.Signals(number).name)
        if time.monotonic() - first_s[0] > LEAVE_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    before = {number: signal.signal(number, leave) for number in _ENDINGS}
    listener = _Listener(rest)
    try:
        yield
    finally:
        listener.close()
        for number, handler in before.items():
            signal.signal(number, handler)


class _Listener:
    """Hears signals on a thread of its own: a handler waits until the main thread is free."""

    def __init__(self, rest: Callable[[], None]) -> None:
        self._rest = rest
        self._out, self._in = os.pipe()
        os.set_blocking(self._in, False)
        self._before = signal.set_wakeup_fd(self._in, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._run, name="signals", daemon=True)
        self._thread.start()

    def close(self) -> None:
        signal.set_wakeup_fd(self._before)
        os.close(self._in)
        self._thread.join(LEAVE_S)
        os.close(self._out)

    def _run(self) -> None:
        while heard := os.read(self._out, 1):
            if heard[0] in _ENDINGS:
                self._rest()
                return


class EndedByDriver(gym.Wrapper[Any, Any, Any, Any]):
    """Ends an episode when whoever drives it wants that; whether it succeeded stays open.

    Args:
        env: Where they drive.
        wants_end: Asked after every step; true truncates the episode.
    """

    def __init__(self, env: gym.Env[Any, Any], wants_end: Callable[[], bool]) -> None:
        super().__init__(env)
        self._wants_end = wants_end

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Carry out ``action``; end the episode if that is wanted."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        if self._wants_end() and not (terminated or truncated):
            truncated, info = True, info | {"reset_reason": ENDED}
        return observation, reward, terminated, truncated, info


class Judged(gym.Wrapper[Any, Any, Any, Any]):
    """Asks for the verdict on an episode that ended without one; around the time limit.

    One that its driver ended is judged whatever the rule. What the operator noted since the episode
    before is in ``info["robot"]["notes"]``, why one failed in ``info["robot"]["reason"]``.

    Args:
        env: An arm whose rule is a person.
        operator: That person.
        asks: Whether they are asked; else such an episode is not a success.
        asks_reason: Whether they are asked why an episode failed that they call a failure.
        asks_after_stop: Whether they are asked if an episode counts that they stopped; one that is
            not counted is run again.
    """

    def __init__(
        self,
        env: gym.Env[Any, Any],
        operator: Operator,
        *,
        asks: bool,
        asks_reason: bool = False,
        asks_after_stop: bool = False,
    ) -> None:
        super().__init__(env)
        self._operator = operator
        self._asks = asks
        self._asks_reason = asks and asks_reason
        self._asks_after_stop = asks and asks_after_stop

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Carry out ``action``; at the end of an episode, ask."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        arm: Any = self.env.unwrapped
        if not (terminated or truncated):
            return observation, reward, terminated, truncated, info
        by_driver = info["reset_reason"] == ENDED and self._asks
        unsaid = not info["reset_reason"] and arm.judged_by_operator
        if truncated and not info["abort"] and (by_driver or unsaid):
            arm.rest()
            info = arm.reported(info, self._judged(arm))
            reward = float(info["is_success"])
        if self._asks_after_stop and info["abort"] == OPERATOR_STOP:
            info = arm.reported(info, self._judged_after_stop())
            reward = float(info["is_success"])
        if self._asks_reason and info["reset_reason"] == OperatorVerdict.FAILURE:
            arm.rest()
            info = _with_fact(info, "reason", self._operator.reason())
        if notes := self._operator.notes():
            info = _with_fact(info, "notes", "; ".join(notes))
        return observation, reward, terminated, truncated, info

    def _judged(self, arm: AttendedArm) -> OperatorVerdict:
        if not self._asks:
            return OperatorVerdict.FAILURE
        try:
            return self._operator.judge()
        except StoppedError as error:
            raise arm.operator_stop() from error

    def _judged_after_stop(self) -> OperatorVerdict:
        """Return what a stopped episode counts as; without an answer it is run again."""
        try:
            return self._operator.judge(AFTER_STOP)
        except StoppedError:
            return OperatorVerdict.DISCARDED


def _with_fact(info: dict[str, Any], name: str, text: str) -> dict[str, Any]:
    return {**info, "robot": {**(info.get("robot") or {}), name: text}}
