"""Hot rows of the draft's output head in an engine: the output stays, proposals are hot, all rows change nothing."""

from collections import Counter
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("vllm.version", reason="vllm is not installed; run make test-vllm")

import torch
from engines import engine, generate, runner_of, same_up_to_near_ties, text_prompts
from transformers import AutoTokenizer

from windowed_mtp.engines.vllm.config import PluginError
from windowed_mtp.engines.vllm.hot_head import remove_hot_head
from windowed_mtp.reference import checkpoint_path
from windowed_mtp.vocab import HotVocabulary

WINDOW = {"sink": 4, "window": 300}
LENGTHS = [60, 500, 1200]
OPTIONS: dict[str, Any] = {"max_model_len": 2048, "num_gpu_blocks_override": 48}


def save(path: Any, counts: dict[int, int]) -> HotVocabulary:
    made = HotVocabulary.from_counts(counts, tokenizer=AutoTokenizer.from_pretrained(checkpoint_path()))
    made.save(path)
    return made


@contextmanager
def proposals(llm: Any) -> Any:
    drafter, seen = runner_of(llm).drafter, []
    propose = drafter.propose

    def recorded(*args: Any, **kwargs: Any) -> Any:
        made = propose(*args, **kwargs)
        seen.append(made.tolist())
        return made

    drafter.propose = recorded
    try:
        yield seen
    finally:
        del drafter.propose


@pytest.fixture(scope="module")
def plain():
    with engine(drafter={}, **OPTIONS) as llm:
        prompts = text_prompts(llm, LENGTHS)
        target = generate(llm, prompts, logprobs=2)
    with engine(window=WINDOW, **OPTIONS) as llm, proposals(llm) as seen:
        generate(llm, prompts)
    return prompts, target, list(seen)


@pytest.mark.parametrize("kind", ["counted", "wrong"])
def test_the_output_stays_and_proposals_are_hot(plain: Any, tmp_path: Any, kind: str):
    prompts, target, _ = plain
    counted = Counter(token for ids in prompts for token in ids)
    vocabulary = save(tmp_path / "hot.json", counted if kind == "counted" else {2000: 1, 1999: 1})
    hot = {"size": 400 if kind == "counted" else 16, "file": str(tmp_path / "hot.json")}
    with engine(window={**WINDOW, "hot_vocabulary": hot}, **OPTIONS) as llm, proposals(llm) as seen:
        ties = same_up_to_near_ties(target, generate(llm, prompts))
        vocab_size = runner_of(llm).vllm_config.model_config.get_vocab_size()
    assert ties <= len(prompts) // 2
    proposed = {token for step in seen for row in step for token in row}
    assert proposed <= set(vocabulary.ids(hot["size"], vocab_size))
    assert len(proposed) > (50 if kind == "counted" else 1)


def test_logits_are_the_heads_own_on_hot_rows_and_a_refresh_changes_which(tmp_path: Any):
    save(tmp_path / "hot.json", {5: 3, 7: 2, 900: 1})
    with engine(
        window={**WINDOW, "hot_vocabulary": {"size": 100, "file": str(tmp_path / "hot.json")}}, **OPTIONS
    ) as llm:
        runner = runner_of(llm)
        model, [hot] = runner.drafter.model, runner.windowed_mtp_hot_logits
        [rows] = hot.rows.values()
        hidden = torch.randn(3, model.lm_head.weight.shape[1], dtype=model.lm_head.weight.dtype)
        address = rows.weight.data_ptr(), rows.ids.data_ptr()
        ids, logits = rows.ids.tolist(), model.compute_logits(hidden)
        other = sorted({*range(1000, 1098), 5, 7})
        rows.refresh(other)
        again, top = model.compute_logits(hidden), hot.get_top_tokens(model.lm_head, hidden)
        assert address == (rows.weight.data_ptr(), rows.ids.data_ptr())
        with pytest.raises(PluginError, match="3 hot ids cannot take the place of 100"):
            rows.refresh([1, 2, 3])
        remove_hot_head(runner)
        full = model.compute_logits(hidden)
    assert {5, 7, 900} <= set(ids) and len(ids) == 100
    assert logits.shape == full.shape and torch.isfinite(full).all()
    for chosen, made in ((ids, logits), (other, again)):
        outside = torch.ones(full.shape[1], dtype=torch.bool)
        outside[chosen] = False
        assert torch.isneginf(made[:, outside]).all()
        torch.testing.assert_close(made[:, chosen], full[:, chosen], atol=0.05, rtol=0.02)
    assert top.equal(again.argmax(-1))


def test_all_rows_propose_what_none_do(plain: Any, tmp_path: Any):
    prompts, _, proposed = plain
    save(tmp_path / "hot.json", {5: 1})
    with engine(drafter={}, **OPTIONS) as llm:
        size = runner_of(llm).vllm_config.model_config.get_vocab_size()
    hot = {"size": size, "file": str(tmp_path / "hot.json")}
    with engine(window={**WINDOW, "hot_vocabulary": hot}, **OPTIONS) as llm, proposals(llm) as seen:
        generate(llm, prompts)
    assert seen == proposed


def test_bad_settings_stop_the_engine(tmp_path: Any):
    save(tmp_path / "hot.json", {5: 1})
    text = (tmp_path / "hot.json").read_text()
    (tmp_path / "other.json").write_text(text.replace('"sha256":"', '"sha256":"0'))
    for hot, match in (
        ({"size": 0, "file": "x"}, r"\"size\"\] is 0, but it must be a whole number of at least 1"),
        ({"size": 10}, r"\"file\"\] is None, but it must name a file"),
        ({"size": 10**6, "file": str(tmp_path / "hot.json")}, "1000000"),
        ({"size": 10, "file": str(tmp_path / "missing.json")}, "cannot read"),
        ({"size": 10, "file": str(tmp_path / "other.json")}, "made with the tokenizer of"),
        ({"size": 10, "file": "x", "rows": 3}, "unknown key 'rows'"),
    ):
        with pytest.raises(PluginError, match=match) as caught, engine(window={"hot_vocabulary": hot}, **OPTIONS):
            pass
        assert "\n" not in str(caught.value)
