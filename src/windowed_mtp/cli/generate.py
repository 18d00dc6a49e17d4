"""`windowed-mtp generate`: text from any checkpoint, and what the draft did for it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from windowed_mtp.cli import hot_options, options
from windowed_mtp.cli.load import encode, load, read_prompt
from windowed_mtp.cli.output import decode_table, errors
from windowed_mtp.errors import WindowedMTPError


def generate(
    model: options.Model,
    prompt: Annotated[
        str | None,
        typer.Option(metavar="TEXT", show_default=False, rich_help_panel="Prompt", help="The prompt itself."),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            show_default=False,
            rich_help_panel="Prompt",
            help="File with the prompt; without --prompt and --file it is read from standard input.",
        ),
    ] = None,
    sink: options.Sink = None,
    window: options.Window = None,
    min_context: options.MinContext = None,
    depth: options.Depth = None,
    native: options.Native = False,
    no_draft: Annotated[
        bool, typer.Option("--no-draft", rich_help_panel="Draft", help="Decode without speculation.")
    ] = False,
    keep: options.KeepOption = None,
    prefill: options.PrefillOption = None,
    eagle3: options.Eagle3 = None,
    hot_vocabulary: hot_options.HotVocabularyFile = None,
    hot_size: hot_options.HotSize = None,
    hot_prompt_tail: hot_options.HotPromptTail = None,
    hot_online: hot_options.HotOnline = False,
    max_new_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, rich_help_panel="Output", help="Most tokens to generate.")
    ] = 256,
    sample: Annotated[
        bool, typer.Option("--sample", rich_help_panel="Sampling", help="Draw tokens; greedy without it.")
    ] = False,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    seed: Annotated[
        int | None,
        typer.Option(
            metavar="N", show_default=False, rich_help_panel="Sampling", help="Seed of the draws (default 0)."
        ),
    ] = None,
    device: options.Device = None,
    dtype: options.DtypeOption = options.Dtype.auto,
    json: options.Json = None,
) -> int:
    """Generate text with a windowed draft, and say what it did.

    The text goes to standard output as it is made, everything else to standard error. The draft head is the
    checkpoint's own (MTP) unless --eagle3 names another.
    """
    hot = hot_options.HotOptions(hot_vocabulary, hot_online, hot_size, hot_prompt_tail)
    draft = options.DraftOptions(sink, window, min_context, depth, native, keep, prefill, eagle3, hot)
    sampling = options.SamplingOptions(sample, temperature, top_p, top_k, seed)
    if no_draft and draft.given():
        raise WindowedMTPError(f"--no-draft and {draft.given()[0]} contradict each other; leave one of them out.")
    text = read_prompt(prompt, file)

    from windowed_mtp.results import Provenance, Setting, check_writable

    if json is not None:
        check_writable(json)
    draft.check(model)
    target, tokenizer = load(model, device, dtype)

    import torch
    from transformers import TextStreamer

    from windowed_mtp.probes.decode import DecodeResult, Decoding, summarise
    from windowed_mtp.probes.target_runs import check_length

    ids = encode(tokenizer, text, target)
    check_length(target, ids.shape[1], max_new_tokens)
    drafter = None if no_draft else draft.build(target, tokenizer)
    decoding = Decoding(target, drafter)
    provenance = Provenance.collect(str(target.device), (seed or 0) if sample else None)
    torch.manual_seed(seed or 0)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    code = 0
    try:
        decoding.run(ids, streamer=streamer, max_new_tokens=max_new_tokens, **sampling.generate_kwargs())
    except KeyboardInterrupt:
        print()
        errors.print("Interrupted; the numbers are those of the steps so far.")
        code = 130

    name = "no draft" if no_draft else "native" if native else "windowed"
    row = summarise(name, [decoding.stats], drafted=not no_draft)
    errors.print()
    counts = f"{row.prompt_tokens:,} prompt tokens, {row.new_tokens:,} new ones in {row.steps:,} steps"
    entries = row.prompt_tokens + row.new_tokens - 1
    in_force = "no draft" if drafter is None else draft.describe(entries, drafter.hot_head)
    errors.say(f"{counts}; {in_force}")
    errors.show(decode_table([row]))
    if json is not None:
        settings: dict[str, Setting] = {} if drafter is None else draft.settings(drafter.hot_head)
        settings |= {"model": model, "max_new_tokens": max_new_tokens, **sampling.generate_kwargs()}
        DecodeResult(provenance=provenance, settings=settings, rows=(row,)).save(json)
    return code
