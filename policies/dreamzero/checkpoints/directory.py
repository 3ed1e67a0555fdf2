"""Opening a checkpoint of any layout, and writing the official one.

docs/model.md, sections 1.1 to 1.4.
"""

import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from dzrobot.documents import read_bytes, read_json, validated
from dzrobot.errors import CheckpointError, ConfigError, preview
from dzrobot.files import refuse_stand_ins
from dzrobot.policies.dreamzero.checkpoints.checksums import write_checksums
from dzrobot.policies.dreamzero.checkpoints.hub import locate, newest_step
from dzrobot.policies.dreamzero.checkpoints.lora import (
    ADAPTER_CONFIG,
    ADAPTER_STEM,
    AdapterConfig,
    adapted_config,
    adapter_config,
    check_only_trained,
    open_adapters,
    read_adapter_config,
    short_name,
)
from dzrobot.policies.dreamzero.checkpoints.names import check_part_names, is_adapter
from dzrobot.policies.dreamzero.checkpoints.passport import (
    CARD_FILE,
    PASSPORT_FILE,
    Passport,
    PublishedTraining,
    model_card,
    published_passport,
    read_license,
    read_passport,
    recorded_base,
    write_passport,
)
from dzrobot.policies.dreamzero.checkpoints.shards import (
    ShardOptions,
    write_json,
    write_weights,
    written_whole,
)
from dzrobot.policies.dreamzero.checkpoints.sources import (
    WeightSource,
    open_pickled,
    open_safetensors,
)
from dzrobot.policies.dreamzero.network.config import NetworkConfig
from dzrobot.policies.dreamzero.options import LOOSE, LooseWeights
from dzrobot.yaml_values import LARGEST, read_yaml

Base = str | Path | Sequence[str | Path]
"""A checkpoint of any layout, or the folders of Wan component files."""

CONFIG_FILE = "config.json"
METADATA_FILE = Path("experiment_cfg/metadata.json")
TRAINING_FILE = Path("experiment_cfg/conf.yaml")
TOKENIZER_FOLDER = "tokenizer"
TRAINING_META = "meta.json"
"""In one of our own training checkpoints: the state of the run."""

TRAINING_STATE = "state"
"""In one of our own training checkpoints: the folder of its tensors."""

