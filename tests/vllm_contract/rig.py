"""What makes attention metadata in vLLM's V2 runner, put together without weights, kernels or a device.

Everything between a scheduler's output and a metadata builder is vLLM's own: requests' states, block tables, the
runner's inputs, model states, attention groups, speculators and their choice of a graph. Stand-ins are the layers (a
backend and a spec), the builder (it hands on what it is given), the models (they note the metadata in force when they
are run), and CUDA graphs: what would be captured is called again, on the tensors that it was captured with.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch

import torch
import vllm
import vllm.v1.worker.cpu_worker  # first: it puts what the runner needs on a CPU in place
from torch import Tensor, nn
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models import registry
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, AttentionMetadataBuilder
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer, init_attn_backend
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.input_batch import InputBuffers
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.states import RequestState

from windowed_mtp import SinkWindow
from windowed_mtp.engines.vllm.backend import windowed_backend
from windowed_mtp.engines.vllm.config import PluginConfig
from windowed_mtp.engines.vllm.install import assign_passes
from windowed_mtp.engines.vllm.symbols import release_line
from windowed_mtp.paging import dropped_blocks

LINE = release_line(vllm.__version__)
BLOCK, WINDOW, GAMMA = 16, SinkWindow(20, 70), 3
SINKS = -(-WINDOW.sink // BLOCK)
REQUESTS, TOKENS, LONGEST = 8, 512, 640
"""Most requests and tokens of a batch, and the longest sequence."""
GRAPHS = (4, 8, 16, 24, 32)
"""Tokens of a batch for which full graphs are captured."""
DEVICE = torch.device("cpu")
DRAFT, TWIN, TARGET = "draft.layer", "draft.twin", "target.layer"
"""Layers: the draft's with the window, one of the draft's without it, and the target's."""

# A class of models is looked at in this process: one of its own would import vLLM anew.
registry._run_in_subprocess = lambda look: look()


class Builder(AttentionMetadataBuilder):
    """Hands on what it is given."""

    _cudagraph_support = AttentionCGSupport.ALWAYS
    supports_draft_decode_metadata_update = True

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        return common_attn_metadata

    def update_draft_decode_metadata(self, metadata: Any) -> None:
        """Nothing: lengths and table are the tensors that were given."""


class Backend(AttentionBackend):
    """An attention backend as far as metadata go."""

    @staticmethod
    def get_name() -> str:
        return "STAND_IN"

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError

    @staticmethod
    def get_builder_cls() -> Any:
        return Builder

    @staticmethod
    def get_kv_cache_shape(*args: Any, **more: Any) -> Any:
        raise NotImplementedError


class RebuildingBuilder(Builder):
    """One whose metadata cannot be updated in place."""

    supports_draft_decode_metadata_update = False


class RebuildingBackend(Backend):
    """A backend whose speculators build anew for each pass."""

    @staticmethod
    def get_builder_cls() -> Any:
        return RebuildingBuilder


class Layer(AttentionLayerBase):
    """An attention layer as far as groups go."""

    num_heads = 2

    def __init__(self, backend: type[Any]) -> None:
        self.attn_backend = backend

    def get_attn_backend(self) -> Any:
        return self.attn_backend

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        return FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32)


def windowed_layer(backend: type[Any], replays: bool) -> Layer:
    """A layer as the plugin leaves it."""
    return Layer(windowed_backend(backend, PluginConfig(WINDOW), replays))


@dataclass
class View:
    """What a layer's metadata said when its model was run."""

    lens: Tensor
    table: Tensor
    starts: Tensor
    upper: Tensor | None
    longest: int
    fields: dict[str, int]

    @classmethod
    def of(cls, common: Any) -> View:
        per_row = ("seq_lens", "is_prefilling", "seq_lens_cpu_upper_bound", "block_table_tensor")
        given = {name: getattr(common, name, None) for name in per_row}
        rows = {name: value.shape[0] for name, value in given.items() if value is not None}
        rows["query_start_loc"] = common.query_start_loc.shape[0] - 1
        rows["query_start_loc_cpu"] = common.query_start_loc_cpu.shape[0] - 1
        upper = given["seq_lens_cpu_upper_bound"]
        return cls(
            common.seq_lens.clone(), common.block_table_tensor.clone(), common.query_start_loc.clone(),
            None if upper is None else upper.clone(), common.max_seq_len, rows,
        )  # fmt: skip


