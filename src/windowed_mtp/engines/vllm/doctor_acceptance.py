"""What a running server's counters say about the draft."""

from __future__ import annotations

import re
from collections import defaultdict

from windowed_mtp.engines.vllm.config import PluginError
from windowed_mtp.engines.vllm.findings import Finding

_SAMPLE = re.compile(r"^vllm:spec_decode_num_(\w+?)(?:_total)?(?:\{(.*)\})?\s+(\S+)")
_POSITION = re.compile(r'position="(\d+)"')
ALMOST_NOTHING = 1.05
"""An acceptance length below this means that hardly one step in twenty accepted a token."""
FEW = 100
"""Fewer steps than this say little."""


def acceptance(metrics: str) -> Finding:
    """Judge the acceptance length by vLLM's counters.

    Parameters
    ----------
    metrics : str
        Text of the server's ``/metrics``; the counters of several engines are added up.

    Raises
    ------
    PluginError
        If it has no counters of speculative decoding.
    """
    counts: dict[str, float] = defaultdict(float)
    positions: dict[int, float] = defaultdict(float)
    for line in metrics.splitlines():
        sample = _SAMPLE.match(line)
        if sample is None:
            continue
        name, labels, value = sample.groups()
        position = _POSITION.search(labels or "")
        if position is not None:
            positions[int(position[1])] += float(value)
        else:
            counts[name] += float(value)
    if "drafts" not in counts:
        raise PluginError(
            "the metrics hold no vllm:spec_decode counters; pass the /metrics of a vLLM server with a drafter."
        )
    steps, accepted = counts["drafts"], counts["accepted_tokens"]
    if not steps:
        return Finding(
            check="acceptance", level="warning", cause="the server has not drafted yet, so nothing is known of its AL",
            remedy="send it some requests and run this again",
        )  # fmt: skip
    length = 1 + accepted / steps
    cause = f"AL is {length:.2f} over {steps:,.0f} steps"
    if positions:
        shares = " ".join(f"{positions[index] / steps:.2f}" for index in sorted(positions))
        cause += f", accepted by position {shares}"
    if length < ALMOST_NOTHING:
        return Finding(
            check="acceptance", level="problem", cause=f"{cause}: the draft is hardly ever right and only costs time",
            remedy="look at the findings on the head, its quantisation and its rope; if they are all ok, the head is "
            "not trained for this target",
        )  # fmt: skip
    if steps < FEW:
        return Finding(
            check="acceptance", level="warning", cause=f"{cause}, which are few", remedy="send more requests",
        )  # fmt: skip
    return Finding(check="acceptance", level="ok", cause=cause)
