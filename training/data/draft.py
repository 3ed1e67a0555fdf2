"""Drafts the description of a robot from a dataset of it: what is measured, said, and left open.

Columns are grouped by their names. What an action is - a position to go to, a difference of
positions, or a command in units of its own - is measured against the states that follow it, and so
are rate and two-way grippers. What data and names do not decide becomes a question.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dzrobot.embodiments.spec import MAX_ACTION_DIM, MAX_STATE_DIM
from dzrobot.embodiments.templates import Tiles, layout_of
from dzrobot.errors import DatasetError, counted, preview, suggest
from dzrobot.recording.catalog import DatasetCatalog
from dzrobot.training.data.column_mapping import group_of, number_names
from dzrobot.training.data.columns import EpisodeRows, matrix, read_data_file

Kind = Literal["absolute", "difference", "command", "still", "open"]
"""What an action number is. ``absolute``: a position that the state reaches; ``difference``: by how
much the state changes; ``command``: proportional to that, in other units; ``still``: it never
changes; ``open``: nothing of these is measured."""

Floats = NDArray[np.float64]

_BOOKKEEPING = {"timestamp", "frame_index", "episode_index", "index", "task_index"}
_MOST_ROWS = 60_000
"""Rows that are measured: whole episodes, spread over the dataset."""

_REACHED_S = 0.5
"""How long after an action the state is compared with it."""

_FOLLOWS = 0.85
"""Least correlation of an action with the state that it names, or with its change."""

_APART = 3.0
"""How many times more of an action the other of the two must leave unexplained."""

_SAME_SCALE = (0.75, 1.33)
_STILL = 1e-6
_PLAN_S = 0.8
"""Length of a plan; the published robots' last 0.8 to 1.6 s."""

_LARGEST = 320
"""Pixels of the longer side of a view, as in the published robots."""

_SIZE_STEP = 32


@dataclass(frozen=True, kw_only=True)
class DraftPart:
    """Neighboring numbers of one column that belong together."""

    name: str
    column: str
    start: int
    numbers: tuple[str, ...]
    """Their names, or their places where the dataset names none."""

    whole: bool
    """Whether they are the whole column."""


@dataclass(frozen=True, kw_only=True)
class DraftAction:
    """A part of the action, with what was measured of it."""

    part: DraftPart
    kind: Kind
    evidence: tuple[str, ...]
    pair: DraftPart | None
    """The part of the state that it moves, in the same units."""

    hold: str | None
    gripper: tuple[int, float, float] | None
    """Which number is two-way, with its two values."""


@dataclass(frozen=True, kw_only=True)
class DraftView:
    """A camera."""

    name: str
    column: str
    resolution: tuple[int, int]
    size: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class RobotDraft:
    """What a dataset says of its robot."""

    root: Path
    rows: int
    episodes: int
    views: tuple[DraftView, ...]
    tiles: Tiles
    prompt: str
    template: str | None
    """Name of the published template that ``prompt`` is, if it is one."""

    state: tuple[DraftPart, ...]
    action: tuple[DraftAction, ...]
    rate: float | None
    rate_evidence: str
    horizon: int
    blocks: int
    lengths: tuple[int, int]
    """Rows of the shortest and of the longest episode."""

    left_out: tuple[DraftAction, ...] = ()
    """Parts whose action never changes, where all together are more than a network takes."""

    unused: tuple[str, ...] = ()
    questions: tuple[str, ...] = ()
    """What a person has to look at; what is needed and open is marked in the file as well."""


