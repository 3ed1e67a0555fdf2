"""Numbers on a page of Weights & Biases: those of training runs, and those of evaluations."""

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dzrobot.errors import ConfigError
from dzrobot.files import explained, write_text
from dzrobot.importing import required

ID_FILE = "wandb_run_id"
"""In a run's or an evaluation's folder: its page, which the same command later goes on with."""


def check_wandb(what: str) -> None:
    """Raise unless the package is installed; nothing is loaded.

    Args:
        what: Field or flag that asks for it.

    Raises:
        MissingDependencyError: it is missing.
    """
    required(what, "wandb", "wandb")


class WandbSink:
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
