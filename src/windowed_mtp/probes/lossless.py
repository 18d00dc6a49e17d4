"""Is the output really the target's own? Greedy output token for token, sampled output in distribution.

Greedy. A target in low precision does not agree with itself to the last bit when it reads its tokens in chunks, as
verification does, instead of one at a time. Where the drafter's output differs from plain decoding, the target is
therefore run again in chunks of γ + 1 over the drafter's output, and the difference is a *near tie* only if every token
from there on has a logit within a stated threshold of the best. Anything else is *different*.

The threshold comes from how far the target in chunks is from the target one token at a time, and that may be no more
than rounding explains: otherwise a target whose chunks are wrong (they begin without the recurrent state, or are not
causal) would excuse every difference. What rounding explains is measured on the target that reads one token at a time,
which has no chunks to be wrong: its logits are compared with those that it gives when the input of every layer is
changed by the rounding of one layer. That takes in the dtype, the depth, the size of the logits, and experts that
change places. Where chunks differ by more, in the largest difference or in the mean one, *the target disagrees with
itself*.

Sampled. Let p be the target's distribution of a token, computed by an independent forward pass over the finished
output. Order the vocabulary by any rule that does not depend on the draw, and let u be the probability of the tokens
before the drawn one, plus a uniform share of its own: u is uniform on [0, 1], independently for every token, if and
only if tokens are drawn from p. The order here is by p/q, q being the draft's distribution: an output that leans
towards the draft piles up at small u. All u of all runs go into one chi-square test against a uniform histogram.
The same test on the draft's unverified first proposals is the control: where draft and target differ it must fail.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from windowed_mtp.engines.protocol import StepEvent
from windowed_mtp.engines.transformers import WindowedMTP
from windowed_mtp.engines.transformers.heads.base import DraftHead
from windowed_mtp.errors import GenerationError
from windowed_mtp.probes.target_runs import PLAIN, check_length, chunked_logits, first_difference, generate, top_margin
from windowed_mtp.results import Record, RunResult

BINS = 16
SIGNIFICANCE = 1e-4
"""Probability below which the sampled check calls a result different; one false alarm in ten thousand runs."""
LEAST_THRESHOLD = 1e-4
ROUNDING_RUNS = 4
ROUNDING_MARGIN = 4.0
"""How far chunks may differ, in units of the largest response to rounding in 4 runs.

