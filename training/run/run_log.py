"""The log of a run: metric loggers, progress line, a description before the first step."""

import logging
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from torch import nn

from dzrobot.progress import TimeLeft
from dzrobot.training.cost.plan import describe_accumulation
from dzrobot.training.data import CollatedBatch
from dzrobot.training.run.build import TrainingComponents
from dzrobot.training.run.loggers import (
    METRICS_FILE,
    JsonlLogger,
    MetricLogger,
    TensorBoardLogger,
    TrackioLogger,
    WandbLogger,
)
from dzrobot.training.run.metrics import LogRecord
from dzrobot.training.run.parallel import shard_table
from dzrobot.training.sft_config import LoggingConfig

_log = logging.getLogger(__name__)

_SHOWN = ("/mean", "/success", "/share")
"""Suffixes of the metrics of an evaluation that are printed; the others are only in the file."""


class RunLog:
    """All metric loggers of one run and its progress line; silent on all but the main process."""

    def __init__(self, loggers: list[MetricLogger], progress: Progress | None) -> None:
        self._loggers = loggers
        self._progress = progress
        self._task = progress.add_task("train", total=None, numbers="") if progress else None
        self._total = 0
        self._left = TimeLeft()

    @classmethod
    def open(
        cls,
        config: LoggingConfig,
        folder: Path,
        recipe: Mapping[str, Any],
        *,
        is_main: bool,
        resumed: int | None = None,
    ) -> "RunLog":
        """Open the loggers that ``config`` asks for in ``folder``.

        Args:
            config: Which loggers.
            folder: Of the run.
            recipe: What W&B and Trackio show of the run.
            is_main: Whether this process logs.
            resumed: Step that the run goes on from, if it may go on; see :class:`JsonlLogger`.
        """
        if not is_main:
            return cls([], None)
        loggers: list[MetricLogger] = [JsonlLogger(folder / METRICS_FILE, resumed)]
        if config.tensorboard:
            loggers.append(TensorBoardLogger(folder / "tensorboard", resumed))
        if config.wandb_project is not None:
            loggers.append(WandbLogger(config.wandb_project, folder, recipe))
        if config.trackio_project is not None:
            loggers.append(TrackioLogger(config.trackio_project, folder, recipe))
        columns = (
            TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=20), TimeElapsedColumn(),
            TextColumn("eta"), TimeRemainingColumn(), TextColumn("{task.fields[numbers]}"),
        )  # fmt: skip
        console = Console(stderr=True)
        # A file or pipe gets plain log lines instead of a moving one.
        return cls(
            loggers,
            Progress(*columns, console=console, refresh_per_second=2)
            if console.is_terminal
            else None,
        )

    def advance(self, step: int, total: int) -> None:
        """Move the progress line."""
        self._total = total
        self._left.estimate(step, total)
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=step, total=total)

    def write(self, record: LogRecord) -> None:
        """Write a log record to all loggers."""
        numbers = record.as_dict()
        step = int(numbers.pop("step") or 0)
        for logger in self._loggers:
            logger.write(step, numbers)
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, numbers=_short(record))
        elif self._loggers:
            left = self._left.estimate(step, self._total)
            _log.info("step %d of %d, %s: %s", step, self._total, left, _short(record))

    def note(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write metrics that are not part of every record, such as those of an evaluation."""
        for logger in self._loggers:
            logger.write(step, numbers)
        means = [f"{name} {value:.4f}" for name, value in numbers.items() if name.endswith(_SHOWN)]
        if self._loggers and means:
            _log.info("step %d: %s", step, ", ".join(means))

    def __enter__(self) -> "RunLog":
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()
        for logger in self._loggers:
            logger.close()


def _short(record: LogRecord) -> str:
    mfu = "" if record.mfu is None else f" mfu {record.mfu:.1%}"
    return (
        f"loss {record.loss:.4f} (video {record.dynamics_loss:.4f} "
        f"action {record.action_loss:.4f}) "
        f"norm {record.grad_norm:.2f} lr {record.lr:.1e} {record.seconds_per_step:.3g} s/step "
        f"{record.samples_per_s:.2f} samples/s{mfu} "
        f"wait {record.data_wait_pct:.0f}% skips {record.skips}"
    )


def describe(components: TrainingComponents, step: int) -> str:
    """Return the data, the parallel plan, the shard table and the size of the run, as text."""
    config, world = components.config, components.world
    parallel, runner, parts = config.parallel, config.runner, config.accumulation(world.size)
    trained = sum(parameter.numel() for parameter in components.optimizer.named.values())
    lines = [
        components.datasets.train.report(),
        f"processes {world.size} on {world.device.type}, strategy {parallel.strategy}, weights "
        f"{parallel.param_dtype}, reduce {parallel.reduce_dtype}, activation checkpointing "
        f"{parallel.activation_checkpointing}, compile {parallel.compile}, CUDA graphs "
        f"{parallel.cuda_graphs}, offload {parallel.cpu_offload}",
        f"global batch {runner.global_batch_size} = {runner.micro_batch_size} x {world.size} "
        f"processes x {parts} accumulated; steps {step} to {runner.max_steps}",
        describe_accumulation(parts, parallel.enable_gradient_accumulation),
        f"trained parameters {trained:,}",
        *_shard_lines(components.model.model),
    ]
    return "\n".join(lines)


def describe_batch(batch: CollatedBatch, components: TrainingComponents) -> str:
    """Return robots, sizes, ranges and the share of real numbers of one micro-batch, as text."""
    robots = [source.spec.embodiment.tag for source in components.datasets.train.sources]
    counts = Counter(robots[source] for source in batch["source"].tolist())
    prompts = components.inputs.prompts.lengths(batch["prompt"])
    text_len = components.network.dit.text_len
    images = [
        f"{key.removeprefix('video.')} {tuple(frames.shape)} {frames.dtype} "
        f"{frames.min().item()} to {frames.max().item()}".replace("torch.", "")
        for views in batch["views"].values()
        for key, frames in views.items()
    ]
    vectors = []
    for name, values, mask in (
        ("state", batch["state"], batch["state_mask"]),
        ("action", batch["action"], batch["action_mask"]),
    ):
        real = values[mask.bool()]
        span = f", {real.min().item():.2f} to {real.max().item():.2f}" if real.numel() else ""
        share = mask.float().mean().item()
        vectors.append(f"{name} {tuple(values.shape)}, {share:.0%} real{span}")
    vectors += [
        f"{key} {tuple(values.shape)}, {values.min().item():.2f} to {values.max().item():.2f}"
        for key, values in batch["conditions"].items()
    ]
    seen = ", ".join(images) or "from the cache of features"
    tokens = (
        f"text {len(prompts)} x {text_len} tokens, "
        f"{sum(prompts) / (len(prompts) * text_len):.0%} real ({min(prompts)} to {max(prompts)})"
    )
    known = ", ".join(f"{count} of {tag}" for tag, count in counts.items())
    return f"first batch: {known}; images {seen}; {'; '.join(vectors)}; {tokens}"


def _shard_lines(network: nn.Module) -> list[str]:
    rows = shard_table(network)
    shown: list[str] = []
    previous: tuple[int, int] | None = None
    for name, whole, local in rows:
        # Equal blocks are listed once.
        if (whole, local) == previous:
            continue
        count = sum(row[1:] == (whole, local) for row in rows)
        shown.append(f"  {name:<12} x {count:<3} {whole:>16,} parameters, {local:>16,} here")
        previous = (whole, local)
    return ["sharding units:", *shown]
