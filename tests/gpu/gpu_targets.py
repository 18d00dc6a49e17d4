"""The targets and drafters that are run on a GPU, and engines of them.

Where there is no GPU the same engines start on a CPU, as `tests/vllm` has them, so that what drives and counts here can
be tried out; there are no graphs then.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from eagle3_checkpoints import llama_with_eagle3
from engines import GAMMA, engine
from models import VOCAB
from models_draft import qwen3_with_dflash
from models_mtp import deepseek_v3, glm4_moe
from vllm import LLM

from windowed_mtp import SinkWindow
from windowed_mtp.reference import checkpoint_path
from windowed_mtp.workloads.stdlib import heldout_text

WINDOW = SinkWindow(4, 64)
CUDA = torch.cuda.is_available()
ON_GPU: dict[str, Any] = {
    "enforce_eager": False,
    "num_gpu_blocks_override": 8192,
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 2 << 30,
    "kernel_config": {
        "enable_flashinfer_autotune": False,
        "enable_cutedsl_warmup": False,
        "enable_jit_warmup": False,
    },
}
ON_CPU: dict[str, Any] = {"enforce_eager": True, "block_size": 32, "num_gpu_blocks_override": 1024}
LATENT_ON_CPU: dict[str, Any] = {"block_size": 16, "attention_config": {"backend": "CPU_MLA"}}


@dataclass(frozen=True)
class Target:
    """A target with its drafter.

    Attributes
    ----------
    method : str
        What vLLM calls the drafter.
    checkpoints : callable
        Gives the folder of the target, and that of the drafter if it has one of its own.
    window : SinkWindow
        What the draft reads.
    on_gpu, on_cpu : dict
        Options of its engines beyond `ON_GPU` and `ON_CPU`.
    reads_text : bool
        Whether its prompts are text; random tokens otherwise.
    shortest : int
        Tokens of its shortest prompt.
    """

    method: str
    checkpoints: Callable[[], tuple[str, ...]]
    window: SinkWindow = WINDOW
    on_gpu: dict[str, Any] = field(default_factory=dict)
    on_cpu: dict[str, Any] = field(default_factory=dict)
    reads_text: bool = False
    shortest: int = 1

    @contextmanager
    def running(self, drafting: bool, widest: int = 0, windowed: bool = True, **options: Any) -> Iterator[LLM]:
        """An engine that drafts, windowed or not (its graphs take windows up to ``widest``), or the target alone."""
        target, *own = self.checkpoints()
        drafter: dict[str, Any] = {"method": self.method, "num_speculative_tokens": GAMMA}
        if own:
            drafter["model"] = own[0]
        settings = {**ON_GPU, **self.on_gpu} if CUDA else {**ON_CPU, **self.on_cpu}
        backend = settings.get("attention_config", {}).get("backend")
        if backend is not None:
            drafter["attention_backend"] = backend  # vLLM does not hand on the target's
        settings |= {"skip_tokenizer_init": True, "enable_prefix_caching": drafting, "max_model_len": 2048}
        if not drafting:
            settings |= {"enforce_eager": True, "logprobs_mode": "raw_logits", "max_logprobs": 4096}
        window = {"sink": self.window.sink, "window": self.window.window, "widest_window": widest}
        own_settings = (window if windowed else None, drafter) if drafting else (None, {})
        with engine(target, *own_settings, **{**settings, **options}) as llm:
            yield llm

    def tokens(self, count: int) -> list[int]:
        """So many tokens of what its prompts are made of."""
        if not self.reads_text:
            draw = random.Random(0)
            return [draw.randrange(VOCAB - 1) for _ in range(count)]
        from transformers import AutoTokenizer

        ids = AutoTokenizer.from_pretrained(checkpoint_path())(heldout_text(6 * count, 0)).input_ids
        assert len(ids) >= count
        return list(ids[:count])


TARGETS = {
    "bundled": Target(
        "mtp",
        lambda: (str(checkpoint_path()),),
        SinkWindow(4, 128),
        on_gpu={"gdn_prefill_backend": "triton", "num_gpu_blocks_override": 2048},
        on_cpu={"num_gpu_blocks_override": 256, "block_size": None},
        reads_text=True,
        shortest=2,
    ),
    "mtp": Target("mtp", lambda: (glm4_moe(),)),
    "latent-mtp": Target("mtp", lambda: (deepseek_v3(*((128, 128) if CUDA else ())),), on_cpu=LATENT_ON_CPU),
    "eagle3": Target("eagle3", llama_with_eagle3),
    "dflash": Target("dflash", qwen3_with_dflash),
}
"""By name. A hybrid's prompt of one token that joins rows with drafts is answered wrongly by vLLM 0.32 on a CPU, with
the plugin or without; so the bundled checkpoint has none. FlashAttention's prefill of latent attention has sizes of a
head compiled in: DeepSeek's own on a GPU."""


@dataclass
class Prompts:
    """Prompts of chosen lengths, cut from anywhere in a target's tokens; the same ones for the same seed."""

    target: Target
    seed: int = 0
    pool: int = 60_000

    def __post_init__(self) -> None:
        self._ids, self._draw = self.target.tokens(self.pool), random.Random(self.seed)

    def __call__(self, length: int) -> list[int]:
        start = self._draw.randrange(len(self._ids) - length)
        return self._ids[start : start + length]
