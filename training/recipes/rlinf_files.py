"""Files of RLinf as its program reads them, and what it does where they say nothing.

They are written for Hydra, which is not needed: ``group/name@package`` beside the file, ``_self_``
and ``${section.field}`` are all that recipes of other trainers use. The rest are facts about rlinf
0.3.0.

Files of defaults are read where they lie beside a recipe; these values stand in for missing ones.
A network that files describe is compared with the published one that they name.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dzrobot.configuration import lay_over, read_config
from dzrobot.embodiments.timing import WALK_OFFSETS
from dzrobot.errors import CheckpointError, ConfigError
from dzrobot.policies.dreamzero.network.config import HeadConfig, NetworkConfig, preset, values
from dzrobot.yaml_values import Place, dotted

OPEN = "???"
"""How OmegaConf writes a value that the user has to give."""

_ENTRY = re.compile(r"(?P<name>[\w./-]+?)(?:@(?P<package>[\w.]+))?\Z")
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_DEEPEST = 8
"""Files of defaults that name further ones, and references that lead to references."""


@dataclass(frozen=True)
class Composed:
    """Values of a file and of what it names."""

    values: dict[str, Any]

    written: frozenset[str]
    """Dotted names that the file itself, or the command line, gives."""

    read: tuple[str, ...]
    """Files of defaults that were read, as ``group/name``."""

    missing: tuple[str, ...]
    """Those that do not lie beside the file."""

    origins: Mapping[str, str]
    """Dotted name -> file of defaults that it comes from, read or missing."""


def compose(
    file: Path,
    overrides: Sequence[str],
    known: Mapping[str, Mapping[str, Any]],
    aliases: Mapping[str, str],
) -> Composed:
    """Read ``file`` with its defaults, as Hydra would.

    Args:
        file: YAML file.
        overrides: ``a.b=value`` each; they win over the file.
        known: Values of files that may be missing, by ``group/name``.
        aliases: Section that references name -> section where it is, if the first is not there.

    Raises:
        ConfigError: A file cannot be read, or names itself.
    """
    found = _Found(known)
    values = found.merged(file, overrides, ())
    _resolve(values, aliases)
    own = read_config(file, overrides).values
    written = frozenset(dotted(place) for place, _ in leaves(own))
    return Composed(values, written, tuple(found.read), tuple(found.missing), found.origins)


def leaves(value: Mapping[str, Any], place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Yield every value below ``value`` that is not a filled mapping, with its place."""
    for key, inner in value.items():
        if isinstance(inner, dict) and inner:
            yield from leaves(inner, (*place, key))
        else:
            yield (*place, key), inner


def put(values: dict[str, Any], place: Place, value: Any, *, over: bool = True) -> bool:
    """Write ``value`` to ``place``; return whether it was."""
    inner: dict[Any, Any] = values
    for key in place[:-1]:
        inner = inner.setdefault(key, {})
        if not isinstance(inner, dict):
            return False
    if not over and place[-1] in inner:
        return False
    inner[place[-1]] = value
    return True


def listed_defaults(value: object) -> list[tuple[str, str]]:
    """Return ``(group/name, package)`` of a list of defaults, in order; ``_self_`` has no package.

    Overrides of Hydra's own groups change no value and are left out.
    """
    entries = []
    for entry in value if isinstance(value, list) else [value]:
        if isinstance(entry, dict) and len(entry) == 1:
            ((group, name),) = entry.items()
            group, _, package = str(group).partition("@")
            entry = f"{group}/{name}@{package}" if package else f"{group}/{name}"
        if not isinstance(entry, str) or entry.startswith("override "):
            continue
        if match := _ENTRY.match(entry.removeprefix("optional ")):
            name = match["name"]
            group = name.rpartition("/")[0].replace("/", ".")
            entries.append((name, "" if name == "_self_" else match["package"] or group))
    return entries