class Model(nn.Module):
    """Notes what metadata are in force at each of its passes, and predicts nothing in particular."""

    def __init__(self, hidden: int, vocab: int, two: bool = False) -> None:
        nn.Module.__init__(self)  # a test's subclass has a model of vLLM's for its other base
        self.hidden, self.vocab, self.two = hidden, vocab, two
        self.__dict__["model"] = self
        self.passes: list[dict[str, View]] = []

    def forward(self, input_ids: Tensor | None = None, positions: Tensor | None = None, **more: Any) -> Any:
        metadata = get_forward_context().attn_metadata
        if metadata is not None:
            self.passes.append({name: View.of(each) for name, each in metadata.items()})
        hidden_states = torch.zeros(positions.shape[-1], self.hidden)
        return (hidden_states, hidden_states) if self.two else hidden_states

    def compute_logits(self, hidden_states: Tensor, *args: Any, **more: Any) -> Tensor:
        return torch.zeros(hidden_states.shape[0], self.vocab)

    def combine_hidden_states(self, hidden_states: Tensor) -> Tensor:
        return hidden_states[:, : self.hidden]

    def precompute_and_store_context_kv(self, *args: Any, **more: Any) -> None:
        """Writes no keys."""


@functools.cache
def _engine_config(target: str, drafter: str | None, method: str, runner: int) -> Any:
    speculative = {"method": method, "num_speculative_tokens": GAMMA, **({"model": drafter} if drafter else {})}
    return EngineArgs(
        model=target, skip_tokenizer_init=True, block_size=BLOCK, max_model_len=LONGEST, max_num_seqs=REQUESTS,
        max_num_batched_tokens=TOKENS, dtype="float32", num_gpu_blocks_override=96, speculative_config=speculative,
    ).create_engine_config()  # fmt: skip


def engine_config(checkpoints: Sequence[str], method: str, graphs: bool, asynchronous: bool, runner: int = 2) -> Any:
    """vLLM's own settings of an engine with a drafter, with full CUDA graphs or without, for the V1 or V2 runner."""
    with patch.dict(os.environ, VLLM_USE_V2_MODEL_RUNNER=str(runner - 1)):
        vllm_config = _engine_config(checkpoints[0], checkpoints[1] if len(checkpoints) > 1 else None, method, runner)
    use_graphs(vllm_config, graphs)
    vllm_config.compilation_config.static_forward_context.clear()
    vllm_config.scheduler_config.async_scheduling = asynchronous
    parallel_state._PP = SimpleNamespace(is_first_rank=True, is_last_rank=True, world_size=1)
    return vllm_config


def use_graphs(vllm_config: Any, graphs: bool) -> None:
    """Settings of full CUDA graphs, which vLLM takes off on a CPU whenever it copies an engine's settings."""
    compilation = vllm_config.compilation_config
    compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY if graphs else CUDAGraphMode.NONE
    compilation.cudagraph_capture_sizes = list(GRAPHS) if graphs else []
    compilation.max_cudagraph_capture_size = max(GRAPHS) if graphs else 0


@dataclass(frozen=True)
class Row:
    """A request in a batch.

    Attributes
    ----------
    computed : int
        Tokens computed before, as the host knows them: under asynchronous scheduling, with all that was drafted.
    queries : int
        Tokens of this step.
    prompt : int
        Tokens to prefill; more than ``computed`` for a row in prefill.
    rejected : int
        How many of ``computed`` were rejected, as the device knows.
    """

    computed: int
    queries: int
    prompt: int = 1
    rejected: int = 0


