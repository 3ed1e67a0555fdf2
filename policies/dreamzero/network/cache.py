"""Keys and values of the frames a session has seen: preallocated, handed to the network.

Source: DreamZero model, section 2.7.

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
        extra = config.num_action_per_block + config.num_state_per_block
        capacity = frames * config.frame_seqlen + extra
        shape = (config.num_layers, 2, rows, capacity, config.num_heads, config.head_dim)
        return cls(like.new_empty(shape))

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

    @classmethod
    def gather(cls, caches: Sequence["KVCache"]) -> "KVCache":
        """Return one cache with the rows of all sessions, all prompts of kind 0 first.

        A single cache is returned itself; several are copied, and :meth:`scatter` writes the news
        back.
        """
        if len(caches) == 1:
            return caches[0]
        first, count = caches[0], len(caches)
        shape = list(first.data.shape)
        shape[2] *= count
        joint = cls(first.data.new_empty(shape), first.length)
        for index, cache in enumerate(caches):
            joint._rows_of(index, count)[:, :, :, : joint.length] = cache.valid
        return joint

    def scatter(self, caches: Sequence["KVCache"], start: int) -> None:
        """Copy the tokens from ``start`` on to the sessions' own caches."""
        for index, cache in enumerate(caches):
            if cache is not self:
                news = self._rows_of(index, len(caches))[:, :, :, start : self.length]
                cache.data[:, :, :, start : self.length] = news
                cache.length = self.length

    def _rows_of(self, index: int, count: int) -> Tensor:
        """Return a view of the rows of one of ``count`` sessions."""
        return self.data[:, :, index::count]
