"""What beginnings of prompts can be found in the cache again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from windowed_mtp.engines.vllm.doctor_blocks import Blocks
from windowed_mtp.engines.vllm.findings import Finding

LARGE_BLOCK = 256
"""Prompts shorter than a block of this size are common."""
SETTING = "disable_eagle_block_drop"


def prefix_findings(vllm_config: Any, blocks: Blocks | None) -> Iterator[Finding]:
    """Judge what prefixes of prompts can be found in the cache again.

    Parameters
    ----------
    vllm_config : VllmConfig
        The engine's.
    blocks : Blocks or None
        Its attention blocks, if they are known.
    """
    cache = vllm_config.cache_config
    cached = blocks.cached if blocks is not None else cache.block_size
    hybrid = vllm_config.model_config.is_hybrid
    unit = getattr(cache, "prefix_match_unit", None)
    if not cache.enable_prefix_caching:
        yield Finding(
            check="prefix cache", level="warning", cause="prefix caching is off: every prompt is computed whole",
            remedy="add --enable-prefix-caching if prompts share their beginnings",
        )  # fmt: skip
    elif hybrid and unit and cached and unit < cached:
        yield Finding(
            check="prefix cache", level="ok",
            cause=f"prefix hits end at multiples of {unit:,} tokens, where vLLM has kept a recurrent state",
        )  # fmt: skip
    elif cached and cached >= LARGE_BLOCK:
        drops = _drops_last_block(vllm_config.speculative_config)
        why = " (a hybrid's attention block is raised to its recurrent state's size)" if hybrid else ""
        more = ", and this drafter gives up the last block of a hit" if drops else ""
        yield Finding(
            check="prefix cache", level="warning",
            cause=f"prefix hits come in blocks of {cached:,} tokens{why}{more}: a common beginning shorter than "
            f"{cached * (2 if drops else 1):,} tokens is never found",
            remedy="expect no hits for short prompts, with or without the window; a smaller --block-size helps only "
            f"where the model is no hybrid{_kept_block(vllm_config.speculative_config, cached) if drops else ''}",
        )  # fmt: skip
    else:
        yield Finding(check="prefix cache", level="ok", cause=f"prefix hits come in blocks of {cached:,} tokens")


def _drops_last_block(speculative: Any) -> bool:
    if speculative is None:
        return False
    return bool(getattr(speculative, "use_eagle_block_drop", speculative.use_eagle)())


def _kept_block(speculative: Any, block: int) -> str:
    """Say what keeping the last block of a hit would give, where this vLLM has the setting.

    The last entry of a draft in a block holds the token after the block, so in another prompt's hit it is wrong.
    """
    if not hasattr(speculative, SETTING):
        return ""
    return (
        f'; "{SETTING}": true in --speculative-config makes every hit one block longer, so that beginnings from '
        f"{block:,} tokens on are found; vLLM calls it experimental, as drafts may be accepted less often, while the "
        "output stays the same"
    )
