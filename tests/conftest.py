"""One thread a process: tiny models are dominated by overhead, and tests run in parallel processes."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("ci", derandomize=True, deadline=None)
settings.load_profile("ci")