# RLinf spells the second name in its documentation.
_PICKLED = ("full_weights.pt", "full_weigths.pt")
_OF_WEIGHTS = (".safetensors", ".index.json", ".pt", ".pth", ".bin", ".distcp", ".metadata")
_RUN_FOLDERS = ("", "model_state_dict", "actor/model_state_dict")
_DCP_FOLDERS = ("", "dcp_checkpoint", "actor/dcp_checkpoint")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Weights and what is written beside them; nothing but headers has been read."""

    path: Path
    """Where the weights lie."""

    weights: WeightSource
    folder: Path
    """Where config.json, experiment_cfg and the tokenizer lie."""

    config_json: Mapping[str, Any] = field(repr=False)
    """config.json as it is."""

    statistics: Path | None = None
    """metadata.json where it does not lie in ``folder``."""

    described: AdapterConfig | None = None
    """Content of adapter_config.json, where there is one."""

    @cached_property
    def config(self) -> NetworkConfig:
        """Return what config.json describes."""
        return NetworkConfig.from_dict(self.config_json)

    @cached_property
    def adapters(self) -> AdapterConfig:
        """Return how adapters are applied, if there are any."""
        return self.described or AdapterConfig.of_head(self.config.head)

    @property
    def metadata_file(self) -> Path:
        """Return the path of metadata.json.

        Raises:
            CheckpointError: There is none.
        """
        file = self.statistics or self.folder / METADATA_FILE
        if not file.is_file():
            refuse_stand_ins([file], CheckpointError)
            raise CheckpointError(
                f"{self.folder} has no {METADATA_FILE}, which holds the normalization statistics; "
                "give the file that the weights were trained with (--metadata FILE): it is where "
                "the checkpoint was published, or made from the training data with `dzrobot stats`"
            )
        return file

    @cached_property
    def metadata(self) -> dict[str, Any]:
        """Return metadata.json: normalization statistics by tag."""
        return read_metadata(self.metadata_file)

    @cached_property
    def training(self) -> PublishedTraining | None:
        """Return experiment_cfg/conf.yaml, None if there is none."""
        file = self.folder / TRAINING_FILE
        if not file.is_file():
            return None
        try:
            text = read_bytes(file, CheckpointError, largest=LARGEST).decode("utf-8")
            data, _ = read_yaml(text, str(file))
        except (ConfigError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}; copy it again") from error
        return validated(data, PublishedTraining, str(file), CheckpointError)

    @cached_property
    def own_passport(self) -> Passport | None:
        """Return the passport beside the weights or the config, None if there is none."""
        beside = self.path if self.path.is_dir() else self.path.parent
        return read_passport(beside) or read_passport(self.folder)

    @cached_property
    def passport(self) -> Passport:
        """Return the passport, or what the published files say in its place."""
        return self.own_passport or published_passport(self.config, self.metadata, self.training)

    @property
    def lora_alpha(self) -> float | None:
        """Return what adapters are multiplied by, over their rank; None: there are none."""
        return self.adapters.lora_alpha if self.has_adapters else None

    @property
    def passport_base(self) -> str | None:
        """Return the fingerprint of the base that the checkpoint names, None if it names none."""
        return None if self.own_passport is None else self.own_passport.base

    @property
    def has_adapters(self) -> bool:
        """Return whether LoRA matrices are among the weights."""
        return any(is_adapter(name) for name in self.weights.tensors)


def read_metadata(file: Path) -> dict[str, Any]:
    """Return metadata.json: normalization statistics by tag.

    Raises:
        CheckpointError: It is missing, damaged, or no statistics by tag.
    """
    return dict(read_json(file, dict[str, dict[str, Any]], CheckpointError))


def open_checkpoint(
    path_or_repo: str | Path,
    *,
    revision: str | None = None,
    config_from: str | Path | LooseWeights | None = None,
    base: Base | None = None,
) -> Checkpoint:
    """Return the checkpoint at ``path_or_repo``, of any layout, without reading its weights.

    Args:
        path_or_repo: An official folder; a ``.pt`` or ``.pth`` state dict; a ``dcp_checkpoint``
            folder or the ``global_step_N`` folder of a run; ``checkpoints/step_N`` of a training
            run of this package; LoRA adapters in the format of peft; or a Hugging Face id.
        revision: Branch, tag or commit of a Hugging Face repository.
        config_from: What the weights are, for layouts that have no config.json or no statistics
            beside them; a folder is short for ``LooseWeights(folder=...)``.
        base: Of a checkpoint that holds only what was trained. Adapters that others made have
            nothing beside them: what is needed is then taken from their base.

    Raises:
        CheckpointError: Not there, incomplete, damaged or foreign.
    """
    path = locate(path_or_repo, revision)
    if path.name == TRAINING_STATE and (path.parent / TRAINING_META).is_file():
        path = path.parent
    weights = open_weights(path)
    check_part_names(weights.tensors, weights.origin)
    folder = path if path.is_dir() else path.parent
    loose = as_loose(config_from)
    alone = loose.folder is None and loose.network is None
    if alone and isinstance(base, str | Path) and _is_bare(folder):
        loose = replace(loose, folder=base)
    folder, config_json = read_beside(folder, loose)
    described = read_adapter_config(path, weights) if _has_adapters(path) else None
    if described is not None:
        config_json = adapted_config(config_json, described)
    return Checkpoint(
        path=path, weights=weights, folder=folder, config_json=config_json,
        statistics=_statistics(folder, loose), described=described,
    )  # fmt: skip


def as_loose(config_from: str | Path | LooseWeights | None) -> LooseWeights:
    """Return what is given as a description; None is one that says nothing."""
    if isinstance(config_from, LooseWeights):
        return config_from
    return LooseWeights(folder=config_from)


def read_beside(folder: Path, loose: LooseWeights) -> tuple[Path, dict[str, Any]]:
    """Return the folder whose files lie beside the weights, and the content of config.json.

    Args:
        folder: Where the weights lie.
        loose: What stands in for what is not there.

    Raises:
        CheckpointError: Nothing says what network it is, or two things do.
    """
    if loose.folder is not None:
        folder = locate(loose.folder)
    file = folder / CONFIG_FILE
    if loose.network is not None:
        if file.is_file():
            raise CheckpointError(
                f"{file} says what network the weights are: leave the other one "
                f"({_named(loose)}) out"
            )
        statistics = _statistics(folder, loose) or folder / METADATA_FILE
        known = read_metadata(statistics) if statistics.is_file() else None
        return folder, loose.config(known).to_dict()
    if not file.is_file():
        refuse_stand_ins([file], CheckpointError)
        raise CheckpointError(
            f"{folder} has no {CONFIG_FILE}, which says what network the weights are: {LOOSE}"
        )
    return folder, dict(read_json(file, dict[str, Any], CheckpointError))


def _named(loose: LooseWeights) -> str:
    network = loose.network
    return "a network" if isinstance(network, NetworkConfig) else f"preset {network}"


def _statistics(folder: Path, loose: LooseWeights) -> Path | None:
    """Return the statistics that are given; they do not stand in for others beside the weights."""
    if loose.metadata is None:
        return None
    given, own = Path(loose.metadata).expanduser(), folder / METADATA_FILE
    if loose.folder is None and own.is_file() and read_metadata(own) != read_metadata(given):
        raise CheckpointError(
            f"{own} holds the statistics of these weights, and {given} others: leave them out "
            "(--metadata)"
        )
    return given


def _has_adapters(path: Path) -> bool:
    """Return whether adapters lie in the folder ``path`` in the format of peft."""
    return (path / ADAPTER_CONFIG).is_file()


def _is_bare(folder: Path) -> bool:
    return _has_adapters(folder) and not (folder / CONFIG_FILE).is_file()


def open_weights(path: Path) -> WeightSource:
    """Return the tensors at ``path``, whatever their layout.

    Raises:
        CheckpointError: No known layout, or incomplete or damaged files.
    """
    if path.is_file():
        if path.suffix in (".pt", ".pth", ".bin"):
            return open_pickled(path)
        if path.suffix == ".safetensors":
            return open_safetensors(path.parent, path.stem)
        raise CheckpointError(
            f"{path} is not a .safetensors, .pt or .pth file; give a checkpoint's folder or file"
        )
    whole = any((path / f"model.safetensors{end}").is_file() for end in ("", ".index.json"))
    if _has_adapters(path):
        if whole:
            raise CheckpointError(
                f"{path} holds both weights and {ADAPTER_CONFIG}; keep adapters in a folder of "
                "their own"
            )
        return open_adapters(path)
    if whole:
        return open_safetensors(path)
    if (path / TRAINING_META).is_file() and (path / TRAINING_STATE).is_dir():
        from dzrobot.policies.dreamzero.checkpoints.dcp import open_trained

        return open_trained(path / TRAINING_STATE)
    pickled = [path / folder / name for folder in _RUN_FOLDERS for name in _PICKLED]
    if found := next((file for file in pickled if file.is_file()), None):
        return open_pickled(found)
    folders = [path / name for name in _DCP_FOLDERS]
    if dcp := next(
        (f for f in folders if (f / ".metadata").is_file() or any(f.glob("*.distcp"))), None
    ):
        from dzrobot.policies.dreamzero.checkpoints.dcp import open_dcp

        return open_dcp(dcp)
    raise _weightless(path)


def _weightless(path: Path) -> CheckpointError:
    if step := newest_step(path):
        return CheckpointError(
            f"{path} belongs to a training run and holds no weights itself; give one of its "
            f"checkpoints, such as the newest: {step}"
        )
    below = (file for file in path.rglob("*") if file.name.endswith(_OF_WEIGHTS))
    refuse_stand_ins({path / "model.safetensors", *below}, CheckpointError)
    held = preview(entry.name for entry in path.iterdir())
    return CheckpointError(
        f"{path} holds no weights (it holds {held}); expected model.safetensors, "
        "model.safetensors.index.json, adapter_config.json with its weights, "
        "full_weights.pt, or *.distcp files with .metadata"
    )


@dataclass(frozen=True, kw_only=True)
class Sidecars:
    """What an official folder holds beside the weights."""

    config_json: Mapping[str, Any]
    complete: bool = True
    """Whether the weights are all there, so that nothing else is to be loaded."""

    metadata: Mapping[str, Any] | None = None
    passport: Passport | None = None
    """Where there is one, README.md is written from it."""

    keeps_card: bool = False
    """Whether README.md in ``copy_from`` is that of these very weights and stays as it is."""

    copy_from: Path | None = None
    """Folder whose other files (training config, tokenizer, metadata) are copied."""

    adapters: AdapterConfig | None = None
    """How adapters among the weights are applied, where config.json does not say it."""

    adapter_config: Mapping[str, Any] | None = None
    """Content of adapter_config.json, of adapters in peft's format."""

    tokenizer: Path | None = None
    """Folder of the tokenizer, where ``copy_from`` has none."""


