"""Time and memory of the draft's prefill on the bundled checkpoint, for several prompt lengths.

The target reads each prompt once, untimed. Then the draft's own prefill runs in four arrangements, in turns, after one
untimed round: every key read (native), a window with every key kept, a ring, and a ring whose prefill is pruned.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import median
from typing import Literal

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.cache_utils import DynamicCache

from windowed_mtp import SinkWindow
from windowed_mtp.engines.transformers import WindowedMTP
from windowed_mtp.engines.transformers.draft import DraftState
from windowed_mtp.engines.transformers.target import Target
from windowed_mtp.errors import WindowedMTPError
from windowed_mtp.probes.target_runs import check_length
from windowed_mtp.reference import checkpoint_path
from windowed_mtp.results import Provenance, Record, RunResult, check_writable
from windowed_mtp.workloads.stdlib import heldout_text

CHARACTERS_PER_TOKEN = 6  # more than a long text has


class DraftPrefillRow(Record):
    """One arrangement at one prompt length.

    Attributes
    ----------
    arm : str
        Name of the arrangement.
    prompt_tokens : int
        Tokens in the prompt; the draft has one entry fewer.
    repeats : int
        Number of timed runs.
    prefill_ms : float
        Median wall time of the draft's prefill.
    kv_bytes : int
        Bytes of draft KV afterwards.
    """

    arm: str
    prompt_tokens: int
    repeats: int
    prefill_ms: float
    kv_bytes: int


class DraftPrefillResult(RunResult):
    """What this benchmark measured."""

    kind: Literal["draft-prefill"] = "draft-prefill"
    rows: tuple[DraftPrefillRow, ...]


def parse_arguments() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("lengths", type=int, nargs="*", default=[2048, 4096, 8192, 16384], help="tokens of the prompts")
    parser.add_argument("--sink", type=int, default=64)
    parser.add_argument("--window", type=int, default=448)
    parser.add_argument("--depth", type=int, default=4, help="tokens drafted a step, which a ring has slots for")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each arrangement")
    parser.add_argument("--device", default="cpu", help="torch device")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--seed", type=int, default=0, help="chooses the text of the prompts")
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the numbers to this file")
    arguments = parser.parse_args()
    if min(arguments.lengths) < 2 or arguments.repeats < 1:
        parser.error("pass lengths of at least 2 and --repeats of at least 1.")
    try:
        torch.empty(0, device=arguments.device)
    except (RuntimeError, AssertionError, NotImplementedError):
        parser.error(f"there is no device {arguments.device!r} here; pass --device cpu, or cuda on a GPU machine.")
    return parser, arguments


def features_of(model: PreTrainedModel, ids: Tensor, feature_layers: list[int] | None) -> Tensor:
    """What the target gives the draft for a prompt, ``[1, n, F]``."""
    target = Target(model, DynamicCache(config=model.config), feature_layers)
    with torch.no_grad(), target.hooked():
        return target.prefill(ids, None)[1]


@torch.no_grad()
def prefill(state: DraftState, ids: Tensor, features: Tensor) -> float:
    """Run a draft's prefill; its wall time in seconds."""

    def clock() -> float:
        if ids.is_cuda:
            torch.cuda.synchronize(ids.device)
        return time.perf_counter()

    begin = clock()
    state.observe(features)
    state.advance(ids)
    return clock() - begin


def print_table(rows: list[DraftPrefillRow], arms: list[str]) -> None:
    print("| prompt | " + " | ".join(arms) + " |")
    print("|---:|" + "---:|" * len(arms))
    for length in sorted({row.prompt_tokens for row in rows}):
        at_length = {row.arm: row for row in rows if row.prompt_tokens == length}
        cells = [
            f"{row.prefill_ms:,.1f} ms, {row.kv_bytes / 2**20:.2f} MiB" if (row := at_length.get(arm)) else "-"
            for arm in arms
        ]
        print(f"| {length:,} | " + " | ".join(cells) + " |")


def measure(arguments: argparse.Namespace) -> int:
    window = SinkWindow(arguments.sink, arguments.window)
    if arguments.json is not None:
        check_writable(arguments.json)
    dtype = getattr(torch, arguments.dtype)
    model = AutoModelForCausalLM.from_pretrained(checkpoint_path(), dtype=dtype).to(arguments.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint_path())
    # A drafter checks that the options fit together, and holds the head.
    head = WindowedMTP.from_model(
        model, window=window, num_speculative_tokens=arguments.depth, keep="ring", prefill="pruned"
    ).head
    for length in arguments.lengths:
        check_length(model, length, 0)
    arms = {
        "native": lambda: DraftState(head, None, arguments.depth),
        "window, all kept": lambda: DraftState(head, window, arguments.depth),
        "ring": lambda: DraftState(head, window, arguments.depth, "ring"),
        "ring, pruned": lambda: DraftState(head, window, arguments.depth, "ring", "pruned"),
    }

    provenance = Provenance.collect(arguments.device, arguments.seed)
    rows: list[DraftPrefillRow] = []
    interrupted = False
    try:
        for length in arguments.lengths:
            text = heldout_text(CHARACTERS_PER_TOKEN * length, arguments.seed)
            ids = tokenizer(text, return_tensors="pt").input_ids[:, :length].to(arguments.device)
            features = features_of(model, ids, head.feature_layers())
            seconds: dict[str, list[float]] = {name: [] for name in arms}
            for turn in range(1 + arguments.repeats):
                for name, make in arms.items():
                    state = make()
                    spent = prefill(state, ids, features)
                    if turn:
                        seconds[name].append(spent)
                    if turn == arguments.repeats:
                        rows.append(
                            DraftPrefillRow(
                                arm=name,
                                prompt_tokens=length,
                                repeats=arguments.repeats,
                                prefill_ms=1e3 * median(seconds[name]),
                                kv_bytes=state.num_bytes,
                            )
                        )
    except KeyboardInterrupt:
        interrupted = True
        print("Interrupted; the numbers are those measured so far.")
    print(
        f"{provenance.device}, {provenance.threads} CPU threads, torch {provenance.torch}, {arguments.dtype}; {window}"
    )
    print(f"Draft prefill: median of {arguments.repeats} runs, and draft KV held afterwards\n")
    print_table(rows, list(arms))
    if arguments.json is not None:
        DraftPrefillResult(
            provenance=provenance,
            settings={
                "sink": window.sink, "window": window.window, "num_speculative_tokens": arguments.depth,
                "repeats": arguments.repeats, "dtype": arguments.dtype,
            },
            rows=tuple(rows),
        ).save(arguments.json)  # fmt: skip
    return 130 if interrupted else 0


def main() -> int:
    parser, arguments = parse_arguments()
    try:
        return measure(arguments)
    except WindowedMTPError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
