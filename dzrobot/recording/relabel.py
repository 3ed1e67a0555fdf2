"""Labels of recorded episodes changed afterwards, and episodes removed from a recording."""

import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dzrobot.errors import DatasetError
from dzrobot.files import explained, replacing
from dzrobot.recording import column_statistics, folder, formats
from dzrobot.recording.episode_list import list_files
from dzrobot.recording.folder import Change, changing
from dzrobot.recording.lists import RecordingLists
from dzrobot.untrusted import parsing

REWARD = "next.reward"

Array = NDArray[np.generic]
ColumnEdit = Callable[[Array, Array], Array]
"""Takes the rows (T,) of a column of an episode and their frame indices, returns them changed."""

Edits = dict[int, dict[str, ColumnEdit]]
"""What changes in the rows of which episode, by column."""

Progress = Callable[[int, int], None]
"""Takes files done and files in all."""


@dataclass(frozen=True, kw_only=True)
class Relabeling:
    """New labels of an episode; None leaves one as it is."""

    success: bool | None = None
    reason: str | None = None
    """Why it failed."""

    task: str | None = None
    """The instruction."""


def relabel(
    root: Path, episodes: Collection[int], labels: Relabeling, progress: Progress | None = None
) -> None:
    """Change what the recording in ``root`` says of ``episodes``: all of it, or nothing.

    The mark is in ``meta/recording_facts.jsonl``; rewards of 0 and 1 and LeRobot's statistics
    follow it. Killed on the way, the recording is as it was, or the next call finishes the change.

    Args:
        root: Folder of a recording of this package, of any format.
        episodes: Their numbers.
        labels: The new ones.
        progress: Called with data files done and data files in all.

    Raises:
        DatasetError: no such episode, a reason for a success, an empty instruction, or the
            recording cannot be changed.
    """
    if labels.task is not None and not labels.task.strip():
        raise DatasetError("the instruction is empty: give the task as text")
    with _locked(root) as lists, changing(root) as change:
        chosen = _known(lists, episodes)
        edits: Edits = {episode: {} for episode in chosen}
        _mark(lists, chosen, labels)
        if labels.success is not None and _has_plain_reward(lists):
            for episode in chosen:
                edits[episode][REWARD] = _reward(labels.success, lists.rows[episode]["length"])
        if labels.task is not None:
            _instruct(lists, chosen, labels.task, edits)
        wanted = {episode: edit for episode, edit in edits.items() if edit}
        _rewrite(lists, change, wanted, {n: n for n in range(len(lists.rows))}, progress)
        _write(lists, change)


def drop(root: Path, episodes: Collection[int], progress: Progress | None = None) -> None:
    """Take ``episodes`` out of the recording in ``root``; later ones move up.

    Args:
        root: Folder of a recording of this package, of any format.
        episodes: Their numbers.
        progress: Called with data files done and data files in all.

    Raises:
        DatasetError: no such episode, none would be left, or the recording cannot be changed.
    """
    with _locked(root) as lists, changing(root) as change:
        gone = _known(lists, episodes)
        if (root / formats.COLLECTION).exists():
            raise DatasetError(
                f"{root} follows a plan ({formats.COLLECTION}), attempt by attempt: collect to "
                "another folder"
            )
        if len(gone) == len(lists.rows):
            raise DatasetError(f"no episode of {root} would be left: remove the folder")
        kept = [number for number in range(len(lists.rows)) if number not in gone]
        moved = {number: place for place, number in enumerate(kept)}
        first = np.concatenate([[0], np.cumsum([lists.rows[n]["length"] for n in kept])])
        edits = {
            number: {"episode_index": _constant(place), "index": _counted(int(first[place]))}
            for number, place in moved.items()
            if number != place
        }
        before = _all_files(lists)
        _rewrite(lists, change, edits, moved, progress)
        if lists.version != "v3.0":
            for number, place in moved.items():
                if number != place:
                    for camera in lists.cameras:
                        source = root / lists.video_file(number, camera)
                        change.link(source, lists.video_file(place, camera))
        _renumber(lists, kept, first.tolist())
        change.removed = sorted(before - _all_files(lists))
        _write(lists, change)


