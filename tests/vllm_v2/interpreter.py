"""Lets vLLM's V2 model runner run on a CPU: its Triton kernels go through Triton's interpreter.

vLLM for CPUs accepts Triton only with a backend called ``cpu``, which the wheels do not have. The interpreter needs no
backend at all, so a name and a driver that calls itself active are enough.
"""

import os
from dataclasses import replace
from functools import cache
from inspect import getmembers
from typing import Any

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "TRITON_INTERPRET": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
}


class Driver:
    """A Triton driver that nothing is ever launched with."""

    @staticmethod
    def is_active() -> bool:
        return True


def prepare() -> None:
    """Set what vLLM and Triton read when they are imported; to be called before they are."""
    os.environ.update(SETTINGS)
    from triton.backends import Backend, backends

    backends.setdefault("cpu", Backend(compiler=None, driver=Driver))
    from triton.runtime import interpreter

    # Its own check of every sum and product takes a third of the time, and looking for what to patch a fifth.
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
    is_builtin = interpreter.tl.core.is_builtin

    @cache
    def builtins(package: Any) -> list[str]:
        return [name for name, member in getmembers(package) if is_builtin(member)]

    def patch(package: Any, builder: Any, scope: Any) -> None:
        for name in builtins(package):
            member = getattr(package, name)
            if is_builtin(member):
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = patch
