"""From a run to a checkpoint in the official layout that a policy opens directly."""

import logging
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from dzrobot.documents import validated
from dzrobot.embodiments.spec import Embodiment
from dzrobot.errors import CheckpointError
from dzrobot.modality.stats import Statistics
from dzrobot.policies.dreamzero.checkpoints.convert import Converted, ConvertOptions, convert
from dzrobot.policies.dreamzero.checkpoints.directory import (
    Sidecars,
    open_checkpoint,
    read_metadata,
    write_directory,
    write_sidecars,
)
from dzrobot.policies.dreamzero.checkpoints.load import base_fingerprint
from dzrobot.policies.dreamzero.checkpoints.lora import AdapterConfig, MergedSource
from dzrobot.policies.dreamzero.checkpoints.names import (
    DIT,
    adapted_names,
    canonical,
    peft_name,
)
from dzrobot.policies.dreamzero.checkpoints.passport import Passport, passport_for
from dzrobot.policies.dreamzero.checkpoints.shards import ShardOptions
from dzrobot.policies.dreamzero.checkpoints.sources import (
    UnionSource,
    ValuesSource,
    WeightSource,
)
from dzrobot.policies.dreamzero.checkpoints.trained_inputs import TrainedInputs
from dzrobot.training.data.fingerprint import trained_inputs
from dzrobot.training.recipes.architecture import acting_plans, source_plans
from dzrobot.training.run.build import TrainingComponents
from dzrobot.training.run.checkpoint import SavedCheckpoint
from dzrobot.training.run.opening import tokenizer_path
from dzrobot.training.run.parallel import DTYPES
from dzrobot.training.sft_config import CheckpointConfig

_log = logging.getLogger(__name__)

ADAPTERS_SUFFIX = "_adapters"
"""Ending of the folder that holds only what LoRA training changed."""


def export_folder(output_dir: Path, step: int) -> Path:
    """Return where the checkpoint of ``step`` is exported to."""
    return output_dir / "export" / f"step_{step:08d}"


def export(components: TrainingComponents, step: int) -> Path:
    """Write the whole network of ``step``, adapters merged; of a LoRA run also the adapters alone.

    Averaged weights are written where the run keeps an average. Collective; the main process
    writes.

    Returns:
        The folder.
    """
    target = export_folder(components.config.runner.output_dir, step)
    trained = TrainedSource(components)
    if components.world.is_main:
        with trained.shared():
            _write(components, trained, target)
        _log.info("exported %s", target)
    else:
        trained.share()
    dist.barrier(group=components.world.host_group)
    return target


def export_saved(
    saved: SavedCheckpoint, target: Path | None = None, base: tuple[str, ...] = ()
) -> Converted:
    """Write what :func:`export` would write at the step of a checkpoint.

    Args:
        saved: The training checkpoint.
        target: New folder; None: where the run itself exports to.
        base: The weights the run started from, if they have been moved.

    Raises:
        CheckpointError: The base is not there or another one, or ``target`` exists.
    """
    passport = open_checkpoint(saved.path).own_passport
    recipe = {} if passport is None else passport.recipe
    written = validated(
        recipe.get("checkpoint", {}),
        CheckpointConfig,
        f"the recipe of {saved.path}",
        CheckpointError,
    )
    options = ConvertOptions(whole=True, base=base, dtype=DTYPES[written.export_dtype])
    target = target or export_folder(saved.path.parents[1], saved.step)
    return convert([saved.path], target, options)


@dataclass(frozen=True)
class TrainedSource(ValuesSource):
    """The trained tensors, or their averages: each is gathered when it is read, none is kept.

    Collective: the main process reads within :meth:`shared`, the others call :meth:`share`.
    """

    components: TrainingComponents
    origin: str = "training"
    layout: str = "tensors in training"

    @cached_property
    def values(self) -> Mapping[str, Tensor]:  # type: ignore[override]
        """The tensors by name, on the devices that hold them."""
        run = self.components
        values = run.optimizer.named if run.ema is None else run.ema.average
        return {canonical(DIT + name): tensor.detach() for name, tensor in values.items()}

    def stream(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the named tensors on the host."""
        for name in names:
            if isinstance(self.values[name], DTensor):
                self.components.world.from_main(name)
            yield name, _whole(self.values[name]).cpu()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Let the other processes take part while the block reads."""
        try:
            yield
        finally:
            self.components.world.from_main(None)

    def share(self) -> None:
        """Take part in what the main process reads, until it has read all that it wants."""
        nothing: str | None = None
        while (name := self.components.world.from_main(nothing)) is not None:
            _whole(self.values[name])


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True)
class PartialExport:
    """The files beside the trained tensors: the network they are part of, and its base.

    They are the same at every step, so they are made once.
    """

    components: TrainingComponents

    @cached_property
    def sidecars(self) -> Sidecars:
        """Return the files; their passport names the base by its weights."""
        trained = {canonical(DIT + name) for name in self.components.optimizer.named}
        base = base_fingerprint(self.components.initial.source, trained)
        return Sidecars(
            config_json=self.components.network.to_dict(), metadata=_metadata(self.components),
            passport=_passport(self.components, base), copy_from=self.components.initial.folder,
            tokenizer=_tokenizer(self.components), complete=False,
        )  # fmt: skip

    def write(self, folder: Path) -> None:
        """Write the files into ``folder``."""
        write_sidecars(folder, self.sidecars)


