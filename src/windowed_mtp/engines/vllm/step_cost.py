"""The cost of a decode step in a vLLM engine, at any context, with weights and cached keys that may be random."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from windowed_mtp.cost.record import CacheFill, Rates, StepLog, StepPoint, StepRow, StepRun
from windowed_mtp.engines.vllm import step_probe, step_profile
from windowed_mtp.engines.vllm.step_profile import KernelRow, StepProfile
from windowed_mtp.results import Provenance, Setting
from windowed_mtp.window import SinkWindow

PARTS, STEPS, WARM_UP, PROFILED = 5, 30, 10, 10


_WINDOW = ("sink", "window", "min_context")
_ROOM = "widest_window"


@dataclass(frozen=True)
class Arm:
    """One way to run the engine.

    Attributes
    ----------
    name : str
        ``"none"``, ``"native"``, ``"windowed"``, or any other name.
    plugin : dict or None
        ``additional_config["windowed_mtp"]``; ``None`` without the plugin.
    attention : dict
        Fields of vLLM's attention config that differ from its defaults.
    """

    name: str
    plugin: dict[str, Any] | None = None
    attention: dict[str, Any] = field(default_factory=dict)

    @property
    def window(self) -> SinkWindow | None:
        """The window; ``None`` without the plugin."""
        if self.plugin is None:
            return None
        return SinkWindow(**{name: self.plugin[name] for name in _WINDOW if name in self.plugin})

    def differs_only_in_window(self, other: Arm) -> bool:
        """Whether a running engine with the other arm needs only another window to become this one."""
        if self.plugin is None or other.plugin is None or self.attention != other.attention:
            return False
        mine, theirs = ({k: v for k, v in plugin.items() if k not in _WINDOW} for plugin in (self.plugin, other.plugin))
        return mine == theirs

    def with_room(self, widest: int) -> Arm:
        """Give the arm with room for windows of up to ``widest`` in its captured graphs."""
        return self if self.plugin is None else replace(self, plugin={**self.plugin, _ROOM: widest})

    @property
    def settings(self) -> dict[str, Setting]:
        """Everything that differs from an engine as it comes, but the window's three numbers and the room for it."""
        made: dict[str, Setting] = {f"attention_config.{name}": value for name, value in self.attention.items()}
        for name, value in (self.plugin or {}).items():
            if name == "hot_vocabulary":
                made["hot_vocabulary.size"] = value["size"]
            elif name not in (*_WINDOW, _ROOM):
                made[name] = value
        return made


@dataclass(frozen=True)
class Engine:
    """What all arms of one process share.

    Attributes
    ----------
    model : str
        Folder of a geometry, or of a checkpoint.
    geometry : str
        Its name in the record.
    gamma : int
        Draft tokens a step; 0 without speculation.
    batch : int
        Sequences decoded together.
    max_context : int
        Largest context, in tokens.
    kv_dtype : str
        ``"bf16"`` or ``"fp8"``.
    tensor_parallel : int
        Devices that share each layer.
    random_weights : bool
        Whether weights and cached keys are random instead of loaded and computed.
    prompt_chunk : int
        Tokens of a prompt that a step takes.
    cache_bytes : int or None
        Bytes of the KV cache on a device; by vLLM's own measure if ``None``.
    options : dict
        Other arguments of ``vllm.LLM``.
    """

    model: str
    geometry: str
    gamma: int
    batch: int
    max_context: int
    kv_dtype: str = "bf16"
    tensor_parallel: int = 1
    random_weights: bool = True
    prompt_chunk: int = 8192
    cache_bytes: int | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def arguments(self, arm: Arm) -> dict[str, Any]:
        """Arguments of ``vllm.LLM`` for an arm."""
        drafted = self.batch * (self.gamma + 1)
        budget = max(self.prompt_chunk, 2 * drafted)
        # While the prompts of others are read, a sequence grows by a token a step.
        waiting = self.batch * math.ceil(self.max_context / (budget - drafted))
        room = (PARTS * STEPS + 4 * WARM_UP) * (self.gamma + 1) + waiting + 64
        made: dict[str, Any] = {
            "model": self.model,
            "max_model_len": self.max_context + room,
            "max_num_seqs": self.batch,
            "max_num_batched_tokens": budget,
            "tensor_parallel_size": self.tensor_parallel,
            "enable_prefix_caching": False,
            "kernel_config": {
                "enable_flashinfer_autotune": False,
                "enable_cutedsl_warmup": False,
                "enable_jit_warmup": False,
            },
        }
        if self.random_weights:
            made |= {"load_format": "dummy", "skip_tokenizer_init": True}
        if self.kv_dtype != "bf16":
            made["kv_cache_dtype"] = self.kv_dtype
        if self.cache_bytes is not None:
            made["kv_cache_memory_bytes"] = self.cache_bytes
        if self.gamma:
            made["speculative_config"] = {"method": "mtp", "num_speculative_tokens": self.gamma}
        if arm.attention:
            made["attention_config"] = dict(arm.attention)
        if arm.plugin is not None:
            made["additional_config"] = {"windowed_mtp": arm.plugin}
        return made | self.options


