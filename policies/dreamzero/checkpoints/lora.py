"""Low-rank adapters on the transformer: merged into the weights, or kept beside them.

docs/model.md, section 1.2.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, nn

from dzrobot.errors import CheckpointError, preview
from dzrobot.policies.dreamzero.checkpoints.names import adapted_layer, is_adapter
from dzrobot.policies.dreamzero.checkpoints.sources import TensorInfo, WeightSource
from dzrobot.policies.dreamzero.network.config import HeadConfig

TRAINED_MODULES = ("state_encoder", "action_encoder", "action_decoder")
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
        adapters = {
            name
            for name in self.source.tensors
            if is_adapter(name) and adapted_layer(name) in set(wanted)
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
        if isinstance(module, nn.Linear) and _is_target(n, head)
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
