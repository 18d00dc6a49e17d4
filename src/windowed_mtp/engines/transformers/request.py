"""What the embedded engine refuses, each in one sentence, before anything runs."""

from __future__ import annotations

import inspect
import warnings
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.generation import GenerationMixin

from windowed_mtp.engines.transformers.compat import cache_argument
from windowed_mtp.errors import GenerationError, VocabularyError, WindowError
from windowed_mtp.vocab import HotSet
from windowed_mtp.window import SinkWindow

_GENERATE = inspect.unwrap(GenerationMixin.generate).__code__


def check_options(
    window: SinkWindow | None, num_speculative_tokens: int, keep: str, prefill: str, hot: HotSet | None = None
) -> None:
    """Check that a drafter's options fit together.

    Raises
    ------
    WindowError
        If they do not.
    VocabularyError
        If the hot vocabulary is something else.

    Warns
    -----
    UserWarning
        If the window is shorter than a first pass of γ + 1 entries.
    """
    if not isinstance(num_speculative_tokens, int) or num_speculative_tokens < 1:
        raise WindowError(
            f"num_speculative_tokens is {num_speculative_tokens!r}, but it must be a whole number of at least 1; "
            "to decode without speculation, call generate without the drafter."
        )
    if not isinstance(window, SinkWindow | None):
        raise WindowError(
            f"window is {window!r}, but it must be a SinkWindow, or None to read everything; "
            "pass window=SinkWindow(sink=..., window=...)."
        )
    if not isinstance(hot, HotSet | None):
        raise VocabularyError(
            f"hot_vocabulary is of type {type(hot).__name__}, but it must be a HotSet; "
            "pass hot_vocabulary=HotSet(HotVocabulary.load(...), size=...)."
        )
    if keep not in ("all", "ring"):
        raise WindowError(f"keep is {keep!r}, but it must be 'all' or 'ring'.")
    if prefill not in ("full", "pruned"):
        raise WindowError(f"prefill is {prefill!r}, but it must be 'full' or 'pruned'.")
    if prefill == "pruned" and keep == "all":
        raise WindowError("prefill='pruned' leaves out keys that keep='all' promises to hold; use keep='ring' with it.")
    if keep == "ring" and window is None:
        raise WindowError("keep='ring' needs a window to know what to keep; pass window=SinkWindow(...).")
    if keep == "ring" and window is not None and window.min_context > window.span:
        raise WindowError(
            f"min_context {window.min_context} is above sink + window ({window.span}), but a ring no longer has the "
            "keys that would be read below it; use keep='all' or lower min_context."
        )
    if window is not None and window.window < num_speculative_tokens + 1:
        warnings.warn(
            f"the window of {window.window} is shorter than the {num_speculative_tokens + 1} entries of a draft's "
            "first pass, so later drafted tokens will not see the verified ones; a window of at least "
            f"{num_speculative_tokens + 1} is advised.",
            stacklevel=3,
        )


def check_request(
    own_model: PreTrainedModel,
    model: PreTrainedModel,
    ids: Tensor,
    config: Any,
    model_kwargs: dict[str, Any],
) -> DynamicCache:
    """Check one call of ``generate`` and return the cache that it made.

    Raises
    ------
    GenerationError
        If the request is one that the engine does not serve.
    """
    if not any(model is module for module in own_model.modules()):  # itself, or what torch.compile or PEFT wrapped
        raise GenerationError("this drafter was made for another model; call WindowedMTP.from_model with this one.")
    if config.num_beams > 1:
        raise GenerationError(
            f"beam search (num_beams={config.num_beams}) cannot be combined with a draft; use num_beams=1."
        )
    if ids.shape[0] != 1:
        raise GenerationError(
            f"the embedded engine decodes one sequence at a time, but the batch has {ids.shape[0]}; "
            "call generate once for each prompt."
        )
    for name in ("inputs_embeds", "pixel_values", "pixel_values_videos", "input_features"):
        if model_kwargs.get(name) is not None:
            raise GenerationError(f"{name} was passed, but the draft needs token ids only; pass input_ids (text).")
    if ids.shape[1] == 0:
        raise GenerationError("the prompt is empty; pass at least one token.")
    mask = model_kwargs.get("attention_mask")
    if mask is not None and not bool(mask.all()):
        raise GenerationError(
            "the prompt is padded, which the embedded engine does not serve; pass it without padding."
        )
    positions = model_kwargs.get("position_ids")  # generate makes them, ``[..., 1, n]``
    if positions is not None and not _counts(positions, ids.shape[1]):
        raise GenerationError("position_ids do not count the prompt from 0 on, as the draft does; leave them out.")
    if config.output_attentions or config.output_hidden_states:
        raise GenerationError(
            "output_attentions and output_hidden_states are not collected while drafting; leave them out."
        )
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and ids.shape[1] > limit:
        raise GenerationError(
            f"the prompt has {ids.shape[1]} tokens, but the model's positions end at {limit}; shorten the prompt."
        )
    cache_name = cache_argument(model)
    cache = model_kwargs.get(cache_name)
    if cache is not None and (getattr(cache, "_is_user_defined", False) or cache.get_seq_length() > 0):
        raise GenerationError(
            f"{cache_name} was passed, but it carries no hidden states for the draft; pass the whole prompt instead."
        )
    if type(cache) is not DynamicCache or cache.offloading:
        kind = "one that is offloaded" if type(cache) is DynamicCache else type(cache).__name__
        raise GenerationError(
            f"the draft needs the dynamic cache, but generate made {kind}; "
            "leave use_cache on and cache_implementation unset."
        )
    return cache


def _counts(positions: Tensor, length: int) -> bool:
    """Whether positions are 0 to ``length - 1`` on every axis."""
    return positions.shape[-1] == length and bool((positions == torch.arange(length, device=positions.device)).all())


def streamer_of(frame: FrameType | None) -> Any:
    """Return the ``streamer`` argument of the ``generate`` call in whose course ``frame`` runs.

    ``generate`` feeds the prompt to its streamer but does not hand it to a ``custom_generate`` callable, which would
    leave the user's streamer without a single generated token. Whatever the user put between ``generate`` and the
    drafter (a function around it, say) does not matter.

    Raises
    ------
    GenerationError
        If no ``generate`` with a callable of the user's is running in this thread.
    """
    while frame is not None:
        if frame.f_code is _GENERATE and callable(frame.f_locals.get("custom_generate")):
            return frame.f_locals.get("streamer")
        frame = frame.f_back
    raise GenerationError(
        "the drafter was not called by generate, or in another thread than generate runs in, so the streamer cannot be "
        "found; pass the drafter, or a function that calls it, as model.generate(..., custom_generate=drafter)."
    )
