"""What V2's speculators hand to the window in a draft: every kind of them, eager and in full graphs."""

import importlib
import inspect
import pkgutil
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("vllm.version", reason="vllm is not installed")

from models_draft import llama_with_draft_model, llama_with_eagle, qwen3_with_dflash
from models_mtp import glm4_moe
from rig import BLOCK, GAMMA, REQUESTS, TWIN, Backend, RebuildingBackend, Rig, Row, check, engine_config
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu import spec_decode
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

KINDS = {
    "mtp": ("mtp", lambda: [glm4_moe()], "mtp", "MTPSpeculator"),
    "eagle": ("eagle", llama_with_eagle, "eagle", "EagleSpeculator"),
    "modules": ("mtp", lambda: [glm4_moe()], "multi_module_mtp", "MultiModuleMTPSpeculator"),
    "dflash": ("dflash", qwen3_with_dflash, "dflash", "DFlashSpeculator"),
    "draft_model": ("draft_model", llama_with_draft_model, "standalone_ar", "StandaloneARSpeculator"),
}
BEFORE = {"standalone_ar": ("draft_model", "PlainDraftModelSpeculator")}
"""What packages and their classes were called up to 0.31."""
"""Method, checkpoints, and the speculator's package and class."""
LOOPS = ("mtp", "eagle", "draft_model")
"""Kinds with a pass a token."""
VERIFIED = [Row(300, GAMMA + 1, rejected=2), Row(66, GAMMA + 1), Row(417, GAMMA + 1, rejected=1)]
BATCHES = {
    "verified": VERIFIED,
    "prefill": [Row(0, 150, prompt=150), Row(250, 200, prompt=600)],
    "mixed": [*VERIFIED, Row(200, 180, prompt=500)],
}


def speculator_of(kind: str) -> type[Any] | None:
    """A kind's class; ``None`` where this release of vLLM does not have it yet."""
    now = KINDS[kind][2:]
    for package, name in (now, BEFORE.get(now[0], now)):
        with suppress(ModuleNotFoundError):
            found: type[Any] = getattr(importlib.import_module(f"{spec_decode.__name__}.{package}.speculator"), name)
            return found
    return None


def rig_of(
    kind: str, graphs: bool, backend: Any = Backend, state: Any = DefaultModelState, asynchronous: bool = True
) -> Rig:
    speculator = speculator_of(kind)
    if speculator is None:
        pytest.skip(f"this vLLM has no speculator of the kind {kind}")
    method, checkpoints, _, _ = KINDS[kind]
    vllm_config = engine_config(checkpoints(), method, graphs, asynchronous)
    vllm_config.speculative_config.draft_model_config.hf_config.num_nextn_predict_layers = (
        GAMMA if kind == "modules" else 1
    )
    rig = Rig(vllm_config, state, backend)
    rig.draft_with(speculator, CUDAGraphMode.FULL_DECODE_ONLY if graphs else CUDAGraphMode.NONE)
    return rig


def passes_of(kind: str) -> int:
    return {"modules": GAMMA, "dflash": 1}.get(kind, GAMMA)


@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("backend", [Backend, RebuildingBackend])
@pytest.mark.parametrize("kind", KINDS)
def test_eager(kind: str, backend: Any, rows: list[Row]):
    rig = rig_of(kind, graphs=False, backend=backend)
    passes = rig.propose(rig.batch(rows), CUDAGraphMode.NONE, rejected=[1, 0])
    assert len(passes) == passes_of(kind)
    for seen in passes:
        assert seen[TWIN].fields["seq_lens"] == len(rows)
        assert check(seen, len(rows)) > 0


@pytest.mark.parametrize("state", [DefaultModelState, MambaHybridModelState])
@pytest.mark.parametrize("backend", [Backend, RebuildingBackend])
@pytest.mark.parametrize("kind", ["mtp", "eagle", "modules", "dflash"])
def test_full_graphs(kind: str, backend: Any, state: Any):
    rig = rig_of(kind, graphs=True, backend=backend, state=state)
    graph = rig.graph_for(VERIFIED)
    assert graph.num_reqs > len(VERIFIED)
    for rejected in ([1, 0, 2], [0, 3, 0]):
        passes = rig.propose(rig.batch(VERIFIED, graph), CUDAGraphMode.FULL, rejected)
        assert len(passes) == passes_of(kind)
        for seen in passes:
            assert seen[TWIN].fields["seq_lens"] > len(VERIFIED)  # padded for the graph that was captured
            assert check(seen, len(VERIFIED)) > 0


def test_a_graph_of_more_rows_than_the_batch_before_it_reads_nothing_of_an_earlier_one():
    rig = rig_of("mtp", graphs=True)
    many = [Row(400, GAMMA + 1)] * REQUESTS
    for seen in rig.propose(rig.batch(many, rig.graph_for(many)), CUDAGraphMode.FULL):
        assert check(seen, REQUESTS) > 0
    rows = len(VERIFIED) + 2  # no graph has so many: the draft replays a larger one
    own = replace(rig.graph_for(VERIFIED), num_reqs=rows, num_tokens=rows * (GAMMA + 1))
    passes = rig.propose(rig.batch(VERIFIED, own), CUDAGraphMode.FULL)
    assert passes[0][TWIN].fields["seq_lens"] > rows
    for seen in passes:
        assert check(seen, len(VERIFIED)) > 0


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("kind", ["mtp", "modules", "dflash", "draft_model"])
def test_lengths_on_the_host_bound_those_on_the_device(kind: str, asynchronous: bool):
    rig = rig_of(kind, graphs=False, asynchronous=asynchronous)
    lags = set()
    # Around the length at which a pass drops one block more, where an upper bound's own window is no bound.
    for length in range(BLOCK * 10 - 2, BLOCK * 10 + 10, 2):
        known = GAMMA if asynchronous else 0
        rows = [Row(length + index // 4, GAMMA + 1, rejected=index % 4 * (known > 0)) for index in range(REQUESTS)]
        rejected = [(index * 3) % 4 for index in range(REQUESTS)]
        for seen in rig.propose(rig.batch(rows), CUDAGraphMode.NONE, rejected):
            check(seen, len(rows))
            if seen[TWIN].upper is None:
                pytest.skip("this vLLM gives a drafter no lengths on the host")
            lags |= set((seen[TWIN].upper - seen[TWIN].lens).tolist())
    assert max(lags) >= GAMMA - 1  # the host did not know them


def test_every_speculator_makes_metadata_as_one_of_these():
    of = {found.propose for found in map(speculator_of, KINDS) if found is not None}
    seen, builds = 0, "_build_attn_metadata"
    for module in pkgutil.walk_packages(spec_decode.__path__, f"{spec_decode.__name__}."):
        for each in vars(importlib.import_module(module.name)).values():
            if not inspect.isclass(each) or not issubclass(each, DraftModelSpeculator) or inspect.isabstract(each):
                continue
            seen += 1
            assert getattr(each, builds, None) is getattr(DraftModelSpeculator, builds, None)
            assert each.propose in of or each.__name__ == "ExtractHiddenStatesSpeculator", each  # it drafts nothing
    assert seen > len(of)
