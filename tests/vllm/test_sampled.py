"""At temperature 1 the output has the target's own distribution, with the window in force."""

import functools

import pytest

pytest.importorskip("vllm.version", reason="vllm is not installed; run make test-vllm")

import torch
from draft_passes import draft_builder
from drafters import Drafter
from engines import GAMMA, counters, generate
from models import llama_with_eagle3, random_prompts
from scipy.stats import chi2
from vllm import SamplingParams, TokensPrompt
from vllm.v1.sample import rejection_sampler

VOCAB = 16
SAMPLES = 2400
REJECTED_AT = 1e-4
FLAT = Drafter("eagle3", functools.partial(llama_with_eagle3, VOCAB, 0.02, 1.0))
OPTIONS = {"dtype": "float32", "max_num_seqs": 256, "num_gpu_blocks_override": 2048, "max_model_len": 512}
PROMPT = random_prompts([161], vocab=VOCAB)[0]


@pytest.fixture(scope="module")
def distribution():
    """``[VOCAB, VOCAB, VOCAB]``: the target's probabilities of the three tokens after the prompt; float64."""

    def following(prompts):
        answers = generate(llm, prompts, 1, logprobs=VOCAB)
        rows = [[answer.logprobs[0][token] for token in range(VOCAB)] for answer in answers]
        return torch.tensor(rows, dtype=torch.float64).softmax(-1)

    tokens = range(VOCAB)
    with FLAT.running(gamma=0, **OPTIONS) as llm:
        first = following([PROMPT])[0]
        second = following([[*PROMPT, one] for one in tokens])
        third = following([[*PROMPT, one, two] for one in tokens for two in tokens]).view(VOCAB, VOCAB, VOCAB)
    return first[:, None, None] * second[:, :, None] * third


@pytest.fixture(autouse=True)
def temperatures(monkeypatch):
    """Expand them in torch: what vLLM 0.32 does on a CPU writes them to a copy, and logits are divided by garbage."""

    def expand(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):
        counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
        return torch.where(x == replace_from, replace_to, x).repeat_interleave(counts, output_size=num_tokens)

    monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", expand)


def sample(llm):
    """``[SAMPLES, 3]``: continuations of the prompt; and how many drafted tokens were accepted a step."""
    generate(llm, [PROMPT], 1)  # so that the samples find it cached
    torch.manual_seed(0)
    before = counters(llm)
    sampling = SamplingParams(n=SAMPLES, temperature=1, max_tokens=3, ignore_eos=True)
    [made] = llm.generate([TokensPrompt(prompt_token_ids=PROMPT)], sampling, use_tqdm=False)
    after = counters(llm)
    drafts, accepted = (
        after[f"spec_decode_num_{what}"] - before.get(f"spec_decode_num_{what}", 0)
        for what in ("drafts", "accepted_tokens")
    )
    return torch.tensor([output.token_ids for output in made.outputs]), accepted / drafts


def p_value(samples, probabilities):
    """Pearson's chi-square of pairs of tokens; pairs expected fewer than 5 times count as one."""
    expected = probabilities.flatten() * len(samples)
    seen = torch.bincount(samples[:, 0] * VOCAB + samples[:, 1], minlength=VOCAB * VOCAB).double()
    rare = expected < 5
    expected, seen = (torch.cat([each[~rare], each[rare].sum(0, keepdim=True)]) for each in (expected, seen))
    expected, seen = expected[expected > 0], seen[expected > 0]
    return float(chi2.sf(((seen - expected).square() / expected).sum(), len(expected) - 1))


@pytest.mark.parametrize("drafts", ["greedy", "probabilistic"])
def test_samples_have_the_targets_distribution_and_a_biased_sampler_has_not(drafts, distribution, monkeypatch):
    pairs = {"first two": distribution.sum(2), "last two": distribution.sum(0)}
    with FLAT.running({"sink": 4, "window": 64}, settings={"draft_sample_method": drafts}, **OPTIONS) as llm:
        samples, accepted = sample(llm)
        assert draft_builder(llm).windowing.windowed > 0
        assert 0.1 < accepted < 0.9 * GAMMA
        honest = [p_value(samples[:, :2], pairs["first two"]), p_value(samples[:, 1:], pairs["last two"])]

        verify = rejection_sampler.rejection_sample

        def as_if_drafts_were_uniform(*args, **kwargs):
            return verify(*args[:4], torch.full_like(args[5], 1 / VOCAB), *args[5:], **kwargs)

        monkeypatch.setattr(rejection_sampler, "rejection_sample", as_if_drafts_were_uniform)
        samples, _ = sample(llm)
        biased = [p_value(samples[:, :2], pairs["first two"]), p_value(samples[:, 1:], pairs["last two"])]
    print(drafts, "p:", honest, "of a biased sampler:", biased, "accepted a step:", accepted)
    assert min(honest) > REJECTED_AT
    assert max(biased) < REJECTED_AT
