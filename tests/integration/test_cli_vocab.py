"""`windowed-mtp vocab` as a user runs it, and the probe behind it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import tiny
from checks import prompt
from transformers import AutoTokenizer

from windowed_mtp.cli import main
from windowed_mtp.engines.protocol import StepEvent
from windowed_mtp.errors import GenerationError
from windowed_mtp.probes.hot_vocabulary import RANKINGS, HotVocabularyResult, measure, prompts_of
from windowed_mtp.reference import checkpoint_path
from windowed_mtp.vocab import HotVocabulary, OnlineCounts, TokenizerIdentity
from windowed_mtp.workloads.prose import english, german
from windowed_mtp.workloads.stdlib import split_of

CHECKPOINT = str(checkpoint_path())


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Outcome]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: object) -> Outcome:
        code = main(["vocab", *map(str, arguments)])
        return Outcome(code, *capsys.readouterr())

    return call


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.py"
    path.write_text("import os\nfor name in os.listdir():\n    print(name)\n" * 40)
    return path


def test_count_then_show(run: Run, text: Path, tmp_path: Path):
    counted = run("count", "--tokenizer", CHECKPOINT, text, text, "-o", tmp_path / "hot.json")
    assert counted.code == 0 and not counted.err
    vocabulary = HotVocabulary.load(tmp_path / "hot.json")
    ids = AutoTokenizer.from_pretrained(CHECKPOINT)(text.read_text(), add_special_tokens=False).input_ids
    assert sum(vocabulary.counts) == 2 * len(ids) and set(vocabulary.ranked) == set(ids)
    assert vocabulary.counts[0] == 2 * max(map(ids.count, set(ids)))
    assert f"{2 * len(ids):,} tokens counted, {len(set(ids))} different ones" in counted.out
    assert re.search(r"2,048 +100.00%", counted.out)
    shown = run("show", tmp_path / "hot.json")
    assert (shown.code, shown.out) == (0, counted.out)


def test_a_token_map_is_shown_as_one(run: Run, tmp_path: Path):
    (tmp_path / "map.json").write_text("[5, 3, 9]")
    shown = run("show", tmp_path / "map.json")
    assert (shown.code, shown.out) == (0, "a token map of 3 tokens; it says neither counts nor a tokenizer\n")


def test_coverage(run: Run, text: Path, tmp_path: Path):
    hot, out = tmp_path / "hot.json", tmp_path / "out.json"
    run("count", "--tokenizer", CHECKPOINT, text, "-o", hot)
    options = ("--size", 257, "--size", 2048, "--prompts", 2, "--prompt-tokens", 64, "--max-new-tokens", 16)
    outcome = run("coverage", CHECKPOINT, hot, text, *options, "--dtype", "float32", "--json", out)
    assert outcome.code == 0 and "differ" not in outcome.err
    assert f"not those of the whole head: 0 of {2 * 6}" in outcome.out
    rows = HotVocabularyResult.load(out).rows
    assert [(row.ranking, row.size) for row in rows] == [
        ("all tokens", 2048),
        *((name, size) for name in RANKINGS for size in (257, 2048)),
    ]
    assert all(row.text == "text.py" and row.new_tokens == 32 for row in rows)
    small, whole = ([row for row in rows if row.size == size] for size in (257, 2048))
    assert all((row.coverage, row.relative_acceptance_length) == (1, 1) for row in whole)
    assert all(row.coverage < 0.7 and row.acceptance_length < whole[0].acceptance_length for row in small)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("show", "none.json"), "cannot read 'none.json'"),
        (("count", "none.txt", "--tokenizer", CHECKPOINT, "-o", "hot.json"), "cannot use 'none.txt'"),
        (("count", "text.py", "--tokenizer", "./none", "-o", "hot.json"), "'./none' has no tokenizer"),
        (("count", "text.py", "--tokenizer", CHECKPOINT, "-o", "none/hot.json"), "the folder of 'none/hot.json'"),
        (("count", "empty.txt", "--tokenizer", CHECKPOINT, "-o", "hot.json"), "the texts hold no tokens"),
        (("count", "latin.txt", "--tokenizer", CHECKPOINT, "-o", "hot.json"), "'latin.txt' is not UTF-8 text"),
        (("coverage", CHECKPOINT, "hot.json", "--temperature", "0"), "--temperature is 0"),
        (("coverage", CHECKPOINT, "good.json", "text.py"), "a text has"),
        (("coverage", CHECKPOINT, "good.json", "text.py", "--prompt-tokens", "9", "--size", "0"), "size is 0"),
        (("coverage", CHECKPOINT, "good.json", "text.py", "--prompt-tokens", "9", "--size", "2049"), "size is 2049"),
        (("coverage", CHECKPOINT, "other.json", "text.py"), "was made with the tokenizer of 'words'"),
        ((), "Missing command"),
    ],
)
def test_mistakes(
    run: Run, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
):
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").touch()
    Path("latin.txt").write_bytes("für".encode("latin-1"))
    words = TokenizerIdentity(name="words", size=97, sha256="0")
    HotVocabulary(tokenizer=words, special=(), ranked=(4,), counts=(1,)).save("other.json")
    HotVocabulary.from_counts({4: 1}, tokenizer=AutoTokenizer.from_pretrained(CHECKPOINT)).save("good.json")
    outcome = run(*arguments)
    assert outcome.code == 2 and not outcome.out
    assert outcome.err.startswith("Error: ") and message in outcome.err and outcome.err.count("\n") == 1
    assert not Path("hot.json").exists() and not list(tmp_path.glob(".*"))


def test_an_interrupted_measurement_keeps_its_rows(
    run: Run, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from windowed_mtp.probes import hot_vocabulary

    run("count", "--tokenizer", CHECKPOINT, text, "-o", tmp_path / "hot.json")
    made = hot_vocabulary._run

    def interrupted(drafter: object, hot: object, *args: object) -> object:
        if hot is not None:
            raise KeyboardInterrupt
        return made(drafter, hot, *args)

    monkeypatch.setattr(hot_vocabulary, "_run", interrupted)
    options = ("--prompts", 1, "--prompt-tokens", 16, "--max-new-tokens", 4, "--json", tmp_path / "out.json")
    assert run("coverage", CHECKPOINT, tmp_path / "hot.json", text, *options).code == 130
    assert [row["ranking"] for row in json.loads((tmp_path / "out.json").read_text())["rows"]] == ["all tokens"]


# --- the probe ------------------------------------------------------------------------------------------------------


def test_coverage_counts_the_whole_heads_proposals():
    file = HotVocabulary(
        tokenizer=TokenizerIdentity(name="words", size=tiny.VOCAB, sha256="0"),
        special=(0,),
        ranked=tuple(range(1, 97, 2)),
        counts=(1,) * 48,
    )
    steps: list[StepEvent] = []
    drafter = tiny.drafter("qwen3_5", window=None)
    rows = list(measure(drafter, file, {"any": [prompt(20), prompt(31)]}, [30], new_tokens=40))
    observed = tiny.drafter("qwen3_5", window=None, on_step=steps.append)
    outputs = []
    for ids in (prompt(20), prompt(31)):
        output = tiny.model("qwen3_5").generate(
            ids, do_sample=False, eos_token_id=None, max_new_tokens=40, custom_generate=observed
        )
        outputs.append(output[0, ids.shape[1] :].tolist())
    by_ranking = {row.ranking: row for row in rows}
    proposals = [token for step in steps for token in step.proposed]
    hot = set(file.ids(30, tiny.VOCAB))
    assert by_ranking["file"].coverage == sum(token in hot for token in proposals) / len(proposals)
    assert 0 < by_ranking["file"].coverage < 1
    assert by_ranking["all tokens"].acceptance_length == sum(len(s.emitted) for s in steps) / len(steps)
    assert all(row.differing == 0 for row in rows)

    counts = OnlineCounts(file, interval=32)
    covered = 0
    for output, own in zip(outputs, (steps[: (n := _first_of(steps, 31))], steps[n:]), strict=True):
        written = 0
        for step in own:
            start = step.length - (20 if own[0].length == 21 else 31)
            counts.update(output[written:start])
            written = start
            covered += sum(token in counts.ids(30, tiny.VOCAB) for token in step.proposed)
        counts.update(output[written:])
    assert by_ranking["online"].coverage == covered / len(proposals)


def _first_of(steps: list[StepEvent], length: int) -> int:
    """Index of the first step of the prompt of a length."""
    return next(i for i, step in enumerate(steps) if step.step == 0 and step.length == length + 1)


def test_sampled_runs_are_repeatable():
    file = HotVocabulary.from_counts({4: 1}, tokenizer=AutoTokenizer.from_pretrained(CHECKPOINT))
    drafter = tiny.drafter("qwen3_5", window=None)
    tiny_one = TokenizerIdentity(name="", size=97, sha256="")
    file = file.model_copy(update={"tokenizer": tiny_one, "byte_tokens": ()})
    one, two = (
        list(measure(drafter, file, {"any": [prompt(20)]}, [tiny.VOCAB], new_tokens=20, temperature=1.0))
        for _ in range(2)
    )
    assert one == two
    assert [row.differing for row in one if row.ranking == "file"] == [0], "all tokens hot: the same draws"


def test_prompts_are_cut_from_all_over_a_text():
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    text = " ".join(map(str, range(200)))
    ids = tokenizer(text).input_ids
    prompts = prompts_of(text, tokenizer, 3, 10)
    stride = len(ids) // 3
    assert [p[0].tolist() for p in prompts] == [ids[n : n + 10] for n in (0, stride, 2 * stride)]
    with pytest.raises(GenerationError, match="3 prompts of 1000 need 3000"):
        prompts_of(text, tokenizer, 3, 1000)


def test_english_is_the_prose_of_docstrings(tmp_path: Path):
    prose = "It is a long way to the end of this paragraph, which has neither code nor\n    numbers in it. " * 2
    short, code = "Too short.", ">>> f(1, 2, 3); g(4, 5, 6) == [7, 8, 9] " * 5
    source = f'"""{short}\n\n    {prose}\n\n    {code}\n"""\n\nx = "{prose!r}"\n\ndef f():\n    """{prose}"""\n'
    names = [f"{n}.py" for n in range(60)]
    for name in names:
        (tmp_path / name).write_text("def broken(" if name == "0.py" else source)
    held_out = [name for name in names[1:] if split_of(name) == "heldout"]
    line = " ".join(prose.split())
    assert held_out and list(english("heldout", tmp_path)) == [line] * 2 * len(held_out)
    assert list(english("train", tmp_path)) == [line] * 2 * (59 - len(held_out))


def test_german_has_two_sides():
    train, heldout = list(german("train")), list(german("heldout"))
    assert len(train) + len(heldout) == len({*train, *heldout})
    assert min(len("".join(side)) for side in (train, heldout)) > 2500
    assert all("\n" not in paragraph for paragraph in heldout)
