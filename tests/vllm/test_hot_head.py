"""Hot rows of the draft's output head in an engine: the output stays, proposals are hot, all rows change nothing."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.version", reason="vllm is not installed; run make test-vllm")

import torch
from engines import engine, generate, runner_of, same_up_to_near_ties, text_prompts
from hot_sets import proposals, tokens_of
from sleeping import sleeping
from transformers import AutoTokenizer
from vllm.model_executor.models.interfaces import LocalArgmaxMixin
from vllm.v1.worker.gpu_worker import Worker

from windowed_mtp.engines.vllm import unregister
from windowed_mtp.engines.vllm.config import PluginConfig, PluginError
from windowed_mtp.engines.vllm.hot_head import _has_top_tokens, refresh_hot_head, remove_hot_head
from windowed_mtp.reference import checkpoint_path
from windowed_mtp.vocab import HotVocabulary

WINDOW = {"sink": 4, "window": 300}
LENGTHS = [60, 700]
SIZE = 400
CLOSE = {"atol": 0.05, "rtol": 0.02}
OPTIONS: dict[str, Any] = {"max_model_len": 2048, "num_gpu_blocks_override": 48}


def ranking(path: Any, counts: dict[int, int]) -> HotVocabulary:
    made = HotVocabulary.from_counts(counts, tokenizer=AutoTokenizer.from_pretrained(checkpoint_path()))
    made.save(path)
    return made


@pytest.fixture(scope="module")
def target():
    with engine(drafter={}, **OPTIONS) as llm:
        prompts = text_prompts(llm, LENGTHS)
        return prompts, generate(llm, prompts, logprobs=2), runner_of(llm).vllm_config.model_config.get_vocab_size()


@pytest.fixture(scope="module")
def files(target: Any, tmp_path_factory: Any):
    """Rankings by name, with their hot ids: counted from the prompts, and of tokens that are in none of them."""
    prompts, _, vocab_size = target
    folder, seen = tmp_path_factory.mktemp("hot"), Counter(token for ids in prompts for token in ids)
    counts = {"counted": seen, "wrong": dict.fromkeys((id for id in range(vocab_size) if id not in seen), 1)}
    made = {}
    for name, each in counts.items():
        made[name] = str(folder / f"{name}.json"), ranking(folder / f"{name}.json", each).ids(SIZE, vocab_size)
    return made


@pytest.fixture(scope="module")
def hot(files: Any):
    window = {**WINDOW, "hot_vocabulary": {"size": SIZE, "file": files["counted"][0]}}
    with engine(window=window, **OPTIONS) as llm:
        yield llm


@pytest.mark.parametrize("name", ["counted", "wrong"])
def test_the_output_stays_and_proposals_are_hot(target: Any, files: Any, hot: Any, name: str):
    prompts, answers, _ = target
    file, ids = files[name]
    hot.collective_rpc(refresh_hot_head, args=(file,))
    with proposals(hot) as seen:
        ties = same_up_to_near_ties(answers, generate(hot, prompts))
    assert ties <= 1
    proposed = tokens_of(seen)
    assert proposed <= set(ids)
    assert len(proposed) > (15 if name == "counted" else 5)


def test_logits_are_the_heads_own_on_hot_rows_and_a_refresh_changes_which(hot: Any, files: Any):
    runner = runner_of(hot)
    model, [logits] = runner.drafter.model, runner.windowed_mtp_hot_logits
    rows = logits.rows[model.lm_head]
    full_of, hidden = logits.own[0], torch.randn(3, model.lm_head.weight.shape[1], dtype=model.lm_head.weight.dtype)
    address = rows.weight.data_ptr(), rows.ids.data_ptr()
    for name in ("wrong", "counted"):
        file, ids = files[name]
        hot.collective_rpc(refresh_hot_head, args=(file,))
        assert address == (rows.weight.data_ptr(), rows.ids.data_ptr())
        made, full = model.compute_logits(hidden), full_of(model.lm_head, hidden)
        outside = torch.ones(full.shape[1], dtype=torch.bool)
        outside[ids] = False
        assert made.shape == full.shape and torch.isneginf(made[:, outside]).all()
        torch.testing.assert_close(made[:, ids], full[:, ids], **CLOSE)
        assert logits.processor.get_top_tokens(model.lm_head, hidden).equal(made.argmax(-1))
    with torch.inference_mode():
        model.lm_head.weight.data.neg_()  # unnoticed
        hot.collective_rpc(refresh_hot_head)  # what the weights are now
        torch.testing.assert_close(model.compute_logits(hidden)[:, ids], -full[:, ids], **CLOSE)
        model.lm_head.weight.data.neg_()
        hot.collective_rpc(refresh_hot_head)
    with pytest.raises(PluginError, match="3 hot ids cannot take the place of 400"):
        rows.take([1, 2, 3])


@pytest.mark.parametrize("level", [1, 2])
def test_hot_rows_outlast_sleep(target: Any, files: Any, hot: Any, level: int):
    prompts, answers, _ = target
    hot.collective_rpc(refresh_hot_head, args=(files["counted"][0],))
    runner = runner_of(hot)
    [rows] = set(runner.windowed_mtp_hot_logits[0].rows.values())
    ids, weight, address = rows.ids.tolist(), rows.weight.clone(), (rows.ids.data_ptr(), rows.weight.data_ptr())
    with proposals(hot) as before:
        generate(hot, prompts)
    with sleeping(hot, level):
        assert rows.weight.isnan().all() and rows.ids.min() > runner.vllm_config.model_config.get_vocab_size()
        assert runner.model.lm_head.weight.isnan().all()
    assert runner.windowed_mtp_hot_watch.stale
    if level == 2:
        assert runner.model.lm_head.weight.isnan().all()
        hot.collective_rpc("reload_weights")
    with proposals(hot) as after:
        assert same_up_to_near_ties(answers, generate(hot, prompts)) <= 1
    assert address == (rows.ids.data_ptr(), rows.weight.data_ptr())
    assert rows.ids.tolist() == ids and rows.weight.equal(weight)
    assert after == before and len(tokens_of(after)) > 15


@pytest.mark.parametrize("way", ["loader", "draft loader", "in place", "worker"])
def test_hot_rows_follow_new_weights(files: Any, hot: Any, target: Any, way: str):
    """Whichever way weights come, rows are read anew at the next step, and not once more at the one after it."""
    prompts, _, _ = target
    runner = runner_of(hot)
    worker = hot.llm_engine.model_executor.driver_worker.worker
    [rows] = set(runner.windowed_mtp_hot_logits[0].rows.values())
    head = runner.model.lm_head.weight
    hot.collective_rpc(refresh_hot_head, args=(files["counted"][0],))
    old = head.detach().clone()

    def write(new: Any) -> None:
        if way == "in place":
            with torch.no_grad():
                head.copy_(new)
        elif way == "worker":
            with pytest.MonkeyPatch.context() as patch:  # a trainer's engine, which writes where torch does not look
                patch.setattr(worker, "_check_weight_transfer_engine", lambda: None)
                patch.setattr(worker, "_weight_update_active", True)
                engine = SimpleNamespace(update_weights=lambda _: head.data.copy_(new))
                patch.setattr(worker, "weight_transfer_engine", engine)
                worker.update_weights({})
        else:
            model = runner.model if way == "loader" else runner.get_draft_model()
            name = "model.embed_tokens.weight" if way == "loader" else "mtp.fc.weight"  # a tied head
            if way == "draft loader":
                head.data.copy_(new)
            model.load_weights([(name, new if way == "loader" else model.model.fc.weight.detach().clone())])

    with pytest.MonkeyPatch.context() as patch:
        read = []
        patch.setattr(rows, "refresh", lambda: (read.append(1), type(rows).refresh(rows)))
        for new in (-old, old):
            write(new)
            before, expected = len(read), new[rows.ids]
            assert not rows.weight.equal(expected)
            generate(hot, prompts[:1], 8)
            assert rows.weight.equal(expected)
            assert len(read) == before + 1


def test_choosing_among_hot_logits_proposes_what_full_rows_do(target: Any, files: Any, hot: Any):
    prompts, _, _ = target
    runner = runner_of(hot)
    [logits] = runner.windowed_mtp_hot_logits
    hot.collective_rpc(refresh_hot_head, args=(files["counted"][0],))
    made: dict[bool, list[Any]] = {}
    for among_hot in (True, False):
        assert runner.drafter.use_local_argmax_reduction is True
        runner.drafter.use_local_argmax_reduction = among_hot
        with proposals(hot) as seen, pytest.MonkeyPatch.context() as patch:
            if among_hot:
                patch.setattr(logits.processor, "forward", None)  # nothing is put in full rows
            generate(hot, prompts)
        made[among_hot] = seen
    runner.drafter.use_local_argmax_reduction = True
    assert made[True] == made[False] and len(tokens_of(made[True])) > 15


def test_each_byte_is_hot_whatever_the_file_says(hot: Any, files: Any, tmp_path: Any):
    """Neither a file of before nor a token map says which tokens are a single byte; the engine's tokenizer does."""
    file = HotVocabulary.load(files["wrong"][0])
    older = tmp_path / "older.json"
    older.write_text(file.model_dump_json(exclude={"byte_tokens"}))
    [rows] = set(runner_of(hot).windowed_mtp_hot_logits[0].rows.values())
    as_a_map = tmp_path / "map.pt"
    torch.save(list(file.ranked), as_a_map)
    for name in (str(older), str(as_a_map), files["wrong"][0]):
        hot.collective_rpc(refresh_hot_head, args=(name,))
        assert rows.ids.tolist() == files["wrong"][1]
    assert len(file.byte_tokens) == 256 and set(file.byte_tokens) <= set(files["wrong"][1])


