"""Keys and values of the positions that a model has seen, so that one more token costs one position.

Legend: B batch, T new positions, S all positions so far (the new ones included), G kv heads, E head width.
"""

from __future__ import annotations

from typing import Protocol

import torch

from iota.config.schema import ModelConfig


class Past(Protocol):
    """What came before the positions that are being computed, for every block of a model.

    `positions`: rotary positions of the new ones, int64 [T] or [B, T], below the model's sequence. `mask`: what each of
    them may look at, bool or additive float broadcastable to [B, 1, T, S]; None: all that came before, when T = 1, and
    else only each other, causally, because nothing came before.
    """

    @property
    def positions(self) -> torch.Tensor: ...

    @property
    def mask(self) -> torch.Tensor | None: ...

    def extend(self, block: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep the new positions' rotated keys and values [B, G, T, E] of a block; all of them, [B, G, S, E]."""
        ...


class KeyValueCache:
    """A `Past` of at most `model.sequence` positions, every row of the batch at the same one.

    Call `begin` before each forward pass through all stages, on the CPU. After a pass that failed half way, throw it
    away. Holds 2 * blocks * B * model.sequence * G * E values.
    """

    def __init__(self, model: ModelConfig) -> None:
        self._limit = model.sequence
        self._start = self.length = 0
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.positions = torch.empty(0, dtype=torch.int64)
        self.mask: torch.Tensor | None = None

    def begin(self, new: int) -> None:
        """The next `new` positions follow; `length`, the positions held, counts them from now on."""
        assert 0 < new <= self._limit - self.length, (new, self.length, self._limit)
        self._start, self.length = self.length, self.length + new
        self.positions = torch.arange(self._start, self.length)
        several = self._start > 0 and new > 1
        self.mask = self.positions[:, None] >= torch.arange(self.length) if several else None

    def extend(self, block: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Past.extend`."""
        if block not in self._kept:
            batch, heads, _, head = keys.shape
            room = (batch, heads, self._limit, head)
            self._kept[block] = keys.new_empty(room), values.new_empty(room)
        kept_keys, kept_values = self._kept[block]
        kept_keys[:, :, self._start : self.length] = keys
        kept_values[:, :, self._start : self.length] = values
        return kept_keys[:, :, : self.length], kept_values[:, :, : self.length]
