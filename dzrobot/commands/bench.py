"""``dzrobot bench``: how fast training, acting, reading and simulating are on this machine."""

import argparse
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from pydantic import BaseModel
from rich.console import Console
from rich.table import Table

from dzrobot.commands.options import flags
from dzrobot.documents import validated
from dzrobot.errors import ConfigError
from dzrobot.files import explained, write_json
from dzrobot.policies.dreamzero.options import check_device, chosen_device
from dzrobot.progress import progress_bar
from dzrobot.training.bench.document import (
    OPENING,
    PARTS,
    PROFILED,
    REPEATS,
    WHOLE,
    BenchComparison,
    BenchResult,
    BenchSettings,
    Measurement,
    Ratio,
    read_result,
    short,
)

if TYPE_CHECKING:
    # They load torch.
    from dzrobot.training.bench.pace import Pace, PacedRobot

PAIRS = 5
"""Rounds of two builds in turns, by default."""

_SETTINGS = tuple(BenchSettings.model_fields)


def _next(arguments: argparse.Namespace) -> str:
    if arguments.rate is not None:
        return "dzrobot curve dit-steps=16 dit-steps=8 --env dzrobot/lift-v0 --output results/curve"
    if arguments.json is not None:
        return "dzrobot bench --against {json}"
    return "dzrobot bench --json bench.json"


NEXT = _next


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``dzrobot bench``."""
    parser.description = (
        "Measure, by default, the bundled policy and Lift on this machine: time of a chunk by its\n"
        "place in the memory's window, training, decoding, simulation, a short evaluation, and\n"
        "memory; each part in a process of its own. Two minutes on a processor."
    )
    parser.add_argument(
        "overrides", nargs="*", default=None, metavar="section.field=value",
        help="any field of the recipe",
    )  # fmt: skip
    parser.add_argument(
        "--parts", type=flags.names, metavar="a,b", help=f"of {','.join(PARTS)} (default: all)"
    )
    parser.add_argument(
        "--repeats",
        type=flags.whole(1, 10_000),
        help=f"measurements of each thing (default: {REPEATS}, with --profile {PROFILED})",
    )
    parser.add_argument(
        "--checkpoint",
        type=flags.text,
        help="policy: a folder or hub id (default: the bundled one)",
    )
    parser.add_argument(
        "--embodiment", type=flags.text, help="robot that it acts as: a tag, or module:NAME"
    )
    parser.add_argument(
        "--device",
        type=flags.device,
        default="auto",
        help="of networks: cpu, cuda, cuda:1, or auto: a GPU where there is one",
    )
    parser.add_argument(
        "--compile", action="store_true", default=None,
        help="compile the policy's blocks, and say how that compares with eager ones",
    )  # fmt: skip
    parser.add_argument(
        "--recipe", type=flags.text,
        help="of training and data (default: the bundled policy, trained on made-up recordings)",
    )  # fmt: skip
    parser.add_argument(
        "--lerobot", type=flags.text, metavar="PYTHON",
        help="of an environment that has LeRobot: how long its dataset class takes for the samples",
    )  # fmt: skip
    parser.add_argument(
        "--films", choices=("exact", "small"),
        help="of data: made-up films of three codecs beside those that `consolidate --films` makes",
    )  # fmt: skip
    _add_evaluation(parser)
    parser.add_argument(
        "--rate", type=flags.number(0.1, 1000), metavar="HZ",
        help="control steps of a robot per second: say which ways of planning keep up with it",
    )  # fmt: skip
    parser.add_argument(
        "--graphs", action="store_true", help="with --rate: as `dzrobot eval --graphs`, on a GPU"
    )
    _add_results(parser)


def _add_evaluation(parser: argparse.ArgumentParser) -> None:
    """Declare what is simulated and evaluated."""
    parser.add_argument("--env", type=flags.text, help="a simulator (default: dzrobot/lift-v0)")
    parser.add_argument(
        "--workers", type=flags.whole(0, 1024),
        help="simulators of the evaluation (default: 0, in the policy's process)",
    )  # fmt: skip
    parser.add_argument(
        "--profile", action="store_true", default=None,
        help="eval: processor seconds of each part of an episode, its share of the page included, "
        "and what the whole evaluation of --protocol will take",
    )  # fmt: skip
    parser.add_argument(
        "--protocol", type=flags.text,
        help="with --profile: rules of a published score, as of `dzrobot eval`",
    )  # fmt: skip


def _add_results(parser: argparse.ArgumentParser) -> None:
    """Declare what becomes of the numbers."""
    parser.add_argument(
        "--against", type=flags.path, metavar="TREE_OR_RESULT",
        help="another checkout of dzrobot, which is measured in turns with this one, or a file "
        "that --json wrote",
    )  # fmt: skip
    parser.add_argument(
        "--pairs", type=flags.whole(2, 1000),
        help=f"with --against TREE: how often both are measured (default: {PAIRS})",
    )  # fmt: skip
    parser.add_argument(
        "--json", type=flags.output, metavar="FILE", help="write the numbers to FILE"
    )


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, and return 0."""
    flags_given = vars(args)
    given = {name: value for name in _SETTINGS if (value := flags_given[name]) not in (None, [])}
    if args.rate is not None:
        return _pace(args, given)
    if args.graphs:
        raise ConfigError("--graphs is looked at with --rate alone: give --rate, or leave it out")
    if args.pairs is not None and (args.against is None or args.against.is_file()):
        raise ConfigError("--pairs needs --against TREE: a finished result cannot be run again")
    given["device"] = chosen_device(str(given.get("device", "auto")))
    if args.profile:
        given.setdefault("repeats", PROFILED)
    settings = validated(given, BenchSettings, "the flags", ConfigError)
    if settings.films is not None and "data" not in settings.parts:
        raise ConfigError("--films belongs to the part data: add it to --parts, or leave it out")
    console = Console(width=None if Console().is_terminal else 130, highlight=False)
    result = _measured(args, settings)
    lines = tables(result) if isinstance(result, BenchResult) else _comparison(result)
    for line in lines:
        console.print(line, soft_wrap=isinstance(line, str), markup=False)
    if args.json is not None:
        _write(args, result)
    return 0


