"""What V1's proposers hand to the window in a draft, after a step that was padded for a full graph or not."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.version", reason="vllm is not installed")

import torch
from models_draft import llama_with_draft_model, llama_with_eagle, qwen3_with_dflash
from models_mtp import glm4_moe
from rig import (
    BLOCK,
    DEVICE,
    DRAFT,
    GAMMA,
    LONGEST,
    REQUESTS,
    TWIN,
    Backend,
    Layer,
    Model,
    Row,
    check,
    engine_config,
    windowed_layer,
)
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.spec_decode.dflash import DFlashProposer
from vllm.v1.spec_decode.draft_model import DraftModelProposer
from vllm.v1.spec_decode.eagle import EagleProposer

KINDS: dict[str, tuple[str, Any, type[Any]]] = {
    "mtp": ("mtp", lambda: [glm4_moe()], EagleProposer),
    "eagle": ("eagle", llama_with_eagle, EagleProposer),
    "draft_model": ("draft_model", llama_with_draft_model, DraftModelProposer),
    "dflash": ("dflash", qwen3_with_dflash, DFlashProposer),
}
VERIFIED = [Row(300, GAMMA + 1), Row(66, GAMMA + 1), Row(417, GAMMA + 1)]
MIXED = [*VERIFIED, Row(200, 120, prompt=500)]


class DFlashModel(Model, DFlashQwen3ForCausalLM):
    """The stand-in, as one of the classes that vLLM looks for."""


def proposer_of(kind: str, asynchronous: bool = False) -> Any:
    method, checkpoints, proposer_class = KINDS[kind]
    vllm_config = engine_config(checkpoints(), method, graphs=False, asynchronous=asynchronous, runner=1)
    layers = vllm_config.compilation_config.static_forward_context
    layers |= {TWIN: Layer(Backend), DRAFT: windowed_layer(Backend, replays=False)}
    groups = [KVCacheGroupSpec([TWIN, DRAFT], layers[TWIN].get_kv_cache_spec(vllm_config))]
    proposer = proposer_class(vllm_config, DEVICE)
    proposer._draft_attn_layer_names = {TWIN, DRAFT}
    proposer.initialize_attn_backend(KVCacheConfig(96, [], groups), [BLOCK])
    model = DFlashModel if kind == "dflash" else Model
    vocab = vllm_config.model_config.get_vocab_size()
    proposer.model = model(proposer.hidden_size, vocab, two=proposer.model_returns_tuple())
    return proposer


def common_of(rows: list[Row], padding: int) -> CommonAttentionMetadata:
    """A batch of the runner's with rows that pad it for a graph, and that a drafter is not to see."""
    queries = torch.tensor([row.queries for row in rows] + [0] * padding, dtype=torch.int32)
    upper = torch.tensor([row.computed + row.queries for row in rows] + [0] * padding, dtype=torch.int32)
    lens = upper - torch.tensor([row.rejected for row in rows] + [0] * padding, dtype=torch.int32)
    starts = torch.nn.functional.pad(queries.cumsum(0), (1, 0)).int()
    tokens, columns = int(queries.sum()), LONGEST // BLOCK
    return CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts.clone(), seq_lens=lens, num_reqs=len(queries),
        num_actual_tokens=tokens + padding, max_query_len=int(queries.max()), max_seq_len=int(upper.max()),
        block_table_tensor=torch.arange(len(queries) * columns, dtype=torch.int32).reshape(len(queries), columns),
        slot_mapping=torch.zeros(tokens + padding, dtype=torch.int64), seq_lens_cpu_upper_bound=upper,
        is_prefilling=torch.tensor([row.computed < row.prompt for row in rows] + [False] * padding),
    )  # fmt: skip


def propose(proposer: Any, rows: list[Row], rejected: list[int], padding: int = 0) -> list[dict[str, Any]]:
    """A step's draft, with rejected tokens among the inputs, as vLLM has it by default."""
    common = common_of(rows, padding)
    tokens = sum(row.queries for row in rows)
    if padding:
        common = common.unpadded(tokens, len(rows))
    drafted = [GAMMA if row.queries == GAMMA + 1 else 0 for row in rows]
    common, indices, rejected_gpu = proposer.prepare_inputs_padded(
        common,
        SimpleNamespace(cu_num_draft_tokens=torch.tensor(drafted).cumsum(0).int()),
        torch.tensor([GAMMA + 1 - each for each in rejected], dtype=torch.int32),
    )
    positions = torch.cat([torch.arange(row.computed, row.computed + row.queries) for row in rows])
    proposer.model.passes.clear()
    proposer.propose(
        GAMMA, torch.ones(tokens, dtype=torch.int32), positions, torch.zeros(tokens, proposer.hidden_size),
        torch.ones(len(rows), dtype=torch.int32), indices, common, SimpleNamespace(all_greedy=True),
        num_rejected_tokens_gpu=rejected_gpu,
    )  # fmt: skip
    return proposer.model.passes


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("rows", [VERIFIED, MIXED], ids=["verified", "mixed"])
@pytest.mark.parametrize("kind", KINDS)
def test_passes(kind: str, rows: list[Row], padding: int):
    passes = propose(proposer_of(kind), rows, [1, 0, 2, 3][: len(rows)], padding)
    assert len(passes) == (1 if kind == "dflash" else GAMMA)
    for seen in passes:
        assert seen[TWIN].fields["seq_lens"] == len(rows)
        assert check(seen, len(rows)) > 0


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_lengths_on_the_host_bound_those_on_the_device(kind: str, asynchronous: bool):
    proposer, lags = proposer_of(kind, asynchronous), set()
    for length in range(BLOCK * 10 - 2, BLOCK * 10 + 10, 2):
        known = GAMMA if asynchronous else 0
        rows = [Row(length + index // 4, GAMMA + 1, rejected=index % 4 * (known > 0)) for index in range(REQUESTS)]
        for seen in propose(proposer, rows, [(index * 3) % 4 for index in range(REQUESTS)]):
            check(seen, len(rows))
            lags |= set((seen[TWIN].upper - seen[TWIN].lens).tolist())
    assert max(lags) >= GAMMA - 1  # the host did not know them
