"""What exact savings save: operators and bytes at full size, time and error on this processor.

The forms before and after run in one process: the video encoder with the library's own layers and
with ours, frames view by view and together, attention of bfloat16 training by PyTorch's kernel and
as plain products (not exact), and whole training steps and chunks of small networks in their plain
forms. Full size runs on the meta device, without weights.

    python benchmarks/savings.py                       all of it, minutes of an idle processor
    python benchmarks/savings.py --parts chunks        launches of a chunk outside of its recording
    python benchmarks/savings.py --parts forms --compile    with compiled blocks too
"""

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from from_tests import (
    RECORDED,
    Call,
    ChunkSetup,
    LibraryCoder,
    StepSetup,
    rehearse_chunks,
    rehearse_step,
    with_layers,
)
from networks import MID, TINY, DeviceNetwork, small_network, training_case
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dzrobot.commands.options import flags
from dzrobot.embodiments.registry import load_embodiment
from dzrobot.errors import counted
from dzrobot.modality import video as video_module
from dzrobot.policies.dreamzero.checkpoints.load import empty_network
from dzrobot.policies.dreamzero.network import vae as vae_module
from dzrobot.policies.dreamzero.network.attention import attend
from dzrobot.policies.dreamzero.network.config import GenerateOptions, NetworkConfig, VaeConfig
from dzrobot.policies.dreamzero.network.dit import StepInputs, TrainForm
from dzrobot.policies.dreamzero.network.generate import predict
from dzrobot.policies.dreamzero.network.graphs import PromptBatch, prompt_batches
from dzrobot.policies.dreamzero.network.layers import ContextKV, compile_blocks
from dzrobot.policies.dreamzero.network.session import KVCache, SessionCache, map_tensors
from dzrobot.policies.dreamzero.network.vae import Vae
from dzrobot.policies.dreamzero.network.world_action import WorldActionModel
from dzrobot.training.cost.plan import ASSUMED_PROMPT, run_setup
from dzrobot.training.recipes.architecture import run_network
from dzrobot.training.recipes.read import plan_recipe

STEPS: dict[str, tuple[str, tuple[str, ...]]] = {
    "5B, all weights, 1 device": ("droid_sft_dreamzero_5b", ("runner.global_batch_size=32",)),
    "14B, LoRA, 1 device": (
        "droid_sft_dreamzero_14b", ("model.is_lora=true", "runner.global_batch_size=1"),
    ),
}  # fmt: skip
"""Name -> recipe and changes."""

_CLIP = (2, 3, 9, 64, 96)
_SAMPLES = 2
"""Samples of a training step."""

_WINDOW = 4
"""Chunks of a window that are timed together."""

_LARGEST_ERROR = 1e-4
"""Between two forms of one computation in float32, where only the order of sums differs."""


@contextmanager
def before() -> Iterator[None]:
    """Let the library's layers be built, and views be prepared one by one."""
    coder, alike = vae_module.WanCoder, video_module._alike
    vae_module.WanCoder = LibraryCoder  # type: ignore[assignment,misc]
    video_module._alike = lambda views: [[view] for view in views]
    try:
        yield
    finally:
        vae_module.WanCoder, video_module._alike = coder, alike  # type: ignore[misc]


def step_lines(name: str) -> Iterator[str]:
    """Yield operators and bytes of a step's frames and encoders."""
    recipe, changes = STEPS[name]
    planned = plan_recipe(recipe, changes, 1)
    config, base = planned.config, planned.network
    setup, robot = run_setup(config, base, 1)
    plan = StepSetup(
        setup=replace(setup, network=with_layers(setup.network, 1)), robot=robot,
        prompt_rows=ASSUMED_PROMPT, augmented=config.data.augment,
    )  # fmt: skip
    with before():
        old = rehearse_step(plan)
    new = rehearse_step(plan)
    for stage in ("frames", "encoders"):
        for form, found in (("before", old), ("now", new)):
            yield f"{name:<28}{stage:<10}{form:<10}{_size(found.of_stage(stage))}"


def _size(calls: Counter[Call]) -> str:
    moved = sum(n * call.bytes_ for call, n in calls.items())
    between = sum(n * call.bytes_ for call, n in calls.items() if call.kind == "memory")
    return (
        f"{calls.total():>7} operators{moved / 1e9:>9.1f} GB,{between / 1e9:>8.1f} GB of it "
        "between products"
    )


def chunk_lines(variant: str) -> Iterator[str]:
    """Yield launches of every chunk of a window, and those outside of its recording."""
    robot = load_embodiment("oxe_droid")
    planned = plan_recipe(f"droid_sft_dreamzero_{variant}", (), 8)
    config, base = planned.config, planned.network
    plan = ChunkSetup(
        network=run_network(base, config.model, robot), image_size=robot.image_size,
        options=GenerateOptions(cfg_scale=robot.cfg_scale), prompt_rows=ASSUMED_PROMPT,
    )  # fmt: skip
    for place, chunk in rehearse_chunks(plan).items():
        outside = sum(n for call, n in chunk.calls.items() if call.stage != RECORDED)
        yield (
            f"{variant:<28}frame {place}: {chunk.calls.total()} operators, {outside} outside of "
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
            runs = (partial(plain.encode, clip), partial(own.encode, clip))
            times, results = _in_turns(runs, repeats)
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
        runs = (
            partial(_learned, _kernel, others, query), partial(_learned, attend, others, query),
        )  # fmt: skip
        times, (kernel, own) = _in_turns(runs, repeats)
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
    runs: tuple[Callable[[], Tensor], ...], repeats: int
) -> tuple[list[float], list[Tensor]]:
    """Return the median processor time of each of ``runs``, and what it returned."""
    spent: list[list[float]] = [[] for _ in runs]
    results: list[Tensor] = []
    for turn in range(repeats + 1):
        results = []
        for run, times in zip(runs, spent, strict=True):
            began = time.process_time()
            results.append(run().float())
            if turn:
                times.append(time.process_time() - began)
    return [statistics.median(times) for times in spent], results