def draft_robot(
    catalog: DatasetCatalog,
    state: Sequence[str] = (),
    action: Sequence[str] = (),
    without: Sequence[str] = (),
) -> RobotDraft:
    """Return what the dataset says of its robot.

    Args:
        catalog: The dataset; its pictures are not read.
        state: Columns of the state. Empty: those that LeRobot or their names call so.
        action: Columns of the action, in the same way.
        without: Names of parts that are left out of state and action.

    Raises:
        DatasetError: No file of rows can be read, or it is not clear which columns are meant.
    """
    columns = {
        "state": _columns(catalog, "state", state),
        "action": _columns(catalog, "action", action),
    }
    rows = _read(catalog, [*columns["state"], *columns["action"]])
    states = [part for name in columns["state"] for part in _parts(catalog, name)]
    actions = [part for name in columns["action"] for part in _parts(catalog, name)]
    known = [part.name for part in (*states, *actions)]
    for name in without:
        if name not in known:
            raise DatasetError(
                f"there is no part {name!r}.{suggest(name, known)} Parts: {preview(known, 20)}"
            )
    states = [part for part in states if part.name not in without]
    actions = [part for part in actions if part.name not in without]
    measured = _with_holds([_measured(part, states, rows, catalog.fps) for part in actions])
    kept, left_out = _narrowed(measured)
    views = tuple(_view(catalog, column) for column in _colored(catalog))
    tiles, prompt, template, asked = layout_of([view.name for view in views])
    rate, rate_evidence = _rate(catalog, rows)
    horizon = max(8, 8 * round(_PLAN_S * (rate or catalog.fps) / 8))
    lengths = np.sort(catalog.episodes.length)
    tenth = int(lengths[len(lengths) // 10])
    used = {*columns["state"], *columns["action"], *_BOOKKEEPING, *catalog.cameras}
    draft = RobotDraft(
        root=catalog.root, rows=len(rows.episode),
        episodes=len(np.unique(rows.episode)), views=views, tiles=tiles, prompt=prompt,
        template=template, state=tuple(states), action=kept, rate=rate,
        rate_evidence=rate_evidence, horizon=horizon,
        blocks=max(1, min(4, (tenth - 1) // horizon)),
        lengths=(int(lengths[0]), int(lengths[-1])), left_out=left_out,
        unused=tuple(name for name in catalog.features if name not in used),
    )  # fmt: skip
    return _asked(draft, asked)


@dataclass(frozen=True)
class _Rows:
    """Some whole episodes of a dataset, one after the other."""

    values: Mapping[str, Floats]
    episode: NDArray[np.int64]
    stamps: Floats

    def pairs(self, ahead: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return rows, and those ``ahead`` of them in the same episode."""
        rows = np.arange(len(self.episode) - ahead)
        rows = rows[self.episode[rows] == self.episode[rows + ahead]]
        return rows, rows + ahead


def _read(catalog: DatasetCatalog, columns: Sequence[str]) -> _Rows:
    """Return whole episodes, spread over the dataset; files that cannot be read are passed over."""
    count = len(catalog.episodes)
    # A partial download has few of them: whatever is there is read.
    there = [n for n in range(count) if catalog.sizes.get(catalog.data_file(n))]
    most = max(1, _MOST_ROWS * count // max(1, int(catalog.episodes.length.sum())))
    ordinals = there[:: -(-len(there) // most) or 1]
    names = [*columns, *(["timestamp"] if "timestamp" in catalog.features else [])]
    parts: dict[str, list[Floats]] = {name: [] for name in names}
    episode, faults = [], []
    for file, group in groupby(ordinals, catalog.data_file):
        try:
            rows = EpisodeRows(catalog, read_data_file(catalog, file, names))
            for ordinal in group:
                _, table = rows.of(ordinal)
                for name in names:
                    width = catalog.features[name].shape[0]
                    parts[name].append(matrix(table[name], name, width).astype(np.float64))
                episode.append(np.full(len(table), ordinal))
        except DatasetError as error:
            faults.append(str(error))
    if not episode:
        reason = faults[0] if faults else f"{catalog.data_file(0) if count else 'data'} is missing"
        raise DatasetError(
            f"{catalog.root}: not one of the {count} episodes can be read, so nothing can be "
            f"measured: {reason}. Fetch the dataset again (`hf download OWNER/NAME --repo-type "
            "dataset`; a clone needs `git lfs pull`)"
        )
    values = {name: np.concatenate(pieces) for name, pieces in parts.items()}
    stamps = values.pop("timestamp", np.zeros((0, 1)))[:, 0]
    return _Rows(values, np.concatenate(episode), stamps)


def _columns(catalog: DatasetCatalog, kind: str, given: Sequence[str]) -> list[str]:
    vectors = [
        name
        for name, column in catalog.features.items()
        if len(column.shape) == 1
        and column.dtype.startswith(("float", "int", "double", "bool"))
        and name not in _BOOKKEEPING
    ]
    if given:
        for name in given:
            if name not in vectors:
                raise DatasetError(
                    f"{catalog.root} has no column of numbers {name!r}.{suggest(name, vectors)} It "
                    f"has {preview(vectors, 20)}"
                )
        return list(given)
    exact = [n for n in vectors if n in (kind, f"{kind}s", f"observation.{kind}")]
    split = [n for n in vectors if n.startswith((f"{kind}.", f"{kind}s.", f"observation.{kind}."))]
    found = exact or split
    if not found or len(exact) > 1:
        raise DatasetError(
            f"{catalog.root}: which columns are the {kind}? "
            + (f"{preview(exact)} are all called so" if exact else "None is called so")
            + f". Give --{kind} COLUMN ...; columns of numbers: {preview(vectors, 20) or 'none'}"
        )
    return found


def _parts(catalog: DatasetCatalog, column: str) -> Iterator[DraftPart]:
    """Yield the parts of a column: neighbors whose names speak of the same part of the robot."""
    width = catalog.features[column].shape[0]
    names = number_names(catalog.features[column].names, width)
    own = column.rpartition(".")[2]
    if names and all(re.fullmatch(rf"{own.rstrip('s')}s?_?\d+", name) for name in names):
        names = None  # state_0, state_1: they say no more than their places.
    if names is None:
        numbers = tuple(str(i) for i in range(width))
        yield DraftPart(name=own, column=column, start=0, numbers=numbers, whole=True)
        return
    runs = [
        (group, [i for i, _ in found])
        for group, found in groupby(enumerate(names), lambda e: group_of(e[1]))
    ]
    if len(runs) > 12:
        # Names that alternate cut nothing that a person would call a part.
        yield DraftPart(name=own, column=column, start=0, numbers=tuple(names), whole=True)
        return
    seen: dict[str, int] = {}
    for group, places in runs:
        seen[group] = seen.get(group, 0) + 1
        name = group if seen[group] == 1 else f"{group}_{seen[group]}"
        yield DraftPart(
            name=name, column=column, start=places[0], whole=len(places) == width,
            numbers=tuple(names[i] for i in places),
        )  # fmt: skip


def _of(part: DraftPart, rows: _Rows) -> Floats:
    return rows.values[part.column][:, part.start : part.start + len(part.numbers)]


def _measured(part: DraftPart, states: Sequence[DraftPart], rows: _Rows, fps: float) -> DraftAction:
    """Return a part of the action with what its numbers are."""
    pair = _pair(part, states)
    actions = _of(part, rows)
    ahead = sorted({1, 2, 3, 5, 8, max(1, round(_REACHED_S * fps))})
    gripper = _two_way(part, actions)
    kinds: list[Kind] = []
    shown: list[str] = []
    others = [pair] if pair is not None else list(states)
    against = np.concatenate([_of(other, rows) for other in others], axis=1)
    for i in range(actions.shape[1]):
        same = against[:, i : i + 1] if pair is not None else against
        kind, evidence = _kind(actions[:, i], same, rows, ahead, paired=pair is not None)
        two_way = gripper is not None and gripper[0] == i
        kinds.append("still" if kind == "open" and two_way else kind)
        if kind != "still" and not two_way:
            shown.append(f"{part.numbers[i]}: {evidence}")
    kind = _together(kinds)
    moving = sum(one != "still" for one in kinds)
    agreeing = sum(one == kind for one in kinds)
    share = "not decided" if kind == "open" else f"{agreeing} of {moving} that move"
    text = [f"{share}: {_MEANING[kind]}"] if moving else []
    if gripper is not None:
        index, low, high = gripper
        text.append(
            f"{part.numbers[index]} takes two values in {len(actions):,} rows: {low:g} and {high:g}"
        )
    hold = f"state.{pair.name}" if kind == "absolute" and pair is not None else None
    if kind in ("difference", "command"):
        hold = "zero"
    return DraftAction(
        part=part, kind=kind, evidence=(*text, *shown), hold=hold, gripper=gripper,
        pair=pair if kind == "absolute" else None,
    )  # fmt: skip


_MEANING: Mapping[Kind, str] = {
    "absolute": "the state reaches the action (absolute positions in the state's units)",
    "difference": "the state changes by the action (differences from step to step)",
    "command": "the state changes in proportion to the action (steps or speeds in other units)",
    "still": "nothing moves",
    "open": "neither the state nor its change follows these numbers clearly",
}


def _together(kinds: Sequence[Kind]) -> Kind:
    """Return the kind of a part: that of at least half of what moves, contradicted by none."""
    moving = [kind for kind in kinds if kind != "still"]
    if not moving:
        return "still"
    clear = {kind for kind in moving if kind != "open"}
    if {"difference", "command"} == clear:
        clear = {"command"}
        moving = ["command" if kind == "difference" else kind for kind in moving]
    if len(clear) != 1:
        return "open"
    (kind,) = clear
    return kind if 2 * moving.count(kind) >= len(moving) else "open"


def _kind(
    action: Floats, states: Floats, rows: _Rows, ahead: Sequence[int], *, paired: bool
) -> tuple[Kind, str]:
    """Return what an action number is, and the evidence.

    Args:
        action: (rows,).
        states: (rows, candidates): the number of the state that it should move, or all of them.
        rows: Which rows are of one episode.
        ahead: After how many rows the state is looked at.
        paired: Whether the state is in the action's units.
    """
    if np.ptp(action) <= _STILL * max(1.0, float(np.abs(action).max())):
        return "still", "never changes"
    level = _best(action, states, rows, ahead, change=False)
    change = _best(action, states, rows, ahead, change=True)
    said = (
        f"correlation {level.correlation:.2f} with the state {level.ahead} rows on, "
        f"{change.correlation:.2f} with its change"
    )
    if level.correlation >= _FOLLOWS and change.unexplained >= _APART * level.unexplained:
        within = _SAME_SCALE[0] <= level.scale <= _SAME_SCALE[1]
        if paired and within:
            return "absolute", said
        return "open", f"{said}; state = {level.scale:.3g} x action, other units"
    if abs(change.correlation) >= _FOLLOWS and level.unexplained >= _APART * change.unexplained:
        exact = paired and change.ahead == 1 and _SAME_SCALE[0] <= change.scale <= _SAME_SCALE[1]
        by = f"{said}; change in {counted(change.ahead, 'row')} = {change.scale:.3g} x action"
        return ("difference" if exact else "command"), by
    return "open", said


@dataclass(frozen=True)
class _Fit:
    correlation: float
    scale: float
    ahead: int

    @property
    def unexplained(self) -> float:
        """Share of the variance that the line leaves."""
        return 1.0 - self.correlation**2


def _best(
    action: Floats, states: Floats, rows: _Rows, ahead: Sequence[int], *, change: bool
) -> _Fit:
    """Return the best straight line from an action to a later state, or to its change."""
    best = _Fit(0.0, 0.0, ahead[0])
    for steps in ahead:
        now, then = rows.pairs(steps)
        if len(now) < 10:
            continue
        given = action[now] if not change or steps == 1 else _summed(action, now, steps)
        reached = states[then] - states[now] if change else states[then]
        x = given - given.mean()
        y = reached - reached.mean(axis=0)
        power, other = float(x @ x), (y * y).sum(axis=0)
        along = x @ y
        with np.errstate(divide="ignore", invalid="ignore"):
            correlation = (
                np.where(other > 0, along / np.sqrt(power * other), 0.0)
                if power
                else np.zeros(len(along))
            )
        at = int(np.argmax(np.abs(correlation)))
        if abs(correlation[at]) > abs(best.correlation):
            best = _Fit(float(correlation[at]), float(along[at] / power), steps)
    return best


def _summed(action: Floats, now: NDArray[np.int64], steps: int) -> Floats:
    """Return the sum of the actions from each row over the next ``steps``."""
    total = np.concatenate([[0.0], np.cumsum(action)])
    summed: Floats = total[now + steps] - total[now]
    return summed


def _two_way(part: DraftPart, actions: Floats) -> tuple[int, float, float] | None:
    """Return the one number of a part that takes two values, if its name may be a gripper's."""
    found = []
    for i, name in enumerate(part.numbers):
        values = np.unique(actions[:, i])
        gripping = name.isdigit() or group_of(name).endswith(("gripper", "hand"))
        if len(values) == 2 and gripping:
            found.append((i, float(values[0]), float(values[1])))
    return found[0] if len(found) == 1 else None


def _pair(part: DraftPart, states: Sequence[DraftPart]) -> DraftPart | None:
    """Return the part of the state that has the same numbers, by their names or as a whole."""
    same = [one for one in states if one.numbers == part.numbers and not one.numbers[0].isdigit()]
    named = [
        one for one in states if one.name == part.name and len(one.numbers) == len(part.numbers)
    ]
    whole = [
        one for one in states if one.whole and part.whole and len(one.numbers) == len(part.numbers)
    ]
    for found in (same, named, whole):
        if len(found) == 1:
            return found[0]
    return None


def _with_holds(actions: Sequence[DraftAction]) -> list[DraftAction]:
    """Give a two-way gripper alone, which nothing moves, what keeps it where the rest is steps."""
    steps = any(one.kind in ("difference", "command") for one in actions)
    return [
        replace(one, hold="zero") if steps and one.hold is None and one.gripper is not None
        and len(one.part.numbers) == 1 else one
        for one in actions
    ]  # fmt: skip


def _narrowed(
    actions: Sequence[DraftAction],
) -> tuple[tuple[DraftAction, ...], tuple[DraftAction, ...]]:
    """Return the parts to learn, and those that never move where all are too many numbers."""
    if sum(len(one.part.numbers) for one in actions) <= MAX_ACTION_DIM:
        return tuple(actions), ()
    moving = tuple(one for one in actions if one.kind != "still")
    return moving, tuple(one for one in actions if one.kind == "still")


def _colored(catalog: DatasetCatalog) -> list[str]:
    return [name for name in catalog.cameras if "depth" not in name.lower()]


def _view(catalog: DatasetCatalog, column: str) -> DraftView:
    resolution = catalog.frame_size(column)
    share = min(1.0, _LARGEST / max(resolution))
    height, width = (
        max(_SIZE_STEP, int(side * share) // _SIZE_STEP * _SIZE_STEP) for side in resolution
    )
    name = re.sub(r"\s+", "_", column.rpartition("images.")[2])
    return DraftView(name=name, column=column, resolution=resolution, size=(height, width))


def _rate(catalog: DatasetCatalog, rows: _Rows) -> tuple[float | None, str]:
    """Return the rate, if list and time stamps agree, and the evidence."""
    if not len(rows.stamps):
        return float(catalog.fps), f"info.json says {catalog.fps:g}; rows have no time stamps"
    now, then = rows.pairs(1)
    gaps = rows.stamps[then] - rows.stamps[now]
    gap = float(np.median(gaps)) if len(gaps) else 0.0
    if gap <= 0:
        return float(catalog.fps), f"info.json says {catalog.fps:g}; time stamps say nothing"
    measured = 1 / gap
    text = f"info.json says {catalog.fps:g}; time stamps are {gap:.4g} s apart in the middle"
    if abs(measured - catalog.fps) > 0.02 * catalog.fps:
        return None, text
    return float(catalog.fps), text


def _asked(draft: RobotDraft, cameras: Sequence[str]) -> RobotDraft:
    """Return the draft with its questions."""
    questions = list(cameras)
    if not draft.views:
        questions.append("there is no camera: which column holds pictures?")
    if draft.rate is None:
        questions.append(f"at which rate does the robot act? {draft.rate_evidence}")
    for one in draft.action:
        if one.kind == "open":
            questions.append(
                f"action.{one.part.name}: what do its numbers mean? {_MEANING['open']}; give the "
                "part hold= once you know (and reference= if it is a position)"
            )
        elif one.hold is None:
            questions.append(f"action.{one.part.name}: what keeps it as it is? Give the part hold=")
    width = sum(len(one.part.numbers) for one in draft.action)
    if width > MAX_ACTION_DIM:
        questions.append(
            f"the action has {width} numbers, the network takes {MAX_ACTION_DIM}: which parts are "
            "left out? Give --without PART ..."
        )
    held = sum(len(part.numbers) for part in draft.state)
    if held > MAX_STATE_DIM:
        questions.append(
            f"the state has {held} numbers, the network takes {MAX_STATE_DIM}: give --without "
            "PART ... or --state COLUMN ..."
        )
    return replace(draft, questions=tuple(questions))
