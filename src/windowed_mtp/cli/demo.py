"""`windowed-mtp demo`: the idea on the bundled checkpoint, in two minutes on a laptop."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from windowed_mtp.cli import options
from windowed_mtp.cli.load import load
from windowed_mtp.cli.output import decode_table, number, output, progress
from windowed_mtp.errors import CheckpointError
from windowed_mtp.window import SinkWindow

if TYPE_CHECKING:
    from windowed_mtp.probes.decode import DecodeRow

CHARACTERS_PER_TOKEN = 6  # more than a long text has


def demo(
    prompt_tokens: Annotated[int, typer.Option(metavar="N", min=2, help="Tokens in the prompt.")] = 16384,
    new_tokens: Annotated[int, typer.Option(metavar="N", min=2, help="Tokens to generate.")] = 128,
    depth: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens drafted a step.")] = 3,
    sink: Annotated[int, typer.Option(metavar="N", help="Keys read at the start of the text.")] = 64,
    window: Annotated[int, typer.Option(metavar="N", help="Most recent keys read.")] = 448,
    repeats: Annotated[int, typer.Option(metavar="N", min=1, help="Runs of each arm; times are medians.")] = 3,
    seed: Annotated[int, typer.Option(metavar="N", help="Chooses the text of the prompt.")] = 0,
    threads: Annotated[
        int, typer.Option(metavar="N", min=1, help="CPU threads; so small a model gains little from more.")
    ] = 1,
    json: options.Json = None,
) -> int:
    """Decode one long prompt three ways, and show that only the time changes.

    The prompt is source code of this Python's standard library that the bundled checkpoint was not trained on. The
    three ways take turns: no speculation, the checkpoint's MTP head reading all draft keys (native), and the same head
    reading a window. Needs no download and no GPU.
    """
    visible = SinkWindow(sink, window)

    from windowed_mtp.reference import checkpoint_path
    from windowed_mtp.results import Provenance, check_writable
    from windowed_mtp.workloads.stdlib import heldout_text

    if json is not None:
        check_writable(json)
    if not checkpoint_path().is_dir():
        raise CheckpointError("the bundled checkpoint is missing from this installation; install the package again.")
    model, tokenizer = load(str(checkpoint_path()), "cpu", "float32")

    import torch

    torch.set_num_threads(threads)

    from windowed_mtp.engines.transformers import WindowedMTP
    from windowed_mtp.probes.decode import Comparison, DecodeResult
    from windowed_mtp.probes.target_runs import check_length

    check_length(model, prompt_tokens, new_tokens)
    text = heldout_text(CHARACTERS_PER_TOKEN * prompt_tokens, seed)
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :prompt_tokens]
    native = WindowedMTP.from_model(model, window=None, num_speculative_tokens=depth)
    windowed = WindowedMTP.from_model(
        model, window=visible, num_speculative_tokens=depth, keep="ring", prefill="pruned"
    )
    arms = {"no speculation": None, "native MTP": native, "windowed MTP": windowed}
    provenance = Provenance.collect("cpu", seed)
    comparison = Comparison(model, ids, arms, new_tokens)
    output.say(
        f"{ids.shape[1]:,} prompt tokens of source code, {new_tokens:,} new ones, drafts of {depth}; window: the "
        f"first {sink:,} and last {window:,} keys; {repeats} runs each, in turns, on "
        f"{threads} CPU thread{'s' if threads > 1 else ''}.\n"
    )
    busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if busy > (os.cpu_count() or 1) / 2:
        output.say(
            f"Other programs are using this machine (load {busy:.1f} on {os.cpu_count()} cores): take the times with "
            "care, or run again when it is idle.\n",
            style="yellow",
        )
    interrupted = False
    try:
        with progress() as bar:
            task = bar.add_task("", total=repeats * len(arms))
            for _ in range(repeats):
                for name in arms:
                    bar.update(task, description=name)
                    comparison.run(name)
                    bar.advance(task)
    except KeyboardInterrupt:
        interrupted = True
        output.print("Interrupted; the numbers are those of the runs so far.")

    result = DecodeResult(
        provenance=provenance,
        settings={
            "prompt_tokens": ids.shape[1], "new_tokens": new_tokens, "num_speculative_tokens": depth, "sink": sink,
            "window": window, "keep": "ring", "prefill": "pruned", "repeats": repeats, "dtype": "float32",
        },
        rows=comparison.rows,
        differences=comparison.differences(),
    )  # fmt: skip
    if result.rows:
        output.show(decode_table(result.rows))
        output.print()
    for difference in result.differences:
        output.say(
            f"output identical: no; {difference.arm} differs from the new token {difference.position} on, where the "
            f"target's two largest logits are {difference.margin:.2g} apart",
            style="bold red",
        )
    if not result.differences and len(result.rows) == len(arms):
        output.print("output identical: yes", style="bold green")
        output.say(_explain(result.rows, visible))
    if json is not None:
        result.save(json)
    return 130 if interrupted else 1 if result.differences else 0


def _explain(rows: Sequence[DecodeRow], window: SinkWindow) -> str:
    """Say in a few sentences what the numbers mean."""
    plain, native, windowed = rows
    if not windowed.steps or not native.steps:
        return "There was no step to measure; ask for more new tokens."
    fewer = _known(native.draft_keys_per_step) / _known(windowed.draft_keys_per_step)
    sentences = [
        "The target checks every drafted token, so all three wrote the same text.",
        f"In a step the native draft read {number(native.draft_keys_per_step, 0)} keys, the windowed one "
        f"{number(windowed.draft_keys_per_step, 0)}, which is {fewer:.0f} times fewer and does not grow with the text.",
        f"The draft's part of a step took {number(windowed.draft_ms_per_step)} ms instead of "
        f"{number(native.draft_ms_per_step)}, and the whole step {number(windowed.ms_per_step)} instead of "
        f"{number(native.ms_per_step)}.",
        f"The acceptance length went from {number(native.acceptance_length, 2)} to "
        f"{number(windowed.acceptance_length, 2)}, {_cost(native, windowed)}.",
    ]
    if not window.engages(windowed.prompt_tokens + windowed.new_tokens - 1):
        sentences[1:] = ["The text is too short for this window to leave anything out; try a longer prompt."]
    elif _known(windowed.tokens_per_second) < _known(plain.tokens_per_second):
        sentences.append(
            "Decoding without speculation was still faster: a step of so small a target costs little more than a "
            "draft pass, unlike a large one's."
        )
    return " ".join(sentences)


def _cost(native: DecodeRow, windowed: DecodeRow) -> str:
    change = _known(windowed.acceptance_length) / _known(native.acceptance_length) - 1
    if abs(change) < 0.01:
        return "so seeing less cost the draft nothing"
    if change > 0:
        return "so on this text seeing less did not hurt the draft"
    return f"so seeing less cost the draft {-change:.0%} of it"


def _known(value: float | None) -> float:
    return math.nan if value is None else value
