"""`dzrobot convert`: write a checkpoint in another layout."""

import argparse

from dzrobot.commands.options import flags
from dzrobot.errors import ConfigError, find
from dzrobot.policies.dreamzero.options import LooseWeights
from dzrobot.progress import waiting

_LAYOUTS = ("directory", "full_weights", "dcp", "peft", "lerobot")
_DTYPES = ("float32", "bfloat16", "float16")

NEXT = "dzrobot inspect {target}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.description = (
        "Write a checkpoint in another layout: official folder, full_weights.pt, distributed "
        "checkpoint, LoRA adapters as the library peft has them, or a folder that LeRobot opens "
        "with the plug-in lerobot_policy_dreamzero. Tensors pass unchanged unless --dtype or "
        "--merge is given; for LeRobot, adapters are merged."
    )
    parser.add_argument(
        "source", type=flags.text, nargs="+",
        help="checkpoint of any layout, a Hugging Face id, or the folders of Wan component files",
    )  # fmt: skip
    parser.add_argument("target", type=flags.path, help="new folder, or new .pt file")
    parser.add_argument(
        "--to", choices=_LAYOUTS, help="layout; else by the target: .pt is full_weights"
    )
    flags.declare(parser, LooseWeights)
    parser.add_argument(
        "--base", type=flags.text, nargs="+", default=[], metavar="PATH",
        help="base checkpoint or component folders, for a source that holds only what was trained",
    )  # fmt: skip
    parser.add_argument(
        "--embodiment", type=flags.text, metavar="TAG",
        help="robot of the network of --preset; or that LeRobot's folder is for, where the "
        "checkpoint names several",
    )  # fmt: skip
    parser.add_argument("--merge", action="store_true", help="merge adapters into the weights")
    parser.add_argument("--dtype", choices=_DTYPES, help="convert to this dtype")
    parser.add_argument(
        "--shard-gb",
        type=flags.number(1e-6, 1e9),
        default=4.0,
        metavar="GB",
        help="largest file (default: 4)",
    )
    parser.add_argument(
        "--seed", type=flags.seed, default=0, help="of the tensors that Wan component files lack"
    )


def run(args: argparse.Namespace) -> int:
    """Convert, and say what was written."""
    with waiting("loading libraries"):
        import torch

        from dzrobot.policies.dreamzero.checkpoints.convert import ConvertOptions, Layout, convert

    dtypes = {name: vars(torch)[name] for name in _DTYPES}
    by_suffix: Layout = "full_weights" if args.target.suffix == ".pt" else "directory"
    to: Layout = by_suffix if args.to in (None, "lerobot") else args.to
    if args.embodiment is not None and args.to != "lerobot" and args.preset is None:
        raise ConfigError(
            "--embodiment belongs to --to lerobot and to --preset: leave it out, or add one of them"
        )
    loose = flags.said(args, LooseWeights)
    options = ConvertOptions(
        to=to,
        config_from=LooseWeights(**loose, embodiment=args.embodiment) if loose else None,
        base=tuple(args.base),
        merge=args.merge,
        dtype=find(dtypes, "dtype", args.dtype) if args.dtype else None,
        shard_bytes=int(args.shard_gb * 1000**3),
        seed=args.seed,
    )
    if args.to == "lerobot":
        from dzrobot.policies.dreamzero.lerobot_folder import write_lerobot_folder

        with waiting("converting"):
            done = write_lerobot_folder(args.source, args.target, options, args.embodiment)
    else:
        with waiting("converting"):
            done = convert(args.source, args.target, options)
    print(f"wrote {done.tensors} tensors to {done.path}")
    if done.absent:
        base = done.base or "PATH"
        print(
            f"They are what was trained: {done.absent} more come from the base, "
            f"{done.base or 'the checkpoint it was trained on'}, when a policy opens them. For the "
            f"whole network in one place add --base {base} and give another target; "
            "`dzrobot export RUN --step N` writes it too."
        )
    if done.initialized:
        print(f"{len(done.initialized)} of them are in no file and were newly initialized:")
        for name in done.initialized:
            print(f"  {name}")
    return 0
