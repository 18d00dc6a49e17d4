"""The acceptance rule leaves the target's distribution as it is."""

import itertools

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from windowed_mtp.engines.transformers.verify import accept_or_resample, acceptance, point_mass, residual

DRAWS = 250_000
SUSPICIOUS = 1e-6


def distributions(rows: int, vocab: int, seed: int, sharpness: float = 2.0) -> Tensor:
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * sharpness
    return logits.softmax(-1)


def p_value(counts: Tensor, expected: Tensor) -> float:
    share = expected.double() / expected.double().sum()
    return chisquare(counts.double().numpy(), (share * counts.sum()).numpy()).pvalue


@pytest.mark.parametrize("seed", range(20))
def test_exact_enumeration(seed: int):
    p, q = distributions(1, 11, seed), distributions(1, 11, seed + 100)
    q[:, seed % 11] = 0  # a token that the draft cannot propose
    q /= q.sum()
    accepted = q * acceptance(p, q)
    output = accepted + (1 - accepted.sum()) * residual(p, q)
    assert torch.allclose(output, p, atol=1e-12)


def test_equal_distributions_are_always_accepted_and_disjoint_ones_never():
    p = distributions(1, 7, 0).float().repeat(1000, 1)
    drafted = torch.multinomial(p, 1)[:, 0]
    tokens, accepted = accept_or_resample(p, p, drafted)
    assert accepted.all()
    assert torch.equal(tokens, drafted)
    q = point_mass(torch.full((1000,), 2), 7)
    p[:, 2] = 0
    tokens, accepted = accept_or_resample(p / p.sum(-1, keepdim=True), q, torch.full((1000,), 2))
    assert not accepted.any()
    assert not (tokens == 2).any()


@pytest.mark.parametrize("kind", ["other", "near", "point"])
def test_one_token_by_chi_square(kind: str):
    torch.manual_seed(0)
    p = distributions(1, 12, 1)
    q = {"other": distributions(1, 12, 2), "near": 0.8 * p + 0.2 / 12, "point": point_mass(torch.tensor([3]), 12)}[kind]
    p, q = (t.float().expand(DRAWS, -1) for t in (p, q.double()))
    tokens, accepted = accept_or_resample(p, q, torch.multinomial(q, 1)[:, 0])
    assert p_value(tokens.bincount(minlength=12), p[0]) > SUSPICIOUS
    assert abs(accepted.float().mean() - torch.minimum(p[0], q[0]).sum()) < 0.01


def speculate(target: Tensor, draft: Tensor, greedy_draft: bool) -> Tensor:
    """Three tokens of a Markov chain, from drafts of three that are verified in turn; ``[DRAWS, 3]``."""
    state = torch.zeros(DRAWS, dtype=torch.int64)
    tokens, alive = [], torch.ones(DRAWS, dtype=torch.bool)
    for _ in range(3):
        p, q = target[state], draft[state]
        drafted = q.argmax(-1) if greedy_draft else torch.multinomial(q, 1)[:, 0]
        token, accepted = accept_or_resample(p, q, drafted)
        # After a rejection the chain goes on without a draft, as the next step's own token would.
        state = torch.where(alive, token, torch.multinomial(p, 1)[:, 0])
        alive &= accepted
        tokens.append(state)
    return torch.stack(tokens, dim=1)


def chain_p_value(greedy_draft: bool) -> float:
    torch.manual_seed(1)
    vocab = 5
    target, draft = distributions(vocab, vocab, 5).float(), distributions(vocab, vocab, 6).float()
    tokens = speculate(target, draft, greedy_draft)
    counts = (tokens * torch.tensor([vocab**2, vocab, 1])).sum(1).bincount(minlength=vocab**3)
    exact = torch.tensor(
        [target[0, a] * target[a, b] * target[b, c] for a, b, c in itertools.product(range(vocab), repeat=3)]
    )
    return p_value(counts, exact)


def test_a_chain_of_drafts_by_chi_square():
    assert chain_p_value(greedy_draft=False) > SUSPICIOUS


def test_a_draft_that_takes_argmax_but_reports_its_distribution_is_caught():
    assert chain_p_value(greedy_draft=True) < SUSPICIOUS
