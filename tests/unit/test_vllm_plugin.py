"""The vLLM plugin without vLLM: its settings, its hooks, and what it does to a batch's metadata."""

import dataclasses
import importlib
import multiprocessing
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import windowed_mtp.engines.vllm as plugin
from windowed_mtp import SinkWindow
from windowed_mtp.engines.vllm import worker_check
from windowed_mtp.engines.vllm.backend import windowed_backend
from windowed_mtp.engines.vllm.config import PluginConfig, PluginError
from windowed_mtp.engines.vllm.imports import when_imported
from windowed_mtp.engines.vllm.install import install, uninstall, why_not, window_draft_layers
from windowed_mtp.engines.vllm.windowing import Limits, Windowing
from windowed_mtp.paging import compact_block_table, dropped_blocks


def test_no_settings_no_plugin():
    assert PluginConfig.read({}) is None
    assert PluginConfig.read(None) is None
    assert PluginConfig.read({"other": {"window": 3}}) is None


def test_settings():
    config = PluginConfig.read({"windowed_mtp": {"sink": 4, "window": 300, "min_context": 900, "strict": False}})
    assert config == PluginConfig(SinkWindow(4, 300, 900), window_first_pass=True, strict=False)
    assert PluginConfig.read({"windowed_mtp": {"widest_window": 9000}}) == PluginConfig(
        SinkWindow(), widest_window=9000
    )
    assert PluginConfig.read({"windowed_mtp": {}}) == PluginConfig(SinkWindow())


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (4032, "must be an object"),
        ({"windw": 3}, "unknown key 'windw'; known are sink, window"),
        ({"window": "3"}, "must be a whole number"),
        ({"window": True}, "must be a whole number"),
        ({"strict": 1}, "must be true or false"),
        ({"window": 0}, "window is 0"),
        ({"sink": -1}, "sink is -1"),
        ({"min_context": -5}, "min_context is -5"),
        ({"widest_window": -5}, r'"widest_window"\] is negative'),
    ],
)
def test_bad_settings_get_one_sentence(given: Any, match: str):
    with pytest.raises(PluginError, match=match) as caught:
        PluginConfig.read({"windowed_mtp": given})
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)


def test_a_hook_runs_right_after_its_module_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "to_be_hooked.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen: list[int] = []
    finders = len(sys.meta_path)
    for _ in range(2):  # asking twice before the import still gives one call
        when_imported("to_be_hooked", lambda module: seen.append(module.value))
    assert seen == []
    module = importlib.import_module("to_be_hooked")
    assert seen == [1]
    assert len(sys.meta_path) == finders
    when_imported("to_be_hooked", lambda module: seen.append(module.value + 1))
    assert seen == [1, 2]
    del sys.modules[module.__name__]


def test_registering_imports_neither_vllm_nor_torch():
    code = "import sys; import windowed_mtp.engines.vllm as p; p.register(); p.register(); print(*sys.modules)"
    import subprocess

    names = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "vllm", "transformers"} & set(names)


@dataclass
class Common:
    """The fields of vLLM's ``CommonAttentionMetadata`` that matter here."""

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table_tensor: torch.Tensor
    max_query_len: int
    max_seq_len: int
    seq_lens_cpu_upper_bound: torch.Tensor | None = None
    _num_computed_tokens_cache: torch.Tensor | None = None

    def replace(self, **changes: Any) -> "Common":
        return dataclasses.replace(self, **changes)


def batch(rows: list[tuple[int, int]], block_size: int, slack: int = 0) -> Common:
    lens, queries = (torch.tensor(column, dtype=torch.int32) for column in zip(*rows, strict=True))
    columns = int(lens.max()) // block_size + 2
    table = torch.arange(1, len(rows) * columns + 1, dtype=torch.int32).reshape(len(rows), columns)
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), queries.cumsum(0).int()])
    upper = lens + slack
    return Common(starts, lens, table, int(queries.max()), int(upper.max()), upper, lens - queries)


ROWS = st.lists(
    st.integers(1, 400).flatmap(lambda s: st.tuples(st.just(s), st.integers(1, min(s, 7)))), min_size=1, max_size=6
)
WINDOWS = st.builds(SinkWindow, sink=st.integers(0, 40), window=st.integers(1, 90), min_context=st.integers(0, 300))


