"""An engine in a process that vLLM starts for it, as in a server; in a child of this one, as settings are read once."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from typing import Any


def _state(worker: Any) -> tuple[str, bool, bool]:
    runner = type(worker.model_runner)
    wrapped = hasattr(runner.initialize_kv_cache, "__wrapped__")
    context = worker.model_runner.vllm_config.compilation_config.static_forward_context
    windowed = any("Windowed" in layer.get_attn_backend().__name__ for layer in context.values())
    return multiprocessing.current_process().name, wrapped, windowed


def _run(window: dict[str, Any] | None) -> tuple[str, bool, bool]:
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_ALLOW_INSECURE_SERIALIZATION="1")
    from vllm import LLM

    from windowed_mtp.reference import checkpoint_path

    llm = LLM(
        model=str(checkpoint_path()),
        speculative_config={"method": "mtp", "num_speculative_tokens": 3},
        additional_config={} if window is None else {"windowed_mtp": window},
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=2,
        num_gpu_blocks_override=24,
    )
    try:
        [state] = llm.collective_rpc(_state)
    finally:
        llm.llm_engine.engine_core.shutdown()
    return tuple(state)


def run(window: dict[str, Any] | None) -> tuple[str, bool, bool]:
    """Name of the engine's process, whether its runner's class is patched, and whether any layer is windowed."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_run, window).result()
