"""Tests in a running vLLM engine on a CPU. What vLLM reads from the environment is set before it is imported."""

import os
import sys
from pathlib import Path

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}
for name, value in SETTINGS.items():
    os.environ.setdefault(name, value)

sys.path.insert(0, str(Path(__file__).parent))