def measure(
    engine: Engine,
    arms: Sequence[Arm],
    contexts: Sequence[int],
    repeats: Sequence[int],
    path: str | os.PathLike[str],
    *,
    machine: str,
    deadline: float = float("inf"),
    profiles: str | os.PathLike[str] | None = None,
    say: Callable[[str], None] = print,
) -> int:
    """Start one engine and measure arms at contexts, alternating the arms; rows that the record has are left out.

    Arms after the first are put into the running engine: caches, attention groups and CUDA graphs are made anew for
    each, weights and compiled code stay. That needs vLLM's V2 runner.

    Parameters
    ----------
    engine : Engine
        What the arms share.
    arms : sequence of Arm
        The arms, in the order in which a round runs them.
    contexts : sequence of int
        Tokens in the cache.
    repeats : sequence of int
        Numbers of the rounds.
    path : str or os.PathLike
        The record.
    machine : str
        The machine in words.
    deadline : float
        Time (of ``time.monotonic``) after which nothing more is begun.
    profiles : str or os.PathLike, optional
        A folder to save a profile of each arm at the largest context in.
    say : callable
        Is given a line of progress at a time.

    Returns
    -------
    int
        Number of rows added.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    from windowed_mtp.engines.vllm import register

    fill: CacheFill = "random keys" if engine.random_weights else "real prefill"
    rates = measure_rates()
    register()
    widest = max((arm.window.window for arm in arms if arm.window is not None), default=0)
    arms = [arm.with_room(widest) for arm in arms]
    began = time.monotonic()
    llm = LLM(**engine.arguments(arms[0]))
    facts = llm.collective_rpc(step_probe.start, args=(engine.random_weights,))[0]
    say(f"engine started in {time.monotonic() - began:.0f} s: {facts}")
    log = StepLog(path, _run(machine, rates, facts))
    current, added = arms[0], 0
    for repeat in repeats:
        for arm in arms:
            points = [(context, _point(engine, arm, context, fill)) for context in contexts]
            missing = [(context, point) for context, point in points if not log.has(point, repeat)]
            if not missing or time.monotonic() > deadline:
                continue
            if arm != current:
                began = time.monotonic()
                if arm.differs_only_in_window(current):
                    llm.collective_rpc(step_probe.set_window, args=(arm.window,))
                else:
                    facts = llm.collective_rpc(step_probe.change, args=(arm.plugin, _attention(arm, arms)))[0]
                current = arm
                say(f"changed to {arm.name} in {time.monotonic() - began:.0f} s: {facts}")
            for context, point in missing:
                if time.monotonic() > deadline:
                    break
                row = _measure(llm, engine, point, context, repeat)
                log.append(row)
                added += 1
                say(
                    f"{arm.name} {context}: {row.step_ms:.3f} ms a step, draft {row.draft_ms or 0:.3f}, "
                    f"verify {row.verify_ms or 0:.3f}, parts {', '.join(f'{part:.3f}' for part in row.step_ms_parts)}"
                )
            target = Path(profiles) / f"{engine.geometry}-{arm.name}-{max(contexts)}.json" if profiles else None
            if target is not None and not target.exists() and time.monotonic() < deadline:
                _profile(llm, engine, arm, max(contexts), target)
    return added


def measure_rates() -> Rates | None:
    """Copy bandwidth and matrix rates of the device, fp8 where it has it; ``None`` without one."""
    import torch

    if not torch.cuda.is_available():
        return None
    size, n = 4 << 30, 8192
    source = torch.empty(size, dtype=torch.uint8, device="cuda").random_()
    copying = _seconds(torch.empty_like(source).copy_, source)
    matrix = torch.randn(n, n, dtype=torch.bfloat16, device="cuda")
    multiplying = {"bf16": _seconds(torch.matmul, matrix, torch.randn_like(matrix))}
    if torch.cuda.get_device_capability() >= (8, 9):
        with suppress(RuntimeError, ValueError):
            multiplying["fp8"] = _seconds(fp8_product, matrix.to(torch.float8_e4m3fn), torch.ones((), device="cuda"))
    del source, matrix
    torch.cuda.empty_cache()
    rates = {name: 2 * n**3 / seconds for name, seconds in multiplying.items()}
    return Rates(copy_bytes_per_s=2 * size / copying, matrix_ops_per_s=rates)


def fp8_product(matrix: Any, scale: Any) -> Any:
    """Multiply a matrix of fp8 (e4m3) by its transpose, with one scale a tensor, into bf16."""
    import torch

    return torch._scaled_mm(matrix, matrix.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)


def _seconds(call: Callable[..., Any], *inputs: Any, repeats: int = 10) -> float:
    import torch

    times = []
    for _ in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call(*inputs)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times[3:])


def _point(engine: Engine, arm: Arm, context: int, fill: CacheFill) -> StepPoint:
    window = arm.window
    return StepPoint(
        geometry=engine.geometry,
        arm=arm.name,
        context=context,
        gamma=engine.gamma,
        batch=engine.batch,
        kv_dtype=engine.kv_dtype,
        sink=None if window is None else window.sink,
        window=None if window is None else window.window,
        min_context=None if window is None else window.min_context,
        tensor_parallel=engine.tensor_parallel,
        settings=arm.settings,
        cache_fill=fill,
    )


def _attention(arm: Arm, arms: Sequence[Arm]) -> dict[str, Any]:
    """Complete an arm's attention settings by vLLM's defaults for those that only other arms have."""
    from vllm.config.attention import AttentionConfig

    defaults = AttentionConfig()
    return {name: arm.attention.get(name, getattr(defaults, name)) for other in arms for name in other.attention}


@contextmanager
def _decoding(llm: Any, engine: Engine, context: int) -> Iterator[Callable[[], int]]:
    """Bring a batch to a context and warm it up; gives a callable that runs a step and counts all tokens emitted."""
    from vllm import SamplingParams, TokensPrompt

    core = llm.llm_engine
    vocabulary = core.model_config.get_vocab_size()
    names = [f"{context}-{row}-{time.monotonic_ns()}" for row in range(engine.batch)]
    sampling = SamplingParams(temperature=0, max_tokens=engine.max_context, ignore_eos=True, detokenize=False)
    for row, name in enumerate(names):
        ids = [(7919 * (index + 1) + 104_729 * row) % (vocabulary - 1) + 1 for index in range(context)]
        core.add_request(name, TokensPrompt(prompt_token_ids=ids), sampling)
    emitted: dict[str, int] = {}

    def step() -> int:
        for output in core.step():
            emitted[output.request_id] = len(output.outputs[0].token_ids)
        return sum(emitted.values())

    try:
        while len(emitted) < len(names):
            step()
        for _ in range(WARM_UP):
            step()
        llm.collective_rpc(step_probe.synchronize)
        yield step
    finally:
        core.abort_request(names)
        while core.has_unfinished_requests():
            core.step()


def _measure(llm: Any, engine: Engine, point: StepPoint, context: int, repeat: int) -> StepRow:
    with _decoding(llm, engine, context) as step:
        llm.collective_rpc(step_probe.reset)
        before, tokens, parts = step(), 0, []
        for _ in range(PARTS):
            llm.collective_rpc(step_probe.synchronize)
            began = time.perf_counter()
            for _ in range(STEPS):
                tokens = step()
            llm.collective_rpc(step_probe.synchronize)
            parts.append((time.perf_counter() - began) * 1e3 / STEPS)
        facts = llm.collective_rpc(step_probe.collect)[0]
    return StepRow(
        point=point,
        repeat=repeat,
        steps=PARTS * STEPS,
        step_ms=statistics.median(parts),
        step_ms_parts=tuple(parts),
        acceptance_length=None
        if engine.random_weights
        else max(1.0, (tokens - before) / (PARTS * STEPS * engine.batch)),
        date=datetime.now(UTC),
        **facts,
    )


def _profile(llm: Any, engine: Engine, arm: Arm, context: int, path: Path) -> None:
    with _decoding(llm, engine, context) as step:
        llm.collective_rpc(step_profile.begin)
        for _ in range(PROFILED):
            step()
        llm.collective_rpc(step_probe.synchronize)
        rows = llm.collective_rpc(step_profile.end, args=(PROFILED,))[0]
    settings: dict[str, Setting] = {"arm": arm.name, "context": context, "gamma": engine.gamma, "batch": engine.batch}
    StepProfile(
        provenance=Provenance.collect(_device(), seed=0),
        settings=settings | arm.settings,
        rows=tuple(KernelRow(**row) for row in rows),
    ).save(path)


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _run(machine: str, rates: Rates | None, facts: dict[str, str]) -> StepRun:
    import torch
    import vllm

    software = {"vllm": vllm.__version__, **facts}
    if torch.version.cuda is not None:
        software["cuda"] = torch.version.cuda
    return StepRun(provenance=Provenance.collect(_device(), seed=0), software=software, machine=machine, rates=rates)
