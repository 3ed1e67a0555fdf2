"""A policy on rows that it was, or should have been, trained on: does it do its data at all?

Its plan is compared with the recorded action and with the *mean* action, number by number. A copy
of the last action does not serve: a policy that always succeeds is several times worse than it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from dzrobot.errors import DatasetError
from dzrobot.modality.input_variants import Floats, Image
from dzrobot.modality.window import Observation
from dzrobot.policies.base import Policy
from dzrobot.rng import numpy_generator
from dzrobot.rollout.demonstrations.record import RecordedActions
from dzrobot.training.data.dataset import DatasetReader
from dzrobot.training.data.plan_errors import OwnRows

SESSION = "doctor"


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

    def vectors(self) -> list[RecordedActions]:
        """Return what every episode's numbers are, without where it began."""
        return [
            RecordedActions(
                self.actions(one).astype(np.float32), self.states(one).astype(np.float32), None
            )
            for one in self.ordinals
        ]

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
