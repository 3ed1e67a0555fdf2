"""Flags that say how a run cuts samples, which several commands share."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from dzrobot.commands.options import flags
from dzrobot.documents import read_json
from dzrobot.embodiments.registry import EMBODIMENTS
from dzrobot.embodiments.spec import Embodiment, Recorded
from dzrobot.embodiments.timing import FRAME_GRIDS
from dzrobot.errors import DatasetError
from dzrobot.recording.formats import EPISODE_CHOICES, INFO
from dzrobot.training.recipes.read import recipe_sections, robot_of_run
from dzrobot.training.sft_config import DamagedFiles, DataConfig, ModelConfig

_OF_A_RUN: Mapping[tuple[str, str], Mapping[str, Any]] = {
    ("data", "sampling_mode"): {
        "choices": ["aligned", "multi_anchor"],
        "help": "data.sampling_mode of the run (default: the robot's)",
    },
    ("data", "frame_grid"): {"choices": sorted(FRAME_GRIDS)},
    ("data", "video_in_chunk_offsets"): {"type": flags.numbers, "metavar": "0,N,..."},
    ("data", "macro_stride"): {"type": flags.whole(1)},
    ("model", "action_horizon"): {"type": flags.whole(1)},
    ("model", "max_chunk_size"): {"type": flags.whole(1)},
    ("data", "pad_tail"): {
        "action": "store_true",
        "help": "data.pad_tail of the run: samples repeat an episode's last row",
    },
    ("data", "episodes"): {
        "choices": EPISODE_CHOICES,
        "help": "data.episodes of the run (default: successes, those not marked as failures)",
    },
}
"""Section and field of a recipe -> the flag that says it."""


def add_sampling(group: Any) -> None:
    """Declare the flags that say how a run will cut samples; see :func:`sampled_robot`."""
    group.add_argument(
        "--recipe", type=flags.text, help="take all of it from this recipe, as `dzrobot train` does"
    )
    for (section, name), options in _OF_A_RUN.items():
        words = {"help": f"{section}.{name} of the run", "default": None, **options}
        group.add_argument(f"--{name.replace('_', '-')}", **words)


def add_damaged(parser: Any) -> None:
    """Declare the flag that says what becomes of episodes that cannot be used."""
    parser.add_argument(
        "--damaged", choices=get_args(DamagedFiles),
        help="data.on_corrupt of the run: episodes whose files are missing, damaged or of another "
        "episode stop it and are named (refuse, the default), or are left out and counted (count)",
    )  # fmt: skip


def damaged_words(arguments: argparse.Namespace) -> list[str]:
    """Return the override of a recipe that the flag of :func:`add_damaged` stands for."""
    given: DamagedFiles | None = arguments.damaged
    return [] if given is None else [f"data.on_corrupt={given}"]


def add_recorded(group: Any) -> None:
    """Declare the flag that says what recordings hold."""
    group.add_argument(
        "--recorded", choices=get_args(Recorded), default="actions",
        help="what the recordings hold: state and actions; the state without actions; images and "
        "instructions alone (default: actions)",
    )  # fmt: skip


def sampled_robot(
    arguments: argparse.Namespace, tag: str, datasets: list[str]
) -> tuple[Embodiment, ModelConfig, DataConfig]:
    """Return ``tag`` with the frame grid and horizon that the flags of :func:`add_sampling` give.

    Also the sections of the recipe that say so, checked.

    Raises:
        ConfigError: There is no such recipe, or the flags do not go together.
    """
    sections = recipe_sections(arguments.recipe)
    for section, name in _OF_A_RUN:
        if (value := vars(arguments)[name]) is not None:
            sections[section][name] = value
    if (damaged := vars(arguments).get("damaged")) is not None:
        sections["data"]["on_corrupt"] = damaged
    return robot_of_run(tag, datasets, sections)


def training_words(
    arguments: argparse.Namespace, tag: str, datasets: Sequence[str | Path]
) -> list[str]:
    """Return what `dzrobot train` is given for a run that cuts samples as the flags say.

    Args:
        arguments: With the flags of :func:`add_sampling`.
        tag: Robot of the recordings.
        datasets: Their folders, or names on the hub.
    """
    paths = ",".join(map(str, datasets))
    said = {f"{section}.{name}": vars(arguments)[name] for section, name in _OF_A_RUN}
    return [
        arguments.recipe or _RECIPES.get(tag, "tiny_cpu"),
        f"model.embodiment_tag={tag}",
        f"data.train_data_paths={paths if len(datasets) == 1 else f'[{paths}]'}",
        *(f"{name}={value}" for name, value in said.items() if value not in (None, False)),
    ]


_RECIPES = {"libero_mini": "mini_lift_cpu"}
"""Recipe of a small network for a robot, where it is not the general one."""


def recorded_robot(folder: Path, named: str | None) -> str:
    """Return how a command names the robot of a recording, image size included.

    Args:
        folder: Of the recording.
        named: What a user called it; None: what the recording says.
    """
    if named is not None or not (folder / INFO).is_file():
        return named or "TAG"
    info = read_json(folder / INFO, dict[str, Any], DatasetError)
    robot = EMBODIMENTS.get(str(info.get("robot_type")))
    if robot is None:
        return "MODULE:NAME"
    columns = info.get("features", {})
    sizes = {
        tuple(columns[view.feature].get("shape", ())[:2])
        for view in robot.views
        if view.feature in columns
    }
    if len(sizes) != 1 or sizes == {view.resolution for view in robot.views}:
        return robot.tag
    return f"{robot.tag}@{'x'.join(map(str, sizes.pop()))}"
