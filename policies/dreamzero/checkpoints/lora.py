"""Low-rank adapters on the transformer: merged into the weights, or kept beside them.

docs/model.md, section 1.2.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn

from dzrobot.documents import read_json, validated
from dzrobot.errors import CheckpointError, preview
from dzrobot.files import in_parts
from dzrobot.policies.dreamzero.checkpoints.names import (
    DIT,
    adapted_layer,
    adapted_names,
    is_adapter,
    refuse_foreign,
)
from dzrobot.policies.dreamzero.checkpoints.sources import (
    PART_BYTES,
    PartSource,
    TensorInfo,
    WeightSource,
    open_pickled,
    open_safetensors,
    renamed,
)
from dzrobot.policies.dreamzero.network.config import HeadConfig
from dzrobot.policies.dreamzero.quantize import can_be_nf4

T = TypeVar("T")

TRAINED_MODULES = ("state_encoder", "action_encoder", "action_decoder", "conditions")
"""Modules of the transformer that are trained whole beside the adapters."""


def check_adapters(
    tensors: Mapping[str, TensorInfo],
    adapters: "AdapterConfig",
    transformer: nn.Module,
    origin: str,
) -> None:
    """Check that the targeted layers have their two matrices each, and nothing else has any.

    Args:
        tensors: Those of the adapters and of what they are added to.
        adapters: How they are applied.
        transformer: Without adapters, for the names of its layers.
        origin: Where the adapters lie.

    Raises:
        CheckpointError: A matrix is missing, too many or of another shape.
    """
    matrices = [name for name in tensors if is_adapter(name)]
    layers = {adapted_layer(name) for name in matrices}
    if alone := [name for name in matrices if _partner(name) not in tensors]:
        raise CheckpointError(
            f"{origin} holds {preview(alone)} without {preview(map(_partner, alone))}; save the "
            "adapters again"
        )
    if baseless := layers - tensors.keys():
        raise CheckpointError(
            f"{origin} adapts {preview(baseless)}, which neither it nor its base holds; give the "
            "base it was trained on"
        )
    targeted = {f"{DIT}{name}.weight" for name in target_layers(transformer, adapters)}
    if lacking := targeted - layers:
        raise CheckpointError(
            f"{origin} has no matrices for {preview(lacking)}, which {adapters.source} targets; "
            "save the adapters again, whole"
        )
    if more := layers - targeted:
        raise CheckpointError(
            f"{origin} holds matrices for {preview(more)}, which {adapters.source} does not "
            "target; use the configuration written with these adapters"
        )
    if odd := [text for name in matrices if (text := _misfit(name, tensors, adapters))]:
        raise CheckpointError(
            f"{origin} holds {preview(odd, 2)}; use the configuration written with these adapters"
        )


def _misfit(name: str, tensors: Mapping[str, TensorInfo], adapters: "AdapterConfig") -> str:
    layer = adapted_layer(name)
    out_in, rank = tensors[layer].shape, adapters.rank(layer)
    wanted = (rank, *out_in[1:]) if ".lora_A." in name else (out_in[0], rank)
    given = tensors[name].shape
    if given == wanted:
        return ""
    held = given[0 if ".lora_A." in name else -1] if len(given) == 2 else None
    if held not in (rank, None):
        return f"{name} of rank {held}, where {adapters.source} says {rank}"
    return f"{name} of shape {given} instead of {wanted}"


@dataclass(frozen=True)
class MergedSource:
    """A source whose adapters are added to the layers they adapt: W + scale * B @ A, in float32."""

    source: WeightSource
    adapters: "AdapterConfig"

    @property
    def origin(self) -> str:
        """Return where the tensors lie."""
        return self.source.origin

    @property
    def layout(self) -> str:
        """Return the kind of files."""
        return f"{self.source.layout}, adapters merged"

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Return the header entries, adapters left out."""
        return {name: info for name, info in self.source.tensors.items() if not is_adapter(name)}

    def stream(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the named tensors; adapted ones in float32."""
        held = self.source.tensors
        down = {adapted_layer(name): name for name in held if ".lora_A." in name}
        pairs = {layer: (a, _partner(a)) for layer, a in down.items()}

        def of_pairs(layer: str) -> int:
            return sum(held[name].nbytes for name in pairs.get(layer, ()))

        for part in in_parts(names, of_pairs, PART_BYTES):
            matrices = [name for layer in part for name in pairs.get(layer, ())]
            kept = {name: tensor.clone() for name, tensor in self.source.stream(matrices)}
            for name, weight in self.source.stream(part):
                if name in pairs:
                    a, b = (kept[matrix].float() for matrix in pairs[name])
                    # In place: the same bits as w + scale * (b @ a), without two copies of it.
                    yield name, (b @ a).mul_(self.adapters.scale(name)).add_(weight)
                else:
                    yield name, weight


def target_layers(transformer: nn.Module, adapters: "AdapterConfig") -> list[str]:
    """Return the names of the layers of ``transformer`` that ``adapters`` are for."""
    return [
        name
        for name, module in transformer.named_modules()
        if isinstance(module, nn.Linear)
        # Of a robot's own, and trained whole.
        and not name.startswith("conditions.")
        and adapters.targets(DIT + name)
    ]


def inject_adapters(transformer: nn.Module, adapters: "AdapterConfig") -> None:
    """Put uninitialized adapters on the layers that ``adapters`` name, in place.

    They have the device and dtype of their layers; the caller fills them.
    """
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.lora import LoraLayer

    targets = target_layers(transformer, adapters)
    if not targets:
        raise CheckpointError(
            f"no layer is what {adapters.source} targets ({preview(adapters.targeted)})"
        )
    config = LoraConfig(
        target_modules=targets, init_lora_weights=False, **adapters.for_each(targets)
    )
    # Made on the meta device: nothing is drawn from the global generator, no memory is taken twice.
    inject_adapter_in_model(config, transformer, low_cpu_mem_usage=True)
    for module in transformer.modules():
        if isinstance(module, LoraLayer):
            weight = module.get_base_layer().weight
            for matrices in (module.lora_A, module.lora_B):
                matrices.to(weight.dtype)
                if weight.device.type != "meta":
                    matrices.to_empty(device=weight.device)


def adapted_layers(network: nn.Module) -> dict[str, nn.Linear]:
    """Return the frozen layers that adapters are added to, by their names in ``network``."""
    from peft.tuners.lora import LoraLayer

    return {
        f"{name}.base_layer": module.get_base_layer()
        for name, module in network.named_modules()
        if isinstance(module, LoraLayer)
    }


def nf4_layers(network: nn.Module) -> dict[str, nn.Linear]:
    """Return those of the adapted layers whose weights can be held in four bits, by name."""
    layers = adapted_layers(network)
    return {name: layer for name, layer in layers.items() if can_be_nf4(layer)}


def trained_with_adapters(name: str) -> bool:
    """Return whether LoRA training changes the tensor of this canonical name."""
    below = name.removeprefix(DIT)
    return is_adapter(name) or below.split(".")[0] in TRAINED_MODULES


def _partner(name: str) -> str:
    return (
        name.replace(".lora_A.", ".lora_B.")
        if ".lora_A." in name
        else name.replace(".lora_B.", ".lora_A.")
    )


ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_STEM = "adapter_model"

_PREFIX = "base_model.model."
_NETWORK = "action_head."


def _regular(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"not a regular expression, {error}") from error
    return pattern


_Pattern = Annotated[str, Field(max_length=1000), AfterValidator(_regular)]
_Names = Annotated[list[Annotated[str, Field(max_length=1000)]], Field(max_length=100_000)]
_Patterns = Annotated[list[_Pattern], Field(max_length=1000)]


class AdapterConfig(BaseModel):
    """How adapters are applied: B @ A times alpha / rank, to which layers.

    Patterns, endings and exceptions mean what they mean to the library peft.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")

    source: str = "config.json"
    """What says so, for messages."""

    root: str = DIT
    """What canonical names have in front of the names that the patterns are compared with."""

    r: int = Field(ge=1, le=4096)
    lora_alpha: float = Field(allow_inf_nan=False)
    target_modules: _Pattern | _Names
    exclude_modules: _Pattern | _Names | None = None
    layers_to_transform: int | list[int] | None = None
    layers_pattern: _Pattern | _Patterns | None = None
    modules_to_save: _Patterns | None = None
    use_rslora: bool = False
    rank_pattern: dict[_Pattern, Annotated[int, Field(ge=1, le=4096)]] | None = None
    alpha_pattern: dict[_Pattern, Annotated[float, Field(allow_inf_nan=False)]] | None = None

    @model_validator(mode="after")
    def _checked(self) -> Self:
        if isinstance(self.target_modules, str) and self.layers_to_transform is not None:
            raise ValueError("layers_to_transform needs a list of target_modules, not a pattern")
        if self.layers_pattern and self.layers_to_transform is None:
            raise ValueError("layers_pattern has no meaning without layers_to_transform")
        return self

    @classmethod
    def of_head(cls, head: HeadConfig) -> Self:
        """Return what ``config.json`` says of its adapters."""
        targets = list(head.lora_target_modules)
        return cls(r=head.lora_rank, lora_alpha=head.lora_alpha, target_modules=targets)

    @property
    def targeted(self) -> list[str]:
        """Return the pattern, or the endings, of the adapted layers."""
        return _listed(self.target_modules)

    @property
    def is_plain(self) -> bool:
        """Return whether one rank, one alpha and name endings say it all, as config.json does."""
        return isinstance(self.target_modules, list) and not (
            self.exclude_modules or self.layers_to_transform is not None or self.use_rslora
            or self.rank_pattern or self.alpha_pattern
        )  # fmt: skip

    def rank(self, layer: str) -> int:
        """Return the rank of the adapter of the canonical ``layer``."""
        return _by_pattern(self.rank_pattern, self._key(layer), self.r)

    def alpha(self, layer: str) -> float:
        """Return the alpha of the adapter of the canonical ``layer``."""
        return _by_pattern(self.alpha_pattern, self._key(layer), self.lora_alpha)

    def scale(self, layer: str) -> float:
        """Return the factor of B @ A of the canonical ``layer``."""
        rank = self.rank(layer)
        return self.alpha(layer) / (math.sqrt(rank) if self.use_rslora else rank)

    def targets(self, layer: str) -> bool:
        """Return whether the canonical ``layer``, a linear one, is to have an adapter."""
        key = self._key(layer)
        saved = self.modules_to_save or ()
        if _is_among(key, self.exclude_modules) or any(
            re.match(rf"(^|.*\.){module}($|\..*)", key) for module in saved
        ):
            return False
        if isinstance(self.target_modules, str):
            return self.target_modules.lower() == _ALL or _is_among(key, self.target_modules)
        if key in self.target_modules:
            return True
        return _is_among(key, self.target_modules) and self._is_in_layers(key)

    def for_each(self, layers: Iterable[str]) -> dict[str, Any]:
        """Return peft's arguments for rank and alpha, with patterns for each of ``layers``.

        Args:
            layers: Names below the transformer.
        """
        names = [] if self.is_plain else list(layers)
        return {
            "r": self.r, "lora_alpha": _whole(self.lora_alpha), "use_rslora": self.use_rslora,
            "rank_pattern": {re.escape(n): self.rank(DIT + n) for n in names},
            "alpha_pattern": {re.escape(n): _whole(self.alpha(DIT + n)) for n in names},
        }  # fmt: skip

    def _key(self, layer: str) -> str:
        return layer.removesuffix(".weight").removeprefix(self.root)

    def _is_in_layers(self, key: str) -> bool:
        wanted = self.layers_to_transform
        if wanted is None or wanted == []:
            return True
        found = None
        if patterns := _listed(self.layers_pattern):
            tried = (re.match(rf"(?:^|.*?\.){p}\.(?P<idx>\d+)\.", key) for p in patterns)
            found = next((match for match in tried if match), None)
        else:
            found = re.match(r".*?\.[^.]*\.(?P<idx>\d+)\.", key)
        return found is not None and int(found["idx"]) in _listed(wanted)


_ALL = "all-linear"


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _is_among(key: str, named: str | list[str] | None) -> bool:
    """Return whether ``key`` fits a pattern, or is or ends in one of several names."""
    if isinstance(named, str):
        return re.fullmatch(named, key) is not None
    return any(f".{key}".endswith(f".{name}") for name in named or ())


def _by_pattern(patterns: Mapping[str, T] | None, key: str, otherwise: T) -> T:
    """Return the value of the first pattern that is, or ends, ``key``."""
    fitting = (v for p, v in (patterns or {}).items() if re.match(rf"(.*\.)?({p})$", key))
    return next(fitting, otherwise)


def _whole(number: float) -> float:
    return int(number) if float(number).is_integer() else number


_ALLOWED: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}
"""Values that leave the weights B @ A away from the base; others change the base or the sum."""

