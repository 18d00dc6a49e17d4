"""The step-cost benchmark without an engine: arms, engine arguments, kernels of a trace, and what is refused."""

import pytest

from windowed_mtp import SinkWindow
from windowed_mtp.cli import main
from windowed_mtp.cli.bench import read_arm
from windowed_mtp.engines.vllm.step_cost import Arm, Engine
from windowed_mtp.engines.vllm.step_profile import kernel_rows
from windowed_mtp.errors import WindowedMTPError


def test_arms_from_the_command_line():
    assert read_arm("native") == Arm("native")
    assert read_arm("windowed").window == SinkWindow(64, 4032)
    made = read_arm('mine={"plugin": {"window": 7, "window_first_pass": false}, "attention": {"splits": 66}}')
    assert (made.name, made.window) == ("mine", SinkWindow(64, 7))
    assert made.settings == {"attention_config.splits": 66, "window_first_pass": False}
    assert Arm("hot", {"hot_vocabulary": {"size": 9, "file": "x"}}).settings == {"hot_vocabulary.size": 9}


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("fast", "none of none, native, windowed"),
        ("a={", "is not JSON"),
        ("a=[1]", "must be a JSON object"),
        ('a={"window": 3}', "unknown key 'window'; known are plugin, attention"),
    ],
)
def test_an_arm_that_cannot_be_read(text: str, match: str):
    with pytest.raises(WindowedMTPError, match=match):
        read_arm(text)


def test_what_a_running_engine_can_take_without_new_graphs():
    windowed = Arm("a", {"sink": 4, "window": 300})
    assert Arm("b", {"window": 600, "min_context": 9}).differs_only_in_window(windowed)
    assert not Arm("b").differs_only_in_window(windowed) and not windowed.differs_only_in_window(Arm("b"))
    assert not Arm("b", {"window": 300, "window_first_pass": False}).differs_only_in_window(windowed)
    assert not Arm("b", {"window": 300}, {"splits": 1}).differs_only_in_window(windowed)


def test_engine_arguments():
    engine = Engine("m", "g", gamma=6, batch=4, max_context=1000, kv_dtype="fp8", cache_bytes=7, options={"seed": 1})
    made = engine.arguments(Arm("windowed", {"window": 300}, {"splits": 66}))
    assert made["max_model_len"] > 1000 + 190 * 7 and made["max_num_seqs"] == 4 and made["seed"] == 1
    assert made["load_format"] == "dummy" and made["kv_cache_dtype"] == "fp8" and made["kv_cache_memory_bytes"] == 7
    assert made["speculative_config"] == {"method": "mtp", "num_speculative_tokens": 6}
    assert made["additional_config"] == {"windowed_mtp": {"window": 300}}
    assert made["attention_config"] == {"splits": 66}
    plain = Engine("m", "g", gamma=0, batch=1, max_context=10, random_weights=False).arguments(Arm("none"))
    assert not {"load_format", "speculative_config", "additional_config", "attention_config"} & set(plain)


def test_kernels_belong_to_the_half_that_launched_them():
    def event(name: str, cat: str, ts: float, dur: float, **args: object) -> dict[str, object]:
        return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "args": args}

    events = [
        event("draft", "user_annotation", 100, 50),
        event("cudaGraphLaunch", "cuda_runtime", 10, 1, correlation=1),
        event("cudaLaunchKernel", "cuda_driver", 120, 1, correlation=2),
        event("k", "kernel", 300, 4, correlation=1, grid=[2, 1, 1], block=[128, 1, 1]),
        event("k", "kernel", 310, 6, correlation=1, grid=[2, 1, 1], block=[128, 1, 1]),
        event("k", "kernel", 320, 2, correlation=2, grid=[2, 1, 1], block=[128, 1, 1]),
        event("set", "gpu_memset", 330, 1, correlation=2),
        event("cpu_op", "cpu_op", 0, 500),
        {"ph": "M", "name": "process_name"},
    ]
    rows = [(row.half, row.name, row.calls, row.us) for row in kernel_rows(events, 2)]
    assert rows == [("verify", "k", 1.0, 5.0), ("draft", "k", 0.5, 1.0), ("draft", "set", 0.5, 0.5)]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["missing"], "is no folder"),
        ([".", "--kv-dtype", "int3"], "must be bf16 or fp8"),
        ([".", "--context", "0"], "a context of 0 tokens"),
        ([".", "--arm", "fast"], "none of none, native, windowed"),
        ([".", "--options", "{"], "is not JSON"),
    ],
)
def test_bad_input_is_one_sentence(options: list[str], said: str, tmp_path, capsys: pytest.CaptureFixture[str]):
    assert main(["bench", *options, "-o", str(tmp_path / "record.json"), "--profiles", str(tmp_path / "new")]) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert said in shown and "Traceback" not in shown
    assert not list(tmp_path.iterdir())
