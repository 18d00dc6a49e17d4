"""Hot rows of other drafters: EAGLE-3 with the target's head or a vocabulary of its own, layers with a head each."""

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.version", reason="vllm is not installed; run make test-vllm")

import torch
from drafters import FULL_MTP, LATENT_MTP, Drafter
from engines import GAMMA, counters, generate, runner_of
from hot_sets import hot_file, proposals, tokens_of
from models import HIDDEN, VOCAB, llama_with_eagle3, random_prompts, save
from ngram import plugin_log
from safetensors.torch import load_file

from windowed_mtp.engines.vllm import hot_head
from windowed_mtp.engines.vllm.hot_head import refresh_hot_head, remove_hot_head

FEW = 64
"""Tokens of an EAGLE-3 target whose drafter can be told, by one matrix, which token follows which."""
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 512}
WINDOW = {"sink": 4, "window": 64}
TOKENS = 24


def drafter_of(target: str, drafter: str, change: Any, **config: Any) -> str:
    """A copy of a drafter whose tensors are changed, and its config."""
    tensors = {name: each.float() for name, each in load_file(Path(drafter) / "model.safetensors").items()}
    change(tensors, load_file(Path(target) / "model.safetensors"))
    return save(
        Path(tempfile.mkdtemp(prefix="tiny-eagle3-")) / "drafter", tensors, architectures=["LlamaForCausalLMEagle3"],
        num_hidden_layers=1, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, **config,
    )  # fmt: skip


@functools.cache
def with_the_targets_head() -> tuple[str, str]:
    """A drafter without a head, which is given the next token's embedding, so that the target's own will do."""

    def change(tensors: dict[str, torch.Tensor], target: dict[str, torch.Tensor]) -> None:
        del tensors["lm_head.weight"]
        embedding, head = target["model.embed_tokens.weight"].float(), target["lm_head.weight"].float()
        follows = torch.cdist(head, embedding).argmin(1).argsort()
        tensors["fc.weight"][:, :HIDDEN] = (torch.linalg.pinv(embedding) @ embedding[follows]).T

    target, drafter = llama_with_eagle3(FEW, 1.0, 1.5)
    return target, drafter_of(target, drafter, change, vocab_size=FEW, draft_vocab_size=FEW)


@functools.cache
def with_a_vocabulary_of_its_own() -> tuple[str, str]:
    """A drafter that knows every other token."""

    def change(tensors: dict[str, torch.Tensor], _: Any) -> None:
        tensors["lm_head.weight"] = tensors["lm_head.weight"][::2]
        tensors["d2t"] = torch.arange(VOCAB // 2).float()

    target, drafter = llama_with_eagle3()
    return target, drafter_of(target, drafter, change, draft_vocab_size=VOCAB // 2)


SHARED = Drafter("eagle3", with_the_targets_head)
OWN = Drafter("eagle3", with_a_vocabulary_of_its_own)


@pytest.mark.parametrize(
    ("drafter", "vocab"),
    [
        pytest.param(SHARED, FEW, id="eagle3"),
        pytest.param(LATENT_MTP, VOCAB, id="deepseek"),
        pytest.param(FULL_MTP, VOCAB, id="glm"),
    ],
)
def test_the_output_stays_whatever_is_hot(drafter: Drafter, vocab: int, tmp_path: Path):
    prompts = random_prompts([20, 130, 161], vocab=vocab)
    with drafter.running(gamma=0, **OPTIONS) as llm:
        target = [each.tokens for each in generate(llm, prompts, TOKENS)]
    shuffled = torch.randperm(vocab, generator=torch.Generator().manual_seed(1)).tolist()
    size = vocab // 4
    padded = [*range(vocab, 2 * vocab), *shuffled[1:]]  # of tokens that the output head has no rows for
    sets = {"special only": [], "random": shuffled, "stale": shuffled[::-1], "padded": padded}
    files = {name: hot_file(tmp_path, ranked, special=(0, 1), vocab=2 * vocab) for name, ranked in sets.items()}
    hot = {"size": size, "file": files["random"]}
    with drafter.running({**WINDOW, "hot_vocabulary": hot}, **OPTIONS) as llm:
        runner = runner_of(llm)
        [logits] = runner.windowed_mtp_hot_logits
        [head] = logits.rows
        assert head is runner.model.lm_head and len(set(logits.rows.values())) == 1
        assert runner.drafter.use_local_argmax_reduction is (drafter is SHARED)  # the others' classes cannot
        proposed = {}
        for name, file in files.items():
            with plugin_log() as lines:
                llm.collective_rpc(refresh_hot_head, args=(file,))
            left_out = [text for _, text in lines if f"tokens from {vocab} on are left out" in text]
            assert len(left_out) == (name == "padded")
            with proposals(llm) as seen:
                assert [each.tokens for each in generate(llm, prompts, TOKENS)] == target
            [rows] = set(logits.rows.values())
            proposed[name] = tokens_of(seen)
            assert proposed[name] <= set(rows.ids.tolist()) and rows.ids.shape == (size,)
        assert proposed["special only"] <= set(range(size))
        assert len(proposed["random"] ^ proposed["stale"]) > 4
        before = counters(llm)
        remove_hot_head(runner)
        with proposals(llm) as whole:
            assert [each.tokens for each in generate(llm, prompts, TOKENS)] == target
        after = counters(llm)
    accepted = after["spec_decode_num_accepted_tokens"] - before["spec_decode_num_accepted_tokens"]
    assert accepted > 0.05 * GAMMA * (after["spec_decode_num_drafts"] - before["spec_decode_num_drafts"])
    hot = {"size": vocab, "file": files["random"]}
    with drafter.running({**WINDOW, "hot_vocabulary": hot}, **OPTIONS) as llm, proposals(llm) as seen:
        generate(llm, prompts, TOKENS)
    assert seen == whole


def test_a_head_with_a_vocabulary_of_its_own_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    said: list[tuple[str, str]] = []
    monkeypatch.setattr(hot_head, "_say", lambda *given: said.append(given))
    prompts = random_prompts([20, 161])
    hot = {"size": 16, "file": hot_file(tmp_path, [], special=(0, 1))}
    outputs, proposed = [], []
    for window in (WINDOW, {**WINDOW, "hot_vocabulary": hot}):
        with OWN.running(window, **OPTIONS) as llm, proposals(llm) as seen:
            outputs.append([each.tokens for each in generate(llm, prompts, TOKENS)])
            proposed.append(list(seen))
    assert outputs[0] == outputs[1] and proposed[0] == proposed[1]
    assert len(tokens_of(proposed[1])) > 16
    left = "Hot vocabulary: the draft's output head is left alone, as it has a vocabulary of its own."
    assert said == [("warning", left)]
