"""Reads hot rows anew before a step where an engine's weights may have changed, or their memory was given up."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from windowed_mtp.engines.vllm.hot_rows import HotRows

WORKER = "vllm.v1.worker.gpu_worker"
"""Module of the ``Worker`` that vLLM's own runners have."""

CHANGES = ("wake_up", "reload_weights", "update_weights", "finish_weight_update", "reset_weights", "checkpoint_restore")
"""Methods of a worker that leave other weights, or rows whose memory holds nothing; no release is without the first."""

STEPS = ("execute_model", "_dummy_run")
"""Methods of a runner that may draft."""

_HELD = "windowed_mtp_hot_watch"
_patched: list[tuple[Any, str, Any]] = []


class HotWatch:
    """Has hot rows read anew at the first step after something that may have made them stale.

    That is each of `CHANGES`, ``load_weights`` of the target or the draft, and what torch counts as a write to the
    head's weights. The rows are read when the next step begins, not at once: weights come in pieces, and a sleeping
    engine gets its memory back in parts. Other writes into a parameter's ``data`` go unnoticed.

    Parameters
    ----------
    runner : GPUModelRunner
        V1's or V2's, after ``load_model``.
    draft : torch.nn.Module
        The draft model.
    rows : sequence of HotRows
        What is kept up to date.

    Attributes
    ----------
    stale : bool
        Whether the rows will be read anew.
    """

    def __init__(self, runner: Any, draft: Any, rows: Sequence[HotRows]) -> None:
        self.rows = rows
        self.stale = False
        self.models = [model.unwrap() if hasattr(model, "unwrap") else model for model in (runner.model, draft)]

    def put_on(self, runner: Any) -> None:
        """Begin to watch; classes of vLLM's are changed once for all of their engines, until `uninstall`."""
        setattr(runner, _HELD, self)
        for model in self.models:
            model.load_weights = self._then_stale(model.load_weights)
        for name in STEPS:
            _patch(type(runner), name, _freshen_first)
        worker = getattr(sys.modules.get(WORKER), "Worker", None)
        for name in CHANGES:
            if hasattr(worker, name):
                _patch(worker, name, _stale_after)

    def freshen(self) -> None:
        """Read the rows anew if they may be stale."""
        if self.stale or any(rows.outdated for rows in self.rows):
            for rows in self.rows:
                rows.refresh()
            self.stale = False

    def _then_stale(self, load_weights: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(load_weights)
        def load_then_stale(*args: Any, **kwargs: Any) -> Any:
            try:
                return load_weights(*args, **kwargs)
            finally:
                self.stale = True

        return load_then_stale


def take_off(runner: Any) -> None:
    """End a runner's watch, if it has one."""
    watch: HotWatch | None = runner.__dict__.pop(_HELD, None)
    if watch is not None:
        for model in watch.models:
            del model.load_weights


def uninstall() -> None:
    """Give vLLM's classes their own methods back; the rows of engines that still run stay as they are then."""
    while _patched:
        owner, name, original = _patched.pop()
        setattr(owner, name, original)


def _patch(cls: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
    owner = next(base for base in cls.__mro__ if name in vars(base))
    if not any(each[:2] == (owner, name) for each in _patched):
        original = vars(owner)[name]
        _patched.append((owner, name, original))
        setattr(owner, name, functools.wraps(original)(wrapper(original)))


def _freshen_first(step: Callable[..., Any]) -> Callable[..., Any]:
    def freshen_first(self: Any, *args: Any, **kwargs: Any) -> Any:
        watch: HotWatch | None = self.__dict__.get(_HELD)
        if watch is not None:
            watch.freshen()
        return step(self, *args, **kwargs)

    return freshen_first


def _stale_after(change: Callable[..., Any]) -> Callable[..., Any]:
    def stale_after(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return change(self, *args, **kwargs)
        finally:
            watch: HotWatch | None = getattr(self.model_runner, _HELD, None)
            if watch is not None:
                watch.stale = True

    return stale_after
