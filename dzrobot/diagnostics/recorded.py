"""Recorded episodes, read so that a robot or simulator can repeat them, and their defects."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from dzrobot.diagnostics.checkup import LOOKED_AT, Finding, examine
from dzrobot.diagnostics.commanded import check_commands
from dzrobot.diagnostics.motion import Bench, RecordedStart
from dzrobot.documents import read_json, shorten
from dzrobot.embodiments.spec import Embodiment
from dzrobot.errors import ConfigError, DatasetError, preview
from dzrobot.progress import Show
from dzrobot.recording.catalog import RATE_TOLERANCE, DatasetCatalog
from dzrobot.recording.formats import EpisodeFacts
from dzrobot.rollout.demonstrations.collection import PLAN_FILE
from dzrobot.rollout.demonstrations.record import EXECUTED, NO_START, RecordedActions
from dzrobot.rollout.environment import EnvironmentFacts, accepted, look_at, needed_robot
from dzrobot.training.data.claims import first_frame
from dzrobot.training.data.column_mapping import (
    TASK_COLUMN,
    ColumnSource,
    resolve,
    resolve_vectors,
)
from dzrobot.training.data.columns import EpisodeRows, matrix, read_data_file
from dzrobot.training.data.embedded_images import EmbeddedImages
from dzrobot.training.data.video_decoding import Videos

START = "init_state_id"

_LAST_START = 2**24
"""Columns are read as float32, which counts up to here."""


class _Collected(BaseModel):
    """What is read of a collection's plan."""

    model_config = ConfigDict(extra="ignore")

    noise: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] = 0.0


def load_recording(
    path: Path | DatasetCatalog,
    episode: int,
    robot: Embodiment,
    facts: EnvironmentFacts | None = None,
) -> RecordedActions:
    """Return the vectors of one episode.

    Args:
        path: Folder of the dataset, or its catalog where that was read before.
        episode: Which one.
        robot: Whose actions and states they are.
        facts: Of the environment that is to repeat them. None: none does.

    Raises:
        DatasetError: the dataset cannot be read, has no such episode or column, or its actions mean
            something else than those of the environment.
    """
    catalog = path if isinstance(path, DatasetCatalog) else DatasetCatalog.open(path)
    stated = catalog.facts.get(episode, EpisodeFacts(episode_index=episode))
    if facts is not None:
        _check_rate(catalog, facts)
        _check_actions(catalog, stated, facts)
        _check_scene(catalog, stated, facts)
    numbers = catalog.episodes.index.tolist()
    if episode not in numbers:
        raise DatasetError(
            f"{catalog.root} has no episode {episode}; it has {numbers[:1]} to {numbers[-1:]}"
        )
    ordinal = numbers.index(episode)
    sources = resolve_vectors(catalog, robot)
    columns = dict.fromkeys(source.column for source in sources.values())
    widths = {name: catalog.features[name].shape[0] for name in columns}
    widths |= {"frame_index": 1} | ({START: 1} if START in catalog.features else {})
    done = catalog.features.get(EXECUTED)
    if done is not None:
        if list(done.shape) != [robot.action_dim]:
            raise DatasetError(
                f"{catalog.root}: {EXECUTED} has shape {list(done.shape)}, and an action of "
                f"{robot.tag} has {robot.action_dim} numbers"
            )
        widths[EXECUTED] = robot.action_dim
    try:
        table = read_data_file(catalog, catalog.data_file(ordinal), list(widths))
        _, rows = EpisodeRows(catalog, table).of(ordinal)
        values = {name: matrix(rows[name], name, width) for name, width in widths.items()}
        start = _checked_start(values, stated)
    except DatasetError as error:
        raise DatasetError(
            f"{catalog.root}: episode {episode} cannot be replayed: {error}"
        ) from error
    action, state = (
        _joined(values, [sources[key] for key in keys])
        for keys in (robot.action_keys, robot.state_keys)
    )
    executed = values.get(EXECUTED)
    return RecordedActions(action, state, start, stated.seed, stated.success, executed)


