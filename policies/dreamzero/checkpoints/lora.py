"""Low-rank adapters on the transformer: merged into the weights, or kept beside them.

docs/model.md, section 1.2.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from dzrobot.documents import read_json
from dzrobot.errors import CheckpointError, preview
from dzrobot.policies.dreamzero.checkpoints.names import (
    DIT,
    adapted_layer,
    adapted_names,
    is_adapter,
)
from dzrobot.policies.dreamzero.checkpoints.sources import (
    PartSource,
    TensorInfo,
    WeightSource,
    open_pickled,
    open_safetensors,
    renamed,
)
from dzrobot.policies.dreamzero.network.config import HeadConfig
from dzrobot.policies.dreamzero.quantize import can_be_nf4

TRAINED_MODULES = ("state_encoder", "action_encoder", "action_decoder", "conditions")
"""Modules of the transformer that are trained whole beside the adapters."""


def adapter_scale(head: HeadConfig) -> float:
    """Return the factor of B @ A."""
    return head.lora_alpha / head.lora_rank


def check_adapters(tensors: Mapping[str, TensorInfo], head: HeadConfig, origin: str) -> None:
    """Check that adapters come in pairs, of the configured rank, for layers that are there.

    Raises:
        CheckpointError: They do not.
    """
    for name in filter(is_adapter, tensors):
        layer, partner = adapted_layer(name), _partner(name)
        if partner not in tensors:
            raise CheckpointError(
                f"{origin} holds {name} without {partner}; save the adapters again"
            )
        if layer not in tensors:
            raise CheckpointError(
                f"{origin} adapts {layer}, which neither it nor its base holds; give the base it "
                "was trained on"
            )
        rank = tensors[name].shape[0 if ".lora_A." in name else -1]
        if rank != head.lora_rank:
            raise CheckpointError(
                f"{origin} holds adapters of rank {rank}, its config.json says "
                f"lora_rank={head.lora_rank}; "
                "use the config.json written with these adapters"
            )


@dataclass(frozen=True)
class MergedSource:
    """A source whose adapters are added to the layers they adapt: W + scale * B @ A, in float32."""

    source: WeightSource
    scale: float

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
        wanted = list(names)
        layers = set(wanted)
        adapters = {
            name
            for name in self.source.tensors
            if is_adapter(name) and adapted_layer(name) in layers
        }
        pieces = {name: tensor.clone() for name, tensor in self.source.stream(adapters)}
        down = {adapted_layer(name): name for name in pieces if ".lora_A." in name}
        for name, weight in self.source.stream(wanted):
            if name in down:
                a, b = pieces[down[name]], pieces[_partner(down[name])]
                yield name, weight.float() + self.scale * (b.float() @ a.float())
            else:
                yield name, weight


def inject_adapters(transformer: nn.Module, head: HeadConfig) -> None:
    """Put uninitialized adapters on the layers that ``head`` names, in place.

    They have the device and dtype of their layers; the caller fills them.
    """
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.lora import LoraLayer

    targets = [
        n
        for n, module in transformer.named_modules()
        if isinstance(module, nn.Linear)
        and _is_target(n, head)
        # Of a robot's own, and trained whole.
        and not n.startswith("conditions.")
    ]
    if not targets:
        raise CheckpointError(
            "no layer's name ends in one of "
            f"lora_target_modules={preview(head.lora_target_modules)}"
        )
    config = LoraConfig(
        r=head.lora_rank,
        lora_alpha=head.lora_alpha,  # type: ignore[arg-type]
        target_modules=targets,
        init_lora_weights=False,
    )  # fmt: skip
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
    below = name.removeprefix("action_head.model.")
    return is_adapter(name) or below.split(".")[0] in TRAINED_MODULES


def _is_target(name: str, head: HeadConfig) -> bool:
    return any(f".{name}".endswith(f".{target}") for target in head.lora_target_modules)


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
_Names = Annotated[list[Annotated[str, Field(max_length=1000)]], Field(max_length=100_000)]


class AdapterConfig(BaseModel):
    """What is read of ``adapter_config.json``; what would change the mathematics is refused."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")

    peft_type: str
    r: int = Field(ge=1, le=4096)
    lora_alpha: float = Field(allow_inf_nan=False)
    target_modules: str | _Names | None = None
    exclude_modules: str | _Names | None = None
    layers_to_transform: int | list[int] | None = None
    use_rslora: bool = False
    use_dora: bool = False
    fan_in_fan_out: bool = False
    lora_bias: bool = False
    bias: str = "none"
    rank_pattern: dict[str, Any] | None = None
    alpha_pattern: dict[str, Any] | None = None


