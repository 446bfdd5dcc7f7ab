"""Keys and values of the tokens so far, of one layer's local heads; for generation, not differentiable."""

from __future__ import annotations

import torch
from torch import Tensor

from tp_kernels.comm.errors import ShapeError, UnsupportedError


class KVCache:
    """Keys and values [b, n_kv, s, D] in memory that grows by doubling.

    Attributes:
        length: tokens appended so far; the position of the next one.
        stored: how many of them, the latest, are held: all, except in a StaticKVCache with a window.
        window: tokens that the layer needs to see, the next one included; None for all.
    """

    window: int | None = None

    def __init__(self) -> None:
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self.length = 0
        self.stored = 0

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add [b, n_kv, s, D] at the end; returns all that is stored, the latest token last.

        The results are views of memory that later calls write to.

        Raises:
            UnsupportedError: keys or values need gradients, which would not reach earlier calls.
            ShapeError: batch, heads, width or dtype differ from what is stored, or there is no room.
        """
        if torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad):
            raise UnsupportedError(
                f"{type(self).__name__} holds no gradients; generate under torch.no_grad(), or train "
                "without a cache"
            )
        added = keys.shape[2]
        if self._keys is not None:
            held = self._keys
            if (keys.shape[:2], keys.shape[3], keys.dtype) != (
                held.shape[:2],
                held.shape[3],
                held.dtype,
            ):
                raise ShapeError(
                    f"{type(self).__name__} holds {tuple(held.shape)} {held.dtype}, not "
                    f"{tuple(keys.shape)} {keys.dtype}; reset() it for another batch"
                )
        all_keys, all_values = self._room(keys, values)
        start, stop = self.stored, self.stored + added
        all_keys[:, :, start:stop] = keys
        all_values[:, :, start:stop] = values
        self.length, self.stored = self.length + added, stop
        return self.view()

    def view(self) -> tuple[Tensor, Tensor]:
        """All that is stored, [b, n_kv, stored, D]."""
        if self._keys is None or self._values is None:
            raise ShapeError(f"{type(self).__name__} is empty")
        return self._keys[:, :, : self.stored], self._values[:, :, : self.stored]

    def _room(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Memory with place for `keys` behind what is stored."""
        needed = self.stored + keys.shape[2]
        if self._keys is None or self._values is None or self._keys.shape[2] < needed:
            room = max(needed, 2 * self.stored, 64)
            self._keys = _grown(self._keys, keys, room, self.stored)
            self._values = _grown(self._values, values, room, self.stored)
        return self._keys, self._values

    def reset(self) -> None:
        """Forget all tokens; the next call may bring another batch."""
        self._keys = self._values = None
        self.length = self.stored = 0

    def crop(self, length: int) -> None:
        """Forget the tokens from position `length` on (speculative decoding)."""
        stored = self.stored - (self.length - length)
        needed = length if self.window is None else min(length, self.window - 1)
        if not (0 <= needed <= stored and length <= self.length):
            raise ShapeError(
                f"{type(self).__name__}: crop({length}) of {self.length} tokens, the last {self.stored} of "
                "which are held"
            )
        self.length, self.stored = length, stored

    def reorder(self, index: Tensor) -> None:
        """Take sequence index[i] for the i-th one (beam search); index: int64 [b]."""
        if self._keys is None or self._values is None:
            return
        if index.shape != self._keys.shape[:1]:
            raise ShapeError(
                f"{type(self).__name__}: reorder by {tuple(index.shape)} of {self._keys.shape[0]} sequences"
            )
        for held in (self._keys, self._values):  # in place: the memory may be fixed
            held[:, :, : self.stored] = held[index, :, : self.stored]


class StaticKVCache(KVCache):
    """A cache whose memory is taken once, at the first call, and written in place.

    Args:
        batch: sequences.
        max_length: tokens that fit.
        window: of a layer with sliding_window=window. Tokens that no later one sees make room when the
            memory is full, so that a text may be longer than max_length; a call may bring up to
            max_length - (window - 1) tokens. None: a full cache raises ShapeError.
    """

    def __init__(self, batch: int, max_length: int, *, window: int | None = None) -> None:
        super().__init__()
        if batch < 1 or max_length < 1 or (window is not None and not 1 <= window <= max_length):
            raise ShapeError(
                f"StaticKVCache({batch}, {max_length}, window={window}): sizes must be positive and the "
                "window no longer than max_length"
            )
        self.batch, self.max_length, self.window = batch, max_length, window

    def _room(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        added = keys.shape[2]
        kept = self.stored if self.window is None else min(self.stored, self.window - 1)
        if keys.shape[0] != self.batch or kept + added > self.max_length:
            raise ShapeError(
                f"StaticKVCache: {keys.shape[0]} sequences with {added} tokens more than the {kept} that "
                f"are needed, room is for {self.batch} with {self.max_length}; use a larger max_length, "
                "or KVCache, which grows"
            )
        if self._keys is None or self._values is None:
            self._keys = _grown(None, keys, self.max_length, 0)
            self._values = _grown(None, values, self.max_length, 0)
        elif self.stored + added > self.max_length:
            for held in (self._keys, self._values):
                held[:, :, :kept] = held[:, :, self.stored - kept : self.stored].clone()
            self.stored = kept
        return self._keys, self._values

    def reset(self) -> None:
        """Forget all tokens; the memory stays."""
        self.length = self.stored = 0


def _grown(held: Tensor | None, like: Tensor, room: int, stored: int) -> Tensor:
    grown = like.new_empty(*like.shape[:2], room, like.shape[3])
    if held is not None:
        grown[:, :, :stored] = held[:, :, :stored]
    return grown
