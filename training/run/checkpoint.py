"""Training checkpoints: sharded, written in the background, renamed when complete.

A checkpoint is a folder ``step_00001000`` with one ``state`` folder (torch distributed checkpoint),
a ``meta.json``, the files that accompany any weights (config, statistics, passport, tokenizer) and
the checksums of all of them. It is written under a temporary name and renamed once every process
has finished, so a folder with a final name is complete; anything else is ignored and removed. A
step depends on the seed and the step number alone, so the number and the tensors are the whole
state: there is no loader position and no random state.
"""

import logging
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from dzrobot import files
from dzrobot.code_identity import CodeIdentity
from dzrobot.documents import read_json
from dzrobot.errors import CheckpointError
from dzrobot.policies.dreamzero.checkpoints.checksums import check_checksums, write_checksums
from dzrobot.policies.dreamzero.checkpoints.dcp import (
    DESCRIPTION,
    CheckedReader,
    HashingWriter,
    read_description,
)
from dzrobot.policies.dreamzero.checkpoints.directory import TRAINING_META, TRAINING_STATE
from dzrobot.policies.dreamzero.checkpoints.hub import step_path, steps_beside
from dzrobot.training.run.build import TrainingComponents
from dzrobot.training.run.optimizer import Ema, Optimizer
from dzrobot.training.run.parallel import DistributedEnvironment
from dzrobot.training.run.plugin import Plugins
from dzrobot.training.sft_config import CheckpointConfig

_log = logging.getLogger(__name__)

_PREFIX = "step_"
_TEMPORARY = ".writing"
_REPLACED = f".old{_TEMPORARY}"
"""Ends the name of a complete checkpoint while a newer one of its step takes its place."""

_NAME = re.compile(_PREFIX + r"(\d{1,15})", re.ASCII)
_CHECKSUM_FORMAT = 2
"""First format of meta.json that comes with checksums."""

_MUST_MATCH = ("base", "is_lora", "ema", "moments", "distilled", "plugins")
_SHOULD_MATCH = (
    "seed", "global_batch_size", "statistics", "windows", "max_steps", "plugin_sources",
)  # fmt: skip
"""Fields of meta.json that a resumed run must share, and fields whose change is reported."""

_NO_PLUGINS = Plugins()

LATEST = "latest"
"""Name of the file that holds the newest checkpoint's folder name, for people and scripts."""


class TrainingMeta(BaseModel):
    """meta.json: what identifies the run, and the steps done."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")

    step: int = Field(ge=0, le=10**15)
    skips: int = Field(ge=0)
    format: int = Field(default=1, ge=1, le=_CHECKSUM_FORMAT)
    base: str | None = None
    is_lora: bool | None = None
    ema: bool | None = None
    moments: str = "fp32"
    distilled: str | None = None
    seed: int | None = None
    global_batch_size: int | None = None
    max_steps: int | None = None
    statistics: list[str] | None = None
    windows: int | None = None
    plugins: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Plug-ins and encoders of the run -> their settings when it was built."""

    plugin_sources: dict[str, str | None] = Field(default_factory=dict)
    plugin_state: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Plug-ins -> their attributes at this step, without tensors."""

    codes: Annotated[list[CodeIdentity], Field(strict=False)] = []
    """Code of the run, and of those that it resumed; earlier versions did not say it."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint on disk; :func:`verify` checks its files."""

    path: Path
    meta: TrainingMeta

    @property
    def step(self) -> int:
        """Return the optimizer steps done."""
        return self.meta.step


@dataclass(frozen=True)
class _Pending:
    step: int
    temporary: Path
    future: "Future[Any]"


