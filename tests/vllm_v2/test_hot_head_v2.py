"""Hot rows in the V2 model runner: greedy and probabilistic drafts, and the kernels that verify them."""

import functools
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.version", reason="vllm is not installed; run make test-vllm")
if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") != "1":
    pytest.skip("another model runner is set up in this process", allow_module_level=True)

import torch
from drafters import Drafter
from engines import GAMMA, counters, generate, runner_of
from hot_sets import hot_file, proposals, tokens_of
from models import llama_with_eagle3, random_prompts
from scipy.stats import chisquare
from sleeping import sleeping
from triton.runtime import interpreter
from vllm import SamplingParams, TokensPrompt
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.spec_decode import rejection_sampler, rejection_sampler_utils
from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

from windowed_mtp.engines.vllm.hot_head import refresh_hot_head, remove_hot_head
from windowed_mtp.vocab import HotVocabulary

VOCAB, SIZE, TOKENS = 16, 5, 12
REJECTED_AT = 1e-4
WINDOW = {"sink": 4, "window": 64}
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 512}
MANY = {**OPTIONS, "max_num_seqs": 128, "num_gpu_blocks_override": 1024}
PROMPTS = random_prompts([20, 130], vocab=VOCAB)


@functools.cache
def checkpoints(sharpness: float) -> tuple[str, str]:
    """A target and its drafter, which says at the top of its config which layers it takes: V2 looks nowhere else."""
    target, drafter = llama_with_eagle3(VOCAB, sharpness, 1.0)
    copy = shutil.copytree(drafter, Path(tempfile.mkdtemp(prefix="tiny-eagle3-")) / "drafter")
    config = json.loads((copy / "config.json").read_text())
    config.update(config.pop("eagle_config"))
    (copy / "config.json").write_text(json.dumps(config))
    return target, str(copy)


SHARP, FLAT = (Drafter("eagle3", functools.partial(checkpoints, sharpness)) for sharpness in (1.0, 0.02))


@pytest.fixture(scope="module", autouse=True)
def interpreted() -> Iterator[None]:
    """What verification needs beyond greedy drafts: the interpreter has no log1p, and stores under no integer mask."""
    builder = interpreter.InterpreterBuilder
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rejection_sampler_utils, "tldevice", SimpleNamespace(log1p=lambda x: interpreter.tl.log(1 + x)))
        for name, place in (("create_masked_load", 1), ("create_masked_store", 2)):
            patch.setattr(builder, name, with_bools(getattr(builder, name), place))
        yield


def with_bools(original: Any, place: int) -> Any:
    """An operation of the interpreter's whose mask may be of any type."""

    def operation(self: Any, *given: Any) -> Any:
        mask = interpreter.TensorHandle(given[place].data.astype(bool), interpreter.tl.int1)
        return original(self, *given[:place], mask, *given[place + 1 :])

    return operation


@pytest.fixture(scope="module")
def files(tmp_path_factory: Any) -> dict[str, str]:
    """Rankings by name: of special tokens only, random, and of the tokens that the random one has last."""
    shuffled = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1)).tolist()
    sets = {"special only": [], "random": shuffled, "stale": shuffled[::-1]}
    folder = tmp_path_factory.mktemp("hot")
    return {name: hot_file(folder, ranked, special=(0, 1), vocab=VOCAB) for name, ranked in sets.items()}


def test_the_output_stays_whatever_is_hot_and_all_rows_propose_what_none_do(files: dict[str, str]):
    with SHARP.running(gamma=0, **OPTIONS) as llm:
        target = [each.tokens for each in generate(llm, PROMPTS, TOKENS)]
    with SHARP.running({**WINDOW, "hot_vocabulary": {"size": SIZE, "file": files["random"]}}, **OPTIONS) as llm:
        runner = runner_of(llm)
        assert runner.speculator.use_local_argmax_reduction and runner.speculator.draft_logits is None
        for file in files.values():
            llm.collective_rpc(refresh_hot_head, args=(file,))
            with proposals(llm) as seen:
                assert [each.tokens for each in generate(llm, PROMPTS, TOKENS)] == target
            hot = HotVocabulary.load(file).ids(SIZE, VOCAB)
            assert tokens_of(seen) <= set(hot) and len(tokens_of(seen)) > 1
        [rows] = set(runner.windowed_mtp_hot_logits[0].rows.values())
        for level in (1, 2):
            with sleeping(llm, level):
                assert rows.weight.isnan().all() and rows.ids.min() >= VOCAB
            if level == 2:
                llm.collective_rpc("reload_weights")
            with proposals(llm) as again:
                assert [each.tokens for each in generate(llm, PROMPTS, TOKENS)] == target
            assert again == seen
        remove_hot_head(runner)
        assert not runner.speculator.use_local_argmax_reduction
        with proposals(llm) as whole:
            assert [each.tokens for each in generate(llm, PROMPTS, TOKENS)] == target
    with (
        SHARP.running({**WINDOW, "hot_vocabulary": {"size": VOCAB, "file": files["random"]}}, **OPTIONS) as llm,
        proposals(llm) as seen,
    ):
        generate(llm, PROMPTS, TOKENS)
    assert seen == whole


