"""The vLLM plugin: a window for the draft's attention, switched on by ``additional_config``.

vLLM calls ``register`` in every process that it starts. Nothing is imported or changed there: a hook waits for vLLM to
import a model runner, and the runner is left as it is unless its engine was configured with a window.
"""

from __future__ import annotations

import sys
from types import ModuleType

from windowed_mtp.engines.vllm.symbols import V1, V2

RUNNERS = (V1, V2)
"""Modules with a ``GPUModelRunner``: V1's and V2's."""


def register() -> None:
    """Prepare this process; the entry point in ``vllm.general_plugins``."""
    from windowed_mtp.engines.vllm import worker_check
    from windowed_mtp.engines.vllm.imports import when_imported

    for module in RUNNERS:
        when_imported(module, _install)
    when_imported(worker_check.MODULE, worker_check.install)


def unregister() -> None:
    """Take everything off again that the plugin changed in vLLM's modules.

    Engines that have started keep what they started with; engines started later have no window.
    """
    from windowed_mtp.engines.vllm import worker_check
    from windowed_mtp.engines.vllm.imports import forget

    forget(worker_check.MODULE)
    if worker_check.MODULE in sys.modules:
        worker_check.uninstall(sys.modules[worker_check.MODULE])
    for name in RUNNERS:
        forget(name)
        if name in sys.modules:
            from windowed_mtp.engines.vllm.install import uninstall

            uninstall(sys.modules[name])
    if "windowed_mtp.engines.vllm.stat_logger" in sys.modules:
        from windowed_mtp.engines.vllm import steps

        steps.uninstall()


def _install(module: ModuleType) -> None:
    from windowed_mtp.engines.vllm.install import install

    install(module)
