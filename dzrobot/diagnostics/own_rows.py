"""A policy on rows that it was, or should have been, trained on: does it do its data at all?

Its plan is compared with the recorded action and with the *mean* action, number by number. A copy
of the last action does not serve: a policy that always succeeds is several times worse than it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dzrobot.diagnostics.input_variants import Floats, Image
from dzrobot.errors import DatasetError
from dzrobot.modality.window import Observation
from dzrobot.policies.base import Policy
from dzrobot.rng import numpy_generator
from dzrobot.training.data.dataset import DatasetReader

SESSION = "doctor"

DOES_ITS_DATA = 0.6
"""Error over that of the mean action, as :attr:`OwnRows.share`, above which it does not do its
data. On Lift: 0.3 of the bundled policy, 1.0 with statistics of another task, 3.6 with random
weights."""

LAG_ROWS = 4
"""Rows by which plans are tried to be early or late."""

_FEW = 1e-3
_VARIES = 0.05
_MIRRORED = 0.5
_ALIKE = 0.7
_CLEARLY = 0.8
_SCALE = 0.4


@dataclass(frozen=True, kw_only=True)
class DataRow:
    """One recorded moment."""

    ordinal: int
    row: int
    observation: Observation
    actions: Floats
    """(H, A): recorded from this row on; the last one is repeated beyond the end."""


class Recording:
    """Episodes of a dataset, row by row.

    Args:
        reader: The dataset, opened with images.
        task: Instruction of the environment; episodes with it are taken, if there are any. None:
            all.
        episodes: How many at most.

    Raises:
        DatasetError: no episode can be used.
    """

    def __init__(self, reader: DatasetReader, task: str | None, episodes: int) -> None:
        self.reader = reader
        """The dataset."""

        failed = reader.catalog.left_out(reader.options.episodes)
        numbers = enumerate(reader.catalog.episodes.index.tolist())
        usable = [ordinal for ordinal, number in numbers if number not in failed]
        same = [one for one in usable if self.instruction(one) == task]
        self.ordinals: list[int] = (same or usable)[:episodes]
        """Which episodes, counted from 0."""

        if not self.ordinals:
            raise DatasetError(f"{reader.catalog.root} has no episode that can be used")
        self._values = {one: reader.states(one) for one in self.ordinals}

    def instruction(self, ordinal: int) -> str:
        """Return the instruction at the beginning of an episode."""
        return self.reader.instruction(ordinal, 0, 0.0)

    @property
    def numbers(self) -> list[int]:
        """Return the episodes' numbers in the dataset."""
        return [int(one) for one in self.reader.catalog.episodes.index[self.ordinals]]

    def ordinal(self, number: int) -> int:
        """Return which episode has a number."""
        return self.ordinals[self.numbers.index(number)]

    def length(self, ordinal: int) -> int:
        """Return the rows of an episode."""
        return len(next(iter(self._values[ordinal].values())))

    def states(self, ordinal: int) -> Floats:
        """Return the states (N, S) of an episode."""
        return self._joined(ordinal, self.reader.embodiment.state_keys)

    def actions(self, ordinal: int) -> Floats:
        """Return the actions (N, A) of an episode."""
        return self._joined(ordinal, self.reader.embodiment.action_keys)

    @cached_property
    def every_action(self) -> Floats:
        """Return the actions (N, A) of all episodes."""
        return np.concatenate([self.actions(one) for one in self.ordinals])

    @cached_property
    def every_state(self) -> Floats:
        """Return the states (N, S) of all episodes."""
        return np.concatenate([self.states(one) for one in self.ordinals])

    def images(self, ordinal: int, rows: Sequence[int]) -> list[dict[str, Image]]:
        """Return all views (H, W, 3) at some rows of an episode."""
        views = self.reader.resolution.views
        clips = {key: self.reader.frames(ordinal, one, rows) for key, one in views.items()}
        return [{key: clip[at] for key, clip in clips.items()} for at in range(len(rows))]

    def rows(self, ordinal: int, numbers: Sequence[int]) -> list[DataRow]:
        """Return some rows of an episode, as a policy is given them."""
        robot, values = self.reader.embodiment, self._values[ordinal]
        actions, found = self.actions(ordinal), []
        horizon = robot.timing.action_horizon
        for number, views in zip(numbers, self.images(ordinal, numbers), strict=True):
            observation: dict[str, Any] = {
                **views,
                **{key: np.array(values[key][number], np.float32) for key in robot.state_keys},
                robot.language: self.reader.instruction(ordinal, number, 0.0),
            }
            after = np.minimum(np.arange(number, number + horizon), len(actions) - 1)
            found.append(
                DataRow(
                    ordinal=ordinal, row=number, observation=observation, actions=actions[after]
                )
            )
        return found

    def sample(self, count: int) -> list[DataRow]:
        """Return ``count`` rows from all episodes, drawn by a generator of their own."""
        draw = numpy_generator("doctor rows", 0)
        share = np.array_split(np.arange(count), len(self.ordinals))
        found = []
        for ordinal, part in zip(self.ordinals, share, strict=True):
            last = self.length(ordinal) - self.reader.embodiment.timing.action_horizon
            known = np.arange(max(last, 1))
            chosen = draw.choice(known, min(len(part), len(known)), replace=False)
            found += self.rows(ordinal, sorted(chosen.tolist()))
        return found

    def _joined(self, ordinal: int, keys: Sequence[str]) -> Floats:
        values = self._values[ordinal]
        return np.concatenate([values[key] for key in keys], axis=1).astype(np.float64)


