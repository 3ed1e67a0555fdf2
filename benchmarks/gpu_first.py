"""Single figures of the first minutes on a GPU, each at once on the terminal and in no file.

    python benchmarks/gpu_first.py kernels
    python benchmarks/gpu_first.py chunks 5b
    python benchmarks/gpu_first.py train 5b --mbs 32 --recompute full --steps 3
    python benchmarks/gpu_first.py --tiny chunks 5b        the same code on a processor

`benchmarks/gpu.sh` runs them and the checks of correctness as parts that resume; here one choice is
made by hand, where minutes count.
"""

import argparse
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist
from gpu_kernels import kernels
from gpu_parts import Outcome, Request, Value
from gpu_speed import chunks
from gpu_training import Case, attempt, make_bench, measure

from dzrobot.training.run.parallel import init_distributed, set_cuda_defaults


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is asked for; 1 if it failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="small networks, on a processor")
    parts = parser.add_subparsers(dest="part", required=True)
    parts.add_parser("kernels", help="products, attention, convolutions, copies")
    parts.add_parser("chunks", help="the chunks of a window, in every form").add_argument(
        "variant", choices=["5b", "14b"]
    )
    train = parts.add_parser("train", help="a training step; of the 14B, adapters are trained")
    train.add_argument("variant", choices=["5b", "14b"])
    train.add_argument("--mbs", type=int, default=1, help="samples of a micro-batch")
    train.add_argument("--recompute", choices=["none", "selective", "full"], default="full")
    train.add_argument("--steps", type=int, default=3, help="timed steps")
    options = parser.parse_args(argv)
    set_cuda_defaults()
    device = torch.device("cpu") if options.tiny else torch.device("cuda", 0)
    request = Request(device, "tiny" if options.tiny else "true", None, _say)
    match options.part:
        case "kernels":
            outcome = kernels(request)
        case "chunks":
            outcome = chunks(request, options.variant)
        case _:
            outcome = _train(request, options)
    print(f"{outcome.status}: {outcome.reason}")
    return int(outcome.status == "failed")


def _say(name: str, value: Value, peak: float | None = None) -> None:
    shown = f"{value:.4g}" if isinstance(value, float) else str(value)
    print(f"{name}: {shown}" + ("" if peak is None else f", of {peak:.4g}"), flush=True)


def _train(request: Request, options: argparse.Namespace) -> Outcome:
    world = init_distributed(request.device.type)
    try:
        small = "tiny " if options.tiny else ""
        bench = make_bench(f"{small}{options.variant}", world, options.steps)
        case = Case(
            mbs=options.mbs, recompute=options.recompute, lora=options.variant == "14b",
            compile=not options.tiny,
        )  # fmt: skip
        found = attempt(lambda: measure(bench, case), request.device)
    finally:
        dist.destroy_process_group()
    if isinstance(found, str):
        return Outcome("failed", found)
    for unit, value in found.items():
        _say(f"{options.variant}, {case.name}, {unit}", value)
    return Outcome("measured", f"{bench.config.dit.num_layers} layers")


if __name__ == "__main__":
    sys.exit(main())
