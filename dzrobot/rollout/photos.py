"""Photos of initial states: what a person sets a scene up by."""

from pathlib import Path
from typing import Any

import gymnasium as gym

from dzrobot.files import write_bytes
from dzrobot.recording.media import encode_png
from dzrobot.rollout.records import storing
from dzrobot.rollout.video import side_by_side, views

PHOTO_FOLDER = "starts"


def photo_file(folder: Path, case: str) -> Path:
    """Return where the photo of the initial state of ``case`` is in the results folder."""
    return folder / PHOTO_FOLDER / f"{case}.png"


class Photographed(gym.Wrapper[Any, Any, Any, Any]):
    """Keeps what all cameras see after a reset, side by side; that of the last reset counts.

    Args:
        env: Whose observations have images.
        path: Of the photo.
    """

    def __init__(self, env: gym.Env[Any, Any], path: Path) -> None:
        super().__init__(env)
        self._path = path

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset ``env`` and keep the photo.

        Raises:
            ProtocolError: it cannot be written.
        """
        observation, info = self.env.reset(seed=seed, options=options)
        seen = list(views(observation).values())
        if seen:
            with storing(self._path.parent):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                write_bytes(self._path, encode_png(side_by_side(seen)))
        return observation, info