class Asked:
    """Plans of a policy for single observations, each from a session that begins with it.

    Args:
        policy: Who plans.
        count: Called once for every plan that is made.
    """

    def __init__(self, policy: Policy, count: Callable[[], None] = lambda: None) -> None:
        self.policy = policy
        """Who plans."""

        self.plans = 0
        """How many were made."""

        self._count = count
        self._known: dict[tuple[object, ...], Floats] = {}

    def plan(self, observation: Observation) -> Floats:
        """Return the plan (H, A) for one observation; (1, A) of a policy that only acts."""
        key = tuple(
            (name, value if isinstance(value, str) else value.tobytes())
            for name, value in sorted(observation.items())
        )
        if key not in self._known:
            self.policy.reset(SESSION, episode=0)
            if self.policy.can.plans:
                actions = self.policy.infer(observation, session=SESSION)["actions"]
            else:
                actions = self.policy.act(observation, session=SESSION)[None]
            self._known[key] = np.asarray(actions, np.float64)
            self.plans += 1
            self._count()
        return self._known[key]


Change = Callable[[Observation], Observation]


@dataclass(frozen=True, eq=False, kw_only=True)
class OwnRows:
    """Plans beside what was recorded, at N rows."""

    planned: Floats
    """(N, H, A)."""

    recorded: Floats
    """(N, H, A)."""

    every: Floats
    """(M, A): all recorded actions."""

    @cached_property
    def deviation(self) -> Floats:
        """Return the deviation (A,) of recorded actions."""
        deviation: Floats = np.maximum(self.every.std(0), _FEW)
        return deviation

    @property
    def by_number(self) -> Floats:
        """Return the mean error (A,) of the first planned action, in deviations."""
        return self._away(self.planned[:, 0])

    @property
    def of_mean(self) -> Floats:
        """Return the same of the mean action."""
        return self._away(self.every.mean(0))

    def _away(self, actions: Floats) -> Floats:
        away: Floats = np.abs(actions - self.recorded[:, 0]).mean(0) / self.deviation
        return away

    @property
    def error(self) -> float:
        """Return the mean error, in deviations."""
        return float(self.by_number.mean())

    @property
    def share(self) -> float:
        """Return the error over that of the mean action: the median over numbers that vary.

        Some numbers of a demonstration are as good as noise, so a mean would be theirs.
        """
        varies = self.of_mean > _VARIES
        if not varies.any():
            return 0.0 if self.error < _VARIES else float("inf")
        return float(np.median(self.by_number[varies] / self.of_mean[varies]))

    @property
    def does_its_data(self) -> bool:
        """Return whether the policy does what was recorded, and no number the other way around."""
        mirrored = np.diag(self.correlations) < -_MIRRORED
        return self.share <= DOES_ITS_DATA and not mirrored.any()

    @property
    def words(self) -> str:
        """Return what was found, for a person."""
        pairs = zip(self.by_number, self.of_mean, np.diag(self.correlations), strict=True)
        each = ", ".join(f"{a:.2f}/{b:.2f} ({c:+.2f})" for a, b, c in pairs)
        return f"{self.share:.2f} of the mean action's error; by number {each}"

    @property
    def correlations(self) -> Floats:
        """Return the correlation (A, A) of planned with recorded numbers; 0: one is constant."""
        ours, theirs = (_standard(one[:, 0]) for one in (self.planned, self.recorded))
        return ours.T @ theirs / len(ours)

    @cached_property
    def otherwise(self) -> str:
        """Return how plans have to be read to be the data's; empty: no reading that is tried helps.

        Numbers exchanged, mirrored or scaled, or rows that are off.
        """
        readings = [*self._exchanged(), *self._scaled(), *self._shifted()]
        words, best = min(readings, key=lambda one: one[1].error, default=("", self))
        return words if best.does_its_data and best.error < _CLEARLY * self.error else ""

    def _exchanged(self) -> Iterator[tuple[str, "OwnRows"]]:
        """Yield the plan with two numbers exchanged, three turned in a circle, or one negated."""
        count = self.planned.shape[-1]
        for number in range(count):
            signs = np.where(np.arange(count) == number, -1, 1)
            words = f"action[{number}] of the data is minus action[{number}] of the policy"
            yield words, replace(self, planned=self.planned * signs)
        circles: list[tuple[int, ...]] = [*combinations(range(count), 2)]
        circles += [order for one in range(count - 2) for order in _circles(one)]
        for circle in circles:
            order = np.arange(count)
            order[list(circle)] = [*circle[1:], circle[0]]
            words = "; ".join(
                f"action[{one}] of the data is action[{order[one]}] of the policy" for one in circle
            )
            yield words, replace(self, planned=self.planned[..., order])

    def _scaled(self) -> Iterator[tuple[str, "OwnRows"]]:
        """Yield the plan with numbers multiplied by what makes them as large as recorded ones."""
        ours, theirs, said = self.planned[:, 0], self.recorded[:, 0], []
        factors = (ours * theirs).sum(0) / np.maximum((ours**2).sum(0), _FEW**2)
        sure = (np.diag(self.correlations) > _ALIKE) & (
            np.abs(np.log(np.maximum(np.abs(factors), _FEW))) > _SCALE
        )
        for number in np.flatnonzero(sure):
            said.append(f"action[{number}] of the data is {factors[number]:.3g} times the policy's")
        if said:
            yield "; ".join(said), replace(self, planned=self.planned * np.where(sure, factors, 1))

    def _shifted(self) -> Iterator[tuple[str, "OwnRows"]]:
        """Yield plan and recording beside each other some rows off."""
        most = min(LAG_ROWS, self.planned.shape[1] - 1, self.recorded.shape[1] - 1)
        for rows in range(1, most + 1):
            early = replace(self, planned=self.planned[:, rows:])
            yield f"recorded actions are {rows} rows ahead of the policy's", early
            late = replace(self, recorded=self.recorded[:, rows:])
            yield f"recorded actions are {rows} rows behind the policy's", late


def own_rows(
    asked: Asked, rows: Sequence[DataRow], every: Floats, change: Change | None = None
) -> OwnRows:
    """Return what a policy plans on recorded rows.

    Args:
        asked: Who plans.
        rows: Where.
        every: (M, A): all recorded actions.
        change: Of the observations, before the policy is given them. None: they are as recorded.
    """
    given = [row.observation if change is None else change(row.observation) for row in rows]
    plans = [asked.plan(one) for one in given]
    return OwnRows(
        planned=np.stack(plans), recorded=np.stack([row.actions for row in rows]), every=every
    )


def _circles(first: int) -> list[tuple[int, ...]]:
    """Return both ways around three numbers that stand beside each other."""
    return [(first, first + 1, first + 2), (first, first + 2, first + 1)]


def _standard(values: NDArray[np.floating[Any]]) -> Floats:
    away = values - values.mean(0)
    spread = values.std(0)
    return np.where(spread < 1e-9, 0.0, away / np.maximum(spread, 1e-9))
