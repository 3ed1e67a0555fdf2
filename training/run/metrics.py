"""The metrics of a log record: global losses, throughput, utilization, waiting, memory, skips.

Losses, gradient norms and skip flags stay on the device until a record is due; then one stacked
tensor is summed over ranks and read once.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from dzrobot.training.cost.flops import SampleCost
from dzrobot.training.run.optimizer import StepOutcome


@dataclass(frozen=True, kw_only=True)
class LogRecord:
    """One log record; the field names are the columns of ``metrics.jsonl`` and never change."""

    step: int
    """Steps done."""

    loss: float
    """Mean over the samples of the interval, all ranks, of all terms; skipped steps are left out.
    """

    dynamics_loss: float
    """Video part of ``loss``."""

    action_loss: float
    """Action part of ``loss``."""

    grad_norm: float
    """Global norm before clipping, of the last step."""

    lr: float
    """Learning rate of the last step."""

    samples_per_s: float
    """Samples per second, all ranks."""

    samples_per_s_per_gpu: float
    """Samples per second and process."""

    mfu: float | None
    """Published transformer cost over the device peak; null where the peak is not known."""

    utilisation: float | None
    """Executed operations, recomputation and encoders included, over the device peak."""

    data_wait_pct: float
    """Share of the time spent waiting for batches, per cent, of the slowest rank."""

    memory_gib: float
    """Largest memory allocated on the device so far, of the fullest rank; 0 on CPU."""

    skips: int
    """Non-finite steps so far."""

    unreadable: int
    """Samples replaced because their file could not be read, so far, all ranks."""

    seconds: float
    """Wall time since the run started."""

    seconds_per_step: float
    """Wall time of one step, mean of the interval; evaluations are left out."""

    terms: Mapping[str, float] = field(default_factory=dict)
    """Terms of ``loss`` that plug-ins add, by name; columns ``loss_NAME``."""

    def as_dict(self) -> dict[str, float | int | None]:
        """Return the columns by name."""
        columns = asdict(self)
        own = columns.pop("terms")
        return {**columns, **{f"loss_{name}": value for name, value in own.items()}}


@dataclass(frozen=True)
class SkippedStep:
    """One step that was not applied."""

    step: int
    sample_ids: tuple[int, ...]


@dataclass
class _Interval:
    """What accumulates between two records."""

    rows: list[Tensor] = field(default_factory=list)
    sample_ids: list[tuple[int, ...]] = field(default_factory=list)
    waited: float = 0.0
    samples: int = 0


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Converts samples per second into utilization."""

    cost: SampleCost
    """Operations of one sample."""

    devices: int
    """Processes of the run."""

    peak_tflops: float | None
    """Dense peak of one device, null where it is not known."""

    def share(self, operations: float, samples_per_s: float) -> float | None:
        """Return the share of the peak that ``operations`` per sample use."""
        if self.peak_tflops is None:
            return None
        return operations * samples_per_s / (self.peak_tflops * 1e12 * self.devices)


class TrainMetrics:
    """Collects step outcomes without reading them; see :meth:`record`."""

    def __init__(
        self,
        rates: Rates,
        device: torch.device,
        clock: Callable[[], float] = time.perf_counter,
        skips: int = 0,
        terms: Sequence[str] = (),
    ) -> None:
        self._terms = tuple(terms)
        self._rates = rates
        self._device = device
        self._clock = clock
        self._started = self._since = clock()
        self._open = _Interval()
        self._unreadable = 0
        self.skips = skips
        self.skips_in_row = 0
        self.recent_skips: list[SkippedStep] = []

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside as waiting for data."""
        before = self._clock()
        yield
        self._open.waited += self._clock() - before

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Exclude the time inside, such as an evaluation's, from rates and times per step."""
        before = self._clock()
        yield
        self._since += self._clock() - before

    def add(
        self, losses: Tensor, outcome: StepOutcome, samples: int, sample_ids: Sequence[int]
    ) -> None:
        """Add one step: this rank's share of every part of the loss, and what AdamW did.

        Args:
            losses: Dynamics, action and plug-ins' terms, ``(2 + terms,)`` on the device; the sum
                over ranks is the global mean.
            outcome: Result of the optimizer step.
            samples: Samples of the step, all ranks.
            sample_ids: Samples this rank computed.
        """
        row = torch.cat(
            [losses.detach().float(), torch.stack([outcome.grad_norm, outcome.skipped, outcome.lr])]
        )
        self._open.rows.append(row)
        self._open.sample_ids.append(tuple(sample_ids))
        self._open.samples += samples

    def unreadable(self, count: int) -> None:
        """Count samples of this rank that were replaced."""
        self._unreadable += count

    def record(self, step: int) -> LogRecord:
        """Close the interval and return its record. Collective; the device is read only here."""
        rows = torch.stack(self._open.rows)
        sums = torch.cat([rows[:, :-3].flatten(), rows.new_tensor([float(self._unreadable)])])
        dist.all_reduce(sums)
        peak = torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else 0
        worst = rows.new_tensor([self._open.waited, peak / 2**30])
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        # One transfer: reading numbers one by one would stall the device each time.
        numbers = torch.cat([rows[:, -3:].flatten(), sums, worst]).tolist()
        elapsed = max(self._clock() - self._since, 1e-9)
        return self._close(step, numbers, elapsed)

    def _close(self, step: int, numbers: list[float], elapsed: float) -> LogRecord:
        count = len(self._open.rows)
        outcomes = [numbers[3 * i : 3 * i + 3] for i in range(count)]
        width = 2 + len(self._terms)
        starts = range(3 * count, (3 + width) * count, width)
        losses = [numbers[start : start + width] for start in starts]
        unreadable, waited, memory = numbers[(3 + width) * count :]
        self._note_skips(step, [skipped > 0 for _, skipped, _ in outcomes])
        kept = [
            parts for parts, (_, skipped, _) in zip(losses, outcomes, strict=True) if not skipped
        ]
        # A NaN shows where every step was skipped: an average of nothing is not a zero.
        dynamics, action, *terms = (
            sum(parts[i] for parts in kept) / len(kept) if kept else float("nan")
            for i in range(width)
        )
        rate = self._open.samples / elapsed
        cost = self._rates.cost
        self._open, self._since = _Interval(), self._clock()
        return LogRecord(
            step=step,
            loss=sum(terms, start=dynamics + action),
            dynamics_loss=dynamics,
            action_loss=action,
            grad_norm=outcomes[-1][0],
            lr=outcomes[-1][2],
            samples_per_s=rate,
            samples_per_s_per_gpu=rate / self._rates.devices,
            mfu=self._rates.share(cost.model, rate),
            utilisation=self._rates.share(cost.executed, rate),
            data_wait_pct=100 * waited / elapsed,
            memory_gib=memory,
            skips=self.skips,
            unreadable=round(unreadable),
            seconds=self._since - self._started,
            seconds_per_step=elapsed / count,
            terms=dict(zip(self._terms, terms, strict=True)),
        )

    def _note_skips(self, step: int, skipped: list[bool]) -> None:
        first = step - len(skipped)
        for i, (was_skipped, ids) in enumerate(zip(skipped, self._open.sample_ids, strict=True)):
            if was_skipped:
                self.skips += 1
                self.skips_in_row += 1
                self.recent_skips.append(SkippedStep(first + i, ids))
            else:
                self.skips_in_row = 0
                self.recent_skips.clear()
