"""How long a policy takes to answer, on a clock that follows the control steps of a simulator."""

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dzrobot.documents import read_bytes, shorten
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
        """Return the steps that 95 of 100 calls do not exceed; None: nobody knows beforehand."""
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
            f"latency {shorten(text)}: {shorten(word)} is no time between 0 and {_LONGEST_S:g} "
            f"seconds; write {WAYS}"
        )
    return float(word)


def _refusal(text: str) -> ConfigError:
    return ConfigError(f"latency {shorten(text)} is none: write {WAYS}")