@settings(max_examples=150)
@given(ROWS, WINDOWS, st.sampled_from((1, 4, 16, 32)), st.integers(0, 9), st.booleans())
def test_a_batch_is_windowed_as_the_block_tables_are(
    rows: list[tuple[int, int]], window: SinkWindow, block_size: int, slack: int, graphs: bool
):
    common = batch(rows, block_size, slack)
    before = dataclasses.replace(
        common, seq_lens=common.seq_lens.clone(), block_table_tensor=common.block_table_tensor.clone()
    )
    windowing = Windowing(window, block_size, Limits(graphs))
    made = windowing(common)
    queries = common.query_start_loc.diff()
    table, lens = compact_block_table(
        common.block_table_tensor, common.seq_lens, queries, block_size=block_size, window=window
    )
    assert common.seq_lens.equal(before.seq_lens)
    assert common.block_table_tensor.equal(before.block_table_tensor)
    assert made.seq_lens.equal(lens)
    for row, length in enumerate(lens.tolist()):
        used = -(-length // block_size)
        assert made.block_table_tensor[row, :used].equal(table[row, :used])
    assert int(lens.max()) <= made.max_seq_len <= common.max_seq_len
    assert (lens <= made.seq_lens_cpu_upper_bound).all()
    policy = {"block_size": block_size, "window": window}
    assert (made is common) == (not graphs and not dropped_blocks(common.max_seq_len, 1, **policy))
    if made is not common:
        assert made._num_computed_tokens_cache is None


def test_nothing_is_done_below_the_threshold_outside_graphs():
    common = batch([(300, 4), (20, 1)], 16)
    assert Windowing(SinkWindow(4, 32, min_context=301), 16, Limits(graphs=False))(common) is common
    windowing = Windowing(SinkWindow(4, 32, min_context=301), 16, Limits(graphs=True))
    made = windowing(common)
    assert made.seq_lens.equal(common.seq_lens)
    assert made.block_table_tensor.equal(common.block_table_tensor)


def test_buffers_keep_their_addresses_and_refresh_reads_the_batch_anew():
    windowing = Windowing(SinkWindow(4, 32), 16, Limits(graphs=True))
    common = batch([(300, 1), (200, 1)], 16)
    made = windowing(common)
    address = made.block_table_tensor.data_ptr(), made.seq_lens.data_ptr()
    common.seq_lens += 17
    windowing.refresh()
    _, lens = compact_block_table(
        common.block_table_tensor,
        common.seq_lens,
        common.query_start_loc.diff(),
        block_size=16,
        window=SinkWindow(4, 32),
    )
    assert made.seq_lens.equal(lens)
    again = windowing(batch([(250, 1)], 16))
    assert (again.block_table_tensor.data_ptr(), again.seq_lens.data_ptr()) == address


class Builder:
    """A metadata builder that hands back what it is given."""

    supports_update_block_table = True

    def __init__(self, spec: Any, names: list[str], vllm_config: Any, device: Any):
        self.updated = 0

    def build(self, common_prefix_len: int, common_attn_metadata: Common, fast_build: bool = False) -> Common:
        return common_attn_metadata

    def build_for_drafting(self, common_attn_metadata: Common, draft_index: int) -> Common:
        return self.build(0, common_attn_metadata, fast_build=True)

    def update_draft_decode_metadata(self, metadata: Common) -> None:
        self.updated += 1


class Backend:
    """An attention backend of the least kind."""

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder

    @classmethod
    def full_cls_name(cls) -> tuple[str, str]:
        return cls.__module__, cls.__qualname__


def builder(**own: Any) -> Any:
    config = PluginConfig(SinkWindow(4, 32), **own)
    mode = SimpleNamespace(has_full_cudagraphs=lambda: False)
    vllm_config = SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_mode=mode),
        scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=64, async_scheduling=True),
        speculative_config=SimpleNamespace(num_speculative_tokens=3),
    )
    backend = windowed_backend(Backend, config)
    assert issubclass(backend, Backend)
    assert backend is windowed_backend(Backend, config)
    assert backend.full_cls_name() != Backend.full_cls_name()
    return backend.get_builder_cls()(SimpleNamespace(block_size=16), ["layer"], vllm_config, "cpu")


