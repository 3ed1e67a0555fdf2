"""Latency of one action chunk and of one training step, as ratios between equal forms.

Every pair of forms is first checked to give the same result, then timed in turns in one run.
Weights are random.

    python benchmarks/policy.py                                tiny network, CPU
    python benchmarks/policy.py --variant 5b --device cuda     the 5B in bf16 on a GPU, or the 14b
    python benchmarks/policy.py --variant 5b --device cuda --only chunk --compile
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dzrobot.policies.dreamzero.network.config import (
    DiTConfig,
    HeadConfig,
    ImageConfig,
    NetworkConfig,
    VaeConfig,
    preset,
)
from dzrobot.policies.dreamzero.network.diffusion import DiffusionNoise, NoiseShape, draw_noise
from dzrobot.policies.dreamzero.network.dit import TrainForm
from dzrobot.policies.dreamzero.network.generate import predict
from dzrobot.policies.dreamzero.network.layers import compile_blocks
from dzrobot.policies.dreamzero.network.prompt import PromptEmbedding
from dzrobot.policies.dreamzero.network.session import (
    GenerateOptions,
    InferenceRequest,
    Prompt,
    SessionCache,
)
from dzrobot.policies.dreamzero.network.world_action import (
    LossOptions,
    PreparedBatch,
    TrainBatch,
    WorldActionModel,
)
from dzrobot.training.bench.measuring import in_turns, synchronize

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
WORDS = 90


@dataclass(frozen=True)
class Bench:
    """One network on one device."""

    model: WorldActionModel
    device: torch.device
    repeats: int

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

    def request(self, seed: int, frames: int) -> InferenceRequest:
        """Return one call's question."""
        generator = torch.Generator().manual_seed(seed)
        config = self.model.config
        size = config.target_size
        images = torch.randint(0, 256, (frames, *size, 3), generator=generator, dtype=torch.uint8)
        prompt, negative = (self.prompt(seed), self.prompt(1000))
        state = torch.rand(1, config.dit.max_state_dim, generator=generator)
        return InferenceRequest(
            images_THW3=images, state_SM=state, prompt=prompt, negative=negative
        )

    def prompt(self, seed: int) -> Prompt:
        """Return an embedded prompt."""
        config = self.model.config.dit
        rows = self.rows(seed, 1)[0]
        ids = torch.full((config.text_len,), seed + 1)
        return Prompt(ids, torch.arange(config.text_len) < WORDS, rows)

    def rows(self, seed: int, batch: int) -> Tensor:
        """Return prompt embeddings."""
        config = self.model.config.dit
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randn(batch, config.text_len, config.text_dim, generator=generator)
        rows[:, WORDS:] = 0
        return rows.to(self.device, self.model.model.dtype)


def chunk_lines(bench: Bench, sessions: int) -> None:
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
    print("with 4 frames of history:")
    session = SessionCache()
    for call in range(4):
        request = replace(bench.request(call, 4), prompt=bench.prompt(0))
        bench.sync()
        start = time.perf_counter()
        predict(bench.model, [session], [request], published)
        bench.sync()
        print(f"  call {call}: {1e3 * (time.perf_counter() - start):.1f} ms")


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


def training_case(bench: Bench, batch: int) -> TrainingCase:
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


def training_lines(bench: Bench, batch: int) -> None:
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


def build(variant: str, device: torch.device, dtype: torch.dtype | None = None) -> WorldActionModel:
    """Return a network with random weights; unless ``dtype`` is given, bf16 on a GPU."""
    config = TINY if variant == "tiny" else preset(variant)
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    with torch.device("meta"):
        model = WorldActionModel(config, text_encoder=False)
    model = model.to(dtype).to_empty(device=device).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.normal_(std=0.02)
        for module in model.modules():
            if "Norm" in type(module).__name__ and getattr(module, "weight", None) is not None:
                module.weight.fill_(1)
    for encoder in (model.image_encoder, model.vae):
        encoder.requires_grad_(requires_grad=False)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--variant", choices=("tiny", "5b", "14b"), default="tiny")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sessions", type=int, default=4)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--only", choices=("chunk", "training"))
    parser.add_argument("--compile", action="store_true", help="compile every block")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    bench = Bench(build(arguments.variant, device), device, arguments.repeats)
    if arguments.compile:
        compile_blocks(bench.model.model.blocks)
    if arguments.only != "training":
        chunk_lines(bench, arguments.sessions)
    if arguments.only != "chunk":
        training_lines(bench, arguments.batch)


if __name__ == "__main__":
    main()
