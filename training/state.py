"""What a training checkpoint holds, and what must be equal for a run to continue from it."""

import logging
from typing import Any

import torch

import dzrobot
from dzrobot.errors import CheckpointError
from dzrobot.training.checkpoint import Saved, load_state
from dzrobot.training.parts import Parts

_log = logging.getLogger(__name__)

_MUST_MATCH = ("base", "is_lora", "ema")
_SHOULD_MATCH = ("seed", "global_batch_size", "statistics", "windows", "max_steps")


def training_state(parts: Parts) -> dict[str, Any]:
    """Return every tensor of a run as it lies: weights, moments, average, count of updates.

    Frozen weights are not among them: they are those the run started from, which the checkpoint
    names.
    """
    optimizer = parts.optimizer
    state: dict[str, Any] = {
        "model": {name: parameter.detach() for name, parameter in optimizer.named.items()},
        "optim": optimizer.moments(),
        "updates": optimizer.updates,
    }
    if parts.ema is not None:
        state["ema"] = parts.ema.average
    return state


def restore(saved: Saved, parts: Parts) -> None:
    """Fill every tensor of a run from a checkpoint of any number of processes."""
    load_state(saved, training_state(parts))
    parts.optimizer.set_updates()
    parts.meter.skips = saved.meta.skips


def identity(parts: Parts) -> dict[str, Any]:
    """Return what tells this run from others."""
    config = parts.config
    return {
        "base": parts.start.fingerprint,
        "is_lora": config.model.is_lora,
        "ema": config.optim.ema_decay is not None,
        "seed": config.runner.seed,
        "global_batch_size": config.runner.global_batch_size,
        "max_steps": config.runner.max_steps,
        "statistics": [
            source.pipeline.statistics.fingerprint for source in parts.recordings.train.sources
        ],
        "windows": len(parts.recordings.train),
        "world_size": parts.world.size,
        "versions": {"dzrobot": dzrobot.__version__, "torch": torch.__version__},
        "config": config.model_dump(mode="json"),
    }


def check_resumable(saved: Saved, parts: Parts) -> None:
    """Check that a checkpoint belongs to this run.

    Raises:
        CheckpointError: Its base weights or its kind of training are others.
    """
    mine = identity(parts)
    wrong = [
        f"{name}: checkpoint {getattr(saved.meta, name)}, run {mine[name]}"
        for name in _MUST_MATCH
        if getattr(saved.meta, name) != mine[name]
    ]
    if wrong:
        raise CheckpointError(
            f"{saved.path} is not of this run: {'; '.join(wrong)}. Resume with the weights and "
            "settings it was "
            "written with, or start anew without runner.resume_dir."
        )
    done = saved.step >= parts.config.runner.max_steps
    # A restarted job finds its own last checkpoint: it only has to export.
    if done and parts.config.runner.resume_dir != "auto":
        raise CheckpointError(
            f"{saved.path} has done {saved.step} steps, "
            f"runner.max_steps={parts.config.runner.max_steps}: there is "
            "nothing left to train; raise max_steps"
        )
    for name in _SHOULD_MATCH:
        if getattr(saved.meta, name) != mine[name]:
            _log.warning(
                "%s changed from %s to %s: the run goes on, but not as it would have",
                name, getattr(saved.meta, name), mine[name],
            )  # fmt: skip
