"""vLLM's sleep mode on a CPU: its own worker and backend, over an allocator whose memory holds nothing after a nap."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from vllm import LLM, device_allocator
from vllm.v1.worker.gpu_worker import Worker


class Allocator:
    """Stands in for vLLM's ``CuMemAllocator``: what it handed out is scribbled over in a sleep, or kept and put back.

    It has handed out the tensors of target, draft and hot rows, all in the pool of the weights, as ``load_model`` makes
    them. The draft's own parameters are not among them, as with ``sleep_preserve_parameter_names=["draft.*"]``, by
    which vLLM keeps parameters of GPUs only; nor are the packed copies that it makes of a CPU's weights, which it does
    not make anew when it reloads them.
    """

    def __init__(self, runner: Any) -> None:
        target, draft = runner.get_model(), runner.get_draft_model()
        rows = {id(each): each for logits in runner.windowed_mtp_hot_logits for each in logits.rows.values()}
        hot = [each for row in rows.values() for each in vars(row).values() if isinstance(each, torch.Tensor)]
        self.tensors = [*target.parameters(), *target.buffers(), *draft.buffers(), *hot]
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def sleep(self, offload_tags: tuple[str, ...]) -> None:
        self.kept = [(each, each.data.clone()) for each in self.tensors] if "weights" in offload_tags else []
        for each in self.tensors:  # as ``data``, since torch would count another write
            each.data.fill_(float("nan") if each.is_floating_point() else torch.iinfo(each.dtype).max // 2)

    def wake_up(self, tags: list[str] | None = None) -> None:
        for tensor, contents in self.kept:
            tensor.data.copy_(contents)
        self.kept = []


@contextmanager
def sleeping(llm: LLM, level: int) -> Iterator[None]:
    """Put an engine to sleep as vLLM's worker for GPUs does, and wake it up again."""
    worker = llm.llm_engine.model_executor.driver_worker.worker
    allocator, memory = Allocator(worker.model_runner), (0, 0)
    with (
        patch.object(device_allocator, "get_mem_allocator_instance", lambda: allocator),
        patch("torch.accelerator.synchronize"),
        patch("torch.accelerator.get_memory_info", lambda: memory),
        patch.object(worker, "synchronize_device", lambda: None),
    ):
        Worker.sleep(worker, level)
        yield
        Worker.wake_up(worker)
