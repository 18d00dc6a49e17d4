"""The target model run by itself, as the reference that a drafter is compared with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from windowed_mtp.engines.transformers.compat import cache_argument
from windowed_mtp.errors import GenerationError

PLAIN: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Arguments of ``generate`` that leave the target's distribution as it is, whatever the checkpoint's defaults."""


def check_length(model: PreTrainedModel, prompt_tokens: int, new_tokens: int) -> None:
    """Check that a prompt and what is to be generated fit the model's positions.

    Raises
    ------
    GenerationError
        If they do not, naming the limit.
    """
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and prompt_tokens > limit:
        raise GenerationError(
            f"the prompt has {prompt_tokens} tokens, but the model's positions end at {limit}; shorten the prompt."
        )
    if limit is not None and prompt_tokens + new_tokens > limit:
        raise GenerationError(
            f"prompt ({prompt_tokens}) and new tokens ({new_tokens}) together exceed the model's {limit} positions; "
            "shorten the prompt or ask for fewer new tokens."
        )


def generate(model: Any, ids: Tensor, **options: Any) -> Any:
    """Call ``model.generate`` on a prompt ``[1, n]`` int64 without padding."""
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)


LAYER_ROUNDING = 2.0
"""Largest relative error that stands for one layer's rounding, in units of the dtype's eps.

Rounding to nearest has errors of up to eps/2, uniformly, so of eps/sqrt(12) in root mean square. A layer rounds what it
adds to the residual stream about 16 times on the way (norms, projections, attention, activation, sums); as a random
walk that is 4·eps/sqrt(12), which is the root mean square of errors that are uniform up to 2·eps.
"""


@torch.no_grad()
def chunked_logits(
    model: PreTrainedModel, ids: Tensor, prompt_tokens: int, chunk: int, noise: torch.Generator | None = None
) -> Tensor:
    """Logits of every generated token when the target reads the prompt at once and the rest in chunks.

    This is how a target verifies drafts of ``chunk - 1`` tokens, and in low precision it is not quite how it decodes
    one token at a time.

    Parameters
    ----------
    model : PreTrainedModel
        The target.
    ids : Tensor
        Prompt and generated tokens, ``[1, n]`` int64.
    prompt_tokens : int
        Number of tokens in the prompt.
    chunk : int
        Tokens in a forward pass after the prompt.
    noise : torch.Generator, optional
        Source of random errors, on the CPU: after the prompt, what each decoder layer takes is changed by as much as
        rounding changes it in one layer (``LAYER_ROUNDING``).

    Returns
    -------
    Tensor
        ``[n - prompt_tokens, V]`` float32; row i is the distribution that generated token i was drawn from.
    """
    cache = DynamicCache(config=model.config)
    options: dict[str, Any] = {"use_cache": True, cache_argument(model): cache}
    rows = [model(input_ids=ids[:, :prompt_tokens], logits_to_keep=1, **options).logits[0].float()]
    with nullcontext() if noise is None else _rounded_more(model, cache, noise):
        for part in ids[:, prompt_tokens:-1].split(chunk, dim=1):
            if part.shape[1]:
                rows.append(model(input_ids=part, logits_to_keep=0, **options).logits[0].float())
    return torch.cat(rows)


@contextmanager
def _rounded_more(model: PreTrainedModel, cache: DynamicCache, noise: torch.Generator) -> Iterator[None]:
    """Change what decoder layers take in passes with ``cache``, and in no others."""

    def change(module: nn.Module, args: tuple[Any, ...], kwargs: Any = None) -> Any:
        if not any(value is cache for value in (*args, *(kwargs or {}).values())):
            return None
        hidden = args[0] if args else kwargs["hidden_states"]
        size = LAYER_ROUNDING * torch.finfo(hidden.dtype).eps
        error = size * (2 * torch.rand(hidden.shape, generator=noise, dtype=torch.float64) - 1)
        changed = (hidden * (1 + error.to(hidden.device))).to(hidden.dtype)
        return ((changed, *args[1:]), kwargs) if args else ((), {**kwargs, "hidden_states": changed})

    layers = model.get_decoder().layers
    handles = [layer.register_forward_pre_hook(change, with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def first_difference(a: Tensor, b: Tensor) -> int | None:
    """Index of the first token in which two sequences ``[n]`` and ``[m]`` differ; ``None`` if they are equal."""
    shared = min(len(a), len(b))
    different = (a[:shared] != b[:shared]).nonzero()
    if len(different):
        return int(different[0])
    return None if len(a) == len(b) else shared


def top_margin(logits: Tensor) -> float:
    """Distance between the two largest of the logits ``[V]``."""
    best, second = logits.topk(2).values.tolist()
    return best - second
