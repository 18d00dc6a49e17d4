"""The commands as a user runs them: what they print where, and one sentence for every mistake."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tiny
from integration import test_lossless
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from windowed_mtp import __version__, reference
from windowed_mtp.cli import main
from windowed_mtp.engines.stats import DecodeStats
from windowed_mtp.engines.transformers import drafter
from windowed_mtp.probes.decode import DecodeResult
from windowed_mtp.probes.lossless import LosslessResult

PROMPT = " ".join(f"t{i % 90 + 1}" for i in range(30))


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Outcome]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without a tokenizer."""
    return Path(tiny.checkpoint("qwen3_5"))


@pytest.fixture(scope="module")
def checkpoint(bare: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint with a tokenizer of one token a word."""
    folder = tmp_path_factory.mktemp("cli") / "checkpoint"
    shutil.copytree(bare, folder)
    vocab = {"<unk>": 0, **{f"t{i}": i for i in range(1, tiny.VOCAB)}}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
    return folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))

    def call(*arguments: object) -> Outcome:
        code = main([str(argument) for argument in arguments])
        return Outcome(code, *capsys.readouterr())

    return call


def plain_output(checkpoint: Path, new_tokens: int) -> str:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    output = tiny.model("qwen3_5").generate(ids, max_new_tokens=new_tokens, do_sample=False)
    return tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)


# --- help -----------------------------------------------------------------------------------------------------------


def test_help_names_the_commands_and_their_options(run: Run):
    for arguments in ([], ["--help"], ["-h"]):
        outcome = run(*arguments)
        assert outcome.code == 0 and outcome.err == ""
        assert all(name in outcome.out for name in ("demo", "generate", "verify-lossless"))
    for command, options in {
        "demo": ("--prompt-tokens", "--new-tokens", "--depth", "--sink", "--window", "--seed", "--json"),
        "generate": ("--prompt", "--file", "--native", "--no-draft", "--keep", "--prefill", "--eagle3", "--sample"),
        "verify-lossless": ("--prompts", "--sampled-tokens", "--min-context", "--dtype", "--device"),
    }.items():
        outcome = run(command, "--help")
        assert outcome.code == 0 and all(option in outcome.out for option in options)


def test_version(run: Run):
    assert run("--version") == (0, f"windowed-mtp {__version__}\n", "")


def test_help_does_not_wait_for_torch():
    code = "import sys; from windowed_mtp.cli import main; main(['generate', '--help']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.endswith("False\n")


# --- generate -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        ["--sink", 2, "--window", 8],
        ["--sink", 2, "--window", 8, "--keep", "ring", "--prefill", "pruned", "--depth", 2],
        ["--window", 8, "--min-context", 1000],
        ["--native"],
        ["--no-draft"],
    ],
    ids=lambda options: " ".join(map(str, options)),
)
def test_generate_writes_the_targets_text_and_the_numbers(run: Run, checkpoint: Path, options: list[Any]):
    outcome = run("generate", checkpoint, "--prompt", PROMPT, "--max-new-tokens", 20, *options)
    assert outcome.code == 0
    assert outcome.out.strip() == plain_output(checkpoint, 20)
    assert "30 prompt tokens, 20 new ones" in outcome.err
    assert "ms/step" in outcome.err and "AL" in outcome.err
    assert ("draft KV" in outcome.err) == ("--no-draft" not in options)
    assert "Warning" not in outcome.err


def test_generate_says_what_is_in_force(run: Run, checkpoint: Path):
    call = ["generate", checkpoint, "--prompt", PROMPT, "--max-new-tokens", 4]
    assert "sink 2, window 8, keep all, prefill full\n" in run(*call, "--sink", 2, "--window", 8).err
    assert "not engaged: it leaves keys out from 4,097 on, and there were 33" in run(*call).err
    assert "no window (every key is read)" in run(*call, "--native").err
    assert run(*call, "--window", 2).err.count("Warning: the window of 2 is shorter") == 1


def test_the_prompt_may_come_from_a_file_or_standard_input(
    run: Run, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "prompt.txt").write_text(PROMPT)
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT))
    call = ["generate", checkpoint, "--max-new-tokens", 5]
    outputs = {run(*call, *rest).out for rest in (["--prompt", PROMPT], ["--file", tmp_path / "prompt.txt"], [])}
    assert outputs == {plain_output(checkpoint, 5) + "\n"}


def test_generate_samples_by_its_seed(run: Run, checkpoint: Path):
    call = ["generate", checkpoint, "--prompt", PROMPT, "--max-new-tokens", 12, "--sample", "--temperature", 2]
    one, same, other = (run(*call, "--seed", seed).out for seed in (1, 1, 2))
    assert one == same != other
    narrow = run(*call, "--top-k", 1, "--top-p", 0.9).out
    assert narrow.strip() == plain_output(checkpoint, 12)


def test_generate_saves_its_numbers(run: Run, checkpoint: Path, tmp_path: Path):
    path = tmp_path / "out.json"
    call = ["generate", checkpoint, "--prompt", PROMPT, "--max-new-tokens", 12, "--json", path]
    assert run(*call, "--window", 8, "--depth", 2).code == 0
    result = DecodeResult.load(path)
    assert result.settings["window"] == 8 and result.settings["num_speculative_tokens"] == 2
    assert result.provenance.seed is None
    (row,) = result.rows
    assert (row.prompt_tokens, row.new_tokens) == (30, 12)
    assert row.acceptance_length == pytest.approx(11 / row.steps)
    assert row.tokens_per_second == pytest.approx(1e3 * row.acceptance_length / row.ms_per_step)
    assert row.ms_per_step == pytest.approx(row.draft_ms_per_step + row.verify_ms_per_step)
    assert run(*call, "--no-draft").code == 0
    (row,) = DecodeResult.load(path).rows
    assert (row.steps, row.acceptance_length, row.draft_kv_bytes) == (11, 1.0, 0)


def test_ctrl_c_keeps_the_numbers_so_far(run: Run, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    add = DecodeStats.add

    def add_two(self: DecodeStats, event: Any) -> None:
        add(self, event)
        if self.steps == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(DecodeStats, "add", add_two)
    outcome = run("generate", checkpoint, "--prompt", PROMPT, "--json", tmp_path / "out.json")
    assert outcome.code == 130
    assert "Interrupted" in outcome.err and "Traceback" not in outcome.err
    assert DecodeResult.load(tmp_path / "out.json").rows[0].steps == 2


# --- demo -----------------------------------------------------------------------------------------------------------

SMALL_DEMO = ["demo", "--prompt-tokens", 200, "--new-tokens", 16, "--sink", 2, "--window", 8, "--repeats", 2]


@pytest.fixture
def bundled(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny checkpoint in the place of the bundled one."""
    monkeypatch.setattr(reference, "checkpoint_path", lambda: checkpoint)


@pytest.mark.usefixtures("bundled")
def test_demo_shows_three_arms_and_identical_output(run: Run, tmp_path: Path):
    outcome = run(*SMALL_DEMO, "--json", tmp_path / "out.json")
    assert outcome.code == 0 and outcome.err == ""
    for line in ("ms/step", "AL, tokens a step", "draft keys read a step", "draft KV", "draft prefill ms"):
        assert line in outcome.out
    assert "output identical: yes" in outcome.out
    assert "times fewer" in outcome.out
    result = DecodeResult.load(tmp_path / "out.json")
    plain, native, windowed = result.rows
    assert [row.arm for row in result.rows] == ["no speculation", "native MTP", "windowed MTP"]
    assert plain.repeats == native.repeats == windowed.repeats == 2
    assert windowed.draft_keys_per_step < native.draft_keys_per_step
    assert windowed.draft_kv_bytes < native.draft_kv_bytes
    assert result.differences == ()


@pytest.mark.usefixtures("bundled")
def test_demo_says_where_outputs_differ(run: Run, monkeypatch: pytest.MonkeyPatch):
    accept = drafter._Decoding._accept

    def another(*args: Any) -> Any:
        return (((token + 1) % tiny.VOCAB, scores) for token, scores in accept(*args))

    monkeypatch.setattr(drafter._Decoding, "_accept", another)
    outcome = run(*SMALL_DEMO)
    assert outcome.code == 1
    assert re.search(r"output identical: no; native MTP differs from the new token 0 on.* apart", outcome.out)
    assert "windowed MTP differs" in outcome.out and "identical: yes" not in outcome.out


@pytest.mark.usefixtures("bundled")
@pytest.mark.parametrize("load", [0.0, 999.0])
def test_demo_says_when_the_machine_is_busy(run: Run, monkeypatch: pytest.MonkeyPatch, load: float):
    monkeypatch.setattr("os.getloadavg", lambda: (load, load, load), raising=False)
    assert ("Other programs are using this machine" in run(*SMALL_DEMO).out) == (load > 0)


@pytest.mark.usefixtures("bundled")
def test_demo_with_a_window_that_leaves_nothing_out_says_so(run: Run):
    assert "too short for this window" in " ".join(run(*SMALL_DEMO, "--window", 4032).out.split())


@pytest.mark.usefixtures("bundled")
@pytest.mark.parametrize("runs", [0, 2, 4])
def test_demo_interrupted_shows_what_it_has(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: int):
    model_class, calls = type(tiny.model("qwen3_5")), iter(range(100))
    generate = model_class.generate

    def interrupted(self: Any, *args: Any, **kwargs: Any) -> Any:
        if next(calls) == runs:
            raise KeyboardInterrupt
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(model_class, "generate", interrupted)
    outcome = run(*SMALL_DEMO, "--json", tmp_path / "out.json")
    assert outcome.code == 130 and "Interrupted" in outcome.out and outcome.err == ""
    assert len(DecodeResult.load(tmp_path / "out.json").rows) == min(runs, 3)


# --- verify-lossless ------------------------------------------------------------------------------------------------


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text(f"{PROMPT}\n\nt5 t6 t7 t8 t9 t10 t11 t12\n")
    return path


def verify(run: Run, checkpoint: Path, prompts: Path, *more: object) -> Outcome:
    options = ("--prompts", prompts, "--sink", 2, "--window", 8, "--max-new-tokens", 20)
    return run("verify-lossless", checkpoint, *options, *more)


def test_verify_lossless_passes_what_is_lossless(run: Run, checkpoint: Path, prompts: Path, tmp_path: Path):
    outcome = verify(run, checkpoint, prompts, "--sampled-tokens", 100, "--json", tmp_path / "out.json")
    assert outcome.code == 0 and outcome.err == ""
    assert outcome.out.count(" equal") == 2
    assert "consistent with the target" in outcome.out and outcome.out.endswith("lossless: yes\n")
    result = LosslessResult.load(tmp_path / "out.json")
    assert result.passed and result.provenance.seed == 0
    assert [(row.prompt, row.prompt_tokens, row.verdict) for row in result.rows] == [(0, 30, "equal"), (1, 8, "equal")]
    assert result.sampled is not None and result.sampled.tokens >= 100


def test_verify_lossless_reads_jsonl(run: Run, checkpoint: Path, tmp_path: Path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": PROMPT, "id": 1}) + "\n")
    outcome = verify(run, checkpoint, path, "--sampled-tokens", 0)
    assert outcome.code == 0 and "sampled" not in outcome.out


def test_verify_lossless_finds_a_sabotaged_acceptance(
    run: Run, checkpoint: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(drafter._Decoding, "_accept", test_lossless.accept_everything)
    outcome = verify(run, checkpoint, prompts, "--sampled-tokens", 200, "--json", tmp_path / "out.json")
    assert outcome.code == 1 and outcome.err == ""
    assert re.search(r"DIFFERENT at new token \d+, margin [\d.e-]+, .* below the best \(threshold", outcome.out)
    assert "DIFFERENT from the target" in outcome.out and outcome.out.endswith("lossless: no\n")
    result = LosslessResult.load(tmp_path / "out.json")
    assert not result.passed and {row.verdict for row in result.rows} == {"different"}


def test_verify_lossless_says_that_a_target_disagrees_with_itself(
    run: Run, checkpoint: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
):
    test_lossless.chunks_without_the_recurrent_state(monkeypatch)
    outcome = verify(run, checkpoint, prompts, "--sampled-tokens", 0, "--dtype", "float32")
    assert outcome.code == 1 and outcome.out.endswith("lossless: no\n")
    assert "THE TARGET DISAGREES WITH ITSELF at new token" in outcome.out and "rounding explains" in outcome.out


def test_verify_lossless_warns_of_a_window_that_never_engages(run: Run, checkpoint: Path, prompts: Path):
    outcome = run("verify-lossless", checkpoint, "--prompts", prompts, "--sampled-tokens", 0)
    assert outcome.code == 0 and "not engaged" in outcome.out


# --- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--prompt", "t1", "--file", "x"], "--prompt and --file"),
        (["--prompt", ""], "the prompt is empty"),
        ([], "the prompt is empty"),
        (["--file", "nowhere.txt"], "cannot read 'nowhere.txt'"),
        (["--file", "."], "cannot read '.'"),
        (["--prompt", "t1 " * 1025], "end at 1024"),
        (["--prompt", "t1", "--max-new-tokens", "1024"], "1024 positions"),
        (["--prompt", "t1", "--max-new-tokens", "0"], "--max-new-tokens"),
        (["--prompt", "t1", "--sink", "-1"], "sink is -1"),
        (["--prompt", "t1", "--window", "0"], "window is 0"),
        (["--prompt", "t1", "--window", "some"], "--window"),
        (["--prompt", "t1", "--min-context", "-2"], "min_context is -2"),
        (["--prompt", "t1", "--depth", "0"], "--depth is 0"),
        (["--prompt", "t1", "--keep", "half"], "--keep"),
        (["--prompt", "t1", "--keep", "ring", "--min-context", "9000"], "min_context 9000"),
        (["--prompt", "t1", "--prefill", "pruned"], "--keep ring"),
        (["--prompt", "t1", "--native", "--sink", "4"], "--native reads every key, so --sink"),
        (["--prompt", "t1", "--native", "--window", "4"], "--native reads every key, so --window"),
        (["--prompt", "t1", "--native", "--keep", "ring"], "--keep ring"),
        (["--prompt", "t1", "--no-draft", "--native"], "--no-draft and --native"),
        (["--prompt", "t1", "--no-draft", "--sink", "0"], "--no-draft and --sink"),
        (["--prompt", "t1", "--no-draft", "--depth", "2"], "--no-draft and --depth"),
        (["--prompt", "t1", "--no-draft", "--eagle3", "x"], "--no-draft and --eagle3"),
        (["--prompt", "t1", "--eagle3", "./nowhere"], "nowhere"),
        (["--prompt", "t1", "--temperature", "0.7"], "add --sample"),
        (["--prompt", "t1", "--top-p", "0.7"], "add --sample"),
        (["--prompt", "t1", "--top-k", "7"], "add --sample"),
        (["--prompt", "t1", "--seed", "7"], "add --sample"),
        (["--prompt", "t1", "--sample", "--temperature", "0"], "leave out --sample"),
        (["--prompt", "t1", "--sample", "--temperature", "-1"], "above 0"),
        (["--prompt", "t1", "--sample", "--top-p", "1.5"], "at most 1"),
        (["--prompt", "t1", "--sample", "--top-k", "-1"], "at least 0"),
        (["--prompt", "t1", "--device", "nonsense"], "no device 'nonsense'"),
        (["--prompt", "t1", "--dtype", "int4"], "--dtype"),
        (["--prompt", "t1", "--json", "missing/out.json"], "does not exist"),
        (["--prompt", "t1", "--json", "."], "is a folder"),
        (["--prompt", "t1", "--unknown"], "--unknown"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_a_mistake_in_generate_is_one_sentence(
    run: Run, checkpoint: Path, options: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    check_sentence(run("generate", checkpoint, *options), says)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "name", "options", "says"),
    [
        (None, "p.txt", [], "cannot read"),
        ("\n \n", "p.txt", [], "holds no prompts"),
        (b"\xff\xfe\xff", "p.txt", [], "not UTF-8"),
        ('{"prompt": "t1"}\n{"text": "t1"}\n', "p.jsonl", [], "line 2"),
        ("t1", "p.jsonl", [], "line 1"),
        ("t1 " * 1025, "p.txt", [], "end at 1024"),
        ("t1", "p.txt", ["--sampled-tokens", "79"], "at least 80"),
        ("t1", "p.txt", ["--temperature", "0"], "--temperature is 0"),
        ("t1", "p.txt", ["--native", "--sink", "2"], "--native"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 20 else "",
)
def test_a_mistake_in_verify_lossless_is_one_sentence(
    run: Run, checkpoint: Path, tmp_path: Path, content: str | bytes | None, name: str, options: list[str], says: str
):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    check_sentence(run("verify-lossless", checkpoint, "--prompts", path, *options), says)


@pytest.mark.usefixtures("bundled")
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--window", "0"], "window is 0"),
        (["--sink", "-1"], "sink is -1"),
        (["--depth", "0"], "--depth"),
        (["--prompt-tokens", "1020"], "1024"),
        (["--json", "missing/out.json"], "does not exist"),
    ],
)
def test_a_mistake_in_demo_is_one_sentence(run: Run, options: list[str], says: str):
    check_sentence(run("demo", *options), says)


def test_demo_without_its_checkpoint_is_one_sentence(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reference, "checkpoint_path", lambda: tmp_path / "missing")
    check_sentence(run("demo"), "bundled checkpoint is missing")


def test_a_model_that_cannot_be_loaded_is_one_sentence(run: Run, bare: Path, checkpoint: Path, tmp_path: Path):
    def damaged(name: str, change: Callable[[Path], object]) -> Path:
        folder = tmp_path / name
        shutil.copytree(checkpoint, folder)
        change(folder)
        return folder

    def without_head(folder: Path) -> None:
        tensors = tiny.load_file(folder / "model.safetensors")
        kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}
        tiny.save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})

    def without_norm(folder: Path) -> None:
        tensors = tiny.load_file(folder / "model.safetensors")
        tensors.pop("model.norm.weight")
        tiny.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    (tmp_path / "empty").mkdir()
    for model, says in {
        "./nowhere": "no folder './nowhere'",
        "org/nothing": "'org/nothing'",
        "a name": "'a name'",
        tmp_path / "empty": "empty",
        bare: "no tokenizer",
        Path(tiny.checkpoint("deepseek_v3")): "no tokenizer",
        damaged("no-weights", lambda folder: (folder / "model.safetensors").unlink()): "no-weights",
        damaged("cut", lambda folder: (folder / "model.safetensors").write_bytes(b"\x08")): "cut",
        damaged("config", lambda folder: (folder / "config.json").write_text("{")): "config",
        damaged("headless", without_head): "head",
        damaged("incomplete", without_norm): "model.norm.weight",
    }.items():
        check_sentence(run("generate", model, "--prompt", "t1"), says)
    assert run("generate", tmp_path / "headless", "--prompt", "t1", "--no-draft").code == 0


@pytest.mark.parametrize("arguments", [["nonsense"], ["generate"], ["verify-lossless", "x"], ["--nonsense"]], ids=str)
def test_a_misused_command_line_is_one_sentence(run: Run, arguments: list[str]):
    check_sentence(run(*arguments), "see --help")


def check_sentence(outcome: Outcome, says: str) -> None:
    assert outcome.code == 2, outcome
    assert outcome.out == ""
    (line,) = outcome.err.splitlines()
    assert line.startswith("Error: ") and line.endswith(".")
    assert says in line
    assert not re.search(r"[.!?] [A-Z]", line.removeprefix("Error: ")), "more than one sentence"
