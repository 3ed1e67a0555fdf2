"""What a policy learns from each recorded row, from who acted in it and how the episode ended.

A policy's own rows before a person takes over lead to the mistake, and a failure's show what not to
do. Imitated, they would be learned; left out, what happens after such actions would not be learned
either. They are *given*: the network sees their actions without noise and predicts the video alone.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dzrobot.embodiments.spec import HOLD_ZERO, Embodiment
from dzrobot.errors import DatasetError
from dzrobot.recording.catalog import DatasetCatalog
from dzrobot.recording.formats import INTERVENTION
from dzrobot.training.sft_config import CreditConfig

MARKS = (INTERVENTION, "intervene_flag")
"""Columns that say in which rows a person acted: LeRobot's, which is ours too, and RLinf's."""

_RESTS = 0.01
"""Share of the fastest motion of an episode below which a person does not steer."""


class Reason(IntEnum):
    """Why a row is imitated or given."""

    DEMONSTRATION = 0
    PERSON = 1
    OWN_SUCCESS = 2
    PERSON_RESTS = 3
    BEFORE_TAKEOVER = 4
    OWN_WITH_TAKEOVER = 5
    FAILURE = 6
    NOT_MARKED = 7

    @property
    def text(self) -> str:
        """What people read."""
        return _TEXTS[self]


_TEXTS: Mapping[Reason, str] = {
    Reason.DEMONSTRATION: "demonstration",
    Reason.PERSON: "a person acted",
    Reason.OWN_SUCCESS: "policy, succeeded without help",
    Reason.PERSON_RESTS: "a person had taken over and did not steer yet",
    Reason.BEFORE_TAKEOVER: "policy, just before a takeover",
    Reason.OWN_WITH_TAKEOVER: "policy, in an episode with a takeover",
    Reason.FAILURE: "whoever acted last before the episode failed",
    Reason.NOT_MARKED: "policy, and it is not marked whether it succeeded",
}


class RowCredit(NamedTuple):
    """What is asked of the actions of a sample.

    Rows that are neither given nor weighted are seen with noise, as those are that repeat an
    episode's last one.
    """

    given: NDArray[np.bool_]
    """(A,): seen without noise, and not predicted."""

    weight: NDArray[np.float32]
    """(A,): of the error; 0 where it does not count."""

    @property
    def imitates(self) -> bool:
        """Whether any action is predicted."""
        return bool(self.weight.any())


@dataclass(frozen=True)
class EpisodeMarks:
    """Who acted in the rows of an episode, and how it ended."""

    person: NDArray[np.bool_]
    """(rows,): a person acted in the place of a policy."""

    rests: NDArray[np.bool_]
    """(rows,): the action moves nothing but the gripper."""

    by_policy: bool
    """Whether a policy acted where no person did; otherwise it is a demonstration."""

    success: bool | None
    """None: not marked."""


def reasons(marks: EpisodeMarks, before: int) -> NDArray[np.int8]:
    """Return the :class:`Reason` of every row, (rows,).

    The outcome is credited to whoever acted last, never across a takeover: a person's rows count
    although the policy failed later, and a policy's do not count because a person succeeded.

    Args:
        marks: Of the episode.
        before: Rows before a takeover that led to it.
    """
    person = marks.person
    if not marks.by_policy:
        whole = Reason.FAILURE if marks.success is False else Reason.DEMONSTRATION
        return np.full(len(person), whole, np.int8)
    alone = {True: Reason.OWN_SUCCESS, False: Reason.FAILURE, None: Reason.NOT_MARKED}
    own = Reason.OWN_WITH_TAKEOVER if person.any() else alone[marks.success]
    found = np.full(len(person), own, np.int8)
    for first in np.flatnonzero(person & ~np.append(False, person[:-1])):
        blamed = slice(max(0, first - before), first)
        found[blamed] = np.where(person[blamed], found[blamed], Reason.BEFORE_TAKEOVER)
        released = np.flatnonzero(~person[first:])
        stop = first + released[0] if len(released) else len(person)
        steered = np.flatnonzero(~marks.rests[first:stop])
        begins = first + steered[0] if len(steered) else stop
        found[first:begins], found[begins:stop] = Reason.PERSON_RESTS, Reason.PERSON
    if marks.success is False and person.any():
        last = np.flatnonzero(person != person[-1])
        found[last[-1] + 1 if len(last) else 0 :] = Reason.FAILURE
    return found


def moves_nothing(
    robot: Embodiment, values: Mapping[str, NDArray[np.float32]]
) -> NDArray[np.bool_]:
    """Return the rows (N,) whose action commands no motion, or one below 1 % of the fastest.

    Differences are motions; of absolute numbers, the change from row to row is. Grippers are left
    out, and so are parts of which the description does not say how they hold still.

    Args:
        robot: Says how each part of its action holds still.
        values: State and action rows (N, D) of an episode, by key.
    """
    speeds = []
    for part in robot.action:
        rows = values[part.key]
        if part.gripper is not None:
            rows = np.delete(rows, part.gripper.index, axis=1)
        if part.hold is None:
            continue
        speeds.append(rows if part.hold == HOLD_ZERO else np.diff(rows, axis=0, prepend=rows[:1]))
    if not speeds:
        return np.zeros(len(next(iter(values.values()))), bool)
    speed = np.abs(np.concatenate(speeds, axis=1))
    slow: NDArray[np.bool_] = (speed <= _RESTS * speed.max(axis=0, initial=0)).all(axis=1)
    return slow


def mark_column(catalog: DatasetCatalog) -> str | None:
    """Return the column that says where a person acted; None: there is none.

    Raises:
        DatasetError: There are two, or it is not one number a row.
    """
    found = [name for name in MARKS if name in catalog.features]
    if len(found) > 1:
        raise DatasetError(
            f"{catalog.root} has the columns {' and '.join(found)}, which both say where a person "
            "acted: drop one"
        )
    for name in found:
        if catalog.features[name].shape != [1]:
            raise DatasetError(
                f"{catalog.root}: {name} is {catalog.features[name]}, it must hold one truth value "
                "a row"
            )
    return found[0] if found else None


class Credits:
    """What is asked of the actions of any sample of one folder.

    Args:
        marks: Of every episode that is used, by ordinal.
        config: How marks become credit.
        hz: Rows per second.
    """

    def __init__(self, marks: Mapping[int, EpisodeMarks], config: CreditConfig, hz: float) -> None:
        before = round(config.blame_s * hz)
        self.reasons = {ordinal: reasons(one, before) for ordinal, one in marks.items()}
        """Why each row of an episode is imitated or given, by ordinal."""

        weights = np.zeros(len(Reason), np.float32)
        weights[[Reason.DEMONSTRATION, Reason.PERSON]] = 1
        weights[Reason.OWN_SUCCESS] = config.own
        self._weights = weights

    def of(self, ordinal: int, rows: NDArray[np.int64], padded: int, horizon: int) -> RowCredit:
        """Return what is asked of a sample's actions.

        Rows that are not imitated are given as far as they lie before the first imitated one of
        their block. Later ones would show it the future, and are seen with noise.

        Args:
            ordinal: Episode.
            rows: (A,): the rows of its actions.
            padded: How many of the last ones are repeated.
            horizon: Actions of a block.
        """
        weight = self._weights[self.reasons[ordinal][rows]]
        weight[len(weight) - padded :] = 0
        asked = (weight > 0).reshape(-1, horizon)
        given = ~np.logical_or.accumulate(asked, axis=1).ravel()
        given[len(given) - padded :] = False
        return RowCredit(given, weight)

    def counted(self) -> Counter[Reason]:
        """Return how many rows have which reason."""
        found: Counter[Reason] = Counter()
        for codes in self.reasons.values():
            found.update(Reason(code) for code in codes.tolist())
        return found

    def use(self, reason: Reason) -> str:
        """Return what becomes of rows with ``reason``, for people."""
        weight = float(self._weights[reason])
        return "given" if not weight else "imitated" if weight == 1 else f"imitated, {weight:g}"