def described(root: Path) -> list[str]:
    """Return a line for each episode of the recording in ``root``; finish an interrupted change.

    Raises:
        DatasetError: It is none of this package, or cannot be read.
    """
    marks = {True: "success", False: "failure", None: "no mark"}
    lines = []
    with _locked(root) as lists:
        for number, row in enumerate(lists.rows):
            facts = lists.facts.get(number, {})
            mark = marks[facts.get("success")]
            reason = f" ({facts['reason']})" if facts.get("reason") else ""
            tasks = ", ".join(repr(task) for task in row["tasks"])
            lines.append(f"{number}: {row['length']} frames, {mark}{reason}, {tasks}")
    return lines


@contextmanager
def _locked(root: Path) -> Iterator[RecordingLists]:
    if not (root / formats.INFO).is_file():
        raise DatasetError(f"{root} holds no {formats.INFO}: give the folder of a recording")
    with explained(f"change {root}", DatasetError), folder.lock(root) as held:
        held.callback(shutil.rmtree, root / formats.ASIDE, ignore_errors=True)
        folder.remove_unfinished(root)
        with parsing(f"the lists of {root}", DatasetError, "cannot be read", "see inspect-data"):
            lists = RecordingLists.read(root)
        yield lists


def _known(lists: RecordingLists, episodes: Collection[int]) -> list[int]:
    if unknown := sorted(set(episodes) - set(range(len(lists.rows)))):
        raise DatasetError(
            f"{lists.root} has no episode {unknown[0]}; it has 0 to {len(lists.rows) - 1}"
        )
    return sorted(set(episodes))


def _mark(lists: RecordingLists, episodes: Sequence[int], labels: Relabeling) -> None:
    for episode in episodes:
        row = lists.facts.setdefault(episode, {"episode_index": episode})
        if labels.success is not None:
            row["success"] = labels.success
        failed = row.get("success") is False
        if labels.reason is not None and not failed:
            raise DatasetError(
                f"episode {episode} of {lists.root} is not marked as a failure: a reason needs one"
            )
        if labels.reason is not None:
            row["reason"] = labels.reason
        if not failed:
            row.pop("reason", None)
        if len(row) == 1:
            del lists.facts[episode]


def _constant(value: int) -> ColumnEdit:
    return lambda old, _: np.full_like(old, value)


def _counted(first: int) -> ColumnEdit:
    return lambda old, frames: (frames + first).astype(old.dtype)


def _has_plain_reward(lists: RecordingLists) -> bool:
    feature = lists.info["features"].get(REWARD)
    return feature is not None and feature["shape"] == [1]


def _reward(success: bool, length: int) -> ColumnEdit:
    def edit(old: Array, frames: Array) -> Array:
        if not np.isin(old, (0, 1)).all():
            # Shaped by the environment: it says more than a mark does.
            return old
        return np.where(frames == length - 1, success, old if success else 0).astype(old.dtype)

    return edit


def _instruct(
    lists: RecordingLists,
    episodes: Sequence[int],
    task: str,
    edits: Edits,
) -> None:
    """Give ``episodes`` the instruction; one that only they have is renamed in the list."""
    before = {text for episode in episodes for text in lists.rows[episode]["tasks"]}
    others = {
        text for number, row in enumerate(lists.rows) if number not in episodes
        for text in row["tasks"]
    }  # fmt: skip
    if task not in lists.tasks and len(before) == 1 and not before & others:
        lists.tasks[lists.tasks.index(before.pop())] = task
    elif before != {task}:
        if task not in lists.tasks:
            lists.tasks.append(task)
        index = lists.tasks.index(task)
        for episode in episodes:
            edits[episode]["task_index"] = _constant(index)
    for episode in episodes:
        lists.rows[episode]["tasks"] = [task]


