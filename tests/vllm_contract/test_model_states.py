"""What V2's runner hands to the window in a step, by model state: padded for a full graph or not."""

import importlib
import inspect
import pkgutil
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("vllm.version", reason="vllm is not installed")

from models_mtp import glm4_moe
from rig import DRAFT, GAMMA, REQUESTS, TARGET, TOKENS, TWIN, Rig, Row, View, check, engine_config
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu import model_states
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

DECODES = [Row(300, GAMMA + 1), Row(60, GAMMA + 1), Row(417, GAMMA + 1)]
BATCHES = {
    "decode": DECODES,
    "prefill": [Row(0, 150, prompt=150), Row(250, 200, prompt=600)],
    "mixed": [Row(300, GAMMA + 1), Row(17, 1, prompt=9), Row(200, 180, prompt=500)],
}
PADDED = 5


def rig_of(state: type[Any], graphs: bool, asynchronous: bool = True) -> Rig:
    return Rig(engine_config([glm4_moe()], "mtp", graphs, asynchronous), state)


def padded_for(rows: list[Row], graph_rows: int) -> BatchExecutionDescriptor:
    return BatchExecutionDescriptor(
        cg_mode=CUDAGraphMode.FULL, num_tokens=graph_rows * rows[0].queries, num_reqs=graph_rows,
        uniform_token_count=rows[0].queries,
    )  # fmt: skip


@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("state", [DefaultModelState, MambaHybridModelState])
@pytest.mark.parametrize("mode", [CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE])
def test_unpadded(state: type[Any], mode: CUDAGraphMode, rows: list[Row]):
    rig = rig_of(state, graphs=mode != CUDAGraphMode.NONE)
    metadata, _ = rig.prepare(rig.batch(rows), mode)
    assert View.of(metadata[DRAFT]).fields["seq_lens"] == len(rows)
    assert check(metadata, len(rows)) > 0
    assert metadata[TARGET] is not metadata[DRAFT]


@pytest.mark.parametrize("state", [DefaultModelState, MambaHybridModelState])
def test_padded_for_a_full_graph(state: type[Any]):
    rig = rig_of(state, graphs=True)
    batch = rig.batch(DECODES, padded_for(DECODES, len(DECODES) + PADDED))
    metadata, _ = rig.prepare(batch, CUDAGraphMode.FULL)
    fields = View.of(metadata[TWIN]).fields
    assert fields["seq_lens"] == fields["query_start_loc_cpu"] == len(DECODES) + PADDED
    unpadded = state is DefaultModelState
    assert fields["is_prefilling"] == len(DECODES) + (0 if unpadded else PADDED)  # vLLM pads it, or does not
    assert check(metadata, len(DECODES)) > 0


@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("state", [DefaultModelState, MambaHybridModelState])
def test_padded_for_a_full_graph_of_any_batch(state: type[Any], rows: list[Row]):
    rig = rig_of(state, graphs=True)
    graph = BatchExecutionDescriptor(cg_mode=CUDAGraphMode.FULL, num_tokens=TOKENS, num_reqs=REQUESTS)
    metadata, _ = rig.prepare(rig.batch(rows, graph), CUDAGraphMode.FULL)
    assert View.of(metadata[TWIN]).fields["seq_lens"] == REQUESTS > len(rows)
    assert check(metadata, len(rows)) > 0


@pytest.mark.parametrize("state", [DefaultModelState, MambaHybridModelState])
def test_capture_leaves_buffers_that_a_step_writes(state: type[Any]):
    rig = rig_of(state, graphs=True)
    captured = rig.capture(rows=REQUESTS)
    assert not bool((captured[DRAFT].seq_lens > 2).any())  # dummy requests of a few tokens
    graph = padded_for(DECODES, REQUESTS)
    metadata, _ = rig.prepare(rig.batch(DECODES, graph), CUDAGraphMode.FULL)
    now = replace(metadata[TWIN], seq_lens_cpu_upper_bound=None)  # a graph holds nothing of the host
    assert check({TWIN: now, DRAFT: captured[DRAFT]}, len(DECODES)) > 0


def test_every_model_state_that_makes_metadata_is_known():
    found = set()
    for module in pkgutil.iter_modules(model_states.__path__):
        of = vars(importlib.import_module(f"{model_states.__name__}.{module.name}"))
        found |= {
            name for name, each in of.items() if "prepare_attn" in vars(each if inspect.isclass(each) else object)
        }
    assert {"DefaultModelState", "MambaHybridModelState"} <= found
    # Encoders' targets have no drafter; the other is the abstract base.
    assert found <= {
        "DefaultModelState", "MambaHybridModelState", "EncoderDecoderModelState", "EncoderOnlyModelState", "ModelState"
    }  # fmt: skip