def test_a_builder_windows_every_pass_once():
    made = builder()
    common = batch([(300, 4)], 16)
    for metadata in (made.build(0, common), made.build_for_drafting(common, 0), made.build_for_drafting(common, 2)):
        assert int(metadata.seq_lens[0]) < 300
    assert made.windowing.passes == made.windowing.windowed == 3
    assert not made.supports_update_block_table
    made.update_draft_decode_metadata(common)
    assert made.updated == 1


def test_the_first_pass_can_be_left_alone():
    made = builder(window_first_pass=False)
    common = batch([(300, 4)], 16)
    assert made.build_for_drafting(common, 0) is common
    assert int(made.build_for_drafting(common, 1).seq_lens[0]) < 300


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({}, None),
        ({"sliding_window": -1}, None),
        ({"sliding_window": 128}, "sliding window"),
        ({"impl": SimpleNamespace(alibi_slopes=[0.1])}, "ALiBi"),
        ({"use_sparse": True}, "sparse"),
        ({"indexer": object()}, "sparse"),
        ({"attn_backend": type("ChunkedLocalBackend", (), {})}, "chunks"),
    ],
)
def test_layers_that_are_left_alone_say_why(changes: dict[str, Any], match: str | None):
    layer = SimpleNamespace(**{"attn_backend": Backend, "impl": SimpleNamespace(alibi_slopes=None), **changes})
    config = SimpleNamespace(parallel_config=SimpleNamespace(decode_context_parallel_size=1))
    reason = why_not(layer, config)
    assert (reason is None) if match is None else (match in str(reason))
    config.parallel_config.decode_context_parallel_size = 2
    assert why_not(layer, config) is not None
    assert why_not(SimpleNamespace(), config) is not None
    config.parallel_config.decode_context_parallel_size = 1
    config.parallel_config.prefill_context_parallel_size = 2
    assert "prefill context parallelism" in str(why_not(SimpleNamespace(attn_backend=Backend), config))
    config.parallel_config.prefill_context_parallel_size = 1
    config.model_config = SimpleNamespace(rswa_window=128)
    assert "R-SWA" in str(why_not(SimpleNamespace(attn_backend=Backend), config))


def runner_module() -> Any:
    """A module with a runner that notes its calls."""

    class GPUModelRunner:
        vllm_config = SimpleNamespace(additional_config={})
        calls: ClassVar[list[str]] = []

        def initialize_kv_cache(self, name: str) -> None:
            self.calls.append(name)

    module: Any = ModuleType("runner")
    module.GPUModelRunner = GPUModelRunner
    return module


@pytest.mark.parametrize(
    ("process", "stays"),
    [("MainProcess", True), ("EngineCore", False), ("EngineCore_DP1", False), ("VllmWorker-0", False)],
)
def test_nothing_stays_patched_in_a_process_of_one_engine_without_settings(
    process: str, stays: bool, monkeypatch: pytest.MonkeyPatch
):
    module = runner_module()
    original = module.GPUModelRunner.initialize_kv_cache
    install(module)
    install(module)
    assert module.GPUModelRunner.initialize_kv_cache.__wrapped__ is original
    monkeypatch.setattr(multiprocessing.current_process(), "_name", process)
    module.GPUModelRunner().initialize_kv_cache("unconfigured")
    assert module.GPUModelRunner.calls == ["unconfigured"]
    assert (module.GPUModelRunner.initialize_kv_cache is not original) == stays


def test_a_window_after_an_engine_without_one_is_put_in_force(monkeypatch: pytest.MonkeyPatch):
    module, calls = runner_module(), []
    monkeypatch.setattr("windowed_mtp.engines.vllm.install._known", lambda *_: True)
    monkeypatch.setattr("windowed_mtp.engines.vllm.install.window_draft_layers", lambda *_: calls.append("windowed"))
    install(module)
    module.GPUModelRunner().initialize_kv_cache("unconfigured")
    assert calls == []
    configured = module.GPUModelRunner()
    configured.vllm_config = SimpleNamespace(additional_config={"windowed_mtp": {}})
    configured.initialize_kv_cache("configured")
    assert calls == ["windowed"]
    assert module.GPUModelRunner.calls == ["unconfigured", "configured"]


