"""``dzrobot stats``: measure the statistics that training and acting normalize by."""

import argparse
from pathlib import Path
from typing import Any

from dzrobot.commands import flags
from dzrobot.documents import read_json
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.errors import StatisticsError
from dzrobot.files import explained, write_json
from dzrobot.progress import progress_bar
from dzrobot.training.data.dataset import DatasetReader, ReaderOptions
from dzrobot.training.data.statistics import measure, merge

SUMMARY = "measure normalization statistics of LeRobot datasets"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``dzrobot stats``."""
    parser.add_argument(
        "embodiment",
        type=flags.text,
        help="libero_sim, oxe_droid, franka_pnp, or module:NAME of your own",
    )
    parser.add_argument(
        "--dataset",
        type=flags.text,
        nargs="+",
        required=True,
        metavar="PATH",
        help="folders or hub names",
    )
    parser.add_argument("--output", type=flags.path, required=True, help="metadata.json to write")
    parser.add_argument(
        "--merge", action="store_true", help="add to the tags and counts already in the output"
    )
    parser.add_argument(
        "--damaged",
        choices=["refuse", "count"],
        default="refuse",
        help="episodes that cannot be read: stop and name them, or leave them out",
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure and write."""
    embodiment = load_embodiment(arguments.embodiment)
    output: Path = arguments.output
    known = _known(output, merging=arguments.merge)
    options = ReaderOptions(damaged=arguments.damaged, images=False)
    readers = []
    for path in arguments.dataset:
        with progress_bar(f"reading {path}") as advance:
            readers.append(DatasetReader(path, embodiment, options, progress=advance))
        print(readers[-1].report())
    with progress_bar("measuring") as advance:
        entry = measure(readers, embodiment, advance)
    if embodiment.tag in known:
        entry = merge(known[embodiment.tag], entry)
    with explained(f"write the statistics to {output}", StatisticsError):
        write_json(output, {**known, embodiment.tag: entry})
    for kind, parts in entry["statistics"].items():
        for name, table in parts.items():
            print(f"{kind}.{name}  q01 {_numbers(table['q01'])}  q99 {_numbers(table['q99'])}")
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


def _numbers(values: list[float]) -> str:
    return "[" + ", ".join(f"{value:.4g}" for value in values) + "]"