2 because both ways of reading have their own errors, and 2 because a largest value of few tokens is not the largest.
"""


class GreedyVerdict(Record):
    """Greedy output of one prompt, drafted and plain.

    Attributes
    ----------
    prompt : int
        Index of the prompt, from 0.
    prompt_tokens, new_tokens : int
        Its tokens, and the tokens that the drafter generated.
    verdict : {"equal", "near tie", "different", "the target disagrees with itself"}
        Whether the outputs are equal, or differ where the target cannot tell, or differ; or whether they differ, and
        the target in chunks is further from the target one token at a time than rounding explains.
    position : int or None
        Index of the first generated token that differs (if one is no near tie, then of the first such), from 0.
    margin : float or None
        Distance between the target's two largest logits there.
    gap : float or None
        How far the drafter's token is below the largest logit there; ``None`` where one output just ends.
    threshold : float or None
        Largest gap of a near tie: the largest of 1e-4, two units in the last place of the model's dtype at the largest
        logit, and twice the largest difference, over plain decoding's output, between the logits of the target in
        chunks and one token at a time.
    noise : float or None
        That largest difference.
    explained : float or None
        The largest such difference that rounding explains.
    acceptance_length : float or None
        Tokens emitted a step.
    engaged : bool
        Whether the window left anything out on this prompt.
    """

    prompt: int
    prompt_tokens: int
    new_tokens: int
    verdict: Literal["equal", "near tie", "different", "the target disagrees with itself"]
    position: int | None = None
    margin: float | None = None
    gap: float | None = None
    threshold: float | None = None
    noise: float | None = None
    explained: float | None = None
    acceptance_length: float | None
    engaged: bool


class SampledVerdict(Record):
    """Sampled output against the target's distribution.

    Attributes
    ----------
    tokens : int
        Number of tokens drawn.
    verdict : {"consistent", "different"}
        ``"different"`` if the p-value is below 1e-4.
    chi_square, p_value : float
        Statistic on 15 degrees of freedom, and the probability of a larger one.
    control_tokens : int
        Number of unverified proposals in the control.
    control_p_value : float or None
        The p-value that the draft's proposals would have had as output; ``None`` if there were too few.
    temperature : float
        Temperature of the draws.
    engaged : bool
        Whether the window left anything out.
    """

    tokens: int
    verdict: Literal["consistent", "different"]
    chi_square: float
    p_value: float
    control_tokens: int
    control_p_value: float | None
    temperature: float
    engaged: bool


class LosslessResult(RunResult):
    """What `verify-lossless` found.

    Attributes
    ----------
    sampled : SampledVerdict or None
        Verdict on sampled output, if it was asked for.
    """

    kind: Literal["lossless"] = "lossless"
    rows: tuple[GreedyVerdict, ...]
    sampled: SampledVerdict | None = None

    @property
    def passed(self) -> bool:
        """Whether nothing is different, and the target agrees with itself."""
        sampled = self.sampled is None or self.sampled.verdict == "consistent"
        return sampled and all(row.verdict in ("equal", "near tie") for row in self.rows)


def greedy_verdict(drafter: WindowedMTP, ids: Tensor, new_tokens: int, prompt: int = 0) -> GreedyVerdict:
    """Compare one prompt's greedy output with plain decoding.

    Parameters
    ----------
    drafter : WindowedMTP
        What is verified.
    ids : Tensor
        Prompt, ``[1, n]`` int64.
    new_tokens : int
        Tokens to generate.
    prompt : int
        Index of the prompt, for the report.

    Raises
    ------
    GenerationError
        If prompt and new tokens do not fit the model's positions.
    """
    model, length = drafter.model, ids.shape[1]
    check_length(model, length, new_tokens)
    options: dict[str, Any] = {**PLAIN, "do_sample": False, "max_new_tokens": new_tokens}
    drafted = generate(model, ids, custom_generate=drafter, **options)
    stats = drafter.stats
    plain = generate(model, ids, output_logits=True, return_dict_in_generate=True, **options)
    known: dict[str, Any] = {
        "prompt": prompt,
        "prompt_tokens": length,
        "new_tokens": stats.new_tokens,
        "acceptance_length": stats.acceptance_length if stats.steps else None,
        "engaged": _engaged(drafter, drafted.shape[1]),
    }
    first = first_difference(drafted[0, length:], plain.sequences[0, length:])
    if first is None:
        return GreedyVerdict(verdict="equal", **known)

    chunk = drafter.num_speculative_tokens + 1
    if first == min(drafted.shape[1], plain.sequences.shape[1]) - length:  # one stops where the other goes on
        longer = max(drafted, plain.sequences, key=lambda ids: ids.shape[1])[:, : length + first + 1]
        margin = top_margin(chunked_logits(model, longer, length, chunk)[-1])
        return GreedyVerdict(verdict="different", position=first, margin=margin, **known)
    alone = torch.cat(plain.logits).float()
    noise = _largest(chunked_logits(model, plain.sequences, length, chunk) - alone)
    explained = ROUNDING_MARGIN * _rounding(model, plain.sequences, length, alone)
    known |= {"noise": float(noise.max()), "explained": float(explained.max())}
    if not (noise.max() <= explained.max() and noise.mean() <= explained.mean()):  # NaN is no agreement
        margin = top_margin(alone[first])
        return GreedyVerdict(verdict="the target disagrees with itself", position=first, margin=margin, **known)
    logits = chunked_logits(model, drafted, length, chunk)
    threshold = max(LEAST_THRESHOLD, 2 * _unit_in_last_place(float(logits.max()), model.dtype), 2 * known["noise"])
    gaps = (logits.max(-1).values - logits.gather(1, drafted[0, length:, None])[:, 0]).tolist()
    position = next((i for i in range(first, len(gaps)) if not gaps[i] <= threshold), None)
    return GreedyVerdict(
        verdict="near tie" if position is None else "different",
        position=first if position is None else position,
        margin=top_margin(logits[first if position is None else position]),
        gap=gaps[first if position is None else position],
        threshold=threshold,
        **known,
    )


class SampledCheck:
    """Draws tokens with a drafter and tests them against the target's distribution.

    Parameters
    ----------
    drafter : WindowedMTP
        What is verified.
    prompts : sequence of Tensor
        Prompts, each ``[1, n]`` int64, taken in turns.
    tokens : int
        Number of tokens to draw, at least 80 (5 in a bin).
    new_tokens : int
        Tokens a run.
    temperature : float
        Temperature of the draws.
    seed : int
        Seed of the test's own uniform numbers; the draws use torch's global generator.

    Raises
    ------
    GenerationError
        If a prompt and its new tokens do not fit the model's positions, or there are too few tokens to test.
    """

    def __init__(
        self,
        drafter: WindowedMTP,
        prompts: Sequence[Tensor],
        tokens: int = 2048,
        new_tokens: int = 64,
        temperature: float = 1.0,
        seed: int = 0,
    ) -> None:
        if tokens < 5 * BINS:
            raise GenerationError(f"{tokens} sampled tokens are too few to test; draw at least {5 * BINS}.")
        for ids in prompts:
            check_length(drafter.model, ids.shape[1], new_tokens)
        self.drafter = drafter
        self.prompts = prompts
        self.tokens = tokens
        self.new_tokens = new_tokens
        self.temperature = temperature
        self.engaged = False
        self._generator = torch.Generator().manual_seed(~seed)  # another stream than that of the draws
        self._output: list[Tensor] = []
        self._control: list[Tensor] = []

    def run(self) -> Iterator[int]:
        """Draw, yielding the number of tokens so far after each run."""
        drawn = 0
        for ids in itertools.cycle(self.prompts):
            self._run(ids)
            drawn = sum(map(len, self._output))
            yield drawn
            if drawn >= self.tokens:
                return

    def verdict(self) -> SampledVerdict:
        """Test what has been drawn."""
        output, control = torch.cat(self._output), torch.cat(self._control)
        statistic, p_value = uniform_test(output)
        return SampledVerdict(
            tokens=len(output),
            verdict="consistent" if p_value >= SIGNIFICANCE else "different",
            chi_square=statistic,
            p_value=p_value,
            control_tokens=len(control),
            control_p_value=uniform_test(control)[1] if len(control) >= 5 * BINS else None,
            temperature=self.temperature,
            engaged=self.engaged,
        )

    @torch.no_grad()
    def _run(self, ids: Tensor) -> None:
        drafter, length = self.drafter, ids.shape[1]
        recorded, steps = _recorded(drafter)
        options = {**PLAIN, "temperature": self.temperature, "do_sample": True, "max_new_tokens": self.new_tokens}
        ids = generate(drafter.model, ids, custom_generate=recorded, **options)
        self.engaged |= _engaged(drafter, ids.shape[1])
        new = ids[0, length:]
        logits = drafter.model(input_ids=ids[:, :-1], use_cache=False, logits_to_keep=len(new)).logits[0]
        p = (logits.float() / self.temperature).softmax(-1)
        order = p.clone()  # by p where nothing was drafted, else by p/q
        for event, draft_logits in steps:
            first = event.length - length
            rows = min(len(event.proposed), len(event.emitted))
            q = (draft_logits[:rows].float() / self.temperature).softmax(-1)
            order[first : first + rows] /= q.clamp_min(torch.finfo(q.dtype).tiny)
        self._output.append(self._uniform(p, order, new))
        firsts = [(event.length - length, event.proposed[0]) for event, _ in steps if event.proposed]
        at = torch.tensor([row for row, _ in firsts], dtype=torch.int64, device=p.device)
        proposed = torch.tensor([token for _, token in firsts], dtype=torch.int64, device=p.device)
        self._control.append(self._uniform(p[at], order[at], proposed))

    def _uniform(self, p: Tensor, order: Tensor, tokens: Tensor) -> Tensor:
        """Probability before each token in the given order, plus a uniform share of its own: ``[n]`` float64."""
        own = order.gather(1, tokens[:, None])
        before = (p * (order < own)).sum(-1, dtype=torch.float64).cpu()
        tied = (p * (order == own)).sum(-1, dtype=torch.float64).cpu()
        return before + tied * torch.rand(len(tokens), generator=self._generator, dtype=torch.float64)


def uniform_test(values: Tensor) -> tuple[float, float]:
    """Pearson's chi-square test of values in [0, 1] against the uniform distribution, in 16 bins.

    Parameters
    ----------
    values : Tensor
        ``[n]`` float64; n at least 80 for the approximation to hold.

    Returns
    -------
    tuple of float
        The statistic, and the probability of a larger one: the upper regularised incomplete gamma function
        Q(15/2, statistic/2).
    """
    counts = torch.bincount((values * BINS).long().clamp(0, BINS - 1), minlength=BINS).double()
    expected = len(values) / BINS
    statistic = ((counts - expected) ** 2 / expected).sum()
    degrees = torch.tensor((BINS - 1) / 2, dtype=torch.float64)
    return float(statistic), float(torch.special.gammaincc(degrees, statistic / 2))


class _RecordingHead:
    """A draft head that notes the logits it gives."""

    def __init__(self, head: DraftHead) -> None:
        self._head = head
        self.seen: list[Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._head, name)

    def for_request(self, prompt: Sequence[int]) -> _RecordingHead:
        self._head = self._head.for_request(prompt)
        return self

    def logits(self, layer: int, out: Tensor) -> Tensor:
        logits = self._head.logits(layer, out)
        self.seen.append(logits)
        return logits


def _recorded(drafter: WindowedMTP) -> tuple[WindowedMTP, list[tuple[StepEvent, Tensor]]]:
    """Copy a drafter; the list gets each step of the copy's next generation, with its draft logits ``[k, V]``."""
    observer = drafter.on_step
    recorder = _RecordingHead(drafter.head)
    steps: list[tuple[StepEvent, Tensor]] = []

    def note(event: StepEvent) -> None:
        if event.proposed:
            steps.append((event, torch.cat(recorder.seen[: len(event.proposed)])))
        recorder.seen.clear()
        if observer is not None:
            observer(event)

    recorded = copy.copy(drafter)
    recorded.head, recorded.on_step = recorder, note  # type: ignore[assignment]
    return recorded, steps


