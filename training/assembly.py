"""From a checked recipe to the parts of a run: recordings, network, prompts, cost of a sample."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.flop_counter import FlopCounterMode

from dzrobot.policies.dreamzero.checkpoints.fingerprint import fingerprint
from dzrobot.policies.dreamzero.checkpoints.load import build_network
from dzrobot.policies.dreamzero.checkpoints.names import TEXT
from dzrobot.policies.dreamzero.network.config import NetworkConfig
from dzrobot.policies.dreamzero.network.tokenizer import DEFAULT_TOKENIZER, PromptTokenizer
from dzrobot.policies.dreamzero.network.vae import Vae
from dzrobot.policies.dreamzero.network.world_action import WorldActionModel
from dzrobot.training.architecture import SourcePlan, run_network, source_plans
from dzrobot.training.data import ReaderOptions, Selection, SourceSpec, TrainingData
from dzrobot.training.data.lerobot import Catalog
from dzrobot.training.flops import SampleCost, executed_flops, model_flops, sample_shape
from dzrobot.training.parallel import DTYPES, parallelize, shard_frozen
from dzrobot.training.prompts import LivePrompts, Prompts, StoredPrompts, training_prompts
from dzrobot.training.settings import ParallelConfig, SFTConfig
from dzrobot.training.weights import Start, empty_network, fill, load_text_encoder
from dzrobot.training.world import World

TOKENIZER_FOLDER = "tokenizer"

_TEXT_ROW_STEP = 64
_PAD_ROWS = 4


@dataclass(frozen=True)
class Recordings:
    """What is trained on and what is kept for evaluation."""

    train: TrainingData
    held_out: TrainingData | None


def open_recordings(config: SFTConfig, start: Start) -> Recordings:
    """Open every source of ``config``.

    Raises:
        DatasetError: See :meth:`TrainingData.open`.
        StatisticsError: See :meth:`TrainingData.open`.
    """
    plans = source_plans(config)
    count = config.data.holdout_episodes
    options = ReaderOptions(decoder=config.data.video_backend, damaged=config.data.on_corrupt)
    train = TrainingData.open(
        [_spec(plan, start, count) for plan in plans], seed=config.runner.seed, options=options
    )
    if not count:
        return Recordings(train, None)
    kept = [_spec(plan, start, count, held_out=True) for plan in plans]
    return Recordings(train, TrainingData.open(kept, seed=config.runner.seed, options=options))


def _spec(plan: SourcePlan, start: Start, count: int, *, held_out: bool = False) -> SourceSpec:
    """Return a source without the last ``count`` episodes of each folder, or with them alone."""
    metadata = plan.metadata or start.metadata
    assert metadata is not None, "checked before anything was opened"
    embodiment = plan.embodiment
    if held_out:
        # Errors are measured against what was recorded, not against repeated rows.
        timing = replace(embodiment.timing, pad_tail=False)
        embodiment = replace(embodiment, timing=timing)
    last = [_last_episodes(path, count) for path in plan.paths]
    return SourceSpec(
        paths=plan.paths, embodiment=embodiment, metadata=metadata, weight=plan.weight,
        distribute_weights=plan.distribute_weights,
        selections=[
            Selection(only=episodes) if held_out else Selection(without=episodes)
            for episodes in last
        ],
    )  # fmt: skip


def _last_episodes(path: str, count: int) -> frozenset[int]:
    return frozenset(Catalog.open(path).episodes.index[-count:].tolist() if count else ())


def network_config(config: SFTConfig, start: Start) -> NetworkConfig:
    """Return the network of the run; of sources with unlike horizons it has the longest."""
    longest = max(source_plans(config), key=lambda plan: plan.embodiment.timing.action_horizon)
    return run_network(start.base, config.model, longest.embodiment)


def tokenizer_path(config: SFTConfig, start: Start) -> str:
    """Return the tokenizer given, else the one beside the checkpoint, else the published one."""
    if config.model.tokenizer_path is not None:
        return config.model.tokenizer_path
    beside = None if start.folder is None else start.folder / TOKENIZER_FOLDER
    return str(beside) if beside is not None and beside.is_dir() else DEFAULT_TOKENIZER


def build_prompts(
    config: SFTConfig, network: NetworkConfig, start: Start, recordings: Recordings, world: World
) -> StoredPrompts | None:
    """Encode, shared over the processes, what is not on disk; None where prompts are live."""
    if not config.model.cache_prompts:
        return None
    source, text_len = start.source, network.dit.text_len
    names = [name for name in source.tensors if name.startswith(TEXT)]
    tokenizer = PromptTokenizer(tokenizer_path(config, start), text_len=text_len)
    dtype = DTYPES[config.parallel.param_dtype]
    key = f"{fingerprint(source, names)}/{text_len}/{dtype}/{tokenizer_path(config, start)}"
    folder = config.runner.output_dir / "prompts" / hashlib.sha256(key.encode()).hexdigest()[:16]
    stored = StoredPrompts(folder, text_len)
    stored.open()
    wanted = recording_prompts(recordings)
    mine = stored.missing(wanted)[world.rank :: world.size]
    # Everyone looks before anyone writes, else the shares would overlap.
    dist.barrier(group=world.host_group)
    if mine:
        encoder = load_text_encoder(network.text, source, world.device, dtype)
        stored.add(mine, encoder, tokenizer)
        del encoder
        if world.device.type == "cuda":
            torch.cuda.empty_cache()
    dist.barrier(group=world.host_group)
    stored.open()
    return stored


def recording_prompts(recordings: Recordings) -> list[str]:
    """Return every prompt of training and held-out recordings, sorted."""
    parts = [recordings.train, recordings.held_out]
    return sorted(
        {prompt for data in parts if data is not None for prompt in training_prompts(data)}
    )


def lay_out(
    config: SFTConfig, network: NetworkConfig, start: Start, world: World
) -> tuple[WorldActionModel, DeviceMesh]:
    """Return the network on its devices: masters in float32, frozen parts in the compute dtype.

    Raises:
        CheckpointError: The weights are not those of the network.
    """
    model = empty_network(
        network, is_lora=config.model.is_lora, text_encoder=not config.model.cache_prompts
    )
    compute = DTYPES[config.parallel.param_dtype]
    for parameter in model.parameters():
        # Only what is updated needs more digits than it is used with.
        parameter.data = parameter.data.to(torch.float32 if parameter.requires_grad else compute)
    for name, buffer in model.named_buffers():
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner).register_buffer(leaf, buffer.to(compute))
    mesh = parallelize(model.model, model.model.blocks, config.parallel, world)
    if (
        model.text_encoder is not None
        and world.size > 1
        and config.parallel.strategy in ("fsdp", "hsdp")
    ):
        shard_frozen(model.text_encoder, list(model.text_encoder.stack.block), mesh)
    offloaded = torch.device("cpu") if config.parallel.cpu_offload else world.device
    for name, child in model.named_children():
        child.to_empty(device=offloaded if name == "model" else world.device)
    fill(model, start, config.runner.seed)
    return model, mesh


def choose_prompts(
    config: SFTConfig, model: WorldActionModel, start: Start, stored: StoredPrompts | None
) -> Prompts:
    """Return where the embeddings of a batch come from."""
    if stored is not None:
        return stored
    path = tokenizer_path(config, start)
    return LivePrompts(model, PromptTokenizer(path, text_len=model.config.dit.text_len))


def sample_cost(
    config: SFTConfig, network: NetworkConfig, image_size: tuple[int, int], longest_prompt: int
) -> SampleCost:
    """Return the operations of one sample as this run computes it.

    Args:
        config: Says what is recomputed and whether prompts are encoded in every step.
        network: The network of the run.
        image_size: (height, width) in pixels of the tiled picture.
        longest_prompt: Prompt rows that are not padding.
    """
    shape = sample_shape(network.dit, network.head.num_frames, network.vae.temporal_stride)
    rows = -(-(longest_prompt + _PAD_ROWS) // _TEXT_ROW_STEP) * _TEXT_ROW_STEP
    executed = executed_flops(network.dit, shape, min(rows, network.dit.text_len))
    return SampleCost(
        model_forward=model_flops(network.dit, shape),
        executed_forward=executed,
        encoders=encoder_flops(
            network, image_size, 0 if config.model.cache_prompts else longest_prompt
        ),
        recomputed_share=recomputed_share(config.parallel, network.dit.num_layers),
    )


def recomputed_share(parallel: ParallelConfig, layers: int) -> float:
    """Return the share of the forward pass's matrix products that the backward pass runs again."""
    if parallel.activation_checkpointing != "full":
        return 0.0
    return (layers - min(parallel.kept_blocks, layers)) / layers


