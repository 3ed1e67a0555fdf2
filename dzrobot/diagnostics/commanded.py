"""Did an arm do what its recording commanded? Told from the recording alone; nothing moves.

What the hand did in every few rows is compared with what the actions commanded, as they are and
with one convention changed at a time. An arm follows late and cuts corners, so shares of explained
motion are compared, not places.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dzrobot.diagnostics.checkup import Finding
from dzrobot.diagnostics.conventions import Array, aligned, as_stated, looks_absolute, steps_of
from dzrobot.embodiments.action_conventions import HandMotion
from dzrobot.rollout.demonstrations.record import RecordedActions

LATEST_ROWS = 5
"""Rows by which an arm may follow late without a word."""

EARLIEST_ROWS = 2
"""Rows by which a recording is tried to be early."""

WINDOW_ROWS = 5
"""Rows over which motion is added up."""

EXPLAINED = 0.5
"""Share of the motion that the right conventions explain at least."""

_CLEARLY = 0.15
_MOVED_M = 0.01
_TURNED_RAD = 0.05
_SCALES = (0.5, 2.0)
_FINGER_ROWS = 15
_FINGER_M = 0.002


@dataclass(frozen=True)
class _Fit:
    """How well commands explain motion."""

    note: str
    share: float
    """Share of the motion, at most 1."""

    scale: float
    """Motion by command."""

    lag: int
    """Rows from the command to the motion."""


def check_commands(recordings: Sequence[RecordedActions], hand: HandMotion) -> list[Finding]:
    """Return what recorded states say of recorded actions.

    Args:
        recordings: Episodes of one dataset.
        hand: Which numbers they are, and what they mean.
    """
    return [
        *_translation(recordings, hand),
        *_rotation(recordings, hand),
        _gripper(recordings, hand),
    ]


def _translation(recordings: Sequence[RecordedActions], hand: HandMotion) -> Iterator[Finding]:
    moved = [_moved(one, hand)[0] for one in recordings]
    if sum(float(np.abs(steps).sum()) for steps in moved) < _MOVED_M:
        yield Finding("warn", "translation", "cannot be judged: the hand hardly moves")
        return
    if all(looks_absolute(one.actions, one.states, hand) for one in recordings):
        yield Finding(
            "fail", "absolute instead of delta", "translations lie where the hand is: they are "
            "targets, and differences are taken",
        )  # fmt: skip
        return
    commanded = [hand.translation_m * one.actions[:, hand.translation] for one in recordings]
    frames = {"": [_turned(one, hand, a) for one, a in zip(recordings, commanded, strict=True)]}
    if hand.frame != "base":
        frames["the base's axes instead of the hand's"] = commanded
    else:
        frames["the hand's axes instead of the base's"] = [
            _in_hand(one, hand, a) for one, a in zip(recordings, commanded, strict=True)
        ]
    fits = [fit for note, u in frames.items() for fit in _fits(moved, u, note)]
    yield from _judged("translation", fits)


def _rotation(recordings: Sequence[RecordedActions], hand: HandMotion) -> Iterator[Finding]:
    if hand.frame == "ee_adjoint":
        yield Finding(
            "warn", "rotation", "cannot be judged: it depends on where the hand is from the base, "
            "and the state says where it is from the start",
        )  # fmt: skip
        return
    turned = [_moved(one, hand)[1] for one in recordings]
    if sum(float(np.abs(steps).sum()) for steps in turned) < _TURNED_RAD:
        yield Finding("warn", "rotation", "cannot be judged: the hand hardly turns")
        return
    commanded = [
        _turned(one, hand, hand.rotation_rad * one.actions[:, hand.turn]) for one in recordings
    ]
    yield from _judged("rotation", _fits(turned, commanded, ""))


def _judged(what: str, fits: Sequence[_Fit]) -> Iterator[Finding]:
    """Yield what the fits say; the first is that of everything as it should be."""
    stated, best = fits[0], max(fits, key=lambda fit: fit.share)
    if best.share - stated.share > _CLEARLY and best.share >= EXPLAINED:
        yield Finding(
            "fail", f"{what} axes", f"{best.note} explains {100 * best.share:.0f} % of the motion, "
            f"the environment's own {100 * stated.share:.0f} %",
        )  # fmt: skip
        stated = best
    elif stated.share < EXPLAINED:
        yield Finding(
            "warn", what, f"actions explain {100 * stated.share:.0f} % of the motion, and no other "
            "convention explains more: contact, limits or another controller",
        )  # fmt: skip
        return
    if stated.lag < 0:
        yield Finding(
            "fail", "off by one", f"the hand moves {-stated.lag} rows before it is commanded to: "
            "observations stand after their action",
        )  # fmt: skip
    if not _SCALES[0] <= stated.scale <= _SCALES[1]:
        yield Finding(
            "fail", f"delta scale of the {what}", f"the hand moved {stated.scale:.2g} times as far "
            "as was commanded",
        )  # fmt: skip
    elif stated is fits[0] and stated.lag >= 0:
        yield Finding(
            "ok", what, f"actions explain {100 * stated.share:.0f} % of the motion; it is "
            f"{stated.scale:.2f} of what was commanded, {stated.lag} rows later",
        )  # fmt: skip


def _gripper(recordings: Sequence[RecordedActions], hand: HandMotion) -> Finding:
    """Return whether fingers close on command."""
    right = wrong = 0
    for one in recordings:
        commands = np.sign(one.actions[:, hand.gripper]) * hand.closes
        width = one.states[:, hand.fingers].astype(np.float64)
        opening = np.abs(width).sum(axis=1)
        for row in np.flatnonzero(np.diff(commands) * commands[1:] > 0) + 1:
            change = opening[min(row + _FINGER_ROWS, len(opening) - 1)] - opening[row]
            if abs(change) > _FINGER_M:
                right += change * commands[row] < 0
                wrong += change * commands[row] > 0
    if right + wrong == 0:
        return Finding("warn", "gripper", "cannot be judged: it never changes and moves")
    if wrong > right:
        return Finding(
            "fail", "gripper sign", f"the fingers went the other way in {wrong} of {right + wrong} "
            f"changes: change the sign of action[{hand.gripper}]",
        )  # fmt: skip
    return Finding("ok", "gripper", f"as commanded in {right} of {right + wrong} changes")


def _moved(one: RecordedActions, hand: HandMotion) -> tuple[Array, ...]:
    return steps_of(one.states.astype(np.float64), hand, as_stated(hand))


def _turned(one: RecordedActions, hand: HandMotion, commanded: Array) -> Array:
    """Return (T, 3) along the axes of the state."""
    return commanded if hand.frame == "base" else _in_hand(one, hand, commanded)


def _in_hand(one: RecordedActions, hand: HandMotion, commanded: Array) -> Array:
    turned: Array = np.einsum("tij,tj->ti", _axes(one, hand), commanded)
    return turned


def _axes(one: RecordedActions, hand: HandMotion) -> Array:
    reading = as_stated(hand)
    axes: Array = np.array([reading.matrix(row) for row in one.states[:, hand.rotation]])
    return axes


def _fits(moved: Sequence[Array], commanded: Sequence[Array], note: str) -> list[_Fit]:
    """Return how well ``commanded`` (T, 3) explains ``moved`` (T - 1, 3), and each change of it."""
    changes = {"": np.eye(3), "z, y, x": np.eye(3)[::-1], "all three reversed": -np.eye(3)}
    for axis, name in enumerate("xyz"):
        flipped = np.eye(3)
        flipped[axis, axis] = -1
        changes[f"{name} reversed"] = flipped
    found = []
    for name, matrix in changes.items():
        words = ", ".join(word for word in (note, name) if word)
        found.append(_fit(words, moved, [a @ matrix.T for a in commanded]))
    return found


def _fit(note: str, moved: Sequence[Array], commanded: Sequence[Array]) -> _Fit:
    fits = []
    for lag in range(-EARLIEST_ROWS, LATEST_ROWS + 1):
        pairs = [aligned(a, b, lag) for a, b in zip(commanded, moved, strict=True)]
        wanted = np.concatenate([_sums(a) for a, _ in pairs])
        done = np.concatenate([_sums(b) for _, b in pairs])
        size = float((wanted**2).sum())
        scale = float((done * wanted).sum()) / size if size else 0.0
        whole = float((done**2).sum())
        left = float(((done - scale * wanted) ** 2).sum()) / whole if whole else 1.0
        # Motion against its command explains nothing.
        fits.append(_Fit(note, 1 - left if scale > 0 else 0.0, scale, lag))
    return max(fits, key=lambda fit: fit.share)


def _sums(rows: Array) -> Array:
    if len(rows) < WINDOW_ROWS:
        whole: Array = rows.sum(axis=0, keepdims=True)
        return whole
    padded = np.concatenate([np.zeros((1, rows.shape[1])), np.cumsum(rows, axis=0)])
    summed: Array = padded[WINDOW_ROWS:] - padded[:-WINDOW_ROWS]
    return summed