def test_a_file_that_is_of_no_use_changes_nothing(hot: Any, files: Any, tmp_path: Any):
    other = tmp_path / "other.json"
    with open(files["counted"][0]) as file:
        other.write_text(file.read().replace('"sha256":"', '"sha256":"0'))
    [logits] = runner_of(hot).windowed_mtp_hot_logits
    [rows] = logits.rows.values()
    before = rows.ids.tolist()
    for file, match in ((str(other), "made with the tokenizer of"), (str(tmp_path / "none.json"), "cannot read")):
        with pytest.raises(PluginError, match=match) as caught:
            hot.collective_rpc(refresh_hot_head, args=(file,))
        assert "\n" not in str(caught.value)
    assert rows.ids.tolist() == before


def test_all_rows_propose_what_none_do(target: Any, files: Any, hot: Any):
    """Runs last with the engine that has hot rows, as it takes them off."""
    prompts, _, vocab_size = target
    remove_hot_head(runner_of(hot))
    assert runner_of(hot).drafter.use_local_argmax_reduction is False
    assert "load_weights" not in vars(runner_of(hot).model)
    assert hasattr(Worker.wake_up, "__wrapped__")
    unregister()
    assert not hasattr(Worker.wake_up, "__wrapped__")
    with pytest.raises(PluginError, match="no hot rows are in force"):
        hot.collective_rpc(refresh_hot_head)
    with proposals(hot) as none:
        generate(hot, prompts)
    window = {**WINDOW, "hot_vocabulary": {"size": vocab_size, "file": files["counted"][0]}}
    with engine(window=window, **OPTIONS) as llm, proposals(llm) as seen:
        generate(llm, prompts)
    assert seen == none
    assert not tokens_of(seen) <= set(files["counted"][1])


