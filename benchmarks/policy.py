"""Latency of one action chunk and of one training step, as ratios between equal forms.

Every pair of forms is first checked to give the same result, then timed in turns in one run.
Weights are random. The plain form of a step has dense attention, the whole sequence and prompts
with all their padding; that of a chunk keeps no keys and values from one evaluation of the network
to the next, and runs the prompts one by one, with all their padding.

    python benchmarks/policy.py                                tiny network, CPU
    python benchmarks/policy.py --variant mid --compile        a wider one, its blocks compiled too
    python benchmarks/policy.py --variant 5b --device cuda     the 5B in bf16 on a GPU, or the 14b
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from chunks import random_network
from torch import Tensor

from dzrobot.policies.dreamzero.checkpoints.load import empty_network
from dzrobot.policies.dreamzero.network.config import (
    DiTConfig,
    HeadConfig,
    ImageConfig,
    NetworkConfig,
    VaeConfig,
    preset,
)
from dzrobot.policies.dreamzero.network.diffusion import DiffusionNoise, NoiseShape, draw_noise
from dzrobot.policies.dreamzero.network.dit import StepInputs, TrainForm
from dzrobot.policies.dreamzero.network.generate import predict
from dzrobot.policies.dreamzero.network.layers import ContextKV, compile_blocks
from dzrobot.policies.dreamzero.network.prompt import PromptEmbedding
from dzrobot.policies.dreamzero.network.prompt_batches import PromptBatch, prompt_batches
from dzrobot.policies.dreamzero.network.session import (
    GenerateOptions,
    InferenceRequest,
    KVCache,
    Prompt,
    SessionCache,
)
from dzrobot.policies.dreamzero.network.world_action import (
    LossOptions,
    PreparedBatch,
    TrainBatch,
    WorldActionModel,
)
from dzrobot.training.bench.measuring import synchronize, timed

TINY = NetworkConfig(
    dit=DiTConfig(
        model_type="ti2v",
        dim=192,
        ffn_dim=768,
        num_heads=6,
        num_layers=4,
        in_dim=8,
        out_dim=8,
        frame_seqlen=50,
        concat_first_frame_latent=False,
        clip_dim=16,
        num_action_per_block=16,
    ),
    vae=VaeConfig(version="2.2", dim=4, z_dim=8, dec_dim=4),
    head=HeadConfig(action_horizon=16, target_video_height=160, target_video_width=320),
    image=ImageConfig(vision_dim=16, vision_heads=2, vision_layers=2, embed_dim=4),
)
MID = replace(TINY, dit=replace(TINY.dit, dim=512, ffn_dim=2048, num_heads=8, num_layers=8))
WORDS = 90
CALLS = 4
"""Calls of one window."""


@dataclass(frozen=True)
class TimedNetwork:
    """One network on one device."""

    model: WorldActionModel
    device: torch.device
    repeats: int
    compiled: WorldActionModel | None = None
    """The same weights in compiled blocks."""

    def sync(self) -> None:
        """Wait for the device."""
        synchronize(self.device)

    def compare(self, name: str, plain: Callable[[], Tensor], fast: Callable[[], Tensor]) -> None:
        """Print how much faster ``fast`` is than ``plain``, once both gave the same."""
        expected, actual = plain().double(), fast().double()
        error = ((actual - expected).norm() / expected.norm()).item()
        limit = 1e-4 if self.model.model.dtype == torch.float32 else 5e-2
        if not error <= limit:
            raise SystemExit(f"{name}: the two forms differ by {error:.1e} (allowed {limit:.0e})")
        slow, quick = (1e3 * t for t in in_turns((plain, fast), self.repeats, self.device))
        print(
            f"{name:46s} {slow:10.1f} ms {quick:10.1f} ms {slow / quick:6.2f}x   error {error:.0e}"
        )

    def request(self, seed: int, frames: int, *, padding: bool = False) -> InferenceRequest:
        """Return one call's question, with all rows of padding in its prompts or without."""
        generator = torch.Generator().manual_seed(seed)
        config = self.model.config
        size = config.target_size
        images = torch.randint(0, 256, (frames, *size, 3), generator=generator, dtype=torch.uint8)
        prompt, negative = (self.prompt(number, padding=padding) for number in (seed, 1000))
        state = torch.rand(1, config.dit.max_state_dim, generator=generator)
        return InferenceRequest(
            images_THW3=images, state_SM=state, prompt=prompt, negative=negative
        )

    def prompt(self, seed: int, *, padding: bool = False) -> Prompt:
        """Return an embedded prompt."""
        config = self.model.config.dit
        rows = self.rows(seed, 1)[0]
        ids = torch.full((config.text_len,), seed + 1)
        words = config.text_len if padding else WORDS
        return Prompt(ids, torch.arange(config.text_len) < words, rows)

    def rows(self, seed: int, batch: int) -> Tensor:
        """Return prompt embeddings."""
        config = self.model.config.dit
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randn(batch, config.text_len, config.text_dim, generator=generator)
        rows[:, WORDS:] = 0
        return rows.to(self.device, self.model.model.dtype)


