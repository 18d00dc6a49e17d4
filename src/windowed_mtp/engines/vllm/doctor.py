"""What an engine would do with its window, and what is wrong with its draft, told from the flags of ``vllm serve``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from windowed_mtp.engines.vllm.config import PluginConfig
from windowed_mtp.engines.vllm.doctor_acceptance import acceptance
from windowed_mtp.engines.vllm.doctor_blocks import Blocks, blocks_of, text_config
from windowed_mtp.engines.vllm.doctor_experts import experts_findings, tuned_experts
from windowed_mtp.engines.vllm.doctor_files import look_at_files
from windowed_mtp.engines.vllm.doctor_head import head_findings, unseen_head
from windowed_mtp.engines.vllm.doctor_prefix import prefix_findings
from windowed_mtp.engines.vllm.doctor_quantisation import asker
from windowed_mtp.engines.vllm.doctor_rope import rope_findings
from windowed_mtp.engines.vllm.doctor_splits import attention_device, splits_findings
from windowed_mtp.engines.vllm.drafters import context_parallel, first_pass_needed, nothing_to_window
from windowed_mtp.engines.vllm.findings import DoctorResult, Finding, Level
from windowed_mtp.engines.vllm.fingerprint import installed, what_moved
from windowed_mtp.engines.vllm.serve_flags import serve_config
from windowed_mtp.engines.vllm.summary import Drafting, LayerGroup, describe, engages_from
from windowed_mtp.engines.vllm.symbols import V1, V2, missing, not_run, unknown_version
from windowed_mtp.results import Provenance


def diagnose(flags: Sequence[str], metrics: str | None = None) -> DoctorResult:
    """Look at an engine before it is started.

    No weights are loaded, except a head's norms from a checkpoint on this machine.

    Parameters
    ----------
    flags : sequence of str
        A model and flags, as ``vllm serve`` takes them.
    metrics : str, optional
        Text of a running server's ``/metrics``.

    Returns
    -------
    DoctorResult
        What would be in force, and the findings.

    Raises
    ------
    PluginError
        If vLLM is not installed or refuses the flags, the plugin's settings are wrong, or ``metrics`` is not vLLM's.
    """
    judged = [] if metrics is None else [acceptance(metrics)]
    vllm_config = serve_config(flags)

    import vllm
    from vllm.platforms import current_platform

    version, device = vllm.__version__, current_platform.device_type.upper()
    config = PluginConfig.read(vllm_config.additional_config)
    blocks = blocks_of(vllm_config)
    findings = [*version_findings(vllm_config, version, device), *_window_findings(vllm_config, config, blocks)]
    in_force = None
    if config is not None and all(finding.level != "problem" for finding in findings):
        in_force = _in_force(vllm_config, config, blocks)
    findings += checkpoint_findings(vllm_config)
    findings += splits_findings(vllm_config, blocks, attention_device(vllm_config))
    findings += experts_findings(tuned_experts(vllm_config))
    findings += [*prefix_findings(vllm_config, blocks), *judged]
    return DoctorResult(
        provenance=Provenance.collect(),
        settings={"model": vllm_config.model_config.model, "flags": " ".join(flags), "vllm": version},
        in_force=in_force,
        rows=tuple(findings),
    )


def version_findings(vllm_config: Any, version: str, device: str) -> Iterator[Finding]:
    """Judge whether the plugin knows this vLLM, and whether it was ever run with it.

    Parameters
    ----------
    vllm_config : VllmConfig
        Says which runner the engine has.
    version : str
        ``vllm.__version__``.
    device : str
        Kind of device, such as ``"CPU"`` or ``"CUDA"``.
    """
    module = V2 if _is_v2(vllm_config) else V1
    runner = "V2" if module == V2 else "V1"
    unknown, lacking = unknown_version(version), missing(module, version)
    untried = not_run(version, runner, device)
    if lacking is not None or unknown is not None:
        yield Finding(
            check="version", level="problem",
            cause=unknown or f"this vLLM ({version}) has no {lacking}, which the window rests on",
            remedy="install a vLLM that is known, or a newer windowed-mtp",
        )  # fmt: skip
    elif untried is not None:
        yield Finding(
            check="version", level="warning", cause=f"this vLLM has what the window needs, but {untried}",
            remedy="compare greedy outputs with and without the window before you rely on it",
        )  # fmt: skip
    else:
        yield Finding(
            check="version", level="ok",
            cause=f"this vLLM ({version}, {runner} runner on {device}) has what the window needs, and was run with it",
        )  # fmt: skip
    changed = what_moved(version, installed())
    if changed is not None:
        yield Finding(
            check="version", level="warning", cause=f"vLLM {version}: {changed}",
            remedy="read what changed in them, or install a release that is known",
        )  # fmt: skip


def _window_findings(vllm_config: Any, config: PluginConfig | None, blocks: Blocks | None) -> Iterator[Finding]:
    speculative = vllm_config.speculative_config
    if config is None:
        yield Finding(
            check="window", level="warning", cause="no window is configured, so the draft reads every key",
            remedy='add --additional-config \'{"windowed_mtp": {"sink": 64, "window": 4032}}\'',
        )  # fmt: skip
        return
    level: Level = "problem"
    stops = "the engine would not start" if config.strict else "the engine would run without the window"
    if speculative is None:
        yield Finding(
            check="window", level=level, cause=f"there is a window but no --speculative-config, so {stops}",
            remedy="add a --speculative-config, or take the window out",
        )  # fmt: skip
        return
    nothing = nothing_to_window(speculative.method)
    if nothing is not None:
        yield Finding(
            check="window", level=level, cause=f"{nothing}, so {stops}",
            remedy="use a drafter with attention (mtp, eagle3, dflash, a draft model), or take the window out",
        )  # fmt: skip
        return
    reason = left_alone(vllm_config)
    if reason is not None:
        yield Finding(
            check="window", level=level, cause=f"the draft's layers would be left alone, as {reason}, so {stops}",
            remedy="take the window out: it cannot help this draft",
        )  # fmt: skip
        return
    alone = None if config.window_first_pass else first_pass_needed(speculative, _is_v2(vllm_config))
    if alone is not None:
        yield Finding(
            check="window", level=level, cause=f"{alone}, so the engine would not start",
            remedy="leave it out to window that pass",
        )  # fmt: skip
        return
    block = blocks.kernel if blocks is not None else 1
    start, longest = engages_from(config.window, block), vllm_config.model_config.max_model_len
    if start > longest:
        yield Finding(
            check="window", level=level,
            cause=f"the window has no effect: it leaves keys out from a context of {start:,} tokens on, and the "
            f"maximum is {longest:,}",
            remedy="lower sink, window or min_context, or raise --max-model-len",
        )  # fmt: skip
    elif start > longest // 2:
        yield Finding(
            check="window", level="warning",
            cause=f"the window leaves keys out only from a context of {start:,} tokens on, of {longest:,} at most",
            remedy="a smaller window or min_context would help more requests, if AL stays",
        )  # fmt: skip
    else:
        yield Finding(
            check="window", level="ok", cause=f"keys are left out from a context of {start:,} tokens on, of {longest:,}"
        )


def left_alone(vllm_config: Any) -> str | None:
    """Say why the draft's layers could not be windowed, as far as configs tell; ``None`` if they could."""
    if getattr(vllm_config.model_config, "rswa_window", None) is not None:
        return "the model has a reference sliding window (R-SWA)"
    spread = context_parallel(vllm_config)
    if spread is not None:
        return spread
    speculative = vllm_config.speculative_config
    draft = text_config(speculative.draft_model_config)
    if draft.get("index_topk"):
        return "they select their keys by a sparse index"
    if draft.get("model_type") == "bloom" or draft.get("alibi") or (draft.get("attn_config") or {}).get("alibi"):
        return "they use ALiBi"
    kinds = draft.get("mtp_layer_types") if speculative.method == "mtp" else draft.get("layer_types")
    if kinds:
        return "they have a sliding window of their own" if set(kinds) == {"sliding_attention"} else None
    own = speculative.method != "mtp" and draft.get("sliding_window") and draft.get("use_sliding_window", True)
    return "they have a sliding window of their own" if own else None


