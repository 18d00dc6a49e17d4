"""What a hot vocabulary of some size costs: proposals that it cannot make, and the acceptance lost with them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from windowed_mtp.engines.protocol import StepEvent
from windowed_mtp.engines.transformers import WindowedMTP
from windowed_mtp.errors import GenerationError
from windowed_mtp.probes.target_runs import PLAIN, check_length, generate
from windowed_mtp.results import Record, RunResult
from windowed_mtp.vocab import HotSet, HotVocabulary, OnlineCounts, left_out

INTERVAL = 32
"""Emitted tokens between two refreshes of the online counts: the runs of this probe are short."""
LONGEST_TAIL = 256
"""Most tokens of a prompt's end that are hot; in a small hot set at most half of it."""

RANKINGS: dict[str, Callable[[HotVocabulary, int], HotSet]] = {
    "file": HotSet,
    "file and prompt": lambda file, size: HotSet(
        file, size, prompt_tail=min(LONGEST_TAIL, (size - len(file.always)) // 2)
    ),
    "online": lambda file, size: HotSet(OnlineCounts(file, interval=INTERVAL), size),
}
"""What decides which tokens are hot, from a file and a size."""


class HotVocabularyRow(Record):
    """One kind of text with one hot set.

    Attributes
    ----------
    text : str
        Name of the text that the prompts are from.
    ranking : str
        What decides which tokens are hot; ``"all tokens"`` for a draft without a hot vocabulary.
    size : int
        Number of hot tokens.
    coverage : float
        Share of the tokens that the whole head proposes, over its own run, that are hot when it proposes them.
    acceptance_length : float
        Tokens emitted a step.
    relative_acceptance_length : float
        The same, divided by that of the whole head.
    steps, new_tokens : int
        Steps, and tokens generated, over all prompts.
    differing : int
        Prompts whose output is not the whole head's: of greedy output only near ties are, of sampled output most.
    """

    text: str
    ranking: str
    size: int
    coverage: float
    acceptance_length: float
    relative_acceptance_length: float
    steps: int
    new_tokens: int
    differing: int


class HotVocabularyResult(RunResult):
    """What `measure` found."""

    kind: Literal["hot vocabulary coverage"] = "hot vocabulary coverage"
    rows: tuple[HotVocabularyRow, ...]


@dataclass
class _Runs:
    """A drafter's runs over the prompts of a text."""

    steps: list[list[StepEvent]] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)

    @property
    def acceptance_length(self) -> float:
        steps = [step for run in self.steps for step in run]
        return sum(len(step.emitted) for step in steps) / len(steps)


def prompts_of(text: str, tokenizer: Any, count: int, tokens: int) -> list[Tensor]:
    """Cut prompts from a text, evenly spaced.

    Parameters
    ----------
    text : str
        The text.
    tokenizer : PreTrainedTokenizerBase
        The model's tokenizer.
    count, tokens : int
        Number of prompts, and tokens in each.

    Returns
    -------
    list of Tensor
        Pieces that do not overlap, each ``[1, tokens]`` int64.

    Raises
    ------
    GenerationError
        If the text is too short.
    """
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False, verbose=False).input_ids.long()
    if ids.shape[1] < count * tokens:
        raise GenerationError(
            f"a text has {ids.shape[1]} tokens, but {count} prompts of {tokens} need {count * tokens}; "
            "pass a longer text, or ask for fewer or shorter prompts."
        )
    stride = ids.shape[1] // count
    return [ids[:, start : start + tokens] for start in range(0, count * stride, stride)]


