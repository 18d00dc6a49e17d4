"""A made-up batch through each windowed builder, before an engine serves: what is wrong shows at the start."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import torch

from windowed_mtp.engines.vllm.config import PluginError
from windowed_mtp.engines.vllm.windowing import Windowing
from windowed_mtp.paging import windowed_length
from windowed_mtp.window import SinkWindow

ROWS, PADDING = 2, 1


def check_builders(builders: Iterable[Any], max_model_len: int, queries: int) -> int:
    """Let each builder make the metadata of a batch that is padded in some of its fields only.

    vLLM makes such batches for full CUDA graphs. No kernel of a layer runs, and no cache is touched.

    Parameters
    ----------
    builders : iterable
        Windowed metadata builders.
    max_model_len : int
        Longest context that the engine serves, in tokens.
    queries : int
        Queries of a row whose draft is verified.

    Returns
    -------
    int
        How many builders have made metadata with the window; a builder that makes none of such a batch even without a
        window, and one whose metadata nobody reads, is left out.

    Raises
    ------
    PluginError
        If a builder fails because of the window, or windows the batch wrongly.
    """
    return sum(_passes(builder, max_model_len, queries) for builder in builders)


def _passes(builder: Any, max_model_len: int, queries: int) -> bool:
    if builder.unused:
        return False
    own = builder.windowing
    # Buffers of its own: those that serve are made for the tables that vLLM hands out.
    trial = builder.windowing = Windowing(own.window, own.block_size, own.limits)
    common = padded_batch(trial, builder.device, max_model_len, queries if builder.runs_first_pass else 1)
    try:
        try:
            builder.without_window(common)
        except Exception:  # not our concern: the batch is made up, and a builder may want more of it
            return False
        builder.build(0, common)
        _check_window(trial, common)
    except Exception as error:
        raise PluginError(
            f"a padded batch does not pass {type(builder).__name__} ({type(error).__name__}: {error}); please report "
            'it, and remove additional_config["windowed_mtp"] until then.'
        ) from error
    finally:
        builder.windowing = own
    return True


def padded_batch(windowing: Windowing, device: Any, max_model_len: int, queries: int) -> Any:
    """Make a batch of rows at which the window leaves something out, if any context does, and a row of padding.

    Parameters
    ----------
    windowing : Windowing
        The window, and its block size.
    device : torch.device
        Where lengths and block tables live.
    max_model_len : int
        Longest context, in tokens.
    queries : int
        Queries a row; less if there are not so many tokens.

    Returns
    -------
    CommonAttentionMetadata
        ``is_prefilling`` lacks the row of padding, the other per-row fields have it.
    """
    from vllm.v1.attention.backend import CommonAttentionMetadata

    size, window = windowing.block_size, windowing.window
    queries = min(queries, max_model_len)
    engaged = max(window.min_context, window.sink + window.window + queries + 4 * size)
    lens = torch.tensor([min(engaged + row, max_model_len) for row in range(ROWS)] + [0] * PADDING, dtype=torch.int32)
    starts = torch.tensor([row * queries for row in range(ROWS + 1)] + [ROWS * queries] * PADDING, dtype=torch.int32)
    tokens = (ROWS + PADDING) * queries
    made = {
        "query_start_loc": starts.to(device),
        "query_start_loc_cpu": starts,
        "seq_lens": lens.to(device),
        "seq_lens_cpu_upper_bound": lens,
        "num_reqs": ROWS + PADDING,
        "num_actual_tokens": tokens,
        "max_query_len": queries,
        "max_seq_len": int(lens.max()),
        "block_table_tensor": torch.zeros(ROWS + PADDING, -(-max_model_len // size), dtype=torch.int32, device=device),
        "slot_mapping": torch.full((tokens,), -1, dtype=torch.int64, device=device),
        "positions": torch.zeros(tokens, dtype=torch.int64, device=device),
        "is_prefilling": torch.zeros(ROWS, dtype=torch.bool),
        "_seq_lens_cpu": lens,
        "_num_computed_tokens_cpu": lens - starts.diff(),
    }
    known = {field.name for field in fields(CommonAttentionMetadata)}
    return CommonAttentionMetadata(**{name: value for name, value in made.items() if name in known})


def _check_window(windowing: Windowing, common: Any) -> None:
    made = windowing(common)
    want = _lengths(common, windowing.window, windowing.block_size)
    if made.seq_lens.tolist() != want:
        raise ValueError(f"lengths {made.seq_lens.tolist()} instead of {want}")
    if made.block_table_tensor.shape[1] * windowing.block_size < max(want):
        raise ValueError(f"a table of {made.block_table_tensor.shape[1]} blocks for {max(want)} keys")


def _lengths(common: Any, window: SinkWindow, block_size: int) -> list[int]:
    rows = zip(common.seq_lens.tolist(), common.query_start_loc.diff().tolist(), strict=True)
    return [windowed_length(length, queries, block_size=block_size, window=window) for length, queries in rows]
