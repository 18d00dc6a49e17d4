"""The attention block of an engine, worked out before it starts: what sink and window will be rounded to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Blocks:
    """An engine's attention blocks.

    Attributes
    ----------
    backend : str
        Attention backend that vLLM chooses on this machine.
    cached : int
        Tokens in a block of the KV cache: prefix hits come in whole blocks of it.
    kernel : int
        Tokens in a block of the attention kernel: sink and window are rounded to it.
    """

    backend: str
    cached: int
    kernel: int


def blocks_of(vllm_config: Any) -> Blocks | None:
    """Work out an engine's blocks as vLLM will once its layers exist.

    Parameters
    ----------
    vllm_config : VllmConfig
        A config that no engine uses; its block size is set to the result.

    Returns
    -------
    Blocks or None
        ``None`` where this vLLM does not tell before it starts.
    """
    from vllm.config import set_current_vllm_config
    from vllm.platforms import current_platform
    from vllm.v1.attention.selector import get_attn_backend
    from vllm.v1.worker.utils import select_common_block_size

    model, cache = vllm_config.model_config, vllm_config.cache_config
    try:
        with set_current_vllm_config(vllm_config):
            backend = get_attn_backend(model.get_head_size(), model.dtype, cache.cache_dtype, use_mla=model.use_mla)
            if not cache.user_specified_block_size and current_platform.device_type != "cpu":
                cache.block_size = backend.get_preferred_block_size(cache.DEFAULT_BLOCK_SIZE)
            if model.is_hybrid:
                current_platform._align_hybrid_block_size(vllm_config, backend)
            kernel = select_common_block_size(cache.block_size, [backend])
    except (AttributeError, TypeError, ValueError, ImportError, NotImplementedError, RuntimeError, AssertionError):
        return None
    return Blocks(backend.get_name(), int(cache.block_size), int(kernel))


def text_config(model_config: Any) -> dict[str, Any]:
    """Config of the text model, as vLLM uses it."""
    return dict(model_config.hf_text_config.to_dict())
