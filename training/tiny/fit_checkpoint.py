"""What an interrupted fit resumes from: one file, replaced as a whole."""

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


class _FitState(BaseModel):
    """The content of the file."""

    model_config = ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True)

    identity: dict[str, str]
    results: dict[str, float]
    part: str = ""
    step: int = Field(default=0, ge=0)
    module: dict[str, Tensor] = Field(default_factory=dict)
    others: list[dict[str, Any]] = Field(default_factory=list)


@dataclass
class FitCheckpoint:
    """The checkpoint of a fit in several parts; without ``path`` nothing is written.

    Args:
        path: The file; :meth:`clear` removes it.
        identity: Options and data of the fit. The file of another fit is refused.
        every: Steps between saves.
    """

    path: Path | None = None
    identity: Mapping[str, str] = field(default_factory=dict)
    every: int = 20

    def __post_init__(self) -> None:
        """Read the file if it exists, else check that it can be written before the fit begins.

        Raises:
            CheckpointError: it is unreadable, of another fit, or cannot be written.
        """
        self._state = _FitState(identity=dict(self.identity), results={})
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
            kept = validated(load_tensors(path), _FitState, str(path), CheckpointError)
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
        self._state = kept

    def restore(self, part: str, module: nn.Module, *others: Any) -> int:
        """Restore what :meth:`keep` last saved in ``part``; return its step, 0 without one.

        Raises:
            CheckpointError: the saved state does not fit.
        """
        if self._state.part != part:
            return 0
        self._load(module, *others)
        return self._state.step

    def keep(self, part: str, step: int, module: nn.Module, *others: Any) -> None:
        """Save the state after ``step`` steps, every :attr:`every` steps."""
        if step % self.every == 0:
            states = [other.state_dict() for other in others]
            self._write(part=part, step=step, module=module.state_dict(), others=states)

    def result(self, part: str, module: nn.Module) -> float | None:
        """Return the result of ``part``, its module restored; None if it was not finished.

        Raises:
            CheckpointError: the saved state does not fit.
        """
        if part in self._state.results and self._state.part == f"after {part}":
            self._load(module)
        return self._state.results.get(part)

    def finish(self, part: str, result: float, module: nn.Module) -> float:
        """Save that ``part`` finished with ``result``; return it."""
        self._state.results[part] = result
        self._write(part=f"after {part}", module=module.state_dict())
        return result

    def clear(self) -> None:
        """Remove the file."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def _load(self, module: nn.Module, *others: Any) -> None:
        try:
            module.load_state_dict(self._state.module)
            for other, state in zip(others, self._state.others, strict=True):
                other.load_state_dict(state)
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{self.path} does not fit ({error}); remove it to start again"
            ) from error

    def _write(self, **values: Any) -> None:
        """Replace the saved state by ``values``.

        Raises:
            CheckpointError: the file cannot be written.
        """
        identity, results = self._state.identity, self._state.results
        self._state = _FitState(identity=identity, results=results, **values)
        if self.path is not None:
            content = io.BytesIO()
            torch.save({"identity": identity, "results": results, **values}, content)
            with explained(f"write {self.path}", CheckpointError):
                write_bytes(self.path, content.getvalue())
