"""What reaches a policy while recorded actions are repeated, beside what was recorded there."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dzrobot.diagnostics.conventions import READINGS, angle, as_stated
from dzrobot.diagnostics.motion import Bench, RecordedStart
from dzrobot.diagnostics.own_rows import Asked, DataRow, Recording, own_rows
from dzrobot.embodiments.action_conventions import HandMotion
from dzrobot.modality import input_variants as variants
from dzrobot.modality.input_variants import Floats, Image
from dzrobot.modality.window import Observation

STEPS = (0, 8, 16)
"""Rows at which live inputs are compared."""

EPISODES = 2
_LOOKS = 4

_FEW = 1e-3
_SAME_THROUGHOUT = "the same image throughout"
_SAME_TURN_RAD = 0.1
_STUDENT = (636.6, 31.6, 12.92, 8.61, 6.87, 5.96, 5.41, 5.04, 4.78, 4.59)
"""Student's t that one of 1000 draws exceeds, by degrees of freedom from 1 on."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One key."""

    key: str
    words: str
    """What the live input is; empty: as recorded."""

    how: str
    """How far apart they are."""

    pictures: Mapping[str, Image] = field(default_factory=dict, repr=False)
    """Images of a view by caption: recorded, live, and the recorded one changed so that it fits."""


@dataclass(frozen=True, eq=False, kw_only=True)
class LiveInputs:
    """Recorded rows, and what was seen there."""

    recording: Recording
    rows: Sequence[DataRow]
    live: Sequence[Observation]
    """One for each row."""

    start_known: bool
    """Whether both began at the same place; otherwise their means are compared."""

    hand: HandMotion | None

    acted: Recording | None = None
    """The recording that ``live`` is from; None: recorded actions were repeated."""

    @classmethod
    def recorded(
        cls, recording: Recording, acted: Recording, hand: HandMotion | None
    ) -> "LiveInputs":
        """Return what episodes of ``acted`` began with, beside those of ``recording``."""
        pairs = list(zip(recording.ordinals, acted.ordinals, strict=False))
        rows = [recording.rows(one, [0])[0] for one, _ in pairs]
        live = [acted.rows(other, [0])[0].observation for _, other in pairs]
        return cls(
            recording=recording, rows=rows, live=live, start_known=False, hand=hand, acted=acted
        )

    @classmethod
    def see(
        cls,
        recording: Recording,
        episodes: Sequence[RecordedStart],
        bench: Bench,
        hand: HandMotion | None,
    ) -> "LiveInputs":
        """Return what is seen while the actions of ``episodes`` are repeated."""
        rows: list[DataRow] = []
        live: list[Observation] = []
        known = all(one.start_known for one in episodes)
        for one in episodes[: EPISODES if known else None]:
            ordinal = recording.ordinal(one.number)
            steps = [step for step in STEPS if step < recording.length(ordinal)] if known else [0]
            rows += recording.rows(ordinal, steps)
            live += bench.observations(one.recording, steps)
        return cls(recording=recording, rows=rows, live=live, start_known=known, hand=hand)

    def compare(self) -> Iterator[Compared]:
        """Yield every key that the policy is given, compared."""
        recorded, live = self._views(self._first)
        if not self.start_known:
            recorded, live = [_mean(recorded)], [_mean(live)]
        for key in self.recording.reader.embodiment.video_keys:
            fit = variants.fit_images(key, recorded, live, same_place=self.start_known)
            words = fit.words or self._later(key)
            how = f"as it is {fit.as_is:.1f} of 255 apart, at best {fit.best:.1f}"
            pictures = {"recorded": recorded[0][key], "live": live[0][key]}
            if fit.fitted is not None:
                pictures[f"recorded, made {fit.words}"] = fit.fitted
            yield Compared(key=key, words=words, how=how, pictures=pictures)
        yield from self._states()
        yield self._instruction()

    @property
    def states(self) -> tuple[Floats, Floats]:
        """Return the states (N, S) of all rows that were looked at, recorded and live."""
        return self._vectors(range(len(self.rows)))

    def swapped(self, asked: Asked, keys: Sequence[str]) -> float:
        """Return the plans' error with ``keys`` as they are live over that as recorded."""
        every = self.recording.every_action
        swaps = [
            replace(row, observation={**row.observation, **{key: seen[key] for key in keys}})
            for row, seen in zip(self.rows, self.live, strict=True)
        ]
        before, after = own_rows(asked, self.rows, every), own_rows(asked, swaps, every)
        return after.error / max(before.error, _FEW)

    @property
    def _first(self) -> list[int]:
        return [at for at, row in enumerate(self.rows) if row.row == 0]

    @property
    def _rest(self) -> list[int]:
        return [at for at, row in enumerate(self.rows) if row.row > 0]

    def _views(
        self, places: Sequence[int]
    ) -> tuple[list[dict[str, Image]], list[dict[str, Image]]]:
        keys = self.recording.reader.embodiment.video_keys
        recorded, live = (
            [{key: np.asarray(one[key], np.uint8) for key in keys} for one in many]
            for many in (
                [self.rows[at].observation for at in places],
                [self.live[at] for at in places],
            )
        )
        return recorded, live

    @cached_property
    def _deviation(self) -> Floats:
        deviation: Floats = np.maximum(self.recording.every_state.std(0), _FEW)
        return deviation

    def _vectors(self, places: Sequence[int]) -> tuple[Floats, Floats]:
        keys = self.recording.reader.embodiment.state_keys

        def joined(one: Observation) -> Floats:
            return np.concatenate([np.asarray(one[key], np.float64) for key in keys])

        recorded = np.stack([joined(self.rows[at].observation) for at in places])
        return recorded, np.stack([joined(self.live[at]) for at in places])

    def _states(self) -> Iterator[Compared]:
        keys = self.recording.reader.embodiment.state_keys
        if not keys:
            return
        recorded, live = self._vectors(self._first)
        deviation = self._deviation
        if not self.start_known:
            deviation = deviation + np.abs(recorded - recorded.mean(0)).max(0)
            drawn = _by_chance(recorded, live) / variants.SAME_STATE
            recorded, live = recorded.mean(0)[None], live.mean(0)[None]
            deviation = np.where(self._is_far(live[0]), deviation, np.maximum(deviation, drawn))
        fit = variants.fit_states(recorded, live, deviation, self._rotation)
        how = f"at most {fit.deviations:.1f} deviations apart"
        for key in keys:
            yield Compared(key=key, words=fit.words, how=how)

    def _is_far(self, state: Floats) -> NDArray[np.bool_]:
        """Return which numbers (S,) lie farther outside of all recorded rows than these reach."""
        every = self.recording.every_state
        low, high = every.min(0), every.max(0)
        far: NDArray[np.bool_] = (state < 2 * low - high) | (state > 2 * high - low)
        return far

    def _rotation(self, recorded: Floats, live: Floats, wrong: NDArray[np.intp]) -> str:
        """Return in which other form live rotations are written; empty: it is something else."""
        hand = self.hand
        if hand is None or not set(wrong) <= set(range(*hand.rotation.indices(live.shape[1]))):
            return ""
        stated = as_stated(hand)
        asked = [stated.matrix(row[hand.rotation]) for row in recorded]
        for reading in READINGS:
            pairs = zip(asked, live[:, hand.rotation], strict=True)
            if max(angle(one, reading.matrix(row)) for one, row in pairs) < _SAME_TURN_RAD:
                return f"the rotation (numbers {variants.listed(wrong)}) is written {reading.note}"
        return ""

    def _instruction(self) -> Compared:
        key = self.recording.reader.embodiment.language
        for at in self._first:
            recorded, live = self.rows[at].observation[key], self.live[at][key]
            if recorded != live:
                return Compared(key=key, words=f"{live!r}", how=f"recorded {recorded!r}")
        return Compared(key=key, words="", how="the same words")

    def _later(self, key: str) -> str:
        """Return what is wrong with a view that is right at the start; empty: nothing."""
        if self.acted is not None:
            stands = _stands(self.acted, key) and not _stands(self.recording, key)
            return _SAME_THROUGHOUT if stands else ""
        rest = self._rest
        if not rest:
            return ""
        recorded, live = self._vectors(rest)
        if np.median((np.abs(recorded - live) / self._deviation).max(1)) > variants.SAME_STATE:
            # Another motion shows other images: what repeats the actions tells.
            return ""
        if self._static(key, live=True):
            return "" if self._static(key, live=False) else _SAME_THROUGHOUT
        _, ours = self._views(range(len(self.rows)))
        late = variants.late_by(key, [self._earlier(at) for at in rest], [ours[at] for at in rest])
        return f"{late} steps late" if late else ""

    def _static(self, key: str, *, live: bool) -> bool:
        """Return whether a view does not change within any episode."""
        for ordinal in {row.ordinal for row in self.rows}:
            places = [at for at, row in enumerate(self.rows) if row.ordinal == ordinal]
            if not variants.is_static(key, self._views(places)[live]):
                return False
        return True

    def _earlier(self, at: int) -> list[Mapping[str, Image]]:
        """Return the recorded views of a row, and of those before it, newest first."""
        row = self.rows[at]
        steps = list(range(row.row, max(row.row - variants.LATEST, -1), -1))
        return list(self.recording.images(row.ordinal, steps))


