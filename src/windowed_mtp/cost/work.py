"""Bytes that a decode step must move and operations that it must do, on one device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from windowed_mtp.cost.geometry import Attention, Geometry, Layers, Weights
from windowed_mtp.window import SinkWindow

CACHE_WIDTH = {"bf16": 2, "fp8": 1}
"""Bytes of a cached element, by the cache's type."""

_OPERANDS = {2: "bf16", 1: "fp8"}


class Work(NamedTuple):
    """A part of a pass.

    Attributes
    ----------
    part : str
        What it is, such as ``"routed experts"``.
    bytes : float
        Bytes read and written.
    ops : float
        Operations, two for each multiply-add.
    operands : str
        Type of the operands, which decides the rate: ``"bf16"`` or ``"fp8"``.
    """

    part: str
    bytes: float
    ops: float
    operands: str = "bf16"


def verify_work(
    geometry: Geometry,
    context: int,
    gamma: int,
    batch: int = 1,
    *,
    kv_dtype: str = "bf16",
    tensor_parallel: int = 1,
) -> list[Work]:
    """List what the target's pass over ``gamma + 1`` tokens of each sequence takes.

    Weights are read once a pass, of the routed experts the expected number of distinct ones; the cache is read once
    whatever the number of queries. A recurrent state is read and written once. Activations, norms and the traffic
    between devices are left out, so this bounds from below.

    Parameters
    ----------
    geometry : Geometry
        The model.
    context : int
        Cached tokens of each sequence when the step begins.
    gamma : int
        Draft tokens a step; 0 is a plain decode step.
    batch : int
        Sequences.
    kv_dtype : {"bf16", "fp8"}
        Type of the cached keys and values.
    tensor_parallel : int
        Devices that share each layer.

    Returns
    -------
    list of Work
        The parts.
    """
    queries = gamma + 1
    keys = context + queries
    work = _layers(geometry.target, queries, keys, context, batch, CACHE_WIDTH[kv_dtype], tensor_parallel)
    return [*work, *_output_head(geometry, geometry.vocabulary, queries * batch, tensor_parallel)]


def draft_work(
    geometry: Geometry,
    context: int,
    gamma: int,
    batch: int = 1,
    *,
    window: SinkWindow | None = None,
    head_rows: int | None = None,
    kv_dtype: str = "bf16",
    tensor_parallel: int = 1,
) -> list[Work]:
    """List what the draft's ``gamma`` passes take: the first over ``gamma + 1`` tokens a sequence, the others over one.

    The first pass covers all verified positions, accepted or not, as engines with static shapes do it. Every pass reads
    the draft layer, the experts that its tokens use, and the output head for its last token.

    Parameters
    ----------
    geometry, context, gamma, batch, kv_dtype, tensor_parallel
        As for `verify_work`.
    window : SinkWindow, optional
        What a draft query reads of the cache, to the entry; everything without one.
    head_rows : int, optional
        Rows of the output head that the draft computes; all of them by default.

    Returns
    -------
    list of Work
        The parts, summed over the passes.
    """
    rows = geometry.vocabulary if head_rows is None else min(head_rows, geometry.vocabulary)
    work: list[Work] = []
    for index in range(gamma):
        queries = gamma + 1 if index == 0 else 1
        length = context + gamma + 1 + index
        keys = length if window is None else min(length, window.num_keys(length) + queries - 1)
        work += _layers(geometry.draft, queries, keys, keys - queries, batch, CACHE_WIDTH[kv_dtype], tensor_parallel)
        work += _output_head(geometry, rows, batch, tensor_parallel)
    return _sum(work)


def _layers(
    layers: Layers, queries: int, keys: int, before: int, batch: int, cache_width: int, devices: int
) -> list[Work]:
    """One pass; each query reads ``before`` keys and those of the pass up to its own, ``keys`` at most."""
    tokens = queries * batch
    work: list[Work] = []
    for attention in layers.attention:
        work += [_product("attention projections", weights, tokens, devices) for weights in attention.weights]
        work.append(_attend(attention, queries, keys, before, batch, cache_width, devices))
    for recurrent in layers.recurrent:
        work += [_product("recurrent layers", weights, tokens, devices) for weights in recurrent.weights]
        state = 2 * recurrent.state_bytes * batch / devices
        work.append(Work("recurrent layers", state, recurrent.state_ops * tokens / devices))
    for experts in layers.experts:
        work += [_product("router and shared experts", weights, tokens, devices) for weights in experts.always]
        one = _product("routed experts", experts.expert, tokens * experts.per_token, devices)
        work.append(one._replace(bytes=one.bytes * experts.expected_distinct(tokens)))
    work += [_product("dense layers", weights, tokens, devices) for weights in layers.dense]
    return _sum(work)


def _attend(
    attention: Attention, queries: int, keys: int, before: int, batch: int, cache_width: int, devices: int
) -> Work:
    pairs = queries * before + queries * (queries + 1) // 2
    ops = 2 * attention.heads * (attention.score_size + attention.value_size) * pairs * batch / devices
    heads = max(attention.cache_heads / devices, 1)
    moved = (keys + queries) * heads * attention.cache_size * cache_width * batch  # this pass's own are written too
    return Work("attention over the cache", moved, ops)


def _output_head(geometry: Geometry, rows: int, tokens: int, devices: int) -> list[Work]:
    weights = Weights(elements=rows * geometry.hidden, width=geometry.head_width)
    return [_product("output head", weights, tokens, devices)]


def _product(part: str, weights: Weights, tokens: int, devices: int) -> Work:
    elements = weights.elements / (1 if weights.replicated else devices)
    return Work(part, elements * weights.width, 2 * elements * tokens, _OPERANDS[weights.width])


def _sum(work: Iterable[Work]) -> list[Work]:
    """Parts of one name and type added up, in order of appearance."""
    total: dict[tuple[str, str], Work] = {}
    for part in work:
        key = (part.part, part.operands)
        so_far = total.get(key, Work(part.part, 0.0, 0.0, part.operands))
        total[key] = so_far._replace(bytes=so_far.bytes + part.bytes, ops=so_far.ops + part.ops)
    return list(total.values())
