"""Sampled output of the whole engine has the target's distribution."""

import itertools
from typing import Any

import pytest
import tiny
import torch
from checks import Case, drafter, generate, prompt
from scipy.stats import chisquare

FAMILY = "qwen3_5"
ALLOWED = (3, 14, 15, 65)
RUNS = 2000
OPTIONS = {
    "do_sample": True,
    "temperature": 3.0,
    "suppress_tokens": [token for token in range(tiny.VOCAB) if token not in ALLOWED],
    "max_new_tokens": 3,
}


def exact() -> dict[tuple[int, ...], float]:
    """Probability of each outcome, from the target alone."""
    outcomes = list(itertools.product(ALLOWED, repeat=3))
    ids = torch.cat([prompt(12).repeat(len(outcomes), 1), torch.tensor(outcomes)], dim=1)
    with torch.no_grad():
        logits = tiny.model(FAMILY)(ids).logits[:, 11:14, list(ALLOWED)]
    probabilities = (logits.float() / OPTIONS["temperature"]).softmax(-1)
    index = torch.tensor([[ALLOWED.index(token) for token in outcome] for outcome in outcomes])
    joint = probabilities.gather(2, index[..., None])[..., 0].prod(1)
    return dict(zip(outcomes, joint.tolist(), strict=True))


def sampled_p_value(**options: Any) -> tuple[float, float]:
    """P-value of the engine's outcomes, and the share of drafted tokens that was accepted."""
    torch.manual_seed(0)
    made = drafter(Case(FAMILY, window=(2, 6), depth=3, arrangement="ring"), **options)
    expected = exact()
    counts = dict.fromkeys(expected, 0)
    proposed = accepted = 0
    for _ in range(RUNS):
        output = generate(FAMILY, prompt(12), custom_generate=made, **OPTIONS)
        counts[tuple(output[0, 12:].tolist())] += 1
        proposed += sum(made.stats.proposed)
        accepted += sum(made.stats.accepted)
    # Outcomes too rare for the test are counted together.
    frequent = [o for o, chance in expected.items() if chance * RUNS >= 5]
    observed = [counts[o] for o in frequent]
    wanted = [expected[o] * RUNS for o in frequent]
    if len(frequent) < len(expected):
        observed.append(RUNS - sum(observed))
        wanted.append(RUNS - sum(wanted))
    return chisquare(observed, [w * sum(observed) / sum(wanted) for w in wanted]).pvalue, accepted / proposed


def test_the_target_distribution_is_kept(record_property):
    p_value, acceptance = sampled_p_value()
    record_property("acceptance", round(acceptance, 3))
    print(f"acceptance of drafted tokens: {acceptance:.2f}")
    assert 0.2 < acceptance < 0.95
    assert p_value > 1e-4


def test_a_draft_that_reports_another_distribution_is_caught(monkeypatch: pytest.MonkeyPatch):
    draw = torch.multinomial

    def argmax_for_the_draft(probabilities: torch.Tensor, *args: object) -> torch.Tensor:
        # The draft draws [1, V] tokens from inside propose; verification and the first token draw elsewhere.
        if drafting:
            return probabilities.argmax(-1, keepdim=True)
        return draw(probabilities, *args)

    from windowed_mtp.engines.transformers.draft import DraftState

    drafting: list[bool] = []
    propose = DraftState.propose

    def tracked(self: DraftState, *args: object) -> torch.Tensor:
        drafting.append(True)
        try:
            return propose(self, *args)
        finally:
            drafting.pop()

    monkeypatch.setattr(DraftState, "propose", tracked)
    monkeypatch.setattr(torch, "multinomial", argmax_for_the_draft)
    assert sampled_p_value()[0] < 1e-6