@dataclass
class _Found:
    known: Mapping[str, Mapping[str, Any]]
    read: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    origins: dict[str, str] = field(default_factory=dict)

    def merged(
        self, file: Path, overrides: Sequence[str], above: tuple[Path, ...]
    ) -> dict[str, Any]:
        if file in above or len(above) > _DEEPEST:
            chain = " -> ".join(path.name for path in (*above, file))
            raise ConfigError(f"the files of defaults name each other: {chain}")
        own = read_config(file, overrides).values
        entries = listed_defaults(own.pop("defaults", []))
        if not any(name == "_self_" for name, _ in entries):
            entries.append(("_self_", ""))
        values: dict[str, Any] = {}
        for name, package in entries:
            if name == "_self_":
                lay_over(values, own)
                continue
            part = self._default(file.parent, name, (*above, file))
            for key in reversed(package.split(".") if package else ()):
                part = {key: part}
            self.origins |= {dotted(place): name for place, _ in leaves(part)}
            lay_over(values, part)
        return values

    def _default(self, folder: Path, name: str, above: tuple[Path, ...]) -> dict[str, Any]:
        beside = folder / f"{name}.yaml"
        if beside.is_file():
            self.read.append(name)
            return self.merged(beside, (), above)
        self.missing.append(name)
        return dict(self.known.get(name, {}))


def _resolve(values: dict[str, Any], aliases: Mapping[str, str]) -> None:
    """Fill in what other fields of the file say; what they do not say stays as it is written."""
    for _ in range(_DEEPEST):
        known = {dotted(place): value for place, value in leaves(values)}
        for section, actual in aliases.items():
            for name, value in list(known.items()):
                if name.startswith(f"{actual}."):
                    known.setdefault(f"{section}{name.removeprefix(actual)}", value)
        changed = False
        for place, value in list(leaves(values)):
            if isinstance(value, str) and "${" in value:
                filled = _filled(value, known)
                changed |= filled != value
                put(values, place, filled)
        if not changed:
            return


def _filled(text: str, known: Mapping[str, Any]) -> Any:
    if whole := _REFERENCE.fullmatch(text):
        return known.get(whole[1], text)

    def said(match: re.Match[str]) -> str:
        value = known.get(match[1])
        plain = isinstance(value, str | int | float) and not isinstance(value, bool)
        return str(value) if plain else match[0]

    return _REFERENCE.sub(said, text)


VERSION = "0.3.0"
"""Version of rlinf on PyPI that this table describes."""

PROGRAM: Mapping[str, Any] = {
    "data.num_workers": 4,
    "data.prefetch_factor": 4,
    "data.sampling_mode": "multi_anchor",
    "data.video_backend": "pyav",
    "data.video_in_chunk_offsets": list(WALK_OFFSETS),
    "model.relative_action": False,
    "model.relative_action_per_horizon": False,
    "model.tokenizer_path": "google/umt5-xxl",
    "optim.adam_eps": 1e-8,
    "optim.lr_scheduler": "constant",
    "optim.lr_warmup_ratio": 0.0,
    "optim.weight_decay": 1e-2,
    "parallel.activation_checkpointing": "none",
    "parallel.cpu_offload": False,
    "parallel.enable_gradient_accumulation": False,
    "parallel.param_dtype": "fp32",
    "parallel.reshard_after_forward": True,
    "runner.seed": 42,
}
"""Field here -> what RLinf's code takes where neither a recipe nor its files of defaults say it.

Sums over ranks have the dtype of the weights there, where none is given."""

_SIZES = {
    "5b": {"target_video_height": 176, "target_video_width": 320},
    "14b": {"target_video_height": 352, "target_video_width": 640},
}


def _network(preset: str) -> dict[str, Any]:
    return {
        "action_horizon": 24,
        "num_action_per_block": 24,
        "state_horizon": 1,
        **_SIZES[preset],
        "action_head_cfg": {"config": {"diffusion_model_cfg": {"max_chunk_size": 4}}},
    }


_SUITES = ("libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90")

FILES: Mapping[str, Mapping[str, Any]] = {
    "hybrid_engines/fsdp": {
        "strategy": "fsdp",
        "sharding_strategy": "full_shard",
        "gradient_checkpointing": False,
        "cpu_offload": False,
        "reshard_after_forward": True,
        "enable_gradient_accumulation": True,
    },
    "model/dreamzero_5b": _network("5b"),
    "model/dreamzero_14b": _network("14b"),
    **{
        f"env/{name}": {"env_type": "libero", "task_suite_name": name, "reset_gripper_open": True}
        for name in _SUITES
    },
}
"""File of defaults, as ``group/name`` -> what of it has a meaning here."""

