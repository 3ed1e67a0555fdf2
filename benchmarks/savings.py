"""What exact savings save: operators and bytes at full size, time and error on this processor.

The forms before and after run in one process: the video encoder with the library's own layers and
with ours, frames view by view and together, attention of bfloat16 training by PyTorch's kernel and
as plain products (not exact). Full size runs on the meta device, without weights.

    python benchmarks/savings.py                       all of it, minutes of an idle processor
    python benchmarks/savings.py --parts chunks        launches of a chunk outside of its recording
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dzrobot.commands.options import flags
from dzrobot.modality import video as video_module
from dzrobot.policies.dreamzero.network import vae as vae_module
from dzrobot.policies.dreamzero.network.attention import attend
from dzrobot.policies.dreamzero.network.config import VaeConfig
from dzrobot.policies.dreamzero.network.vae import Vae
from dzrobot.training.cost.plan import ASSUMED_PROMPT, run_setup
from dzrobot.training.forecast.kernels import Kernels
from dzrobot.training.forecast.operators import RECORDED
from dzrobot.training.forecast.published import STEPS, chunk_plan
from dzrobot.training.forecast.rehearsal import (
    StepSetup,
    rehearse_chunks,
    rehearse_step,
    with_layers,
)
from dzrobot.training.recipes.read import read_planned

_STEPS = ("5B, all weights, 1 device", "14B, LoRA, 1 device")
_CLIP = (2, 3, 9, 64, 96)


@contextmanager
def before() -> Iterator[None]:
    """Let the library's layers be built, and views be prepared one by one."""
    lighten, alike = vae_module._lighten, video_module._alike
    vae_module._lighten = lambda _: None
    video_module._alike = lambda views: [[view] for view in views]
    try:
        yield
    finally:
        vae_module._lighten, video_module._alike = lighten, alike


def step_lines(name: str) -> Iterator[str]:
    """Yield operators and bytes of a step's frames and encoders."""
    recipe, changes, devices = STEPS[name]
    config, base = read_planned(recipe, changes, devices)
    setup, robot = run_setup(config, base, devices)
    plan = StepSetup(
        setup=replace(setup, network=with_layers(setup.network, 1)), robot=robot,
        prompt_rows=ASSUMED_PROMPT, augmented=config.data.augment,
    )  # fmt: skip
    with before():
        old = rehearse_step(plan).micro_batch
    new = rehearse_step(plan).micro_batch
    for stage in ("frames", "encoders"):
        forms = {
            "before": old.of_stage(stage).eager,
            "eager": new.of_stage(stage).eager,
            "compiled": new.of_stage(stage).compiled,
        }
        for form, kernels in forms.items():
            yield f"{name:<28}{stage:<10}{form:<10}{_size(kernels)}"


def _size(kernels: Kernels) -> str:
    moved = sum(n * kernel.bytes_ for kernel, n in kernels.items())
    between = sum(n * kernel.bytes_ for kernel, n in kernels.items() if kernel.kind == "memory")
    return (
        f"{kernels.total():>7} operators{moved / 1e9:>9.1f} GB,{between / 1e9:>8.1f} GB of it "
        "between products"
    )


def chunk_lines(variant: str) -> Iterator[str]:
    """Yield launches of every chunk of a window, and those outside of its recording."""
    for place, chunk in rehearse_chunks(chunk_plan(variant)).items():
        outside = sum(n for kernel, n in chunk.eager.items() if kernel.stage != RECORDED)
        yield (
            f"{variant:<28}frame {place}: {chunk.eager.total()} operators, {outside} outside of "
            "the recording"
        )


def encoder_lines(repeats: int) -> Iterator[str]:
    """Yield the processor time and error of small encoders against the library's layers."""
    clip = torch.rand(_CLIP, generator=torch.Generator().manual_seed(1)) * 2 - 1
    for version in ("2.1", "2.2"):
        for dtype in (torch.float32, torch.bfloat16):
            own = _encoder(version).to(dtype)
            with before():
                plain = _encoder(version).to(dtype)
            times, results = _in_turns((plain.encode, own.encode), clip, repeats)
            error = (results[1] - results[0]).abs().max().item()
            yield (
                f"Wan {version}, {str(dtype).removeprefix('torch.'):<20}time "
                f"{times[1] / times[0]:.2f} of the library's, largest error {error:.1g}"
            )


def attention_lines(repeats: int) -> Iterator[str]:
    """Yield the processor time and error of trained bfloat16 attention against PyTorch's kernel."""
    for keys in (65, 96):
        generator = torch.Generator().manual_seed(1)
        exact = [torch.randn(16, n, 4, 64, generator=generator) for n in (82, keys, keys)]
        query, *others = (tensor.bfloat16() for tensor in exact)
        runs = (partial(_learned, _kernel, others), partial(_learned, attend, others))
        times, (kernel, own) = _in_turns(runs, query, repeats)
        wanted = _learned(_kernel, [other.float() for other in others], query.float())
        errors = [(one - wanted).norm() / wanted.norm() for one in (own, kernel)]
        yield (
            f"attention, 82 queries, {keys} keys  time {times[1] / times[0]:.2f} of the kernel's, "
            f"error of gradients {errors[0]:.2g}, the kernel's {errors[1]:.2g}"
        )


def _learned(attention: Callable[..., Tensor], others: list[Tensor], query: Tensor) -> Tensor:
    """Return the gradient of ``query`` (B, Q, H, K)."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (query, *others)]
    attention(*leaves).square().sum().backward()
    gradient = leaves[0].grad
    assert gradient is not None
    return gradient


def _kernel(*tensors: Tensor) -> Tensor:
    q, k, v = (tensor.transpose(1, 2) for tensor in tensors)
    return scaled_dot_product_attention(q, k, v).transpose(1, 2)


def _encoder(version: str) -> Vae:
    torch.manual_seed(0)
    made = Vae(VaeConfig(version=version, dim=8, z_dim=4, dec_dim=8))
    return made.eval().requires_grad_(requires_grad=False)


def _in_turns(
    runs: tuple[Callable[[Tensor], Tensor], ...], clip: Tensor, repeats: int
) -> tuple[list[float], list[Tensor]]:
    """Return the median processor time of each of ``runs``, and what it returned."""
    spent: list[list[float]] = [[] for _ in runs]
    results: list[Tensor] = []
    for turn in range(repeats + 1):
        results = []
        for run, times in zip(runs, spent, strict=True):
            began = time.process_time()
            results.append(run(clip).float())
            if turn:
                times.append(time.process_time() - began)
    return [statistics.median(times) for times in spent], results


def main() -> None:
    """Count, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--parts", type=flags.names, default=("steps", "chunks", "encoder", "attention")
    )
    parser.add_argument("--repeats", type=flags.whole(1), default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    parts: dict[str, Callable[[], Iterator[str]]] = {
        "steps": lambda: (line for name in _STEPS for line in step_lines(name)),
        "chunks": lambda: (line for variant in ("5b", "14b") for line in chunk_lines(variant)),
        "encoder": lambda: encoder_lines(arguments.repeats),
        "attention": lambda: attention_lines(arguments.repeats),
    }
    for name in arguments.parts:
        for line in parts[name]():
            print(line, flush=True)


if __name__ == "__main__":
    main()
