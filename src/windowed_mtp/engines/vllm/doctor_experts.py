"""Whether vLLM has tuned launch settings for a model's experts on this machine's card."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windowed_mtp.engines.vllm.doctor_blocks import text_config
from windowed_mtp.engines.vllm.doctor_splits import on_hopper
from windowed_mtp.engines.vllm.findings import Finding

_CARD = re.compile(r"device_name=[^,]+?(?=,dtype=|,block_shape=|\.json)")


@dataclass(frozen=True)
class TunedExperts:
    """The file in which vLLM looks for its settings of the experts' kernel.

    Attributes
    ----------
    file : str
        Its name: number of experts, width of one, and the card.
    here : bool
        Whether there is one.
    others : tuple of str
        Files for the same experts on other cards, which vLLM has; those of Hopper first.
    """

    file: str
    here: bool
    others: tuple[str, ...]


def tuned_experts(vllm_config: Any) -> TunedExperts | None:
    """Look for the settings of this engine's experts.

    Parameters
    ----------
    vllm_config : VllmConfig
        The engine's.

    Returns
    -------
    TunedExperts or None
        ``None`` unless vLLM would run the experts in the kernel that these settings are for, and tells: on NVIDIA's
        Hopper, with experts that are not quantised.
    """
    from vllm import envs

    backend = getattr(getattr(vllm_config, "kernel_config", None), "moe_backend", "auto")
    if vllm_config.quant_config is not None or backend not in ("auto", "triton"):
        return None
    try:
        if not on_hopper():
            return None
        shape = experts_of_a_rank(vllm_config)
        if shape is None:
            return None
        from vllm.model_executor.layers.fused_moe import fused_moe

        file = fused_moe.get_config_file_name(*shape, None)
        own = Path(str(fused_moe.__file__)).resolve().parent / "configs"
        folders = [own] if envs.VLLM_TUNED_CONFIG_FOLDER is None else [Path(envs.VLLM_TUNED_CONFIG_FOLDER), own]
    except (AttributeError, TypeError, ImportError, NotImplementedError, RuntimeError, AssertionError):
        return None
    others = [path.name for path in own.glob(_CARD.sub("device_name=*", file)) if ",dtype=" not in path.name]
    others.sort(key=lambda name: ("device_name=NVIDIA_H" not in name, name))
    return TunedExperts(file, any((folder / file).exists() for folder in folders), tuple(others))


def experts_of_a_rank(vllm_config: Any) -> tuple[int, int] | None:
    """Count the routed experts of one rank, and the width of what it holds of each; ``None`` if there are none."""
    parallel = vllm_config.parallel_config
    experts = vllm_config.model_config.get_num_experts()
    width = text_config(vllm_config.model_config).get("moe_intermediate_size")
    if not experts or not isinstance(width, int):
        return None
    ranks = parallel.tensor_parallel_size * parallel.data_parallel_size
    ranks *= getattr(parallel, "prefill_context_parallel_size", 1)
    if not parallel.enable_expert_parallel:
        return experts, width // ranks
    redundant = parallel.eplb_config.num_redundant_experts if parallel.enable_eplb else 0
    return (experts + redundant) // ranks, width


def experts_findings(tuned: TunedExperts | None) -> Iterator[Finding]:
    """Say where vLLM would run the experts with settings that nobody tuned.

    Parameters
    ----------
    tuned : TunedExperts or None
        What was found.
    """
    if tuned is None or tuned.here:
        return
    make = "make one with vLLM's benchmarks/kernels/benchmark_moe.py"
    copy = f"copy {tuned.others[0]}, which is for the same experts on another card, or {make}" if tuned.others else make
    yield Finding(
        check="experts", level="warning",
        cause=f"vLLM has no tuned settings for these experts on this card ({tuned.file}), so it takes its default ones",
        remedy=f"{copy}, and name its folder in VLLM_TUNED_CONFIG_FOLDER; do not expect much: on an H200, 256 experts "
        "of width 512 verified in 7.92 ms with the H100's settings and in 7.98 without at 8,192 tokens, and in 12.86 "
        "and 13.04 at 1,040,000, about one per cent",
    )  # fmt: skip