_HARMLESS = {
    "task_type", "inference_mode", "revision", "base_model_name_or_path", "auto_mapping",
    "peft_version", "lora_dropout", "eva_config", "runtime_config",
    # Without use_qalora, and without megatron_config, they mean nothing.
    "qalora_group_size", "megatron_core",
}  # fmt: skip
"""Settings that say nothing of what trained weights are."""


def read_adapter_config(folder: Path, weights: WeightSource) -> AdapterConfig:
    """Return what ``adapter_config.json`` says.

    Every setting that is not known to be harmless must be off: versions of peft to come have
    others, which may change the weights.

    Args:
        folder: It lies there.
        weights: From :func:`open_adapters`.

    Raises:
        CheckpointError: It is damaged, or of adapters of another kind than B @ A with a scale.
    """
    file = folder / ADAPTER_CONFIG
    given = dict(read_json(file, dict[str, Any], CheckpointError))
    given.setdefault("peft_type", None)
    known = _HARMLESS | AdapterConfig.model_fields.keys() - {"source", "root"}
    odd = [
        name
        for name, value in given.items()
        if name not in known and (value not in _ALLOWED[name] if name in _ALLOWED else value)
    ]
    if odd:
        shown = preview((f"{name}={given[name]!r:.60}" for name in odd), 12)
        conversion = (
            "with peft, save_pretrained(..., path_initial_model_for_weight_conversion=...) turns "
            "them into plain ones; or "
            if "init_lora_weights" in odd
            else ""
        )
        raise CheckpointError(
            f"{file} has {shown}; only plain LoRA on unchanged weights is supported: {conversion}"
            "merge the adapters with peft and save the merged weights"
        )
    names = weights.names.values() if isinstance(weights, PartSource) else ()
    whole = any(name.startswith(_PREFIX + _NETWORK) for name in names)
    stated = {"source": str(file), "root": "" if whole else DIT}
    return validated({**given, **stated}, AdapterConfig, str(file), CheckpointError)


