"""How a robot executes plans that take time to compute: modes, latencies, and what is feasible.

Latency follows the control steps of a simulator, or real time on an arm.
"""

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from dzrobot.declared import Flag
from dzrobot.documents import read_bytes, shorten
from dzrobot.embodiments.action_conventions import check_holds
from dzrobot.embodiments.spec import Embodiment
from dzrobot.errors import ConfigError

Kind = Literal["zero", "seconds", "steps", "lognormal", "file", "measured"]

WAYS = "zero, seconds such as 0.25, steps:N, lognormal:MEDIAN,P95, file:CSV, or measured"

_LONGEST_S = 600.0
_MOST_STEPS = 10_000
_Z95 = 1.6448536269514722
"""Standard normal deviate of a 95th percentile."""


@dataclass(frozen=True, kw_only=True)
class Latency:
    """A rule for the time from a request to its answer; make one with :func:`parse_latency`."""

    text: str
    """As it was written."""

    kind: Kind
    values: tuple[float, ...] = ()
    """Seconds; the number of steps; median and 95th percentile in seconds; or the file's."""

    def card(self) -> dict[str, Any]:
        """Return what a result depends on of it."""
        if self.kind != "file":
            return {"latency": self.text}
        digest = hashlib.sha256(np.asarray(self.values, "<f8").tobytes()).hexdigest()
        return {"latency": "file", "latency_values": len(self.values), "latency_sha256": digest}

    def seconds(self, key: Sequence[object], hz: float, computed_s: float) -> float:
        """Return the time that one call takes.

        Args:
            key: Of this call: seed, suite, task, episode and number of the plan. Equal keys draw
                equal times, so that runs can be compared call by call.
            hz: Control steps per second.
            computed_s: What it took to compute.
        """
        match self.kind:
            case "zero":
                return 0.0
            case "seconds":
                return self.values[0]
            case "steps":
                return self.values[0] / hz
            case "measured":
                return computed_s
        digest = hashlib.sha256("/".join(map(str, ("latency", *key))).encode()).digest()
        draws = np.random.default_rng(int.from_bytes(digest[:8], "little"))
        if self.kind == "file":
            return self.values[draws.integers(len(self.values))]
        median, p95 = self.values
        return median * math.exp(draws.standard_normal() * math.log(p95 / median) / _Z95)

    def known_steps(self, hz: float) -> int | None:
        """Return the steps that every call takes, None where calls differ."""
        if self.kind not in ("zero", "seconds", "steps"):
            return None
        return steps_of(self.seconds((), hz, 0.0), hz)

    def usual_steps(self, hz: float) -> int | None:
        """Return the steps that 95 of 100 calls do not exceed; None: it is not known beforehand."""
        match self.kind:
            case "measured":
                return None
            case "lognormal":
                return steps_of(self.values[1], hz)
            case "file":
                return steps_of(float(np.percentile(self.values, 95)), hz)
        return self.known_steps(hz)


ZERO = Latency(text="zero", kind="zero")


def steps_of(seconds: float, hz: float) -> int:
    """Return after how many control steps an answer is there that takes ``seconds``."""
    # A quarter of a second at 20 Hz is five steps, whatever the last bit of the product says.
    return math.ceil(seconds * hz - 1e-9)


def parse_latency(text: str) -> Latency:
    """Return the latency that ``text`` says.

    Raises:
        ConfigError: it says none, or its file cannot be read.
    """
    if text in ("zero", "measured"):
        return Latency(text=text, kind="zero" if text == "zero" else "measured")
    kind, colon, rest = text.partition(":")
    if not colon:
        return Latency(text=text, kind="seconds", values=(_seconds(text, text),))
    if kind == "steps" and re.fullmatch(r"[0-9]{1,5}", rest) and int(rest) <= _MOST_STEPS:
        return Latency(text=text, kind="steps", values=(float(rest),))
    if kind == "lognormal" and rest.count(",") == 1:
        median, p95 = (_seconds(number, text) for number in rest.split(","))
        if not 0 < median <= p95:
            raise ConfigError(f"latency {text!r}: the median lies above 0 and up to the P95")
        return Latency(text=text, kind="lognormal", values=(median, p95))
    if kind == "file" and rest:
        return Latency(text=text, kind="file", values=_read(Path(rest)))
    raise _refusal(text)


