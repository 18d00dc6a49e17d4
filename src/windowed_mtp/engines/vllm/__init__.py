"""The vLLM plugin: a window for the draft's attention, switched on by ``additional_config``.

vLLM calls ``register`` in every process that it starts. Nothing is imported or changed there: a hook waits for vLLM to
import a model runner, and the runner is left as it is unless its engine was configured with a window.
"""

from __future__ import annotations

from types import ModuleType

RUNNERS = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner")
"""Modules with a ``GPUModelRunner``: V1's and V2's."""


def register() -> None:
    """Prepare this process; the entry point in ``vllm.general_plugins``."""
    from windowed_mtp.engines.vllm.imports import when_imported

    for module in RUNNERS:
        when_imported(module, _install)


def _install(module: ModuleType) -> None:
    from windowed_mtp.engines.vllm.install import install

    install(module)
