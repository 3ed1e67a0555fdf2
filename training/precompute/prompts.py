"""Prompt embeddings of a run: encoded once and kept on disk, or encoded in every step.

There are few instructions and many samples. Encoding each instruction once frees the prompt
encoder, which is as large as the 5B transformer, and saves its share of every step.
"""

import hashlib
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from dzrobot.errors import DatasetError
from dzrobot.files import move
from dzrobot.modality.window import prompt_of
from dzrobot.policies.dreamzero.checkpoints.checksums import fingerprint
from dzrobot.policies.dreamzero.checkpoints.names import TEXT
from dzrobot.policies.dreamzero.checkpoints.sources import WeightSource
from dzrobot.policies.dreamzero.network.config import NetworkConfig, TextConfig
from dzrobot.policies.dreamzero.network.keymap import entries
from dzrobot.policies.dreamzero.network.prompt import PromptEmbedding, PromptTokenizer, TextEncoder
from dzrobot.policies.dreamzero.network.world_action import WorldActionModel
from dzrobot.training.data import TrainingData
from dzrobot.training.distributed import DistributedEnvironment

_FILES = "*.safetensors"


class Prompts(Protocol):
    """Turns prompts into embeddings."""

    def embed(self, prompts: Sequence[str], device: torch.device) -> PromptEmbedding:
        """Return the embeddings of ``prompts`` on ``device``."""
        ...


@dataclass(frozen=True)
class LivePrompts:
    """Encodes every batch; collective where the encoder is sharded."""

    network: WorldActionModel
    tokenizer: PromptTokenizer

    def embed(self, prompts: Sequence[str], device: torch.device) -> PromptEmbedding:
        """Return the embeddings of ``prompts`` on ``device``."""
        ids, mask = self.tokenizer(prompts)
        found = self.network.embed_prompts(ids, mask)
        return replace(found, rows_BNE=found.rows_BNE.to(device))


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
    """Embeddings in files, mapped rather than read: each is only as long as its prompt."""

    def __init__(self, folder: Path, text_len: int) -> None:
        self._folder = folder
        self._text_len = text_len
        self._found: dict[str, Any] = {}

    def open(self) -> None:
        """Look up what the folder holds; call again after something was added."""
        for path in sorted(self._folder.glob(_FILES)):
            handle = safe_open(path, framework="pt", device="cpu")
            self._found |= dict.fromkeys(_names(handle), handle)

    def missing(self, prompts: Iterable[str]) -> list[str]:
        """Return those of ``prompts`` that the folder does not hold, in order."""
        return [prompt for prompt in prompts if _key(prompt) not in self._found]

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
                rows[_key(prompt)] = (
                    encoder(ids.to(device), mask.to(device))[0, :length].cpu().contiguous()
                )
        self._folder.mkdir(parents=True, exist_ok=True)
        temporary = self._folder / f"{uuid.uuid4().hex}.writing"
        save_file(rows, temporary)
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
        parts = [self._found[_key(prompt)].get_tensor(_key(prompt)) for prompt in prompts]
        rows = parts[0].new_zeros(len(parts), self._text_len, parts[0].shape[1])
        for row, part in zip(rows, parts, strict=True):
            row[: len(part)] = part
        moved = rows.pin_memory() if device.type == "cuda" else rows
        return PromptEmbedding(
            moved.to(device, non_blocking=True), tuple(len(part) for part in parts)
        )

    def longest(self, prompts: Iterable[str]) -> int:
        """Return the rows of the longest of ``prompts``."""
        lengths: list[int] = [
            self._found[_key(prompt)].get_slice(_key(prompt)).get_shape()[0] for prompt in prompts
        ]
        return max(lengths)


def _names(handle: Any) -> list[str]:
    """Return the names in a mapped file, which is no mapping."""
    return list(handle.keys())


def _key(prompt: str) -> str:
    return hashlib.sha256(prompt.encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class PromptEncoding:
    """What an embedding depends on, the prompt aside."""

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
    """Encode, shared over the processes, what is not on disk. Collective.

    Args:
        prompts: Every prompt that a sample can carry, in the same order everywhere.
        encoding: How.
        parent: Folder of all embeddings of the run; all processes must see it.
        world: The processes.
    """
    network = encoding.network
    tokenize = PromptTokenizer(encoding.tokenizer, text_len=network.dit.text_len)
    stored = StoredPrompts(parent / encoding.key, network.dit.text_len)
    stored.open()
    mine = stored.missing(prompts)[world.rank :: world.size]
    # Everyone looks before anyone writes, else the shares would overlap.
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
        encoder = TextEncoder(config)
    encoder.to(dtype).to_empty(device=device)
    table = {TEXT + entry.official: entry for entry in entries(encoder)}
    state = encoder.state_dict()
    with torch.no_grad():
        for name, tensor in source.stream(table):
            for target, piece in table[name].split(tensor):
                state[target].copy_(piece)
    return encoder.eval().requires_grad_(requires_grad=False)
