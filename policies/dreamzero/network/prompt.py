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
import json
import math
import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path

import ftfy
import torch
from torch import Tensor, nn

from dzrobot.errors import CheckpointError
from dzrobot.policies.dreamzero.network.config import TextConfig
from dzrobot.policies.dreamzero.network.libraries import members

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
        (AutoTokenizer,) = members("transformers", "AutoTokenizer")
        self.text_len = text_len
        name, revision = str(source), ""
        if not Path(source).exists():
            name, _, revision = name.partition("@")
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(
                name, revision=revision or "main", trust_remote_code=False
            )
            # Some faults of its files show only when it is used.
            self(["pick up the cup"])
        except Exception as error:
            # Nothing narrower: for a damaged file tokenizers raises a plain Exception.
            raise CheckpointError(
                f"no tokenizer at {str(source)!r} ({_first_line(error)}). DreamZero checkpoints do "
                f"not contain one: download {DEFAULT_TOKENIZER} (`hf download {DEFAULT_TOKENIZER} "
                "--include 'tokenizer*' 'spiece*' 'special*'`) and give its folder as tokenizer"
            ) from error

    @cached_property
    def fingerprint(self) -> str:
        """Return a SHA-256 of what it does to a text, wherever its files lie."""
        try:
            backend = self._tokenizer.backend_tokenizer
        except AttributeError:
            # One of SentencePiece's own.
            text = json.dumps(self._tokenizer.get_vocab(), sort_keys=True)
        else:
            # Set anew by every call.
            backend.no_padding()
            backend.no_truncation()
            text = backend.to_str()
        return hashlib.sha256(f"{text} {self._tokenizer.pad_token_id}".encode()).hexdigest()

    def __call__(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return ids and mask, both (B, text_len) int64; longer prompts are cut."""
        encoded = self._tokenizer(
            [clean(prompt) for prompt in prompts],
            return_tensors="pt",
            padding="max_length",
            truncation=True,
            max_length=self.text_len,
            add_special_tokens=True,
        )
        return encoded["input_ids"], encoded["attention_mask"]


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


_LENGTH_STEP = 8
_MAX_DISTANCE = 128


class TextEncoder(nn.Module):
    """Token ids to prompt embeddings (docs/model.md, sections 3.1 and 6.2)."""

    def __init__(self, config: TextConfig) -> None:
        """Build the encoder of ``config`` with newly initialized weights."""
        UMT5Config, UMT5EncoderModel = members("transformers", "UMT5Config", "UMT5EncoderModel")
        super().__init__()
        sizes = UMT5Config(
            vocab_size=config.vocab,
            d_model=config.dim,
            d_kv=config.dim_attn // config.num_heads,
            d_ff=config.dim_ffn,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            relative_attention_num_buckets=config.num_buckets,
            relative_attention_max_distance=_MAX_DISTANCE,
            feed_forward_proj="gated-gelu",
            dropout_rate=0.0,
            is_encoder_decoder=False,
            use_cache=False,
            # The other implementations differ from the published numbers by 2-3 % in bf16.
            attn_implementation="eager",
        )
        # The stack alone: the model around it only adds a second name for the embedding.
        self.stack = UMT5EncoderModel(sizes).encoder
        # Transformers 5.5, which LeRobot 0.6 pins, wants a plain mask and makes scores of it.
        library = vars(import_module(type(self.stack).__module__))
        self._takes_scores = "create_bidirectional_mask" in library

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
        seen = self._scores(valid_BL) if self._takes_scores else valid_BL
        hidden_BLD: Tensor = self.stack(input_ids=read_BL, attention_mask=seen).last_hidden_state
        # Per prompt: up to its own end, not to that of the shortest prompt in the batch.
        hidden_BLD = hidden_BLD.masked_fill(~valid_BL[..., None], 0)
        return nn.functional.pad(hidden_BLD, (0, 0, 0, ids_BL.shape[1] - length))

    def _scores(self, valid_BL: Tensor) -> Tensor:
        """Return what is added to attention scores (B, 1, L, L).

        What the library makes of a plain mask, but for that it reads the mask on the host first.
        """
        dtype = self.stack.embed_tokens.weight.dtype
        scores_BL = torch.zeros(valid_BL.shape, dtype=dtype, device=valid_BL.device)
        scores_BL = scores_BL.masked_fill(~valid_BL, torch.finfo(dtype).min)
        return scores_BL[:, None, None].expand(-1, -1, valid_BL.shape[1], -1)


class PromptCache:
    """Embeddings of the prompts seen last, by their token ids.

    Belongs to whoever asks for the embeddings, never to the network. Use one cache per encoder.
    """

    def __init__(self, capacity: int = 64) -> None:
        """Keep at most ``capacity`` prompts, the least recently used one leaving first."""
        self._capacity = capacity
        self._rows: OrderedDict[tuple[int, ...], Tensor] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of prompts kept."""
        return len(self._rows)

    def embed(self, encoder: TextEncoder, ids_BL: Tensor, mask_BL: Tensor) -> Tensor:
        """Return what ``encoder`` makes of the prompts, (B, L, D), computing only unseen ones.

        Ids and mask lie on the host best: they are looked at there.
        """
        rows, mask_rows = ids_BL.tolist(), mask_BL.tolist()
        keys = [
            tuple(token for token, kept in zip(row, kept_row, strict=True) if kept)
            for row, kept_row in zip(rows, mask_rows, strict=True)
        ]
        unseen = {key: i for i, key in enumerate(keys) if key not in self._rows}
        found = {key: self._rows[key] for key in keys if key in self._rows}
        # One prompt at a time: its embedding must not depend on which prompts came with it.
        for key, i in unseen.items():
            # Tensors made in inference mode could not be used in training later.
            with torch.inference_mode(False), torch.no_grad():
                embedded_LD = encoder(ids_BL[i : i + 1].clone(), mask_BL[i : i + 1].clone())[0]
                found[key] = embedded_LD[: len(key)].clone()
        self._remember(found)
        length = ids_BL.shape[1]
        return torch.stack(
            [nn.functional.pad(found[key], (0, 0, 0, length - len(key))) for key in keys]
        )

    def _remember(self, rows: dict[tuple[int, ...], Tensor]) -> None:
        for key, row in rows.items():
            self._rows[key] = row
            self._rows.move_to_end(key)
        while len(self._rows) > self._capacity:
            self._rows.popitem(last=False)