def read_checkpoint(path: Path) -> SavedCheckpoint:
    """Return the checkpoint in folder ``path``; none of its tensors is read.

    Raises:
        CheckpointError: It is not a training checkpoint, or its meta.json is damaged.
    """
    described = path / TRAINING_STATE / DESCRIPTION
    if not described.is_file() or not (path / TRAINING_META).is_file():
        raise CheckpointError(
            f"{path} is not a complete training checkpoint: it needs {TRAINING_META} and "
            f"{TRAINING_STATE}/{DESCRIPTION}. Give a folder {_PREFIX}00001000 or the run folder "
            f"that holds such folders{steps_beside(path)}."
        )
    meta = read_json(path / TRAINING_META, TrainingMeta, CheckpointError)
    name = _NAME.fullmatch(path.name)
    if name is not None and int(name[1]) != meta.step:
        raise CheckpointError(f"{path / TRAINING_META} is of step {meta.step}; copy it again")
    return SavedCheckpoint(path=path, meta=meta)


def verify(saved: SavedCheckpoint, *, share: tuple[int, int] = (0, 1)) -> None:
    """Read every file of a checkpoint and compare it with its checksum.

    A checkpoint from before there were checksums is checked for completeness alone.

    Args:
        saved: The checkpoint.
        share: Part I of N is read.

    Raises:
        CheckpointError: A file is missing, cut short or changed.
    """
    if saved.meta.format >= _CHECKSUM_FORMAT:
        check_checksums(saved.path, share=share)
    else:
        _log.warning("%s has no checksums: silent damage in it cannot be detected", saved.path)
    read_description(saved.path / TRAINING_STATE)


def complete_checkpoints(folder: Path) -> list[SavedCheckpoint]:
    """Return the complete checkpoints in ``folder``, oldest first; partial ones are left out."""
    found = []
    for path in _folders(folder):
        try:
            found.append(read_checkpoint(path))
        except CheckpointError as error:
            _log.warning("ignoring %s: %s", path, error)
    return sorted(found, key=lambda saved: saved.step)


def _folders(folder: Path) -> Iterator[Path]:
    """Yield what has the name of a checkpoint, newest first."""
    if folder.is_dir():
        named = [(m, path) for path in folder.iterdir() if (m := _NAME.fullmatch(path.name))]
        for _, path in sorted(named, key=lambda pair: int(pair[0][1]), reverse=True):
            yield path


Check = Callable[[SavedCheckpoint], None]
"""Raises CheckpointError for a damaged checkpoint."""


def newest_intact(folder: Path, check: Check = verify) -> SavedCheckpoint | None:
    """Return the newest checkpoint in ``folder`` that passes ``check``; None: there never was one.

    Damaged ones are skipped with a warning.

    Raises:
        CheckpointError: There are checkpoints, all of them damaged.
    """
    faults = []
    for path in _folders(folder):
        try:
            saved = read_checkpoint(path)
            check(saved)
        except CheckpointError as error:
            faults.append(str(error))
            _log.warning("skipping %s: %s", path, error)
        else:
            return saved
    if faults:
        raise CheckpointError(
            f"no checkpoint in {folder} is intact: {faults[0]}. Restore one from a copy, or move "
            "the folder away to start from step 0."
        )
    return None


def step_folder(run: Path, step: int) -> Path:
    """Return where the run in folder ``run`` keeps its checkpoint of ``step``."""
    return run / "checkpoints" / f"{_PREFIX}{step:08d}"


def find_checkpoint(path: Path, check: Check = verify) -> SavedCheckpoint:
    """Return the checkpoint at ``path``, or the newest intact one if ``path`` is a run folder.

    Raises:
        CheckpointError: There is none, or the one that is named is damaged.
    """
    path = step_path(path)
    if path.name.startswith(_PREFIX):
        saved = read_checkpoint(path)
        check(saved)
        return saved
    for folder in (path, path / "checkpoints"):
        if found := newest_intact(folder, check):
            return found
    raise CheckpointError(f"no complete checkpoint {_PREFIX}* in {path} or {path / 'checkpoints'}")


