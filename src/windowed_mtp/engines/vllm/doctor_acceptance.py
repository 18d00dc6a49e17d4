"""What a running server's counters say about the draft."""

from __future__ import annotations

import re
from collections import defaultdict

from windowed_mtp.engines.acceptance import by_position, conditional, unconditional
from windowed_mtp.engines.vllm.config import PluginError
from windowed_mtp.engines.vllm.findings import Finding

_SAMPLE = re.compile(r"^vllm:spec_decode_num_(\w+?)(?:_total)?(?:\{(.*)\})?\s+(\S+)")
_POSITION = re.compile(r'position="(\d+)"')
ALMOST_NOTHING = 1.05
"""An acceptance length below this means that hardly one draft in twenty accepted a token."""
FEW = 100
"""Fewer drafts than this say little."""


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
    drafts, accepted = counts["drafts"], counts["accepted_tokens"]
    if not drafts:
        return Finding(
            check="acceptance", level="warning", cause="the server has not drafted yet, so nothing is known of its AL",
            remedy="send it some requests and run this again",
        )  # fmt: skip
    length = 1 + accepted / drafts
    cause = f"AL is {length:.2f} over {drafts:,.0f} drafts"
    if positions:
        at = [positions[index] for index in sorted(positions)]
        cause += f", unconditional acceptance by position {by_position(unconditional(at, drafts))}"
        if counts["draft_tokens"] == drafts * len(at):  # one length, so what was accepted before was tested
            cause += f", conditional {by_position(conditional(at, [drafts, *at[:-1]]))}"
    if length < ALMOST_NOTHING:
        return Finding(
            check="acceptance", level="problem", cause=f"{cause}: the draft is hardly ever right and only costs time",
            remedy="look at the findings on the head, its quantisation and its rope; if they are all ok, the head is "
            "not trained for this target",
        )  # fmt: skip
    if drafts < FEW:
        return Finding(
            check="acceptance", level="warning", cause=f"{cause}, which are few", remedy="send more requests",
        )  # fmt: skip
    return Finding(check="acceptance", level="ok", cause=cause)
