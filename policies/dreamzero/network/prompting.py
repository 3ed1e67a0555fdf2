"""Prompt embeddings, and how to attend their padding at the price of four rows.

Published networks attend all 512 rows of a prompt embedding. Rows of padding are zero, so in every
block they share one key and one value: attending a few of them, with the logarithm of how many they
stand for added to their scores, gives the same result (docs/model.md, section 6).

Shapes: B prompts, N rows, E width of the embedding.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

PromptRows = Literal["own", "cut"]
"""Which rows of a batch's prompts are not zero: each its own, or as many as the shortest has."""

_ROW_STEP = 64
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