ALIASES: Mapping[str, str] = {"actor.model": "rollout.model"}
"""A network's file names its own fields as those of a training run, in an evaluation too."""

PRESETS: Mapping[str, str] = {"model/dreamzero_5b": "5b", "model/dreamzero_14b": "14b"}
"""File of defaults -> network here."""


UNKNOWN = "is not a field known here: take it out, or give it as null"


HEAD: Mapping[str, tuple[Any, ...]] = {
    "action_loss_embodiment_ids": (), "add_pos_embed": (), "noise_beta_alpha": (),
    "noise_beta_beta": (), "noise_s": (), "num_inference_timesteps": (),
    "num_timestep_buckets": (), "repa_coeff": (), "repa_layer": (), "vl_self_attention_cfg": (),
    "skip_component_loading": (), "defer_lora_injection": (),
    "backbone_embedding_dim": (0,), "backbone_features_projector_cfg": (None,),
    "expand_batch": (None,), "freeze_decode_layer": (False,), "input_embedding_dim": (1536,),
    "load_pretrained_det_decode_layer_path": (None,), "model_dtype": ("float32",),
    "tile_size_height": (34,), "tile_size_width": (34,), "tile_stride_height": (18,),
    "tile_stride_width": (16,), "tiled": (False,), "tune_diffusion_model": (True,),
    "tune_projector": (True,), "use_gradient_checkpointing": (True, False), "use_vlln": (True,),
    "hidden_size": (64,), "action_dim": (32,), "max_action_dim": (32,), "max_state_dim": (64,),
    "num_frame_per_block": (2,),
}  # fmt: skip
"""Entries of ``action_head_cfg.config`` that no field of :class:`HeadConfig` holds: the values of
both published networks; none where the published code reads no value."""


_SHAPED_BY_RUN = {
    "num_action_per_block", "frame_seqlen", "max_chunk_size", "action_horizon", "num_frames",
    "target_video_height", "target_video_width",
}  # fmt: skip
"""What a recipe decides, and what follows from it."""


_PARTS: Mapping[str, str] = {
    "diffusion_model_cfg": "dit", "vae_cfg": "vae", "text_encoder_cfg": "text",
    "image_encoder_cfg": "image",
}  # fmt: skip
"""Section of ``action_head_cfg.config`` -> part of a network here."""


def network_faults(
    model: Mapping[str, Any], chosen: str, section: str
) -> Iterator[tuple[str, str]]:
    """Yield in what a network of RLinf's files differs from a published one: name, and how.

    Args:
        model: Section with ``action_head_cfg``, its references filled in.
        chosen: Preset, ``5b`` or ``14b``.
        section: Name of ``model`` in the file.
    """
    where = f"{section}.action_head_cfg.config"
    try:
        found, published = NetworkConfig.from_dict(model), preset(chosen)
    except CheckpointError as error:
        yield where, str(error)
        return
    parts = {**{f"{name}.": part for name, part in _PARTS.items()}, "": "head"}
    for prefix, part in parts.items():
        there, here = values(values(found)[part]), values(values(published)[part])
        for name, value in there.items():
            if value != here[name] and name not in _SHAPED_BY_RUN:
                yield f"{where}.{prefix}{name}", _other(value, here[name], chosen)
    for place, value in leaves(model["action_head_cfg"]["config"]):
        entry = dotted(place)
        allowed = _allowed(place, found)
        if allowed is None:
            yield f"{where}.{entry}", UNKNOWN
        elif allowed and value not in allowed:
            yield f"{where}.{entry}", _other(value, allowed[0], chosen)


def _allowed(place: tuple[Any, ...], network: NetworkConfig) -> tuple[Any, ...] | None:
    """Return the values that an entry may have, none for any; None of an unknown entry."""
    top, name = str(place[0]), str(place[-1])
    if name.startswith("_") or name.endswith("_pretrained_path"):
        return ()
    if top in _PARTS:
        return () if name in values(values(network)[_PARTS[top]]) else None
    if top in HEAD:
        return HEAD[top]
    return () if top in HeadConfig.__dataclass_fields__ else None


def _other(value: Any, published: Any, chosen: str) -> str:
    return (
        f"is {value}, the published network {chosen} has {published}: train another one from a "
        "checkpoint, or with model.config_path in a recipe of your own"
    )
