"""What is known of vLLM's kinds of drafters, for the start of an engine and for ``doctor`` alike."""

from __future__ import annotations

from typing import Any

WITHOUT_ATTENTION = frozenset({"ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator"})
"""Drafters that keep no keys of their own."""
NEVER_DRAFTS = frozenset({"extract_hidden_states"})
"""What vLLM runs as a drafter although it proposes nothing."""
OWN_METADATA = frozenset({"DFlashSpeculator", "MultiModuleMTPSpeculator", "StandaloneARSpeculator"})
"""V2's speculators, and bases of others, that build the metadata of every pass themselves, the first one too."""


def nothing_to_window(method: str) -> str | None:
    """Say why a kind of drafter has no draft attention; ``None`` if it has."""
    if method in NEVER_DRAFTS:
        return f"the drafter ({method}) proposes nothing, so there is no draft to window"
    if method in WITHOUT_ATTENTION:
        return f"the drafter ({method}) has no attention layers to window"
    return None


def context_parallel(vllm_config: Any) -> str | None:
    """Say that a sequence is spread over ranks; ``None`` if it is not."""
    for kind in ("prefill", "decode"):
        if getattr(vllm_config.parallel_config, f"{kind}_context_parallel_size", 1) > 1:
            return f"{kind} context parallelism spreads its keys over ranks"
    return None


def only_first_pass(speculative: Any, v2: bool) -> str | None:
    """Say why a drafter has no pass but its first; ``None`` if it has more.

    Parameters
    ----------
    speculative : SpeculativeConfig
        The drafter's settings.
    v2 : bool
        Whether the V2 runner drives it.
    """
    if getattr(speculative, "parallel_drafting", False) or speculative.method == "dflash":
        return "it drafts all of its tokens in one pass"
    several = getattr(speculative, "use_multi_module_mtp", None)  # since 0.27
    if v2 and several is not None and several():
        return "each of its modules runs once a step, over the verified tokens"
    if speculative.num_speculative_tokens == 1:
        return "it drafts one token a step"
    return None


def first_pass_needed(speculative: Any, v2: bool) -> str | None:
    """Say why ``"window_first_pass": false`` would leave nothing to window; ``None`` if it would not."""
    alone = only_first_pass(speculative, v2)
    if alone is None:
        return None
    return (
        f'"window_first_pass" is false in additional_config["windowed_mtp"], but the drafter ({speculative.method}) '
        f"has no other pass, as {alone}"
    )


def reads_runners_metadata(speculator: Any) -> bool:
    """Whether a V2 speculator's first pass takes the metadata that the runner builds for the draft's layers."""
    return not any(base.__name__ in OWN_METADATA for base in type(speculator).__mro__)
