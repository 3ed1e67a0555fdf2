"""Films of episodes and photos of initial states.

Nothing here changes what a policy does.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import cv2
import gymnasium as gym
import numpy as np

from dzrobot.files import write_bytes
from dzrobot.modality.window import Observation
from dzrobot.policies.base import Image
from dzrobot.recording.media import VideoCodec, VideoFile, encode_png
from dzrobot.rollout.environment import draws
from dzrobot.rollout.records import UNFINISHED, VIDEO_FOLDER, storing

Wanted = Literal["all", "failures", "none"]

PHOTO_FOLDER = "starts"
FALLBACK_FPS = 20.0


class EpisodeVideo:
    """The video of one episode, one frame per observation; kept or dropped when it is over.

    The environment's own upright image comes first where it draws one, then every view in the order
    of its key, as the policy is given it.
    """

    def __init__(self, folder: Path, name: str, env: gym.Env[Any, Any]) -> None:
        self._folder = folder / VIDEO_FOLDER
        self._name = name
        self._path = self._folder / UNFINISHED / f"{name}.mp4"
        self._env = env
        self._draws = draws(env) and env.render_mode == "rgb_array"
        fps = float(env.metadata["render_fps"]) if "render_fps" in env.metadata else FALLBACK_FPS
        self._file = VideoFile(self._path, fps, VideoCodec(gop=20, crf=20))
        self._frames = 0

    def add(self, observation: Observation) -> None:
        """Append what is seen now."""
        shown = self._env.render() if self._draws else None
        images = [] if shown is None else [np.asarray(shown, np.uint8)]
        images += [np.asarray(view, np.uint8) for view in views(observation).values()]
        if images:
            self._file.add(side_by_side(images))
            self._frames += 1

    def close(self, *, keep: bool, ending: str) -> str | None:
        """Finish the video; return its path below the results folder, None if it is not kept."""
        if self._frames == 0:
            keep = False
        else:
            self._file.close()
        if not keep:
            self._path.unlink(missing_ok=True)
            return None
        # Moved when it is complete: whatever lies beside is the partial work of a killed run.
        final = self._folder / f"{self._name}-{ending}.mp4"
        self._path.replace(final)
        return str(final.relative_to(self._folder.parent))


def views(observation: Observation) -> Mapping[str, Image]:
    """Return the images (H, W, 3) of ``observation``; the newest where there is a stack."""
    found = {}
    for key in sorted(observation):
        if key.startswith("video."):
            image = np.asarray(observation[key])
            found[key] = image[-1] if image.ndim == 4 else image
    return found


def side_by_side(images: list[Image]) -> Image:
    """Return one image of even height and width with ``images`` at equal height."""
    height = max(image.shape[0] for image in images)
    height += height % 2
    scaled = []
    for image in images:
        width = round(image.shape[1] * height / image.shape[0])
        size = (width + width % 2, height)
        same = image.shape[:2] == size[::-1]
        scaled.append(image if same else cv2.resize(image, size, interpolation=cv2.INTER_AREA))
    joined: Image = np.concatenate(scaled, axis=1)
    return joined


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