def _results(args: argparse.Namespace) -> dict[str, object]:
    others = {"against": args.against, "pairs": args.pairs, "json": args.json}
    return {name: value for name, value in others.items() if value}


_PACED = {"checkpoint", "embodiment", "device", "compile", "repeats"}
"""Settings that ``--rate`` depends on."""


def _pace(args: argparse.Namespace, given: dict[str, object]) -> int:
    """Print which ways of planning keep up with a robot of ``--rate`` steps per second."""
    others = sorted((given.keys() | _results(args).keys()) - _PACED)
    if others:
        raise ConfigError(
            f"--rate times the plans of a policy alone: leave {', '.join(others)} out"
        )
    from dzrobot.training.bench import pace
    from dzrobot.training.bench.worker import machine_of

    given["device"] = chosen_device(str(given.get("device", "auto")))
    settings = validated(given, BenchSettings, "the flags", ConfigError)
    check_device(settings.device)
    parts, robot = pace.opened(settings, args.rate)
    with progress_bar("measuring", every=10) as show:
        seconds = pace.measured_seconds(parts, settings, show, graphs=args.graphs)
    machine = machine_of(settings)
    where = f"measured on {machine.device}, {machine.processor}; {robot.embodiment.tag}"
    rows = [pace.pace_of(way, seconds[way], robot) for way in pace.WAYS]
    console = Console(width=None if Console().is_terminal else 130, highlight=False)
    console.print(where, soft_wrap=True, markup=False)
    console.print(_pace_table(rows, robot))
    console.print(pace.advice(rows, robot), soft_wrap=True, markup=False)
    return 0


