"""Tiny random checkpoints in the official layout, for tests and demonstrations.

Only sizes are small; every structure of the real networks is there. The numbers are noise: a policy
made from them moves the robot at random.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import yaml
from torch import Tensor

from dzrobot.code_identity import package_code
from dzrobot.embodiments.spec import Embodiment, Part
from dzrobot.embodiments.templates import PROMPTS
from dzrobot.errors import find
from dzrobot.modality.stats import Statistics
from dzrobot.policies.dreamzero.checkpoints.directory import (
    CONFIG_FILE,
    METADATA_FILE,
    TOKENIZER_FOLDER,
    TRAINING_FILE,
)
from dzrobot.policies.dreamzero.checkpoints.load import expected_shapes
from dzrobot.policies.dreamzero.checkpoints.passport import passport_for, write_passport
from dzrobot.policies.dreamzero.checkpoints.shards import (
    SHARD_BYTES,
    ShardOptions,
    write_json,
    write_weights,
    written_whole,
)
from dzrobot.policies.dreamzero.checkpoints.sources import RandomInitSource, WeightSource
from dzrobot.policies.dreamzero.network.config import (
    DiTConfig,
    HeadConfig,
    ImageConfig,
    NetworkConfig,
    TextConfig,
    VaeConfig,
)

Variant = Literal["5b", "14b"]

_VOCABULARY = 768
_WIDTH = 32
_LATENTS = 4
_TASKS = (
    "pick up the red block and place it in the bowl", "open the top drawer of the cabinet", "turn "
    "on the stove",
    "put both moka pots on the stove", "lift the cube", "push the plate to the front of the table",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TinyOptions:
    """What the tiny checkpoint looks like."""

    variant: Variant = "5b"
    """Network it imitates: ``5b`` (ti2v, Wan 2.2 VAE) or ``14b`` (i2v, Wan 2.1 VAE)."""

    seed: int = 0
    """Seed of weights and statistics."""

    dtype: torch.dtype = torch.bfloat16
    """Dtype of the stored weights; the published ones are bfloat16."""

    shard_bytes: int = SHARD_BYTES
    """Largest weight file; small values give many shards and an index."""

    with_passport: bool = False
    """Whether to write a passport; published checkpoints have none."""


def tiny_config(variant: str, embodiment: Embodiment) -> NetworkConfig:
    """Return the config of a tiny network of ``variant`` that fits ``embodiment``."""
    vae = find(
        {
            "5b": VaeConfig(version="2.2", dim=4, dec_dim=4, z_dim=_LATENTS),
            "14b": VaeConfig(version="2.1", dim=4, z_dim=_LATENTS),
        },
        "tiny variant", variant,
    )  # fmt: skip
    ti2v, height, width = variant == "5b", 32, 64
    horizon = embodiment.timing.action_horizon
    return NetworkConfig(
        dit=DiTConfig(
            model_type="ti2v" if ti2v else "i2v",
            dim=64, ffn_dim=96, freq_dim=32, num_heads=4, num_layers=2, hidden_size=_WIDTH,
            in_dim=_LATENTS if ti2v else 2 * _LATENTS + 4, out_dim=_LATENTS,
            concat_first_frame_latent=not ti2v,
            text_dim=_WIDTH, text_len=128, clip_dim=_WIDTH,
            frame_seqlen=(height // vae.spatial_stride // 2) * (width // vae.spatial_stride // 2),
            num_frame_per_block=len(embodiment.timing.frame_offsets) // vae.temporal_stride,
            num_action_per_block=horizon,
        ),
        text=TextConfig(
            vocab=_VOCABULARY, dim=_WIDTH, dim_attn=_WIDTH, dim_ffn=48, num_heads=4, num_layers=2
        ),
        image=ImageConfig(vision_dim=_WIDTH, vision_heads=2, vision_layers=3, embed_dim=16),
        vae=vae,
        head=HeadConfig(
            action_horizon=horizon, num_frames=embodiment.timing.frames,
            target_video_height=height, target_video_width=width,
        ),
    )  # fmt: skip


def write_tiny_checkpoint(
    target: Path, embodiment: Embodiment, options: TinyOptions | None = None
) -> Path:
    """Write a tiny random checkpoint for ``embodiment`` to the new folder ``target``; returns it.

    It holds what a published one does, and a tokenizer in ``tokenizer/``; ``options`` say which
    variant, dtype and seed.

    Raises:
        CheckpointError: ``target`` exists already.
    """
    options = options or TinyOptions()
    config = tiny_config(options.variant, embodiment)
    recipe = {"recipe": "random weights", "seed": options.seed}
    content = NewCheckpoint(
        config=config, metadata=tiny_metadata(embodiment, options.seed),
        weights=TinyWeightsSource(expected_shapes(config), options.seed, options.dtype),
        recipe=recipe if options.with_passport else None,
        shards=ShardOptions(shard_bytes=options.shard_bytes),
    )  # fmt: skip
    return write_new_checkpoint(target, embodiment, content)


@dataclass(frozen=True, kw_only=True)
class NewCheckpoint:
    """The content of a checkpoint whose tokenizer is made from the prompts."""

    config: NetworkConfig
    metadata: Mapping[str, Any]
    """Statistics, as ``metadata.json`` holds them."""

    weights: WeightSource
    """Every tensor under its official name."""

    recipe: Mapping[str, Any] | None
    """How the weights were made, for the passport; None: no passport."""

    prompts: Sequence[str] = ()
    """What the tokenizer is made from besides, so that their words are not strings of letters."""

    shards: ShardOptions = field(default_factory=ShardOptions)


def write_new_checkpoint(target: Path, embodiment: Embodiment, content: NewCheckpoint) -> Path:
    """Write a small checkpoint in the official layout to the new folder ``target``; returns it.

    Raises:
        CheckpointError: ``target`` exists already.
        StatisticsError: The statistics do not fit the embodiment.
    """
    statistics = Statistics.from_metadata(content.metadata, embodiment)
    with written_whole(target) as folder:
        (folder / METADATA_FILE).parent.mkdir(parents=True)
        write_weights(folder, content.weights, content.shards)
        write_json(folder / CONFIG_FILE, content.config.to_dict())
        write_json(folder / METADATA_FILE, content.metadata)
        training = training_config(embodiment, per_step=statistics.per_step)
        (folder / TRAINING_FILE).write_text(yaml.safe_dump(training), encoding="utf-8")
        write_tiny_tokenizer(folder / TOKENIZER_FOLDER, embodiment, content.prompts)
        if content.recipe is not None:
            recipe = dict(content.recipe)
            passport = passport_for(embodiment, statistics, content.config, recipe=recipe)
            write_passport(folder, replace(passport, code=(package_code(),)))
    return target


class TinyWeightsSource(RandomInitSource):
    """Random weights that keep activations near unit size."""

    origin = "random weights"
    key = ""

    def draw(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return the tensor ``name``."""
        noise = torch.randn(shape, generator=generator)
        leaf = name.rpartition(".")[2]
        if leaf == "gamma" or (leaf == "weight" and len(shape) == 1):
            return 1 + 0.1 * noise
        if leaf in ("bias", "b") or len(shape) < 2:
            return 0.05 * noise
        fan_in = shape[-2] if leaf == "W" else torch.Size(shape[1:]).numel()
        return noise / math.sqrt(fan_in)


