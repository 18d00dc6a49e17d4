"""The kernels of a step by kind, and the longest by name, from profiles of the step-cost benchmark."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from step_cost_format import NONE, plain_table, prose, setting

from windowed_mtp.engines.vllm.step_profile import KernelRow, StepProfile

KINDS = {
    "attention": r"flash::|FlashAttn|attention|_attn_",
    "experts, routing included": r"fused_moe|vllm::moe|act_and_mul",
    "recurrent layers": r"gdn_|causal_conv1d",
    "matrix products": r"nvjet|cublas|gemm|dot_kernel|splitK",
    "the window's table": r"_compact_rows",
    "hot rows put back": r"index_copy|FillFunctor<c10::BFloat16>",
    "choice of tokens": r"ArgMax|_logits_stats|_resample|_rejection|softmax",
}
"""Kinds by a kernel's name; the first that fits counts."""
HEAD, REST = "output head", "norms, copies and other small ones"
PARTS = r"(?:FlashAttn|prepare_varlen)\w*|\w+(?:Functor|Ops)(?:_\w+)?|(?:sigmoid|index_copy|index_put)_kernel\w*"


def kind(name: str) -> str:
    """Kind of a kernel by its name."""
    return next((found for found, pattern in KINDS.items() if re.search(pattern, name)), REST)


def by_kind(rows: Iterable[KernelRow]) -> dict[str, tuple[float, float]]:
    """Launches and microseconds a step of each kind, over one half of a step.

    The output head is the matrix product with the longest launch: it reads more than any other.
    """
    rows = list(rows)
    products = [row for row in rows if kind(row.name) == "matrix products"]
    head = max(products, key=lambda row: row.us / row.calls, default=None)
    sums: dict[str, tuple[float, float]] = {}
    for row in rows:
        of = HEAD if row is head else kind(row.name)
        calls, us = sums.get(of, (0.0, 0.0))
        sums[of] = calls + row.calls, us + row.us
    return sums


def kinds_table(profiles: Sequence[StepProfile], half: str) -> str:
    """Microseconds of each kind in one half of a step, a column for each profile."""
    sums = [by_kind(row for row in profile.rows if row.half == half) for profile in profiles]
    order = [found for found in (HEAD, *KINDS, REST) if any(found in each for each in sums)]
    rows = [[found, *(_time(each.get(found)) for each in sums)] for found in order]
    totals = [tuple(map(sum, zip(*each.values(), strict=True))) for each in sums]
    return plain_table([half, *map(label, profiles)], [*rows, ["all kernels", *map(_time, totals)]])


def longest(profile: StepProfile, most: int = 12) -> str:
    """The longest kernels of each half of a step, and the sum of the others, folded away."""
    lines: list[list[str]] = []
    for half in ("verify", "draft"):
        rows = sorted((row for row in profile.rows if row.half == half), key=lambda row: -row.us)
        for row in rows[:most]:
            grid = " x ".join(map(str, row.grid)) or NONE
            lines.append([half, f"`{short(row.name)}`", grid, f"{row.calls:g}", f"{row.us:,.1f}"])
        for name, some in ((f"{len(rows[most:])} others", rows[most:]), ("all", rows)):
            if some:
                total = sum(row.us for row in some)
                lines.append([half, name, NONE, f"{sum(row.calls for row in some):g}", f"{total:,.1f}"])
    heads = ["half", "kernel", "grid", "launches a step", "µs a step"]
    return f"<details><summary>Longest kernels, {label(profile)}</summary>\n\n{plain_table(heads, lines)}\n\n</details>"


def described(profiles: Sequence[StepProfile]) -> str:
    """What the profiles are of."""
    places = {
        ", ".join(f"{name} {profile.settings[name]:,}" for name in ("context", "gamma", "batch"))
        for profile in profiles
    }
    return prose(
        f"Profiles at {'; '.join(sorted(places))}: µs a step, with the launches a step in brackets. Profiling adds "
        "time between kernels, not to them; some kernels of a step run beside each other, so a sum may exceed the "
        "step's time by events. Kinds go by the kernels' names; the output head is the matrix product with the "
        "longest launch."
    )


def label(profile: StepProfile) -> str:
    """Name of a profile's arm and its settings."""
    known = ("arm", "context", "gamma", "batch")
    more = [setting(name, value) for name, value in profile.settings.items() if name not in known]
    base = "native" if str(profile.settings["arm"]).startswith("native") else "windowed"
    return ", ".join([base, *more])


def short(name: str) -> str:
    """A kernel's name without its template arguments, but for the part that tells what it does."""
    plain = re.sub(r"<.*", "", name.removeprefix("void ").replace("(anonymous namespace)::", ""))
    inner = re.search(PARTS, name[len(plain) :])
    made = f"{plain.rsplit('::', 1)[-1]}{f' {inner.group()}' if inner else ''}".replace("|", "/").replace("`", "'")
    return made if len(made) <= 70 else f"{made[:69]}…"


def _time(sums: tuple[float, ...] | None) -> str:
    return NONE if not sums else f"{sums[1]:,.0f} ({sums[0]:g})"
