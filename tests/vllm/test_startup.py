"""What the plugin does to an engine's start: refusals, and nothing where nothing is asked for."""

import re

import pytest

pytest.importorskip("vllm.version", reason="vllm is not installed; run make test-vllm")

from draft_passes import draft_builder, draft_layers, watch
from engines import engine, generate, runner_of, text_prompts
from ngram import plugin_log, run
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from windowed_mtp import SinkWindow
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


def test_nothing_is_patched_where_nothing_is_configured(unconfigured):
    hook = unconfigured["hook"]
    assert not hasattr(hook, "__wrapped__")
    assert hook.__code__.co_filename.endswith("gpu_model_runner.py")
    assert unconfigured["backends"] == [CPUAttentionBackend]
    assert unconfigured["builder"] == "CPUAttentionMetadataBuilder"


def test_the_window_changes_neither_blocks_nor_groups_and_says_what_is_in_force(unconfigured):
    with plugin_log() as lines, engine(window={**WINDOW, "window_first_pass": False}) as llm:
        assert layout(llm) == unconfigured["layout"]
        assert type(draft_builder(llm)).__name__ == "WindowedCPUAttentionMetadataBuilder"
        context = runner_of(llm).vllm_config.compilation_config.static_forward_context
        others = {layer.get_attn_backend() for name, layer in context.items() if name not in draft_layers(llm)}
        assert not any("Windowed" in backend.__name__ for backend in others)
        assert [level for level, _ in lines] == ["INFO"]
        assert "1 draft layer(s) with CPU_ATTN read the first 4 and the last 300 keys" in lines[0][1]
        assert lines[0][1].endswith("every pass but the first.")

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


def test_a_drafter_without_attention_stops_an_engine_unless_it_is_not_strict():
    answers, lines, refusal = run({**WINDOW, "strict": False})
    assert [(level, "has no attention layers to window" in text) for level, text in lines] == [("WARNING", True)]
    assert answers[0] == answers[1]
    assert re.search(
        r"the drafter \(ngram\) has no attention layers to window; remove .*, or set \"strict\": false", refusal
    )
