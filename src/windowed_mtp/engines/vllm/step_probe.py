"""The worker's half of the step-cost measurement: each function is run in a worker, with the worker as its argument."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from windowed_mtp.engines.vllm.config import PluginConfig, PluginError
from windowed_mtp.window import SinkWindow

SHORT = 256
"""Tokens of a batch up to which it is run; longer ones are a prompt's, whose cached keys are random already."""


def start(worker: Any, random_cache: bool) -> dict[str, str]:
    """Put a probe on a worker's runner.

    Parameters
    ----------
    worker : Worker
        vLLM's worker.
    random_cache : bool
        Whether prompts are taken as computed: their keys are what `fill_cache` left in the cache.

    Returns
    -------
    dict of str to str
        What runs: the runner, the attention backends of target and draft, and the cache's size.
    """
    runner = worker.model_runner
    worker.step_probe = StepProbe(runner)
    if random_cache:
        _skip_prompts(runner)
        fill_cache(worker)
    return {"runner": type(runner).__module__, **_backends(runner)}


def fill_cache(worker: Any, seed: int = 0) -> None:
    """Fill every layer's cached keys, values and states with random numbers."""
    runner = worker.model_runner
    torch.manual_seed(seed)
    for layer in runner.vllm_config.compilation_config.static_forward_context.values():
        for cache in _tensors(getattr(layer, "kv_cache", None)):
            if cache.dtype.is_floating_point and cache.element_size() > 1:
                cache.normal_()
            else:
                cache.view(torch.uint8).random_(0, 64)  # finite in either fp8 type


def reset(worker: Any) -> None:
    """Forget the steps timed so far."""
    worker.step_probe.marks.clear()


def synchronize(worker: Any) -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def collect(worker: Any) -> dict[str, float | None]:
    """Read the medians of the steps timed since `reset`, and the device's state.

    Returns
    -------
    dict of str to float or None
        ``draft_ms``, ``verify_ms``, ``memory_bytes``, ``clock_mhz``, ``temperature_c``.
    """
    synchronize(worker)
    made = worker.step_probe.medians()
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        made |= {
            "memory_bytes": total - free,
            "clock_mhz": _or_none(torch.cuda.clock_rate),
            "temperature_c": _or_none(torch.cuda.temperature),
        }
    return made


def change(worker: Any, plugin: dict[str, Any] | None, attention: dict[str, Any]) -> dict[str, str]:
    """Give an idle V2 runner other plugin or attention settings: caches, attention groups and graphs are made anew.

    Parameters
    ----------
    worker : Worker
        vLLM's worker, without any request.
    plugin : dict or None
        ``additional_config["windowed_mtp"]``; ``None`` takes the window and the hot rows off.
    attention : dict
        Fields of vLLM's attention config.

    Returns
    -------
    dict of str to str
        The attention backends of target and draft.
    """
    if not hasattr(worker.model_runner, "speculator"):
        raise PluginError("only vLLM's V2 runner takes another arm while it runs; leave out --one-process.")
    from vllm.v1.worker.gpu import cudagraph_utils

    from windowed_mtp.engines.vllm.backend import base_backend
    from windowed_mtp.engines.vllm.hot_head import install_hot_head, remove_hot_head

    runner = worker.model_runner
    config, cache, blocks = runner.vllm_config, runner.kv_cache_config, runner.cache_config.num_gpu_blocks
    if plugin is None:
        config.additional_config.pop("windowed_mtp", None)
    else:
        config.additional_config["windowed_mtp"] = plugin
    for name, value in attention.items():
        if not hasattr(config.attention_config, name):
            raise PluginError(f"vLLM's attention config has no {name!r}; see vllm serve --help.")
        setattr(config.attention_config, name, value)
    synchronize(worker)
    for name in ("prefill_cudagraph_manager", "decode_cudagraph_manager", "cudagraph_manager"):
        if hasattr(runner.speculator, name):
            setattr(runner.speculator, name, None)
    for wrapper in (cudagraph_utils.CUDAGraphWrapper, cudagraph_utils.BreakableCUDAGraphWrapper):
        wrapper.clear_all_graphs()
    cudagraph_utils._teardown_profiling_state(runner)
    for layer in config.compilation_config.static_forward_context.values():
        if hasattr(layer, "attn_backend"):
            layer.attn_backend = base_backend(layer.attn_backend)
    remove_hot_head(runner)
    read = PluginConfig.read(config.additional_config)
    if read is not None and read.hot_vocabulary is not None:
        install_hot_head(runner, read.hot_vocabulary)
    model, forward = runner.model, runner.model.__dict__.pop("forward", None)  # graphs must capture the real one
    propose = None if runner.speculator is None else runner.speculator.__dict__.pop("propose", None)
    runner.initialize_kv_cache(cache)
    runner.cache_config.num_gpu_blocks = blocks
    if hasattr(runner, "kv_block_zeroer"):
        runner._init_kv_zero_meta()
    if not runner.model_config.enforce_eager:
        with worker._get_cudagraph_capture_context():
            runner.capture_model()
    if forward is not None:
        model.forward = forward
    if propose is not None:
        runner.speculator.propose = propose
    fill_cache(worker)
    return _backends(runner)


