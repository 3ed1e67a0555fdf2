"""Tables of a forecast: a recipe's step, and the chunks of a network, on every known device."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dzrobot.policies.dreamzero.network.config import NetworkConfig
from dzrobot.training.cost.accelerators import DEVICES, Accelerator, Roofline, floor, roofline
from dzrobot.training.cost.flops import sample_cost
from dzrobot.training.cost.memory import GIB, count_parameters, plan_memory
from dzrobot.training.cost.plan import ASSUMED_PROMPT, run_setup
from dzrobot.training.forecast.forecast import Cost, Form, costs, forecast, step_seconds
from dzrobot.training.forecast.rehearsal import (
    ChunkSetup,
    Rehearsal,
    StepRehearsal,
    StepSetup,
    rehearse_chunks,
    rehearse_prompt,
    rehearse_step,
)
from dzrobot.training.sft_config import SFTConfig

_SHOWN_COSTS = 15


@dataclass(frozen=True, eq=False, kw_only=True)
class StepProfile:
    """A recipe's optimizer step."""

    step: StepRehearsal
    devices: int
    micro_batch: int
    parts: int
    """Micro-batches of one device in one step."""

    form: Form
    """How the recipe runs its blocks."""

    peak_bytes: float
    """Expected memory of one device."""

    model_flops: float
    """Of one sample, the base of MFU."""

    def samples_s(self, roof: Roofline, form: Form) -> float:
        """Return samples per second and device."""
        return self.parts * self.micro_batch / step_seconds(self.step, roof, form, self.parts)


def profile_step(config: SFTConfig, base: NetworkConfig, devices: int) -> StepProfile:
    """Return the rehearsed optimizer step of a recipe.

    Args:
        config: The recipe.
        base: Network it starts from.
        devices: Processes, one device each.
    """
    setup, robot = run_setup(config, base, devices)
    counts = count_parameters(setup.network, is_lora=config.model.is_lora)
    cost = sample_cost(config, setup.network, robot.image_size, ASSUMED_PROMPT)
    step = rehearse_step(
        StepSetup(
            setup=setup, robot=robot, prompt_rows=ASSUMED_PROMPT, augmented=config.data.augment,
            has_stored_images=config.data.cache_features,
        )
    )  # fmt: skip
    return StepProfile(
        step=step, devices=devices, micro_batch=setup.micro_batch,
        parts=max(1, config.accumulation(devices)),
        form="compiled" if config.parallel.compile else "eager",
        peak_bytes=plan_memory(setup, counts).peak, model_flops=cost.model,
    )  # fmt: skip


def describe_step(profile: StepProfile, shown: Accelerator, *, table: bool = True) -> str:
    """Return what a step runs and what of it costs most on ``shown``.

    Args:
        profile: The step.
        shown: One of the known devices.
        table: Whether to begin with the forecast for all of them.
    """
    micro, update = profile.step.micro_batch, profile.step.update
    lines = [*step_table([("this recipe", profile)]), ""] if table else []
    lines += [
        f"one micro-batch of {profile.micro_batch}: {micro.flops / 1e12:.1f} TFLOP, "
        f"{_moved(micro) / 1e9:.0f} GB moved by {micro.eager.total()} operators one by one, "
        f"{_moved(micro, compiled=True) / 1e9:.0f} GB by {micro.compiled.total()} with compiled "
        "blocks",
        f"one update: {_moved(update) / 1e9:.0f} GB moved",
        f"what costs most on one {shown.name} ({profile.form}), of a micro-batch:",
        *_cost_lines(costs(micro, roofline(shown), profile.form)),
        *_notes(micro),
    ]
    return "\n".join(lines)


def step_table(profiles: Sequence[tuple[str, StepProfile]]) -> Iterator[str]:
    """Yield samples per second and device of every step on every device."""
    yield (
        f"{'samples/s per device':<30}{'device':<10}{'eager':>8}{'compiled':>10}{'floor':>8}"
        f"{'MFU':>7}  memory"
    )
    for name, profile in profiles:
        for device in DEVICES:
            roof = roofline(device)
            eager, compiled = (profile.samples_s(roof, form) for form in ("eager", "compiled"))
            least = profile.samples_s(floor(device), "compiled")
            own = eager if profile.form == "eager" else compiled
            share = own * profile.model_flops / (1e12 * device.half_tflops)
            yield (
                f"{name:<30}{device.name:<10}{eager:>8.3g}{compiled:>10.3g}{least:>8.3g}"
                f"{share:>7.1%}  {_fit(profile.peak_bytes, device)}"
            )