def tiny_metadata(embodiment: Embodiment, seed: int = 0) -> dict[str, Any]:
    """Return a metadata.json with plausible statistics; actions lie within [-1, 1]."""
    rng = np.random.default_rng([seed, 7])
    kinds = {"state": (embodiment.state, 2.0), "action": (embodiment.action, 0.9)}
    statistics = {
        kind: {part.name: _statistics(part, scale, rng) for part in parts}
        for kind, (parts, scale) in kinds.items()
    }
    modalities: dict[str, Any] = {
        kind: {
            part.name: {
                "absolute": True,
                "rotation_type": None,
                "shape": [part.dim],
                "continuous": True,
            }
            for part in parts
        }
        for kind, (parts, _) in kinds.items()
    }
    modalities["video"] = {
        view.name: {
            "resolution": [view.resolution[1], view.resolution[0]], "channels": 3,
            "fps": float(embodiment.timing.control_hz),
        }
        for view in embodiment.views
    }  # fmt: skip
    entry = {"statistics": statistics, "modalities": modalities, "embodiment_tag": embodiment.tag}
    return {embodiment.tag: entry}


def _statistics(part: Part, scale: float, rng: np.random.Generator) -> dict[str, list[float]]:
    low, high = -scale * rng.uniform(0.5, 1.0, part.dim), scale * rng.uniform(0.5, 1.0, part.dim)
    columns = {
        "min": low * 1.1, "max": high * 1.1, "q01": low, "q99": high,
        "mean": (low + high) / 2, "std": (high - low) / 4,
    }  # fmt: skip
    return {name: [round(float(value), 6) for value in column] for name, column in columns.items()}


def training_config(embodiment: Embodiment, *, per_step: bool) -> dict[str, Any]:
    """Return what a published training config says on how the weights are to be used.

    Args:
        embodiment: The robot.
        per_step: As of ``Statistics``.
    """
    names = [key.removeprefix("action.") for key in embodiment.relative_keys]
    size = list(embodiment.views[0].size)
    return {
        "model": {"_target_": "groot.vla.model.dreamzero.base_vla.VLA"},
        "save_lora_only": False,
        "eval_bf16": True,
        "relative_action": bool(names),
        "relative_action_per_horizon": per_step,
        "relative_action_keys": names,
        "tokenizer_path": "google/umt5-xxl",
        "transforms": {embodiment.tag: [
            {"_target_": "VideoCrop", "scale": embodiment.crop_scale},
            {"_target_": "VideoResize", "height": size[0], "width": size[1]},
            {"_target_": "ConcatTransform", "video_concat_order": list(embodiment.video_keys),
             "state_concat_order": list(embodiment.state_keys),
             "action_concat_order": list(embodiment.action_keys)},
        ]},
        "modality_configs": {embodiment.tag: {
            "video": {"modality_keys": list(embodiment.video_keys)},
            "state": {"modality_keys": list(embodiment.state_keys)},
            "action": {"modality_keys": list(embodiment.action_keys)},
            "language": {"modality_keys": [embodiment.language]},
        }},
    }  # fmt: skip


def write_tiny_tokenizer(folder: Path, embodiment: Embodiment, prompts: Sequence[str] = ()) -> None:
    """Write a byte-level tokenizer made from the prompts; any text can be encoded with it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY, special_tokens=["<pad>", "</s>", "<unk>"], show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    tokenizer.train_from_iterator([*_sentences(embodiment), *prompts], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>",
    )  # fmt: skip
    fast.save_pretrained(folder)


def _sentences(embodiment: Embodiment) -> Sequence[str]:
    templates = dict.fromkeys([embodiment.prompt, *PROMPTS.values()])
    return [
        embodiment.negative_prompt,
        *(t.format(task=task) for t in templates for task in _TASKS),
    ]
