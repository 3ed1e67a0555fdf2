"""Metric loggers: JSONL, TensorBoard, Weights & Biases, Trackio; of training and evaluations."""

import json
import math
import sys
import uuid
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel, ValidationError

from dzrobot.errors import ConfigError
from dzrobot.files import explained, open_to_append, whole_lines, write_bytes, write_text
from dzrobot.importing import required

METRICS_FILE = "metrics.jsonl"
"""In the folder of a run: one line for every log record or evaluation."""

SUCCESS = "rollout/success"
"""Metric of an evaluation in an environment during training."""

ID_FILE = "wandb_run_id"
"""In the folder of a run or evaluation: the id of its W&B run, which a later command resumes."""

TRACKIO_FILE = "trackio_run_id"
"""The same of Trackio."""


class MetricLogger(Protocol):
    """Receives metrics by name."""

    def write(self, step: int, numbers: Mapping[str, float | int | None]) -> None:
        """Log the metrics of one step."""
        ...

    def close(self) -> None:
        """Write out what is pending."""
        ...


class _Logged(BaseModel):
    """A line of a run's metrics, in the part that a resumed run reads."""

    step: int


class JsonlLogger:
    """Appends one JSON object per line; a number that is not finite becomes null.

    Args:
        path: The file.
        resumed: Step that a run goes on from. Lines of later steps are removed: those steps are
            done again. None: nothing is removed.
    """

    def __init__(self, path: Path, resumed: int | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if resumed is not None:
            _drop_later(path, resumed)
        # Line buffered: a killed run keeps every finished line.
        self._file = open_to_append(path)

    def write(self, step: int, numbers: Mapping[str, float | int | None]) -> None:
        """Append one line."""
        self._file.write(
            json.dumps({"step": step} | {k: _finite(v) for k, v in numbers.items()}) + "\n"
        )

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _drop_later(path: Path, step: int) -> None:
    """Remove the lines of steps after ``step``; lines of other programs stay."""
    lines = whole_lines(path)
    kept = []
    for line in lines:
        try:
            later = _Logged.model_validate_json(line).step > step
        except ValidationError:
            later = False
        if not later:
            kept.append(line + b"\n")
    if len(kept) < len(lines):
        write_bytes(path, b"".join(kept))


class TensorBoardLogger:
    """Writes scalars below ``train/``.

    Args:
        folder: Of the event files.
        resumed: Step that a run goes on from; what was written of later ones is no longer shown.
    """

    def __init__(self, folder: Path, resumed: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purged = None if resumed is None else resumed + 1
        self._writer = SummaryWriter(str(folder), purge_step=purged)  # type: ignore[no-untyped-call]

    def write(self, step: int, numbers: Mapping[str, float | int | None]) -> None:
        """Write each number as a scalar."""
        for name, value in numbers.items():
            if value is not None:
                self._writer.add_scalar(f"train/{name}", value, step)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()  # type: ignore[no-untyped-call]


def check_package(what: str, package: str) -> None:
    """Raise unless ``package`` is installed, an extra of its own name; nothing is loaded.

    Args:
        what: Field or flag that asks for it.
        package: ``wandb`` or ``trackio``.

    Raises:
        MissingDependencyError: it is missing.
    """
    required(what, package, package)


class _RunLogger:
    """Logs to a run of a service."""

    _run: Any

    def write(self, step: int, numbers: Mapping[str, float | int | None]) -> None:
        """Log the numbers of one step."""
        self._run.log(
            {name: value for name, value in numbers.items() if value is not None}, step=step
        )


class WandbLogger(_RunLogger):
    """Logs to a Weights & Biases project; a run resumed in the same folder continues its W&B run.

    Args:
        project: Name of the project.
        folder: Folder of the run or evaluation; made if it is missing.
        config: Settings shown with the W&B run.

    Raises:
        MissingDependencyError: the package is not installed.
        ConfigError: it cannot start (no login, no network), or the folder cannot be written to.
    """

    def __init__(self, project: str, folder: Path, config: Mapping[str, Any]) -> None:
        check_package("Weights & Biases", "wandb")
        import wandb

        try:
            self._run = wandb.init(
                project=project, dir=str(folder), name=folder.name, config=dict(config),
                id=_run_id(folder, ID_FILE), resume="allow",
            )  # fmt: skip
        except wandb.Error as error:
            raise ConfigError(
                f"Weights & Biases did not start: {error}. Run `wandb login` once, or set "
                f"WANDB_MODE=offline to keep the metrics in {folder} for `wandb sync`"
            ) from error

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class TrackioLogger(_RunLogger):
    """Logs to a project of Trackio, on this machine unless its variables say otherwise.

    A run resumed in the same folder continues its Trackio run; ``trackio show`` opens the page.

    Args:
        project: Name of the project.
        folder: Folder of the run or evaluation; made if it is missing.
        config: Settings shown with the run.

    Raises:
        MissingDependencyError: the package is not installed.
        ConfigError: the folder cannot be written to.
    """

    def __init__(self, project: str, folder: Path, config: Mapping[str, Any]) -> None:
        check_package("Trackio", "trackio")
        import trackio

        # Trackio knows a run by its name, and folders of one name are many.
        name = f"{folder.name}-{_run_id(folder, TRACKIO_FILE)}"
        # What it prints is not a result of a command.
        with redirect_stdout(sys.stderr):
            self._run = trackio.init(
                project=project, name=name, config=_plain(config), resume="allow", embed=False
            )

    def close(self) -> None:
        """Write out what is pending, and finish the run."""
        import trackio

        with redirect_stdout(sys.stderr):
            # Not the run's own: that would be finished once more when the program ends.
            trackio.finish()


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as JSON can hold them: paths and the like as texts."""
    plain: dict[str, Any] = json.loads(json.dumps(dict(config), default=str))
    return plain


def _run_id(folder: Path, name: str) -> str:
    """Return the id of the run of ``folder`` in its file ``name``, a new one the first time."""
    file = folder / name
    with explained(f"write {file}", ConfigError):
        if file.exists():
            return file.read_text(encoding="ascii").strip()
        folder.mkdir(parents=True, exist_ok=True)
        write_text(file, run_id := uuid.uuid4().hex[:12])
    return run_id


def _finite(value: float | int | None) -> float | int | None:
    return value if value is None or math.isfinite(value) else None
