"""What the plugin rests on in vLLM, as a table, checked before anything is changed.

Read: the sources of every release from 0.25.0 to 0.33.0 hold each entry of the table; ``fingerprint`` has what moved
between them. Run: see `RUN`.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

V1, V2 = "vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner"
"""Modules with a ``GPUModelRunner``."""

OLDEST, NEWEST = (0, 25), (0, 33)
"""The first and the last release line of vLLM that the plugin works with."""

RUN: tuple[tuple[str, str, str], ...] = (
    ("0.32.0", "V1", "CPU"),
    ("0.32.0", "V2", "CPU"),
    ("0.32.0", "V1", "CUDA"),
    ("0.32.0", "V2", "CUDA"),
)
"""Releases that the plugin's tests were run with, by runner and device; the other releases of the range were read."""


@dataclass(frozen=True)
class Symbol:
    """A class of vLLM's, or one of its members, that the plugin needs.

    Attributes
    ----------
    module : str
        Module that defines it.
    name : str
        ``"Class"`` or ``"Class.member"``; a member is an attribute, a dataclass field or a method.
    parameters : tuple of str
        Parameters that a method must have.
    sets : tuple of str
        Names of attributes that some method of the class uses on an instance.
    runner : str or None
        The runner that needs it; ``None`` for both.
    since : tuple of int
        First release line that has it; before, nothing takes its place.
    """

    module: str
    name: str
    parameters: tuple[str, ...] = ()
    sets: tuple[str, ...] = ()
    runner: str | None = None
    since: tuple[int, int] = OLDEST


_ATTENTION = "vllm.v1.attention.backend"

TABLE: tuple[Symbol, ...] = (
    Symbol(V1, "GPUModelRunner.initialize_kv_cache", ("self", "kv_cache_config"), runner=V1),
    Symbol(V1, "GPUModelRunner.load_model", runner=V1),
    Symbol(V1, "GPUModelRunner", sets=("attn_groups", "drafter", "vllm_config"), runner=V1),
    Symbol(
        "vllm.v1.spec_decode.llm_base_proposer", "SpecDecodeBaseProposer", sets=("_draft_attn_layer_names",), runner=V1
    ),
    Symbol(V2, "GPUModelRunner.initialize_kv_cache", ("self", "kv_cache_config"), runner=V2),
    Symbol(V2, "GPUModelRunner.load_model", runner=V2),
    Symbol(V2, "GPUModelRunner", sets=("attn_groups", "speculator", "vllm_config"), runner=V2),
    Symbol(
        "vllm.v1.worker.gpu.spec_decode.speculator", "DraftModelSpeculator",
        sets=("draft_attn_layer_names", "attn_groups"), runner=V2,
    ),
    Symbol("vllm.v1.worker.utils", "AttentionGroup.backend"),
    Symbol("vllm.v1.worker.utils", "AttentionGroup.layer_names"),
    Symbol("vllm.v1.worker.utils", "AttentionGroup.metadata_builders"),
    Symbol(_ATTENTION, "AttentionBackend.get_name"),
    Symbol(_ATTENTION, "AttentionBackend.get_builder_cls"),
    Symbol(_ATTENTION, "AttentionBackend.full_cls_name"),
    Symbol(_ATTENTION, "AttentionMetadataBuilder.__init__", ("kv_cache_spec", "layer_names", "vllm_config")),
    Symbol(_ATTENTION, "AttentionMetadataBuilder.supports_update_block_table"),
    Symbol(_ATTENTION, "AttentionMetadataBuilder.build", ("common_prefix_len", "common_attn_metadata")),
    Symbol(_ATTENTION, "AttentionMetadataBuilder.build_for_drafting", ("common_attn_metadata", "draft_index")),
    Symbol(_ATTENTION, "AttentionMetadataBuilder.build_for_cudagraph_capture", ("common_attn_metadata",)),
    Symbol(_ATTENTION, "AttentionMetadataBuilder.update_draft_decode_metadata", ("metadata",), since=(0, 28)),
    Symbol(_ATTENTION, "CommonAttentionMetadata.query_start_loc"),
    Symbol(_ATTENTION, "CommonAttentionMetadata.query_start_loc_cpu"),
    Symbol(_ATTENTION, "CommonAttentionMetadata.seq_lens"),
    Symbol(_ATTENTION, "CommonAttentionMetadata.seq_lens_cpu_upper_bound"),
    Symbol(_ATTENTION, "CommonAttentionMetadata.block_table_tensor"),
    Symbol(_ATTENTION, "CommonAttentionMetadata.max_query_len"),
    Symbol(_ATTENTION, "CommonAttentionMetadata.max_seq_len"),
    Symbol(_ATTENTION, "CommonAttentionMetadata.is_prefilling"),
    Symbol(_ATTENTION, "CommonAttentionMetadata.replace"),
    Symbol("vllm.model_executor.layers.attention.attention", "Attention", sets=("attn_backend",)),
    Symbol("vllm.model_executor.layers.attention.mla_attention", "MLAAttention", sets=("attn_backend",)),
    Symbol("vllm.config.vllm", "VllmConfig.additional_config"),
    Symbol("vllm.config.vllm", "VllmConfig.speculative_config"),
    Symbol("vllm.config.vllm", "VllmConfig.compilation_config"),
    Symbol("vllm.config.compilation", "CompilationConfig.static_forward_context"),
    Symbol("vllm.config.compilation", "CompilationConfig.cudagraph_mode"),
    Symbol("vllm.config.compilation", "CUDAGraphMode.has_full_cudagraphs"),
    Symbol("vllm.config.parallel", "ParallelConfig.decode_context_parallel_size"),
    Symbol("vllm.config.scheduler", "SchedulerConfig.max_num_seqs"),
    Symbol("vllm.config.scheduler", "SchedulerConfig.max_num_batched_tokens"),
    Symbol("vllm.config.scheduler", "SchedulerConfig.async_scheduling"),
    Symbol("vllm.config.speculative", "SpeculativeConfig.method"),
    Symbol("vllm.config.speculative", "SpeculativeConfig.num_speculative_tokens"),
    Symbol("vllm.config.speculative", "SpeculativeConfig.parallel_drafting"),
    Symbol("vllm.config.speculative", "SpeculativeConfig.use_multi_module_mtp", runner=V2, since=(0, 27)),
)  # fmt: skip


