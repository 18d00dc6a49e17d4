"""Puts the window in force at the top of ``initialize_kv_cache``, hot rows after ``load_model``; on the draft only."""

from __future__ import annotations

import functools
import multiprocessing
from collections import Counter
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

from windowed_mtp.engines.vllm.backend import is_windowed, windowed_backend
from windowed_mtp.engines.vllm.config import PluginConfig, PluginError
from windowed_mtp.engines.vllm.drafters import (
    context_parallel,
    first_pass_needed,
    nothing_to_window,
    reads_runners_metadata,
)
from windowed_mtp.engines.vllm.self_check import check_builders
from windowed_mtp.engines.vllm.summary import Drafting, LayerGroup, describe
from windowed_mtp.engines.vllm.symbols import missing, not_run, unknown_version
from windowed_mtp.engines.vllm.worker_check import REACHED

_ORIGINAL = "_windowed_mtp_original"
_SAID = "_windowed_mtp_said"
_ONE_ENGINE = ("EngineCore", "VllmWorker")
"""How the names begin that vLLM gives to its processes; each of them runs one engine in its life."""


def install(module: ModuleType) -> None:
    """Wrap a runner's ``initialize_kv_cache`` and ``load_model``.

    Where no window is configured the wrapper only calls what it wraps. In a process that vLLM started for one engine
    it takes itself off then; a process of the user's may start another engine, with a window.

    Parameters
    ----------
    module : ModuleType
        A module with a ``GPUModelRunner``. If vLLM's has none, or the method is not there, an engine that is
        configured with a window is refused as soon as its runner is made, and others are left alone.
    """
    runner_class = getattr(module, "GPUModelRunner", None)
    original = getattr(runner_class, "initialize_kv_cache", None)
    if runner_class is None or original is None:
        _refuse_later(module, runner_class)
        return
    if hasattr(original, _ORIGINAL):
        return

    @functools.wraps(original)
    def initialize_kv_cache(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = PluginConfig.read(self.vllm_config.additional_config)
        if config is None:
            if multiprocessing.current_process().name.startswith(_ONE_ENGINE):
                uninstall(module)
            return original(self, *args, **kwargs)
        setattr(self, REACHED, True)
        windowed = []
        if _known(self, module.__name__, config):
            windowed = window_draft_layers(self, config)
            _use_hot_rows(self, config)  # a runner for other hardware may have a load_model of its own
        made = original(self, *args, **kwargs)
        if windowed:
            assign_passes(self)
            check_builders(
                windowed_builders(self),
                self.vllm_config.model_config.max_model_len,
                self.vllm_config.speculative_config.num_speculative_tokens + 1,
            )
            say_what_is_in_force(self, config, windowed)
        return made

    setattr(initialize_kv_cache, _ORIGINAL, original)
    runner_class.initialize_kv_cache = initialize_kv_cache
    if hasattr(runner_class, "load_model"):
        _wrap_load_model(runner_class, module.__name__)


def _wrap_load_model(runner_class: Any, runner_module: str) -> None:
    original = runner_class.load_model

    @functools.wraps(original)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = PluginConfig.read(self.vllm_config.additional_config)
        if config is None or config.hot_vocabulary is None:
            return original(self, *args, **kwargs)
        from windowed_mtp.engines.vllm.hot_head import install_hot_head, remove_hot_head

        remove_hot_head(self)  # where weights are loaded another time, vLLM must find its own
        made = original(self, *args, **kwargs)
        if _known(self, runner_module, config):
            install_hot_head(self, config.hot_vocabulary)
        return made

    setattr(load_model, _ORIGINAL, original)
    runner_class.load_model = load_model


def _use_hot_rows(runner: Any, config: PluginConfig) -> None:
    """Give the draft its hot rows: after loading, so that vLLM counts their memory when it sizes the cache."""
    if config.hot_vocabulary is not None:
        from windowed_mtp.engines.vllm.hot_head import install_hot_head

        install_hot_head(runner, config.hot_vocabulary)


def uninstall(module: ModuleType) -> None:
    """Give a runner its own methods back."""
    runner_class = getattr(module, "GPUModelRunner", None)
    for name in ("initialize_kv_cache", "load_model", "__init__"):
        original = getattr(getattr(runner_class, name, None), _ORIGINAL, None)
        if original is not None:
            setattr(runner_class, name, original)


def _refuse_later(module: ModuleType, runner_class: Any) -> None:
    """Let a configured engine hear that the seam is not there; without a class, all that is left is to warn."""
    reason = f"{_version()} has no {module.__name__}.GPUModelRunner"
    if runner_class is None:
        _logger().warning("Windowed MTP cannot put any window in force: %s.", reason)
        return
    original = runner_class.__init__
    if hasattr(original, _ORIGINAL):
        return

    @functools.wraps(original)
    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        config = PluginConfig.read(vllm_config.additional_config)
        if config is not None:
            _refuse(self, config, f"{reason}.initialize_kv_cache")
        original(self, vllm_config, *args, **kwargs)

    setattr(__init__, _ORIGINAL, original)
    runner_class.__init__ = __init__


def _known(runner: Any, runner_module: str, config: PluginConfig) -> bool:
    """Whether this vLLM is one that the window may be put into; checked before anything is changed."""
    import vllm

    unknown = unknown_version(vllm.__version__)
    lacking = missing(runner_module, vllm.__version__)
    if lacking is not None:
        _refuse(runner, config, f"{_version()} has no {lacking}, which the window rests on")
    elif unknown is not None:
        _refuse(runner, config, f"{unknown}; install one of these, or a newer windowed-mtp")
    return unknown is None and lacking is None


def _version() -> str:
    import vllm

    return f"vLLM {vllm.__version__}"


def not_run_here(runner: Any) -> str | None:
    """Say that the plugin was never run with this vLLM, runner and device; ``None`` if it was."""
    import vllm
    from vllm.platforms import current_platform

    which = "V2" if _is_v2(runner) else "V1"
    return not_run(vllm.__version__, which, current_platform.device_type.upper())


def assign_passes(runner: Any) -> None:
    """Tell the builders in the runner's own groups what they serve.

    V2 hands most drafters the metadata of the target's step for their first pass; the drafter's own groups serve the
    others. V1's drafter, and some of V2's, have groups of their own for every pass: what the runner would build is
    used by nobody.
    """
    used = _is_v2(runner) and reads_runners_metadata(runner.speculator)
    for builder in _windowed(getattr(runner, "attn_groups", ())):
        builder.runs_first_pass, builder.unused = used, not used


def windowed_builders(runner: Any) -> list[Any]:
    """Every windowed metadata builder of a runner and of its drafter, V1's or V2's."""
    drafters = [getattr(runner, name, None) for name in ("drafter", "speculator")]
    flat = [[group] for drafter in drafters for group in getattr(drafter, "draft_attn_groups", ())]  # V1's
    grouped = [groups for holder in (runner, *drafters) for groups in getattr(holder, "attn_groups", ())]
    return _windowed([*grouped, *flat])


def _windowed(groups: Iterable[Iterable[Any]]) -> list[Any]:
    builders = [builder for each in groups for group in each for builder in group.metadata_builders]
    return [builder for builder in builders if hasattr(builder, "windowing")]


def _is_v2(runner: Any) -> bool:
    return hasattr(runner, "speculator")


def _groups(runner: Any) -> Iterator[Any]:
    for groups in getattr(runner, "attn_groups", ()):
        yield from groups


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
    if getattr(getattr(vllm_config, "model_config", None), "rswa_window", None) is not None:
        return "its reference sliding window (R-SWA) counts positions from the start of the sequence"
    return context_parallel(vllm_config)


def window_draft_layers(runner: Any, config: PluginConfig) -> list[str]:
    """Give the draft's attention layers a windowed backend; layers that have one already are left alone.

    Returns
    -------
    list of str
        Names of the windowed layers.

    Raises
    ------
    PluginError
        If ``config.strict`` and nothing could be windowed on a rank that has the drafter.
    """
    speculative = runner.vllm_config.speculative_config
    names = draft_layer_names(runner)
    nothing = None if speculative is None else nothing_to_window(speculative.method)
    if nothing is not None:
        _refuse(runner, config, nothing)
        return []
    if speculative is not None and not names and _last_pipeline_rank():
        _refuse(runner, config, f"the drafter ({speculative.method}) has no attention layers to window")
        return []
    if speculative is None:
        _refuse(runner, config, "the engine has no speculative_config, so there is no draft to window")
        return []
    alone = first_pass_needed(speculative, _is_v2(runner)) if names and not config.window_first_pass else None
    if alone is not None:
        raise PluginError(f"{alone}; leave it out to window that pass.")
    layers = runner.vllm_config.compilation_config.static_forward_context
    backends, left = {}, {}
    for name in sorted(names or ()):
        reason = why_not(layers[name], runner.vllm_config)
        if reason is not None:
            left[name] = reason
            continue
        backend = layers[name].attn_backend
        # V1 never replays full graphs of its draft.
        backends[name] = backend if is_windowed(backend) else windowed_backend(backend, config, _is_v2(runner))
    for name, backend in backends.items():
        layers[name].attn_backend = backend
    for name, reason in left.items():
        _say(runner, "warning", f"Windowed MTP leaves {name} alone: {reason}.")
    if names and not backends:
        _refuse(runner, config, "none of the draft's layers can be windowed: " + "; ".join(sorted(set(left.values()))))
    return list(backends)


def say_what_is_in_force(runner: Any, config: PluginConfig, windowed: list[str]) -> None:
    """Log one line for the groups that vLLM made of the windowed layers.

    Raises
    ------
    PluginError
        If vLLM put a windowed layer in no group with a windowed builder: it would run without its window, unsaid.
    """
    found: Counter[tuple[str, int]] = Counter()
    covered: set[str] = set()
    for group in _groups(runner):
        builders = [builder for builder in group.metadata_builders if hasattr(builder, "windowing")]
        if is_windowed(group.backend) and builders:
            covered |= set(group.layer_names)
            found[group.backend.get_name(), builders[0].windowing.block_size] += len(group.layer_names)
    lost = sorted(set(windowed) - covered)
    if lost:
        raise PluginError(
            f"{_version()} gave {lost[0]} no attention metadata of its own, so its window is not in force; please "
            'report it, and remove additional_config["windowed_mtp"] until then.'
        )
    speculative = runner.vllm_config.speculative_config
    drafting = Drafting(
        speculative.num_speculative_tokens,
        one_pass=bool(getattr(speculative, "parallel_drafting", False)),
        window_first_pass=config.window_first_pass,
    )
    groups = [LayerGroup(layers, backend, block) for (backend, block), layers in sorted(found.items())]
    text = describe(config.window, drafting, groups, runner.vllm_config.model_config.max_model_len)
    _say(runner, "info", f"Windowed MTP is in force: {text}")
    untried = not_run_here(runner)
    if untried is not None:
        _say(runner, "warning", f"Windowed MTP: {untried}.")


def _last_pipeline_rank() -> bool:
    from vllm.distributed.parallel_state import get_pp_group

    return bool(get_pp_group().is_last_rank)


def _first_tensor_rank() -> bool:
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank, model_parallel_is_initialized

    return not model_parallel_is_initialized() or get_tensor_model_parallel_rank() == 0


def _logger() -> Any:
    from vllm.logger import init_logger

    return init_logger("vllm.windowed_mtp")


def _say(runner: Any, level: str, text: str) -> None:
    """Log a line once a runner, from the first tensor-parallel rank of the stage that has the drafter."""
    said = runner.__dict__.setdefault(_SAID, set())
    if text not in said and _first_tensor_rank():
        getattr(_logger(), level)("%s", text)
    said.add(text)


def _refuse(runner: Any, config: PluginConfig, reason: str) -> None:
    message = f'the window cannot be put in force: {reason}; remove additional_config["windowed_mtp"]'
    if config.strict:
        raise PluginError(f'{message}, or set "strict": false in it to run without the window.')
    _say(runner, "warning", f"Windowed MTP is off: {reason}.")
