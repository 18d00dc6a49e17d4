"""The hot vocabulary's options of `generate` and `verify-lossless`, on the bundled checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_eagle3
import torch
from integration import test_cli
from transformers import AutoModelForCausalLM, AutoTokenizer

from windowed_mtp.engines.protocol import StepEvent
from windowed_mtp.engines.stats import DecodeStats
from windowed_mtp.probes.decode import DecodeResult
from windowed_mtp.probes.lossless import LosslessResult
from windowed_mtp.reference import checkpoint_path
from windowed_mtp.vocab import HotVocabulary, TokenizerIdentity

CHECKPOINT = str(checkpoint_path())
PROMPT = "import json\n\n\ndef load(path):\n"
NEW = 40
VOCAB, HIDDEN = 2048, 256
ALWAYS = 257
"""Tokens of the bundled checkpoint that are always hot: the end of a text, and each byte."""
RANKED = tuple(range(300, 600))
WRONG = tuple(range(2000, 2040))
Run = test_cli.Run
run = test_cli.run


def write(path: Path, ranked: tuple[int, ...]) -> HotVocabulary:
    """Save a ranking for the bundled checkpoint."""
    counts = {token: len(ranked) - place for place, token in enumerate(ranked)}
    file = HotVocabulary.from_counts(counts, tokenizer=AutoTokenizer.from_pretrained(CHECKPOINT))
    file.save(path)
    return file


@pytest.fixture
def hot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HotVocabulary:
    """A ranking in the current folder, as ``hot.json``."""
    monkeypatch.chdir(tmp_path)
    return write(tmp_path / "hot.json", RANKED)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[StepEvent]:
    """The steps of what is generated."""
    events: list[StepEvent] = []
    add = DecodeStats.add
    monkeypatch.setattr(DecodeStats, "add", lambda self, event: events.append(event) or add(self, event))
    return events


def generate(run: Run, *options: object) -> test_cli.Outcome:
    call = ("generate", CHECKPOINT, "--prompt", PROMPT, "--max-new-tokens", NEW, "--dtype", "float32")
    outcome = run(*call, *options, "--json", "out.json")
    assert outcome.code == 0 and "Warning" not in outcome.err
    return outcome


def settings() -> dict[str, Any]:
    return {name: value for name, value in DecodeResult.load("out.json").settings.items() if name.startswith("hot")}


# --- help -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["generate", "verify-lossless"])
def test_the_help_fits_80_columns(run: Run, monkeypatch: pytest.MonkeyPatch, command: str):
    monkeypatch.setenv("COLUMNS", "80")
    panel = run(command, "--help").out.partition("─ Hot vocabulary ─")[2].partition("╰")[0].splitlines()[1:]
    first = [line.split()[1] for line in panel if line.startswith("│ --")]
    assert first == ["--hot-vocabulary", "--hot-size", "--hot-prompt-tail", "--hot-online"]
    assert len(panel) <= 2 * len(first), "an option of more than two lines"


# --- generate -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "size", "tail"),
    [
        ([], ALWAYS, 0),
        (["--hot-vocabulary", "map.pt", "--hot-size", 400], 400, 0),
        (["--hot-size", 400, "--native"], 400, 0),
        (["--hot-size", 410, "--hot-prompt-tail", 5, "--window", 8, "--keep", "ring"], 410, 5),
    ],
    ids=lambda options: " ".join(map(str, options)) if isinstance(options, list) else "",
)
def test_a_file_says_what_is_proposed(
    run: Run, hot: HotVocabulary, steps: list[StepEvent], options: list[object], size: int, tail: int
):
    file = "map.pt" if "map.pt" in options else "hot.json"
    torch.save(torch.tensor(RANKED), "map.pt")
    outcome = generate(run, *([] if "map.pt" in options else ["--hot-vocabulary", file]), *options)
    end = AutoTokenizer.from_pretrained(CHECKPOINT)(PROMPT).input_ids[-tail:] if tail else []
    proposed = {token for step in steps for token in step.proposed}
    assert proposed and proposed <= set(hot.ids(size, VOCAB, always=end))
    if size > ALWAYS:
        assert not proposed <= set(hot.ids((ALWAYS + size) // 2, VOCAB)), "a smaller set would have done"
    copied = f"{size * HIDDEN * 4 / 1024:.1f} KiB copied\n"
    also = f", and the prompt's last {tail}" if tail else ""
    assert f"; hot vocabulary: {size} of 2,048 tokens, by {file}{also}; {copied}" in outcome.err
    assert ("no window (every key is read)" in outcome.err) == ("--native" in options)
    assert settings() == {
        "hot_vocabulary": file,
        "hot_size": size,
        "hot_prompt_tail": tail,
        "hot_online": False,
        "hot_head_bytes": size * HIDDEN * 4,
    }
    assert outcome.out == generate(run, "--no-draft").out
    assert settings() == {}


@pytest.mark.parametrize("options", [[], ["--hot-vocabulary", "hot.json"]], ids=["alone", "on a file"])
def test_online_follows_the_output(run: Run, hot: HotVocabulary, steps: list[StepEvent], options: list[object]):
    outcome = generate(run, "--hot-online", "--hot-size", 280, *options)
    order = "the output (32 tokens counted, anew every 32)" + (", then hot.json" if options else "")
    assert f"; hot vocabulary: 280 of 2,048 tokens, by {order}; 280.0 KiB copied" in outcome.err
    before = set(hot.ids(280, VOCAB)) if options else {*hot.always, *range(280)}
    prompt = len(AutoTokenizer.from_pretrained(CHECKPOINT)(PROMPT).input_ids)
    early, late = (
        {token for step in steps if (step.length - prompt >= 32) == counted for token in step.proposed}
        for counted in (False, True)
    )
    assert early and early <= before and not late <= before
    assert settings()["hot_online"] is True
    assert settings()["hot_vocabulary"] == ("hot.json" if options else None)
    assert outcome.out == generate(run, "--no-draft").out


def test_all_tokens_hot_copies_nothing(run: Run, hot: HotVocabulary):
    outcome = generate(run, "--hot-vocabulary", "hot.json", "--hot-size", VOCAB)
    assert "; hot vocabulary: 2,048 of 2,048 tokens, by hot.json; nothing left out\n" in outcome.err
    assert settings()["hot_head_bytes"] == 0


# --- verify-lossless ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", [[], ["--native", "--hot-online"]], ids=["windowed", "native, online"])
def test_a_file_that_is_wrong_on_purpose_is_lossless(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, options: list[object]
):
    monkeypatch.chdir(tmp_path)
    write(Path("wrong.json"), WRONG)
    Path("prompts.txt").write_text("def load(path): return open(path)")
    outcome = run(
        "verify-lossless", CHECKPOINT, "--prompts", "prompts.txt", "--max-new-tokens", 33, "--sampled-tokens", 80,
        "--dtype", dtype, "--hot-vocabulary", "wrong.json", "--hot-size", 297, *options, "--json", "out.json",
    )  # fmt: skip
    assert outcome.code == 0 and outcome.err == "" and outcome.out.endswith("lossless: yes\n")
    assert "; hot vocabulary: 297 of 2,048 tokens, by " in outcome.out
    result = LosslessResult.load("out.json")
    assert result.settings["hot_size"] == 297 and result.settings["hot_vocabulary"] == "wrong.json"
    assert result.settings["hot_head_bytes"] == 297 * HIDDEN * (4 if dtype == "float32" else 2)
    assert result.rows[0].new_tokens == 33 and result.sampled.tokens >= 80
    if not options:
        assert result.rows[0].acceptance_length < 2, "the file was to be wrong"


# --- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["generate", "verify-lossless"])
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--hot-size", "64"], "--hot-size does not say which tokens are hot; add --hot-vocabulary FILE"),
        (["--hot-prompt-tail", "64"], "--hot-prompt-tail does not say which"),
        (["--hot-online", "--hot-size", "0"], "--hot-size is 0"),
        (["--hot-vocabulary", "hot.json", "--hot-size", "2049"], "from 1 to the model's 2048"),
        (["--hot-online", "--hot-size", "2049"], "from 1 to the model's 2048"),
        (["--hot-online", "--hot-prompt-tail", "-1"], "--hot-prompt-tail is -1"),
        (["--hot-online", "--hot-size", "5", "--hot-prompt-tail", "5"], "of 5 cannot hold 257 special and single-byte"),
        (["--hot-vocabulary", "hot.json", "--hot-size", "256"], "a hot vocabulary of 256 cannot hold 257 special and"),
        (["--hot-vocabulary", "none.json"], "cannot read 'none.json'"),
        (["--hot-vocabulary", "."], "cannot read '.'"),
        (["--hot-vocabulary", "list.json"], "'list.json' is no token map: it must be a list or tensor of token ids"),
        (["--hot-vocabulary", "result.json"], "'result.json' is no hot vocabulary of this version"),
        (["--hot-vocabulary", "other.json"], "was made with the tokenizer of 'words'"),
        (
            ["--hot-vocabulary", "hot.json", "--eagle3", "drafter"],
            "has a vocabulary of its own (61 of the model's 2048",
        ),
        (["--hot-online", "--hot-size", "9", "--eagle3", "drafter"], "which --hot-online cannot cut further"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_sentence_before_the_model_is_loaded(
    run: Run, hot: HotVocabulary, monkeypatch: pytest.MonkeyPatch, command: str, options: list[str], says: str
):
    words = TokenizerIdentity(name="words", size=97, sha256="0")
    HotVocabulary(tokenizer=words, special=(), ranked=(4,), counts=(1,)).save("other.json")
    Path("list.json").write_text('["a", "b"]')
    Path("result.json").write_text(json.dumps({"kind": "decode"}))
    Path("prompts.txt").write_text(PROMPT)
    tiny_eagle3.save(Path("drafter"), "draft-vocabulary")
    before = sorted(Path().rglob("*"))
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("the model was loaded"))
    prompt = "--file" if command == "generate" else "--prompts"
    outcome = run(command, CHECKPOINT, prompt, "prompts.txt", "--json", "out.json", *options)
    test_cli.check_sentence(outcome, says)
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize(
    "options", [["--hot-vocabulary", "hot.json"], ["--hot-online", "--hot-size", "64"]], ids=" ".join
)
def test_no_draft_has_no_hot_vocabulary(run: Run, hot: HotVocabulary, options: list[str]):
    outcome = run("generate", CHECKPOINT, "--prompt", PROMPT, "--no-draft", *options)
    test_cli.check_sentence(outcome, f"--no-draft and {options[0]} contradict each other")


def test_a_model_that_cannot_be_loaded_is_what_is_wrong(run: Run, hot: HotVocabulary):
    outcome = run("generate", "./nowhere", "--prompt", PROMPT, "--hot-vocabulary", "hot.json")
    test_cli.check_sentence(outcome, "no folder './nowhere'")


def test_a_checkpoint_without_a_tokenizer_is_what_is_wrong(run: Run, hot: HotVocabulary):
    bare = Path("bare")
    bare.mkdir()
    (bare / "config.json").write_bytes((Path(CHECKPOINT) / "config.json").read_bytes())
    outcome = run("generate", "./bare", "--prompt", PROMPT, "--hot-vocabulary", "hot.json")
    test_cli.check_sentence(outcome, "has no tokenizer that can be loaded; save the model's")