def _pace_table(rows: "Sequence[Pace]", robot: "PacedRobot") -> Table:
    """Return a line for each way of planning."""
    table = Table(
        title=f"{robot.rate:g} steps per second, plans of {robot.horizon} actions",
        title_justify="left",
    )
    for name in ("--video", "--dit-steps", "plan, ms", "steps"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("sync stands still", "naive, rtc: --execute", "trained"):
        table.add_column(name, justify="right", overflow="fold")
    for row in rows:
        moves = "plans take too long"
        if row.moves is not None:
            moves = f"{row.moves[0]} to {row.moves[1]}, such as {row.moves[2]}"
        table.add_row(
            row.way[0], str(row.way[1]), short(1000 * row.seconds), str(row.delay),
            f"{row.still:.0%}, --execute {row.waits_after}", moves,
            "yes" if row.is_trained else "no",
        )  # fmt: skip
    return table


def _measured(args: argparse.Namespace, settings: BenchSettings) -> BenchResult | BenchComparison:
    from dzrobot.training.bench import processes

    if args.against is None:
        with progress_bar("measuring", every=10) as show:
            return processes.measure_build(settings, show)
    if args.against.is_dir():
        with progress_bar("measuring", every=10) as show:
            return processes.compare_with_tree(settings, args.against, args.pairs or PAIRS, show)
    base = read_result(args.against)
    with progress_bar("measuring", every=10) as show:
        return processes.compare_with_result(settings, base, show)


def _write(args: argparse.Namespace, result: BaseModel) -> None:
    with explained(f"write {args.json}", ConfigError):
        write_json(args.json, result.model_dump(mode="json"))


def tables(result: BenchResult) -> Iterator[str | Table]:
    """Yield one build's table and what belongs to it."""
    machine = next(iter(result.parts.values()))
    yield _where(result)
    table = Table(title=f"dzrobot {machine.version}, {machine.tree}", title_justify="left")
    table.add_column("part", overflow="fold")
    table.add_column("what", overflow="fold")
    for name in ("p50", "p95", "unit", "n"):
        table.add_column(name, justify="right", no_wrap=True)
    for part, found in result.parts.items():
        for one in found.measurements:
            p50, p95 = np.percentile(one.values, (50, 95))
            table.add_row(part, one.name, short(p50), short(p95), one.unit, str(len(one.values)))
    yield table
    if result.settings.profile and "eval" in result.parts:
        yield _shares(result.parts["eval"].measurements)
    yield from _notes(result)


def _shares(measurements: Sequence[Measurement]) -> Table:
    """Return what an episode consists of: means, and shares of the whole, in every form."""
    means: dict[str, dict[str, float]] = {}
    for one in measurements:
        form, colon, part = one.name.partition(": ")
        if colon and one.unit == "s":
            means.setdefault(form, {})[part] = float(np.mean(one.values))
    table = Table(title="an episode, means", title_justify="left")
    table.add_column("part", no_wrap=True)
    for form in means:
        table.add_column(f"{form}, s", justify="right", no_wrap=True)
        table.add_column("%", justify="right", no_wrap=True)
    for part in dict.fromkeys(part for parts in means.values() for part in parts):
        row = []
        for parts in means.values():
            mean = parts.get(part, 0.0)
            # A task is opened once; its time is not an episode's.
            outside = part == OPENING
            row += [short(mean), "-" if outside else f"{100 * mean / parts[WHOLE]:.0f}"]
        table.add_row(part, *row)
    return table


def _where(result: BenchResult) -> str:
    machine = next(iter(result.parts.values())).machine
    return (
        f"networks on {machine.device}; {machine.processor}, {machine.cores} cores, "
        f"{machine.threads} thread{'s' if machine.threads > 1 else ''} per process; Python "
        f"{machine.python}, torch {machine.torch}"
    )


def _notes(result: BenchResult) -> Iterator[str]:
    yield from dict.fromkeys(note for found in result.parts.values() for note in found.notes)


def _comparison(result: BenchComparison) -> Iterator[str | Table]:
    """Yield the ratios of two builds."""
    first = BenchResult(settings=result.settings, parts=result.own[0])
    base, own = (next(iter(side[0].values())) for side in (result.base, result.own))
    yield _where(first)
    yield f"base  dzrobot {base.version}, {base.tree}"
    yield f"this  dzrobot {own.version}, {own.tree}"
    paired = any(ratio.pairs for ratio in result.ratios)
    table = Table(
        title="this build over the base, in turns" if paired
        else "this build over the base, which was measured at another time",
        title_justify="left",
    )  # fmt: skip
    table.add_column("part", overflow="fold")
    table.add_column("what", overflow="fold")
    for name in ("unit", "base", "this", "ratio", "95 %", "verdict"):
        table.add_column(name, justify="right", no_wrap=True)
    for ratio in result.ratios:
        table.add_row(
            ratio.part, ratio.name, ratio.unit, short(ratio.base), short(ratio.own),
            "-" if ratio.ratio is None else f"{ratio.ratio:.3f}", _span(ratio), _verdict(ratio),
        )  # fmt: skip
    yield table
    if not paired:
        yield (
            "The interval is of repeats within two processes: what differs between processes, or "
            "has changed on the machine since, is not in it. --against TREE has both."
        )
    yield from _notes(first)


def _span(ratio: Ratio) -> str:
    return "-" if ratio.low is None else f"{ratio.low:.3f} to {ratio.high:.3f}"


def _verdict(ratio: Ratio) -> str:
    """Return which build is better, where the interval leaves out 1."""
    if ratio.low is None or ratio.high is None or ratio.better == "neither":
        return "-"
    if ratio.low <= 1 <= ratio.high:
        return "no difference shown"
    return "better" if (ratio.low > 1) == (ratio.better == "more") else "worse"
