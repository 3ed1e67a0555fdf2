"""How fast training is: what was published of it, and an estimate that is fitted to that."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch

from dzrobot.errors import counted
from dzrobot.policies.dreamzero.network.config import DiTConfig, preset
from dzrobot.policies.dreamzero.options import chosen_device, device_name
from dzrobot.training.cost.flops import SampleCost
from dzrobot.training.cost.memory import GIB
from dzrobot.training.sft_config import SFTConfig

H100_TFLOPS = 989.0
"""Dense bf16 peak of an H100 SXM."""

PEAK_TFLOPS = {
    "B200": 2250.0,
    "H100 PCIe": 756.0,
    "H800": 989.0,
    "A800": 312.0,
    "L40S": 362.0,
    "RTX PRO 6000": 503.0,
    "H100": H100_TFLOPS,
    "H200": 989.0,
    "A100": 312.0,
    "RTX 4090": 165.0,
    "RTX 5090": 210.0,
}
"""Dense bf16 peak of accelerators in TFLOP/s, by their data sheets, by a part of their name; longer
parts first within a family."""


def peak_tflops(device_name: str) -> float | None:
    """Return the dense bf16 peak of a device in TFLOP/s, None where it is not known."""
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in device_name), None)


def device_peak(device: torch.device) -> float | None:
    """Return the dense bf16 peak of ``device`` in TFLOP/s, None where it is not known."""
    return peak_tflops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


@dataclass(frozen=True, kw_only=True)
class PlannedDevices:
    """What a run is planned for: the machine at hand, or GPUs that somebody named."""

    count: int
    """Processes, one device each."""

    memory_gib: float
    """Memory of one GPU; 0: a processor, whose memory is not planned."""

    peak_tflops: float
    """Dense bf16 peak of one GPU, TFLOP/s; 0: a processor."""

    text: str

    @classmethod
    def of(cls, count: int | None, gib: float | None, peak: float | None) -> "PlannedDevices":
        """Return what was named, and what torch sees here in place of what was not.

        Args:
            count: Devices.
            gib: Memory of one.
            peak: Dense bf16 peak of one, TFLOP/s.
        """
        device = torch.device(chosen_device("auto"))
        if device.type != "cuda" and (count, gib, peak) == (None, None, None):
            cores = counted(len(os.sched_getaffinity(0)), "processor core")
            text = f"this machine: {cores}, and torch sees no GPU"
            return cls(count=1, memory_gib=0.0, peak_tflops=0.0, text=text)
        here, own_gib, own_peak = "no GPU", _NAMED_GIB, H100_TFLOPS
        if device.type == "cuda":
            here, own_peak = device_name(device), device_peak(device) or H100_TFLOPS
            own_gib = torch.cuda.get_device_properties(device).total_memory / GIB
        is_here = gib is None and peak is None and (count or 1) <= torch.cuda.device_count()
        found = f"this machine has {here}" if is_here else f"as named; this machine has {here}"
        size = f"{count or 1} x {gib or own_gib:.3g} GiB, {peak or own_peak:g} TFLOP/s each"
        return cls(
            count=count or 1, memory_gib=gib or own_gib, peak_tflops=peak or own_peak,
            text=f"{size} ({found})",
        )  # fmt: skip


_NAMED_GIB = 80.0
"""Memory of a GPU that was named by its number or peak alone."""


@dataclass(frozen=True, kw_only=True)
class PublishedRate:
    """Somebody else's measurement of training DreamZero: all weights, DROID with three views."""

    network: str
    """``5b`` or ``14b``."""

    how: str
    micro_batch: int
    rate: float
    """Samples per second and device."""


PUBLISHED_DEVICES = 8
"""H100 of every row below."""

PUBLISHED_ROBOT = "oxe_droid"

PUBLISHED_RATES = (
    PublishedRate(network="5b", how="RLinf, recompute", micro_batch=32, rate=4.44),
    PublishedRate(network="5b", how="DeepSpeed ZeRO-2, offload", micro_batch=32, rate=1.10),
    PublishedRate(network="5b", how="plain FSDP2", micro_batch=1, rate=0.56),
    PublishedRate(network="14b", how="RLinf", micro_batch=1, rate=0.150),
    PublishedRate(network="14b", how="plain FSDP2", micro_batch=1, rate=0.111),
    PublishedRate(network="14b", how="DeepSpeed ZeRO-2, offload", micro_batch=1, rate=0.055),
)
"""From "Training Acceleration" in RLinf's guide to DreamZero. The first row of a network is the one
that the estimate is fitted to."""

