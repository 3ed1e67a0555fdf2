"""The umT5 prompt encoder, run at the real length of the prompts, and a cache of its results.

Legend of shape suffixes: B prompts, L tokens with padding, D width.
"""

from collections import OrderedDict

import torch
from torch import Tensor, nn
from transformers import UMT5Config, UMT5EncoderModel

from dzrobot.policies.dreamzero.network.config import TextConfig

_LENGTH_STEP = 8
_MAX_DISTANCE = 128


class TextEncoder(nn.Module):
    """Token ids to prompt embeddings (docs/model.md, sections 3.1 and 6.2)."""

    def __init__(self, config: TextConfig) -> None:
        """Build the encoder of ``config`` with fresh weights."""
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

    def forward(self, ids_BL: Tensor, mask_BL: Tensor) -> Tensor:
        """Return embeddings (B, L, D); the rows of padding are zero.

        Only as many tokens as the longest prompt has are computed, rounded up to a multiple of 8;
        padding keys are masked, so the rest of the result does not change.

        Args:
            ids_BL: Token ids, int64, prompts first and padding after.
            mask_BL: 1 or True on the prompt's tokens.
        """
        mask_BL = mask_BL.bool()
        longest = int(mask_BL.sum(dim=1).max())
        length = min(max(-(-longest // _LENGTH_STEP), 1) * _LENGTH_STEP, ids_BL.shape[1])
        valid_BL = mask_BL[:, :length]
        hidden_BLD: Tensor = self.stack(
            input_ids=ids_BL[:, :length], attention_mask=valid_BL.to(ids_BL.dtype)
        ).last_hidden_state
        # Per prompt: up to its own end, not to that of the shortest prompt in the batch.
        hidden_BLD = hidden_BLD.masked_fill(~valid_BL[..., None], 0)
        return nn.functional.pad(hidden_BLD, (0, 0, 0, ids_BL.shape[1] - length))


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
        """Return what ``encoder`` makes of the prompts, (B, L, D), computing only unseen ones."""
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