def _engaged(drafter: WindowedMTP, tokens: int) -> bool:
    """Whether the window left an entry out in a sequence that ended with ``tokens`` tokens."""
    return drafter.window is not None and drafter.window.engages(tokens - 1)


def _rounding(model: Any, ids: Tensor, prompt_tokens: int, alone: Tensor) -> Tensor:
    """How far one layer's rounding, in every layer, moves ``alone``, the logits of one token at a time: ``[n]``.

    For each token the most of a few runs, and no less than what no threshold is below.
    """
    generator = torch.Generator().manual_seed(0)
    runs = (chunked_logits(model, ids, prompt_tokens, chunk=1, noise=generator) for _ in range(ROUNDING_RUNS))
    moved = torch.stack([_largest(run - alone) for run in runs]).amax(0)
    return moved.clamp_min(LEAST_THRESHOLD / ROUNDING_MARGIN)


def _largest(difference: Tensor) -> Tensor:
    """By token, the largest difference ``[n]`` of its logits ``[n, V]``."""
    return difference.abs().amax(1)


def _unit_in_last_place(value: float, dtype: torch.dtype) -> float:
    magnitude = torch.tensor(abs(value), dtype=torch.float64)
    return float(torch.finfo(dtype).eps * 2.0 ** torch.floor(torch.log2(magnitude.clamp_min(1e-30))))
