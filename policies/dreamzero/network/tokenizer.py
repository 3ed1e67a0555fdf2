"""Prompts to token ids, as the published pipeline makes them (docs/model.md, section 5)."""

import html
import re
from collections.abc import Sequence
from pathlib import Path

import ftfy
from torch import Tensor
from transformers import AutoTokenizer

from dzrobot.errors import CheckpointError

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
            source: Folder with the tokenizer's files, or a repository name.
            text_len: Tokens of every row returned, padding included.

        Raises:
            CheckpointError: There is no tokenizer at ``source``, or its files are damaged.
        """
        self.text_len = text_len
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(str(source), trust_remote_code=False)
            # Some faults of its files show only when it is used.
            self(["pick up the cup"])
        except Exception as error:
            raise CheckpointError(
                f"no tokenizer at {str(source)!r} ({_first_line(error)}). DreamZero checkpoints do "
                f"not contain one: download {DEFAULT_TOKENIZER} (`hf download {DEFAULT_TOKENIZER} "
                "--include 'tokenizer*' 'spiece*' 'special*'`) and give its folder as tokenizer"
            ) from error

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