def _checked_start(values: Mapping[str, NDArray[np.float32]], stated: EpisodeFacts) -> int | None:
    """Return where the episode began; its frames must be there, in their order.

    Each row says it in recordings of an environment, the list of facts in collections.

    Raises:
        DatasetError: they are not, or the number is none of a start.
    """
    frames = values["frame_index"][:, 0]
    if not len(frames):
        raise DatasetError("it has no frames")
    if not np.array_equal(frames, np.arange(len(frames))):
        raise DatasetError("frame_index does not count its rows from 0")
    if START not in values:
        return None if stated.init_state_id == NO_START else stated.init_state_id
    starts = values[START]
    start = int(starts[0, 0])
    if not NO_START <= start <= _LAST_START or (starts != start).any():
        raise DatasetError(
            f"{START} goes from {starts.min():g} to {starts.max():g}; allowed is one number from "
            f"0 to {_LAST_START}, or {NO_START} for none, in all rows"
        )
    return None if start == NO_START else start


def _check_rate(catalog: DatasetCatalog, facts: EnvironmentFacts) -> None:
    """Refuse actions that were made for another rate: they would be other speeds."""
    hz = facts.control_hz
    if hz is not None and abs(catalog.fps - hz) > RATE_TOLERANCE * hz:
        raise DatasetError(
            f"{catalog.root} was recorded at {catalog.fps:g} actions per second, and the "
            f"environment takes {hz:g}: set control_hz of the workcell to {catalog.fps:g}"
        )


def _check_actions(catalog: DatasetCatalog, stated: EpisodeFacts, facts: EnvironmentFacts) -> None:
    """Refuse actions of another scale or anchor, where recording and workcell say theirs."""
    if facts.workcell is None:
        return
    known = stated.model_dump()
    for name, here in facts.workcell.get("action", {}).items():
        there = known.get(f"action.{name}", here)
        if there != here:
            raise DatasetError(
                f"episode {stated.episode_index} of {catalog.root} was recorded with "
                f"action.{name} = {there}, the workcell has {here}: set it to {there}"
            )


def _check_scene(catalog: DatasetCatalog, stated: EpisodeFacts, facts: EnvironmentFacts) -> None:
    """Refuse actions that were made among other objects, where recording and scene name theirs."""
    recorded = str(stated.model_dump().get("scene_objects", "")).split()
    lacking = set(facts.scene_objects) - {name.lower() for name in recorded}
    if recorded and lacking:
        others = [name for name in recorded if name.lower() not in facts.scene_objects]
        raise DatasetError(
            f"episode {stated.episode_index} of {catalog.root} was recorded in another scene: the "
            f"environment's has {preview(sorted(lacking))}, which the recorded one lacks; that had "
            f"{preview(others) if others else 'nothing in its place'}. The task's problem file was "
            "changed after the recording, or it is another task's: repeat it in the task and the "
            "release of LIBERO that it was recorded in (--env, --env-arg task_id=N); training on "
            "it needs no simulator"
        )


def _joined(
    values: Mapping[str, NDArray[np.float32]], sources: Sequence[ColumnSource]
) -> NDArray[np.float32]:
    cut = [values[source.column][:, source.start : source.stop] for source in sources]
    return np.concatenate(cut, axis=1)


def examine_dataset(
    root: Path, env: str, arguments: Mapping[str, Any], episodes: int, show: Show
) -> Iterator[Finding]:
    """Repeat recorded actions in a simulator, or compare an arm's states with its actions.

    Args:
        root: Folder of the dataset.
        env: Environment that it was recorded in.
        arguments: Keyword arguments of the environment.
        episodes: How many are repeated as a whole.
        show: Takes the progress.

    Raises:
        DzrobotError: dataset or environment cannot be read or made, or do not belong together.
    """
    catalog = DatasetCatalog.open(root)
    given = _in_its_size(catalog, env, arguments)
    facts = look_at(env, None, given)
    robot = needed_robot(env, facts)
    ordinals = _of_task(catalog, None if facts.moves_an_arm else facts.task, episodes)
    for ordinal in ordinals:
        number = int(catalog.episodes.index[ordinal])
        _check_scene(catalog, catalog.facts.get(number, EpisodeFacts(episode_index=number)), facts)
    read = list(read_episodes(catalog, robot, ordinals, images=not facts.moves_an_arm))
    yield from _rate(catalog, facts)
    if facts.moves_an_arm:
        if facts.hand is None:
            raise ConfigError(f"{env} does not say which numbers move its hand")
        yield from check_commands([one.recording for one in read], facts.hand)
        return
    with Bench(env, given, robot, show) as bench:
        yield from examine(read, bench, robot, facts.hand, noise_of(catalog))


