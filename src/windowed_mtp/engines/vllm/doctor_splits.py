"""Whether attention over a long context has work for every multiprocessor when few sequences are decoded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from windowed_mtp.engines.vllm.doctor_blocks import Blocks
from windowed_mtp.engines.vllm.findings import Finding

SETTING = "flash_attn_max_num_splits_for_cuda_graph"
SHORT = 8192
"""A context, in tokens, at which more splits were measured to change nothing (docs/results.md)."""


@dataclass(frozen=True)
class AttentionDevice:
    """What attention runs on.

    Attributes
    ----------
    flash_attention : int
        Version of FlashAttention that vLLM takes there.
    multiprocessors : int
        Multiprocessors of the device.
    """

    flash_attention: int
    multiprocessors: int


def on_hopper() -> bool:
    """Whether this machine's device is NVIDIA's Hopper, and vLLM may choose its kernels by their speed."""
    from vllm import envs
    from vllm.platforms import current_platform

    if not current_platform.is_cuda() or getattr(envs, "VLLM_BATCH_INVARIANT", False):
        return False
    capability = current_platform.get_device_capability()
    return capability is not None and capability.major == 9


def attention_device(vllm_config: Any) -> AttentionDevice | None:
    """Look at this machine's device; ``None`` unless it is NVIDIA's Hopper, splits may be chosen and vLLM tells."""
    from vllm.platforms import current_platform

    try:
        if not on_hopper():
            return None
        from vllm.config import set_current_vllm_config
        from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

        with set_current_vllm_config(vllm_config):
            version = get_flash_attn_version(head_size=vllm_config.model_config.get_head_size())
        return AttentionDevice(version or 0, current_platform.num_compute_units())
    except (AttributeError, TypeError, ImportError, NotImplementedError, RuntimeError, AssertionError):
        return None


def splits_findings(vllm_config: Any, blocks: Blocks | None, device: AttentionDevice | None) -> Iterator[Finding]:
    """Recommend more splits where FlashAttention 3 in full CUDA graphs leaves multiprocessors without work.

    A decode or verify pass has one tile of work for each sequence, KV head and split of the keys, on as many thread
    blocks as the device has multiprocessors.

    Parameters
    ----------
    vllm_config : VllmConfig
        The engine's.
    blocks : Blocks or None
        Its attention blocks, for the backend.
    device : AttentionDevice or None
        Where attention runs.
    """
    splits = getattr(getattr(vllm_config, "attention_config", None), SETTING, None)
    if device is None or device.flash_attention != 3 or blocks is None or blocks.backend != "FLASH_ATTN" or not splits:
        return
    if not vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs():
        return
    model, sequences = vllm_config.model_config, vllm_config.scheduler_config.max_num_seqs
    heads = model.get_num_kv_heads(vllm_config.parallel_config)
    tiles = sequences * heads * splits
    if tiles >= device.multiprocessors or model.max_model_len <= SHORT:
        return
    needed = -(-device.multiprocessors // heads)
    yield Finding(
        check="attention splits", level="warning",
        cause=f"attention has {_count(sequences, 'sequence')} x {_count(heads, 'KV head')} x "
        f"{_count(splits, 'split')} = {tiles} tiles of work for {device.multiprocessors} multiprocessors, so the "
        "others are idle while the target reads a long context",
        remedy=f'add --attention-config \'{{"{SETTING}": {needed}}}\': on an H200 with 2 KV heads, 66 splits made a '
        "step of one sequence 1.12 to 1.18 times as fast at 1,040,000 tokens, 1.02 to 1.04 at 131,072, and no "
        "different at 8,192, with and without the window",
    )  # fmt: skip


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"
