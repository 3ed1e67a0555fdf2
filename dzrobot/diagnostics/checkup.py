"""Does a dataset mean what an environment does? Its actions are repeated there to find out.

Whole episodes are repeated only for the share that succeeds. Which convention is another one shows
in a few steps: in the images at the start, and in how the hand moved for the same actions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dzrobot.diagnostics import conventions
from dzrobot.diagnostics.conventions import (
    AGREES,
    UNCHANGED,
    Array,
    Repair,
    RotationReading,
)
from dzrobot.diagnostics.motion import Answers, Bench, Motions, RecordedStart
from dzrobot.embodiments.action_conventions import HandMotion
from dzrobot.embodiments.spec import Embodiment
from dzrobot.errors import ConfigError
from dzrobot.modality.input_variants import RENDERED, fit_images

LOOKED_AT = 2
"""Episodes in which the hand's motion and the first images are compared."""

LOW_SHARE = 0.8
"""Below, repeated episodes succeed too rarely."""

_AT_THE_SEAM = 0.25

_SAME_IMAGE = 25.0
"""Difference of 255 above which two images show something else."""

_ELSEWHERE_M = 0.03
_TURNED_RAD = 0.15
_TURNED_ELSEWHERE_RAD = 0.6
"""The same where the episode began from another initial state."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    verdict: Literal["ok", "warn", "fail"]
    what: str
    found: str


def examine(
    episodes: Sequence[RecordedStart],
    bench: Bench,
    robot: Embodiment,
    hand: HandMotion | None,
    noise: float = 0.0,
) -> Iterator[Finding]:
    """Yield what was found in a dataset, the cheapest first.

    Args:
        episodes: Episodes of one task; the first `LOOKED_AT` hold images.
        bench: Where they are repeated.
        robot: Whose they are.
        hand: Which numbers move the hand. None: motion is not looked at.
        noise: Standard deviation of what was added to executed actions, where that is known.

    Raises:
        ConfigError: there are no episodes.
    """
    if not episodes:
        raise ConfigError("there is no episode to repeat")
    first = episodes[:LOOKED_AT]
    bench.plan((1 if hand is None else 3) * len(first) + len(episodes))
    yield from check_images(first, bench, robot)
    repair = UNCHANGED
    if hand is None:
        yield Finding(
            "warn",
            "motion",
            "cannot be judged: the environment does not say which numbers move its "
            "hand (attribute `hand`, a HandMotion)",
        )
    else:
        repair, found = check_motion(first, bench, hand, noise)
        yield from found
        yield from check_answers(first, bench, hand)
    yield check_success(episodes, bench, repair, noise)


def check_images(
    episodes: Sequence[RecordedStart], bench: Bench, robot: Embodiment
) -> Iterator[Finding]:
    """Yield what the recorded first images show, by view."""
    rendered = [bench.first_images(one.recording) for one in episodes]
    recorded = [one.images for one in episodes]
    for key in robot.video_keys:
        fit = fit_images(key, rendered, recorded, reference=RENDERED)
        if fit.is_variant:
            yield Finding("fail", f"image: {key}", f"is {fit.words}")
        elif fit.as_is > _SAME_IMAGE:
            yield Finding(
                "fail",
                key,
                f"shows something else than the environment, {fit.as_is:.0f} "
                "of 255 apart however it is changed: another camera, scene or rendering",
            )
        else:
            yield Finding("ok", key, f"as rendered, {fit.as_is:.1f} of 255 apart")


def read_rotation(
    episodes: Sequence[RecordedStart], bench: Bench, hand: HandMotion
) -> tuple[RotationReading, list[Finding]]:
    """Return how recorded states write rotations, and what is wrong with them at the start."""
    stated, known = (
        conventions.as_stated(hand),
        all(e.recording.start is not None for e in episodes),
    )
    limit = _TURNED_RAD if known else _TURNED_ELSEWHERE_RAD
    pairs = [
        (
            one.recording.states[0].astype(np.float64),
            bench.states(one.recording, np.asarray(one.recording.actions[:1]))[0],
        )
        for one in episodes
    ]

    def away(reading: RotationReading) -> float:
        return max(
            conventions.angle(reading.matrix(a[hand.rotation]), stated.matrix(b[hand.rotation]))
            for a, b in pairs
        )

    found = []
    apart = max(float(np.linalg.norm((a - b)[hand.position])) for a, b in pairs)
    if known and apart > _ELSEWHERE_M:
        found.append(
            Finding(
                "fail",
                "start",
                f"the hand begins {apart:.3f} m from where the recording does: "
                "other initial states, or another settle_steps",
            )
        )
    if away(stated) <= limit:
        return stated, found
    other = min(conventions.READINGS, key=away)
    if away(other) > limit:
        found.append(
            Finding(
                "fail",
                "state rotation",
                f"{away(stated):.2f} rad from the environment's at the "
                "start, and no other way to read it is nearer",
            )
        )
        return stated, found
    what = "rotation order" if "order" in other.note else "rotation form"
    found.append(Finding("fail", f"{what} of the state", f"it is written {other.note}"))
    return other, found


def check_antipodes(
    episodes: Sequence[RecordedStart], states: Sequence[Array], hand: HandMotion, repair: Repair
) -> Finding | None:
    """Return what is wrong where one rotation is written as two vectors; None: nothing can be.

    Args:
        episodes: What was recorded.
        states: The same steps in the environment, of repaired actions.
        hand: Where the rotation is.
        repair: Which rows belong together.
    """
    if hand.rotation_form != "rotation vector":
        return None
    pairs = [
        pair
        for one, other in zip(episodes, states, strict=True)
        for pair in zip(
            *conventions.aligned(
                one.recording.states[:: repair.recorded_every, hand.rotation],
                other[:: repair.replayed_every, hand.rotation],
                repair.lag,
            ),
            strict=True,
        )
    ]
    count = sum(conventions.antipodal(recorded, replayed) for recorded, replayed in pairs)
    # A hand that turns through the seam may pass it a row earlier or later in the replay.
    if count <= _AT_THE_SEAM * len(pairs):
        return Finding("ok", "axis-angle", "the way around that the environment takes")
    return Finding(
        "fail",
        "axis-angle antipode",
        f"{count} of {len(pairs)} rotation vectors go the other way around: multiply them by "
        "1 - 2 pi / length",
    )


def check_motion(
    episodes: Sequence[RecordedStart], bench: Bench, hand: HandMotion, noise: float = 0.0
) -> tuple[Repair, list[Finding]]:
    """Return what has to be changed in the actions, and what was found.

    Args:
        episodes: What was recorded.
        bench: Where it is repeated.
        hand: Which numbers move the hand.
        noise: Standard deviation of what was added to executed actions, where that is known.
    """
    reading, found = read_rotation(episodes, bench, hand)
    motions = Motions(bench, episodes, hand, reading)
    motion = motions.compare()
    found += [Finding("fail", fault.what, fault.note) for fault in motion.faults]
    parts = (
        f"translation {100 * motion.after.translation:.0f} %, rotation "
        f"{100 * motion.after.rotation:.0f} %, fingers {100 * motion.after.fingers:.0f} % of each "
        "step"
    )
    if motion.after.total <= AGREES:
        end = " once that is changed" if motion.faults else ""
        found.append(Finding("ok", "motion", f"as recorded{end}: {parts} apart"))
    elif motion.faults:
        note = f"{parts} apart once that is changed: rows that are missing, or something else"
        found.append(Finding("warn", "motion", note))
    elif noise:
        found.append(
            Finding(
                "warn",
                "motion",
                f"{parts} apart; noise of {noise:g} was added to what was "
                "executed, and the recording holds the actions without it",
            )
        )
    else:
        note = f"{parts} apart, and no change of convention mends it"
        found.append(Finding("fail", "motion", f"{note}: another simulator or controller"))
    known = all(one.recording.start is not None for one in episodes)
    if known and reading == conventions.as_stated(hand):
        antipodes = check_antipodes(episodes, motions.repeated(motion.repair), hand, motion.repair)
        found += [antipodes] if antipodes else []
    elif not known:
        found.append(
            Finding(
                "warn",
                "axis-angle",
                "cannot be judged: the recording does not say which initial states it began from",
            )
        )
    return motion.repair, found


def check_answers(
    episodes: Sequence[RecordedStart], bench: Bench, hand: HandMotion
) -> Iterator[Finding]:
    """Yield how recorded actions differ in meaning from what was executed in the same rows.

    A policy learns the recorded ones, so that what was executed is right does not help it.

    Args:
        episodes: What was recorded.
        bench: Where it would be repeated; nothing is.
        hand: Which numbers move the hand.
    """
    known = [one for one in episodes if one.answers is not None]
    if not known:
        return
    for fault in Answers(bench, known, hand, conventions.as_stated(hand)).compare().faults:
        note = f"{fault.note}; that is what was executed in the same rows"
        yield Finding("fail", fault.what, note)


def check_success(
    episodes: Sequence[RecordedStart], bench: Bench, repair: Repair, noise: float = 0.0
) -> Finding:
    """Return how many episodes reach the goal again, and how many once ``repair`` is made."""
    wanted = [one.recording for one in episodes if one.recording.success is not False]
    if any(one.start is None for one in wanted):
        return Finding(
            "warn",
            "success",
            "cannot be judged: the recording does not say which initial states it began from",
        )
    if not wanted:
        return Finding("warn", "success", "no episode that was looked at succeeded")
    won = sum(bench.succeeds(one, np.asarray(one.actions)) for one in wanted)
    note = f"{won} of {len(wanted)} succeed again"
    if won >= LOW_SHARE * len(wanted):
        return Finding("ok", "success", note)
    if repair is not UNCHANGED:
        mended = sum(
            bench.succeeds(one, repair.change(one.actions.astype(float), one.states.astype(float)))
            for one in wanted
        )
        note += f", and {mended} of {len(wanted)} once the actions are changed as said"
    if noise:
        note += f"; noise of {noise:g} was added to what was executed"
    return Finding("warn" if noise or repair is not UNCHANGED else "fail", "success", note)
