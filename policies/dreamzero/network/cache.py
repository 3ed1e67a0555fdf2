"""Keys and values of the frames a session has seen: preallocated, handed to the network.

Source: docs/model.md, section 2.7.

Shapes: R rows (sessions times prompts), T tokens, H heads, K width of one head.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from dzrobot.policies.dreamzero.network.config import DiTConfig


@dataclass(eq=False)
class KVCache:
    """Keys (after rotation) and values of all layers; only video tokens are kept."""

    data: Tensor
    """(layers, 2, R, capacity, H, K); room behind ``length`` is scratch for the current call."""

    length: int = 0
    """Valid tokens."""

    @classmethod
    def allocate(cls, config: DiTConfig, *, rows: int, frames: int, like: Tensor) -> "KVCache":
        """Return an empty cache with room for ``frames`` frames and the tokens of one block.

        Args:
            config: The transformer.
            rows: Sessions times prompts.
            frames: Latent frames, those being denoised included.
            like: A tensor of the dtype and on the device of the network.
        """
        tokens = tokens_of(config, frames)
        shape = (config.num_layers, 2, rows, tokens, config.num_heads, config.head_dim)
        return cls(like.new_empty(shape))

    def fits(self, config: DiTConfig, frames: int) -> bool:
        """Return whether ``frames`` frames and the tokens of one block have room."""
        return self.data.shape[3] >= tokens_of(config, frames)

    @property
    def rows(self) -> int:
        """Return the rows."""
        return self.data.shape[2]

    @property
    def valid(self) -> Tensor:
        """Return the valid part, (layers, 2, R, length, H, K)."""
        return self.data[:, :, :, : self.length]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of one layer, capacity included, each (R, T, H, K)."""
        keys, values = self.data[index].unbind(0)
        return keys, values

    def commit(self, tokens: int) -> None:
        """Keep the tokens that the last forward pass wrote behind the valid part."""
        self.length += tokens

    def select(self, first: int, stop: int) -> "KVCache":
        """Return some rows; memory is shared, the length is not."""
        return KVCache(self.data[:, :, first:stop], self.length)

    def load(self, caches: Sequence["KVCache"]) -> None:
        """Copy the valid tokens of several sessions; rows are ordered by prompt, then session."""
        self.length = caches[0].length
        for index, cache in enumerate(caches):
            self.data[:, :, index :: len(caches), : self.length] = cache.valid

    def store(self, caches: Sequence["KVCache"]) -> None:
        """Copy tokens that the sessions' own caches lack back to them; undoes :meth:`load`."""
        for index, cache in enumerate(caches):
            news = slice(cache.length, self.length)
            cache.data[:, :, :, news] = self.data[:, :, index :: len(caches), news]
            cache.length = self.length


def tokens_of(config: DiTConfig, frames: int) -> int:
    """Return the tokens of ``frames`` frames and of one block's actions and states."""
    controls = config.num_action_per_block + config.num_state_per_block
    return frames * config.frame_seqlen + controls
