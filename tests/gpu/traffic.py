"""Requests that join a running engine, leave it and are aborted, and what became of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from engines import generate
from verdicts import Fork, Gap, Verdict, judge
from vllm import LLM, SamplingParams, TokensPrompt


@dataclass(frozen=True)
class Request:
    """A prompt and how many tokens to make of it; after ``abort_at`` of them it is aborted."""

    prompt: list[int]
    tokens: int
    abort_at: int | None = None


@dataclass
class Served:
    """What became of a request."""

    tokens: list[int] = field(default_factory=list)
    aborted: bool = False
    cached: int = 0


def serve(
    llm: LLM,
    requests: list[Request],
    joining: Callable[[int, int], int],
    each_step: Callable[[int], None] = lambda step: None,
) -> list[Served]:
    """Run requests in their order.

    Parameters
    ----------
    llm : LLM
        The engine.
    requests : list of Request
        What to run.
    joining : callable
        Given a step and the number of requests that are not through, says how many more to add before that step.
    each_step : callable, optional
        Called with each step's number before it.

    Returns
    -------
    list of Served
        In the order of the requests.
    """
    core = llm.llm_engine
    made = [Served() for _ in requests]
    names: dict[str, int] = {}
    live: set[int] = set()
    step = added = 0
    while added < len(requests) or core.has_unfinished_requests():
        each_step(step)
        for index in range(added, min(len(requests), added + joining(step, len(live)))):
            request = requests[index]
            sampling = SamplingParams(temperature=0, max_tokens=request.tokens, ignore_eos=True, detokenize=False)
            names[core.add_request(f"request-{index}", TokensPrompt(prompt_token_ids=request.prompt), sampling)] = index
            names[f"request-{index}"] = index
            live.add(index)
            added = index + 1
        for output in core.step():
            index = names[output.request_id]
            if index in live:
                _take(core, requests[index], made[index], output)
                if output.finished or made[index].aborted:
                    live.discard(index)
        step += 1
    return made


def _take(core: Any, request: Request, served: Served, output: Any) -> None:
    served.tokens = list(output.outputs[0].token_ids)
    served.cached = output.num_cached_tokens or 0
    if request.abort_at is not None and len(served.tokens) >= request.abort_at and not output.finished:
        served.aborted = True
        core.abort_request([output.request_id])


def verdict_of(alone: LLM, vocab: int, requests: list[Request], served: list[Served]) -> Verdict:
    """Compare with what the target alone makes of the same prompts, in an engine that gives raw logits."""
    sampling = [
        SamplingParams(temperature=0, max_tokens=each.tokens, ignore_eos=True, detokenize=False) for each in requests
    ]
    prompts = [TokensPrompt(prompt_token_ids=each.prompt) for each in requests]
    outputs = alone.generate(prompts, sampling, use_tqdm=False)
    targets = [list(output.outputs[0].token_ids) for output in outputs]

    def gaps_at(forks: list[Fork]) -> list[Gap]:
        common = [requests[fork.index].prompt + targets[fork.index][: fork.position] for fork in forks]
        tops = [answer.logprobs[0] for answer in generate(alone, common, 1, logprobs=vocab)]
        return [Gap(max(top.values()), top[fork.token]) for fork, top in zip(forks, tops, strict=True)]

    return judge(targets, [each.tokens for each in served], [each.aborted for each in served], gaps_at)


@contextmanager
def squeezed(llm: LLM) -> Iterator[Callable[[bool], None]]:
    """Give a switch that takes every free block of the cache away, so that rows which grow are preempted."""
    pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    held: list[Any] = []

    def switch(on: bool) -> None:
        if on and not held:
            held.extend(pool.get_new_blocks(pool.get_num_free_blocks()))
        elif not on:
            pool.free_blocks(held)
            held.clear()

    try:
        yield switch
    finally:
        switch(False)