_PLAIN = {
    "peft_type": "LORA", "use_rslora": False, "use_dora": False, "fan_in_fan_out": False,
    "lora_bias": False, "bias": "none",
}  # fmt: skip


def has_adapter_config(folder: Path) -> bool:
    """Return whether ``folder`` holds adapters in this format."""
    return (folder / ADAPTER_CONFIG).is_file()


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Return what ``adapter_config.json`` says.

    Raises:
        CheckpointError: It is damaged, or of adapters of another kind than B @ A with one scale.
    """
    file = folder / ADAPTER_CONFIG
    config = read_json(file, AdapterConfig, CheckpointError)
    given = dict(config)
    odd = [f"{name}={given[name]!r:.40}" for name, plain in _PLAIN.items() if given[name] != plain]
    odd += [name for name in ("rank_pattern", "alpha_pattern") if given[name]]
    if odd:
        raise CheckpointError(
            f"{file} has {preview(odd)}; only plain LoRA of one rank and one alpha is supported: "
            "merge the adapters with peft and save the merged weights"
        )
    return config


def open_adapters(folder: Path) -> PartSource:
    """Return the tensors of ``folder`` under canonical names.

    Raises:
        CheckpointError: No weights, damaged ones, or two of one name.
    """
    pickled = folder / f"{ADAPTER_STEM}.bin"
    source: WeightSource = (
        open_pickled(pickled) if pickled.is_file() else open_safetensors(folder, ADAPTER_STEM)
    )
    found = renamed(source, _canonical)
    if len(found.names) != len(source.tensors):
        raise CheckpointError(f"{source.origin} holds a tensor twice; save the adapters again")
    return PartSource(source=source, layout="adapters in peft's format", names=found.names)


def _canonical(name: str) -> str:
    below = name.removeprefix(_PREFIX)
    return below if below.startswith(_NETWORK) else DIT + below


def adapted_config(
    config_json: Mapping[str, Any], adapters: AdapterConfig, names: Iterable[str]
) -> dict[str, Any]:
    """Return config.json of a network that has these adapters.

    Args:
        config_json: Of the network, with other adapters or none.
        adapters: Their description.
        names: Canonical names of their tensors.
    """
    targets = adapters.target_modules
    if not isinstance(targets, list) or adapters.exclude_modules or adapters.layers_to_transform:
        # Patterns and exceptions: the layers themselves say it without either.
        targets = sorted(layer.removeprefix(DIT) for layer in adapted_names(names))
    head = config_json.get("action_head_cfg")
    inner = head.get("config") if isinstance(head, Mapping) else None
    if not isinstance(head, Mapping) or not isinstance(inner, Mapping):
        # No config.json of such a network: its own reader says what is wrong with it.
        return dict(config_json)
    own = inner.get("lora_target_modules")
    if not isinstance(own, str) or set(own.split(",")) != set(targets):
        own = ",".join(targets)
    changed = {
        "train_architecture": "lora", "lora_rank": adapters.r, "lora_alpha": adapters.lora_alpha,
        "lora_target_modules": own,
    }  # fmt: skip
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


def adapter_config(head: HeadConfig, names: Iterable[str], base: str | None) -> dict[str, Any]:
    """Return ``adapter_config.json`` of the adapters ``names``, with all that peft reads.

    Args:
        head: How they were trained.
        names: Canonical names of the tensors beside it.
        base: Path or hub id of what they were trained on, if it is known.
    """
    from peft import LoraConfig

    alpha = float(head.lora_alpha)
    below = {name.removeprefix(DIT).split(".")[0] for name in names if not is_adapter(name)}
    config = LoraConfig(
        r=head.lora_rank,
        lora_alpha=int(alpha) if alpha.is_integer() else alpha,  # type: ignore[arg-type]
        target_modules=list(head.lora_target_modules),
        modules_to_save=[module for module in TRAINED_MODULES if module in below] or None,
        base_model_name_or_path=base,
        inference_mode=True,
    )
    return {
        # Sets have an order of their own in every process.
        key: sorted(value) if isinstance(value, set) else value
        for key, value in config.to_dict().items()
    }