def _in_its_size(catalog: DatasetCatalog, env: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the environment's arguments, with cameras of the size that was recorded."""
    known, _ = accepted(env)
    sizes = {catalog.frame_size(name) for name in catalog.cameras}
    if "resolution" in known and "resolution" not in given and len(sizes) == 1:
        height, width = sizes.pop()
        if height == width:
            return {"resolution": height, **given}
    return dict(given)


def _of_task(catalog: DatasetCatalog, task: str | None, count: int) -> list[int]:
    """Return the first episodes (ordinals) of the environment's task.

    Raises:
        DatasetError: there are none.
    """
    found: list[int] = []
    for ordinal in range(len(catalog.episodes)):
        if len(found) == count:
            break
        if task is None or task == _task(catalog, ordinal):
            found.append(ordinal)
    if not found:
        raise DatasetError(
            f"{catalog.root} has no episode of {shorten(task)}, the environment's task; it has "
            f"{', '.join(map(shorten, islice(catalog.tasks.values(), 4))) or 'none'}: choose the "
            "environment or its task by --env and --env-arg task_id=N"
        )
    return found


def _task(catalog: DatasetCatalog, ordinal: int) -> str | None:
    """Return the instruction at the beginning of an episode."""
    if len(catalog.tasks) == 1:
        return next(iter(catalog.tasks.values()))
    table = read_data_file(catalog, catalog.data_file(ordinal), [TASK_COLUMN])
    _, rows = EpisodeRows(catalog, table).of(ordinal)
    numbers = rows[TASK_COLUMN].to_pylist()
    return catalog.tasks.get(numbers[0]) if numbers else None


def read_episodes(
    catalog: DatasetCatalog, robot: Embodiment, ordinals: list[int], *, images: bool
) -> Iterator[RecordedStart]:
    """Yield episodes by their place in the dataset; the first `LOOKED_AT` with ``images``.

    Their actions are what was done, where noise was added to the recorded ones.

    Raises:
        DatasetError: one cannot be read, or is too short to say anything.
    """
    views = resolve(catalog, robot).views if images else {}
    for place, ordinal in enumerate(ordinals):
        number = int(catalog.episodes.index[ordinal])
        loaded = load_recording(catalog, number, robot)
        recording = loaded.to_repeat
        answers = None if loaded.executed is None else loaded.actions
        if len(recording.actions) < 2:
            raise DatasetError(f"{catalog.root}: episode {number} has a single row; delete it")
        seen = _first_images(catalog, views, ordinal) if place < LOOKED_AT else {}
        yield RecordedStart(number=number, recording=recording, images=seen, answers=answers)


def _rate(catalog: DatasetCatalog, facts: EnvironmentFacts) -> Iterator[Finding]:
    """Yield what the dataset says of its rate; how fast it was, its motion says."""
    hz = facts.control_hz
    if hz is not None and abs(catalog.fps - hz) > RATE_TOLERANCE * hz:
        yield Finding(
            "warn", "frame rate", f"info.json says {catalog.fps:g} rows per second, the "
            f"environment takes {hz:g}; see what its motion says below",
        )  # fmt: skip


def noise_of(catalog: DatasetCatalog) -> float:
    """Return the noise on what was executed, where the dataset holds only actions without it."""
    path = catalog.root / PLAN_FILE
    if EXECUTED in catalog.features:
        return 0.0
    return read_json(path, _Collected, DatasetError).noise if path.exists() else 0.0


def _first_images(
    catalog: DatasetCatalog, views: Mapping[str, ColumnSource], ordinal: int
) -> dict[str, NDArray[np.uint8]]:
    """Return the first image (H, W, 3) of each view of an episode, whether training can use it.

    Args:
        catalog: The folder.
        views: Where each view is read, by key.
        ordinal: Which episode, counted from 0.

    Raises:
        DatasetError: A file is missing or damaged.
    """
    found = {}
    for key, source in views.items():
        if source.kind == "video":
            path = catalog.root / catalog.video_file(ordinal, source.column)
            first = first_frame(catalog, source.column, ordinal)
            found[key] = Videos().clip(path, first, [0])[0]
            continue
        name = catalog.data_file(ordinal)
        row, _ = EpisodeRows(catalog, read_data_file(catalog, name, [])).of(ordinal)
        found[key] = EmbeddedImages().clip(catalog.root / name, source.column, [row])[0]
    return found