def measure(
    drafter: WindowedMTP,
    file: HotVocabulary,
    texts: Mapping[str, Sequence[Tensor]],
    sizes: Sequence[int],
    *,
    new_tokens: int = 128,
    temperature: float | None = None,
    seed: int = 0,
) -> Iterator[HotVocabularyRow]:
    """Decode prompts with hot sets of several sizes and rankings, and without one.

    Parameters
    ----------
    drafter : WindowedMTP
        A drafter without a hot vocabulary; its options are taken over.
    file : HotVocabulary
        The ranking.
    texts : mapping of str to sequence of Tensor
        Prompts by the name of their text, each ``[1, n]`` int64.
    sizes : sequence of int
        Sizes of the hot sets.
    new_tokens : int
        Tokens to generate from a prompt, at least 2; the end of a text does not end them.
    temperature : float, optional
        Temperature of sampled output; greedy without it.
    seed : int
        Seed of the draws, the same for each hot set.

    Yields
    ------
    HotVocabularyRow
        For each text first the row of the whole head, then those of the rankings by size.

    Raises
    ------
    GenerationError
        If a prompt and its new tokens do not fit the model's positions.
    VocabularyError
        If a size does not fit the model or the special tokens.
    """
    vocab_size = drafter.model.get_output_embeddings().weight.shape[0]
    for prompts in texts.values():
        for ids in prompts:
            check_length(drafter.model, ids.shape[1], new_tokens)
    text = left_out(file, vocab_size)
    if text is not None:
        warnings.warn(text, stacklevel=2)
    hot_sets = [(name, partial(make, file, size)) for name, make in RANKINGS.items() for size in sizes]
    for _, make in hot_sets:
        make().ids(vocab_size)
    sampling = {"do_sample": False} if temperature is None else {**PLAIN, "do_sample": True, "temperature": temperature}
    options = {"max_new_tokens": new_tokens, "eos_token_id": None, **sampling}
    for text, prompts in texts.items():
        torch.manual_seed(seed)
        whole = _run(drafter, None, prompts, options)
        yield _row(text, "all tokens", vocab_size, 1.0, whole, whole)
        for name, make in hot_sets:
            torch.manual_seed(seed)
            hot = make()
            runs = _run(drafter, hot, prompts, options)
            yield _row(text, name, hot.size, _coverage(whole, make(), prompts, vocab_size), runs, whole)


def _run(drafter: WindowedMTP, hot: HotSet | None, prompts: Sequence[Tensor], options: dict[str, Any]) -> _Runs:
    runs = _Runs()
    with warnings.catch_warnings():
        if hot is not None:
            warnings.simplefilter("ignore")  # all has been said by then
        made = WindowedMTP(
            drafter.model,
            drafter.head,
            window=drafter.window,
            num_speculative_tokens=drafter.num_speculative_tokens,
            keep=drafter.keep,
            prefill=drafter.prefill,
            hot_vocabulary=hot,
            on_step=lambda event: runs.steps[-1].append(event),
        )
    for ids in prompts:
        runs.steps.append([])
        output = generate(drafter.model, ids.to(drafter.model.device), custom_generate=made, **options)
        runs.outputs.append(output[0, ids.shape[1] :].tolist())
    return runs


def _row(text: str, name: str, size: int, coverage: float, runs: _Runs, whole: _Runs) -> HotVocabularyRow:
    return HotVocabularyRow(
        text=text,
        ranking=name,
        size=size,
        coverage=coverage,
        acceptance_length=runs.acceptance_length,
        relative_acceptance_length=runs.acceptance_length / whole.acceptance_length,
        steps=sum(map(len, runs.steps)),
        new_tokens=sum(map(len, runs.outputs)),
        differing=sum(a != b for a, b in zip(runs.outputs, whole.outputs, strict=True)),
    )


def _coverage(whole: _Runs, hot: HotSet, prompts: Sequence[Tensor], vocab_size: int) -> float:
    """Share of proposals that a hot set includes, when it follows the same output."""
    covered = total = 0
    for prompt, steps, output in zip(prompts, whole.steps, whole.outputs, strict=True):
        hot.ranking.update(output[:1])  # it comes from the prompt, not from a step
        version, ids = None, set[int]()
        for step in steps:
            if hot.ranking.version != version:
                version, ids = hot.ranking.version, set(hot.ids(vocab_size, prompt[0].tolist()))
            covered += sum(token in ids for token in step.proposed)
            total += len(step.proposed)
            hot.ranking.update(step.emitted)
    return covered / total
