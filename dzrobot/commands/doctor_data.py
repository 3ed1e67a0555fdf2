"""``dzrobot doctor data``: reads a dataset, and has it looked at in its environment."""

import argparse
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import gymnasium as gym
from pydantic import BaseModel, ConfigDict, Field

from dzrobot.commands.options import flags
from dzrobot.commands.replay import add_workcell, load_recording, workcell_arguments
from dzrobot.documents import read_json, shorten
from dzrobot.embodiments.spec import Embodiment
from dzrobot.errors import ConfigError, DatasetError
from dzrobot.progress import Show
from dzrobot.rollout.demonstrations.checkup import (
    LOOKED_AT,
    Finding,
    examine,
)
from dzrobot.rollout.demonstrations.collection import PLAN_FILE
from dzrobot.rollout.demonstrations.commanded import check_commands
from dzrobot.rollout.demonstrations.motion import Bench, RecordedStart
from dzrobot.rollout.environment import EnvironmentFacts, accepted, look_at, needed_robot
from dzrobot.training.data.column_mapping import TASK_COLUMN, frame_size, resolve
from dzrobot.training.data.columns import episode_rows, read_data_file
from dzrobot.training.data.lerobot import RATE_TOLERANCE, DatasetCatalog
from dzrobot.training.data.verify import first_images


class _Collected(BaseModel):
    """What is read of a collection's plan."""

    model_config = ConfigDict(extra="ignore")

    noise: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] = 0.0


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``dzrobot doctor data``."""
    parser.description = (
        "Repeat recorded actions in the environment, from the recorded initial states, and say "
        "which convention differs: images turned or exchanged, gripper, scale, rotation, rate, "
        "rows, poses instead of differences. An arm's recording is only read."
    )
    parser.add_argument("dataset", type=flags.path, help="folder of a LeRobot dataset")
    add_workcell(parser)
    parser.add_argument(
        "--episodes", type=flags.whole(1, 10_000), default=5, help="to repeat as a whole"
    )


def findings(arguments: argparse.Namespace, show: Show) -> Iterator[Finding]:
    """Yield what is found in the dataset.

    Raises:
        DzrobotError: dataset or environment cannot be read or made, or do not belong together.
    """
    catalog = DatasetCatalog.open(arguments.dataset)
    given = _in_its_size(catalog, arguments.env, workcell_arguments(arguments))
    said: dict[str, str | None] = {}

    def ask(env: gym.Env[Any, Any]) -> None:
        said["task"] = getattr(env.unwrapped, "task", None)

    facts = look_at(arguments.env, None, given, ask)
    robot = needed_robot(arguments.env, facts)
    ordinals = _of_task(catalog, None if facts.moves_an_arm else said["task"], arguments.episodes)
    episodes = list(read_episodes(catalog, robot, ordinals, images=not facts.moves_an_arm))
    yield from _rate(catalog, facts)
    if facts.moves_an_arm:
        if facts.hand is None:
            raise ConfigError(f"{arguments.env} does not say which numbers move its hand")
        yield from check_commands([one.recording for one in episodes], facts.hand)
        return
    with Bench(arguments.env, given, robot, show) as bench:
        yield from examine(episodes, bench, robot, facts.hand, _noise(catalog))


def _in_its_size(catalog: DatasetCatalog, env: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the environment's arguments, with cameras of the size that was recorded."""
    known, _ = accepted(env)
    sizes = {frame_size(catalog, name) for name in catalog.cameras}
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
            f"{', '.join(map(shorten, catalog.tasks[:4])) or 'none'}: choose the environment or "
            "its task by --env and --env-arg task_id=N"
        )
    return found


def _task(catalog: DatasetCatalog, ordinal: int) -> str | None:
    """Return the instruction at the beginning of an episode."""
    if len(catalog.tasks) == 1:
        return catalog.tasks[0]
    table = read_data_file(catalog, catalog.data_file(ordinal), [TASK_COLUMN])
    _, rows = episode_rows(catalog, ordinal, table)
    numbers = rows[TASK_COLUMN].to_pylist()
    known = range(len(catalog.tasks))
    return catalog.tasks[numbers[0]] if numbers and numbers[0] in known else None


def read_episodes(
    catalog: DatasetCatalog, robot: Embodiment, ordinals: list[int], *, images: bool
) -> Iterator[RecordedStart]:
    """Yield episodes by their place in the dataset; the first `LOOKED_AT` with ``images``.

    Raises:
        DatasetError: one cannot be read, or is too short to say anything.
    """
    views = resolve(catalog, robot).views if images else {}
    for place, ordinal in enumerate(ordinals):
        number = int(catalog.episodes.index[ordinal])
        recording = load_recording(catalog, number, robot)
        if len(recording.actions) < 2:
            raise DatasetError(f"{catalog.root}: episode {number} has a single row; delete it")
        seen = first_images(catalog, views, ordinal) if place < LOOKED_AT else {}
        yield RecordedStart(number=number, recording=recording, images=seen)


def _rate(catalog: DatasetCatalog, facts: EnvironmentFacts) -> Iterator[Finding]:
    """Yield what the dataset says of its rate; how fast it was, its motion says."""
    hz = facts.control_hz
    if hz is not None and abs(catalog.fps - hz) > RATE_TOLERANCE * hz:
        yield Finding(
            "warn", "frame rate", f"info.json says {catalog.fps:g} rows per second, the "
            f"environment takes {hz:g}; what its motion says stands below",
        )  # fmt: skip


def _noise(catalog: DatasetCatalog) -> float:
    """Return the noise on executed actions, where the dataset was collected by this package."""
    path = catalog.root / PLAN_FILE
    return read_json(path, _Collected, DatasetError).noise if path.exists() else 0.0
