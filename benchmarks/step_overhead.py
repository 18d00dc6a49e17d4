"""What a step costs beside the target, the draft's layer and the output head, at several contexts.

The bundled checkpoint decodes greedily from random prompts of each length, read in chunks. Its proposals are replaced
by others, which are rejected, so that every step does the same: drafts, verifies, emits one token, and rolls back. A
step's time is that from one step to the next; the target's passes and the head's are timed within, and what is left is
the engine's own: building inputs, acceptance, appending, stopping criteria, rollback. Torch has one thread, and the
times are that thread's on the processor, so that other programs on the machine count for little.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from windowed_mtp import SinkWindow
from windowed_mtp.engines.protocol import StepEvent
from windowed_mtp.engines.transformers import WindowedMTP
from windowed_mtp.engines.transformers.heads.base import DraftHead
from windowed_mtp.errors import WindowedMTPError
from windowed_mtp.probes.target_runs import generate
from windowed_mtp.reference import checkpoint_path
from windowed_mtp.results import Provenance, Record, RunResult, check_writable

CHUNK = 2048


class StepOverheadRow(Record):
    """A decode step at one context.

    Attributes
    ----------
    context : int
        Tokens in the prompt.
    steps : int
        Steps measured, in all runs.
    acceptance_length : float
        Tokens emitted a step.
    step_ms, target_ms, draft_ms, head_ms, own_ms : float
        Medians over the steps, in milliseconds of processor time: the whole step, the target's pass, the draft's layer,
        the output head for the draft, and the rest.
    """

    context: int
    steps: int
    acceptance_length: float
    step_ms: float
    target_ms: float
    draft_ms: float
    head_ms: float
    own_ms: float


class StepOverheadResult(RunResult):
    """What this benchmark measured."""

    kind: Literal["step-overhead"] = "step-overhead"
    rows: tuple[StepOverheadRow, ...]


class Stopwatch:
    """Seconds by part of the step that runs, and those of each finished step."""

    def __init__(self) -> None:
        self.parts = dict.fromkeys(("target", "draft", "head"), 0.0)
        self.steps: list[dict[str, float]] = []
        self.since: float | None = None
        self.entered = 0.0

    def enter(self, *_: Any) -> None:
        self.entered = time.thread_time()

    def leave(self, part: str) -> None:
        self.parts[part] += time.thread_time() - self.entered

    def step(self, event: StepEvent) -> None:
        now = time.thread_time()
        if self.since is not None:  # the first step has no beginning
            whole = now - self.since
            self.steps.append({"step": whole, **self.parts, "own": whole - sum(self.parts.values())})
        self.parts = dict.fromkeys(self.parts, 0.0)
        self.since = time.thread_time()


class TimedHead(DraftHead):
    """A head whose layer and output head are timed."""

    def __init__(self, head: DraftHead, watch: Stopwatch) -> None:
        self.head, self.watch, self.num_layers = head, watch, head.num_layers

    def fuse(self, features: Tensor) -> Tensor:
        return self.head.fuse(features)

    def forward(self, *args: Any) -> tuple[Tensor, Tensor]:
        self.watch.enter()
        result = self.head.forward(*args)
        self.watch.leave("draft")
        return result

    def logits(self, layer: int, out: Tensor) -> Tensor:
        self.watch.enter()
        logits = self.head.logits(layer, out)
        self.watch.leave("head")
        return logits


def row(context: int, steps: Sequence[dict[str, float]], acceptance_length: float) -> StepOverheadRow:
    parts = {f"{part}_ms": 1e3 * median(step[part] for step in steps) for part in steps[0]}
    return StepOverheadRow(context=context, steps=len(steps), acceptance_length=acceptance_length, **parts)


def parse_arguments() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument(
        "contexts", type=int, nargs="*", default=[1024, 4096, 16384, 65536], help="tokens of the prompts"
    )
    parser.add_argument("--sink", type=int, default=64)
    parser.add_argument("--window", type=int, default=448)
    parser.add_argument("--depth", type=int, default=4, help="tokens drafted a step")
    parser.add_argument("--new-tokens", type=int, default=200, help="tokens generated at each context")
    parser.add_argument("--repetition-penalty", type=float, default=1.0, help="1 for no logits processor")
    parser.add_argument("--seed", type=int, default=0, help="chooses the prompts, which are random")
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the numbers to this file")
    arguments = parser.parse_args()
    if min(arguments.contexts) < 2 or arguments.new_tokens < 20:
        parser.error("pass contexts of at least 2 and --new-tokens of at least 20.")
    return parser, arguments


def measure(arguments: argparse.Namespace) -> int:
    if arguments.json is not None:
        check_writable(arguments.json)
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(checkpoint_path(), dtype=torch.float32).eval()
    model.config.get_text_config().max_position_embeddings = max(arguments.contexts) + arguments.new_tokens
    vocab_size = model.config.get_text_config().vocab_size
    watch = Stopwatch()
    drafter = WindowedMTP.from_model(
        model, window=SinkWindow(arguments.sink, arguments.window), num_speculative_tokens=arguments.depth, keep="ring",
        prefill="pruned", on_step=watch.step, override=lambda context, own: [(token + 1) % vocab_size for token in own],
    )  # fmt: skip
    drafter.head = TimedHead(drafter.head, watch)
    model.register_forward_pre_hook(watch.enter)
    model.register_forward_hook(lambda *_: watch.leave("target"))

    provenance = Provenance.collect("cpu", arguments.seed)
    generator = torch.Generator().manual_seed(arguments.seed)
    settings = {name: value for name, value in vars(arguments).items() if name not in ("contexts", "json")}
    rows: list[StepOverheadRow] = []
    interrupted = False
    print(f"{provenance.device}, {provenance.threads} CPU threads, torch {provenance.torch}; {settings}\n")
    print("| context | AL | step | target | draft layer | output head | own |\n" + "|---:" * 7 + "|")
    try:
        for context in arguments.contexts:
            ids = torch.randint(vocab_size, (1, context), generator=generator)
            watch.steps, watch.since = [], None
            generate(
                model, ids, custom_generate=drafter, do_sample=False, max_new_tokens=arguments.new_tokens,
                eos_token_id=None, prefill_chunk_size=CHUNK, repetition_penalty=arguments.repetition_penalty,
            )  # fmt: skip
            rows.append(row(context, watch.steps, drafter.stats.acceptance_length))
            last = rows[-1]
            times = (last.step_ms, last.target_ms, last.draft_ms, last.head_ms, last.own_ms)
            cells = (f"{context:,}", f"{last.acceptance_length:.2f}", *(f"{ms:.2f} ms" for ms in times))
            print("| " + " | ".join(cells) + " |", flush=True)
    except KeyboardInterrupt:
        interrupted = True
        print("Interrupted; the numbers are those measured so far.")
    if arguments.json is not None:
        StepOverheadResult(provenance=provenance, settings=settings, rows=tuple(rows)).save(arguments.json)
    return 130 if interrupted else 0


def main() -> int:
    parser, arguments = parse_arguments()
    try:
        return measure(arguments)
    except WindowedMTPError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
