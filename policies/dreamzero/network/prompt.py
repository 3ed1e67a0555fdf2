"""Prompts: their tokens, their embeddings with a cache, and how their padding is attended.

Tokens are made as in the published pipeline (docs/model.md, section 5). The umT5 encoder runs at
the real length of the prompts. Published networks attend all 512 rows of an embedding: rows of
padding are zero, so in every block they share one key and one value, and attending a few of them,
with the logarithm of how many they stand for added to their scores, gives the same result (section
6).

Shapes: B prompts, L tokens with padding, N rows, D or E width of the embedding.
"""

import hashlib
import html
import logging
import math
import os
import platform
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ftfy
import torch
from torch import Tensor, nn

from dzrobot.documents import read_json
from dzrobot.errors import CheckpointError
from dzrobot.files import refuse_stand_ins, replacing
from dzrobot.policies.dreamzero.network.config import TextConfig
from dzrobot.policies.dreamzero.network.layers import embedding

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_log = logging.getLogger(__name__)

# With an offset on the scores, cuDNN's backward pass can give NaN where keys % 128 is 64.
_ROW_STEP = 128
_PAD_ROWS = 4


@dataclass(frozen=True, eq=False)
class PromptEmbedding:
    """Embeddings of a batch of prompts."""

    rows_BNE: Tensor
    """Zero beyond each prompt's length."""

    lengths: tuple[int, ...]
    """Rows of each prompt that are not padding."""

    def __post_init__(self) -> None:
        if len(self.lengths) != self.rows_BNE.shape[0]:
            raise ValueError(
                f"{len(self.lengths)} lengths for {self.rows_BNE.shape[0]} prompt embeddings"
            )

    @classmethod
    def stack(cls, embeddings: Sequence["PromptEmbedding"]) -> "PromptEmbedding":
        """Return the prompts of all, in order."""
        rows_BNE = torch.cat([embedding.rows_BNE for embedding in embeddings])
        return cls(rows_BNE, sum((embedding.lengths for embedding in embeddings), ()))

    def cut(self) -> "PromptEmbedding":
        """Return the prompts with every row zero from the length of the shortest on.

        The published code does so to every batch (``prompt_emb[:, v:] = 0`` for each length v).
        """
        shortest = min(self.lengths)
        rows_BNE = self.rows_BNE.clone()
        rows_BNE[:, shortest:] = 0
        return PromptEmbedding(rows_BNE, (shortest,) * len(self.lengths))


