"""The window on metadata that vLLM's own code makes, without an engine; in a process of its own."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

here = Path(__file__).parent
sys.path[:0] = [str(here), str(here.parent / "vllm_v2"), str(here.parent / "vllm")]

if find_spec("vllm") is not None and os.environ.get("VLLM_USE_V2_MODEL_RUNNER") != "0":
    import interpreter

    interpreter.prepare()