def as_if_drafts_were_uniform(target: torch.Tensor, draft: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Verify, with another distribution reported than the one that was sampled from."""
    return rejection_sample(target, torch.zeros_like(draft), *args, **kwargs)


def p_of_second_tokens(llm: Any, probabilities: torch.Tensor, count: int = 96) -> float:
    """Chi-square p of the second tokens after the longer prompt: the first that a draft may have proposed."""
    sampling = SamplingParams(n=count, temperature=1, max_tokens=2, ignore_eos=True)
    [made] = llm.generate([TokensPrompt(prompt_token_ids=PROMPTS[1])], sampling, use_tqdm=False)
    seen = torch.bincount(torch.tensor([output.token_ids[1] for output in made.outputs]), minlength=VOCAB)
    return float(chisquare(seen.numpy(), (probabilities * count).numpy()).pvalue)


def test_samples_have_the_targets_distribution_whatever_is_hot(files: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    with FLAT.running(gamma=0, **OPTIONS) as llm:
        prompts = [PROMPTS[1], *([*PROMPTS[1], one] for one in range(VOCAB))]
        answers = [answer.logprobs[0] for answer in generate(llm, prompts, 1, logprobs=VOCAB)]
        rows = torch.tensor([[each[token] for token in range(VOCAB)] for each in answers], dtype=torch.float64)
    first, *second = rows.softmax(-1)
    probabilities = first @ torch.stack(second)
    hot = {"size": SIZE, "file": files["random"]}
    settings = {"draft_sample_method": "probabilistic"}
    with FLAT.running({**WINDOW, "hot_vocabulary": hot}, settings=settings, **MANY) as llm:
        p = {}
        assert runner_of(llm).speculator.draft_logits is not None  # so full rows are made
        for name, file in files.items():
            llm.collective_rpc(refresh_hot_head, args=(file,))
            before = counters(llm)
            p[name] = p_of_second_tokens(llm, probabilities)
            after = counters(llm)
            drafts, accepted = (
                after[f"spec_decode_num_{what}"] - before[f"spec_decode_num_{what}"]
                for what in ("drafts", "accepted_tokens")
            )
            assert 0.02 < accepted / drafts < GAMMA
        monkeypatch.setattr(rejection_sampler, "rejection_sample", as_if_drafts_were_uniform)
        biased = p_of_second_tokens(llm, probabilities)
    print("p:", p, "of a biased sampler:", biased)
    assert min(p.values()) > REJECTED_AT > biased


@pytest.mark.parametrize(
    ("verify", "block"), [(rejection_sample, False), (rejection_sample, True), (as_if_drafts_were_uniform, False)]
)
def test_verification_where_whole_blocks_have_no_hot_token(verify: Any, block: bool):
    """A kernel's block of 8,192 tokens without a hot one, which has half of what the target wants."""
    rows, vocab, first = 64, 8192 + 64, 8192
    support = torch.tensor([3, first, 4100, first + 7, 8000, first + 50, 8191, vocab - 1])
    target = torch.full((2 * rows, vocab), float("-inf"))
    target[:, support] = torch.linspace(-0.5, 0.5, len(support))
    draft = torch.full((rows, 1, vocab), float("-inf"))
    draft[..., first:] = -4.0
    draft[..., support[1::2]] = torch.tensor([1.0, 0.0, 2.0, 0.5])
    order, local = torch.arange(rows), torch.tensor([0, 1], dtype=torch.int32).repeat(rows)
    generator = torch.Generator().manual_seed(0)
    drafted = torch.multinomial(draft[:, 0].softmax(-1), 1, generator=generator)
    tokens, count = verify(
        target,
        draft,
        torch.cat([torch.zeros_like(drafted), drafted], 1).flatten(),
        torch.arange(0, 2 * rows + 1, 2, dtype=torch.int32),
        40 + local,
        order,
        order.repeat_interleave(2),
        local,
        torch.ones(rows),
        order * 7919 + 1,
        1,
        use_block_verification=block,
    )
    assert 0.1 * rows < (count == 2).sum()
    seen = torch.tensor([int((tokens[:, 0] == token).sum()) for token in support])
    expected = target[0, support].double().softmax(-1) * rows
    if verify is rejection_sample:
        assert (count == 2).sum() < 0.9 * rows and int(seen.sum()) == rows
        assert chisquare(seen.numpy(), expected.numpy()).pvalue > REJECTED_AT
    else:
        assert float(((seen - expected).square() / expected).sum()) > 30


def test_a_probabilistic_draft_is_drawn_from_the_hot_rows():
    rows, vocab, hot = 8, 3 * 1024, torch.tensor([1030, 2000])
    logits = torch.full((rows, vocab), float("-inf"))
    logits[:, hot] = torch.tensor([0.0, 0.5])
    cache, order = torch.full((rows, 1, vocab), float("nan")), torch.arange(rows)
    tokens = gumbel_sample(
        logits, order, torch.ones(rows), order * 7919 + 1, order, apply_temperature=True, is_drafting=True,
        logits_cache=cache, logits_cache_col=torch.tensor(0),
    )  # fmt: skip
    assert set(tokens.tolist()) == set(hot.tolist())
    assert cache[:, 0].equal(logits)
