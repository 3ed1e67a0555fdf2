"""Policies for `zero.py`, written again with a fault: its checkpoints and LeRobot's."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dzrobot.policies.dreamzero.bundled import default_checkpoint


def _parts(statistics):
    return [part for kind in statistics.values() for part in kind.values()]


def _wide(statistics):
    for part in _parts(statistics):
        for name in ("q01", "q99", "min", "max"):
            part[name] = [2 * value for value in part[name]]


def _mean_std(statistics):
    for part in _parts(statistics):
        low, high = part["mean"], [m + s for m, s in zip(part["mean"], part["std"], strict=True)]
        part["q01"], part["q99"] = low, high


def _of_libero(statistics):
    file = default_checkpoint("libero_object") / "experiment_cfg/metadata.json"
    statistics.update(json.loads(file.read_text())["libero_mini"]["statistics"])


STATISTICS = {
    "statistics of libero_object": _of_libero,
    "statistics twice as wide": _wide,
    "mean and deviation as quantiles": _mean_std,
}


def relearned(policy: Path, folder: Path, rows: Callable[[Any, Any], Any]) -> Path:
    """Write LeRobot's ``policy`` as it would be, had it been trained on data with such actions.

    Its last layer and the statistics of its actions are reordered; signs and scales go into the
    statistics.
    """
    from safetensors.numpy import load_file, save_file

    change = rows(np.eye(7, dtype=np.float32), None)
    order = np.abs(change).argmax(0)
    factors = change[order, range(7)]
    shutil.copytree(policy, folder)
    weights = load_file(folder / "model.safetensors")
    for name in ("model.action_head.weight", "model.action_head.bias"):
        weights[name] = np.ascontiguousarray(weights[name][order])
    save_file(weights, folder / "model.safetensors")
    (file,) = folder.glob("policy_postprocessor*unnormalizer*.safetensors")
    statistics = load_file(file)
    for name in ("action.mean", "action.std"):
        statistics[name] = statistics[name][order] * factors
    save_file(statistics, file)
    return folder


def edited(source: Path, folder: Path, name: str) -> Path:
    """Write the bundled checkpoint ``source`` without its passport, edited."""
    left = shutil.ignore_patterns("libero_object", "dzrobot_passport.json", "*.py", "__pycache__")
    shutil.copytree(source, folder, ignore=left)
    if name in STATISTICS:
        file = folder / "experiment_cfg/metadata.json"
        metadata = json.loads(file.read_text())
        STATISTICS[name](metadata["libero_mini"]["statistics"])
        file.write_text(json.dumps(metadata))
    if name == "random weights":
        from safetensors.torch import load_file, save_file

        weights, random = load_file(folder / "model.safetensors"), np.random.default_rng(0)
        for key, value in weights.items():
            if value.ndim > 1 and value.is_floating_point():
                drawn = random.standard_normal(value.shape) * float(value.float().std())
                value.copy_(value.new_tensor(drawn.astype(np.float32)))
            weights[key] = value
        save_file(weights, folder / "model.safetensors")
    return folder
