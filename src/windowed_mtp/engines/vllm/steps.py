"""The steps of requests as a front end sees them, for an engine of vLLM's ``LLM`` and for a server."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from windowed_mtp.engines.vllm.config import PluginError
from windowed_mtp.engines.vllm.statistics import CONTEXTS, ContextStatistics, DraftPlan, Step

_METHOD = "_update_stats_from_output"
_ORIGINAL = "_windowed_mtp_original"
_STEPS = "windowed_mtp_steps"


class StepReader:
    """Makes steps of the outputs of requests; it keeps what each request emitted last."""

    def __init__(self) -> None:
        self._emitted: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    def __call__(self, state: Any, output: Any) -> Step | None:
        """Read one output.

        Parameters
        ----------
        state : RequestState
            The request, before the output is added to it.
        output : EngineCoreOutput
            What a step of the engine gave it.

        Returns
        -------
        Step or None
            ``None`` where no draft was verified: after a prefill (a preempted request has another one), for a request
            that was not seen from its start, and for an output without tokens.
        """
        emitted = len(output.new_token_ids)
        if not emitted or state.detokenizer is None:
            return None
        prefilled = state.is_prefilling or any(event.type.name == "SCHEDULED" for event in output.events or ())
        before = self._emitted.get(state)
        self._emitted[state] = 0 if prefilled else emitted
        if prefilled or before is None:
            return None
        return Step(state.prompt_len + state.detokenizer.num_output_tokens(), before, emitted)


@contextmanager
def collect(llm: Any, bounds: Sequence[int] = CONTEXTS) -> Iterator[ContextStatistics]:
    """Count the drafts of an ``LLM`` while the context lasts.

    It needs no statistics of vLLM's (``disable_log_stats`` may be set); without them the step in which a preempted
    request comes back is counted as one that accepted nothing.

    Parameters
    ----------
    llm : vllm.LLM
        With or without a window.
    bounds : sequence of int
        Contexts in tokens, at each of which a new bucket begins.

    Yields
    ------
    ContextStatistics
        It grows with each step; ``print(statistics.table())``.

    Raises
    ------
    PluginError
        If it cannot be known what the engine's draft reads, if this vLLM is not one we know, or for bounds that do not
        increase.

    Examples
    --------
    >>> with collect(llm) as statistics:
    ...     llm.generate(prompts)
    >>> print(statistics.table())
    """
    statistics = ContextStatistics(DraftPlan.read(llm.llm_engine.vllm_config), bounds)
    processor, reader = llm.llm_engine.output_processor, StepReader()
    original, outer = _method_of(processor), vars(processor).get(_METHOD)

    def update(state: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
        step = reader(state, output)
        if step is not None:
            statistics.add(step)
        return original(state, output, *args, **kwargs)

    setattr(processor, _METHOD, update)
    try:
        yield statistics
    finally:
        delattr(processor, _METHOD)
        if outer is not None:
            setattr(processor, _METHOD, outer)


def install() -> None:
    """Let every front end of this process leave its steps with its ``IterationStats``, for `steps_of`.

    Raises
    ------
    PluginError
        If this vLLM is not one we know.
    """
    from vllm.v1.engine.output_processor import OutputProcessor

    original = _method_of(OutputProcessor)
    if hasattr(original, _ORIGINAL):
        return
    reader = StepReader()

    @functools.wraps(original)
    def update(self: Any, state: Any, output: Any, timestamp: Any, iteration_stats: Any) -> Any:
        step = reader(state, output)
        if step is not None and iteration_stats is not None:
            vars(iteration_stats).setdefault(_STEPS, []).append(step)
        return original(self, state, output, timestamp, iteration_stats)

    setattr(update, _ORIGINAL, original)
    setattr(OutputProcessor, _METHOD, update)


def uninstall() -> None:
    """Take off what `install` put on."""
    from vllm.v1.engine.output_processor import OutputProcessor

    current = getattr(OutputProcessor, _METHOD, None)
    setattr(OutputProcessor, _METHOD, getattr(current, _ORIGINAL, current))


def steps_of(iteration_stats: Any) -> list[Step]:
    """Take the steps that an installed front end left with its statistics of one iteration."""
    return getattr(iteration_stats, _STEPS, [])


def _method_of(owner: Any) -> Any:
    method = getattr(owner, _METHOD, None)
    if method is None:
        raise PluginError(
            f"draft keys are not counted, as vLLM's OutputProcessor has no {_METHOD}; use a supported version of vLLM."
        )
    return method
