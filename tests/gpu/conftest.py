"""What these tests share with the suites of vLLM lies beside them."""

import os
import sys
from pathlib import Path

import torch

here = Path(__file__).parent
sys.path[:0] = [str(here), str(here.parent / "vllm"), str(here.parent / "vllm_v2")]
if torch.cuda.is_available():
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