def _write(components: TrainingComponents, own: TrainedSource, target: Path) -> None:
    config = components.config
    # Left by an interrupted or earlier export of this step.
    for folder in (target, target.with_name(target.name + ADAPTERS_SUFFIX)):
        shutil.rmtree(folder, ignore_errors=True)
    source: WeightSource = UnionSource(sources=(components.initial.source, own))
    network = components.network
    if config.model.is_lora:
        _write_adapters(components, own, target.with_name(target.name + ADAPTERS_SUFFIX))
        source = MergedSource(source, AdapterConfig.of_head(network.head))
        network = replace(network, head=replace(network.head, train_architecture="full"))
    sidecars = Sidecars(
        config_json=network.to_dict(), metadata=_metadata(components),
        passport=_passport(components, None), copy_from=components.initial.folder,
        tokenizer=_tokenizer(components),
    )  # fmt: skip
    options = ShardOptions(dtype=DTYPES[config.checkpoint.export_dtype])
    write_directory(target, source, sidecars, options)


def _write_adapters(components: TrainingComponents, own: TrainedSource, target: Path) -> None:
    """Write only what was trained, under the published names, and which base it belongs to."""
    adapted = adapted_names(own.tensors)
    options = ShardOptions(dtype=torch.float32, rename=lambda name: peft_name(name, adapted))
    write_directory(target, own, PartialExport(components).sidecars, options)


@dataclass(frozen=True)
class _ActingRobot:
    """A robot that the policy can act as, and what its numbers are normalized by."""

    embodiment: Embodiment
    statistics: Statistics
    metadata: str | Path | Mapping[str, Any]


def _robots(components: TrainingComponents) -> Iterator[_ActingRobot]:
    """Yield the robots of the sources with actions; see :func:`acting_plans`."""
    plans = source_plans(components.config)
    acting = acting_plans(plans, components.config)
    for plan, source in zip(plans, components.datasets.train.sources, strict=True):
        robot, statistics, metadata = (
            source.spec.embodiment, source.pipeline.statistics, source.spec.metadata,
        )  # fmt: skip
        if plan not in acting:
            continue
        if not robot.action:
            metadata = plan.metadata or components.initial.metadata or metadata
            robot, statistics = (
                plan.embodiment,
                Statistics.from_metadata(metadata, plan.embodiment),
            )
        yield _ActingRobot(robot, statistics, metadata)


def _metadata(components: TrainingComponents) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for robot in _robots(components):
        given, tag = robot.metadata, robot.embodiment.tag
        content = read_metadata(Path(given)) if isinstance(given, str | Path) else given
        merged[tag] = content[tag]
    return merged


def _passport(components: TrainingComponents, base: str | None) -> Passport:
    """Return the passport of the run's robots; a mixture's names all of them."""
    recipe = components.config.model_dump(mode="json")
    passports = [
        passport_for(
            robot.embodiment, robot.statistics, components.network, base=base, recipe=recipe
        )
        for robot in _robots(components)
    ]
    horizon, model = components.network.head.action_horizon, components.config.model
    robots = {
        tag: replace(
            trained, action_horizon=passport.action_horizon, inputs=_inputs(components, tag)
        )
        for passport in passports
        for tag, trained in passport.embodiments.items()
    }
    return replace(
        passports[0],
        embodiments=robots,
        action_horizon=horizon,
        rtc_training_max_delay=model.rtc_training_max_delay or None,
        action_only_video=model.action_only_video if model.action_only_ratio else None,
        lora_alpha=components.network.head.lora_alpha if model.is_lora else None,
        distilled_steps=components.config.distill.to_steps,
        plugins=tuple(asdict(one) for one in components.described()),
        tokenizer=components.tokenizer_fingerprint,
        weights=components.initial.hashed.result() or None,
        commit=components.initial.commit or None,
        code=tuple(components.codes),
    )


def _inputs(components: TrainingComponents, tag: str) -> TrainedInputs | None:
    """Return what the sources of a robot show the network, in small."""
    sources = [one for one in components.datasets.train.sources if one.spec.embodiment.tag == tag]
    readers = [reader for one in sources for reader in one.readers]
    return trained_inputs(readers, sources[0].spec.embodiment)


def _tokenizer(components: TrainingComponents) -> Path | None:
    """Return the folder of a local tokenizer, which goes beside the weights."""
    given = Path(tokenizer_path(components.config, components.initial)).expanduser()
    return given if given.is_dir() else None
