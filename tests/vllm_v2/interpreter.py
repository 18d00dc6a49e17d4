"""Lets vLLM's V2 model runner run on a CPU: its Triton kernels go through Triton's interpreter.

vLLM for CPUs accepts Triton only with a backend called ``cpu``, which the wheels do not have. The interpreter needs no
backend at all, so a name and a driver that calls itself active are enough.
"""

import os

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
