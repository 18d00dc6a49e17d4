"""The gated delta rule for training: the values of transformers' PyTorch fallback with a backward pass that scales.

The fallback selects and assigns one chunk at a time inside full-length tensors; each of those has a full-length
gradient, so its backward pass is quadratic in the number of chunks. Here chunks are separate tensors, and only the
recurrence itself is inside the loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5


def chunked_gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, chunk_size: int = 64, **_: Any
) -> tuple[Tensor, None]:
    """Gated delta rule over whole sequences from an empty state, queries and keys L2-normalised.

    With ``S`` the state, ``S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - k_t exp(g_t) S_{t-1})`` and ``o_t = q_t S_t``, in
    the chunked form of Yang et al., "Gated Delta Networks" (arXiv 2412.06464).

    Parameters
    ----------
    query, key : Tensor, shape (B, T, key_heads, key_dim)
        Not yet normalised.
    value : Tensor, shape (B, T, heads, value_dim)
        ``heads`` is a multiple of ``key_heads``.
    g, beta : Tensor, shape (B, T, heads)
        Logarithm of the decay, and the writing strength.
    chunk_size : int
        Tokens a chunk.

    Returns
    -------
    tuple of (Tensor, None)
        Output of shape (B, T, heads, value_dim) in the query's data type, and no final state.
    """
    length, groups = value.shape[1], value.shape[2] // key.shape[2]
    query, key = (F.normalize(x.float(), dim=-1).repeat_interleave(groups, dim=2) for x in (query, key))
    query = query * query.shape[-1] ** -0.5
    padding = -length % chunk_size
    q, k, v, b, decay = (
        F.pad(x.float(), (0, 0) * (x.dim() - 2) + (0, padding)).transpose(1, 2).unflatten(2, (-1, chunk_size))
        for x in (query, key, value, beta, g)
    )  # (B, heads, chunks, chunk_size, dim); beta and decay without the last

    total = decay.cumsum(dim=-1)
    upper = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=q.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(upper, -torch.inf).exp()
    k_beta, grown = k * b[..., None], total.exp()[..., None]
    system = (k_beta @ k.mT) * between
    right = torch.cat([v * b[..., None], k_beta * grown], dim=-1)
    new, read = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).split(
        [v.shape[-1], k.shape[-1]], dim=-1
    )
    write = (k * (total[..., -1:] - total).exp()[..., None]).mT
    last = total[..., -1, None, None].exp()

    state = torch.zeros(*q.shape[:2], k.shape[-1], v.shape[-1], device=q.device)
    states, values = [], []
    for new_c, read_c, write_c, last_c in zip(*(x.unbind(dim=2) for x in (new, read, write, last)), strict=True):
        states.append(state)
        values.append(new_c - read_c @ state)
        state = state * last_c + write_c @ values[-1]
    output = (q * grown) @ torch.stack(states, dim=2) + ((q @ k.mT) * between) @ torch.stack(values, dim=2)
    return output.flatten(2, 3)[:, :, :length].transpose(1, 2).to(value.dtype), None


@contextmanager
def trainable_delta_rule() -> Iterator[None]:
    """Let Qwen3.5 models use `chunked_gated_delta_rule` inside the context."""
    original = modeling_qwen3_5.torch_chunk_gated_delta_rule
    modeling_qwen3_5.torch_chunk_gated_delta_rule = chunked_gated_delta_rule
    try:
        yield
    finally:
        modeling_qwen3_5.torch_chunk_gated_delta_rule = original
