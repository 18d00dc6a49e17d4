"""The target model run by itself, as the reference that a drafter is compared with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
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


@torch.no_grad()
def chunked_logits(model: PreTrainedModel, ids: Tensor, prompt_tokens: int, chunk: int) -> Tensor:
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

    Returns
    -------
    Tensor
        ``[n - prompt_tokens, V]`` float32; row i is the distribution that generated token i was drawn from.
    """
    cache = {cache_argument(model): DynamicCache(config=model.config)}
    parts = [ids[:, :prompt_tokens], *ids[:, prompt_tokens:-1].split(chunk, dim=1)]
    rows = []
    for part in parts:
        if part.shape[1]:
            keep = 1 if part is parts[0] else 0
            rows.append(model(input_ids=part, use_cache=True, logits_to_keep=keep, **cache).logits[0].float())
    return torch.cat(rows)


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
