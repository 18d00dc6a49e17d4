"""Full CUDA graphs without CUDA: batches are padded and dispatched as on a GPU, and a replay calls what was captured.

A captured graph reads buffers that builders write before each replay. A CPU's builder makes new metadata instead, so a
replay puts the last that was built for the same attention groups in the place of what was captured.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from engines import runner_of
from vllm import LLM
from vllm.config.compilation import CompilationConfig, CUDAGraphMode
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder
from vllm.v1.worker.gpu import attn_utils, cudagraph_utils
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.model_states import default
from vllm.v1.worker.gpu.spec_decode import speculator
from vllm.v1.worker.gpu.spec_decode.dflash import cudagraph as dflash_cudagraph

SIZES = (4, 8, 16, 32)
"""Tokens of the captured batches."""


@dataclass
class Replays:
    """How many graphs were replayed, for batches that were padded and for others, and what was built for them."""

    padded: int = 0
    whole: int = 0
    built: dict[int, dict[str, Any]] = field(default_factory=dict)
    last: tuple[int, dict[str, Any]] | None = None

    def build(self, original: Callable[..., dict[str, Any]], groups: Any, **rest: Any) -> dict[str, Any]:
        """Build metadata, and keep it by its attention groups."""
        made = original(attn_groups=groups, **rest)
        self.built[id(groups)], self.last = dict(made), (id(groups), made)
        return made


@dataclass
class Graph:
    """A captured call."""

    forward: Callable[[CUDAGraphMode], None]
    metadata: dict[str, Any]
    groups: int
    seen: Replays

    def replay(self) -> None:
        self.metadata.clear()
        self.metadata.update(self.seen.built[self.groups])
        self.forward(CUDAGraphMode.NONE)


@contextmanager
def full_graphs() -> Iterator[Replays]:
    """Let engines that start meanwhile have full graphs for decoding; `capture` makes them."""
    seen = Replays()
    initialize = GPUModelRunner.initialize_kv_cache

    @functools.wraps(initialize)
    def configured(self: Any, *args: Any, **kwargs: Any) -> None:
        self.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY  # a CPU's config has none
        initialize(self, *args, **kwargs)

    def settings(self: CompilationConfig, *args: Any, **kwargs: Any) -> CUDAGraphMode:
        self.cudagraph_capture_sizes = list(SIZES)
        self.max_cudagraph_capture_size = max(SIZES)
        return CUDAGraphMode.FULL_DECODE_ONLY

    def capture(self: Any, create: Callable[..., Callable[[CUDAGraphMode], None]], progress_bar_desc: str = "") -> None:
        for desc in self._capture_descs[CUDAGraphMode.FULL]:
            forward = create(desc, warmup=False)
            assert seen.last is not None
            groups, metadata = seen.last
            forward(CUDAGraphMode.NONE)  # the largest first, as buffers are made by it
            self.graphs[desc] = Graph(forward, metadata, groups, seen)
        self._graphs_captured = True

    dispatch = cudagraph_utils.CudaGraphManager.dispatch

    def dispatched(self: Any, num_reqs: int, num_tokens: int, *args: Any, **kwargs: Any) -> Any:
        desc = dispatch(self, num_reqs, num_tokens, *args, **kwargs)
        if desc.cg_mode == CUDAGraphMode.FULL:
            seen.padded += desc.num_reqs > num_reqs
            seen.whole += desc.num_reqs == num_reqs
        return desc

    build = attn_utils.build_attn_metadata

    def built(attn_groups: Any, **rest: Any) -> dict[str, Any]:
        return seen.build(build, attn_groups, **rest)

    manager = cudagraph_utils.CudaGraphManager
    with (
        patch.object(GPUModelRunner, "initialize_kv_cache", configured),
        patch.object(CompilationConfig, "resolve_cudagraph_mode_and_sizes", settings),
        patch.object(type(current_platform), "get_global_graph_pool", lambda self: None),
        patch.object(CPUAttentionMetadataBuilder, "_cudagraph_support", AttentionCGSupport.ALWAYS),
        patch.object(manager, "capture", capture),
        patch.object(manager, "dispatch", dispatched),
        patch.object(default, "build_attn_metadata", built),
        patch.object(speculator, "build_attn_metadata", built),
        patch.object(dflash_cudagraph, "build_attn_metadata", built),
    ):
        yield seen


def capture_model(llm: LLM) -> None:
    """Capture what the runner and its drafter capture on a GPU, whose worker does so by itself."""
    runner = runner_of(llm)
    runner.cudagraph_manager.capture(
        runner.model,
        runner.model_state,
        runner.input_buffers,
        runner.intermediate_tensors,
        runner.block_tables,
        runner.attn_groups,
        runner.kv_cache_config,
        use_aux_hidden_state_outputs=runner.use_aux_hidden_state_outputs,
    )
    runner.speculator.capture()
