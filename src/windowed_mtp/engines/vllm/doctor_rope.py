"""Whether a draft sees positions as its target does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from windowed_mtp.engines.vllm.findings import Finding

_DEFAULT_THETA = 10000.0


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings of a config, from today's ``rope_parameters`` or yesterday's ``rope_scaling``.

    Parameters
    ----------
    config : mapping
        Of the text model.
    """
    given: dict[str, Any] = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    return {
        "type": given.get("rope_type") or given.get("type") or "default",
        "theta": float(given.get("rope_theta") or config.get("rope_theta") or _DEFAULT_THETA),
        "factor": float(given.get("factor") or 1.0),
        "original length": given.get("original_max_position_embeddings"),
    }


def rope_findings(
    target: Mapping[str, Any], draft: Mapping[str, Any], trained_length: int | None, max_model_len: int
) -> Iterator[Finding]:
    """Compare a draft's positions with its target's.

    Parameters
    ----------
    target, draft : mapping
        Configs of the text models, as vLLM will use them.
    trained_length : int or None
        ``max_position_embeddings`` in the draft's own config.json; ``None`` if it does not say.
    max_model_len : int
        Longest context that the engine serves, in tokens.
    """
    ours, theirs = rope_of(target), rope_of(draft)
    fine = True
    if (ours["type"], ours["factor"]) != (theirs["type"], theirs["factor"]) and ours["type"] != "default":
        fine = False
        yield Finding(
            check="rope", level="problem",
            cause=f"the target's rope is {_scaling(ours)}, the draft's {_scaling(theirs)}: at long context the draft "
            "sees other positions than the target",
            remedy="give the draft the target's rope settings: in its config.json, or as hf_overrides in "
            "--speculative-config",
        )  # fmt: skip
    elif ours["type"] != theirs["type"] or ours["theta"] != theirs["theta"]:
        fine = False
        yield Finding(
            check="rope", level="warning",
            cause=f"the draft's rope ({_scaling(theirs)}, theta {theirs['theta']:,.0f}) differs from the target's "
            f"({_scaling(ours)}, theta {ours['theta']:,.0f})",
            remedy="make sure that the draft was trained so; else give it the target's rope settings in its "
            "config.json",
        )  # fmt: skip
    if trained_length is not None and trained_length < max_model_len:
        fine = False
        yield Finding(
            check="length", level="warning",
            cause=f"the draft is made for {trained_length:,} positions, and the engine serves {max_model_len:,}",
            remedy=f"expect fewer accepted tokens beyond {trained_length:,}; use a draft for longer contexts, or lower "
            "--max-model-len",
        )  # fmt: skip
    if fine:
        yield Finding(check="rope", level="ok", cause="the draft's rope and maximum length are the target's")


def _scaling(rope: Mapping[str, Any]) -> str:
    return "unscaled" if rope["type"] == "default" else f"{rope['type']} with factor {rope['factor']:g}"