def _fit(bytes_: float, device: Accelerator) -> str:
    # Data sheets count 10^9 bytes.
    verdict = "" if bytes_ <= 1e9 * device.memory_gb else ", does not fit"
    return f"{bytes_ / GIB:.0f} GiB{verdict}"


@dataclass(frozen=True, eq=False, kw_only=True)
class ChunkProfile:
    """The chunks of one network."""

    plan: ChunkSetup
    chunks: Mapping[int, Rehearsal]
    """By the latent frame that a chunk begins at."""

    prompt: Rehearsal
    """Encoding a prompt that was not seen before."""

    weights: float
    """Bytes, prompt encoder included."""


def profile_chunks(plan: ChunkSetup) -> ChunkProfile:
    """Return the rehearsed chunks of an episode."""
    counts = count_parameters(plan.network, is_lora=False)
    parameters = counts.trained + counts.frozen + counts.text + counts.images
    return ChunkProfile(
        plan=plan, chunks=rehearse_chunks(plan), prompt=rehearse_prompt(plan),
        weights=plan.dtype.itemsize * parameters,
    )  # fmt: skip


def chunk_table(name: str, profile: ChunkProfile) -> Iterator[str]:
    """Yield milliseconds of every place in the window on every device."""
    forms: tuple[Form, ...] = ("eager", "compiled", "graph")
    places = list(profile.chunks)
    heads = [f"frame {start}" for start in places]
    yield (
        f"{'ms per chunk':<14}{'device':<10}{'form':<10}"
        + "".join(f"{head:>10}" for head in (*heads, "prompt"))
        + "  weights"
    )
    for device in DEVICES:
        rows = [(str(form), form, roofline(device)) for form in forms]
        for head, form, roof in (*rows, ("floor", "compiled", floor(device))):
            found = [profile.chunks[start] for start in places] + [profile.prompt]
            cells = [f"{_short(1e3 * forecast(part, roof, form).total):>10}" for part in found]
            fit = f"  {_fit(profile.weights, device)}"
            yield f"{name:<14}{device.name:<10}{head:<10}" + "".join(cells) + fit


def describe_chunks(name: str, profile: ChunkProfile, shown: Accelerator) -> Iterator[str]:
    """Yield what one chunk in the middle of a window runs and what of it costs most."""
    start = list(profile.chunks)[-1]
    chunk = profile.chunks[start]
    yield (
        f"{name}, frame {start}: {chunk.flops / 1e12:.1f} TFLOP, {_moved(chunk) / 1e9:.0f} GB "
        f"moved by {chunk.eager.total()} operators one by one, "
        f"{_moved(chunk, compiled=True) / 1e9:.0f} GB by {chunk.compiled.total()} with compiled "
        f"blocks; what costs most on one {shown.name}, one by one:"
    )
    yield from _cost_lines(costs(chunk, roofline(shown), "eager"))
    yield from _notes(chunk)


def _moved(rehearsal: Rehearsal, *, compiled: bool = False) -> float:
    kernels = rehearsal.compiled if compiled else rehearsal.eager
    return sum(count * kernel.bytes_ for kernel, count in kernels.items())


def _cost_lines(found: Sequence[Cost]) -> Iterator[str]:
    yield f"  {'share':>6}{'ms':>10}{'launches':>10}{'TFLOP':>9}{'GB':>8}  where"
    for cost in found[:_SHOWN_COSTS]:
        where = " ".join(part for part in (cost.stage, cost.module, cost.operator) if part)
        yield (
            f"  {cost.share:>6.1%}{_short(1e3 * cost.seconds):>10}{cost.launches:>10}"
            f"{_short(cost.flops / 1e12):>9}{_short(cost.bytes_ / 1e9):>8}  {where}"
        )


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _notes(rehearsal: Rehearsal) -> Iterator[str]:
    """Yield what an accelerator should not meet, and what the host sends."""
    for name, count in rehearsal.single_products.items():
        yield f"  float32 product, {count} times: {name}"
    for place, count in rehearsal.misplaced.items():
        yield f"  mixes devices, {count} times: {place}"
    sent: Counter[tuple[str, bool]] = Counter()
    for upload, count in rehearsal.uploads.items():
        sent[upload.place, upload.is_blocking] += count * upload.bytes_
    for (place, is_blocking), bytes_ in sent.items():
        waits = ", and the host waits" if is_blocking else ""
        yield f"  the host sends {bytes_ / 1e6:.3g} MB{waits}: {place}"
