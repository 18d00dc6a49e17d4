"""Two thousand prompts a target through vLLM's V2 runner, each output compared with the target's own.

    python tests/gpu/soak.py -o soak.json

Requests join in waves, some are aborted, some share a prefix, and now and then every free block of the cache is taken
away. Each target runs in a process of its own. An output that is neither its target's nor left it at a near tie makes
the exit code 1, and so does a process that fails, or a mode that did not happen.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

LOADS = (96, 3, 64, 17, 80, 5, 40, 9, 1)
"""Requests that are in an engine at a time, in turn; it runs up to `ROWS` of them."""
ROWS = 64
TURN = 40
"""Steps a turn. The cache is taken away in the last `SQUEEZED` of each that has a load of `ROWS` or more."""
SQUEEZED = 12
PREFIXES, SHARED = 8, 0.3
"""Number of prefixes, and the share of prompts that begin with one."""
ABORTED = 0.03
LONGEST = 1500
NAMES = ("bundled", "mtp", "latent-mtp", "eagle3", "dflash")


def requests_for(target: Any, count: int, longest: int) -> list[Any]:
    """Requests of mixed lengths; the same ones each time."""
    from gpu_targets import Prompts
    from traffic import Request

    draw, prompt = random.Random(1), Prompts(target)
    prefixes = [prompt(longest * (index + 1) // (PREFIXES + 1)) for index in range(PREFIXES)]
    made = []
    for _ in range(count):
        tokens = draw.randint(8, 40)
        begin = draw.choice(prefixes) if draw.random() < SHARED else []
        length = draw.randint(target.shortest, 60) if draw.random() < 0.3 else draw.randint(60, longest)
        own = prompt(max(target.shortest, length - len(begin)))
        abort_at = draw.randint(1, tokens - 1) if draw.random() < ABORTED else None
        made.append(Request([*begin, *own], tokens, abort_at))
    return made


def joining(step: int, live: int) -> int:
    """Requests to add before a step: up to eight, until the turn's load is there."""
    return min(8, max(0, LOADS[step // TURN % len(LOADS)] - live))


def squeezing(step: int) -> bool:
    """Whether the cache is taken away in a step."""
    return LOADS[step // TURN % len(LOADS)] >= ROWS and step % TURN >= TURN - SQUEEZED


def soak(name: str, count: int, longest: int, spoiled: int, windowed: bool) -> dict[str, Any]:
    """Run one target, and say what happened; without the window, to see how far vLLM itself leaves its target."""
    from counts import counting
    from engines import counters, runner_of
    from gpu_targets import CUDA, TARGETS
    from traffic import serve, squeezed, verdict_of

    target, begun = TARGETS[name], time.monotonic()
    requests = requests_for(target, count, longest)
    options: dict[str, Any] = {"max_num_seqs": ROWS, "max_num_batched_tokens": 2048}
    with target.running(drafting=True, windowed=windowed, **options) as llm:
        started, before = time.monotonic(), counters(llm)
        with counting(llm) as counts, squeezed(llm) as squeeze:
            served = serve(llm, requests, joining, lambda step: squeeze(squeezing(step)))
        after, ended = counters(llm), time.monotonic()
        module = type(runner_of(llm)).__module__
        vocab = runner_of(llm).vllm_config.model_config.get_vocab_size()
    for each in served[:spoiled]:
        each.tokens[-1] = (each.tokens[-1] + 1) % vocab
    with target.running(drafting=False, **options) as alone:
        verdict = verdict_of(alone, vocab, requests, served)

    def grown(counter: str) -> int:
        return int(after[counter] - before.get(counter, 0))

    drafts = grown("spec_decode_num_drafts")
    happened = {
        "aborted": sum(each.aborted for each in served),
        "preemptions": grown("num_preemptions"),
        "prefix_hit_tokens": grown("prefix_cache_hits"),
        "windowed_keys_dropped": counts.dropped + counts.dropped_in_loop,
        "accepted": grown("spec_decode_num_accepted_tokens"),
    }
    if CUDA:
        happened |= {
            "padded_batches": counts.padded,
            "graph_replays": sum(counts.replays.values()),
            "dropped_in_a_drafters_graphs": counts.dropped_in_loop,
        }
        if counts.passes:  # else its batches are windowed inside its graphs alone
            happened["padded_passes"] = counts.padded_passes
    if not windowed:
        happened = {what: times for what, times in happened.items() if "dropped" not in what}
    return {
        "target": name,
        "runner": module,
        "prompts": len(requests),
        "completed": sum(not each.aborted for each in served),
        **happened,
        "replays": dict(counts.replays),
        "batch_sizes_in_graphs": len(counts.sizes),
        "windowed_passes": counts.passes,
        "acceptance_length": round(1 + happened["accepted"] / drafts, 3),
        "equal": verdict.equal,
        "near_ties": len(verdict.gaps),
        "largest_margin": verdict.largest_margin,
        "margins_in_steps": dict(sorted(Counter(round(gap.steps, 2) for gap in verdict.gaps).items())),
        "different": verdict.different,
        "did_not_happen": [what for what, times in happened.items() if not times],
        "seconds": [round(value, 1) for value in (started - begun, ended - started, time.monotonic() - ended)],
    }


def prepare() -> None:
    """Set what vLLM reads from the environment; to be called before it is imported."""
    import torch

    here = Path(__file__).parent
    sys.path[:0] = [str(here), str(here.parent / "vllm"), str(here.parent / "vllm_v2")]
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.update(VLLM_USE_V2_MODEL_RUNNER="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1")
    if not torch.cuda.is_available():
        import interpreter

        interpreter.prepare()


def in_a_child(name: str, rest: list[str], out: Path) -> dict[str, Any]:
    """Run one target in a process of its own; its output goes to a file beside the record."""
    record, log = out.with_suffix(f".{name}.json"), out.with_suffix(f".{name}.log")
    record.unlink(missing_ok=True)
    with log.open("w") as file:
        code = subprocess.call(
            [sys.executable, __file__, "--child", name, "-o", str(record), *rest], stdout=file, stderr=file
        )
    if not record.exists():
        tail = log.read_text(errors="replace").splitlines()[-25:]
        return {"target": name, "failed": f"exit code {code}", "log": tail}
    return dict(json.loads(record.read_text()))


def passed(record: dict[str, Any]) -> bool:
    """Whether a target's outputs are its own, and all that was to happen did."""
    return not (record.get("failed") or record["different"] or record["did_not_happen"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(NAMES)}; all by default")
    parser.add_argument("-o", "--output", type=Path, default=Path("soak.json"))
    parser.add_argument("--prompts", type=int, default=2000, help="a target")
    parser.add_argument("--longest", type=int, default=LONGEST, help="longest prompt that begins with no prefix")
    parser.add_argument("--jobs", type=int, default=1, help="targets at a time")
    parser.add_argument("--spoil", type=int, default=0, help="outputs to change, to see that they are found")
    parser.add_argument("--no-window", action="store_true", help="draft natively, as a control")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := sorted(set(args.targets) - set(NAMES)):
        parser.error(f"no target is called {unknown[0]}; choose from {', '.join(NAMES)}")
    if args.child:
        prepare()
        args.output.write_text(json.dumps(soak(args.child, args.prompts, args.longest, args.spoil, not args.no_window)))
        return 0
    rest = [f"--{name}={getattr(args, name)}" for name in ("prompts", "longest", "spoil")]
    rest += ["--no-window"] * args.no_window
    with ThreadPoolExecutor(args.jobs) as pool:
        records = []
        for record in pool.map(lambda name: in_a_child(name, rest, args.output), args.targets or NAMES):
            print(json.dumps(record), flush=True)
            records.append(record)
    args.output.write_text(json.dumps(records, indent=1))
    return 0 if all(passed(record) for record in records) else 1


if __name__ == "__main__":
    sys.exit(main())
