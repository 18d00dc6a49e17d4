"""What is in force, in words and numbers: one text for the log line at start-up and for ``doctor``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from windowed_mtp.paging import windowed_length_bound
from windowed_mtp.window import SinkWindow


@dataclass(frozen=True)
class LayerGroup:
    """Draft layers that are windowed alike.

    Attributes
    ----------
    layers : int or None
        How many; ``None`` where that is not known yet.
    backend : str
        Name of their attention backend.
    block_size : int
        Tokens in a block of their kernel, to which sink and window are rounded.
    """

    layers: int | None
    backend: str
    block_size: int


@dataclass(frozen=True)
class Drafting:
    """A drafter's passes in a step.

    Attributes
    ----------
    tokens : int
        Tokens drafted a step.
    one_pass : bool
        Whether it drafts all of them in one pass.
    window_first_pass : bool
        Whether that pass, or the first of several, is windowed.
    """

    tokens: int
    one_pass: bool = False
    window_first_pass: bool = True

    @property
    def queries(self) -> list[int]:
        """Most queries of a sequence in each pass of a step."""
        if self.one_pass:
            return [2 * self.tokens + 1]
        return [self.tokens + 1] + [1] * (self.tokens - 1)


def sink_tokens(window: SinkWindow, block_size: int) -> int:
    """Sink tokens that are read once rounded up to blocks."""
    return -(-window.sink // block_size) * block_size


def engages_from(window: SinkWindow, block_size: int) -> int:
    """Context, in tokens, from which on a query skips at least one block.

    With n sink blocks of B tokens that is (n + 1) B + window: the block after the sinks has then left the window.
    """
    return max(sink_tokens(window, block_size) + block_size + window.window, window.min_context)


def most_keys(context: int, queries: int, window: SinkWindow, block_size: int) -> int:
    """Most keys that a pass of ``queries`` queries reads of a sequence of at most ``context`` tokens."""
    return windowed_length_bound(context, queries, block_size=block_size, window=window)


def keys_a_step(context: int, drafting: Drafting, window: SinkWindow, block_size: int) -> int:
    """Most draft keys that one layer reads of a sequence in one step."""
    passes = [most_keys(context, queries, window, block_size) for queries in drafting.queries]
    if not drafting.window_first_pass:
        passes[0] = context
    return sum(passes)


def describe(window: SinkWindow, drafting: Drafting, groups: Sequence[LayerGroup], max_model_len: int) -> str:
    """Say in one line what is in force.

    Parameters
    ----------
    window : SinkWindow
        What was asked for.
    drafting : Drafting
        The drafter's passes.
    groups : sequence of LayerGroup
        The windowed layers, by backend and block size.
    max_model_len : int
        Longest context that the engine serves, in tokens.
    """
    return "; ".join(_describe(window, drafting, group, max_model_len) for group in groups) + "."


def _describe(window: SinkWindow, drafting: Drafting, group: LayerGroup, max_model_len: int) -> str:
    block = group.block_size
    layers = "the draft's layers" if group.layers is None else f"{group.layers} draft layer{'s' * (group.layers != 1)}"
    text = f"{layers} with {group.backend}, in blocks of {_tokens(block)}: "
    start = engages_from(window, block)
    if start > max_model_len:
        return f"{text}every key is read up to the maximum length of {max_model_len:,}, as {_threshold(window, block)}"
    sinks = sink_tokens(window, block)
    recent = f"{window.window:,}" if block == 1 else f"{window.window:,} to {window.window + block - 1:,}"
    read = f"the last {recent} tokens (window {window.window:,})"
    if sinks:
        read = f"the first {sinks:,} (sink {window.sink:,}) and {read}"
    full = len(drafting.queries) * max_model_len
    return (
        f"{text}from a context of {_tokens(start)} on{_minimum(window, start)}, a query reads {read}; "
        f"{_passes(drafting)}; a step of {_tokens(drafting.tokens, 'drafted token')} at {max_model_len:,} reads at "
        f"most {keys_a_step(max_model_len, drafting, window, block):,} keys a layer instead of {full:,}"
    )


def _threshold(window: SinkWindow, block: int) -> str:
    start = engages_from(window, block)
    if start == window.min_context:
        return f"min_context is {start:,}"
    return f"sink {window.sink:,} and window {window.window:,} leave keys out only from {start:,} on"


def _minimum(window: SinkWindow, start: int) -> str:
    return " (min_context)" if start == window.min_context else ""


def _passes(drafting: Drafting) -> str:
    if drafting.one_pass or drafting.tokens == 1:
        return "the step's one pass is windowed"
    if drafting.window_first_pass:
        return f"all {drafting.tokens} passes of a step are windowed"
    return f"{drafting.tokens - 1} of the {drafting.tokens} passes of a step are windowed, all but the first"


def _tokens(count: int, noun: str = "token") -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"
