"""A subclass of an attention backend whose metadata is windowed before it is built."""

from __future__ import annotations

import functools
from typing import Any

from windowed_mtp.engines.vllm.config import PluginConfig
from windowed_mtp.engines.vllm.windowing import Limits, Windowing


@functools.cache
def windowed_backend(base: type[Any], config: PluginConfig, replays: bool = True) -> type[Any]:
    """Derive a windowed backend.

    Its name differs from the base's, so vLLM puts the layers that use it in an attention group of their own, with
    metadata of their own, while kernels, block sizes and KV specs stay the base's.

    Parameters
    ----------
    base : type
        The layer's own attention backend.
    config : PluginConfig
        What the engine was asked for.
    replays : bool
        Whether the runner may replay full CUDA graphs of its draft.

    Returns
    -------
    type
        A subclass of ``base``.
    """
    builder = windowed_builder(base.get_builder_cls(), config, replays)
    body = {
        "get_builder_cls": staticmethod(lambda: builder),
        "__doc__": f"{base.__name__} with a window before its metadata.",
        "__module__": __name__,
        "__qualname__": f"Windowed{base.__qualname__}",
    }
    return type(f"Windowed{base.__name__}", (base,), body)


def base_backend(backend: type[Any]) -> type[Any]:
    """Give the backend that a windowed one was derived from; another is given back."""
    return backend.__bases__[0] if is_windowed(backend) else backend


def is_windowed(backend: type[Any]) -> bool:
    """Whether a backend is one that `windowed_backend` derived."""
    return backend.__name__.startswith("Windowed")


def windowed_builder(base: type[Any], config: PluginConfig, replays: bool) -> type[Any]:
    """Derive a metadata builder that windows what it is given.

    Parameters
    ----------
    base : type
        The backend's metadata builder.
    config : PluginConfig
        What the engine was asked for.
    replays : bool
        Whether the runner may replay full CUDA graphs of its draft.

    Returns
    -------
    type
        A subclass of ``base``.
    """

    class WindowedBuilder(base):
        # A block table swapped in later would not be windowed.
        supports_update_block_table = False

        def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, *args: Any, **kw: Any) -> None:
            super().__init__(kv_cache_spec, layer_names, vllm_config, *args, **kw)
            limits = limits_of(vllm_config, replays, config.widest_window)
            self.windowing = Windowing(config.window, kv_cache_spec.block_size, limits)
            self.runs_first_pass = False
            self.unused = False
            self._nested = False

        def build(self, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kw: Any) -> Any:
            if self.unused:
                return None
            return super().build(common_prefix_len, self._windowed(common_attn_metadata), *args, **kw)

        # Not every builder calls build() from the other two: the window comes first in each, and once.
        def build_for_drafting(self, common_attn_metadata: Any, draft_index: int) -> Any:
            common = self._windowed(common_attn_metadata, draft_index == 0)
            return self._without_window(super().build_for_drafting, common, draft_index)

        def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
            if self.unused:
                return None
            common = self._windowed(common_attn_metadata)
            return self._without_window(super().build_for_cudagraph_capture, common)

        def without_window(self, common_attn_metadata: Any) -> Any:
            """Build what the backend's own builder makes of a batch."""
            return self._without_window(super().build, 0, common_attn_metadata)

        def update_draft_decode_metadata(self, metadata: Any) -> None:
            self.windowing.refresh()
            super().update_draft_decode_metadata(metadata)

        def _windowed(self, common: Any, first_pass: bool | None = None) -> Any:
            if self._nested:
                return common
            if first_pass is None:
                # A drafter's own decode passes have one query a row.
                first_pass = self.runs_first_pass or common.max_query_len > 1
            if first_pass and not config.window_first_pass:
                return common
            return self.windowing(common)

        def _without_window(self, build: Any, *args: Any) -> Any:
            self._nested = True
            try:
                return build(*args)
            finally:
                self._nested = False

    WindowedBuilder.__name__ = WindowedBuilder.__qualname__ = f"Windowed{base.__name__}"
    return WindowedBuilder


def limits_of(vllm_config: Any, replays: bool, widest: int) -> Limits:
    """Read from an engine's settings what batches a builder will see."""
    scheduler, speculative = vllm_config.scheduler_config, vllm_config.speculative_config
    verified = speculative.num_speculative_tokens + 1
    return Limits(
        graphs=replays and vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs(),
        rows=scheduler.max_num_seqs,
        # A drafter may add up to as many entries to a row as it drafts.
        queries=scheduler.max_num_batched_tokens + verified,
        exact_above=_exact_above(speculative, scheduler.async_scheduling),
        widest=widest,
    )


def _exact_above(speculative: Any, asynchronous: bool) -> int:
    """Most queries of a row in a pass over verified tokens, where the host's lengths lag behind by what was rejected.

    They do where the scheduler runs ahead, and where a drafter takes this step's rejected tokens off itself: in one
    parallel pass, or for several modules. An independent draft model has one query more than the target, and some
    parallel drafters one more for each token.
    """
    tokens = speculative.num_speculative_tokens
    parallel = bool(getattr(speculative, "parallel_drafting", False))
    several = getattr(speculative, "use_multi_module_mtp", None)  # since 0.27
    if not (asynchronous or parallel or (several is not None and several())):
        return 1
    extra = tokens if parallel else int(getattr(speculative, "method", None) == "draft_model")
    return int(tokens + 1 + extra)