def open_adapters(folder: Path) -> PartSource:
    """Return the tensors of ``folder`` under canonical names.

    Raises:
        CheckpointError: No weights, damaged ones, or two of one name.
    """
    pickled = folder / f"{ADAPTER_STEM}.bin"
    source: WeightSource = (
        open_pickled(pickled) if pickled.is_file() else open_safetensors(folder, ADAPTER_STEM)
    )
    refuse_foreign(source.tensors, source.origin)
    found = renamed(source, _canonical)
    if len(found.names) != len(source.tensors):
        raise CheckpointError(f"{source.origin} holds a tensor twice; save the adapters again")
    return PartSource(source=source, layout="adapters in peft's format", names=found.names)


def _canonical(name: str) -> str:
    below = name.removeprefix(_PREFIX)
    return below if below.startswith(_NETWORK) else DIT + below


def adapted_config(config_json: Mapping[str, Any], adapters: AdapterConfig) -> dict[str, Any]:
    """Return config.json of a network that has these adapters.

    Args:
        config_json: Of the network, with other adapters or none.
        adapters: Their description; what config.json has no words for is left to it.
    """
    head = config_json.get("action_head_cfg")
    inner = head.get("config") if isinstance(head, Mapping) else None
    if not isinstance(head, Mapping) or not isinstance(inner, Mapping):
        # No config.json of such a network: its own reader says what is wrong with it.
        return dict(config_json)
    changed: dict[str, Any] = {"train_architecture": "lora"}
    if adapters.is_plain:
        own = inner.get("lora_target_modules")
        if not isinstance(own, str) or set(own.split(",")) != set(adapters.targeted):
            own = ",".join(adapters.targeted)
        changed |= {"lora_rank": adapters.r, "lora_alpha": adapters.lora_alpha}
        changed["lora_target_modules"] = own
    return {**config_json, "action_head_cfg": {**head, "config": {**inner, **changed}}}