@pytest.mark.parametrize(
    ("parents", "estimator", "modules", "expected"),
    [
        ((LocalArgmaxMixin,), None, False, True),
        ((), None, False, False),
        ((LocalArgmaxMixin,), object(), False, False),
        ((LocalArgmaxMixin,), None, True, False),
    ],
)
def test_when_a_draft_chooses_among_hot_logits(parents: Any, estimator: Any, modules: bool, expected: bool):
    """Not with a class that has no way for it, an estimator that wants rows, or modules that are told their number."""
    drafter = SimpleNamespace(model=type("Model", parents, {})(), acceptance_estimator=estimator)
    speculative = SimpleNamespace(use_multi_module_mtp=lambda: modules)
    runner = SimpleNamespace(vllm_config=SimpleNamespace(speculative_config=speculative))
    assert _has_top_tokens(runner, drafter) is expected


def test_bad_settings_stop_the_engine(files: Any):
    for hot, match in (
        ({"size": 0, "file": "x"}, r"\"size\"\] is 0, but it must be a whole number of at least 1"),
        ({"size": 10}, r"\"file\"\] is None, but it must name a file"),
        ({"size": 10, "file": "x", "rows": 3}, "unknown key 'rows'"),
    ):
        with pytest.raises(PluginError, match=match) as caught:
            PluginConfig.read({"windowed_mtp": {"hot_vocabulary": hot}})
        assert "\n" not in str(caught.value)
    hot = {"size": 10**6, "file": files["counted"][0]}
    with (
        pytest.raises(PluginError, match=r"^additional_config\[.*1000000[^\n]*$"),
        engine(window={"hot_vocabulary": hot}, **OPTIONS),
    ):
        pass
