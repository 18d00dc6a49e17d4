"""What the plugin does to an engine's start: refusals, and nothing where nothing is asked for."""

import multiprocessing
import re

import pytest

pytest.importorskip("vllm.version", reason="vllm is not installed; run make test-vllm")

import own_process
from draft_passes import draft_builder, draft_layers, watch
from engines import engine, generate, runner_of, text_prompts
from ngram import plugin_log, run
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from windowed_mtp import SinkWindow
from windowed_mtp.engines.vllm import register, symbols, unregister
from windowed_mtp.engines.vllm.config import PluginError

WINDOW = {"sink": 4, "window": 300}
SMALL = {"max_model_len": 1024}


def layout(llm):
    """Block sizes and KV groups of an engine."""
    runner = runner_of(llm)
    return {
        "block size": runner.vllm_config.cache_config.block_size,
        "kernel block sizes": runner._kernel_block_sizes,
        "blocks": runner.kv_cache_config.num_blocks,
        "groups": [(group.layer_names, group.kv_cache_spec) for group in runner.kv_cache_config.kv_cache_groups],
        "tensors": runner.kv_cache_config.kv_cache_tensors,
        "shapes": {name: layer.kv_cache.shape for name, layer in draft_layers(llm).items()},
    }


@pytest.fixture(scope="module")
def unconfigured():
    with engine() as llm:
        prompts = text_prompts(llm, [700, 2500])
        with watch(llm) as seen:
            answers = generate(llm, prompts)
        return {
            "prompts": prompts,
            "answers": [answer.tokens for answer in answers],
            "proposals": seen.proposals,
            "keys": seen.keys_read,
            "layout": layout(llm),
            "hook": GPUModelRunner.initialize_kv_cache,
            "backends": [layer.attn_backend for layer in draft_layers(llm).values()],
            "builder": type(draft_builder(llm)).__name__,
        }


def test_an_engine_without_settings_is_vllms_own(unconfigured):
    hook = unconfigured["hook"]
    assert hook.__wrapped__.__code__.co_filename.endswith("gpu_model_runner.py")
    assert unconfigured["backends"] == [CPUAttentionBackend]
    assert unconfigured["builder"] == "CPUAttentionMetadataBuilder"


def test_nothing_stays_patched_in_a_process_that_vllm_started():
    name, patched, windowed = own_process.run(None)
    assert name != multiprocessing.current_process().name
    assert not patched and not windowed


def test_everything_comes_off_on_request(unconfigured):
    unregister()
    assert not hasattr(GPUModelRunner.initialize_kv_cache, "__wrapped__")
    assert GPUModelRunner.initialize_kv_cache is unconfigured["hook"].__wrapped__
    register()
    assert hasattr(GPUModelRunner.initialize_kv_cache, "__wrapped__")


def test_the_window_changes_neither_blocks_nor_groups_and_says_what_is_in_force(unconfigured):
    with plugin_log() as lines, engine(window={**WINDOW, "window_first_pass": False}) as llm:
        assert layout(llm) == unconfigured["layout"]
        assert type(draft_builder(llm)).__name__ == "WindowedCPUAttentionMetadataBuilder"
        context = runner_of(llm).vllm_config.compilation_config.static_forward_context
        others = {layer.get_attn_backend() for name, layer in context.items() if name not in draft_layers(llm)}
        assert not any("Windowed" in backend.__name__ for backend in others)
        assert [level for level, _ in lines] == ["INFO"]
        assert lines[0][1].startswith(
            "Windowed MTP is in force: 1 draft layer with CPU_ATTN, in blocks of 384 tokens: "
        )
        assert "a query reads the first 384 (sink 4) and the last 300 to 683 tokens (window 300)" in lines[0][1]
        assert "2 of the 3 passes of a step are windowed, all but the first" in lines[0][1]

        with watch(llm) as seen:
            answers = generate(llm, unconfigured["prompts"])
        assert [answer.tokens for answer in answers] == unconfigured["answers"]
        for made in seen.passes:
            if made.draft_index == 0:
                assert made.keys_read == sum(made.seq_lens)
            elif max(made.seq_lens) > 2000:
                assert made.keys_read < sum(made.seq_lens)