def in_turns(
    runs: Sequence[Callable[[], object]], repeats: int, device: torch.device
) -> list[float]:
    """Return the median seconds of each run; all take turns, so that company hits them alike."""
    found: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats):
        for run, seconds in zip(runs, found, strict=True):
            with timed(seconds, device):
                run()
    return [statistics.median(seconds) for seconds in found]


def chunk_lines(bench: TimedNetwork, sessions: int) -> None:
    """Compare the forms of one call."""
    published = GenerateOptions()

    def fresh(options: GenerateOptions, count: int = 1, together: bool = True) -> Tensor:
        requests = [bench.request(seed, 1) for seed in range(count)]
        caches = [SessionCache() for _ in requests]
        if together:
            return predict(bench.model, caches, requests, options).action_BAM
        parts = [
            predict(bench.model, [cache], [request], options)
            for cache, request in zip(caches, requests, strict=True)
        ]
        return torch.cat([part.action_BAM for part in parts])

    print(f"{'one call from a single frame':46s} {'plain':>13s} {'fast':>13s}")
    name = f"{sessions} sessions one by one | in one batch"
    bench.compare(
        name, lambda: fresh(published, sessions, together=False), lambda: fresh(published, sessions)
    )
    for steps in (16, 8, 5):
        start = time.perf_counter()
        fresh(replace(published, dit_steps=steps))
        bench.sync()
        print(f"{steps} evaluations: {1e3 * (time.perf_counter() - start):.1f} ms")
    window_lines(bench)


def window_lines(bench: TimedNetwork) -> None:
    """Compare the forms of the calls of one window, 4 frames of history each but the first."""
    model, options = bench.model, GenerateOptions()

    def calls(
        network: WorldActionModel, batches: tuple[PromptBatch, ...], count: int, padding: bool
    ) -> Tensor:
        session = SessionCache()
        prompt = bench.prompt(0, padding=padding)
        requests = [
            replace(bench.request(call, 4 if call else 1, padding=padding), prompt=prompt)
            for call in range(count)
        ]
        parts = [predict(network, [session], [one], options, batches) for one in requests]
        return torch.cat([part.action_BAM for part in parts])

    plain = tuple(PlainBatch(prompt, model.model, (prompt,)) for prompt in (0, 1))
    fast = [("all savings", model), ("and compiled", bench.compiled)]
    for count in (1, CALLS):
        for name, network in fast:
            if network is None:
                continue
            batches = prompt_batches(network.model, 2)
            bench.compare(
                f"{count} call{'s' * (count > 1)} of a window, plain | {name}",
                lambda count=count: calls(model, plain, count, padding=True),
                lambda count=count, network=network, batches=batches: calls(
                    network, batches, count, padding=False
                ),
            )


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
            self.reads.append(inputs.cloned())
            return super().step(inputs, cache, contexts)
        cache.length = 0
        for read in self.reads:
            super().step(read, cache, contexts)
            cache.commit(read.video_BCFYX.shape[2] * self.dit.config.frame_seqlen)
        return super().step(inputs, cache, contexts)


