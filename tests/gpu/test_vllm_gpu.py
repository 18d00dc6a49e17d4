"""The vLLM plugin inside full CUDA graphs: equality, the poison check, a window changed at run time, hot rows."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm.version", reason="vllm is not installed")

from windowed_mtp import SinkWindow
from windowed_mtp.reference import checkpoint_path
from windowed_mtp.workloads.stdlib import heldout_text

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WINDOW = SinkWindow(4, 300)
OFF = SinkWindow(4, 300, min_context=2**30)
GAMMA, TOKENS = 3, 64
NEAR_TIE = 0.2


@contextmanager
def engine(
    window: dict[str, Any] | None, speculate: bool = True, sampling: str = "greedy", **options: Any
) -> Iterator[Any]:
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    from windowed_mtp.engines.vllm import register

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    register()
    settings: dict[str, Any] = {
        "max_model_len": 8192,
        "max_num_seqs": 8,
        "gpu_memory_utilization": 0.3,
        "enable_prefix_caching": False,
        "gdn_prefill_backend": "triton",
        "kernel_config": {
            "enable_flashinfer_autotune": False,
            "enable_cutedsl_warmup": False,
            "enable_jit_warmup": False,
        },
    }
    drafter = {"method": "mtp", "num_speculative_tokens": GAMMA, "draft_sample_method": sampling}
    llm = LLM(
        model=str(checkpoint_path()),
        speculative_config=drafter if speculate else None,
        additional_config={} if window is None else {"windowed_mtp": window},
        **{**settings, **options},
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()
        gc.collect()
        torch.cuda.empty_cache()


def runner_of(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


def generate(llm: Any, prompts: list[list[int]], logprobs: int | None = None) -> list[Any]:
    from vllm import SamplingParams, TokensPrompt

    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=logprobs)
    made = llm.generate([TokensPrompt(prompt_token_ids=ids) for ids in prompts], sampling, use_tqdm=False)
    return [output.outputs[0] for output in made]


def near(reference: list[Any], others: list[Any]) -> int:
    """Check outputs up to near ties of the reference's logprobs, and give the number of such ties."""
    ties = 0
    for want, got in zip(reference, others, strict=True):
        for position, (ours, theirs) in enumerate(zip(want.token_ids, got.token_ids, strict=True)):
            if ours != theirs:
                top = want.logprobs[position]
                margin = top[ours].logprob - (top[theirs].logprob if theirs in top else float("-inf"))
                assert margin < NEAR_TIE
                ties += 1
                break
    return ties


def builders(runner: Any) -> list[Any]:
    names = runner.speculator.draft_attn_layer_names
    return [
        group.get_metadata_builder()
        for holder in (runner, runner.speculator)
        for groups in holder.attn_groups
        for group in groups
        if names & set(group.layer_names)
    ]


def set_window(runner: Any, window: SinkWindow) -> None:
    for builder in builders(runner):
        builder.windowing.window = window