def write_directory(
    target: Path, weights: WeightSource, sidecars: Sidecars, options: ShardOptions | None = None
) -> Path:
    """Write a checkpoint in the official layout; ``target`` appears complete or not at all.

    Raises:
        CheckpointError: ``target`` exists already.
    """
    with written_whole(target) as folder:
        folder.mkdir()
        write_weights(folder, weights, options)
        write_sidecars(folder, sidecars)
        write_checksums(folder)
    return target


def write_adapters(
    target: Path, weights: WeightSource, sidecars: Sidecars, dtype: torch.dtype | None
) -> Path:
    """Write adapters in peft's format; what a network needs beside them lies beside them.

    Raises:
        CheckpointError: ``target`` exists already, or ``weights`` are not adapters alone.
    """
    head = NetworkConfig.from_dict(sidecars.config_json).head
    adapters = sidecars.adapters or AdapterConfig.of_head(head)
    check_only_trained(weights.tensors, weights.origin)
    # One file, whatever its size: peft reads no shards.
    size = sum(info.nbytes for info in weights.tensors.values())
    options = ShardOptions(dtype=dtype, rename=short_name, stem=ADAPTER_STEM, shard_bytes=2 * size)
    config = adapter_config(adapters, weights.tensors, recorded_base(sidecars.passport))
    return write_directory(target, weights, replace(sidecars, adapter_config=config), options)