class Runner(GPUModelRunner):
    """vLLM's runner without its constructor: what a test does not set is None."""

    def __init__(self) -> None:
        pass

    def __getattr__(self, name: str) -> None:
        return None


def _given(function: Any, **values: Any) -> dict[str, Any]:
    """The arguments that a function of this release takes."""
    takes = inspect.signature(function).parameters
    return {name: value for name, value in values.items() if name in takes}


@dataclass
class Rig:
    """A runner with a model state and, once made, a speculator.

    Attributes
    ----------
    vllm_config : VllmConfig
        The engine's settings.
    state : type
        Class of the model state.
    backend : type
        Backend of all layers.
    """

    vllm_config: Any
    state: type[Any]
    backend: type[Any] = Backend
    speculator: Any = None
    model: Any = None
    runner: Any = field(init=False)
    groups: Any = field(init=False)
    tables: Any = field(init=False)
    kv_cache_config: Any = field(init=False)
    windows: ClassVar[list[Any]] = []

    def __post_init__(self) -> None:
        layers = self.vllm_config.compilation_config.static_forward_context
        layers |= {TARGET: Layer(self.backend), TWIN: Layer(self.backend)}
        layers[DRAFT] = windowed_layer(self.backend, replays=True)
        names = [TARGET, TWIN, DRAFT]
        spec = layers[TARGET].get_kv_cache_spec(self.vllm_config)
        self.kv_cache_config = KVCacheConfig(
            num_blocks=REQUESTS * 64, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(names, spec)]
        )
        self.groups = init_attn_backend(self.kv_cache_config, self.vllm_config, DEVICE)[0]
        columns = -(-LONGEST // BLOCK)
        sizes = {
            "block_sizes": [BLOCK], "kernel_block_sizes": [BLOCK], "max_num_reqs": REQUESTS,
            "max_num_batched_tokens": TOKENS, "max_num_blocks_per_group": [columns], "device": DEVICE,
        }  # fmt: skip
        self.tables = BlockTables(**_given(BlockTables.__init__, **sizes))
        hidden = self.vllm_config.speculative_config.draft_model_config.get_hidden_size()
        self.model = Model(hidden, self.vllm_config.model_config.get_vocab_size())
        self._make_runner()
        self._find_windows()

    def _make_runner(self) -> None:
        runner = self.runner = Runner()
        runner.vllm_config, runner.model_config = self.vllm_config, self.vllm_config.model_config
        runner.device, runner.max_num_reqs, runner.decode_query_len = DEVICE, REQUESTS, GAMMA + 1
        runner.use_pp = runner.use_dcp = False
        runner.input_buffers = InputBuffers(REQUESTS, TOKENS, DEVICE)
        runner.req_states = RequestState(REQUESTS, LONGEST, TOKENS, GAMMA, self.model.vocab, DEVICE)
        runner.model_state = self.state(self.vllm_config, self.model, None, DEVICE)
        runner.block_tables, runner.attn_groups = self.tables, self.groups

    def _find_windows(self) -> None:
        groups = [*self.groups, *(self.speculator.attn_groups if self.speculator is not None else ())]
        builders = [builder for group in groups for each in group for builder in each.metadata_builders]
        self.windows[:] = [builder.windowing for builder in builders if hasattr(builder, "windowing")]

    def draft_with(self, speculator_class: type[Any], mode: CUDAGraphMode = CUDAGraphMode.NONE) -> None:
        """Make a speculator and, for a mode with full graphs, capture its graphs."""
        speculator = self.speculator = speculator_class(self.vllm_config, DEVICE)
        speculator.model, speculator.draft_attn_layer_names = self.model, {DRAFT, TWIN}
        set_attn = speculator.set_attn
        set_attn(
            **_given(
                set_attn, model_state=self.runner.model_state, kv_cache_config=self.kv_cache_config,
                block_tables=self.tables, target_input_buffers=self.runner.input_buffers,
                target_attn_groups=self.groups,
            )
        )  # fmt: skip
        self.runner.speculator = speculator
        assign_passes(self.runner)
        self._find_windows()
        use_graphs(self.vllm_config, mode != CUDAGraphMode.NONE)
        speculator.init_cudagraph_manager(mode)
        if mode != CUDAGraphMode.NONE:
            speculator.capture()
        self.model.passes.clear()

    def batch(self, rows: Sequence[Row], padded: BatchExecutionDescriptor | None = None) -> Any:
        """Schedule rows, and let vLLM make the step's inputs of them, padded for a full graph or not."""
        states = self.runner.req_states
        for request in list(states.req_id_to_index):
            states.remove_request(request)
        tokens, drafts = {}, {}
        for index, row in enumerate(rows):
            name = f"request-{index}"
            states.add_request(name, row.prompt, [1] * row.prompt, row.computed, max_tokens=LONGEST)
            at = states.req_id_to_index[name]
            first = 1 + 40 * index
            blocks = list(range(first, first + -(-(row.computed + row.queries) // BLOCK)))
            self.tables.append_block_ids(at, (blocks,), overwrite=True)
            tokens[name] = row.queries
            if row.prompt <= row.computed and row.queries > 1:
                drafts[name] = [-1] * (row.queries - 1)
        states.apply_staged_writes()
        self.tables.apply_staged_writes()
        for index, row in enumerate(rows):
            at = states.req_id_to_index[f"request-{index}"]
            states.num_computed_tokens.gpu[at] = row.computed - row.rejected
        output = SimpleNamespace(
            num_scheduled_tokens=tokens, total_num_scheduled_tokens=sum(tokens.values()),
            scheduled_spec_decode_tokens=drafts, has_structured_output_requests=False,
        )  # fmt: skip
        return self._inputs(output, padded)

    def graph_for(self, rows: Sequence[Row]) -> BatchExecutionDescriptor:
        """The full graph that vLLM would run a target's verification of these rows in."""
        manager = cudagraph_utils.CudaGraphManager(
            self.vllm_config, DEVICE, CUDAGraphMode.FULL_DECODE_ONLY, decode_query_len=GAMMA + 1
        )
        manager._graphs_captured = True
        dispatch, count = manager.dispatch, len(rows)
        found = dispatch(count, count * (GAMMA + 1), GAMMA + 1, **_given(dispatch, num_active_loras=0))
        assert found.cg_mode == CUDAGraphMode.FULL
        return found

    def _inputs(self, output: Any, padded: BatchExecutionDescriptor | None) -> Any:
        runner, count = self.runner, output.total_num_scheduled_tokens
        unpadded = BatchExecutionDescriptor(cg_mode=CUDAGraphMode.NONE, num_tokens=count, num_reqs=None)
        given: dict[str, Any] = {"batch_desc": padded or unpadded, "num_active_loras": 0}
        if "batch_req_state" in inspect.signature(runner.prepare_inputs).parameters:
            gather = runner.gather_batch_req_state
            gathered = gather(output, **_given(gather, dummy_run=False))
            given["batch_req_state"] = gathered[0] if isinstance(gathered, tuple) else gathered
        return runner.prepare_inputs(output, **_given(runner.prepare_inputs, **given))

    def prepare(self, batch: Any, mode: CUDAGraphMode, state: Any = None) -> tuple[dict[str, Any], Any]:
        """Metadata and slot mappings by layer of a step, as the runner has them made."""
        tables, slots = self.runner.prepare_attn(batch)
        metadata = (state or self.runner.model_state).prepare_attn(
            batch, mode, tables, slots, self.groups, self.kv_cache_config
        )
        return metadata, build_slot_mappings_by_layer(slots, self.kv_cache_config)

    def capture(self, rows: int) -> dict[str, Any]:
        """Metadata that a full graph of the target's verification is captured with."""
        prepare = cudagraph_utils.prepare_inputs_to_capture
        made = prepare(
            rows, rows * 2, self.runner.model_state, self.runner.input_buffers, self.tables, self.groups,
            self.kv_cache_config, **_given(prepare, full_cudagraph=True, max_query_len=GAMMA + 1),
        )  # fmt: skip
        return made[0] if isinstance(made, tuple) else made.attn_metadata

    def propose(self, batch: Any, mode: CUDAGraphMode, rejected: Sequence[int] = ()) -> list[dict[str, View]]:
        """Run a step's draft; give what its passes saw, the first pass first."""
        metadata, slots = self.prepare(batch, mode)
        self.model.passes.clear()
        count = batch.num_reqs
        given = torch.zeros(count, dtype=torch.int32)
        given[: len(rejected)] = torch.tensor(rejected, dtype=torch.int32)
        self.speculator.propose(
            batch, metadata, slots, torch.zeros(batch.num_tokens_after_padding, self.model.hidden), None,
            num_sampled=torch.ones(count, dtype=torch.int32), num_rejected=given,
            last_sampled=torch.zeros(REQUESTS, 1, dtype=torch.int64),
            next_prefill_tokens=torch.zeros(GAMMA, REQUESTS, dtype=torch.int32),
            temperature=torch.zeros(REQUESTS), seeds=torch.zeros(REQUESTS, dtype=torch.int64),
        )  # fmt: skip
        return self.model.passes


def check(passed: dict[str, Any], live: int) -> int:
    """Compare a pass's windowed metadata with the closed forms, row by row; give how many blocks were dropped.

    Parameters
    ----------
    passed : dict
        A `View`, or metadata, of the windowed layer and of its twin, which has what vLLM made.
    live : int
        Rows that are requests; the others are padding.
    """
    given, made = (each if isinstance(each, View) else View.of(each) for each in (passed[TWIN], passed[DRAFT]))
    queries = given.starts.diff().tolist()
    assert made.lens.shape == given.lens.shape and made.table.shape[0] == given.table.shape[0]
    dropped = 0
    for row, length in enumerate(given.lens.tolist()):
        count = queries[row] if row < len(queries) else 0
        if row >= live or not count:
            assert made.lens[row] == length
            continue
        blocks = dropped_blocks(length, count, block_size=BLOCK, window=WINDOW)
        assert made.lens[row] == length - blocks * BLOCK
        ids, have = given.table[row].tolist(), -(-int(made.lens[row]) // BLOCK)
        assert made.table[row, :have].tolist() == [*ids[:SINKS], *ids[SINKS + blocks :]][:have]
        # Passes that only the device advances may go beyond vLLM's own bound.
        if given.upper is not None and length <= given.upper[row]:
            assert made.lens[row] <= made.upper[row] <= given.upper[row]
        assert made.lens[row] <= made.longest <= given.longest
        dropped += blocks
    return dropped


class Captured:
    """What stands for a CUDA graph: the captured function, with the tensors that it was captured with."""

    def __init__(self, forward: Any, windows: Sequence[Any]) -> None:
        self._forward = forward
        self._sources = [(window, window._pass) for window in windows]

    def replay(self) -> None:
        before = [(window, window._pass) for window, _ in self._sources]
        for window, source in self._sources:
            window._pass = source
        self._forward(CUDAGraphMode.NONE)
        for window, source in before:
            window._pass = source


def _capture(manager: Any, create_forward: Any, *args: Any, **more: Any) -> None:
    """vLLM's capture, with `Captured` for graphs."""
    for desc in manager._capture_descs.get(CUDAGraphMode.FULL, ()):
        create_forward(desc, warmup=True)(CUDAGraphMode.NONE)
        forward = create_forward(desc, warmup=False)
        manager.graphs[desc] = Captured(forward, Rig.windows)
        forward(CUDAGraphMode.NONE)
    manager._graphs_captured = True


cudagraph_utils.CudaGraphManager.capture = _capture
type(current_platform).graph_pool_handle = staticmethod(lambda: (0, 0))
