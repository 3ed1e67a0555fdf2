"""What a stopped fit resumes from: one file, always whole."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dzrobot.errors import CheckpointError
from dzrobot.files import move
from dzrobot.policies.dreamzero.checkpoints.unpickling import load_tensors


@dataclass
class Saves:
    """The file of a fit in several parts; without ``path`` nothing is kept.

    Args:
        path: The file; :meth:`clear` removes it.
        identity: What the fit is of. A file of anything else is refused.
        every: Steps between saves.
    """

    path: Path | None = None
    identity: Mapping[str, str] = field(default_factory=dict)
    every: int = 20

    def __post_init__(self) -> None:
        """Read the file, if it is there.

        Raises:
            CheckpointError: it is unreadable, or of another fit.
        """
        self._kept: dict[str, Any] = {}
        if self.path is None or not self.path.exists():
            return
        advice = f"remove {self.path} to start again"
        try:
            self._kept = load_tensors(self.path)
            identity = self._kept["identity"]
        except (CheckpointError, TypeError, KeyError) as error:
            raise CheckpointError(f"{self.path} is unreadable ({error}); {advice}") from error
        changed = [name for name, value in self.identity.items() if identity.get(name) != value]
        if changed:
            lines = [f"{name}: {identity.get(name)}, now {self.identity[name]}" for name in changed]
            raise CheckpointError(
                f"{self.path} is of a fit with other options ({'; '.join(lines)}); "
                f"give the same again, or {advice}"
            )

    def restore(self, part: str, module: nn.Module, *others: Any) -> int:
        """Put back what :meth:`keep` last kept in ``part``; return its step, 0 without one."""
        if self._kept.get("part") != part:
            return 0
        module.load_state_dict(self._kept["module"])
        for other, state in zip(others, self._kept["others"], strict=True):
            other.load_state_dict(state)
        return int(self._kept["step"])

    def keep(self, part: str, step: int, module: nn.Module, *others: Any) -> None:
        """Keep the place after ``step`` steps, if it is one to keep."""
        if step % self.every == 0:
            states = [other.state_dict() for other in others]
            self._write(part=part, step=step, module=module.state_dict(), others=states)

    def result(self, part: str, module: nn.Module) -> float | None:
        """Return the result of ``part``, its module put back; None if it was not finished."""
        results: dict[str, float] = self._kept.get("results", {})
        if part in results and self._kept.get("part") == f"after {part}":
            module.load_state_dict(self._kept["module"])
        return results.get(part)

    def finish(self, part: str, result: float, module: nn.Module) -> float:
        """Keep that ``part`` ended in ``result``; return it."""
        self._kept["results"] = {**self._kept.get("results", {}), part: result}
        self._write(part=f"after {part}", module=module.state_dict())
        return result

    def clear(self) -> None:
        """Remove the file: what the fit was for is there."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def _write(self, **values: Any) -> None:
        results = self._kept.get("results", {})
        self._kept = {"identity": dict(self.identity), "results": results, **values}
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self.path.with_name(self.path.name + ".aside")
            torch.save(self._kept, temporary)
            move(temporary, self.path)