def encoder_flops(network: NetworkConfig, image_size: tuple[int, int], prompt_tokens: int) -> float:
    """Return the operations of the frozen encoders for one sample.

    Pictures are counted on a run without memory; ``prompt_tokens`` is 0 where embeddings are
    stored.
    """
    model = build_network(network, text_encoder=False)
    height, width = network.target_size or image_size
    clips = 2 if network.dit.concat_first_frame_latent else 1
    text = network.text
    layer = 4 * text.dim * text.dim_attn + 3 * text.dim * text.dim_ffn
    scores = 2 * prompt_tokens * text.dim_attn
    with torch.device("meta"):
        frame = torch.empty(1, 3, height, width)
    return float(
        clips * _clip_flops(model.vae, frame, network.head.num_frames)
        + _count(partial(model.image_encoder, frame))
        + 2 * text.num_layers * prompt_tokens * (layer + scores)
    )


def _clip_flops(vae: Vae, frame: torch.Tensor, frames: int) -> int:
    """Return the cost of encoding a clip: from the third chunk on, all cost the same."""
    stride = vae.config.temporal_stride
    clips = [frame[:, :, None].expand(-1, -1, n, -1, -1) for n in (1 + stride, 1 + 2 * stride)]
    short, long = (_count(partial(vae.encode, clip)) for clip in clips)
    return short + (frames // stride - 1) * (long - short)


def _count(run: Callable[[], object]) -> int:
    with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops())


def export_folder(output_dir: Path, step: int) -> Path:
    """Return where the checkpoint of ``step`` is exported to."""
    return output_dir / "export" / f"step_{step:08d}"
