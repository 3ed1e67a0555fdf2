"""One fine-tuning run, in the order in which it happens.

Every step: read the micro-batches of this rank, encode images on the device, run the frozen
encoders, draw the noise keyed by the samples' slots, differentiate, reduce gradients over ranks,
clip, update or skip, log, save. None of it depends on the number of processes, and only log records
read the device.
"""

import logging
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dzrobot.errors import DzrobotError
from dzrobot.policies.dreamzero.network.diffusion import DiffusionNoise
from dzrobot.policies.dreamzero.network.world_action import (
    LossCounts,
    LossOptions,
    PreparedBatch,
    WorldActionModel,
)
from dzrobot.training.data import (
    CollatedBatch,
    LoaderOptions,
    LoaderPlan,
    build_loader,
)
from dzrobot.training.run.build import TrainingComponents
from dzrobot.training.run.checkpoint import (
    CheckpointWriter,
    SavedCheckpoint,
    check_resumable,
    choose_checkpoint,
    identity,
    provenance,
    restore,
    training_state,
)
from dzrobot.training.run.evaluation import (
    OwnData,
    ask_about_own_data,
    evaluate_open_loop,
    evaluate_rollouts,
)
from dzrobot.training.run.export import PartialExport, export
from dzrobot.training.run.heartbeat import Heartbeat
from dzrobot.training.run.inputs import sample_noise, with_given_actions, with_less_video
from dzrobot.training.run.optimizer import StepOutcome
from dzrobot.training.run.parallel import before_micro_batch, reading_outputs
from dzrobot.training.run.plugin import RunView
from dzrobot.training.run.run_log import RunLog, describe, describe_batch

_log = logging.getLogger(__name__)


class TooManySkipsError(DzrobotError):
    """Too many steps in a row had a gradient that is not finite."""


