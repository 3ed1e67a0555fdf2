"""From LeRobot's batches to the robot's modality keys: exact, or refused."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dzrobot.embodiments.spec import Embodiment, starts_of
from dzrobot.errors import ModalityError, preview
from dzrobot.modality.window import Observation

TASK = "task"
"""Where LeRobot keeps the instruction."""


class ColumnReader:
    """Reads the declared columns of LeRobot's batches."""

    def __init__(self, robot: Embodiment, columns: Mapping[str, Sequence[str]]) -> None:
        """Prepare.

        Args:
            robot: Whose keys are wanted.
            columns: LeRobot's name -> keys, checked.
        """
        self._robot = robot
        views = robot.video_keys
        self._views = {keys[0]: name for name, keys in columns.items() if keys[0] in views}
        widths = {part.key: part.dim for part in robot.state}
        self._parts: dict[str, tuple[str, slice]] = {}
        for name, keys in columns.items():
            if keys[0] in widths:
                starts = starts_of({key: widths[key] for key in keys})
                for key, start in starts.items():
                    self._parts[key] = name, slice(start, start + widths[key])

    def images(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the views (..., H, W, 3) uint8 of images (..., 3, H, W).

        LeRobot divides what cameras and datasets hold by 255; this undoes it, to the bit.

        Raises:
            ModalityError: A column is not in the batch, or holds no image.
        """
        return {key: _pixels(self._column(batch, name), name) for key, name in self._views.items()}

    def states(self, batch: Mapping[str, Any]) -> dict[str, NDArray[np.float32]]:
        """Return the state parts (..., D) float32.

        Raises:
            ModalityError: A column is not in the batch.
        """
        return {
            key: self._column(batch, name)[..., place].float().cpu().numpy()
            for key, (name, place) in self._parts.items()
        }

    def tasks(self, batch: Mapping[str, Any], count: int) -> list[str]:
        """Return the instruction of each of ``count`` rows.

        Raises:
            ModalityError: There is not one for each.
        """
        given = batch.get(TASK)
        texts = [given] if isinstance(given, str) else list(given or ())
        if len(texts) != count:
            raise ModalityError(
                f"the batch has {len(texts)} instructions under {TASK!r} for {count} rows: give "
                "one for each"
            )
        return texts

    def observations(self, batch: Mapping[str, Any]) -> Iterator[Observation]:
        """Yield one observation for each row of a batch without time.

        Raises:
            ModalityError: As the others.
        """
        images, states = self.images(batch), self.states(batch)
        count = len(next(iter(states.values())))
        for row, task in enumerate(self.tasks(batch, count)):
            views = {key: view[row].cpu().numpy() for key, view in images.items()}
            yield {
                **{key: np.ascontiguousarray(view) for key, view in views.items()},
                **{key: values[row] for key, values in states.items()},
                self._robot.language: task,
            }

    def _column(self, batch: Mapping[str, Any], name: str) -> Tensor:
        value = batch.get(name)
        if not isinstance(value, Tensor):
            raise ModalityError(
                f"the batch has no tensor {name!r}, which {self._robot.tag} needs; given: "
                f"{preview(batch, 12)}. Rename what is there (--rename_map), or declare the "
                "columns (--policy.columns)"
            )
        return value


def _pixels(image: Tensor, name: str) -> Tensor:
    if image.ndim < 3 or image.shape[-3] != 3:
        raise ModalityError(f"{name} has shape {tuple(image.shape)}: give (..., 3, height, width)")
    if image.dtype != torch.uint8:
        low, high = image.aminmax()
        if not (low >= 0 and high <= 1):
            raise ModalityError(
                f"{name} holds numbers from {float(low):g} to {float(high):g}: give images in "
                "[0, 1], without LeRobot's normalization"
            )
        image = (image.float() * 255).round().to(torch.uint8)
    return image.movedim(-3, -1)