def set_window(worker: Any, window: SinkWindow) -> None:
    """Put another window in force in a V2 runner that has one, captured graphs included."""
    runner = worker.model_runner
    for owner in (runner, runner.speculator):
        for groups in owner.attn_groups:
            for group in groups:
                for builder in group.metadata_builders:
                    if hasattr(builder, "windowing"):
                        builder.windowing.window = window


class StepProbe:
    """Marks on the device's clock at the start of each step, around the draft, and at the end.

    Parameters
    ----------
    runner : GPUModelRunner
        V1's or V2's.
    """

    def __init__(self, runner: Any) -> None:
        self.marks: list[dict[str, Any]] = []
        from windowed_mtp.engines.vllm.hot_head import drafter_of

        drafter = drafter_of(runner)
        self._around(runner, "execute_model", before="begin", opens=True)
        self._around(runner, "sample_tokens", after="end")
        if drafter is not None and hasattr(drafter, "propose"):
            self._around(drafter, "propose", before="draft", after="drafted")

    def _around(
        self, owner: Any, name: str, before: str | None = None, after: str | None = None, opens: bool = False
    ) -> None:
        original = getattr(owner, name)

        def marked(*args: Any, **kwargs: Any) -> Any:
            if opens:
                self.marks.append({})
            if before is not None:
                self._mark(before)
            made = original(*args, **kwargs)
            if after is not None:
                self._mark(after)
            return made

        setattr(owner, name, marked)

    def _mark(self, name: str) -> None:
        if not self.marks:
            return
        if torch.cuda.is_available():
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks[-1][name] = event
        else:
            self.marks[-1][name] = time.perf_counter()

    def medians(self) -> dict[str, float | None]:
        """Median milliseconds of the draft, and of everything before it in a step."""
        whole = [marks for marks in self.marks if "end" in marks]
        drafts = [_between(marks, "draft", "drafted") for marks in whole if "drafted" in marks]
        verifies = [_between(marks, "begin", "draft" if "draft" in marks else "end") for marks in whole]
        return {
            "draft_ms": statistics.median(drafts) if drafts else None,
            "verify_ms": statistics.median(verifies) if verifies else None,
        }


def _between(marks: dict[str, Any], first: str, last: str) -> float:
    start, end = marks[first], marks[last]
    return float((end - start) * 1e3 if isinstance(start, float) else start.elapsed_time(end))


def _skip_prompts(runner: Any) -> None:
    """Let long batches cost nothing: the target gives zeros for them, and the drafter proposes what they refuse.

    So sequences that wait for the prompts of others grow by one token a step only.
    """
    model, drafter = runner.model, getattr(runner, "speculator", None)
    forward = model.forward
    hidden, dtype = runner.model_config.get_hidden_size(), runner.model_config.dtype

    def short_forward(*args: Any, **kwargs: Any) -> Any:
        inputs = next(each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor))
        if inputs.shape[0] <= SHORT:
            return forward(*args, **kwargs)
        return torch.zeros(inputs.shape[0], hidden, dtype=dtype, device=inputs.device)

    model.forward = short_forward
    if drafter is None:
        return
    propose = drafter.propose

    def short_propose(input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        if input_batch.num_tokens <= SHORT:
            return propose(input_batch, *args, **kwargs)
        return drafter.draft_tokens[: input_batch.num_reqs].fill_(1)

    drafter.propose = short_propose


def _backends(runner: Any) -> dict[str, str]:
    from windowed_mtp.engines.vllm.install import draft_layer_names

    names: dict[str, set[str]] = {"target_attention": set(), "draft_attention": set()}
    draft = draft_layer_names(runner) or set()
    for name, layer in runner.vllm_config.compilation_config.static_forward_context.items():
        if hasattr(layer, "attn_backend"):
            key = "draft_attention" if name in draft else "target_attention"
            names[key].add(layer.attn_backend.__name__)
    return {key: ", ".join(sorted(found)) for key, found in names.items() if found}


def _tensors(cache: Any) -> list[torch.Tensor]:
    if isinstance(cache, torch.Tensor):
        return [cache]
    return [each for one in cache for each in _tensors(one)] if isinstance(cache, (list, tuple)) else []


def _or_none(read: Callable[[], float]) -> float | None:
    try:
        return float(read())
    except (RuntimeError, ModuleNotFoundError, OSError):
        return None