def _renumber(lists: RecordingLists, kept: Sequence[int], first: Sequence[int]) -> None:
    rows = []
    for place, number in enumerate(kept):
        row = lists.rows[number] | {"episode_index": place}
        if lists.version == "v3.0":
            row |= {"dataset_from_index": first[place], "dataset_to_index": first[place + 1]}
        rows.append(row)
    lists.rows = rows
    lists.statistics = [lists.statistics[number] for number in kept]
    lists.facts = {
        place: lists.facts[number] | {"episode_index": place}
        for place, number in enumerate(kept)
        if number in lists.facts
    }


def _write(lists: RecordingLists, change: Change) -> None:
    lists.write(change.folder)
    if not lists.facts:
        change.removed.append(str(formats.FACTS))
    listed = [path.relative_to(lists.root) for path in list_files(lists.root)]
    change.removed += [str(name) for name in listed if not (change.folder / name).exists()]


def _all_files(lists: RecordingLists) -> set[str]:
    numbers = range(len(lists.rows))
    videos = {lists.video_file(number, camera) for number in numbers for camera in lists.cameras}
    return videos | {lists.data_file(number) for number in numbers}


def _rewrite(
    lists: RecordingLists,
    change: Change,
    edits: Edits,
    moved: Mapping[int, int],
    progress: Progress | None,
) -> None:
    """Write the data files that change, and measure what changed; who is not in ``moved`` goes."""
    inside: dict[str, list[int]] = {}
    for number in range(len(lists.rows)):
        inside.setdefault(lists.data_file(number), []).append(number)
    work = {
        name: [number for number in numbers if number in moved]
        for name, numbers in inside.items()
        if any(number in edits or number not in moved for number in numbers)
    }
    for done, (name, numbers) in enumerate(work.items(), start=1):
        if numbers:
            # One file an episode before v3.0, named after it.
            target = name if lists.version == "v3.0" else lists.data_file(moved[numbers[0]])
            source = lists.root / name
            # A column that the file lacks is a key, one of another type has values of another.
            with (
                parsing(source, DatasetError, "cannot be read", "see inspect-data"),
                explained(f"write {change.folder / target}", DatasetError),
            ):
                changed = _rewrite_file(source, change.folder / target, edits, numbers)
            for number, columns in changed.items():
                for column, rows in columns.items():
                    lists.statistics[number][column] = column_statistics.of_rows(rows)
        if progress:
            progress(done, len(work))


def _rewrite_file(
    source: Path, target: Path, edits: Edits, numbers: Sequence[int]
) -> dict[int, dict[str, Array]]:
    """Write the rows of ``numbers`` to ``target``; return the columns that were edited."""
    file = pq.ParquetFile(source)
    changed: dict[int, dict[str, list[Array]]] = {}
    with replacing(target) as temporary, pq.ParquetWriter(temporary, file.schema_arrow) as writer:
        for group in range(file.num_row_groups):
            table = file.read_row_group(group)
            owners = table.column("episode_index").to_numpy()
            for number in sorted(set(owners.tolist())):
                for name, edit in edits.get(number, {}).items():
                    mine = owners == number
                    old = table.column(name).to_numpy()
                    frames = table.column("frame_index").to_numpy()
                    new = np.array(old)
                    new[mine] = edit(old[mine], frames[mine])
                    place = table.schema.get_field_index(name)
                    column = pa.array(new, table.schema.field(name).type)
                    table = table.set_column(place, table.schema.field(name), column)
                    changed.setdefault(number, {}).setdefault(name, []).append(new[mine])
            kept = np.isin(owners, numbers)
            table = table if kept.all() else table.filter(pa.array(kept))
            if len(table):
                writer.write_table(table)
    return {
        number: {name: np.concatenate(parts) for name, parts in columns.items()}
        for number, columns in changed.items()
    }