def form_lines(config: NetworkConfig, repeats: int, *, compiled: bool) -> Iterator[str]:
    """Yield the time of plain forms, and how much faster the savings are.

    The plain form of a training step has dense attention, the whole sequence and prompts with all
    their padding. That of a chunk keeps no keys and values from one evaluation of the network to
    the next, and runs the prompts one by one, with all their padding.
    """
    bench = small_network(torch.device("cpu"), torch.float32, config)
    forms = {"all savings": bench.model}
    if compiled:
        forms["and compiled"] = _compiled_twin(bench.model)
    case, best = training_case(bench, _SAMPLES), TrainForm()
    plain_form = TrainForm(backend="dense", exact_savings=False)
    width = f"{config.dit.dim} wide"
    for name, model in forms.items():
        runs = (
            lambda: case.step(plain_form, case.whole),
            lambda model=model: replace(case, model=model).step(best),
        )
        yield _compared(f"{width}, training step, {name}", runs, repeats)
    plain = tuple(PlainBatch(prompt, bench.model.model, (prompt,)) for prompt in (0, 1))
    for calls in (1, _WINDOW):
        for name, model in forms.items():
            fast = prompt_batches(model.model, 2)
            runs = (
                partial(_chunks, bench, bench.model, plain, calls, padding=True),
                partial(_chunks, bench, model, fast, calls, padding=False),
            )
            yield _compared(f"{width}, {counted(calls, 'chunk')}, {name}", runs, repeats)


def _compared(name: str, runs: tuple[Callable[[], Tensor], ...], repeats: int) -> str:
    times, (plain, fast) = _in_turns(runs, repeats)
    error = ((fast - plain).norm() / plain.norm()).item()
    if not error <= _LARGEST_ERROR:
        raise SystemExit(f"{name}: the forms differ by {error:.1e} (allowed {_LARGEST_ERROR:.0e})")
    return f"{name:<44}time {times[1] / times[0]:.2f} of the plain form's, error {error:.0e}"


def _compiled_twin(model: WorldActionModel) -> WorldActionModel:
    """Return a network of the same weights whose blocks are compiled."""
    twin = empty_network(model.config, is_lora=False, text_encoder=False)
    twin.load_state_dict(model.state_dict(), assign=True)
    compile_blocks(twin.model.blocks)
    return twin


def _chunks(
    bench: DeviceNetwork, model: WorldActionModel, batches: tuple[PromptBatch, ...], calls: int,
    *, padding: bool,
) -> Tensor:  # fmt: skip
    """Return the actions of the first calls of a window, 4 frames of history each but the first."""
    session, prompt = SessionCache(), bench.prompt(0, padding=padding)
    requests = [
        replace(bench.request(call, 4 if call else 1, padding=padding), prompt=prompt)
        for call in range(calls)
    ]
    parts = [predict(model, [session], [one], GenerateOptions(), batches) for one in requests]
    return torch.cat([part.action_BAM for part in parts])


@dataclass(frozen=True, eq=False)
class PlainBatch(PromptBatch):
    """Computes keys and values of the window anew in each evaluation of the network."""

    reads: list[StepInputs] = field(default_factory=list)
    """What this episode has read so far."""

    def step(
        self, inputs: StepInputs, cache: KVCache, contexts: list[ContextKV]
    ) -> tuple[Tensor, Tensor | None]:
        """Return what :meth:`CausalDiT.step` does."""
        if inputs.controls is None:
            if not inputs.start_frame:
                self.reads.clear()
            self.reads.append(map_tensors(Tensor.clone, inputs))
            return super().step(inputs, cache, contexts)
        cache.length = 0
        for read in self.reads:
            super().step(read, cache, contexts)
            cache.commit(read.video_BCFYX.shape[2] * self.dit.config.frame_seqlen)
        return super().step(inputs, cache, contexts)


def main() -> None:
    """Count, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--parts", type=flags.names, default=("steps", "chunks", "encoder", "attention", "forms")
    )
    parser.add_argument("--compile", action="store_true", help="forms: with compiled blocks too")
    parser.add_argument("--repeats", type=flags.whole(1), default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    parts: dict[str, Callable[[], Iterator[str]]] = {
        "steps": lambda: (line for name in STEPS for line in step_lines(name)),
        "chunks": lambda: (line for variant in ("5b", "14b") for line in chunk_lines(variant)),
        "encoder": lambda: encoder_lines(arguments.repeats),
        "attention": lambda: attention_lines(arguments.repeats),
        "forms": lambda: (
            line
            for config in (TINY, MID)
            for line in form_lines(config, arguments.repeats, compiled=arguments.compile)
        ),
    }
    for name in arguments.parts:
        for line in parts[name]():
            print(line, flush=True)


if __name__ == "__main__":
    main()
