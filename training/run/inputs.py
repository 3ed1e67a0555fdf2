"""What the network is given for a batch of the loader: images, prompts, and keyed noise.

Random numbers depend on what they are for, never on which process draws them.

Outputs of the frozen encoders are computed once and kept on disk: prompt embeddings, image latents.
There are few instructions and many samples. Encoding each instruction once frees the prompt
encoder, which is as large as the 5B transformer, and saves its share of every step. Without
augmentation the images of a sample never change either, and a small network spends more time on
decoding and encoding them than on what it learns; an interrupted pass over them resumes.
"""

import hashlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from rich.console import Console
from safetensors import safe_open
from torch import Tensor

from dzrobot.errors import DatasetError
from dzrobot.files import explained, move
from dzrobot.modality.video import AugmentConfig
from dzrobot.modality.window import prompt_of
from dzrobot.policies.dreamzero.checkpoints.checksums import fingerprint
from dzrobot.policies.dreamzero.checkpoints.load import filled_text_encoder, text_weights
from dzrobot.policies.dreamzero.checkpoints.names import TEXT
from dzrobot.policies.dreamzero.checkpoints.shards import save_tensors
from dzrobot.policies.dreamzero.checkpoints.sources import StateDictSource, WeightSource
from dzrobot.policies.dreamzero.network.config import NetworkConfig, TextConfig
from dzrobot.policies.dreamzero.network.diffusion import (
    DiffusionNoise,
    NoiseShape,
    draw_given,
    draw_noise,
)
from dzrobot.policies.dreamzero.network.prompt import PromptEmbedding, PromptTokenizer, TextEncoder
from dzrobot.policies.dreamzero.network.world_action import (
    EncodedImages,
    PreparedBatch,
    TrainBatch,
    WorldActionModel,
)
from dzrobot.progress import progress_bar
from dzrobot.rng import torch_seed
from dzrobot.training.data import (
    CollatedBatch,
    LoaderOptions,
    SampleKey,
    TrainingData,
    encode_views,
    read_batches,
)
from dzrobot.training.run.parallel import DistributedEnvironment
from dzrobot.training.sft_config import ModelConfig, SFTConfig

_FILES = "*.safetensors"


class Prompts(Protocol):
    """Turns prompts into embeddings."""

    def embed(self, prompts: Sequence[str], device: torch.device) -> PromptEmbedding:
        """Return the embeddings of ``prompts`` on ``device``."""
        ...

    def lengths(self, prompts: Sequence[str]) -> list[int]:
        """Return the tokens of each prompt that are not padding; no other process takes part."""
        ...


@dataclass(frozen=True)
class PromptEncoder:
    """Encodes every batch; collective where the encoder is sharded."""

    network: WorldActionModel
    tokenizer: PromptTokenizer

    def embed(self, prompts: Sequence[str], device: torch.device) -> PromptEmbedding:
        """Return the embeddings of ``prompts`` on ``device``."""
        ids, mask = self.tokenizer(prompts)
        found = self.network.embed_prompts(ids, mask)
        return replace(found, rows_BNE=found.rows_BNE.to(device))

    def lengths(self, prompts: Sequence[str]) -> list[int]:
        """Return the tokens of each prompt that are not padding."""
        return [int(length) for length in self.tokenizer(prompts)[1].sum(dim=1)]


def training_prompts(data: TrainingData) -> list[str]:
    """Return every prompt that a sample of ``data`` can carry, sorted."""
    found = set()
    for source in data.sources:
        robot = source.spec.embodiment
        for reader in source.readers:
            texts = {
                text
                for column in reader.resolution.texts
                for text in reader.columns.texts[column.column]
            }
            found |= {prompt_of(text, robot) for text in texts if text.strip()}
    return sorted(found)