def choose_checkpoint(
    resume: Literal["auto"] | Path, folder: Path, world: DistributedEnvironment
) -> SavedCheckpoint | None:
    """Return the checkpoint to resume from, the same one in all processes. Collective.

    Args:
        resume: A checkpoint or run folder; ``auto``: the newest intact one in ``folder``, if any.
        folder: The run's own checkpoints.
        world: The processes.

    Raises:
        CheckpointError: The given one is damaged or missing, or none is intact.
    """
    outcome: SavedCheckpoint | CheckpointError | None = None
    if world.is_main:
        try:
            with _checking(world) as check:
                if resume == "auto":
                    outcome = newest_intact(folder, check)
                else:
                    outcome = find_checkpoint(Path(resume), check)
        except CheckpointError as error:
            outcome = error
    else:
        nothing: SavedCheckpoint | None = None
        while (saved := world.from_main(nothing)) is not None:
            _shared_fault(saved, world)
    outcome = world.from_main(outcome)
    if isinstance(outcome, CheckpointError):
        raise outcome
    return outcome


@contextmanager
def _checking(world: DistributedEnvironment) -> Iterator[Check]:
    """Yield, in the main process, a check whose reading all processes share."""

    def check(saved: SavedCheckpoint) -> None:
        world.from_main(saved)
        if (fault := _shared_fault(saved, world)) is not None:
            raise fault

    try:
        yield check
    finally:
        world.from_main(None)


def _shared_fault(saved: SavedCheckpoint, world: DistributedEnvironment) -> CheckpointError | None:
    """Verify this process's share; return what some process found wrong. Collective."""
    fault: CheckpointError | None = None
    try:
        verify(saved, share=(world.rank, world.size))
    except CheckpointError as error:
        fault = error
    return next((found for found in world.gathered(fault) if found is not None), None)


def load_state(saved: SavedCheckpoint, state: dict[str, Any]) -> None:
    """Fill the tensors of ``state`` in place from a checkpoint of any number of processes.

    Raises:
        CheckpointError: A tensor is missing or has another shape, or content that could run code.
    """
    reader = CheckedReader(read_description(saved.path / TRAINING_STATE))
    try:
        load(state, storage_reader=reader)
    except CheckpointException as error:
        raise CheckpointError(
            f"{saved.path} does not fit this run: {_first_line(error)}. Resume with the model, "
            "adapter and averaging settings it was written with."
        ) from error


def _first_line(error: CheckpointException) -> str:
    causes = [str(cause[0]) for cause in error.failures.values()]
    return ((causes or [str(error)])[0].splitlines() or [type(error).__name__])[0]


