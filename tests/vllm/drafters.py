"""Engines with the tiny drafters: which checkpoints each has, and what vLLM can do with it on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from engines import GAMMA, engine
from models import llama_with_eagle3
from models_draft import llama_with_draft_model, llama_with_eagle, qwen3_with_dflash
from models_mtp import deepseek_v3, glm4_moe
from vllm import LLM


@dataclass(frozen=True)
class Drafter:
    """A kind of drafter, with a target that it drafts for.

    Attributes
    ----------
    method : str
        What vLLM calls it.
    checkpoints : callable
        Gives the folder of the target, and that of the drafter if it has one of its own.
    block : int
        Block size of its attention.
    reuses : bool
        Whether its engine can prefill in chunks and reuse a prefix.
    parallel : bool
        Whether it drafts all of its tokens in one pass.
    backend : str or None
        Attention backend, where vLLM's own choice would depend on the processor.
    """

    method: str
    checkpoints: Callable[[], tuple[str, ...]]
    block: int = 32
    reuses: bool = True
    parallel: bool = False
    backend: str | None = None

    def running(
        self,
        window: dict[str, Any] | None = None,
        gamma: int = GAMMA,
        settings: dict[str, Any] | None = None,
        **options: Any,
    ) -> AbstractContextManager[LLM]:
        """An engine with this drafter, with ``settings`` of its own; ``gamma`` 0 for the target alone."""
        target, *own = self.checkpoints()
        drafter = {"method": self.method, "num_speculative_tokens": gamma, **(settings or {})}
        if own:
            drafter["model"] = own[0]
        engines: dict[str, Any] = {
            "skip_tokenizer_init": True,
            "block_size": self.block,
            "num_gpu_blocks_override": 16384 // self.block,
            "enable_prefix_caching": self.reuses,
            "max_model_len": 2048,
        }
        if self.backend is not None:
            engines["attention_config"] = {"backend": self.backend}
            drafter["attention_backend"] = self.backend  # vLLM does not hand on the target's
        return engine(target, window, drafter if gamma else {}, **{**engines, **options})


EAGLE = Drafter("eagle", llama_with_eagle)
EAGLE3 = Drafter("eagle3", llama_with_eagle3)
FULL_MTP = Drafter("mtp", lambda: (glm4_moe(),))
LATENT_MTP = Drafter("mtp", lambda: (deepseek_v3(),), block=16, reuses=False, backend="CPU_MLA")
DFLASH = Drafter("dflash", qwen3_with_dflash, parallel=True)
DRAFT_MODEL = Drafter("draft_model", llama_with_draft_model)
