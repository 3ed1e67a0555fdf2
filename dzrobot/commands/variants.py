"""What one of several evaluations has of its own that a command makes with the same flags."""

import argparse
from copy import copy
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from dzrobot.rollout.perturbation import Perturbation


class Variant(BaseModel):
    """Values that take the place of flags; None: the flag's. Sent to every process of torchrun."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    checkpoint: str | None = None
    policy: str | None = None
    server: str | None = None
    episodes: int | None = None
    first_episode: int = 0
    """Of each task; those before it are left out."""

    output: Path | None = None
    is_tracked: bool = True
    """Whether it has a page of its own where ``--wandb`` asks for one."""

    perturbation: str | None = None
    """As ``--perturb`` names it; None: nothing is perturbed."""

    def applied(self, arguments: argparse.Namespace) -> argparse.Namespace:
        """Return ``arguments`` with these values."""
        own = copy(arguments)
        for name in ("checkpoint", "policy", "server", "episodes", "output"):
            if (value := getattr(self, name)) is not None:
                setattr(own, name, value)
        if not self.is_tracked:
            own.wandb = None
        own.first_episode, own.perturbation = self.first_episode, None
        if self.perturbation is not None:
            own.perturbation = Perturbation.read(self.perturbation)
        return own
