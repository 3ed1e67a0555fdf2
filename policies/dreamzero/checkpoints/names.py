"""The names of tensors in files: every published spelling, reduced to one.

Inside this package a tensor is called what the official full checkpoints call it
(``action_head.model.blocks.0...``); adapters are called ``<layer>.lora_A.default.weight``.
docs/model.md, sections 1.2 and 1.3.
"""

import re
from collections.abc import Iterable
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from dzrobot.errors import CheckpointError, preview

DIT = "action_head.model."
TEXT = "action_head.text_encoder."
IMAGE = "action_head.image_encoder.model."
VAE = "action_head.vae.model."
PREFIXES = {"transformer": DIT, "text encoder": TEXT, "image encoder": IMAGE, "autoencoder": VAE}
"""The parts of a network and how the names of their tensors begin."""

CONDITIONS = DIT + "conditions."
"""How the names of tensors begin that belong to modalities of a robot's own."""

_PEFT_INFIX = "base_model.model."
_WRAPPERS = frozenset(
    {
        # torch.compile, DDP and DeepSpeed, FSDP1 (two spellings), activation checkpointing,
        # Lightning, accelerate's pipeline.
        "_orig_mod", "module", "_fsdp_wrapped_module", "_fpw_module",
        "_checkpoint_wrapped_module", "_forward_module",
    }
)  # fmt: skip
"""What programs around a network add to names, in front or inside, in any order."""

_FRONT = re.compile(r"^(?:model\.|policy\.)+(?=action_head\.)")
"""What holds a whole network as one of its parts."""

_KOHYA = re.compile(r"^lora_(?:unet|te\d?|transformer)_")
_DOWN_UP = re.compile(r"\.lora_?(?:down|up)\.weight$|\.lora\.(?:down|up)\.weight$")
_DIFFUSERS = re.compile(r"^(?:diffusion_model|transformer|unet|text_encoder)\.")
_NAMELESS_ADAPTER = re.compile(r"\.lora_([AB])\.weight$")
_ADAPTER = re.compile(r"\.lora_[AB]\.default\.weight$")


MOST_TENSORS = 100_000
"""Tensors of one checkpoint; the largest we know has under 2,000."""


class ShardIndex(BaseModel):
    """``*.safetensors.index.json``: which file each tensor lies in."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")

    weight_map: Annotated[
        dict[str, Annotated[str, Field(max_length=255, pattern=r"^[^/\x00]+$")]],
        Field(max_length=MOST_TENSORS),
    ]


def canonical(name: str) -> str:
    """Return the one name used here for a tensor that a file calls ``name``.

    Drops what compilers, parallel wrappers and adapter libraries add, in front or inside:
    ``_orig_mod.``, ``module.``, ``base_model.model.``, ``.base_layer``.
    """
    if not _WRAPPERS.isdisjoint(parts := name.split(".")):
        name = ".".join(part for part in parts if part not in _WRAPPERS)
    name = _FRONT.sub("", name)
    name = name.replace(DIT + _PEFT_INFIX, DIT).replace(".base_layer.", ".")
    return _NAMELESS_ADAPTER.sub(r".lora_\1.default.weight", name)


def canonical_table(names: Iterable[str], origin: str) -> dict[str, str]:
    """Return canonical name -> name in the file.

    Raises:
        CheckpointError: Two names in the file stand for the same tensor.
    """
    table: dict[str, str] = {}
    for name in names:
        clean = canonical(name)
        if clean in table:
            raise CheckpointError(
                f"{origin} holds the tensor {clean} twice, as {table[clean]!r} and as {name!r}; "
                "write the checkpoint again from one consistent state dict"
            )
        table[clean] = name
    return table


def is_adapter(name: str) -> bool:
    """Return whether the canonical ``name`` is that of a LoRA matrix."""
    return _ADAPTER.search(name) is not None


def adapted_layer(name: str) -> str:
    """Return the canonical name of the weight that the LoRA matrix ``name`` changes."""
    return _ADAPTER.sub(".weight", name)


def adapted_names(names: Iterable[str]) -> frozenset[str]:
    """Return the canonical names, without ``.weight``, of the layers that ``names`` adapt."""
    return frozenset(
        adapted_layer(name).removesuffix(".weight") for name in names if is_adapter(name)
    )


def conditions_of(names: Iterable[str]) -> frozenset[str]:
    """Return the state parts, by key, whose encoders the canonical ``names`` belong to."""
    below = (name.removeprefix(CONDITIONS) for name in names if name.startswith(CONDITIONS))
    return frozenset(f"state.{name.partition('.')[0]}" for name in below)


def without_conditions(name: str) -> str | None:
    """Return the canonical ``name``; None where it belongs to a modality of a robot's own."""
    return None if name.startswith(CONDITIONS) else name


def peft_name(name: str, adapted: frozenset[str]) -> str:
    """Return what a published checkpoint calls the canonical ``name``.

    Args:
        name: Canonical name.
        adapted: From :func:`adapted_names`; empty for a checkpoint without adapters.
    """
    if not adapted or not name.startswith(DIT):
        return name
    below = name.removeprefix(DIT)
    layer, _, leaf = name.rpartition(".")
    if layer in adapted:
        below = f"{layer.removeprefix(DIT)}.base_layer.{leaf}"
    return DIT + _PEFT_INFIX + below


def check_part_names(names: Iterable[str], origin: str) -> None:
    """Raise :class:`CheckpointError` unless some of ``names`` are those of a DreamZero network."""
    found = list(names)
    refuse_foreign(found, origin)
    if not any(name.startswith("action_head.") for name in found):
        raise CheckpointError(
            f"{origin} holds no tensor named action_head.* (it holds {preview(found)}); "
            "give a DreamZero checkpoint, or the Wan component files as a cold start"
        )


def refuse_foreign(names: Iterable[str], origin: str) -> None:
    """Raise :class:`CheckpointError` for adapters in the naming of other programs."""
    found = list(names)
    lora = [name for name in found if "lora" in name]
    kohya = [n for n in lora if _KOHYA.search(n) or _DOWN_UP.search(n)]
    diffusers = [n for n in lora if _DIFFUSERS.search(n)]
    program, shown = ("kohya", kohya) if kohya else ("diffusers", diffusers)
    if shown:
        raise CheckpointError(
            f"{origin} holds LoRA matrices in the naming of {program} ({preview(shown, 2)}); only "
            "peft's is read (base_model.model.<layer>.lora_A.weight): load them into the model "
            "with the program that made them, and save with peft's save_pretrained, or save the "
            "merged weights"
        )
    if flat := [name for name in found if name.endswith("_flat_param")]:
        raise CheckpointError(
            f"{origin} holds flat parameters of FSDP1 ({preview(flat, 2)}), without the shapes of "
            "the weights in them; save again with StateDictType.FULL_STATE_DICT"
        )