@dataclass
class Trainer:
    """The loop; :meth:`run` does everything."""

    components: TrainingComponents
    step: int = 0
    """Optimizer steps done."""

    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    """Says what this process does, to those that watch for a hang."""

    stopped_by: int = field(default=0, init=False)
    """Number of the signal that asked some process to stop; 0: none did."""

    _is_first: bool = field(default=True, init=False)
    """Whether no step is done yet: what libraries prepare in the first one takes its time."""

    _own: OwnData | None = field(default=None, init=False)
    """Whether the policy does its data, as it was measured last."""

    _shown: bool = field(default=False, init=False)
    """Whether the first batch has been described."""

    def __post_init__(self) -> None:
        config, world = self.components.config, self.components.world
        self._plugins = self.components.plugins
        self._checkpoints = CheckpointWriter(
            config.runner.output_dir / "checkpoints", config.checkpoint, world,
            on_complete=self._plugins.saved,
        )  # fmt: skip
        self._sidecars = PartialExport(self.components)
        self._loss_options = LossOptions(
            action_loss_norm=config.model.action_loss_norm, terms=self._plugins.terms
        )
        self._count = config.accumulation(world.size)

    def run(self) -> bool:
        """Train; return whether the last step was reached, not a termination request."""
        config, world = self.components.config, self.components.world
        recipe = config.model_dump(mode="json")
        with self._stopping_on_request():
            self.resume()
            resumed = None if config.runner.resume_dir is None else self.step
            with RunLog.open(
                config.logging, config.runner.output_dir, recipe,
                is_main=world.is_main, resumed=resumed,
            ) as log:  # fmt: skip
                if world.is_main:
                    _log.info("%s", describe(self.components, self.step))
                self._plugins.started(self._view())
                finished = self._train(log)
                with self.heartbeat.long("plug-ins"):
                    self._plugins.ended(finished=finished)
        if finished and config.checkpoint.export:
            with self.heartbeat.long("export"):
                export(self.components, self.step)
        return finished

    @contextmanager
    def _stopping_on_request(self) -> Iterator[None]:
        """Make SIGTERM and Ctrl-C end the run after a save; restore their handlers afterwards."""
        previous = {
            number: signal.signal(number, self._on_terminate)
            for number in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def resume(self) -> None:
        """Resume from the checkpoint that the recipe names, if any."""
        saved = self._find_saved()
        if saved is None:
            return
        check_resumable(saved, self.components)
        restore(saved, self.components)
        self.step = saved.step
        _log.info("resumed %s at step %d", saved.path, self.step)

    def _find_saved(self) -> SavedCheckpoint | None:
        runner = self.components.config.runner
        if runner.resume_dir is None:
            return None
        own = runner.output_dir / "checkpoints"
        return choose_checkpoint(runner.resume_dir, own, self.components.world)

    def _train(self, log: RunLog) -> bool:
        config, world = self.components.config, self.components.world
        last = config.runner.max_steps
        batches = self.batches(last)
        while self.step < last:
            with self.components.compiling.watching("training step"):
                outcome = self.train_step(batches)
            self.step += 1
            if self.components.ema is not None:
                self.components.ema.update(outcome.skipped)
            with self.heartbeat.long("plug-ins"):
                self._plugins.stepped(self.step)
            log.advance(self.step, last)
            if self.step % config.logging.log_interval == 0 or self.step == last:
                self._write_record(log)
            self._checkpoints.poll()
            stopping = self._any_stop_requested()
            interval = config.runner.rollout_interval
            rollout_due = not stopping and interval is not None and self.step % interval == 0
            saving = self.step % config.checkpoint.save_interval == 0
            if stopping or self.step == last or saving or rollout_due:
                self.save(wait=stopping or self.step == last or rollout_due)
            if stopping:
                _log.info(
                    "stopped on request and saved at step %d of %d; runner.resume_dir=auto, with "
                    "the same command, resumes from there", self.step, last,
                )  # fmt: skip
                return self.step == last
            if config.runner.eval_interval and self.step % config.runner.eval_interval == 0:
                self._evaluate(log)
            if rollout_due:
                with self.components.metrics.excluded(), self.heartbeat.long("rollouts"):
                    log.note(self.step, evaluate_rollouts(config, world, self.step))
        with self.heartbeat.long("checkpoint"):
            self._checkpoints.finish()
        if not config.runner.eval_interval or last % config.runner.eval_interval:
            self._evaluate(log, open_loop=False)
        if self._own is not None and world.is_main:
            _log.log(logging.INFO if self._own.does_it else logging.WARNING, self._own.sentence)
        return True

    def _evaluate(self, log: RunLog, *, open_loop: bool = True) -> None:
        """Log errors on held-out windows, and whether the policy does its data."""
        with (
            self.components.metrics.excluded(), self.components.compiling.watching("evaluation"),
            self.heartbeat.long("evaluation"),
        ):  # fmt: skip
            if open_loop and self.components.datasets.held_out is not None:
                log.note(self.step, evaluate_open_loop(self.components))
            self._own = ask_about_own_data(self.components)
            if self._own is not None:
                log.note(self.step, self._own.numbers)

    def batches(self, last: int) -> Iterator[CollatedBatch]:
        """Return this rank's micro-batches from the present step up to step ``last``."""
        config, world = self.components.config, self.components.world
        plan = LoaderPlan(
            global_batch=config.runner.global_batch_size,
            micro_batch=config.runner.micro_batch_size, rank=world.rank, world_size=world.size,
            start_step=self.step, stop_step=last,
        )  # fmt: skip
        options = LoaderOptions(
            num_workers=config.data.num_workers, prefetch_factor=config.data.prefetch_factor,
            pin_memory=world.device.type == "cuda",
        )  # fmt: skip
        return iter(build_loader(self.components.datasets.train, plan, options))

    def train_step(self, batches: Iterator[CollatedBatch]) -> StepOutcome:
        """Do one optimizer step: all its micro-batches, then clip and update, or skip."""
        losses, ids = self.accumulate(batches)
        self._go_on("optimizer step")
        outcome = self.components.optimizer.step()
        self._is_first = False
        samples = self.components.config.runner.global_batch_size
        self.components.metrics.add(losses, outcome, samples, ids)
        return outcome

    def accumulate(self, batches: Iterator[CollatedBatch]) -> tuple[Tensor, list[int]]:
        """Add up the gradients of a step's micro-batches.

        Returns:
            This process's share of the parts of the loss, and the ids of its samples.
        """
        components, ids = self.components, list[int]()
        parts: Iterable[CollatedBatch] = self._parts(batches)
        if self._loss_options.action_loss_norm == "masked":
            # The divisor is known once all of them have been read.
            parts = list(parts)
        counts = self._counts(parts)
        width = 2 + len(self._loss_options.terms)
        losses = torch.zeros(width, device=components.world.device)
        for number, batch in enumerate(parts, start=1):
            is_last = number == self._count
            before_micro_batch(components.model.model, components.config.parallel, is_last=is_last)
            losses += self.forward_backward(self.prepare(batch), batch, counts)
            components.metrics.unreadable(batch["skipped"])
            ids += batch["sample_id"].tolist()
        return losses, ids

    def _go_on(self, phase: str) -> None:
        self.heartbeat.at(phase, self.step + 1, is_long=self._is_first)

    def _parts(self, batches: Iterator[CollatedBatch]) -> Iterator[CollatedBatch]:
        """Yield the micro-batches of a step as they are needed: readers go on meanwhile."""
        for _ in range(self._count):
            self._go_on("reading data")
            with self.components.metrics.waiting():
                batch = next(batches)
            self._go_on("forward and backward")
            if not self._shown and self.components.world.is_main:
                _log.info("%s", describe_batch(batch, self.components))
                self._shown = True
            yield batch

    def _counts(self, parts: Iterable[CollatedBatch]) -> LossCounts:
        """Return the divisors of the losses: over the whole step, not over a micro-batch."""
        samples = float(self.components.config.runner.global_batch_size)
        if self._loss_options.action_loss_norm == "padded":
            return LossCounts(samples=samples, actions=samples)
        real = sum(int(batch["has_real_action"].sum()) for batch in parts)
        total = torch.tensor(float(real), device=self.components.world.device)
        dist.all_reduce(total)
        return LossCounts(samples=samples, actions=total.clamp(min=1))

    def prepare(self, batch: CollatedBatch) -> PreparedBatch:
        """Return a micro-batch after augmentation and the frozen encoders."""
        return self.components.inputs.prepare(batch)

    def forward_backward(
        self, prepared: PreparedBatch, batch: CollatedBatch, counts: LossCounts
    ) -> Tensor:
        """Add a micro-batch's gradients; return its share of the parts of the loss."""
        seed, slots = self.components.config.runner.seed, batch["slot"].tolist()
        network, step = self.components.network, batch["step"]
        noise = sample_noise(network, prepared, seed, step, slots)
        config, options = self.components.config.model, self._loss_options
        noise = with_given_actions(network, noise, batch, seed, config.rtc_training_max_delay)
        noise = with_less_video(noise, (seed, step), slots, config)
        model = self.components.model
        if self.components.teacher is not None:
            with reading_outputs():
                prepared, noise = self.components.teacher.lesson(
                    model, prepared, noise, options.form
                )
        return backward(model, prepared, noise, counts, options)

    def save(self, *, wait: bool) -> None:
        """Write a checkpoint; with ``wait``, return only when it is complete."""
        components = self.components
        meta: dict[str, Any] = {
            "skips": components.metrics.skips, "plugin_state": self._plugins.state(),
            **identity(components),
        }  # fmt: skip
        if components.world.is_main:
            with self.heartbeat.long("hash of the weights"):
                meta |= provenance(components)
        state = training_state(components.optimizer, components.ema, self._plugins)
        with self.heartbeat.long("checkpoint"):
            self._checkpoints.save(
                self.step, state, meta, wait=wait, write_sidecars=self._sidecars.write
            )

    def _view(self) -> RunView:
        """Return what plug-ins see of the run."""
        components, world = self.components, self.components.world
        return RunView(
            config=components.config, rank=world.rank, world_size=world.size, device=world.device,
            network=components.model,
        )  # fmt: skip

    def _write_record(self, log: RunLog) -> None:
        metrics = self.components.metrics
        record = metrics.record(self.step)
        log.write(record)
        with self.heartbeat.long("plug-ins"):
            numbers = self._plugins.recorded(record)
        if numbers:
            log.note(self.step, numbers)
        if metrics.skips_in_row >= self.components.config.optim.max_skips:
            self._give_up()

    def _give_up(self) -> None:
        metrics, world = self.components.metrics, self.components.world
        mine = [number for skip in metrics.recent_skips for number in skip.sample_ids]
        ids = sorted({number for part in world.gathered(mine) for number in part})
        named = [self.components.datasets.train.describe(number) for number in ids[:8]]
        raise TooManySkipsError(
            f"{metrics.skips_in_row} steps in a row had a gradient that is not finite "
            f"(optim.max_skips={self.components.config.optim.max_skips}); their {len(ids)} "
            f"samples: {', '.join(map(str, ids))}\n  "
            + "\n  ".join(named)
            + "\nCheck these recordings and their statistics, or lower optim.lr; the last "
            "checkpoint is intact."
        )

    def _on_terminate(self, number: int, _frame: FrameType | None) -> None:
        self.stopped_by = number
        # A second Ctrl-C does not wait for the save.
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _any_stop_requested(self) -> bool:
        """Return whether any process received a stop signal: all must save together."""
        requested = torch.tensor(self.stopped_by)
        dist.all_reduce(requested, op=dist.ReduceOp.MAX, group=self.components.world.host_group)
        self.stopped_by = int(requested.item())
        return self.stopped_by != 0


def backward(
    model: WorldActionModel,
    prepared: PreparedBatch,
    noise: DiffusionNoise,
    counts: LossCounts,
    options: LossOptions,
) -> Tensor:
    """Differentiate the loss of a micro-batch; return its dynamics and action parts and its terms.

    Args:
        model: The network, laid out or plain.
        prepared: The samples.
        noise: Their noise.
        counts: Divisors of the sums, over the whole step, so that micro-batches add up.
        options: How the loss is averaged.
    """
    with reading_outputs():
        losses = model.loss(prepared, noise, counts, options)
    losses.loss.backward()  # type: ignore[no-untyped-call]
    return torch.stack([losses.dynamics_loss, losses.action_loss, *losses.terms])
