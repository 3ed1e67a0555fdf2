"""``dzrobot replay``: a recorded episode's actions, sent to the robot again."""

import argparse
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dzrobot.commands.options import flags
from dzrobot.commands.options.arm import add_attention, looked_after
from dzrobot.embodiments.spec import Embodiment, Part
from dzrobot.errors import DatasetError, StoppedError
from dzrobot.recording.formats import EpisodeFacts
from dzrobot.rollout.demonstrations.record import NO_START, RecordedActions, replay
from dzrobot.rollout.environment import (
    EnvironmentFacts,
    look_at,
    made_environment,
    needed_robot,
)
from dzrobot.training.data.column_mapping import ColumnSource, resolve_vectors
from dzrobot.training.data.columns import episode_rows, matrix, read_data_file
from dzrobot.training.data.lerobot import RATE_TOLERANCE, DatasetCatalog

SUMMARY = "replay recorded actions"

START = "init_state_id"

_LAST_START = 2**24
"""Columns are read as float32, which counts up to here."""


def add_workcell(parser: argparse.ArgumentParser) -> None:
    """Declare the flags that say which environment is driven."""
    parser.add_argument(
        "--env", type=flags.text, default="dzrobot/Franka-PnP-v0", help="Gymnasium id"
    )
    parser.add_argument(
        "--workcell",
        type=flags.text,
        help="emulated, emulated:empty, emulated:OBJECT, fake, or a YAML file of a workcell",
    )
    parser.add_argument(
        "--env-arg", action="append", default=[], metavar="KEY=VALUE",
        help="keyword argument of the environment, such as slow_first_steps=20",
    )  # fmt: skip


def workcell_arguments(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the environment's keyword arguments."""
    given = {} if arguments.workcell is None else {"workcell": arguments.workcell}
    return given | flags.keywords(arguments.env_arg)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``dzrobot replay``."""
    parser.description = (
        "Send the actions of a recorded episode to the environment again, through the same limits, "
        "and say how far the arm ended up from where it was then."
    )
    parser.add_argument("dataset", type=flags.path, help="folder of a LeRobot dataset")
    parser.add_argument("--episode", type=flags.episode_number, default=0, help="which episode")
    add_workcell(parser)
    add_attention(parser)


def run(arguments: argparse.Namespace) -> int:
    """Replay, print the comparison, and return 1 when the episode was cut short."""
    given = workcell_arguments(arguments)
    facts = look_at(arguments.env, None, given)
    robot = needed_robot(arguments.env, facts)
    recording = load_recording(arguments.dataset, arguments.episode, robot, facts)
    steps = len(recording.actions)
    env = made_environment(arguments.env, {"max_episode_steps": steps + 1, **given})
    with looked_after(arguments, "dzrobot replay", None) as people, closing(env):
        people.progress(f"replaying episode {arguments.episode} of {arguments.dataset}")
        outcome, states = replay(people.opened(env), recording, robot)
    if outcome.stop:
        raise StoppedError(f"after {outcome.steps} of {steps} recorded steps, {outcome.stop}")
    print(f"{outcome.steps} of {steps} recorded steps carried out, ended by {outcome.ended}")
    count = min(len(states), steps)
    spread = np.abs(states[:count] - recording.states[:count])
    for part, first, last in _slices(robot.state):
        worst = spread[:, first:last].max(initial=0.0)
        print(f"{part.key}: largest difference {worst:.4f}")
    if facts.hand_position is not None:
        moved = states[:count, facts.hand_position] - recording.states[:count, facts.hand_position]
        away = np.linalg.norm(moved, axis=1)
        print(f"hand: {away.mean():.4f} m away on average, {away.max(initial=0.0):.4f} m at most")
    return 0 if outcome.steps == steps or outcome.success else 1


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
        facts: Of the environment that is to repeat them. None: nobody does.

    Raises:
        DatasetError: the dataset cannot be read, has no such episode or column, or its actions mean
            something else than those of the environment.
    """
    catalog = path if isinstance(path, DatasetCatalog) else DatasetCatalog.open(path)
    said = catalog.facts.get(episode, EpisodeFacts(episode_index=episode))
    if facts is not None:
        _check_rate(catalog, facts)
        _check_actions(catalog, said, facts)
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
    try:
        table = read_data_file(catalog, catalog.data_file(ordinal), list(widths))
        _, rows = episode_rows(catalog, ordinal, table)
        values = {name: matrix(rows[name], name, width) for name, width in widths.items()}
        start = _checked_start(values, said)
    except DatasetError as error:
        raise DatasetError(
            f"{catalog.root}: episode {episode} cannot be replayed: {error}"
        ) from error
    action, state = (
        _joined(values, [sources[key] for key in keys])
        for keys in (robot.action_keys, robot.state_keys)
    )
    return RecordedActions(action, state, start, said.seed, said.success)


def _checked_start(values: Mapping[str, NDArray[np.float32]], said: EpisodeFacts) -> int | None:
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
        return None if said.init_state_id == NO_START else said.init_state_id
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


def _check_actions(catalog: DatasetCatalog, said: EpisodeFacts, facts: EnvironmentFacts) -> None:
    """Refuse actions of another scale or anchor, where recording and workcell say theirs."""
    if facts.workcell is None:
        return
    known = said.model_dump()
    for name, here in facts.workcell.get("action", {}).items():
        there = known.get(f"action.{name}", here)
        if there != here:
            raise DatasetError(
                f"episode {said.episode_index} of {catalog.root} was recorded with "
                f"action.{name} = {there}, the workcell has {here}: set it to {there}"
            )


def _joined(
    values: Mapping[str, NDArray[np.float32]], sources: Sequence[ColumnSource]
) -> NDArray[np.float32]:
    cut = [values[source.column][:, source.start : source.stop] for source in sources]
    return np.concatenate(cut, axis=1)


def _slices(parts: Sequence[Part]) -> list[tuple[Part, int, int]]:
    found, start = [], 0
    for part in parts:
        found.append((part, start, start + part.dim))
        start += part.dim
    return found