def write_sidecars(folder: Path, sidecars: Sidecars) -> None:
    """Write what lies beside the weights into ``folder``."""
    config_json = sidecars.config_json
    write_json(
        folder / CONFIG_FILE, exported_config(config_json) if sidecars.complete else config_json
    )
    if sidecars.copy_from is not None:
        _copy_beside(sidecars.copy_from, folder)
    if sidecars.tokenizer is not None and not (folder / TOKENIZER_FOLDER).exists():
        shutil.copytree(sidecars.tokenizer, folder / TOKENIZER_FOLDER)
    if sidecars.adapter_config is not None:
        write_json(folder / ADAPTER_CONFIG, sidecars.adapter_config)
    if sidecars.metadata is not None:
        (folder / METADATA_FILE).parent.mkdir(exist_ok=True)
        write_json(folder / METADATA_FILE, sidecars.metadata)
    if sidecars.passport is not None:
        write_passport(folder, sidecars.passport)
    _write_card(folder, sidecars)


def _write_card(folder: Path, sidecars: Sidecars) -> None:
    origin, passport = sidecars.copy_from, sidecars.passport
    if sidecars.keeps_card and origin is not None and (origin / CARD_FILE).is_file():
        _refuse_foreign_links(origin, [origin / CARD_FILE])
        shutil.copyfile(origin / CARD_FILE, folder / CARD_FILE)
    elif passport is not None:
        head = NetworkConfig.from_dict(sidecars.config_json).head
        card = model_card(
            passport,
            read_license(origin),
            adapters=head.train_architecture == "lora",
            complete=sidecars.complete,
        )
        (folder / CARD_FILE).write_text(card, encoding="utf-8")


def _copy_beside(origin: Path, folder: Path) -> None:
    for name in ("experiment_cfg", TOKENIZER_FOLDER):
        if (origin / name).is_dir():
            _refuse_foreign_links(origin, [origin / name, *(origin / name).rglob("*")])
            shutil.copytree(origin / name, folder / name)
    for name in ("wandb_config.json", PASSPORT_FILE):
        if (origin / name).is_file():
            _refuse_foreign_links(origin, [origin / name])
            shutil.copyfile(origin / name, folder / name)


def _refuse_foreign_links(origin: Path, paths: Iterable[Path]) -> None:
    """Raise :class:`CheckpointError` if a link leads out of the checkpoint: it would be copied."""
    # The hub's cache keeps the files of all revisions in one folder, and links to them.
    own = origin.parent.parent if origin.parent.name == "snapshots" else origin
    root = own.resolve()
    for path in paths:
        if not path.resolve().is_relative_to(root):
            raise CheckpointError(
                f"{path} is a link to {path.resolve()}, outside of the checkpoint; put the file "
                "itself there, or remove the link"
            )


def exported_config(config_json: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json for complete weights: nothing else is to be loaded with them."""
    head = config_json["action_head_cfg"]
    inner = {**head["config"], "skip_component_loading": True, "defer_lora_injection": False}
    return {**config_json, "action_head_cfg": {**head, "config": inner}}