def _read(path: Path) -> tuple[float, ...]:
    """Return the seconds in a file of numbers, one a line or parted by commas."""
    content = read_bytes(path, ConfigError)
    try:
        words = re.split(r"[\s,]+", content.decode("ascii").strip())
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} holds more than numbers: give seconds, one a line") from error
    if words == [""]:
        raise ConfigError(f"{path} is empty: give seconds, one a line")
    return tuple(_seconds(word, f"file:{path}") for word in words)


def _seconds(word: str, text: str) -> float:
    if not re.fullmatch(r"[0-9]+(\.[0-9]*)?|\.[0-9]+", word) or float(word) > _LONGEST_S:
        raise ConfigError(
            f"latency {shorten(text)}: {shorten(word)} is not a time between 0 and {_LONGEST_S:g} "
            f"seconds; write {WAYS}"
        )
    return float(word)


def _refusal(text: str) -> ConfigError:
    return ConfigError(f"latency {shorten(text)} is none: write {WAYS}")


Execution = Literal["sync", "naive", "rtc", "trained", "ensemble"]
"""``sync``: the robot holds still until its next plan is there. The others ask for it while the
robot moves: ``naive`` jumps to it, ``rtc`` steers it to continue the running one, ``trained`` gives
the running one to a network that was trained for it, ``ensemble`` averages all plans of a step."""

DECAY = 0.01
"""Decay of the weights of an ensemble, as Zhao et al. (arXiv 2304.13705) have it."""

_SOFT = 3
"""The soft overlap is one part in so many of the horizon, where nothing else is asked for."""


