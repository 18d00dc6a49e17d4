"""The steps of requests as a front end sees them, for an engine of vLLM's ``LLM`` and for a server."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from windowed_mtp.engines.vllm.config import PluginError
from windowed_mtp.engines.vllm.statistics import CONTEXTS, ContextStatistics, DraftPlan, History, Report, Step

_METHOD = "process_outputs"
_CLOSE = "update_scheduler_stats"
_ORIGINAL = "_windowed_mtp_original"
_STEPS = "windowed_mtp_steps"


class StepReader:
    """Makes steps of the outputs of requests; it keeps what each request's last step was."""

    def __init__(self) -> None:
        self._last: WeakKeyDictionary[Any, History] = WeakKeyDictionary()

    def __call__(self, states: Mapping[str, Any], outputs: Iterable[Any]) -> list[Step]:
        """Read outputs of one iteration.

        Parameters
        ----------
        states : mapping of str to RequestState
            The front end's requests, before the outputs are added to them.
        outputs : iterable of EngineCoreOutput
            What the engine gave them.

        Returns
        -------
        list of Step
            One for each output with tokens, also of a request that the front end has dropped: the scheduler counts its
            drafts.
        """
        made = []
        for output in outputs:
            state = states.get(output.request_id)
            if output.new_token_ids and (state is None or state.detokenizer is not None):
                made.append(self._step(state, output))
        return made

    def _step(self, state: Any, output: Any) -> Step:
        emitted, finished = len(output.new_token_ids), output.finish_reason is not None
        if state is None:
            return Step(None, None, emitted, finished=finished)
        prefilled = state.is_prefilling or any(event.type.name == "SCHEDULED" for event in output.events or ())
        last = None if prefilled else self._last.get(state)
        history = self._last[state] = History(0 if prefilled else emitted)
        return Step(
            state.prompt_len + state.detokenizer.num_output_tokens(),
            None if last is None else last.emitted,
            emitted,
            drafted_before=None if last is None else last.drafted,
            may_draft=not prefilled or emitted > 1 or _one_token(output.prefill_stats),
            finished=finished,
            history=history,
        )


def _one_token(prefill: Any) -> bool:
    """Whether a prefill computed one token only, which vLLM may pad to a draft's length and then counts as a draft."""
    return prefill is not None and prefill.num_computed_tokens == 1


@contextmanager
def collect(llm: Any, bounds: Sequence[int] = CONTEXTS) -> Iterator[ContextStatistics]:
    """Count the drafts of an ``LLM`` while the context lasts.

    Parameters
    ----------
    llm : vllm.LLM
        With or without a window; made with ``disable_log_stats=False``, as the counts are those of vLLM's scheduler.
    bounds : sequence of int
        Contexts in tokens, at each of which a new bucket begins.

    Yields
    ------
    ContextStatistics
        It grows with each step; ``print(statistics.table())``.

    Raises
    ------
    PluginError
        If the engine has no drafter or keeps no statistics, if this vLLM is not one we know, or for bounds that do not
        increase.

    Examples
    --------
    >>> with collect(llm) as statistics:
    ...     llm.generate(prompts)
    >>> print(statistics.table())
    """
    engine = llm.llm_engine
    statistics = ContextStatistics(DraftPlan.read(engine.vllm_config), bounds)
    if not engine.log_stats:
        raise PluginError("vLLM does not count drafts in this engine; pass disable_log_stats=False to LLM.")
    processor, reader = engine.output_processor, StepReader()
    process, close = _method_of(processor, _METHOD), _method_of(processor, _CLOSE)
    outer = {name: vars(processor)[name] for name in (_METHOD, _CLOSE) if name in vars(processor)}
    steps: list[Step] = []

    def processed(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        steps.extend(reader(processor.request_states, outputs))
        return process(outputs, *args, **kwargs)

    def closed(scheduler_stats: Any) -> Any:
        statistics.add(steps, Report.read(getattr(scheduler_stats, "spec_decoding_stats", None)))
        steps.clear()
        return close(scheduler_stats)

    setattr(processor, _METHOD, processed)
    setattr(processor, _CLOSE, closed)
    try:
        yield statistics
    finally:
        for name in (_METHOD, _CLOSE):
            delattr(processor, name)
            if name in outer:
                setattr(processor, name, outer[name])


def install() -> None:
    """Let every front end of this process leave its steps with its ``IterationStats``, for `steps_of`.

    Raises
    ------
    PluginError
        If this vLLM is not one we know.
    """
    from vllm.v1.engine.output_processor import OutputProcessor

    original = _method_of(OutputProcessor, _METHOD)
    if hasattr(original, _ORIGINAL):
        return
    reader = StepReader()

    @functools.wraps(original)
    def processed(
        self: Any, outputs: Any, engine_core_timestamp: Any = None, iteration_stats: Any = None, **kwargs: Any
    ) -> Any:
        if iteration_stats is not None:
            vars(iteration_stats).setdefault(_STEPS, []).extend(reader(self.request_states, outputs))
        return original(self, outputs, engine_core_timestamp, iteration_stats, **kwargs)

    setattr(processed, _ORIGINAL, original)
    setattr(OutputProcessor, _METHOD, processed)


def uninstall() -> None:
    """Take off what `install` put on."""
    from vllm.v1.engine.output_processor import OutputProcessor

    current = getattr(OutputProcessor, _METHOD, None)
    setattr(OutputProcessor, _METHOD, getattr(current, _ORIGINAL, current))


def steps_of(iteration_stats: Any) -> list[Step]:
    """Take the steps that an installed front end left with its statistics of one iteration."""
    return getattr(iteration_stats, _STEPS, [])


def _method_of(owner: Any, name: str) -> Any:
    method = getattr(owner, name, None)
    if method is None:
        raise PluginError(
            f"drafts are not counted, as vLLM's OutputProcessor has no {name}; use a supported version of vLLM."
        )
    return method
