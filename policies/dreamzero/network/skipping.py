"""Which solver steps run the transformer; the others reuse its last result.

A plan belongs to one call. It is asked in order, once per step, and told every result that it
caused (docs/model.md, section 4.3).
"""

from typing import Protocol

from torch import Tensor
from torch.nn import functional

from dzrobot.errors import ConfigError

DYNAMIC = "dynamic"
_STATIC_STEPS: dict[int, frozenset[int]] = {
    5: frozenset({0, 1, 2, 7, 12}),
    6: frozenset({0, 1, 5, 10, 14, 15}),
    7: frozenset({0, 1, 2, 6, 10, 14, 15}),
    8: frozenset({0, 1, 2, 6, 10, 13, 14, 15}),
}
_STATIC_TOTAL = 16
_SKIPS = ((0.95, 4), (0.93, 2))
"""Above this cosine between the last two results, skip so many steps."""


class StepPlan(Protocol):
    """Decides step by step whether the transformer runs."""

    def due(self, step: int) -> bool:
        """Return whether the transformer runs at ``step``."""

    def executed(self, video_velocity: Tensor) -> None:
        """Take note of the guided video velocity (B, ...) of a step that was due."""


def step_plan(mode: str | int, steps: int = _STATIC_TOTAL) -> StepPlan:
    """Return a fresh plan.

    Args:
        mode: Number of transformer evaluations, or ``"dynamic"``.
        steps: Solver steps.

    Raises:
        ConfigError: There is no plan with so many evaluations.
    """
    if mode == DYNAMIC:
        return DynamicPlan()
    allowed = [*(sorted(_STATIC_STEPS) if steps == _STATIC_TOTAL else ()), steps]
    if str(mode) not in map(str, allowed):
        raise ConfigError(
            f"no plan runs {mode!r} of {steps} steps; choose {', '.join(map(str, allowed))} "
            f"or {DYNAMIC!r}"
        )
    return StaticPlan(_STATIC_STEPS.get(int(mode), frozenset(range(steps))))


class StaticPlan:
    """Runs fixed steps."""

    def __init__(self, run: frozenset[int]) -> None:
        """Run the steps of ``run``."""
        self._run = run

    def due(self, step: int) -> bool:
        """Return whether ``step`` is one of the fixed steps."""
        return step in self._run

    def executed(self, video_velocity: Tensor) -> None:
        """Ignore the result."""


class DynamicPlan:
    """Skips steps while the results hardly change."""

    def __init__(self) -> None:
        """Start a call."""
        self._last: Tensor | None = None
        self._similarity: float | None = None
        self._resume = 0
        self._skipped = False

    def due(self, step: int) -> bool:
        """Return whether the transformer runs at ``step``: always twice, then as results change."""
        if step < self._resume:
            return False
        if self._skipped or self._similarity is None:
            self._skipped = False
            return True
        for threshold, length in _SKIPS:
            if self._similarity > threshold:
                self._resume, self._skipped = step + length, True
                return False
        return True

    def executed(self, video_velocity: Tensor) -> None:
        """Compare the result with the one before: mean over the batch of the cosines."""
        flat = video_velocity.flatten(1).float()
        if self._last is not None:
            self.compare(functional.cosine_similarity(self._last, flat, dim=1).mean().item())
        self._last = flat

    def compare(self, similarity: float) -> None:
        """Set the cosine between the last two results."""
        self._similarity = similarity
