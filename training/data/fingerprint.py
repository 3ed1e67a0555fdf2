"""What recordings show, in small, for the passport of a checkpoint that was trained on them."""

import logging
from collections.abc import Iterator, Sequence
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from dzrobot.documents import read_json
from dzrobot.embodiments.spec import Embodiment
from dzrobot.errors import DatasetError
from dzrobot.policies.dreamzero.checkpoints.trained_inputs import (
    LONGEST_INSTRUCTION,
    MOST_INSTRUCTIONS,
    FirstImages,
    StateRange,
    TrainedInputs,
    in_small,
)
from dzrobot.recording.catalog import DatasetCatalog
from dzrobot.recording.formats import COLLECTION
from dzrobot.training.data.dataset import DatasetReader

_log = logging.getLogger(__name__)

EPISODES = 32
"""Most episodes whose numbers and first images are read, spread over all in use."""


class _Arguments(BaseModel):
    model_config = ConfigDict(extra="ignore")

    settle_steps: Annotated[int, Field(strict=True, ge=0, lt=2**31)] | None = None


class _Collected(BaseModel):
    """What is read of a collection's plan."""

    model_config = ConfigDict(extra="ignore")

    env_arguments: _Arguments = _Arguments()


def trained_inputs(readers: Sequence[DatasetReader], robot: Embodiment) -> TrainedInputs | None:
    """Return what training on ``readers`` shows the network, in small; None: no episode is read.

    Nothing is drawn at random. An episode that cannot be read is left out, as training does where
    its recipe says so.

    Args:
        readers: The folders that are trained on.
        robot: Who acts after training.
    """
    used = [(reader, int(one)) for reader in readers for one in np.unique(reader.windows.episode)]
    some = np.unique(np.linspace(0, len(used) - 1, min(len(used), EPISODES)).astype(int))
    chosen = [used[int(at)] for at in some]
    read = [one for reader, at in chosen if (one := _read(reader, at, robot)) is not None]
    if not read:
        return None
    first, rows = zip(*read, strict=True)
    images = {
        key: FirstImages.of(np.stack([in_small(views[key]) for views in first]))
        for key in robot.video_keys
        if all(key in views for views in first)
    }
    states = {
        key: StateRange.of(
            np.concatenate([one[key] for one in rows]), np.stack([one[key][0] for one in rows])
        )
        for key in robot.state_keys
        if all(key in one for one in rows)
    }
    tasks = sorted(set(_instructions(readers)))
    settled = {_settle_steps(reader.catalog) for reader in readers}
    return TrainedInputs(
        instructions=tuple(text[:LONGEST_INSTRUCTION] for text in tasks[:MOST_INSTRUCTIONS]),
        tasks=len(tasks), fps=float(readers[0].catalog.fps), images=images, states=states,
        settle_steps=settled.pop() if len(settled) == 1 else None,
        execute=robot.execute or robot.timing.action_horizon,
        resized_from=_resized_from(readers),
    )  # fmt: skip


def _read(
    reader: DatasetReader, ordinal: int, robot: Embodiment
) -> tuple[dict[str, NDArray[np.uint8]], dict[str, NDArray[np.float32]]] | None:
    """Return first images by view and state rows (N, D) by key; None: they cannot be read."""
    try:
        views = {
            key: reader.frames(ordinal, source, [0])[0]
            for key, source in reader.resolution.views.items()
        }
    except DatasetError as error:
        _log.debug("episode %d of %s is left out: %s", ordinal, reader.catalog.root, error)
        return None
    values = reader.states(ordinal)
    return views, {key: values[key] for key in robot.state_keys if key in values}


def _instructions(readers: Sequence[DatasetReader]) -> Iterator[str]:
    """Yield every instruction that a sample can carry."""
    for reader in readers:
        for source in reader.resolution.texts:
            yield from (text for text in reader.columns.texts[source.column] if text.strip())


def _resized_from(readers: Sequence[DatasetReader]) -> dict[str, tuple[int, int]]:
    return {
        key: size
        for reader in readers
        for key, source in reader.resolution.views.items()
        if (size := reader.catalog.resized_from(source.column)) is not None
    }


def _settle_steps(catalog: DatasetCatalog) -> int | None:
    path = catalog.root / COLLECTION
    if not path.exists():
        return None
    return read_json(path, _Collected, DatasetError).env_arguments.settle_steps