def checkpoint_findings(vllm_config: Any) -> Iterator[Finding]:
    """Look at the files of target and draft, at the tensors of a built-in head, and at the draft's positions."""
    model, load = vllm_config.model_config, vllm_config.load_config
    inventory, found = look_at_files(model.model, model.revision, load)
    yield from found
    speculative = vllm_config.speculative_config
    draft = None if speculative is None else speculative.draft_model_config
    if draft is None or nothing_to_window(speculative.method) is not None:
        return
    own = draft.model != model.model
    if own:
        inventory, found = look_at_files(draft.model, draft.revision, load)
        yield from found
    from transformers import PretrainedConfig

    stored, _ = PretrainedConfig.get_config_dict(draft.model, revision=draft.revision)
    if speculative.method == "mtp" and load.load_format != "dummy":
        if inventory is not None:
            layers, method = model.get_total_num_hidden_layers(), vllm_config.quant_config and model.quantization
            yield from head_findings(inventory, stored, layers, asker(vllm_config), method)
        elif not found:
            yield unseen_head(draft.model)
    trained = stored.get("max_position_embeddings") or (stored.get("text_config") or {}).get("max_position_embeddings")
    length = model.max_model_len
    yield from rope_findings(text_config(model), text_config(draft), trained if own else None, length)


def _is_v2(vllm_config: Any) -> bool:
    return bool(getattr(vllm_config, "use_v2_model_runner", False))


def _drafting(vllm_config: Any, config: PluginConfig) -> Drafting:
    speculative = vllm_config.speculative_config
    one_pass = bool(getattr(speculative, "parallel_drafting", False)) or speculative.method == "dflash"
    return Drafting(speculative.num_speculative_tokens, one_pass, config.window_first_pass)


def _in_force(vllm_config: Any, config: PluginConfig, blocks: Blocks | None) -> str:
    if blocks is None:
        window = config.window
        return (
            f"sink {window.sink:,} and window {window.window:,}, each rounded up to blocks whose size is only known "
            "at the start."
        )
    draft = vllm_config.speculative_config.draft_model_config
    group = LayerGroup(draft.get_total_num_hidden_layers(), blocks.backend, blocks.kernel)
    return describe(config.window, _drafting(vllm_config, config), [group], vllm_config.model_config.max_model_len)