FITTED_UTILIZATION = {"5b": 0.1792, "14b": 0.2499}
"""Share of the peak that the operations which this trainer executes for a sample would reach at the
fitted rate. The published program executes others, so this does not measure either."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a recipe runs on, and with which robot."""

    devices: int
    peak_tflops: float
    """Dense bf16 peak of one device, TFLOP/s."""

    robot: str
    """Tag."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """What is known of the speed of one recipe."""

    cost: SampleCost
    setting: Setting
    network: str | None
    """The published network that has this transformer; None: another size."""

    rate: float | None
    """Estimated samples per second and device; None where nothing is known to estimate it from."""

    unknown: str
    """Why there is no estimate."""

    differences: tuple[str, ...]
    """In what the recipe differs from the row that the estimate is fitted to."""


def known_speed(config: SFTConfig, dit: DiTConfig, cost: SampleCost, setting: Setting) -> Speed:
    """Return what is known of the speed of a recipe.

    Args:
        config: The recipe.
        dit: Transformer of the run.
        cost: Operations of one sample.
        setting: What it runs on.
    """
    network = next((name for name in FITTED_UTILIZATION if _is_as_large(dit, name)), None)
    unknown = "" if network else "no network of this size was published with its speed"
    if network and not setting.peak_tflops:
        unknown = "for a GPU that is not here, name it: --gpus, --memory, --peak-tflops"
    elif network and config.parallel.param_dtype != "bf16":
        unknown = "the published rows compute in bfloat16"
    elif network and config.parallel.float8:
        unknown = "the published rows have no products in float8"
    elif network and config.parallel.cpu_offload:
        unknown = "no row with offload was published for FSDP2"
    rate = None
    if network and not unknown:
        rate = FITTED_UTILIZATION[network] * setting.peak_tflops * 1e12 / cost.executed
    return Speed(
        cost=cost, setting=setting, network=network, rate=rate, unknown=unknown,
        differences=tuple(_differences(config, fitted_row(network), setting)) if network else (),
    )  # fmt: skip


def fitted_row(network: str) -> PublishedRate:
    """Return the published row that the estimate of ``network`` is fitted to."""
    return next(row for row in PUBLISHED_RATES if row.network == network)


def _is_as_large(dit: DiTConfig, name: str) -> bool:
    sizes = [
        (one.dim, one.ffn_dim, one.num_heads, one.num_layers) for one in (dit, preset(name).dit)
    ]
    return sizes[0] == sizes[1]


def _differences(config: SFTConfig, row: PublishedRate, setting: Setting) -> Iterator[str]:
    if setting.devices != PUBLISHED_DEVICES:
        yield f"{setting.devices} device{'s' * (setting.devices > 1)}"
    if setting.peak_tflops not in (0.0, H100_TFLOPS):
        yield f"a peak of {setting.peak_tflops:g} TFLOP/s"
    if setting.robot != PUBLISHED_ROBOT:
        yield setting.robot
    if config.runner.micro_batch_size != row.micro_batch:
        yield f"micro-batch {config.runner.micro_batch_size}"
    if config.model.is_lora:
        yield "adapters"
    if config.distill.teacher_steps:
        yield "a teacher"


def describe_speed(speed: Speed) -> Iterator[str]:
    """Yield the estimate with what it is fitted to, beside what was published, as lines."""
    yield f"operations of one sample {_tera(speed.cost.executed)} TFLOP"
    if speed.rate is None:
        yield f"samples per second: not known: {speed.unknown}; --measure trains a few steps here"
    else:
        network, setting = speed.network or "", speed.setting
        slowest = min(row.rate for row in PUBLISHED_RATES if row.network == network)
        low = speed.rate * slowest / fitted_row(network).rate
        whole, one = (
            f"{two_digits(low * devices)} to {two_digits(speed.rate * devices)}"
            for devices in (setting.devices, 1)
        )
        yield (
            f"estimated {whole} samples/s, {one} per device: as the slowest published program, to "
            f"{FITTED_UTILIZATION[network]:.0%} of {setting.peak_tflops:g} TFLOP/s, fitted to the "
            "fastest"
        )
        if speed.differences:
            yield f"  not as in that row: {', '.join(speed.differences)}"
    yield "measured with this trainer on a GPU: nothing yet"
    if speed.network is None:
        return
    yield (
        f"published, samples/s per H100 ({PUBLISHED_DEVICES} of them, DROID, all weights), and the "
        "estimate of such a run:"
    )
    fitted = fitted_row(speed.network)
    for row in PUBLISHED_RATES:
        if row.network == speed.network:
            name = f"{row.how}, micro-batch {row.micro_batch}"
            ratio = fitted.rate / row.rate
            said = "fitted" if row is fitted else f"{ratio:.2f} times too high (not fitted)"
            yield f"  {name:<44}{row.rate:>6.3g}  {said}"


def two_digits(number: float) -> str:
    """Return a number with two digits that count."""
    return f"{float(f'{number:.1e}'):g}"


def describe_measured(rates: Sequence[float], samples: int) -> str:
    """Return what was measured here, and how long a run takes at that rate.

    Args:
        rates: Samples per second, each over a few steps.
        samples: Of the whole run.
    """
    slow, fast = min(rates), max(rates)
    times = [str(timedelta(seconds=float(two_digits(samples / rate)))) for rate in (fast, slow)]
    return (
        f"measured here: {two_digits(slow)} to {two_digits(fast)} samples/s in "
        f"{counted(len(rates), 'trial')}; the run's {samples:,} samples take {times[0]} to "
        f"{times[1]} at that, without saving and evaluating"
    )


def describe_cost(cost: SampleCost) -> Iterator[str]:
    """Yield where the operations of one sample are, as lines."""
    parts = {
        "transformer, forward": cost.executed_forward,
        "transformer, backward": 2 * cost.executed_forward,
        "blocks computed again": cost.recomputed_share * cost.executed_forward,
        "teacher, forward": cost.teacher_forwards * cost.executed_forward,
        "frozen encoders, forward": cost.encoders,
    }
    for name, operations in parts.items():
        if operations:
            share = operations / cost.executed
            yield f"  {name:<36}{_tera(operations):>10} TFLOP{share:>7.0%}"
    yield f"  {'by the published definition (for MFU)':<36}{_tera(cost.model):>9} TFLOP"


def _tera(operations: float) -> str:
    return f"{operations / 1e12:.4g}"
