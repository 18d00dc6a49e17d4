"""How good the reference checkpoint is: held-out loss, and how many of its drafts the target accepts."""

from __future__ import annotations

import inspect

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3_5ForCausalLM

from windowed_mtp.reference.model import MTPHead


@torch.no_grad()
def next_token_loss(model: Qwen3_5ForCausalLM, stream: Tensor, length: int, batch: int = 8) -> float:
    """Mean next-token loss over a stream of tokens cut into pieces.

    Parameters
    ----------
    model : Qwen3_5ForCausalLM
        The target.
    stream : Tensor of int64, shape (tokens,)
        Held-out text; what does not fill the last piece is left out.
    length : int
        Tokens a piece; each piece is read without what is before it.
    batch : int
        Pieces a forward pass.

    Returns
    -------
    float
        Nats a token.
    """
    pieces = stream[: len(stream) // length * length].view(-1, length)
    total = 0.0
    for ids in pieces.split(batch):
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        total += F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").item()
    return total / (pieces.shape[0] * (length - 1))


@torch.no_grad()
def greedy_continuation(model: Qwen3_5ForCausalLM, prompts: Tensor, tokens: int) -> Tensor:
    """Extend prompts by the target's most probable tokens, end-of-text included.

    Parameters
    ----------
    model : Qwen3_5ForCausalLM
        The target.
    prompts : Tensor of int64, shape (B, P)
        Prompts of one length.
    tokens : int
        Tokens to add, at least 1.

    Returns
    -------
    Tensor of int64, shape (B, P + tokens)
        Prompts and continuations.
    """
    cache = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"  # from 5.24
    output = model(input_ids=prompts, use_cache=True, logits_to_keep=1)
    ids = [prompts, output.logits[:, -1:].argmax(dim=-1)]
    for _ in range(tokens - 1):
        output = model(input_ids=ids[-1], **{cache: output.past_key_values}, use_cache=True)
        ids.append(output.logits[:, -1:].argmax(dim=-1))
    return torch.cat(ids, dim=1)


@torch.no_grad()
def draft_matches(model: Qwen3_5ForCausalLM, head: MTPHead, ids: Tensor, depth: int, last: int) -> Tensor:
    """Which drafts equal the text, when every draft starts from the target's own hidden state.

    Parameters
    ----------
    model, head : Qwen3_5ForCausalLM, MTPHead
        The target and its head.
    ids : Tensor of int64, shape (B, T)
        Texts; the target's greedy continuation, so that "equal" means "accepted".
    depth : int
        Draft steps.
    last : int
        Number of bases, the last of each text.

    Returns
    -------
    Tensor of bool, shape (depth, B, last)
        Whether step ``s`` of base ``i`` proposes token ``i+s+1``, the drafts of the steps before taken as accepted.
        The last base is T - depth - 2.
    """
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    outputs = head.unroll(model.model.embed_tokens(ids[:, :-1]), hidden, depth, last)
    end = ids.shape[1] - depth + 1
    return torch.stack(
        [
            model.lm_head(output).argmax(dim=-1) == ids[:, end - last + step : end + step]
            for step, output in enumerate(outputs)
        ]
    )


def conditional_acceptance(matches: Tensor) -> list[float]:
    """Conditional acceptance: share accepted at each step among drafts whose earlier steps were all accepted.

    Parameters
    ----------
    matches : Tensor of bool, shape (depth, B, bases)
        From `draft_matches`.

    Returns
    -------
    list of float
        One share a step; 0 where no draft got so far.
    """
    counts = matches.long().cumprod(dim=0).flatten(1).sum(dim=1).tolist()
    return [count / max(before, 1) for before, count in zip([matches[0].numel(), *counts], counts, strict=False)]


def acceptance_length(matches: Tensor) -> float:
    """Tokens emitted a step when speculative decoding walks through the texts.

    Parameters
    ----------
    matches : Tensor of bool, shape (depth, B, bases)
        From `draft_matches`.

    Returns
    -------
    float
        Mean over the steps of the accepted drafts and the target's own token; from 1 to depth + 1.
    """
    accepted = matches.long().cumprod(dim=0).sum(dim=0).tolist()
    steps = emitted = 0
    for row in accepted:
        base = 0
        while base < len(row):
            steps += 1
            emitted += row[base] + 1
            base += row[base] + 1
    return emitted / steps
