"""`windowed-mtp verify-lossless`: whether a checkpoint's drafted output is really its own."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from windowed_mtp.cli import hot_options, options
from windowed_mtp.cli.load import encode, load, read_prompts
from windowed_mtp.cli.output import number, output, progress
from windowed_mtp.errors import WindowedMTPError

if TYPE_CHECKING:
    from windowed_mtp.probes.lossless import GreedyVerdict, SampledVerdict


def verify_lossless(
    model: options.Model,
    prompts: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            show_default=False,
            rich_help_panel="Prompts",
            help='One prompt a line, or for a name ending in .jsonl one {"prompt": "..."} a line.',
        ),
    ],
    max_new_tokens: Annotated[
        int, typer.Option(metavar="N", min=2, rich_help_panel="Prompts", help="Tokens to generate from a prompt.")
    ] = 64,
    sampled_tokens: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            rich_help_panel="Sampling",
            help="Tokens to draw for the test of sampled output; 0 leaves the test out.",
        ),
    ] = 2048,
    temperature: Annotated[
        float, typer.Option(metavar="T", rich_help_panel="Sampling", help="Temperature of the draws, above 0.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(metavar="N", rich_help_panel="Sampling", help="Seed of the draws.")] = 0,
    sink: options.Sink = None,
    window: options.Window = None,
    min_context: options.MinContext = None,
    depth: options.Depth = None,
    native: options.Native = False,
    keep: options.KeepOption = None,
    prefill: options.PrefillOption = None,
    eagle3: options.Eagle3 = None,
    hot_vocabulary: hot_options.HotVocabularyFile = None,
    hot_size: hot_options.HotSize = None,
    hot_prompt_tail: hot_options.HotPromptTail = None,
    hot_online: hot_options.HotOnline = False,
    device: options.Device = None,
    dtype: options.DtypeOption = options.Dtype.auto,
    json: options.Json = None,
) -> int:
    """Check that drafting changes nothing in what a checkpoint generates.

    Greedy: each prompt is decoded with the draft and plainly, and the outputs must be equal. In low precision a target
    does not agree with itself when it reads its tokens in chunks, as verification does; a difference that this explains
    is called a near tie, with its margin. Sampled: tokens drawn with the draft are tested against the target's own
    distribution. Exit code 1 if anything is different.
    """
    hot = hot_options.HotOptions(hot_vocabulary, hot_online, hot_size, hot_prompt_tail)
    draft = options.DraftOptions(sink, window, min_context, depth, native, keep, prefill, eagle3, hot)
    if temperature <= 0:
        raise WindowedMTPError(
            f"--temperature is {temperature:g}, but it must be above 0; pass --sampled-tokens 0 for greedy only."
        )
    texts = read_prompts(prompts)

    from windowed_mtp.results import Provenance, check_writable

    if json is not None:
        check_writable(json)
    draft.check(model)
    target, tokenizer = load(model, device, dtype)

    import torch

    from windowed_mtp.probes.lossless import LosslessResult, SampledCheck, greedy_verdict
    from windowed_mtp.probes.target_runs import check_length

    ids = [encode(tokenizer, text, target) for text in texts]
    for prompt in ids:
        check_length(target, prompt.shape[1], max_new_tokens)
    drafter = draft.build(target, tokenizer)
    check = SampledCheck(drafter, ids, sampled_tokens, max_new_tokens, temperature, seed) if sampled_tokens else None
    provenance = Provenance.collect(str(target.device), seed)
    torch.manual_seed(seed)
    rows: list[GreedyVerdict] = []
    sampled: SampledVerdict | None = None
    interrupted = False
    try:
        with progress() as bar:
            task = bar.add_task("greedy", total=len(ids))
            for index, prompt in enumerate(ids):
                rows.append(greedy_verdict(drafter, prompt, max_new_tokens, index))
                bar.advance(task)
            if check is not None:
                task = bar.add_task("sampled", total=sampled_tokens)
                for drawn in check.run():
                    bar.update(task, completed=min(drawn, sampled_tokens))
                sampled = check.verdict()
    except KeyboardInterrupt:
        interrupted = True
        output.print("Interrupted; the verdicts are those reached so far.")

    result = LosslessResult(
        provenance=provenance,
        settings={
            **draft.settings(drafter.hot_head), "model": model, "dtype": str(target.dtype).removeprefix("torch."),
            "max_new_tokens": max_new_tokens, "sampled_tokens": sampled_tokens, "temperature": temperature,
        },
        rows=tuple(rows),
        sampled=sampled,
    )  # fmt: skip
    longest = max(prompt.shape[1] for prompt in ids) + max_new_tokens - 1
    output.say(draft.describe(longest, drafter.hot_head))
    output.show(_greedy_table(rows))
    if any(row.threshold is not None for row in rows):
        output.say(
            "A near tie: every token from the first difference on is within the threshold of the target's best. The "
            "threshold is the largest of 1e-4, two units in the last place of the dtype, and twice what the target in "
            "chunks differs from the target one token at a time."
        )
    if sampled is not None:
        output.say(_describe(sampled))
    if json is not None:
        result.save(json)
    if interrupted:
        return 130
    output.print(
        "lossless: yes" if result.passed else "lossless: no", style="bold green" if result.passed else "bold red"
    )
    return 0 if result.passed else 1


def _greedy_table(rows: Iterable[GreedyVerdict]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("prompt", "tokens", "new", "AL"):
        table.add_column(name, justify="right")
    table.add_column("greedy")
    for row in rows:
        failed = row.verdict not in ("equal", "near tie")
        verdict: str = f"[bold red]{row.verdict.upper()}[/]" if failed else row.verdict
        if row.position is not None:
            verdict += f" at new token {row.position}, margin {row.margin:.2g}"
        if row.gap is not None:
            verdict += f", {row.gap:.2g} below the best (threshold {row.threshold:.2g})"
        elif row.noise is not None:
            verdict += f", its chunks differ by {row.noise:.2g} (rounding explains {row.explained:.2g})"
        counts = f"{row.prompt + 1:,}", f"{row.prompt_tokens:,}", f"{row.new_tokens:,}"
        table.add_row(*counts, number(row.acceptance_length, 2), verdict)
    return table


def _describe(sampled: SampledVerdict) -> str:
    text = (
        f"sampled: {sampled.tokens:,} tokens at temperature {sampled.temperature:g}, chi-square "
        f"{sampled.chi_square:.1f}, p-value {_p_value(sampled.p_value)}: "
    )
    text += (
        "consistent with the target" if sampled.verdict == "consistent" else "[bold red]DIFFERENT[/] from the target"
    )
    if sampled.control_p_value is not None:
        text += f" (the draft's own proposals, taken unverified, would have had {_p_value(sampled.control_p_value)})"
    return text


def _p_value(value: float) -> str:
    return f"{value:.2g}" if value >= 1e-99 else "below 1e-99"