def _by_chance(one: Floats, other: Floats) -> Floats:
    """Return how far apart (S,) the means of starts (N, S) and (M, S) that are drawn may lie."""
    freedom = len(one) + len(other) - 2
    if freedom < 1:
        return np.zeros(one.shape[1])
    squares = sum(((starts - starts.mean(0)) ** 2).sum(0) for starts in (one, other))
    error = np.sqrt(squares / freedom * (1 / len(one) + 1 / len(other)))
    return np.asarray(_STUDENT[min(freedom, len(_STUDENT)) - 1] * error)


def _stands(recording: Recording, key: str) -> bool:
    """Return whether a view never changes in episodes in which the robot moves."""
    deviation, moved = recording.every_state.std(0), 0
    for ordinal in recording.ordinals[:EPISODES]:
        states = recording.states(ordinal)
        steps = np.unique(np.linspace(0, len(states) - 1, _LOOKS).astype(int)).tolist()
        away = np.abs(states[steps] - states[0]) / np.maximum(deviation, _FEW)
        if away.max() <= variants.SAME_STATE:
            continue
        moved += 1
        if not variants.is_static(key, recording.images(ordinal, steps)):
            return False
    return moved > 0


def _mean(seen: Sequence[Mapping[str, Image]]) -> dict[str, Image]:
    return {key: np.mean([one[key] for one in seen], axis=0).astype(np.uint8) for key in seen[0]}
