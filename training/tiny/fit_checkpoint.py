"""What a stopped fit resumes from: one file, always whole."""

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from dzrobot.documents import validated
from dzrobot.errors import CheckpointError
from dzrobot.files import explained, remove, write_bytes
from dzrobot.policies.dreamzero.checkpoints.unpickling import load_tensors


class _Kept(BaseModel):
    """What the file holds."""

    model_config = ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True)

    identity: dict[str, str]
    results: dict[str, float]
    part: str = ""
    step: int = Field(default=0, ge=0)
    module: dict[str, Tensor] = Field(default_factory=dict)
    others: list[dict[str, Any]] = Field(default_factory=list)


@dataclass
class FitCheckpoint:
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
        """Read the file if it is there, else check that it can be written, before work is spent.

        Raises:
            CheckpointError: it is unreadable, of another fit, or cannot be written.
        """
        self._kept = _Kept(identity=dict(self.identity), results={})
        if self.path is None:
            return
        with explained(f"write {self.path}", CheckpointError):
            there = self.path.exists()
            if not there:
                probe = self.path.with_name(f"{self.path.name}.aside")
                write_bytes(probe, b"")
                remove(probe)
        if there:
            self._read(self.path)

    def _read(self, path: Path) -> None:
        advice = f"remove {path} to start again"
        try:
            kept = validated(load_tensors(path), _Kept, str(path), CheckpointError)
        except CheckpointError as error:
            raise CheckpointError(f"{path} is unreadable ({error}); {advice}") from error
        identity = kept.identity
        changed = [name for name, value in self.identity.items() if identity.get(name) != value]
        if changed:
            lines = [f"{name}: {identity.get(name)}, now {self.identity[name]}" for name in changed]
            raise CheckpointError(
                f"{path} is of a fit with other options ({'; '.join(lines)}); "
                f"give the same again, or {advice}"
            )
        self._kept = kept

    def restore(self, part: str, module: nn.Module, *others: Any) -> int:
        """Put back what :meth:`keep` last kept in ``part``; return its step, 0 without one.

        Raises:
            CheckpointError: what was kept does not fit.
        """
        if self._kept.part != part:
            return 0
        self._load(module, *others)
        return self._kept.step

    def keep(self, part: str, step: int, module: nn.Module, *others: Any) -> None:
        """Keep the place after ``step`` steps, if it is one to keep."""
        if step % self.every == 0:
            states = [other.state_dict() for other in others]
            self._write(part=part, step=step, module=module.state_dict(), others=states)

    def result(self, part: str, module: nn.Module) -> float | None:
        """Return the result of ``part``, its module put back; None if it was not finished.

        Raises:
            CheckpointError: what was kept does not fit.
        """
        if part in self._kept.results and self._kept.part == f"after {part}":
            self._load(module)
        return self._kept.results.get(part)

    def finish(self, part: str, result: float, module: nn.Module) -> float:
        """Keep that ``part`` ended in ``result``; return it."""
        self._kept.results[part] = result
        self._write(part=f"after {part}", module=module.state_dict())
        return result

    def clear(self) -> None:
        """Remove the file: what the fit was for is there."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def _load(self, module: nn.Module, *others: Any) -> None:
        try:
            module.load_state_dict(self._kept.module)
            for other, state in zip(others, self._kept.others, strict=True):
                other.load_state_dict(state)
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{self.path} does not fit ({error}); remove it to start again"
            ) from error

    def _write(self, **values: Any) -> None:
        """Keep ``values`` in place of what was kept.

        Raises:
            CheckpointError: the file cannot be written.
        """
        identity, results = self._kept.identity, self._kept.results
        self._kept = _Kept(identity=identity, results=results, **values)
        if self.path is not None:
            content = io.BytesIO()
            torch.save({"identity": identity, "results": results, **values}, content)
            with explained(f"write {self.path}", CheckpointError):
                write_bytes(self.path, content.getvalue())
