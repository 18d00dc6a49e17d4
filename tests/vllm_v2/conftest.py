"""Tests in a running engine with vLLM's V2 model runner. They need a process of their own: pytest tests/vllm_v2."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

here = Path(__file__).parent
sys.path[:0] = [str(here), str(here.parent / "vllm")]

found = find_spec("vllm")
if found is not None and found.origin is not None and "VLLM_USE_V2_MODEL_RUNNER" not in os.environ:
    import interpreter

    interpreter.prepare()
