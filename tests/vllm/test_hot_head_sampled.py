"""At temperature 1 the output has the target's own distribution with hot rows that are wrong on purpose."""

import pytest

pytest.importorskip("vllm.version", reason="vllm is not installed; run make test-vllm")

import test_sampled
import torch
from engines import GAMMA
from hot_sets import hot_file, proposals, tokens_of
from test_sampled import FLAT, OPTIONS, REJECTED_AT, VOCAB, p_value, sample
from vllm.v1.sample import rejection_sampler

from windowed_mtp.engines.vllm.hot_head import refresh_hot_head

SIZE = 5
distribution, temperatures = test_sampled.distribution, test_sampled.temperatures


@pytest.mark.parametrize("drafts", ["greedy", "probabilistic"])
def test_samples_have_the_targets_distribution_whatever_is_hot(drafts, distribution, tmp_path, monkeypatch):
    def p_values():
        with proposals(llm) as seen:
            samples, accepted = sample(llm)
        hot = set(llm.collective_rpc(hot_ids)[0])
        assert tokens_of(seen) <= hot and 0.02 < accepted < 0.9 * GAMMA
        return [p_value(samples[:, :2], distribution.sum(2)), p_value(samples[:, 1:], distribution.sum(0))]

    shuffled = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1)).tolist()
    sets = {"special only": [], "random": shuffled, "stale": shuffled[::-1]}
    files = {name: hot_file(tmp_path, ranked, special=(0, 1), vocab=VOCAB) for name, ranked in sets.items()}
    window = {"sink": 4, "window": 64, "hot_vocabulary": {"size": SIZE, "file": files["random"]}}
    with FLAT.running(window, settings={"draft_sample_method": drafts}, **OPTIONS) as llm:
        honest = {}
        for name, file in files.items():
            llm.collective_rpc(refresh_hot_head, args=(file,))
            honest[name] = p_values()
        verify = rejection_sampler.rejection_sample

        def as_if_drafts_were_uniform(*args, **kwargs):
            return verify(*args[:4], torch.full_like(args[5], 1 / VOCAB), *args[5:], **kwargs)

        monkeypatch.setattr(rejection_sampler, "rejection_sample", as_if_drafts_were_uniform)
        biased = p_values()
    print(drafts, "p:", honest, "of a biased sampler:", biased)
    assert min(min(each) for each in honest.values()) > REJECTED_AT > max(biased)


def hot_ids(worker):
    [logits] = worker.model_runner.windowed_mtp_hot_logits
    [rows] = set(logits.rows.values())
    return rows.ids.tolist()
