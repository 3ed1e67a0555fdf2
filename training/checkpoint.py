"""Training checkpoints: sharded, written aside in the background, renamed when complete.

A checkpoint is a folder ``step_00001000`` with one ``state`` folder (torch distributed checkpoint)
and a
``meta.json``. It is written under a temporary name and renamed once every process has finished, so
a folder with a final name is whole; everything else is ignored and cleared away. What a step does
depends on the seed and the step number alone, so the number and the tensors are the whole state:
there is no loader position and no random state.
"""

import json
import logging
import os
import shutil
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from dzrobot.errors import CheckpointError
from dzrobot.training.settings import CheckpointConfig
from dzrobot.training.world import World

_log = logging.getLogger(__name__)

_PREFIX = "step_"
_ASIDE = ".writing"
_STATE = "state"
_META = "meta.json"
LATEST = "latest"
"""Name of the file that holds the newest checkpoint's folder name, for people and scripts."""


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint on disk."""

    path: Path
    step: int
    meta: dict[str, Any]


@dataclass(frozen=True)
class _Pending:
    step: int
    aside: Path
    future: "Future[Any]"


def read_checkpoint(path: Path) -> Saved:
    """Return the checkpoint in folder ``path``.

    Raises:
        CheckpointError: It is not a complete training checkpoint.
    """
    if not (path / _STATE / ".metadata").is_file() or not (path / _META).is_file():
        raise CheckpointError(
            f"{path} is no complete training checkpoint: it needs {_META} and {_STATE}/.metadata. "
            "Give a folder "
            f"{_PREFIX}00001000 or the run folder that holds such folders."
        )
    meta = json.loads((path / _META).read_text())
    return Saved(path=path, step=int(meta["step"]), meta=meta)


def complete_checkpoints(folder: Path) -> list[Saved]:
    """Return the complete checkpoints in ``folder``, oldest first; torn ones are left out."""
    found = []
    for path in folder.glob(f"{_PREFIX}*"):
        if path.suffix == _ASIDE:
            continue
        try:
            found.append(read_checkpoint(path))
        except (CheckpointError, json.JSONDecodeError, KeyError) as error:
            _log.warning("ignoring %s: %s", path, error)
    return sorted(found, key=lambda saved: saved.step)


def find_checkpoint(path: Path) -> Saved:
    """Return the checkpoint at ``path``, or the newest complete one if ``path`` is a run folder.

    Raises:
        CheckpointError: There is none.
    """
    if path.name.startswith(_PREFIX):
        return read_checkpoint(path)
    for folder in (path, path / "checkpoints"):
        if found := complete_checkpoints(folder):
            return found[-1]
    raise CheckpointError(f"no complete checkpoint {_PREFIX}* in {path} or {path / 'checkpoints'}")


def load_state(saved: Saved, state: dict[str, Any]) -> None:
    """Fill the tensors of ``state`` in place from a checkpoint of any number of processes.

    Raises:
        CheckpointError: A tensor is missing or has another shape.
    """
    try:
        load(state, checkpoint_id=str(saved.path / _STATE))
    except CheckpointException as error:
        raise CheckpointError(
            f"{saved.path} does not fit this run: {_first_line(error)}. Resume with the model, "
            "adapter and averaging "
            "settings it was written with."
        ) from error


def _first_line(error: CheckpointException) -> str:
    causes = [str(cause[0]) for cause in error.failures.values()]
    return (causes or [str(error)])[0].splitlines()[0]


class CheckpointWriter:
    """Writes checkpoints of one run into one folder."""

    def __init__(self, folder: Path, config: CheckpointConfig, world: World) -> None:
        self._folder = folder
        self._config = config
        self._world = world
        self._pending: _Pending | None = None
        if world.is_main:
            folder.mkdir(parents=True, exist_ok=True)
            for torn in folder.glob(f"{_PREFIX}*{_ASIDE}"):
                shutil.rmtree(torn)
        dist.barrier(group=world.host_group)

    def save(
        self, step: int, state: dict[str, Any], meta: dict[str, Any], *, wait: bool = False
    ) -> None:
        """Write ``state``; returns once it is copied, so that training may change it.

        Args:
            step: Optimiser steps done.
            state: Nested dictionaries of tensors, sharded or not.
            meta: What identifies the run; plain values.
            wait: Return only when the checkpoint is complete.
        """
        self.finish()
        aside = self._folder / f"{_PREFIX}{step:08d}{_ASIDE}"
        if self._world.is_main:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            _write_text(aside / _META, json.dumps({"step": step, **meta}, indent=1))
        dist.barrier(group=self._world.host_group)
        target = str(aside / _STATE)
        future: Future[Any] = Future()
        if self._config.async_save and not wait:
            future = async_save(state, checkpoint_id=target, process_group=self._world.save_group)  # type: ignore[assignment]
        else:
            save(state, checkpoint_id=target, process_group=self._world.save_group)
            future.set_result(None)
        self._pending = _Pending(step, aside, future)
        if wait or not self._config.async_save:
            self.finish()

    def poll(self) -> None:
        """Rename the pending checkpoint if it is complete; never waits."""
        if self._pending is not None and self._pending.future.done():
            self.finish()

    def finish(self) -> None:
        """Wait for the pending checkpoint, if any, and give it its final name."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        # The main process ends only after all have written: it gathers their results into the
        # metadata.
        pending.future.result()
        if self._world.is_main:
            self._commit(pending)

    def _commit(self, pending: _Pending) -> None:
        for path in sorted(pending.aside.rglob("*")):
            if path.is_file():
                _sync(path)
        final = self._folder / f"{_PREFIX}{pending.step:08d}"
        # A step that was already saved (resumed and reached again) is replaced.
        shutil.rmtree(final, ignore_errors=True)
        pending.aside.rename(final)
        _sync(self._folder)
        _write_text(self._folder / f"{LATEST}{_ASIDE}", final.name)
        (self._folder / f"{LATEST}{_ASIDE}").replace(self._folder / LATEST)
        for old in complete_checkpoints(self._folder)[: -self._config.keep_last_k]:
            shutil.rmtree(old.path)


def _write_text(path: Path, text: str) -> None:
    path.write_text(text)
    _sync(path)


def _sync(path: Path) -> None:
    """Ask the disk to hold what was written to a file or folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