def attended_rows(longest: int, row_step: int = _ROW_STEP) -> int:
    """Return the rows that are attended of prompts of at most ``longest`` rows, padding included.

    A prompt of fewer rows in all is attended as it is.
    """
    return -(-(longest + _PAD_ROWS) // row_step) * row_step


def compact(prompt: PromptEmbedding, row_step: int = _ROW_STEP) -> tuple[Tensor, Tensor | None]:
    """Return fewer rows and what to add to their scores (B, N), None where all rows are kept.

    Args:
        prompt: The embeddings.
        row_step: Keep a multiple of so many rows, so that few shapes occur.
    """
    total = prompt.rows_BNE.shape[1]
    width = attended_rows(max(prompt.lengths), row_step)
    if width >= total:
        return prompt.rows_BNE, None
    bias = torch.tensor([_bias(length, total, width) for length in prompt.lengths])
    return prompt.rows_BNE[:, :width], bias.to(prompt.rows_BNE.device, non_blocking=True)


def _bias(length: int, total: int, width: int) -> list[float]:
    """Return the score offsets of one prompt's rows: 0, then padding standing for all padding."""
    remaining = float(total - length)
    pads: list[float] = []
    for _ in range(_PAD_ROWS - 1):
        # Rounded down to what bf16 can hold; the next row stands for the rest.
        pads.append(_bf16_below(math.log(remaining)))
        remaining -= math.exp(pads[-1])
        if remaining < 1e-6:
            break
    else:
        pads.append(math.log(remaining))
    return [0.0] * length + pads + [-math.inf] * (width - length - len(pads))


def _bf16_below(value: float) -> float:
    """Return the largest bf16 number not above ``value``."""
    rounded = torch.tensor(value, dtype=torch.bfloat16)
    if rounded.item() <= value:
        return rounded.item()
    return torch.nextafter(rounded, torch.tensor(-math.inf, dtype=torch.bfloat16)).item()


DEFAULT_TOKENIZER = "google/umt5-xxl"
"""Repository of the tokenizer that all published checkpoints were trained with."""


def clean(text: str) -> str:
    """Return ``text`` with broken encoding and HTML escapes repaired and white space collapsed."""
    text = html.unescape(html.unescape(ftfy.fix_text(text)))
    return re.sub(r"\s+", " ", text).strip()


class PromptTokenizer:
    """Cleans prompts and pads their token ids to a fixed length."""

    def __init__(self, source: str | Path = DEFAULT_TOKENIZER, *, text_len: int = 512) -> None:
        """Load the tokenizer.

        Args:
            source: Folder with the tokenizer's files, or a repository name; ``owner/name@COMMIT``
                takes another revision of it than the newest.
            text_len: Tokens of every row returned, padding included.

        Raises:
            CheckpointError: There is no tokenizer at ``source``, or its files are damaged.
        """
        self.text_len = text_len
        name, revision = str(source), ""
        if not Path(source).exists():
            name, _, revision = name.partition("@")
        try:
            self._tokenizer = _tokenizer(name, revision or "main", text_len)
            # Some faults of its files show only when it is used.
            self(["pick up the cup"])
        except Exception as error:
            # Nothing narrower: for a damaged file tokenizers raises a plain Exception.
            if Path(source).is_dir():
                refuse_stand_ins(sorted(Path(source).iterdir()), CheckpointError)
            fault = f"no tokenizer at {str(source)!r} ({_first_line(error)})"
            if (file := Path(source) / "tokenizer.json").is_file():
                fault = f"{file} is damaged ({_first_line(error)})"
            raise CheckpointError(
                f"{fault}. Most DreamZero checkpoints contain none: download {DEFAULT_TOKENIZER} "
                f"(`hf download {DEFAULT_TOKENIZER} --include 'tokenizer*' 'spiece*' 'special*'`) "
                "and give its folder as tokenizer"
            ) from error

    @cached_property
    def fingerprint(self) -> str:
        """Return a SHA-256 of what it does to a text, wherever its files lie."""
        from tokenizers import Tokenizer

        whole = Tokenizer.from_str(self._tokenizer.to_str())
        whole.no_padding()
        whole.no_truncation()
        pad = dict(self._tokenizer.padding or {})["pad_id"]
        return hashlib.sha256(f"{whole.to_str()} {pad}".encode()).hexdigest()

    def __call__(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return ids and mask, both (B, text_len) int64; longer prompts are cut."""
        encoded = self._tokenizer.encode_batch([clean(prompt) for prompt in prompts])
        ids, mask = ([getattr(one, name) for one in encoded] for name in ("ids", "attention_mask"))
        return torch.tensor(ids), torch.tensor(mask)


def _tokenizer(source: str, revision: str, text_len: int) -> "Tokenizer":
    """Return the tokenizer of a folder or repository, which cuts and pads to ``text_len``."""
    from tokenizers import Tokenizer

    file, settings = (
        Path(source) / name if Path(source).is_dir() else _fetched(source, revision, name)
        for name in ("tokenizer.json", "tokenizer_config.json")
    )
    tokenizer = Tokenizer.from_file(str(file))
    pad = read_json(settings, dict[str, Any], CheckpointError)["pad_token"]
    name = pad["content"] if isinstance(pad, dict) else pad
    tokenizer.enable_truncation(text_len)
    number = tokenizer.token_to_id(name)
    tokenizer.enable_padding(length=text_len, pad_id=number, pad_token=name)
    return tokenizer


def _fetched(repo: str, revision: str, name: str) -> Path:
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(repo, name, revision=revision))


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


_LENGTH_STEP = 8
_MAX_DISTANCE = 128


class _Norm(nn.Module):
    """Scales every token to unit mean square, computed in float32."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Return the normalized tokens in the dtype of the weight."""
        square_BL1 = x_BLD.float().pow(2).mean(-1, keepdim=True)
        return self.weight * (x_BLD * torch.rsqrt(square_BL1 + 1e-6)).to(self.weight.dtype)


class _Attention(nn.Module):
    """Attention among the tokens of a prompt; scores are not scaled and know distances."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        dim, inner = config.dim, config.dim_attn
        self._heads = config.num_heads
        self.q, self.k, self.v = (nn.Linear(dim, inner, bias=False) for _ in range(3))
        self.o = nn.Linear(inner, dim, bias=False)
        self.relative_attention_bias = embedding(
            config.num_buckets, config.num_heads, times=dim**-0.5
        )

    def forward(self, x_BLD: Tensor, bucket_LL: Tensor, scores_B11L: Tensor) -> Tensor:
        """Return the update of the tokens."""
        q_BHLK, k_BHLK, v_BHLK = (
            project(x_BLD).unflatten(-1, (self._heads, -1)).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        bias_HLL = self.relative_attention_bias(bucket_LL).permute(2, 0, 1)
        # The fused forms differ from the published numbers by 2-3 % in bf16.
        found_BHLL = torch.matmul(q_BHLK, k_BHLK.transpose(2, 3)) + bias_HLL + scores_B11L
        read_BHLK = torch.matmul(found_BHLL.softmax(dim=-1), v_BHLK)
        out_BLD: Tensor = self.o(read_BHLK.transpose(1, 2).flatten(2))
        return out_BLD


class _FeedForward(nn.Module):
    """Feed-forward with a gate."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        dim, hidden = config.dim, config.dim_ffn
        self.wi_0, self.wi_1 = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.wo = nn.Linear(hidden, dim, bias=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Return the update of the tokens."""
        gate = self.wi_0(x_BLD)
        # Written out: the built-in approximation rounds elsewhere.
        inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate.pow(3.0))
        out_BLD: Tensor = self.wo(0.5 * gate * (1.0 + torch.tanh(inner)) * self.wi_1(x_BLD))
        return out_BLD


class _Block(nn.Module):
    """Attention and feed-forward, each after a norm, named as in the transformers library."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.layer: Any = nn.ModuleList(
            nn.ModuleDict({name: update, "layer_norm": _Norm(config.dim)})
            for name, update in (
                ("SelfAttention", _Attention(config)),
                ("DenseReluDense", _FeedForward(config)),
            )
        )

    def forward(self, x_BLD: Tensor, bucket_LL: Tensor, scores_B11L: Tensor) -> Tensor:
        """Return the tokens after the block."""
        attention, ffn = self.layer
        seen_BLD = attention["layer_norm"](x_BLD)
        x_BLD = _finite(x_BLD + attention["SelfAttention"](seen_BLD, bucket_LL, scores_B11L))
        return _finite(x_BLD + ffn["DenseReluDense"](ffn["layer_norm"](x_BLD)))


def _finite(x_BLD: Tensor) -> Tensor:
    """Return it within the range of float16; other dtypes have room."""
    if x_BLD.dtype != torch.float16:
        return x_BLD
    most = torch.finfo(x_BLD.dtype).max
    limit = torch.where(torch.isinf(x_BLD).any(), most - 1000, most)
    return torch.clamp(x_BLD, min=-limit, max=limit)


class _Stack(nn.Module):
    """The umT5 encoder; its numbers are those of the transformers library to the bit."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self._buckets = config.num_buckets
        self.embed_tokens = embedding(config.vocab, config.dim)
        self.block = nn.ModuleList(_Block(config) for _ in range(config.num_layers))
        self.final_layer_norm = _Norm(config.dim)

    def forward(self, ids_BL: Tensor, valid_BL: Tensor) -> Tensor:
        """Return hidden states (B, L, D); keys that are not valid are not attended."""
        x_BLD: Tensor = self.embed_tokens(ids_BL)
        scores_BL = torch.zeros(valid_BL.shape, dtype=x_BLD.dtype, device=x_BLD.device)
        scores_BL = scores_BL.masked_fill(~valid_BL, torch.finfo(x_BLD.dtype).min)
        bucket_LL = _distances(ids_BL.shape[1], self._buckets, x_BLD.device)
        for block in self.block:
            x_BLD = block(x_BLD, bucket_LL, scores_BL[:, None, None])
        out_BLD: Tensor = self.final_layer_norm(x_BLD)
        return out_BLD


def _distances(length: int, buckets: int, device: torch.device) -> Tensor:
    """Return the bucket (L, L) of every key's distance from every query, int64.

    Half of the buckets are for keys behind the query; of each half, half stand for one distance
    each and the others for ever wider ranges.
    """
    place_L = torch.arange(length, device=device)
    distance_LL = place_L - place_L[:, None]
    half = buckets // 2
    exact, near_LL = half // 2, distance_LL.abs()
    share_LL = torch.log(near_LL.float() / exact) / math.log(_MAX_DISTANCE / exact)
    far_LL = (exact + (share_LL * (half - exact)).long()).clamp(max=half - 1)
    return (distance_LL > 0).long() * half + torch.where(near_LL < exact, near_LL, far_LL)


class TextEncoder(nn.Module):
    """Token ids to prompt embeddings (docs/model.md, sections 3.1 and 6.2)."""

    def __init__(self, config: TextConfig) -> None:
        """Build the encoder of ``config`` with newly initialized weights."""
        super().__init__()
        self.stack = _Stack(config)

    def forward(self, ids_BL: Tensor, mask_BL: Tensor) -> Tensor:
        """Return embeddings (B, L, D); the rows of padding are zero.

        Only as many tokens as the longest prompt has are computed, rounded up to a multiple of 8;
        padding keys are masked, so the rest of the result does not change.

        Args:
            ids_BL: Token ids, int64, prompts first and padding after; best on the host, which then
                knows their lengths without waiting for a device.
            mask_BL: 1 or True on the prompt's tokens; likewise.
        """
        mask_BL = mask_BL.bool()
        longest = int(mask_BL.sum(dim=1).max())
        length = min(max(-(-longest // _LENGTH_STEP), 1) * _LENGTH_STEP, ids_BL.shape[1])
        device = next(self.parameters()).device
        read_BL, valid_BL = (
            x_BL[:, :length].to(device, non_blocking=True) for x_BL in (ids_BL, mask_BL)
        )
        hidden_BLD: Tensor = self.stack(read_BL, valid_BL)
        # Per prompt: up to its own end, not to that of the shortest prompt in the batch.
        hidden_BLD = hidden_BLD.masked_fill(~valid_BL[..., None], 0)
        return nn.functional.pad(hidden_BLD, (0, 0, 0, ids_BL.shape[1] - length))


Tokens = tuple[int, ...]
"""Those of a prompt, without padding."""

_DIGEST_BYTES = 32


@dataclass(kw_only=True)
class PromptFiles:
    """Embeddings of prompts on disk, one file each, without the text or its tokens.

    The name of a file is a hash of all that the embedding depends on: tokens, weights and sizes of
    the encoder, what computes it and in which dtype. It begins with a hash of its name and content,
    so one that is cut short, changed or renamed is not used.
    """

    folder: Path
    """Where they lie; need not be there, and need not be writable."""

    weights: str
    """Hash of the encoder's weights, as known when they were opened; empty: it is not known without
    reading them."""

    hash_weights: Callable[[], str]
    """Returns that hash, and reads them for it where they were never read; empty without files."""

    config: TextConfig
    dtype: torch.dtype
    device: torch.device
    """Where the encoder runs, and where the rows go."""

    def find(self, tokens: Tokens) -> Tensor | None:
        """Return the rows (N, E) of a prompt, on the device; None: they are not there."""
        path = self._path(tokens)
        size = len(tokens) * self.config.dim * self.dtype.itemsize
        try:
            # A pipe in its place would be waited for without end.
            if not self.weights or not path.is_file():
                return None
            with path.open("rb") as file:
                content = file.read(_DIGEST_BYTES + size + 1)
        except OSError:
            return None
        digest, rows = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if len(rows) != size or digest != _digest(path, rows):
            _log.warning("%s is damaged, or another file: the embedding is made again", path)
            return None
        found = torch.frombuffer(bytearray(rows), dtype=self.dtype)
        return found.reshape(len(tokens), self.config.dim).to(self.device)

    def keep(self, tokens: Tokens, rows_NE: Tensor) -> None:
        """Write the rows of a prompt; where that is refused, they are made again next time."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # Large weights are not read for a hash that nothing can be kept under.
            if not os.access(self.folder, os.W_OK):
                return
            # Asked again: the encoder was read now, and its files may have been replaced since.
            self.weights = self.hash_weights()
            if not self.weights:
                return
            path = self._path(tokens)
            rows = rows_NE.cpu().contiguous().view(torch.uint8).numpy().tobytes()
            with replacing(path, derived=True) as temporary:
                temporary.write_bytes(_digest(path, rows) + rows)
        except OSError as error:
            _log.info("an embedding is not kept in %s: %s", self.folder, error)

    def _path(self, tokens: Tokens) -> Path:
        # Other kernels, and other numbers of threads, may round the last bit differently.
        by = (
            torch.cuda.get_device_name(self.device)
            if self.device.type == "cuda"
            else f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} "
            f"{torch.get_num_threads()}"
        )
        about = self.weights, self.config, self.dtype, by, torch.get_float32_matmul_precision()
        key = hashlib.sha256(repr((*about, torch.__version__, tokens)).encode())
        return self.folder / key.hexdigest()


def _digest(path: Path, rows: bytes) -> bytes:
    return hashlib.sha256(path.name.encode() + rows).digest()


class PromptCache:
    """Embeddings of the prompts seen last, by their token ids.

    Belongs to whoever asks for the embeddings, never to the network. Use one cache per encoder.
    """

    def __init__(self, capacity: int = 64, files: PromptFiles | None = None) -> None:
        """Keep at most ``capacity`` prompts, the least recently used one leaving first.

        Args:
            capacity: Prompts in memory.
            files: Where all are kept on disk; None: nowhere.
        """
        self._capacity, self._files = capacity, files
        self._rows: OrderedDict[Tokens, Tensor] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of prompts in memory."""
        return len(self._rows)

    def knows(self, ids_BL: Tensor, mask_BL: Tensor) -> bool:
        """Return whether the prompts have been embedded before, here or on this machine."""
        return all(self._found(key) is not None for key in _keys(ids_BL, mask_BL))

    def embed(self, encoder: Callable[[], TextEncoder], ids_BL: Tensor, mask_BL: Tensor) -> Tensor:
        """Return the embeddings (B, L, D) of prompts, computing only unknown ones.

        Ids and mask lie on the host best: they are looked at there.

        Args:
            encoder: Returns the encoder; called only where a prompt is not known.
            ids_BL: Token ids, int64, prompts first and padding after.
            mask_BL: 1 or True on the prompt's tokens.
        """
        keys = _keys(ids_BL, mask_BL)
        found = {key: rows for key in keys if (rows := self._found(key)) is not None}
        unseen = {key: i for i, key in enumerate(keys) if key not in found}
        # One prompt at a time: its embedding must not depend on which prompts came with it.
        for key, i in unseen.items():
            # Tensors made in inference mode could not be used in training later.
            with torch.inference_mode(False), torch.no_grad():
                embedded_LD = encoder()(ids_BL[i : i + 1].clone(), mask_BL[i : i + 1].clone())[0]
                found[key] = embedded_LD[: len(key)].clone()
            if self._files is not None:
                self._files.keep(key, found[key])
        for key, rows in found.items():
            self._remember(key, rows)
        length = ids_BL.shape[1]
        return torch.stack(
            [nn.functional.pad(found[key], (0, 0, 0, length - len(key))) for key in keys]
        )

    def _found(self, key: Tokens) -> Tensor | None:
        if key not in self._rows and self._files is not None:
            with torch.inference_mode(False):
                rows = self._files.find(key)
            if rows is not None:
                self._remember(key, rows)
        return self._rows.get(key)

    def _remember(self, key: Tokens, rows: Tensor) -> None:
        self._rows[key] = rows
        self._rows.move_to_end(key)
        while len(self._rows) > self._capacity:
            self._rows.popitem(last=False)


def _keys(ids_BL: Tensor, mask_BL: Tensor) -> list[Tokens]:
    """Return the tokens of each prompt, without padding."""
    return [
        tuple(token for token, kept in zip(row, kept_row, strict=True) if kept)
        for row, kept_row in zip(ids_BL.tolist(), mask_BL.tolist(), strict=True)
    ]