def unknown_version(version: str) -> str | None:
    """Say why a version of vLLM is not one that the plugin knows; ``None`` if it is one.

    Parameters
    ----------
    version : str
        ``vllm.__version__``; pre-releases and local suffixes count as their release line.
    """
    oldest, newest = (".".join(map(str, line)) for line in (OLDEST, NEWEST))
    if OLDEST <= release_line(version) <= NEWEST:
        return None
    return f"this is vLLM {version}, and this version of windowed-mtp knows {oldest} to {newest}"


def release_line(version: str) -> tuple[int, int]:
    """Major and minor number of a version; zeros where it has none."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def release(version: str) -> tuple[int, ...]:
    """Numbers of a version, without a pre-release or local suffix; empty where it has none."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def not_run(version: str, runner: str, device: str) -> str | None:
    """Say how far a version has been tried, if the plugin was never run with it in this way; ``None`` if it was.

    Parameters
    ----------
    version : str
        ``vllm.__version__``.
    runner : str
        ``"V1"`` or ``"V2"``.
    device : str
        Kind of device, such as ``"CPU"`` or ``"CUDA"``.
    """
    here = release(version)
    ways = [f"{each} on {kind}" for known, each, kind in RUN if release(known) == here]
    if f"{runner} on {device}" in ways:
        return None
    if ways:
        return f"the plugin was run with vLLM {version}, but never with {runner} on {device} (only {', '.join(ways)})"
    versions = ", ".join(dict.fromkeys(known for known, _, _ in RUN))
    return f"the plugin was never run with vLLM {version}: its source was read only (it was run with {versions})"


def missing(runner: str, version: str, table: tuple[Symbol, ...] | None = None) -> str | None:
    """Name the first thing that a vLLM lacks.

    Parameters
    ----------
    runner : str
        ``V1`` or ``V2``: the module whose runner is to be changed.
    version : str
        ``vllm.__version__``.
    table : tuple of Symbol, optional
        What is needed; ``TABLE`` by default.

    Returns
    -------
    str or None
        Such as ``"vllm.v1.attention.backend.CommonAttentionMetadata.seq_lens"``; ``None`` if everything is there.
    """
    line = release_line(version)
    for symbol in TABLE if table is None else table:
        if symbol.runner in (None, runner) and line >= symbol.since:
            lacking = next(_lacking(symbol), None)
            if lacking is not None:
                return lacking
    return None


def _lacking(symbol: Symbol) -> Iterator[str]:
    full = f"{symbol.module}.{symbol.name}"
    name, _, member = symbol.name.partition(".")
    try:
        owner = getattr(importlib.import_module(symbol.module), name)
    except (ImportError, AttributeError):
        yield full
        return
    if member and not _has(owner, member):
        yield full
        return
    if symbol.parameters:
        have = inspect.signature(getattr(owner, member)).parameters
        yield from (f"{full}({parameter}=...)" for parameter in symbol.parameters if parameter not in have)
    if symbol.sets:
        used = set().union(*map(_names, vars(owner).values()))
        yield from (f"{full}().{attribute}" for attribute in symbol.sets if attribute not in used)


def _has(owner: type[Any], member: str) -> bool:
    return hasattr(owner, member) or any(member in vars(base).get("__annotations__", ()) for base in owner.__mro__)


def _names(member: Any) -> set[str]:
    """Names of attributes in a function's code, and in the functions within it."""
    code = getattr(inspect.unwrap(getattr(member, "__func__", member)), "__code__", member)
    if not isinstance(code, CodeType):
        return set()
    return set(code.co_names).union(*(_names(inner) for inner in code.co_consts if isinstance(inner, CodeType)))