class StoredPrompts:
    """Embeddings in memory-mapped files; each is only as long as its prompt."""

    def __init__(self, folder: Path, text_len: int) -> None:
        self._folder = folder
        self._text_len = text_len
        self._found: dict[str, Any] = {}

    def open(self) -> None:
        """List what the folder holds; to be called again after something was added."""
        for path in sorted(self._folder.glob(_FILES)):
            handle = safe_open(path, framework="pt", device="cpu")
            self._found |= dict.fromkeys(_names(handle), handle)

    def missing(self, prompts: Iterable[str]) -> list[str]:
        """Return those of ``prompts`` that the folder does not hold, in order."""
        return [prompt for prompt in prompts if _prompt_key(prompt) not in self._found]

    def add(self, prompts: Sequence[str], encoder: TextEncoder, tokenizer: PromptTokenizer) -> None:
        """Encode ``prompts`` into a new file, each alone: neighbors must not change it."""
        if not prompts:
            return
        device = next(encoder.parameters()).device
        rows: dict[str, Tensor] = {}
        for prompt in prompts:
            ids, mask = tokenizer([prompt])
            length = int(mask.sum())
            with torch.no_grad():
                rows[_prompt_key(prompt)] = (
                    encoder(ids.to(device), mask.to(device))[0, :length].cpu().contiguous()
                )
        with explained(f"write prompts to {self._folder}", DatasetError):
            self._folder.mkdir(parents=True, exist_ok=True)
            # Named after what is in it: what a killed run left is written anew, not left behind.
            name = hashlib.sha256("".join(sorted(rows)).encode()).hexdigest()[:32]
            temporary = self._folder / f"{name}.writing"
            save_tensors(rows, temporary)
            move(temporary, temporary.with_suffix(".safetensors"))

    def embed(self, prompts: Sequence[str], device: torch.device) -> PromptEmbedding:
        """Return the embeddings of ``prompts`` on ``device``.

        Raises:
            DatasetError: A prompt that was not there when the run started.
        """
        if unknown := self.missing(prompts):
            raise DatasetError(
                f"no embedding of the prompt {unknown[0]!r}: the dataset changed since the run "
                "started; start it again"
            )
        parts = [
            self._found[_prompt_key(prompt)].get_tensor(_prompt_key(prompt)) for prompt in prompts
        ]
        rows = parts[0].new_zeros(len(parts), self._text_len, parts[0].shape[1])
        for row, part in zip(rows, parts, strict=True):
            row[: len(part)] = part
        moved = rows.pin_memory() if device.type == "cuda" else rows
        return PromptEmbedding(
            moved.to(device, non_blocking=True), tuple(len(part) for part in parts)
        )

    def lengths(self, prompts: Iterable[str]) -> list[int]:
        """Return the tokens of each prompt that are not padding."""
        return [
            self._found[_prompt_key(prompt)].get_slice(_prompt_key(prompt)).get_shape()[0]
            for prompt in prompts
        ]

    def longest(self, prompts: Iterable[str]) -> int:
        """Return the rows of the longest of ``prompts``."""
        return max(self.lengths(prompts))


def _names(handle: Any) -> list[str]:
    """Return the names in a mapped file, which is not a mapping."""
    return list(handle.keys())


