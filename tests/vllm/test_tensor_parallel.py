"""Window and hot rows on two tensor-parallel ranks: proposals and output are those of one, and the log says it once."""

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm.version", reason="vllm is not installed; run make test-vllm")

from drafters import EAGLE3
from engines import generate
from hot_sets import hot_file, tokens_of
from models import VOCAB, random_prompts

from windowed_mtp.engines.vllm.hot_head import refresh_hot_head

SIZE = 65
"""Odd, so that two ranks cannot share the hot rows evenly."""
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 512}


def record(worker: Any) -> None:
    drafter = worker.model_runner.drafter
    propose, worker.proposed = drafter.propose, []

    def recorded(*args: Any, **kwargs: Any) -> Any:
        made = propose(*args, **kwargs)
        worker.proposed.append(made.tolist())
        return made

    drafter.propose = recorded


def recorded(worker: Any) -> tuple[list[Any], list[int], int]:
    """What a rank has proposed since it was last asked, its hot ids, and how many rows it holds."""
    proposed = worker.proposed[:]
    worker.proposed.clear()
    [logits] = worker.model_runner.windowed_mtp_hot_logits
    [rows] = set(logits.rows.values())
    return proposed, rows.ids.tolist(), rows.weight.shape[0]


def make_full_rows(worker: Any) -> None:
    """Let a rank gather all hot logits and put them in full rows, instead of choosing among its own first."""
    drafter = worker.model_runner.drafter
    assert drafter.use_local_argmax_reduction
    drafter.use_local_argmax_reduction = False


def spoil(worker: Any) -> None:
    """Scribble over a rank's hot rows, as a sleep would."""
    [rows] = set(worker.model_runner.windowed_mtp_hot_logits[0].rows.values())
    rows.ids.data.fill_(2**40)
    rows.weight.data.fill_(float("nan"))


def run(window: dict[str, Any], files: list[str], **options: Any) -> Iterator[Any]:
    """For each file in turn, at last with full rows and weights reloaded: continuations, and what each rank says."""
    prompts = random_prompts([20, 130, 161])
    with EAGLE3.running(window, **OPTIONS, **options) as llm:
        llm.collective_rpc(record)
        for file in [*files, None]:
            llm.collective_rpc(*((make_full_rows,) if file is None else (refresh_hot_head, None, (file,))))
            if file is None:
                llm.collective_rpc(spoil)
                llm.collective_rpc("reload_weights")
            outputs = [each.tokens for each in generate(llm, prompts, 24)]
            yield outputs, llm.collective_rpc(recorded)


def test_two_ranks_propose_and_generate_what_one_does(tmp_path, monkeypatch, capfd):
    files = [hot_file(tmp_path, range(first, VOCAB, 3), special=(1,)) for first in (0, 2)]
    window = {"sink": 4, "window": 64, "hot_vocabulary": {"size": SIZE, "file": files[0]}}
    one = list(run(window, files))
    capfd.readouterr()
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")  # the ranks read it when they start
    two = list(run(window, files, tensor_parallel_size=2, distributed_executor_backend="mp"))
    log = "".join(capfd.readouterr())
    for (output, [(proposed, ids, rows)]), (outputs, ranks) in zip(one, two, strict=True):
        assert outputs == output
        assert ranks == [(proposed, ids, 33), (proposed, ids, 33)] and rows == SIZE
        assert tokens_of(proposed) <= set(ids) and len(tokens_of(proposed)) > 20
    for said in ("Windowed MTP is in force", f"the draft's output head reads {SIZE} of {VOCAB} rows"):
        assert log.count(said) == 1
