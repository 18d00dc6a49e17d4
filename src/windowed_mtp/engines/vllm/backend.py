"""A subclass of an attention backend whose metadata is windowed before it is built."""

from __future__ import annotations

import functools
from typing import Any

from windowed_mtp.engines.vllm.config import PluginConfig
from windowed_mtp.engines.vllm.windowing import Windowing


@functools.cache
def windowed_backend(base: type[Any], config: PluginConfig) -> type[Any]:
    """Derive a windowed backend.

    Its name differs from the base's, so vLLM puts the layers that use it in an attention group of their own, with
    metadata of their own, while kernels, block sizes and KV specs stay the base's.

    Parameters
    ----------
    base : type
        The layer's own attention backend.
    config : PluginConfig
        What the engine was asked for.

    Returns
    -------
    type
        A subclass of ``base``.
    """
    builder = windowed_builder(base.get_builder_cls(), config)
    body = {
        "get_builder_cls": staticmethod(lambda: builder),
        "__doc__": f"{base.__name__} with a window before its metadata.",
        "__module__": __name__,
        "__qualname__": f"Windowed{base.__qualname__}",
    }
    return type(f"Windowed{base.__name__}", (base,), body)


def windowed_builder(base: type[Any], config: PluginConfig) -> type[Any]:
    """Derive a metadata builder that windows what it is given.

    Parameters
    ----------
    base : type
        The backend's metadata builder.
    config : PluginConfig
        What the engine was asked for.

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
            graphs = vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs()
            self.windowing = Windowing(config.window, kv_cache_spec.block_size, graphs)
            self._first_pass = False

        def build(self, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kw: Any) -> Any:
            if not self._first_pass or config.window_first_pass:
                common_attn_metadata = self.windowing(common_attn_metadata)
            return super().build(common_prefix_len, common_attn_metadata, *args, **kw)

        def build_for_drafting(self, common_attn_metadata: Any, draft_index: int) -> Any:
            self._first_pass = draft_index == 0
            try:
                return super().build_for_drafting(common_attn_metadata, draft_index)
            finally:
                self._first_pass = False

        def update_draft_decode_metadata(self, metadata: Any) -> None:
            self.windowing.refresh()
            super().update_draft_decode_metadata(metadata)

    WindowedBuilder.__name__ = WindowedBuilder.__qualname__ = f"Windowed{base.__name__}"
    return WindowedBuilder
