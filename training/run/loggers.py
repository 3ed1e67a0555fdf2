"""Metric loggers: a JSONL file, TensorBoard, Weights & Biases; of training runs and evaluations."""

import json
import math
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from dzrobot.errors import ConfigError
from dzrobot.files import explained, write_text
from dzrobot.importing import required

METRICS_FILE = "metrics.jsonl"
"""In the folder of a run: one line for every log record or evaluation."""

SUCCESS = "rollout/success"
"""Metric of an evaluation in an environment during training."""

ID_FILE = "wandb_run_id"
"""In a run's or an evaluation's folder: its page, which the same command later goes on with."""


class MetricLogger(Protocol):
    """Takes numbers by name."""

    def write(self, step: int, numbers: Mapping[str, float | int | None]) -> None:
        """Take the numbers of one step."""
        ...

    def close(self) -> None:
        """Write out what is pending."""
        ...


class JsonlLogger:
    """Appends one JSON object per line; a number that is not finite becomes null."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Line buffered: a killed run keeps every finished line.
        self._file = path.open("a", buffering=1)

    def write(self, step: int, numbers: Mapping[str, float | int | None]) -> None:
        """Append one line."""
        self._file.write(
            json.dumps({"step": step} | {k: _finite(v) for k, v in numbers.items()}) + "\n"
        )

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoardLogger:
    """Writes scalars below ``train/``."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))  # type: ignore[no-untyped-call]

    def write(self, step: int, numbers: Mapping[str, float | int | None]) -> None:
        """Write each number as a scalar."""
        for name, value in numbers.items():
            if value is not None:
                self._writer.add_scalar(f"train/{name}", value, step)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()  # type: ignore[no-untyped-call]


def check_wandb(what: str) -> None:
    """Raise unless the package is installed; nothing is loaded.

    Args:
        what: Field or flag that asks for it.

    Raises:
        MissingDependencyError: it is missing.
    """
    required(what, "wandb", "wandb")


class WandbLogger:
    """Logs to a Weights & Biases project; what is resumed in its folder continues the same page.

    Args:
        project: Name of the project.
        folder: Of the run or evaluation; made if it is not there.
        config: What the page shows as its settings.

    Raises:
        MissingDependencyError: the package is not installed.
        ConfigError: it cannot begin (no login, no network), or the folder cannot be written.
    """

    def __init__(self, project: str, folder: Path, config: Mapping[str, Any]) -> None:
        check_wandb("Weights & Biases")
        import wandb

        try:
            self._run = wandb.init(
                project=project, dir=str(folder), name=folder.name, config=dict(config),
                id=_page_of(folder), resume="allow",
            )  # fmt: skip
        except wandb.Error as error:
            raise ConfigError(
                f"Weights & Biases did not begin: {error}. `wandb login` once, or "
                f"WANDB_MODE=offline keeps the numbers in {folder} for `wandb sync`"
            ) from error

    def write(self, step: int, numbers: Mapping[str, float | int | None]) -> None:
        """Log the numbers of one step."""
        self._run.log(
            {name: value for name, value in numbers.items() if value is not None}, step=step
        )

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def _page_of(folder: Path) -> str:
    """Return the identity of the page of ``folder``, a new one the first time."""
    file = folder / ID_FILE
    with explained(f"write {file}", ConfigError):
        if file.exists():
            return file.read_text(encoding="ascii").strip()
        folder.mkdir(parents=True, exist_ok=True)
        write_text(file, page := uuid.uuid4().hex[:12])
    return page


def _finite(value: float | int | None) -> float | int | None:
    return value if value is None or math.isfinite(value) else None
