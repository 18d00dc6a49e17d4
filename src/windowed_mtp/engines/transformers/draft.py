"""One head drafting for one sequence: which entries each layer runs over, and what it keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from windowed_mtp.engines.transformers.cache import DraftKV, KeepAll, Ring
from windowed_mtp.engines.transformers.heads.base import DraftHead
from windowed_mtp.window import SinkWindow

Keep = Literal["all", "ring"]
Prefill = Literal["full", "pruned"]
Choose = Callable[[Tensor, Tensor], Tensor]
"""Picks a token from logits ``[1, V]``, given those drafted so far in the step ``[1, k]``; returns ``[1, 1]`` int64."""

PASS_LENGTH = 512
"""Longest pass that needs a mask: longer ones are split, so that no mask grows with the square of the prompt."""
BLIND_LENGTH = 4096
"""Longest pass whose outputs nobody uses, and whose attention is there only because the layer has it."""


class _Rows:
    """Hidden states by entry, in segments of consecutive entries."""

    def __init__(self) -> None:
        self._segments: list[tuple[int, Tensor]] = []

    def add(self, start: int, rows: Tensor) -> None:
        if rows.shape[1]:
            self._segments.append((start, rows))

    def take(self, start: int, end: int) -> Tensor:
        parts = [
            rows[:, max(start, s) - s : end - s] for s, rows in self._segments if s < end and start < s + rows.shape[1]
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def followed_by(self, start: int, rows: Tensor) -> _Rows:
        joined = _Rows()
        joined._segments = [*self._segments]
        joined.add(start, rows)
        return joined

    def drop_before(self, entry: int) -> None:
        self._segments = [
            (max(s, entry), rows[:, max(s, entry) - s :]) for s, rows in self._segments if s + rows.shape[1] > entry
        ]


class DraftState:
    """A head's state for one sequence.

    With ``n`` known tokens, layer k (from 0) has ``n - 1 - k`` final entries: those whose tokens are known. Entries
    that hold drafted tokens are provisional and are forgotten before the next step, which rebuilds them from the
    verified tokens and the target's own hidden states.

    Parameters
    ----------
    head : DraftHead
        The head; may be shared between states.
    window : SinkWindow or None
        What a draft query reads; ``None`` for everything.
    num_speculative_tokens : int
        Largest depth γ.
    keep : {"all", "ring"}
        Whether every entry is kept, or sink + window + γ slots.
    prefill : {"full", "pruned"}
        Whether the entries that no later query reads are run at all.
    """

    def __init__(
        self,
        head: DraftHead,
        window: SinkWindow | None,
        num_speculative_tokens: int,
        keep: Keep = "all",
        prefill: Prefill = "full",
    ) -> None:
        self.head = head
        self.window = window
        self.pruned = prefill == "pruned"
        self.num_speculative_tokens = num_speculative_tokens
        self.num_layers = min(head.num_layers, num_speculative_tokens)
        self.kv: list[DraftKV] = [
            Ring(window, num_speculative_tokens) if keep == "ring" and window is not None else KeepAll(window)
            for _ in range(self.num_layers)
        ]
        self._final = [0] * self.num_layers
        self._pending = [_Rows() for _ in range(self.num_layers)]
        self._observed = 0

    @property
    def keys_read(self) -> int:
        """Keys read so far, summed over passes and layers."""
        return sum(kv.keys_read for kv in self.kv)

    @property
    def num_bytes(self) -> int:
        """Bytes of draft KV."""
        return sum(kv.num_bytes for kv in self.kv)

    def observe(self, features: Tensor) -> None:
        """Take the target's features of newly verified tokens.

        Parameters
        ----------
        features : Tensor
            ``[1, m, F]``, following on from those given before.
        """
        hidden = self.head.fuse(features)
        self._pending[0].add(self._observed, hidden)
        self._observed += hidden.shape[1]

    def advance(self, ids: Tensor) -> None:
        """Run every layer over the final entries that it has not seen (the draft's prefill).

        Only the layers before the last have outputs that somebody uses: the last layer's keys and values depend on
        its inputs alone, and a proposal comes from the pass after.

        Parameters
        ----------
        ids : Tensor
            Known tokens, ``[1, n]`` int64.
        """
        known = ids.shape[1] - 1
        for layer in range(self.num_layers):
            self.kv[layer].blind = layer + 1 == self.num_layers
            self._chain(layer, ids, ids[:, :0], end=known - layer, provisional=None)
            self.kv[layer].blind = False

    def propose(self, ids: Tensor, depth: int, choose: Choose) -> Tensor:
        """Draft ``depth`` tokens.

        Parameters
        ----------
        ids : Tensor
            Known tokens, ``[1, n]`` int64; features of the first ``n - 1`` have been observed.
        depth : int
            Number of tokens to draft, 0 to γ.
        choose : callable
            Picks a token from logits ``[1, V]`` and the tokens drafted before it.

        Returns
        -------
        Tensor
            ``[1, depth]`` int64.
        """
        entries = ids.shape[1] - 1
        drafted = ids[:, :0]
        out: Any = None
        last: Any = None
        provisional: Tensor | None = None
        for step in range(depth):
            layer = min(step, self.num_layers - 1)
            if step < self.num_layers:
                out, last, provisional = self._chain(layer, ids, drafted, entries, provisional)
            else:
                out, last = self._run(layer, entries + step - self.num_layers, drafted[:, -1:], last)
            drafted = torch.cat([drafted, choose(self.head.logits(layer, out[:, -1]), drafted)], dim=1)
        for kv, final in zip(self.kv, self._final, strict=True):
            kv.crop(final)
        return drafted

    def _chain(
        self, layer: int, ids: Tensor, drafted: Tensor, end: int, provisional: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Run ``layer`` over its entries up to ``end``, which hold known tokens, then drafted ones.

        ``provisional`` holds the hidden states of the last entries, where they rest on drafted tokens. Returns the
        last pass's outputs, the hidden state after the last entry, and those that rest on drafted tokens.
        """
        start, final = self._final[layer], ids.shape[1] - 1 - layer
        tokens = torch.cat([ids[:, start:], drafted], dim=1)[:, 1 + layer :]  # of the entries from ``start`` on
        rows, kv = self._pending[layer], self.kv[layer]
        if provisional is not None:
            rows = rows.followed_by(end - provisional.shape[1], provisional)
        out = recycled = None
        unverified = []
        for first, last in self._needed(layer, start, end, known=final + layer):
            if first > kv.length:
                kv.skip_to(first)
            for a, b in self._passes(first, last, kv.blind):
                out, recycled = self._run(layer, a, tokens[:, a - start : b - start], rows.take(a, b))
                if layer + 1 < self.num_layers and a < final:
                    self._pending[layer + 1].add(a, recycled[:, : final - a])
                if b > final:
                    unverified.append(recycled[:, max(a, final) - a :])
        self._pending[layer].drop_before(final)
        self._final[layer] = max(start, final)
        return out, None if recycled is None else recycled[:, -1:], torch.cat(unverified, dim=1) if unverified else None

    def _run(self, layer: int, start: int, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)[None]
        return self.head.forward(layer, tokens, hidden, positions, self.kv[layer])

    def _needed(self, layer: int, start: int, end: int, known: int) -> list[tuple[int, int]]:
        """Ranges of the entries in ``[start, end)`` that have to be run, with ``known`` entries in the first layer.

        The last layer must fill its sink + window + γ slots. A query reads window - 1 entries before its own, so the
        layer before must be exact from that much earlier on, and so on down to the first.
        """
        ranges = [(start, end)]
        if self.window is not None and self.pruned:
            above = self.num_layers - 1 - layer
            tail = known - (self.num_layers - 1) - self.window.window - self.num_speculative_tokens
            tail -= above * (self.window.window - 1)
            if tail > max(start, self.window.sink):
                ranges = [(start, min(end, self.window.sink)), (tail, end)]
        return [(a, b) for a, b in ranges if a < b]  # a short prompt leaves a layer without entries

    def _passes(self, start: int, end: int, blind: bool) -> Iterator[tuple[int, int]]:
        """Split a range into passes; from an empty cache, unless blind, the first ends where the window engages."""
        if start == 0 and not blind:
            inert = end if self.window is None else max(self.window.span, self.window.min_context - 1)
            start = min(end, inert)
            yield 0, start
        length = BLIND_LENGTH if blind else PASS_LENGTH
        for first in range(start, end, length):
            yield first, min(first + length, end)
