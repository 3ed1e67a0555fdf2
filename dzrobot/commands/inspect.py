"""`dzrobot inspect`: one screen about a checkpoint."""

import argparse
import math
from typing import TYPE_CHECKING

from dzrobot.commands.options import flags
from dzrobot.errors import counted, preview
from dzrobot.policies.dreamzero.options import LooseWeights
from dzrobot.progress import waiting

if TYPE_CHECKING:
    from rich.table import Table

    from dzrobot.policies.dreamzero.checkpoints.inspection import Report

NEXT = "dzrobot eval --checkpoint {checkpoint} --env ENV"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.description = "Say what a checkpoint is; no weight is read, but with --verify."
    parser.add_argument(
        "checkpoint", type=flags.text, help="checkpoint of any layout, or a Hugging Face id"
    )
    parser.add_argument(
        "--verify", action="store_true",
        help="read every file and compare it with its checksum (1 to 2 GB/s for each core)",
    )  # fmt: skip
    parser.add_argument(
        "--revision", type=flags.text, help="branch, tag or commit of a Hugging Face repository"
    )
    flags.declare(parser, LooseWeights)
    parser.add_argument(
        "--embodiment", type=flags.text, metavar="TAG", help="robot of the network of --preset"
    )


def run(args: argparse.Namespace) -> int:
    """Print the report; 1 if the weights are not those of config.json."""
    from rich.console import Console

    with waiting("reading the checkpoint"):
        from dzrobot.policies.dreamzero.checkpoints.checksums import check_checksums
        from dzrobot.policies.dreamzero.checkpoints.directory import open_checkpoint
        from dzrobot.policies.dreamzero.checkpoints.inspection import inspect_checkpoint

        checkpoint = open_checkpoint(
            args.checkpoint,
            revision=args.revision,
            config_from=LooseWeights(**flags.said(args, LooseWeights), embodiment=args.embodiment),
        )
        report = inspect_checkpoint(checkpoint)
    console = Console()
    if args.verify:
        with waiting("comparing the files with their hashes"):
            count = check_checksums(checkpoint.path)
        console.print(f"{counted(count, 'file')} as written")
    console.print(_facts(report))
    console.print(_parts(report))
    return 0 if _verdict(report)[1] else 1


def _facts(report: "Report") -> "Table":
    from rich.markup import escape
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(overflow="fold")
    tags = "no metadata.json" if report.tags is None else ", ".join(report.tags) or "none"
    size = report.frame_size
    memory = report.memory
    there = [name for name, present in report.sidecars.items() if present]
    absent = [name for name, present in report.sidecars.items() if not present]
    rows = {
        "checkpoint": str(report.path),
        "layout": report.layout,
        "variant": report.variant,
        "embodiments": tags,
        "action horizon": str(report.action_horizon),
        "frame": f"{size[0]} x {size[1]} pixels" if size else "as the embodiment tiles it",
        "passport": _passport(report),
        "beside it": f"{', '.join(there) or 'nothing'}; absent: {', '.join(absent) or 'nothing'}",
        "weights": _verdict(report)[0],
        "to run": f"{_gb(memory.inference)} in bf16 + {_gb(memory.session)} per session",
        "on a GPU": f"{_gib(memory.whole)} with all weights there, {_gib(memory.quantized)} with "
        f"--quantize int8; from {_gib(memory.offloaded)} on with --memory, the rest on the host "
        "(estimates for one session)",
        "to train": f"{_gb(memory.full)} whole, {_gb(memory.lora)} LoRA, shared by the devices, "
        "working memory not counted",
    }
    for name, value in rows.items():
        # Names come out of files: what looks like markup in them is none.
        table.add_row(f"[bold]{name}", escape(value))
    return table


def _verdict(report: "Report") -> tuple[str, bool]:
    """Return the state of the weights in words, and whether they can be used."""
    faults = {
        "missing": report.missing,
        "unexpected": report.unexpected,
        "misshapen": report.misshapen,
    }
    named = report.passport is not None and report.passport.base is not None
    partial = bool(report.missing) and (report.adapters or named)
    texts = [f"{len(names)} {kind}: {preview(names, 3)}" for kind, names in faults.items() if names]
    if partial:
        texts[0] = f"{len(report.missing)} tensors are to come from the base"
    usable = not report.unexpected and not report.misshapen and (partial or not report.missing)
    return "; ".join(texts) or "complete", usable


def _passport(report: "Report") -> str:
    passport = report.passport
    if passport is None:
        return "none (checked against config.json and metadata.json)"
    base = f", base {passport.base[:12]}" if passport.base else ""
    runner = passport.recipe.get("runner")
    recipe = (runner.get("recipe") if isinstance(runner, dict) else None) or "not named"
    return f"transforms {passport.transforms}{base}, recipe {recipe}"


def _parts(report: "Report") -> "Table":
    from rich.table import Column, Table

    names = ("part", "tensors", "parameters", "stored", "dtypes")
    table = Table(*(Column(name, overflow="fold") for name in names))
    for part in report.parts:
        table.add_row(
            part.name,
            str(part.tensors),
            f"{part.parameters:,}",
            _gb(part.nbytes),
            ", ".join(part.dtypes) or "none",
        )
    return table


def _gib(nbytes: int) -> str:
    """Return what ``--memory`` takes, rounded up."""
    return f"{math.ceil(10 * nbytes / 2**30) / 10} GiB"


def _gb(nbytes: int) -> str:
    if nbytes < 10**7:
        return f"{nbytes / 1000:.0f} kB"
    return f"{nbytes / 1000**3:.2f} GB"
