"""Normalization statistics, read from a checkpoint's or dataset's ``metadata.json``."""

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dzrobot.documents import read_json, shorten, validated
from dzrobot.embodiments.spec import Embodiment, Normalization, Part
from dzrobot.errors import StatisticsError, preview, suggest

RELATIVE_KEYS = "relative_action_keys"
"""Optional field beside ``statistics``: names of the action parts measured from the state."""

ACTION_HORIZON = "action_horizon"
"""Optional field beside ``statistics``: block length over which relative actions were measured."""

BEYOND = 0.1
"""Share of the statistics' width beyond which a state number counts as outside."""

_FIELDS: Mapping[Normalization, tuple[str, str]] = {
    "q99": ("q01", "q99"),
    "min_max": ("min", "max"),
}


Row = tuple[float, ...]
"""One number for each of a part's."""


@dataclass(frozen=True)
class Bounds:
    """What maps to -1 and to 1, per number; double precision, in physical units.

    Of relative actions that were measured step by step, one row for each step of a block.
    """

    low: Row | tuple[Row, ...]
    high: Row | tuple[Row, ...]


@dataclass(frozen=True)
class Statistics:
    """Bounds of every state and action part of one embodiment."""

    tag: str
    bounds: Mapping[str, Bounds]
    """By modality key."""

    fingerprint: str
    """Hex digest of everything that changes a normalized number: checkpoints carry it."""

    @property
    def per_step(self) -> bool:
        """Return whether each step of a block of relative actions has bounds of its own."""
        return any(isinstance(bounds.low[0], tuple) for bounds in self.bounds.values())

    @classmethod
    def from_metadata(
        cls, source: str | Path | Mapping[str, Any], embodiment: Embodiment
    ) -> "Statistics":
        """Return the statistics of ``embodiment``.

        Args:
            source: A ``metadata.json`` or its content, ``{tag: {"statistics": {"state" | "action":
                {name: {"q01": [...], "q99": [...]}}}}}`` (docs/model.md, section 1.1). Parts that
                the embodiment does not have are left out. A relative action may have one list for
                each step of a block in place of one of numbers.
            embodiment: Says which parts are needed, their sizes, how normalized, relative or not.

        Raises:
            StatisticsError: unreadable, or tag, part, field or number missing, or sizes differ, or
                the file records other relative parts than the embodiment has.
        """
        content, where = _content(source)
        entry = _entry(content, where, embodiment.tag)
        _check_relative(entry, where, embodiment)
        horizon = embodiment.timing.action_horizon
        bounds = {
            part.key: _bounds(entry, f"{where}, {embodiment.tag}", part, horizon)
            for part in (*embodiment.state, *embodiment.action)
        }
        return cls(embodiment.tag, bounds, _fingerprint(embodiment, bounds))

    def beyond(self, other: "Statistics", share: float) -> dict[str, list[int]]:
        """Return which numbers of other data reach beyond these bounds, by modality key.

        Args:
            other: Of the same embodiment, measured in the same way.
            share: Of the width of a number's bounds by which its others may reach beyond.
        """
        found = {}
        for key, own in self.bounds.items():
            low, high = np.array(own.low), np.array(own.high)
            room = share * (high - low)
            theirs = other.bounds[key]
            outside = (np.array(theirs.low) < low - room) | (np.array(theirs.high) > high + room)
            # Steps of a block, where they have bounds of their own, are one number.
            numbers = np.flatnonzero(outside.reshape(-1, outside.shape[-1]).any(axis=0))
            if len(numbers):
                found[key] = numbers.tolist()
        return found


