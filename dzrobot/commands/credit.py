"""``dzrobot credit``: what training would learn from each row of runs of a policy."""

import argparse
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import numpy as np

from dzrobot.commands.options import flags
from dzrobot.commands.options.sampling import add_sampling, sampled_robot
from dzrobot.embodiments.spec import Embodiment
from dzrobot.errors import ConfigError, counted
from dzrobot.files import explained, replacing, write_json
from dzrobot.modality.stats import BEYOND, Statistics
from dzrobot.plots import drawn, new_plot
from dzrobot.training.data.credit import Credits, Reason
from dzrobot.training.data.dataset import DatasetReader, ReaderOptions
from dzrobot.training.data.normalization import measure
from dzrobot.training.sft_config import CreditConfig


def _next(arguments: argparse.Namespace) -> str:
    if arguments.episode is None:
        return "dzrobot credit {dataset} --embodiment {embodiment} --episode 0"
    return "dzrobot plan RECIPE.yaml"


NEXT = _next


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``dzrobot credit``."""
    default = CreditConfig()
    parser.description = (
        "Show which rows of a recording of a policy's runs are imitated, given or not used, by who "
        "acted in them and how each episode ended. Nothing is changed. A recipe takes the same "
        "settings as the credit of a source."
    )
    parser.add_argument("dataset", type=flags.path, help="folder of a recording")
    parser.add_argument(
        "--embodiment", type=flags.text, required=True,
        help="built-in tag, or module:NAME of your own",
    )  # fmt: skip
    parser.add_argument(
        "--own", type=flags.number(0, 1), default=default.own,
        help="weight of the policy's actions where it succeeded without help (default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--blame-s", type=flags.number(0, 60), default=default.blame_s,
        help="seconds before a takeover that are never imitated (default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--failures", choices=["video", "leave_out"], default=default.failures,
        help="whether failed episodes train the video, or nothing (default: video)",
    )  # fmt: skip
    parser.add_argument(
        "--episode", type=flags.whole(0), help="show who acted in this one, and what is learned"
    )
    parser.add_argument(
        "--plot", type=flags.output, metavar="FILE", help="draw the episode into a PNG file"
    )
    parser.add_argument(
        "--statistics", type=flags.path, metavar="FILE",
        help="metadata.json of the checkpoint to go on from: say which numbers lie outside of it",
    )  # fmt: skip
    parser.add_argument(
        "--json", type=flags.output, metavar="FILE", help="write the counts to FILE"
    )
    add_sampling(parser.add_argument_group("how a run will cut samples"))


def run(arguments: argparse.Namespace) -> int:
    """Print the tables, and draw the episode."""
    if arguments.plot is not None and arguments.episode is None:
        raise ConfigError("--plot draws one episode: say which by --episode N")
    robot, _, _ = sampled_robot(arguments, arguments.embodiment, [str(arguments.dataset)])
    config = CreditConfig(own=arguments.own, blame_s=arguments.blame_s, failures=arguments.failures)
    reader = DatasetReader(
        arguments.dataset, robot, ReaderOptions(images=False, damaged="count", credit=config)
    )
    table = reader.credits or Credits({}, config, reader.catalog.fps)
    for line in _table(table):
        print(line)
    alone = int(np.count_nonzero(~reader.imitating()))
    print(
        f"{counted(len(reader), 'sample')}: {len(reader) - alone:,} with an action to imitate, "
        f"{alone:,} of the video alone, which are drawn only where credit.share says so"
    )
    warnings = [*_warnings(table), *_beyond(reader, robot, arguments.statistics)]
    for warning in warnings:
        print(f"WARNING: {warning}")
    if arguments.json is not None:
        rows = {reason.name.lower(): count for reason, count in table.counted().items()}
        numbers = {"rows": rows, "samples": len(reader), "imitating": len(reader) - alone,
                   "warnings": warnings}  # fmt: skip
        with explained(f"write {arguments.json}", ConfigError):
            write_json(arguments.json, numbers)
    if arguments.episode is not None:
        _show(reader, table, arguments.episode, arguments.plot)
    print(
        "To train so, give the folder an entry of its own in data.train_data_paths, with "
        f"credit: {_as_yaml(config)}"
    )
    return 0


def _table(table: Credits) -> list[str]:
    rows, total = table.counted(), sum(table.counted().values())
    lines = [f"{counted(len(table.reasons), 'episode')}, {total:,} rows"]
    for reason in Reason:
        if count := rows[reason]:
            share = f"{count:>9,}  {count / total:>6.1%}"
            lines.append(f"  {share}  {table.use(reason):<14}  {reason.text}")
    return lines


def _warnings(table: Credits) -> list[str]:
    rows = table.counted()
    found = []
    if unknown := rows[Reason.NOT_MARKED]:
        found.append(
            f"{unknown:,} rows are of episodes of which it is not marked whether they succeeded, "
            "and are not imitated: mark them with dzrobot relabel"
        )
    if not any(table.use(reason) != "given" for reason in rows):
        found.append("nothing is imitated: by default, this recording is left out of training")
    return found


def _beyond(reader: DatasetReader, robot: Embodiment, file: Path | None) -> Iterator[str]:
    """Yield what the checkpoint's statistics cannot tell apart, or were not made for."""
    if file is None or not len(reader):
        return
    known = Statistics.from_metadata(file, robot)
    entry = measure([reader], robot, per_step=known.per_step)
    own = Statistics.from_metadata({robot.tag: entry}, robot)
    for key, numbers in known.beyond(own, BEYOND).items():
        yield (
            f"{key}, number {', '.join(map(str, numbers))}: these rows reach beyond the bounds of "
            f"{file} by more than a tenth of their width, and are cut off at the bounds: look at "
            "such an episode, and at units and frame"
        )


def _show(reader: DatasetReader, table: Credits, number: int, plot: Path | None) -> None:
    index = reader.catalog.episodes.index.tolist()
    if number not in index or (ordinal := index.index(number)) not in table.reasons:
        used = sorted(index[ordinal] for ordinal in table.reasons)
        raise ConfigError(
            f"--episode {number}: it is not among the {counted(len(used), 'episode')} in use, "
            f"which are {used[0]} to {used[-1]}"
        )
    codes = table.reasons[ordinal]
    first = 0
    print(f"episode {number}:")
    for code, stretch in groupby(codes.tolist()):
        stop = first + len(list(stretch))
        reason = Reason(code)
        print(f"  rows {first:>5} to {stop - 1:<5}  {table.use(reason):<14}  {reason.text}")
        first = stop
    if plot is not None:
        with replacing(plot) as temporary:
            temporary.write_bytes(_strip(codes, table, number, reader.catalog.fps))
        print(plot)


def _strip(codes: np.ndarray, table: Credits, number: int, fps: float) -> bytes:
    """Return a drawing of an episode, a band of colors over its seconds."""
    figure, axes = new_plot(height=1.8)
    for reason in Reason:
        if (rows := codes == reason).any():
            label = f"{reason.text}: {table.use(reason)}"
            axes.fill_between(
                np.arange(len(codes) + 1) / fps, 0, 1, where=np.append(rows, rows[-1]),
                step="post", color=f"C{int(reason)}", label=label, linewidth=0,
            )  # fmt: skip
    axes.set(title=f"Episode {number}", xlabel="seconds", yticks=[], xlim=(0, len(codes) / fps))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.4), fontsize="small", ncols=2)
    return drawn(figure)["png"]


def _as_yaml(config: CreditConfig) -> str:
    said = config.model_dump(exclude_defaults=True)
    return "{" + ", ".join(f"{name}: {value}" for name, value in said.items()) + "}"