def test_taking_everything_off(monkeypatch: pytest.MonkeyPatch):
    module = runner_module()
    original = module.GPUModelRunner.initialize_kv_cache
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    when_imported("what_others_wait_for", lambda module: None)
    finders = list(sys.meta_path)
    monkeypatch.setattr(plugin, "RUNNERS", ("runner_to_be_patched", "runner_to_be_waited_for"))
    monkeypatch.setitem(sys.modules, "runner_to_be_patched", module)
    for _ in range(2):
        plugin.register()
        assert module.GPUModelRunner.initialize_kv_cache is not original
        assert len(sys.meta_path) == len(finders) + 2  # for a runner, and for the worker's wrapper
        plugin.unregister()
        plugin.unregister()
        assert module.GPUModelRunner.initialize_kv_cache is original
        assert sys.meta_path == finders


class RunnerWithoutTheSeam:
    """A runner that makes its caches some other way."""

    def __init__(self, vllm_config: Any, device: str) -> None:
        self.device = device


def test_a_runner_without_the_seam_refuses_a_window_and_nothing_else(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.32.0"))
    module: Any = ModuleType("runner")
    module.GPUModelRunner = RunnerWithoutTheSeam
    original = RunnerWithoutTheSeam.__init__
    install(module)
    install(module)
    assert RunnerWithoutTheSeam.__init__.__wrapped__ is original  # type: ignore[attr-defined]
    assert RunnerWithoutTheSeam(SimpleNamespace(additional_config={}), "cpu").device == "cpu"
    with pytest.raises(PluginError, match=r"vLLM 0\.32\.0 has no runner\.GPUModelRunner\.initialize_kv_cache"):
        RunnerWithoutTheSeam(SimpleNamespace(additional_config={"windowed_mtp": {}}), "cpu")
    uninstall(module)
    assert RunnerWithoutTheSeam.__init__ is original


@pytest.mark.parametrize("method", ["extract_hidden_states", "ngram"])
def test_a_drafter_with_nothing_to_window_is_refused(method: str):
    speculative = SimpleNamespace(method=method, num_speculative_tokens=1)
    runner = SimpleNamespace(
        vllm_config=SimpleNamespace(speculative_config=speculative),
        speculator=SimpleNamespace(draft_attn_layer_names={"layer"}),
    )
    with pytest.raises(PluginError, match=rf"the drafter \({method}\) (proposes nothing|has no attention layers)"):
        window_draft_layers(runner, PluginConfig(SinkWindow()))


def worker_module(reaches: bool) -> Any:
    """A module with a worker's wrapper, whose runner makes its cache with or without what the plugin wraps."""

    class Runner:
        pass

    class Worker:
        def __init__(self) -> None:
            self.model_runner = Runner()

    class WorkerWrapperBase:
        def __init__(self, additional_config: dict[str, Any]) -> None:
            self.vllm_config = SimpleNamespace(additional_config=additional_config)
            self.worker = Worker()

        def initialize_from_config(self, kv_cache_configs: list[Any]) -> str:
            if reaches:
                setattr(self.worker.model_runner, worker_check.REACHED, True)
            return "made"

    module: Any = ModuleType("worker_base")
    module.WorkerWrapperBase = WorkerWrapperBase
    return module


def test_a_runner_that_goes_around_the_seam_is_not_passed_over(monkeypatch: pytest.MonkeyPatch):
    warnings: list[str] = []
    logger = SimpleNamespace(warning=lambda text, *args: warnings.append(text % args))
    monkeypatch.setitem(sys.modules, "vllm.logger", SimpleNamespace(init_logger=lambda name: logger))
    around, through = worker_module(reaches=False), worker_module(reaches=True)
    original = around.WorkerWrapperBase.initialize_from_config
    for module in (around, through):
        worker_check.install(module)
        worker_check.install(module)
    strict, lenient = {"windowed_mtp": {}}, {"windowed_mtp": {"strict": False}}
    assert through.WorkerWrapperBase(strict).initialize_from_config([]) == "made"
    assert around.WorkerWrapperBase({}).initialize_from_config([]) == "made"
    with pytest.raises(PluginError, match=r"Runner makes its cache in its own way, without vLLM's GPUModelRunner"):
        around.WorkerWrapperBase(strict).initialize_from_config([])
    assert not warnings
    assert around.WorkerWrapperBase(lenient).initialize_from_config([]) == "made"
    [warning] = warnings
    assert warning.startswith("Windowed MTP is off: ") and "\n" not in warning
    worker_check.uninstall(around)
    assert around.WorkerWrapperBase.initialize_from_config is original
