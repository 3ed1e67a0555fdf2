"""``dzrobot stats``: measure the statistics that training and acting normalize by."""

import argparse
from pathlib import Path
from typing import Any

from dzrobot.cluster import cluster_or
from dzrobot.commands.options import flags
from dzrobot.commands.options.policy import add_ray, read_cluster
from dzrobot.commands.options.sampling import (
    add_damaged,
    add_recorded,
    add_sampling,
    sampled_robot,
    training_words,
)
from dzrobot.documents import read_json
from dzrobot.embodiments.spec import Embodiment
from dzrobot.errors import ConfigError, StatisticsError
from dzrobot.files import explained, write_json
from dzrobot.progress import progress_bar
from dzrobot.training.data.column_mapping import described_robot
from dzrobot.training.data.dataset import DatasetReader, ReaderOptions
from dzrobot.training.data.normalization import measure, merge, narrow_columns
from dzrobot.training.data.reading_pool import READER

SUMMARY = "measure normalization statistics of LeRobot datasets"

COLUMNS = {"state": "observation.state", "action": "action"}
"""LeRobot's own names of the columns, for a robot without code."""

NEXT = "dzrobot train {words}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``dzrobot stats``."""
    parser.add_argument(
        "embodiment", type=flags.text, nargs="?",
        help="a built-in tag, or module:NAME; @HEIGHTxWIDTH behind it for other pictures",
    )  # fmt: skip
    parser.add_argument(
        "--preset",
        dest="named",
        type=flags.text,
        metavar="TAG",
        help="the embodiment, under RLinf's name",
    )
    parser.add_argument(
        "--dataset", "--dataset-root", type=flags.text, nargs="+", required=True, metavar="PATH",
        help="folders or hub names",
    )  # fmt: skip
    parser.add_argument(
        "--output", "--output-metadata", type=flags.output, required=True,
        help="metadata.json to write",
    )  # fmt: skip
    sampling = parser.add_argument_group(
        "how a run will cut samples; relative actions are measured as they are trained"
    )
    add_sampling(sampling)
    add_recorded(sampling)
    sampling.add_argument(
        "--per-step", action="store_true",
        help="measure relative actions for each step of a block by itself, as "
        "model.relative_action_per_horizon: true wants them",
    )  # fmt: skip
    _add_columns(parser.add_argument_group(
        "a robot without code: its columns; actions are taken as absolute"
    ))  # fmt: skip
    parser.add_argument(
        "--merge", action="store_true", help="add to the tags and counts already in the output"
    )
    add_damaged(parser)
    add_ray(parser)


def _add_columns(group: Any) -> None:
    group.add_argument("--embodiment-tag", type=flags.text, metavar="TAG", help="name of the robot")
    for what, column in COLUMNS.items():
        group.add_argument(
            f"--{what}-key", type=flags.text, metavar="COLUMN",
            help=f"column of the {what} (default: {column})",
        )  # fmt: skip
    group.add_argument(
        "--video-keys",
        type=flags.text,
        nargs="+",
        default=[],
        metavar="COLUMN",
        help="columns of the cameras",
    )
    group.add_argument(
        "--use-modality-json", action="store_true",
        help="cut the columns into the parts that meta/modality.json names",
    )  # fmt: skip


def _of_run(arguments: argparse.Namespace) -> tuple[Embodiment, bool, ReaderOptions]:
    """Return the robot with the frame grid and horizon of the run that the numbers are for.

    And whether relative actions are measured step by step, and how recordings are read.
    """
    if arguments.embodiment_tag is not None:
        if arguments.recorded != "actions":
            raise ConfigError(
                f"--recorded {arguments.recorded} is for a robot that is known: write one file "
                "with its Embodiment and name it module:NAME"
            )
        if arguments.embodiment or arguments.named:
            raise ConfigError(
                "--embodiment-tag TAG describes a robot of your own by columns of the dataset, and "
                f"{arguments.embodiment or arguments.named} names a known one: give one of them"
            )
        given = {"state": arguments.state_key, "action": arguments.action_key}
        columns = {what: given[what] or column for what, column in COLUMNS.items()}
        described = described_robot(
            arguments.embodiment_tag, arguments.dataset[0], columns, arguments.video_keys,
            use_modality=arguments.use_modality_json,
        )  # fmt: skip
        options = ReaderOptions(
            damaged=arguments.damaged or "refuse", episodes=arguments.episodes or "successes"
        )
        return described, arguments.per_step, options
    for option in ("state_key", "action_key", "video_keys", "use_modality_json"):
        if vars(arguments)[option]:
            raise ConfigError(
                f"--{option.replace('_', '-')} describes a robot without code: write "
                "--embodiment-tag TAG, a name of your own, in place of a known robot, whose "
                "Embodiment names its columns"
            )
    tag = arguments.embodiment or arguments.named
    if tag is None or (arguments.embodiment and arguments.named):
        raise ConfigError("name one robot: dzrobot stats TAG --dataset PATH --output metadata.json")
    robot, model, data = sampled_robot(arguments, tag, arguments.dataset)
    per_step = arguments.per_step or bool(model.relative_action_per_horizon)
    options = ReaderOptions(damaged=data.on_corrupt, episodes=data.episodes)
    return robot.holding(arguments.recorded), per_step, options


def run(arguments: argparse.Namespace) -> int:
    """Measure and write."""
    embodiment, per_step, options = _of_run(arguments)
    output: Path = arguments.output
    known = _known(output, merging=arguments.merge)
    readers = []
    for path in arguments.dataset:
        with progress_bar(f"reading {path}") as advance:
            readers.append(DatasetReader(path, embodiment, options, progress=advance))
        print(readers[-1].report())
    where = cluster_or(None, read_cluster(arguments.ray), READER)
    with where as processes, progress_bar("measuring") as advance:
        entry = measure(readers, embodiment, advance, per_step=per_step, processes=processes)
    if embodiment.tag in known:
        entry = merge(known[embodiment.tag], entry)
    with explained(f"write the statistics to {output}", StatisticsError):
        write_json(output, {**known, embodiment.tag: entry})
    for kind, parts in entry["statistics"].items():
        for name, table in parts.items():
            print(f"{kind}.{name}  q01 {_numbers(table['q01'])}  q99 {_numbers(table['q99'])}")
    tag = arguments.embodiment or arguments.named or "MODULE:NAME"
    arguments.words = [
        *training_words(arguments, tag, arguments.dataset), f"model.metadata_json_path={output}",
    ]  # fmt: skip
    for warning in narrow_columns(entry):
        print(f"WARNING {warning}")
    print(f"{output}: {embodiment.tag}, {len(entry['provenance']['datasets'])} dataset(s)")
    return 0


def _known(output: Path, *, merging: bool) -> dict[str, Any]:
    with explained(f"write the statistics to {str(output)[:200]}", StatisticsError):
        if not output.exists():
            return {}
    if not merging:
        raise StatisticsError(
            f"{output} exists: --merge adds to it, another --output leaves it as it is"
        )
    return read_json(output, dict[str, dict[str, Any]], StatisticsError)


def _numbers(values: list[Any]) -> str:
    if isinstance(values[0], list):
        return f"{_numbers(values[0])} to {_numbers(values[-1])} from first to last step"
    return "[" + ", ".join(f"{value:.4g}" for value in values) + "]"