@contextmanager
def proposals(runner: Any, poison: SinkWindow | None = None) -> Iterator[SimpleNamespace]:
    """Record what is proposed; with ``poison``, what no pass of a step may read is NaN while it drafts."""
    speculator = runner.speculator
    [name] = speculator.draft_attn_layer_names
    cache = runner.vllm_config.compilation_config.static_forward_context[name].kv_cache
    groups = runner.kv_cache_config.kv_cache_groups
    [group] = [index for index, each in enumerate(groups) if name in each.layer_names]
    size = builders(runner)[0].windowing.block_size
    axis = next(index for index, count in enumerate(cache.shape) if count == runner.kv_cache_config.num_blocks)
    assert size in cache.shape[axis + 1 :]
    propose, seen = speculator.propose, SimpleNamespace(tokens=[], poisoned=0)

    def recorded(input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        rows = input_batch.num_reqs
        blocks: list[int] = []
        if poison is not None and not kwargs.get("dummy_run"):
            table = runner.block_tables.input_block_tables[group][:rows].tolist()
            lens = input_batch.seq_lens[:rows].tolist()
            queries = input_batch.query_start_loc[: rows + 1].diff().tolist()
            for ids, length, count in zip(table, lens, queries, strict=True):
                first = length - count + 1 - poison.window
                blocks += [ids[b] for b in range(max(0, first) // size) if b * size >= poison.sink]
        chosen = torch.tensor(blocks, dtype=torch.long, device=cache.device)
        saved = cache.index_select(axis, chosen)
        cache.index_fill_(axis, chosen, float("nan"))
        made = propose(input_batch, *args, **kwargs)
        cache.index_copy_(axis, chosen, saved)
        seen.tokens.append(made.tolist())
        seen.poisoned += len(blocks)
        return made

    speculator.propose = recorded
    try:
        yield seen
    finally:
        del speculator.propose


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(checkpoint_path())(heldout_text(120_000, 0)).input_ids
    return [ids[start : start + length] for start, length in ((0, 200), (300, 1500), (2000, 3000), (6000, 6000))]


@pytest.fixture(scope="module")
def target(prompts: list[list[int]]) -> list[Any]:
    with engine(None, speculate=False) as llm:
        return generate(llm, prompts, logprobs=2)


def test_output_with_and_without_the_window_is_the_targets(prompts: list[list[int]], target: list[Any]):
    for window in (None, {"sink": WINDOW.sink, "window": WINDOW.window}):
        with engine(window) as llm:
            ties = near(target, generate(llm, prompts))
            print(type(runner_of(llm)).__module__, "window" if window else "no window", "near ties:", ties)


def test_excluded_keys_are_not_read_inside_captured_graphs(prompts: list[list[int]], target: list[Any]):
    with engine({"sink": WINDOW.sink, "window": WINDOW.window, "widest_window": 8192}) as llm:
        runner = runner_of(llm)
        speculator = runner.speculator
        assert speculator.supports_decode_metadata_update
        assert speculator.decode_cudagraph_manager.graphs and speculator.prefill_cudagraph_manager.graphs
        runs = {}
        for name, window in (("windowed", WINDOW), ("off", OFF)):
            set_window(runner, window)
            for poison in (None, WINDOW):
                with proposals(runner, poison) as seen:
                    near(target, generate(llm, prompts))
                runs[name, poison is not None] = seen
        assert runs["windowed", True].poisoned > 0
        assert runs["windowed", True].tokens == runs["windowed", False].tokens
        assert runs["off", True].tokens != runs["off", False].tokens
        assert runs["windowed", False].tokens != runs["off", False].tokens


def test_hot_rows_inside_captured_graphs(prompts: list[list[int]], target: list[Any], tmp_path: Any):
    from transformers import AutoTokenizer

    from windowed_mtp.vocab import HotVocabulary

    tokenizer = AutoTokenizer.from_pretrained(checkpoint_path())
    counts: dict[int, int] = {}
    for ids in prompts:
        for token in ids:
            counts[token] = counts.get(token, 0) + 1
    vocabulary = HotVocabulary.from_counts(counts, tokenizer=tokenizer)
    vocabulary.save(tmp_path / "hot.json")
    hot = {"size": 512, "file": str(tmp_path / "hot.json")}
    for sampling in ("greedy", "probabilistic"):  # chosen among hot logits, and from full rows
        with engine({"sink": 4, "window": 300, "hot_vocabulary": hot}, sampling=sampling) as llm:
            runner = runner_of(llm)
            assert runner.speculator.use_local_argmax_reduction
            assert (runner.speculator.draft_logits is None) == (sampling == "greedy")
            allowed = set(vocabulary.ids(512, runner.vllm_config.model_config.get_vocab_size()))
            with proposals(runner) as seen:
                near(target, generate(llm, prompts))
            proposed = {token for step in seen.tokens for row in step for token in row}
            assert proposed <= allowed
            assert len(proposed) > 20