def _content(source: str | Path | Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    if isinstance(source, Mapping):
        return source, "metadata"
    path = Path(source)
    if not path.exists():
        raise StatisticsError(
            f"no statistics at {path}. Give the metadata.json of the checkpoint, or make one for a "
            "dataset with `dzrobot stats`."
        )
    return read_json(path, dict[str, Any], StatisticsError), str(path)


def _entry(content: Mapping[str, Any], where: str, tag: str) -> Mapping[str, Any]:
    if tag not in content:
        raise StatisticsError(
            f"{where} holds no statistics for the embodiment {tag!r}.{suggest(tag, content)} It "
            f"holds: {preview(content)}. Use the embodiment the statistics were made for, or make "
            "new ones with `dzrobot stats`."
        )
    return _mapping(content[tag], f"{where}, {tag}")


def _check_relative(entry: Mapping[str, Any], where: str, embodiment: Embodiment) -> None:
    if RELATIVE_KEYS not in entry or not embodiment.action:
        return
    wanted = sorted(part.name for part in embodiment.action if part.reference is not None)
    keys = validated(
        entry[RELATIVE_KEYS], list[str], f"{where}, {embodiment.tag}, {RELATIVE_KEYS}",
        StatisticsError,
    )  # fmt: skip
    if sorted(keys) != wanted:
        raise StatisticsError(
            f"{where} was made with relative actions for {preview(keys)}, the "
            f"embodiment {embodiment.tag!r} has {preview(wanted)}: their ranges differ widely. "
            "Make new statistics with `dzrobot stats`, or set Part.reference as they were made."
        )
    horizon = entry.get(ACTION_HORIZON)
    if wanted and horizon is not None and horizon != embodiment.timing.action_horizon:
        raise StatisticsError(
            f"{where} measured relative actions over {horizon} steps, {embodiment.tag!r} has an "
            f"action horizon of {embodiment.timing.action_horizon}: make new ones with `dzrobot "
            f"stats --action-horizon {embodiment.timing.action_horizon}`."
        )


def _bounds(entry: Mapping[str, Any], where: str, part: Part, horizon: int) -> Bounds:
    at = entry
    for name in ("statistics", part.key.partition(".")[0], part.name):
        if name not in at:
            raise StatisticsError(
                f"{where} has no {name!r}, needed for {part.key}.{suggest(name, at)} "
                f"It has: {preview(at)}."
            )
        where = f"{where}, {name}"
        at = _mapping(at[name], where)
    low, high = (_table(at, where, field, part, horizon) for field in _FIELDS[part.normalization])
    if len(low) != len(high):
        raise StatisticsError(f"{where}: one bound is given step by step, the other is not")
    for least_row, most_row in zip(low, high, strict=True):
        for index, (least, most) in enumerate(zip(least_row, most_row, strict=True)):
            if least > most:
                raise StatisticsError(
                    f"{where}: lower bound {least} above upper {most} at number {index}"
                )
    return Bounds(low[0], high[0]) if len(low) == 1 else Bounds(low, high)


def _table(
    at: Mapping[str, Any], where: str, field: str, part: Part, horizon: int
) -> tuple[Row, ...]:
    """Return a row for every step of a block, or one for all of them."""
    if field not in at:
        raise StatisticsError(
            f"{where} has no {field!r}, which the normalization {part.normalization!r} of "
            f"{part.key} needs; it has {preview(at)}."
        )
    values = at[field]
    if not isinstance(values, list | tuple) or not any(isinstance(v, list | tuple) for v in values):
        return (_row(values, where, field, part),)
    if part.reference is None or len(values) != horizon:
        raise StatisticsError(
            f"{where}, {field} has {len(values)} lists of numbers: one for each step of a block is "
            f"for actions measured from the state, {horizon} of them; {part.key} is "
            + ("absolute" if part.reference is None else "such a one")
        )
    return tuple(_row(row, where, f"{field}, step {step}", part) for step, row in enumerate(values))


def _row(values: object, where: str, field: str, part: Part) -> Row:
    if not isinstance(values, list | tuple) or not all(type(v) in (int, float) for v in values):
        raise StatisticsError(f"{where}, {field} must be a list of numbers, got {shorten(values)}")
    if len(values) != part.dim:
        raise StatisticsError(
            f"{where}, {field} has {len(values)} numbers, {part.key} of the embodiment has "
            f"{part.dim}: use the embodiment the statistics were made for, or dataclasses.replace "
            "the part's dim."
        )
    if not all(abs(value) <= sys.float_info.max for value in values):
        raise StatisticsError(
            f"{where}, {field} holds a number that is not finite: {shorten(values)}"
        )
    return tuple(float(value) for value in values)


def _fingerprint(embodiment: Embodiment, bounds: Mapping[str, Bounds]) -> str:
    parts = [*embodiment.state, *embodiment.action]
    described = [
        [part.key, part.normalization, part.reference, bounds[part.key].low, bounds[part.key].high]
        for part in parts
    ]
    horizon = embodiment.timing.action_horizon if embodiment.relative_keys else None
    text = json.dumps([embodiment.tag, horizon, described], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _mapping(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise StatisticsError(f"{where} must be a JSON object, got {type(value).__name__}")
    return value
