"""Puts the window in force: at the top of ``initialize_kv_cache``, on the draft's attention layers only."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from windowed_mtp.engines.vllm.backend import windowed_backend
from windowed_mtp.engines.vllm.config import PluginConfig, PluginError

_ORIGINAL = "_windowed_mtp_original"


def install(module: ModuleType) -> None:
    """Wrap a runner's ``initialize_kv_cache``; the wrapper takes itself off where no window is configured.

    Parameters
    ----------
    module : ModuleType
        A module with a ``GPUModelRunner``.
    """
    runner_class = module.GPUModelRunner
    original = runner_class.initialize_kv_cache
    if hasattr(original, _ORIGINAL):
        return

    @functools.wraps(original)
    def initialize_kv_cache(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = PluginConfig.read(self.vllm_config.additional_config)
        if config is None:
            uninstall(module)
            return original(self, *args, **kwargs)
        window_draft_layers(self, config)
        made = original(self, *args, **kwargs)
        mark_first_pass(self)
        return made

    setattr(initialize_kv_cache, _ORIGINAL, original)
    runner_class.initialize_kv_cache = initialize_kv_cache


def uninstall(module: ModuleType) -> None:
    """Give a runner its own ``initialize_kv_cache`` back."""
    runner_class = module.GPUModelRunner
    runner_class.initialize_kv_cache = getattr(
        runner_class.initialize_kv_cache, _ORIGINAL, runner_class.initialize_kv_cache
    )


def mark_first_pass(runner: Any) -> None:
    """Tell the builders in the runner's own groups that they serve the drafter's first pass.

    V2 hands the drafter the metadata of the target's step for that pass; the drafter's own groups serve the others.
    """
    for groups in getattr(runner, "attn_groups", ()):
        for group in groups:
            for builder in group.metadata_builders:
                if hasattr(builder, "runs_first_pass"):
                    builder.runs_first_pass = True


def only_first_pass(runner: Any) -> str | None:
    """Say why a drafter has no pass but its first; ``None`` if it has more."""
    speculative = runner.vllm_config.speculative_config
    if getattr(speculative, "parallel_drafting", False):
        return "it drafts all of its tokens in one pass"
    if getattr(runner, "speculator", None) is not None and speculative.use_multi_module_mtp():
        return "each of its modules runs once a step, over the verified tokens"
    if speculative.num_speculative_tokens == 1:
        return "it drafts one token a step"
    return None


def draft_layer_names(runner: Any) -> set[str] | None:
    """Names of the draft's attention layers; ``None`` on a rank without a drafter, or for one without attention."""
    for holder, attribute in (
        ("drafter", "_draft_attn_layer_names"),
        ("speculator", "draft_attn_layer_names"),
    ):
        drafter = getattr(runner, holder, None)
        if drafter is not None:
            return getattr(drafter, attribute, None)
    return None


def why_not(layer: Any, vllm_config: Any) -> str | None:
    """Say why a layer cannot be windowed; ``None`` if it can."""
    impl = getattr(layer, "impl", None)
    if not hasattr(layer, "attn_backend"):
        return "it is not an attention layer with a backend"
    sliding = getattr(layer, "sliding_window", None)
    if sliding is not None and sliding != -1:
        return "it has a sliding window of its own"
    if getattr(impl, "alibi_slopes", None) is not None:
        return "it uses ALiBi, whose bias depends on the distance"
    if getattr(layer, "use_sparse", False) or getattr(layer, "indexer", None) is not None:
        return "it selects its keys by a sparse index"
    if "Chunked" in layer.attn_backend.__name__:
        return "it attends within chunks"
    if vllm_config.parallel_config.decode_context_parallel_size > 1:
        return "decode context parallelism spreads its keys over ranks"
    return None


def window_draft_layers(runner: Any, config: PluginConfig) -> None:
    """Give the draft's attention layers a windowed backend; layers that have one already are left alone.

    Raises
    ------
    PluginError
        If ``config.strict`` and nothing could be windowed on a rank that has the drafter.
    """
    from vllm.logger import init_logger

    logger = init_logger("vllm.windowed_mtp")
    speculative = runner.vllm_config.speculative_config
    names = draft_layer_names(runner)
    if speculative is not None and not names and _last_pipeline_rank(runner):
        _refuse(config, logger, f"the drafter ({speculative.method}) has no attention layers to window")
        return
    if speculative is None:
        _refuse(config, logger, "the engine has no speculative_config, so there is no draft to window")
        return
    alone = only_first_pass(runner) if names and not config.window_first_pass else None
    if alone is not None:
        raise PluginError(
            f'"window_first_pass" is false in additional_config["windowed_mtp"], but the drafter '
            f"({speculative.method}) has no other pass, as {alone}; leave it out to window that pass."
        )
    layers = runner.vllm_config.compilation_config.static_forward_context
    windowed, left = [], {}
    for name in sorted(names or ()):
        layer = layers[name]
        reason = why_not(layer, runner.vllm_config)
        if reason is not None:
            left[name] = reason
            continue
        if not layer.attn_backend.__name__.startswith("Windowed"):
            layer.attn_backend = windowed_backend(layer.attn_backend, config)
        windowed.append(name)
    for name, reason in left.items():
        logger.warning_once("Windowed MTP leaves %s alone: %s.", name, reason)
    if not windowed:
        if names:
            _refuse(config, logger, "none of the draft's layers can be windowed: " + "; ".join(set(left.values())))
        return
    window = config.window
    logger.info_once(
        "Windowed MTP: %d draft layer(s) with %s read the first %d and the last %d keys (each rounded up to the "
        "kernel's blocks)%s; %s.",
        len(windowed),
        layers[windowed[0]].attn_backend.get_name(),
        window.sink,
        window.window,
        f" from {window.min_context} tokens on" if window.min_context else "",
        "every pass" if config.window_first_pass else "every pass but the first",
    )


def _last_pipeline_rank(runner: Any) -> bool:
    from vllm.distributed.parallel_state import get_pp_group

    return bool(get_pp_group().is_last_rank)


def _refuse(config: PluginConfig, logger: Any, reason: str) -> None:
    message = f'the window cannot be put in force: {reason}; remove additional_config["windowed_mtp"]'
    if config.strict:
        raise PluginError(f'{message}, or set "strict": false in it to run without the window.')
    logger.warning_once("Windowed MTP is off: %s.", reason)