def test_below_the_threshold_metadata_is_passed_through(unconfigured):
    with engine(window={**WINDOW, "min_context": 4000}) as llm:
        builder = draft_builder(llm)
        windowing, untouched = builder.windowing, []

        def spy(common):
            made = windowing(common)
            untouched.append(made is common)
            return made

        with watch(llm) as seen:
            builder.windowing = spy
            answers = generate(llm, unconfigured["prompts"])
        assert len(untouched) >= len(seen.passes) > 10
        assert all(untouched)
        assert windowing.windowed == 0
        assert windowing.window == SinkWindow(4, 300, 4000)
        assert [answer.tokens for answer in answers] == unconfigured["answers"]
        assert seen.proposals == unconfigured["proposals"]
        assert seen.keys_read == unconfigured["keys"]


@pytest.mark.parametrize(
    ("window", "match"),
    [
        ({"windw": 300}, r"has an unknown key 'windw'; known are sink, window"),
        ({"window": "300"}, r"\"window\"\] is '300', but it must be a whole number\."),
        ({"window": 0}, r"window is 0"),
    ],
)
def test_bad_settings_stop_the_engine(window, match):
    with pytest.raises(PluginError, match=match) as caught, engine(window=window, **SMALL):
        pass
    assert "\n" not in str(caught.value)


def test_no_drafter_at_all_stops_a_strict_engine():
    with pytest.raises(PluginError, match="no speculative_config"), engine(window=WINDOW, drafter={}, **SMALL):
        pass


LACKING = symbols.Symbol("vllm.v1.attention.backend", "CommonAttentionMetadata.lengths_by_row")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"TABLE": (*symbols.TABLE, LACKING)},
            r"has no vllm\.v1\.attention\.backend\.CommonAttentionMetadata\.lengths_by_row",
        ),
        ({"NEWEST": (0, 31)}, r"knows 0\.25 to 0\.31; install one of these, or a newer windowed-mtp"),
    ],
)
def test_another_vllm_stops_a_strict_engine_and_leaves_another_as_it_is(change, reason, monkeypatch):
    for name, value in change.items():
        monkeypatch.setattr(symbols, name, value)
    with pytest.raises(PluginError, match=reason) as caught, engine(window=WINDOW, **SMALL):
        pass
    assert re.search(r"vLLM 0\.\d+\.\d+", str(caught.value)) and str(caught.value).endswith("without the window.")
    with plugin_log() as lines, engine(window={**WINDOW, "strict": False}, **SMALL) as llm:
        assert [(level, bool(re.search(reason, text))) for level, text in lines] == [("WARNING", True)]
        assert type(draft_builder(llm)).__name__ == "CPUAttentionMetadataBuilder"
        assert all(layer.attn_backend is CPUAttentionBackend for layer in draft_layers(llm).values())


def test_a_layer_whose_window_is_lost_stops_any_engine(monkeypatch):
    monkeypatch.setattr("windowed_mtp.engines.vllm.install.windowed_backend", lambda base, config, replays: base)
    with (
        pytest.raises(PluginError, match=r"gave .* no attention metadata of its own, so its window is not in force"),
        engine(window={**WINDOW, "strict": False}, **SMALL),
    ):
        pass


def test_a_drafter_without_attention_stops_an_engine_unless_it_is_not_strict():
    answers, lines, refusal = run({**WINDOW, "strict": False})
    assert [(level, "has no attention layers to window" in text) for level, text in lines] == [("WARNING", True)]
    assert answers[0] == answers[1]
    assert re.search(
        r"the drafter \(ngram\) has no attention layers to window; remove .*, or set \"strict\": false", refusal
    )
