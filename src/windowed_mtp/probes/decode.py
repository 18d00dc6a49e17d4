"""One prompt decoded in several ways: how long a step takes, and how many tokens it gives."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import StoppingCriteria, StoppingCriteriaList

from windowed_mtp.engines.stats import DecodeStats
from windowed_mtp.engines.transformers import WindowedMTP
from windowed_mtp.probes.target_runs import chunked_logits, first_difference, generate, top_margin
from windowed_mtp.results import Record, RunResult


class DecodeRow(Record):
    """One way of decoding; times are medians over the repeats.

    Attributes
    ----------
    arm : str
        Name of the way.
    repeats : int
        Number of runs.
    prompt_tokens, new_tokens, steps : int
        Tokens in the prompt, tokens generated, and target forward passes after the prompt.
    ms_per_step : float or None
        Wall time of a step; ``None`` where there was no step.
    acceptance_length : float or None
        Tokens emitted a step.
    tokens_per_second : float or None
        Acceptance length over the time of a step: decoding only, without the prompt.
    unconditional_acceptance, conditional_acceptance : tuple of float
        By draft position: share of all drafts whose token was accepted, and share given that all before it in the draft
        were. Files from before the first was added have it empty.
    draft_ms_per_step, verify_ms_per_step : float or None
        The two parts of a step; ``None`` without a draft.
    draft_keys_per_step : float or None
        Keys that draft attention read in a step, summed over its passes and layers.
    draft_kv_bytes : int
        Bytes of draft KV at the end.
    target_prefill_ms, draft_prefill_ms : float
        Time that the prompt took.
    """

    arm: str
    repeats: int
    prompt_tokens: int
    new_tokens: int
    steps: int
    ms_per_step: float | None
    acceptance_length: float | None
    tokens_per_second: float | None
    unconditional_acceptance: tuple[float, ...] = ()
    conditional_acceptance: tuple[float, ...]
    draft_ms_per_step: float | None
    verify_ms_per_step: float | None
    draft_keys_per_step: float | None
    draft_kv_bytes: int
    target_prefill_ms: float
    draft_prefill_ms: float


class Difference(Record):
    """Where an arm's output leaves the first arm's.

    Attributes
    ----------
    arm : str
        The arm.
    position : int
        Index among the generated tokens, from 0.
    margin : float
        Distance between the target's two largest logits there.
    """

    arm: str
    position: int
    margin: float


class DecodeResult(RunResult):
    """What `decode_once` or `compare_decoding` measured.

    Attributes
    ----------
    differences : tuple of Difference
        Arms whose greedy output is not the first arm's, which with several arms should be none.
    """

    kind: Literal["decode"] = "decode"
    rows: tuple[DecodeRow, ...]
    differences: tuple[Difference, ...] = ()


class _Clock(StoppingCriteria):
    """Never stops; notes when each token was there."""

    def __init__(self) -> None:
        self.times = [time.perf_counter()]

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        if input_ids.is_cuda:
            torch.cuda.synchronize(input_ids.device)
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def stats(self, prompt_tokens: int) -> DecodeStats:
        """Count and time a generation without a draft, in which a step is one token."""
        tokens = len(self.times) - 1
        steps = max(0, tokens - 1)
        return DecodeStats(
            prompt_tokens=prompt_tokens,
            new_tokens=tokens,
            steps=steps,
            step_tokens=steps,
            target_prefill_seconds=self.times[1] - self.times[0] if tokens else 0.0,
            verify_seconds=self.times[-1] - self.times[1] if tokens else 0.0,
        )


class Decoding:
    """One generation, whose counts can be read even if it is interrupted.

    Parameters
    ----------
    model : PreTrainedModel
        The target.
    drafter : WindowedMTP or None
        The draft; ``None`` decodes plainly.
    """

    def __init__(self, model: PreTrainedModel, drafter: WindowedMTP | None) -> None:
        self.model = model
        self.drafter = drafter
        self._clock = _Clock()
        self._prompt_tokens = 0

    def run(self, ids: Tensor, **options: Any) -> Tensor:
        """Generate.

        Parameters
        ----------
        ids : Tensor
            Prompt, ``[1, n]`` int64.
        **options
            Further arguments of ``model.generate``.

        Returns
        -------
        Tensor
            Generated tokens, ``[m]`` int64.
        """
        self._prompt_tokens = ids.shape[1]
        self._clock = _Clock()
        extra: dict[str, Any] = (
            {"custom_generate": self.drafter}
            if self.drafter is not None
            else {"stopping_criteria": StoppingCriteriaList([self._clock])}
        )
        return generate(self.model, ids, **extra, **options)[0, ids.shape[1] :]

    @property
    def stats(self) -> DecodeStats:
        """Counts and times so far."""
        return self._clock.stats(self._prompt_tokens) if self.drafter is None else self.drafter.stats


def summarise(arm: str, runs: Sequence[DecodeStats], drafted: bool) -> DecodeRow:
    """Make the row of an arm from its runs, which have equal counts and different times."""
    last = runs[-1]

    def per_step(seconds: Callable[[DecodeStats], float]) -> float | None:
        return 1e3 * median(seconds(run) for run in runs) / last.steps if last.steps else None

    ms_per_step = per_step(lambda run: run.draft_seconds + run.verify_seconds)
    return DecodeRow(
        arm=arm,
        repeats=len(runs),
        prompt_tokens=last.prompt_tokens,
        new_tokens=last.new_tokens or last.step_tokens + 1,
        steps=last.steps,
        ms_per_step=ms_per_step,
        acceptance_length=last.acceptance_length if last.steps else None,
        tokens_per_second=1e3 * last.acceptance_length / ms_per_step if ms_per_step else None,
        unconditional_acceptance=tuple(last.unconditional_acceptance),
        conditional_acceptance=tuple(last.conditional_acceptance),
        draft_ms_per_step=per_step(lambda run: run.draft_seconds) if drafted else None,
        verify_ms_per_step=per_step(lambda run: run.verify_seconds) if drafted else None,
        draft_keys_per_step=last.keys_per_step if drafted and last.steps else None,
        draft_kv_bytes=last.draft_kv_bytes,
        target_prefill_ms=1e3 * median(run.target_prefill_seconds for run in runs),
        draft_prefill_ms=1e3 * median(run.draft_prefill_seconds for run in runs),
    )


class Comparison:
    """Several ways of decoding one prompt greedily, in turns.

    Parameters
    ----------
    model : PreTrainedModel
        The target.
    ids : Tensor
        Prompt, ``[1, n]`` int64.
    arms : mapping of str to WindowedMTP or None
        The ways by name, ``None`` without a draft; the first one's output is what the others must give.
    new_tokens : int
        Tokens to generate.
    """

    def __init__(
        self, model: PreTrainedModel, ids: Tensor, arms: Mapping[str, WindowedMTP | None], new_tokens: int
    ) -> None:
        self.model = model
        self.ids = ids
        self.arms = dict(arms)
        self.new_tokens = new_tokens
        self.runs: dict[str, list[DecodeStats]] = {name: [] for name in arms}
        self.outputs: dict[str, list[Tensor]] = {name: [] for name in arms}

    def run(self, name: str) -> None:
        """Decode once more in one of the ways."""
        decoding = Decoding(self.model, self.arms[name])
        output = decoding.run(self.ids, do_sample=False, max_new_tokens=self.new_tokens)
        self.outputs[name].append(output)
        self.runs[name].append(decoding.stats)

    @property
    def rows(self) -> tuple[DecodeRow, ...]:
        """A row for each way that has run."""
        return tuple(summarise(name, runs, self.arms[name] is not None) for name, runs in self.runs.items() if runs)

    def differences(self) -> tuple[Difference, ...]:
        """Find the ways whose output is not the first one's, and how close the target's choice was there."""
        found = []
        reference = next(iter(self.outputs.values()))[:1]
        for name, outputs in self.outputs.items():
            pairs = ((first, output) for first in reference for output in outputs)
            difference = next(filter(None, (self._difference(name, *pair) for pair in pairs)), None)
            if difference is not None:
                found.append(difference)
        return tuple(found)

    def _difference(self, name: str, reference: Tensor, output: Tensor) -> Difference | None:
        position = first_difference(reference, output)
        if position is None:
            return None
        drafter = self.arms[name]
        longer = max(reference, output, key=len)
        ids = torch.cat([self.ids[0], longer[: position + 1]])[None]
        chunk = 1 if drafter is None else drafter.num_speculative_tokens + 1
        logits = chunked_logits(self.model, ids, self.ids.shape[1], chunk)
        return Difference(arm=name, position=position, margin=top_margin(logits[-1]))