def _prompt_key(prompt: str) -> str:
    return hashlib.sha256(prompt.encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class PromptEncoding:
    """What an embedding depends on beside the prompt."""

    network: NetworkConfig
    weights: WeightSource
    tokenizer: str
    """Folder or hub id."""

    dtype: torch.dtype

    @property
    def key(self) -> str:
        """Return a name that changes with the embeddings."""
        names = [name for name in self.weights.tensors if name.startswith(TEXT)]
        encoder = fingerprint(self.weights, names)
        key = f"{encoder}/{self.network.dit.text_len}/{self.dtype}/{self.tokenizer}"
        return hashlib.sha256(key.encode()).hexdigest()[:16]


def precompute_prompts(
    prompts: Sequence[str], encoding: PromptEncoding, parent: Path, world: DistributedEnvironment
) -> StoredPrompts:
    """Encode the prompts that are not on disk yet, shared over the processes. Collective.

    Args:
        prompts: Every prompt that a sample can carry, in the same order everywhere.
        encoding: Encoder, weights and tokenizer.
        parent: Folder of all embeddings of the run; all processes must see it.
        world: The processes.
    """
    network = encoding.network
    tokenize = PromptTokenizer(encoding.tokenizer, text_len=network.dit.text_len)
    stored = StoredPrompts(parent / encoding.key, network.dit.text_len)
    stored.open()
    mine = stored.missing(prompts)[world.rank :: world.size]
    # All processes look up what is missing before any of them writes, else shares would overlap.
    dist.barrier(group=world.host_group)
    if mine:
        encoder = load_text_encoder(network.text, encoding.weights, world.device, encoding.dtype)
        stored.add(mine, encoder, tokenize)
        del encoder
        if world.device.type == "cuda":
            torch.cuda.empty_cache()
    dist.barrier(group=world.host_group)
    stored.open()
    return stored


def load_text_encoder(
    config: TextConfig, source: WeightSource, device: torch.device, dtype: torch.dtype
) -> TextEncoder:
    """Return the frozen prompt encoder alone."""
    with torch.device("meta"):
        encoder = TextEncoder(config).to(dtype)
    return filled_text_encoder(encoder, text_weights(source), device)


_log = logging.getLogger(__name__)

_DONE = "done"
_ENCODERS = ("vae.coder.encoder.", "vae.coder.quant_conv.", "image_encoder.")


class StoredLatents:
    """Encoded images of every sample, in memory-mapped files."""

    def __init__(self, folder: Path, samples: int) -> None:
        self._folder = folder
        self._samples = samples
        self._arrays: dict[str, NDArray[Any]] = {}

    def missing(self) -> list[int]:
        """Return the samples that are not stored, in order."""
        if not (self._folder / f"{_DONE}.npy").exists():
            return list(range(self._samples))
        return np.flatnonzero(~self._map(_DONE)).tolist()

    def create(self, example: EncodedImages) -> None:
        """Make the files, each row as in ``example``."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for name, values in example.tensors().items():
            shape = (self._samples, *values.shape[1:])
            np.lib.format.open_memmap(self._path(name), "w+", np.float32, shape).flush()
        # Last: with this file there, the others are whole.
        np.lib.format.open_memmap(self._path(_DONE), "w+", np.bool_, (self._samples,)).flush()

    def put(self, numbers: list[int], encoded: EncodedImages) -> None:
        """Store the rows of ``encoded`` as samples ``numbers``."""
        for name, values in encoded.tensors().items():
            self._map(name)[numbers] = values.float().cpu().numpy()
        self._map(_DONE)[numbers] = True

    def rows(self, sample_ids: Tensor, like: Tensor) -> EncodedImages:
        """Return what is stored of ``sample_ids`` (B,), on the device and in the type of ``like``.

        Latents and first frames stay float32, as the network uses them.
        """
        numbers = (sample_ids % self._samples).numpy()
        found = {
            path.stem: torch.from_numpy(self._map(path.stem)[numbers]).to(like.device)
            for path in self._folder.glob("*.npy")
            if path.stem != _DONE
        }
        return EncodedImages(
            latents_BCFYX=found["latents_BCFYX"],
            image_BPE=found["image_BPE"].to(like.dtype),
            first_frame_BCFYX=found.get("first_frame_BCFYX"),
        )

    def _map(self, name: str) -> NDArray[Any]:
        if name not in self._arrays:
            self._arrays[name] = np.load(self._path(name), mmap_mode="r+")
        return self._arrays[name]

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.npy"


def precompute_features(
    config: SFTConfig, model: WorldActionModel, data: TrainingData, world: DistributedEnvironment
) -> StoredLatents:
    """Encode the images that are not on disk yet, shared over the processes. Collective.

    All processes must see the run's folder.
    """
    folder = config.runner.output_dir / "features" / _latents_key(model, data)
    stored = StoredLatents(folder, len(data))
    wanted = stored.missing()
    mine = wanted[world.rank :: world.size]
    # All processes look up what is missing before any of them writes, else shares would overlap.
    dist.barrier(group=world.host_group)
    size = config.runner.micro_batch_size
    if len(wanted) == len(data) and world.is_main:
        _, example = next(_encode(model, data, [mine[:1]], config, world))
        stored.create(example)
    dist.barrier(group=world.host_group)
    # All batches have the size of training: a smaller one may round its last bit differently. The
    # samples that fill up the last batch are encoded twice.
    filled = mine + [mine[number % len(mine)] for number in range(-len(mine) % size)]
    parts = [filled[first : first + size] for first in range(0, len(filled), size)]
    if world.is_main and parts:
        _log.info("encoding the images of %d samples once, to %s", len(wanted), folder)
    encoded = _encode(model, data, parts, config, world)
    console = Console(stderr=True, quiet=not world.is_main)
    with progress_bar("images", console) as show:
        for done, (numbers, features) in enumerate(encoded, 1):
            stored.put(numbers, features)
            show(done, len(parts))
    dist.barrier(group=world.host_group)
    return stored


def _encode(
    model: WorldActionModel,
    data: TrainingData,
    parts: list[list[int]],
    config: SFTConfig,
    world: DistributedEnvironment,
) -> Iterator[tuple[list[int], EncodedImages]]:
    slots = [[SampleKey(0, 0, number) for number in numbers] for numbers in parts]
    options = LoaderOptions(num_workers=config.data.num_workers)
    for batch in read_batches(data, slots, options):
        images = encode_views(batch, data, augment=None, device=world.device)
        yield batch["sample_id"].tolist(), model.encode(images)


def _latents_key(model: WorldActionModel, data: TrainingData) -> str:
    """Return a name that changes with the encoders and with what a sample number means."""
    weights = {
        name: tensor for name, tensor in model.state_dict().items() if name.startswith(_ENCODERS)
    }
    parts = [fingerprint(StateDictSource(values=weights), weights), repr(model.config)]
    return hashlib.sha256("/".join([*parts, data.identity()]).encode()).hexdigest()[:24]


def keyed_generator(purpose: str, *key: int | str) -> torch.Generator:
    """Return a new CPU generator; equal arguments give equal draws."""
    return torch.Generator().manual_seed(torch_seed(purpose, *key))


def sample_noise(
    config: NetworkConfig, prepared: PreparedBatch, seed: int, step: int, slots: Sequence[int]
) -> DiffusionNoise:
    """Return the noise of a micro-batch: each sample's follows from seed, step and slot alone."""
    latents = prepared.latents_BCFYX
    channels, frames, rows, columns = latents.shape[1:]
    actions, width = prepared.action_BAM.shape[1:]
    generators = [keyed_generator("noise", seed, step, slot) for slot in slots]
    shape = NoiseShape(latent=(channels, frames, rows, columns), action=(actions, width))
    return draw_noise(config.dit, config.head, shape, generators, latents.device)


def with_given_actions(
    config: NetworkConfig, noise: DiffusionNoise, batch: CollatedBatch, seed: int, most: int
) -> DiffusionNoise:
    """Return ``noise`` with actions given: the first of every block, and what is not imitated.

    Args:
        config: The network.
        noise: Of a micro-batch.
        batch: The micro-batch, with the credit of its actions.
        seed: Of the run.
        most: ``rtc_training_max_delay``: up to so many first actions, drawn evenly; 0: none.
    """
    device, credit = noise.action_BAM.device, batch["credit"]
    given = None if credit is None else credit.given.to(device, non_blocking=True)
    if most:
        key = ("given actions", seed, batch["step"])
        generators = [keyed_generator(*key, slot) for slot in batch["slot"].tolist()]
        first = draw_given(config.dit, noise.action_BAM.shape[1], most, generators).to(device)
        given = first if given is None else given | first
    return replace(noise, given_BA=given)


def with_less_video(
    noise: DiffusionNoise, key: tuple[int, int], slots: Sequence[int], model: ModelConfig
) -> DiffusionNoise:
    """Return ``noise`` with some samples as they are where plans are made with less video.

    Args:
        noise: Of a micro-batch.
        key: Seed and step.
        slots: Of its samples.
        model: Says how many, and how; see ``action_only_ratio``.
    """
    if not model.action_only_ratio:
        return noise
    draws = [torch.rand((), generator=keyed_generator("action only", *key, slot)) for slot in slots]
    chosen = (torch.stack(draws) < model.action_only_ratio).to(noise.video_BCFYX.device)
    if model.action_only_video == "skip":
        return replace(noise, hides_video_B=chosen)
    # Index 0 is pure noise, and the video's loss has no weight there.
    return replace(noise, frame_index_BF=noise.frame_index_BF.masked_fill(chosen[:, None], 0))


@dataclass(frozen=True, kw_only=True)
class NetworkInputs:
    """Turns batches of the loader into inputs of the network: augmentation, frozen encoders."""

    model: WorldActionModel
    prompts: Prompts
    data: TrainingData
    """The data that the batches are read from."""

    device: torch.device
    augment: AugmentConfig | None = None
    """Ranges of crop and color; None for the center crop of evaluation."""

    features: StoredLatents | None = None
    """Latents of every sample; None where images are encoded."""

    cut_prompts: bool = False
    """Whether every prompt is zero from the length of the shortest on."""

    def unchanged(self) -> "NetworkInputs":
        """Return the same for the training data as they are: no augmentation, whole prompts."""
        return replace(self, augment=None, cut_prompts=False)

    def held_out(self, data: TrainingData) -> "NetworkInputs":
        """Return the same for held-out ``data``: no augmentation, no cache, whole prompts."""
        return replace(self, data=data, augment=None, features=None, cut_prompts=False)

    def prepare(self, batch: CollatedBatch) -> PreparedBatch:
        """Return a micro-batch after augmentation and the frozen encoders."""
        credit = batch["credit"]
        weight = None if credit is None else credit.weight.to(self.device, non_blocking=True)
        prompt = self.prompts.embed(batch["prompt"], self.device)
        return self.model.prepare(
            TrainBatch(
                images=self._images(batch),
                state_BSM=batch["state"].to(self.device, non_blocking=True),
                conditions=tuple(
                    values.to(self.device, non_blocking=True)
                    for values in batch["conditions"].values()
                ),
                action_BAM=batch["action"].to(self.device, non_blocking=True),
                action_mask_BAM=batch["action_mask"].to(self.device, non_blocking=True),
                has_real_action_B=batch["has_real_action"].to(self.device, non_blocking=True),
                prompt=prompt.cut() if self.cut_prompts else prompt,
                action_weight_BA=weight,
            )
        )

    def _images(self, batch: CollatedBatch) -> Tensor | EncodedImages:
        if self.features is not None:
            like = next(self.model.image_encoder.parameters())
            return self.features.rows(batch["sample_id"], like)
        return encode_views(batch, self.data, augment=self.augment, device=self.device)
