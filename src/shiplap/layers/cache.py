"""Keys and values of the tokens so far, so that a model that writes computes each token once (Pope et al. 2022)."""

import torch
from torch import Tensor, nn


class KeyValueCache:
    """Of every attention layer of a model; this rank's heads.

    Attributes:
        capacity: most tokens that it can hold, of each sequence.
        batch_size: number of sequences.
        length: tokens that it holds, the same in every layer between passes through the model.
    """

    def __init__(self, capacity: int, batch_size: int) -> None:
        """Empty; memory is taken when a layer first stores something."""
        self.capacity = capacity
        self.batch_size = batch_size
        self.length = 0
        self._num_new = 0
        self._stored: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def begin(self, num_new: int) -> None:
        """Announce a pass over so many new tokens; what stands behind them pads the sequence.

        Raises:
            ValueError: they do not fit.
        """
        if self.length + num_new > self.capacity:
            raise ValueError(f"{self.length} + {num_new} tokens do not fit into a cache of {self.capacity}.")
        self._num_new = num_new

    def end(self) -> None:
        """Count the new tokens: every layer has stored them."""
        self.length += self._num_new

    def clear(self) -> None:
        """Forget all tokens, and keep the memory."""
        self.length = 0

    def extend(self, layer: nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Store a layer's new keys and values, both `[B, kv_heads, S, d]`, padding left out.

        The first pass may be over one sequence, B = 1, that all sequences of the cache begin with.

        Returns:
            Keys and values to attend to, `[B, kv_heads, T, d]`; and which of them each new token sees, `[S, T]`, or
            None where that is all of them up to itself: where nothing came before, and for a single token.
        """
        if layer not in self._stored:
            shape = self.batch_size, key.shape[1], self.capacity, key.shape[3]
            self._stored[layer] = key.new_empty(shape), value.new_empty(shape)
        stop = self.length + self._num_new
        for stored, new in zip(self._stored[layer], (key, value), strict=True):
            stored[:, :, self.length : stop] = new[:, :, : self._num_new]
        if self.length == 0:
            return key, value, None
        mask = None
        if key.shape[2] > 1:
            positions = torch.arange(self.length, self.length + key.shape[2], device=key.device)
            mask = torch.arange(stop, device=key.device) <= positions[:, None]
        keys, values = self._stored[layer]
        return keys[:, :, :stop], values[:, :, :stop], mask
