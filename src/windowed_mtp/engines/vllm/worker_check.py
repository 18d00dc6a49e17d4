"""Sees to it that a configured window is not passed over by a worker whose runner is not vLLM's own."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from windowed_mtp.engines.vllm.config import PluginConfig, PluginError

MODULE = "vllm.v1.worker.worker_base"
"""Where the wrapper lives that every worker of vLLM runs in, on any platform."""
REACHED = "windowed_mtp_reached"
"""Set on a runner once the plugin has seen it make its cache."""
_ORIGINAL = "_windowed_mtp_original"


def install(module: ModuleType) -> None:
    """Look at each worker's runner once its cache is made.

    Parameters
    ----------
    module : ModuleType
        vLLM's module of the worker's wrapper; one without it is left as it is.
    """
    wrapper = getattr(module, "WorkerWrapperBase", None)
    original = getattr(wrapper, "initialize_from_config", None)
    if wrapper is None or original is None or hasattr(original, _ORIGINAL):
        return

    @functools.wraps(original)
    def initialize_from_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(self, *args, **kwargs)
        config = PluginConfig.read(self.vllm_config.additional_config)
        if config is not None:
            check_reached(getattr(self.worker, "model_runner", None), config)
        return made

    setattr(initialize_from_config, _ORIGINAL, original)
    wrapper.initialize_from_config = initialize_from_config


def uninstall(module: ModuleType) -> None:
    """Take off what `install` put on."""
    wrapper = getattr(module, "WorkerWrapperBase", None)
    original = getattr(getattr(wrapper, "initialize_from_config", None), _ORIGINAL, None)
    if wrapper is not None and original is not None:
        wrapper.initialize_from_config = original


def check_reached(runner: Any, config: PluginConfig) -> None:
    """Stop or warn where a runner made its cache without the plugin.

    Raises
    ------
    PluginError
        If the settings are strict.
    """
    if getattr(runner, REACHED, False):
        return
    name = "this worker has no model runner" if runner is None else f"{_name(runner)} makes its cache in its own way"
    reason = f"{name}, without vLLM's GPUModelRunner.initialize_kv_cache, which the window rests on"
    if config.strict:
        raise PluginError(
            f'the window cannot be put in force: {reason}; remove additional_config["windowed_mtp"], or set "strict": '
            "false in it to run without the window."
        )
    from vllm.logger import init_logger

    init_logger("vllm.windowed_mtp").warning("Windowed MTP is off: %s.", reason)


def _name(runner: Any) -> str:
    return f"{type(runner).__module__}.{type(runner).__qualname__}"