@dataclass(frozen=True, kw_only=True)
class ExecutionOptions:
    """What the user wants."""

    execution: Annotated[Execution, Flag(
        "sync: hold still until the next plan is there; naive: go over to it when it is; rtc: "
        "have it continue the running one; trained: likewise, by a network trained for it; "
        "ensemble: average all plans of a step (default: time stands still)",
    )] = "sync"  # fmt: skip
    latency: Annotated[Latency | None, Flag(
        f"of a plan, in simulators, on a clock that follows their steps: {WAYS}; presets in "
        "use: 0.2 and 0.6",
        metavar="TIME", becomes=parse_latency,
    )] = None  # fmt: skip
    """Latency on a simulator's virtual clock; None: zero there, and real time on an arm."""

    first_plan: Annotated[Literal["charged", "free"], Flag(
        "whether the first plan of an episode takes time as well",
    )] = "charged"  # fmt: skip
    """Whether the first plan of an episode takes time as well."""

    strength: Annotated[float | None, Flag(
        "most that rtc multiplies its guidance by (default: the number of solver steps)",
        name="rtc-strength", metavar="BETA", least=0, most=1000,
    )] = None  # fmt: skip
    """Most that the guidance of ``rtc`` is multiplied by; None: the number of solver steps."""

    weights: Annotated[Literal["linear", "exp"], Flag(
        "how the overlap with the running plan fades", name="rtc-weights",
    )] = "linear"  # fmt: skip
    """How the overlap of ``rtc`` fades."""

    decay: Annotated[float | None, Flag(
        f"the i-th oldest plan of an ensemble weighs exp(-M i) (default: {DECAY})",
        name="ensemble-decay", metavar="M", least=-100, most=100,
    )] = None  # fmt: skip
    """Decay in an ``ensemble``: the i-th oldest plan weighs exp(-decay i), from 0; None: 0.01."""

    def __post_init__(self) -> None:
        if self.decay is not None and not -100 <= self.decay <= 100:
            raise ConfigError(f"ensemble decay {self.decay}: give -100 to 100")
        if self.decay is not None and self.execution != "ensemble":
            raise ConfigError(
                f"a decay weighs the plans of execution 'ensemble', not of {self.execution!r}"
            )
        if self.strength is not None and not 0 <= self.strength <= 1000:
            raise ConfigError(f"rtc strength {self.strength}: give 0 to 1000")
        guided = self.strength is not None or self.weights != "linear"
        if guided and self.execution != "rtc":
            raise ConfigError(
                f"strength and weights guide plans of execution 'rtc', not of {self.execution!r}"
            )


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What is done: options that were checked against a robot; see :func:`schedule`."""

    options: ExecutionOptions
    robot: Embodiment
    execute: int
    """Steps from one request to the next, s; for ``sync``, executed rows of each plan."""

    hz: float
    """Control steps per second."""

    delay: int | None
    """Steps that a plan usually takes, d; None: only known while running."""

    @property
    def horizon(self) -> int:
        """Return the rows of one plan, H."""
        return self.robot.timing.action_horizon

    def card(self) -> dict[str, Any]:
        """Return what a result depends on, as plain values."""
        options = self.options
        latency = {"latency": "real time"} if options.latency is None else options.latency.card()
        card: dict[str, Any] = {
            "execution": options.execution,
            **latency,
            "first_plan": options.first_plan,
            "execute": self.execute,
            "control_hz": self.hz,
            "delay_steps": self.delay,
            "hold": [part.hold for part in self.robot.action],
        }
        if options.execution == "ensemble":
            card["decay"] = DECAY if options.decay is None else options.decay
        if options.execution == "rtc":
            card["strength"] = "solver steps" if options.strength is None else options.strength
            card["weights"] = options.weights
        return card


def schedule(
    options: ExecutionOptions, robot: Embodiment, hz: float | None, execute: int | None
) -> Schedule:
    """Return how ``robot`` executes plans.

    Args:
        options: What is asked for.
        robot: The robot.
        hz: Control steps per second of its environment; None: the robot's.
        execute: Steps from one request to the next; None: the robot's number if it is feasible,
            else as many as leave a third of the plan to overlap softly; of an ensemble, as few as
            the latency allows.

    Raises:
        ConfigError: plans take too long for their length, or it is not known how the robot holds
            still.
    """
    rate, horizon = hz or robot.timing.control_hz, robot.timing.action_horizon
    delay = None if options.latency is None else options.latency.usual_steps(rate)
    if delay != 0:
        check_holds(robot, "while a plan is made", ", or use latency zero")
    if options.execution == "sync":
        steps = execute or robot.execute or horizon
        if steps > horizon:
            raise ConfigError(f"execute={steps}, but {horizon} actions are planned: 1 to {horizon}")
    else:
        steps = _asynchronous(options, (delay, horizon, rate), execute, robot.execute)
    return Schedule(options=options, robot=robot, execute=steps, hz=rate, delay=delay)


def _asynchronous(
    options: ExecutionOptions,
    known: tuple[int | None, int, float],
    wanted: int | None,
    usual: int | None,
) -> int:
    """Return the steps from one request to the next."""
    delay, horizon, rate = known
    if delay is None:
        if wanted is None:
            raise ConfigError(
                f"execution {options.execution!r} without knowing how long plans take: say with "
                f"--execute after how many of {horizon} steps the next plan is asked for"
            )
        if wanted >= horizon:
            raise ConfigError(
                f"execute={wanted} of {horizon} steps: execution {options.execution!r} requests "
                f"the next plan while steps are left; choose 1 to {horizon - 1}"
            )
        return wanted
    least = max(delay, 1)
    soft = max(least, horizon - delay - horizon // _SOFT)
    fitting = usual if usual is not None and least <= usual <= horizon - delay else soft
    if options.execution == "ensemble":
        # As many plans for each step as there is time to make.
        fitting = least
    steps = wanted or fitting
    if not least <= steps <= horizon - delay:
        raise ConfigError(
            f"a delay of d={delay} steps, requests every s={steps} and plans of H={horizon}: "
            f"execution {options.execution!r} needs d <= s <= H - d. At {rate:g} steps per second "
            f"plans of {horizon} steps allow a latency of {horizon / 2 / rate:.3g} s; choose "
            + (
                f"--execute {least} to {horizon - delay}"
                if least <= horizon - delay
                else "--execution sync, which holds the robot still"
            )
        )
    return steps


def forecast(taken_s: Sequence[float], plan: Schedule) -> int:
    """Return how many steps the coming answer will probably take.

    Args:
        taken_s: Seconds that the latest ones of this episode took, at most a few.
        plan: The schedule.
    """
    latency = plan.options.latency
    if latency is not None and (known := latency.known_steps(plan.hz)) is not None:
        return known
    if not taken_s:
        return plan.delay or 1
    return steps_of(float(np.percentile(taken_s, 95)), plan.hz) + 1