def check_only_trained(names: Iterable[str], origin: str) -> None:
    """Raise :class:`CheckpointError` unless there are adapters and nothing but what they need."""
    found = set(names)
    if not any(map(is_adapter, found)):
        raise CheckpointError(
            f"{origin} holds no adapters; peft's format is for those of LoRA training alone"
        )
    if more := {name for name in found if not trained_with_adapters(name)}:
        raise CheckpointError(
            f"{origin} holds more than adapters can: {preview(more)}; write it as a directory"
        )


def short_name(name: str) -> str:
    """Return what this format calls the canonical ``name``."""
    return _PREFIX + name.removeprefix(DIT).replace(".default.weight", ".weight")


def adapter_config(
    adapters: AdapterConfig, names: Iterable[str], base: str | None
) -> dict[str, Any]:
    """Return ``adapter_config.json`` of the adapters ``names``, with all that peft reads.

    Args:
        adapters: How they are applied.
        names: Canonical names of the tensors beside it.
        base: Path or hub id of what they were trained on, if it is known.
    """
    from peft import LoraConfig

    held = set(names)
    below = {name.removeprefix(DIT).split(".")[0] for name in held if not is_adapter(name)}
    layers = sorted(layer.removeprefix(DIT) for layer in adapted_names(held))
    config = LoraConfig(
        # Endings in the order given; where there is more to it, each layer by its name.
        target_modules=list(adapters.targeted) if adapters.is_plain else layers,
        modules_to_save=[module for module in TRAINED_MODULES if module in below] or None,
        base_model_name_or_path=base,
        inference_mode=True,
        **adapters.for_each(layers),
    )
    return {
        # Sets have an order of their own in every process.
        key: sorted(value) if isinstance(value, set) else value
        for key, value in config.to_dict().items()
    }