@dataclass(frozen=True)
class TrainingCase:
    """A micro-batch of noise, and what the network makes of it."""

    model: WorldActionModel
    batch: TrainBatch
    prepared: PreparedBatch
    noise: DiffusionNoise

    @property
    def whole(self) -> PreparedBatch:
        """Return the samples with all rows of padding in their prompts."""
        rows = self.batch.prompt.rows_BNE
        return replace(
            self.prepared,
            prompting=replace(self.prepared.prompting, text_BNE=rows, text_bias_BN=None),
        )

    def step(self, form: TrainForm, given: PreparedBatch | None = None) -> Tensor:
        """Differentiate the loss; return the gradient of one weight of the first block."""
        self.model.zero_grad()
        options = LossOptions(form=form)
        self.model.loss(given or self.prepared, self.noise, options=options).loss.backward()
        return self.model.model.blocks[0].self_attn.q.weight.grad


def training_case(bench: TimedNetwork, batch: int) -> TrainingCase:
    """Return ``batch`` samples of noise, the same on every device."""
    model, config = bench.model, bench.model.config
    blocks, dit = 4, config.dit
    generator = torch.Generator().manual_seed(0)
    actions = blocks * dit.num_action_per_block
    frames = (batch, config.head.num_frames, *config.target_size, 3)
    images = torch.randint(0, 256, frames, generator=generator, dtype=torch.uint8)
    samples = TrainBatch(
        images=images.to(bench.device),
        state_BSM=torch.rand(batch, blocks, dit.max_state_dim, generator=generator).to(
            bench.device
        ),
        action_BAM=torch.rand(batch, actions, dit.action_dim, generator=generator).to(bench.device),
        action_mask_BAM=torch.ones(batch, actions, dit.action_dim, device=bench.device),
        has_real_action_B=torch.ones(batch, device=bench.device),
        prompt=PromptEmbedding(bench.rows(0, batch), (WORDS,) * batch),
    )
    prepared = model.prepare(samples)
    shape = NoiseShape(tuple(prepared.latents_BCFYX.shape[1:]), (actions, dit.action_dim))
    generators = [torch.Generator().manual_seed(i) for i in range(batch)]
    noise = draw_noise(dit, config.head, shape, generators, bench.device)
    return TrainingCase(model, samples, prepared, noise)


def training_lines(bench: TimedNetwork, batch: int) -> None:
    """Compare the forms of one training forward and backward pass of the transformer."""
    case = training_case(bench, batch)
    step, whole = case.step, case.whole
    print(f"{f'forward and backward, batch {batch}':46s} {'plain':>13s} {'fast':>13s}")
    best = TrainForm()
    plain = TrainForm(backend="dense", exact_savings=False)
    bench.compare("dense | packed attention", lambda: step(TrainForm("dense")), lambda: step(best))
    unsaved = TrainForm(exact_savings=False)
    bench.compare("whole sequence | exact savings", lambda: step(unsaved), lambda: step(best))
    bench.compare(
        "all padding | four rows of padding", lambda: step(best, whole), lambda: step(best)
    )
    bench.compare("plain form | all of these", lambda: step(plain, whole), lambda: step(best))
    if bench.compiled is not None:
        quick = replace(case, model=bench.compiled).step
        bench.compare("eager | compiled", lambda: step(best), lambda: quick(best))
        bench.compare("plain form | and compiled", lambda: step(plain, whole), lambda: quick(best))


def build(variant: str, device: torch.device, dtype: torch.dtype | None = None) -> WorldActionModel:
    """Return a network with random weights; unless ``dtype`` is given, bf16 on a GPU."""
    config = {"tiny": TINY, "mid": MID}.get(variant) or preset(variant)
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    return random_network(config, device, dtype, text_encoder=False)


def compiled_twin(model: WorldActionModel) -> WorldActionModel:
    """Return a network of the same weights whose blocks are compiled."""
    twin = empty_network(model.config, is_lora=False, text_encoder=False)
    twin.load_state_dict(model.state_dict(), assign=True)
    compile_blocks(twin.model.blocks)
    return twin


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--variant", choices=("tiny", "mid", "5b", "14b"), default="tiny")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sessions", type=int, default=4)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--only", choices=("chunk", "training"))
    parser.add_argument("--compile", action="store_true", help="compare compiled blocks too")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    model = build(arguments.variant, device)
    twin = compiled_twin(model) if arguments.compile else None
    bench = TimedNetwork(model, device, arguments.repeats, twin)
    if arguments.only != "training":
        chunk_lines(bench, arguments.sessions)
    if arguments.only != "chunk":
        training_lines(bench, arguments.batch)


if __name__ == "__main__":
    main()