class CheckpointWriter:
    """Writes checkpoints of one run into one folder."""

    def __init__(
        self, folder: Path, config: CheckpointConfig, world: DistributedEnvironment,
        on_complete: Callable[[Path], None] = lambda _: None,
    ) -> None:  # fmt: skip
        """Restore what was being replaced when a process was killed; remove what it left partial.

        Args:
            folder: Of the run's checkpoints.
            config: How many are kept, and whether training waits for them.
            world: The processes.
            on_complete: Called in the main process with each folder that is complete.

        Raises:
            CheckpointError: ``folder`` cannot be made or written to.
        """
        self._folder = folder
        self._config = config
        self._world = world
        self._on_complete = on_complete
        self._pending: _Pending | None = None
        self._finalizer = ThreadPoolExecutor(1)
        if world.is_main:
            with files.explained(f"write checkpoints to {folder}", CheckpointError):
                folder.mkdir(parents=True, exist_ok=True)
                for replaced in folder.glob(f"{_PREFIX}*{_REPLACED}"):
                    # Killed between the two renames: it may be the only complete one.
                    final = replaced.with_name(replaced.name.removesuffix(_REPLACED))
                    if not final.exists():
                        files.move(replaced, final)
                for partial in folder.glob(f"{_PREFIX}*{_TEMPORARY}"):
                    files.remove(partial)
        dist.barrier(group=world.host_group)

    def save(
        self,
        step: int,
        state: dict[str, Any],
        meta: dict[str, Any],
        *,
        wait: bool = False,
        write_sidecars: Callable[[Path], None] = lambda _: None,
    ) -> None:
        """Write ``state``; returns once it is copied, so that training may change it.

        Args:
            step: Optimizer steps done.
            state: Nested dictionaries of tensors, sharded or not.
            meta: What identifies the run; plain values.
            wait: Return only when the checkpoint is complete.
            write_sidecars: Writes what else belongs into the folder; called in the main process.

        Raises:
            CheckpointError: It, or the one before, cannot be written.
        """
        self.finish()
        temporary = self._folder / f"{_PREFIX}{step:08d}{_TEMPORARY}"
        if self._world.is_main:
            with files.explained(f"write {temporary}", CheckpointError):
                files.remove(temporary)
                temporary.mkdir(parents=True)
                content = {"format": _CHECKSUM_FORMAT, "step": step, **meta}
                files.write_json(temporary / TRAINING_META, content)
                write_sidecars(temporary)
        dist.barrier(group=self._world.host_group)
        writer, group = HashingWriter(temporary / TRAINING_STATE), self._world.save_group
        future: Future[Any] = Future()
        if self._config.async_save and not wait:
            future = async_save(state, storage_writer=writer, process_group=group)  # type: ignore[assignment]
        else:
            with _explained(temporary):
                save(state, storage_writer=writer, process_group=group)
            future.set_result(None)
        if self._world.is_main:
            # The main process finishes last: it gathers the results of all into the metadata.
            # Flushing everything must not delay the next step.
            future = self._finalizer.submit(_finalize, temporary, future, writer)
        self._pending = _Pending(step, temporary, future)
        if wait or not self._config.async_save:
            self.finish()
        if wait:
            # The main process is the last; the others may open the checkpoint too.
            dist.barrier(group=self._world.host_group)

    def poll(self) -> None:
        """Rename the pending checkpoint if it is complete; never waits."""
        if self._pending is not None and self._pending.future.done():
            self.finish()

    def finish(self) -> None:
        """Wait for the pending checkpoint, if any, and give it its final name.

        Raises:
            CheckpointError: It could not be written.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        with _explained(pending.temporary):
            pending.future.result()
            if self._world.is_main:
                self._commit(pending)

    def _commit(self, pending: _Pending) -> None:
        final = self._folder / f"{_PREFIX}{pending.step:08d}"
        if final.exists():
            # A step that was saved before (resumed and reached again) is replaced. A folder that
            # is being removed must not have a final name.
            replaced = final.with_name(f"{final.name}{_REPLACED}")
            final.rename(replaced)
            files.move(pending.temporary, final)
            files.remove(replaced)
        else:
            files.move(pending.temporary, final)
        files.write_text(self._folder / LATEST, final.name)
        for old in complete_checkpoints(self._folder)[: -self._config.keep_last_k]:
            retired = old.path.with_name(f"{old.path.name}{_TEMPORARY}")
            old.path.rename(retired)
            files.remove(retired)
        self._on_complete(final)


def _finalize(temporary: Path, written: "Future[Any]", writer: HashingWriter) -> None:
    """Wait until the state is written, add the checksums, and flush everything to disk."""
    written.result()
    known = {f"{TRAINING_STATE}/{name}": digest for name, digest in writer.digests.items()}
    write_checksums(temporary, known)
    for path in sorted(temporary.rglob("*")):
        files.flush(path)


@contextmanager
def _explained(temporary: Path) -> Iterator[None]:
    """Turn a failure to write into one message."""
    try:
        with files.explained(f"write {temporary}", CheckpointError):
            yield
    except CheckpointException as error:
        raise CheckpointError(
            f"cannot write {temporary}: {_first_line(error)}; the checkpoints before it are "
            "intact. Make room, or choose another runner.output_dir, and resume."
        ) from error


def training_state(
    optimizer: Optimizer, ema: Ema | None, plugins: Plugins = _NO_PLUGINS
) -> dict[str, Any]:
    """Return every tensor of a run as it is sharded: weights, moments, average, count of updates.

    Frozen weights are left out: the checkpoint names the weights that the run started from.
    """
    state: dict[str, Any] = {
        "model": {name: parameter.detach() for name, parameter in optimizer.named.items()},
        "optim": optimizer.moments(),
        "updates": optimizer.updates,
    }
    if ema is not None:
        state["ema"] = ema.average
    if own := plugins.tensors():
        state["plugins"] = own
    return state


def restore(saved: SavedCheckpoint, components: TrainingComponents) -> None:
    """Fill every tensor of a run from a checkpoint of any number of processes."""
    plugins = components.plugins
    # Numbers first: they may say which tensors there are.
    plugins.restore(saved.meta.plugin_state)
    load_state(saved, training_state(components.optimizer, components.ema, plugins))
    components.optimizer.set_updates()
    components.metrics.skips = saved.meta.skips
    components.codes[:] = _codes(saved.meta, components.codes[-1])


def _codes(meta: TrainingMeta, own: CodeIdentity) -> list[CodeIdentity]:
    """Return the code of a resumed run in turn; where it changed, both are there."""
    before = list(meta.codes) or [CodeIdentity(version="unknown version")]
    return before if own.is_same(before[-1]) else [*before, own]


def provenance(components: TrainingComponents) -> dict[str, Any]:
    """Return by which code a run is made, from which files; for the main process.

    Waits until the weights are hashed.
    """
    return {
        "codes": [code.plain() for code in components.codes],
        "weights": components.initial.hashed.result(),
        "commit": components.initial.commit,
        "tokenizer": components.tokenizer_fingerprint,
    }


def identity(components: TrainingComponents) -> dict[str, Any]:
    """Return what identifies this run."""
    config, data = components.config, components.datasets.train
    own = components.described()
    return {
        "base": components.initial.fingerprint,
        "is_lora": config.model.is_lora,
        "ema": config.optim.ema_decay is not None,
        "moments": config.optim.moments,
        "distilled": None if components.teacher is None else components.teacher.identity,
        "seed": config.runner.seed,
        "global_batch_size": config.runner.global_batch_size,
        "max_steps": config.runner.max_steps,
        "statistics": [source.pipeline.statistics.fingerprint for source in data.sources],
        "windows": len(data),
        "plugins": {one.name: dict(one.settings) for one in own},
        "plugin_sources": {one.name: one.source for one in own},
        "world_size": components.world.size,
        "versions": {"torch": torch.__version__},
        "config": config.model_dump(mode="json"),
    }


def check_resumable(saved: SavedCheckpoint, components: TrainingComponents) -> None:
    """Check that a checkpoint belongs to this run.

    Raises:
        CheckpointError: Its base weights or its kind of training differ.
    """
    here, there = identity(components), saved.meta.model_dump()
    wrong = [
        f"{name}: checkpoint {there[name]}, run {here[name]}"
        for name in _MUST_MATCH
        if there[name] != here[name]
    ]
    if wrong:
        raise CheckpointError(
            f"{saved.path} belongs to another run: {'; '.join(wrong)}. Resume with the weights and "
            "settings it was written with, or start from step 0 without runner.resume_dir."
        )
    runner = components.config.runner
    # A restarted job that finds its own last checkpoint only has to export.
    if saved.step >= runner.max_steps and runner.resume_dir != "auto":
        raise CheckpointError(
            f"{saved.path} has done {saved.step} steps, runner.max_steps={runner.max_steps}: there "
            "is nothing left to train; raise max_steps"
        )
    codes = _codes(saved.meta, components.codes[-1])
    if len(codes) > len(saved.meta.codes):
        _log.warning(
            "this run was made by other code: dzrobot %s until step %d, %s now; it continues, and "
            "its checkpoints name both", codes[-2].text, saved.step, codes[-1].text,
        )  # fmt: skip
    for name in _SHOULD_MATCH:
        if there[name] != here[name]:
            _log.warning(
                "%s changed from %s to %s: the run continues, but not as it would have without the "
                "change",
                name, there[name], here[name],
            )  # fmt: skip
