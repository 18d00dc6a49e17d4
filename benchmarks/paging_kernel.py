"""Median time of one block-table compaction on a GPU: the Triton kernel against the torch reference."""

import argparse
from collections.abc import Callable

import torch
from triton.testing import do_bench

from windowed_mtp.paging import compact_block_table
from windowed_mtp.paging.triton import compact_block_table_, window_params
from windowed_mtp.window import SinkWindow


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--rows", type=int, default=64, help="sequences in the batch")
    parser.add_argument("--context", type=int, default=131_072, help="entries of each sequence")
    parser.add_argument("--max-context", type=int, default=1_048_576, help="entries that the table is wide enough for")
    parser.add_argument("--block-size", type=int, default=16, help="entries a block")
    parser.add_argument("--query-len", type=int, default=7, help="queries of each sequence in the pass")
    parser.add_argument("--sink", type=int, default=64)
    parser.add_argument("--window", type=int, default=4032)
    parser.add_argument("--milliseconds", type=int, default=500, help="measuring time of each variant")
    arguments = parser.parse_args()
    if not arguments.query_len <= arguments.context <= arguments.max_context:
        parser.error("pass --query-len <= --context <= --max-context.")
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA device.")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    rows, block_size = arguments.rows, arguments.block_size
    columns = -(-arguments.max_context // block_size)
    window = SinkWindow(arguments.sink, arguments.window)

    options = {"dtype": torch.int32, "device": "cuda"}
    table = torch.randint(1, 2**20, (rows, columns), **options)
    lens = torch.full((rows,), arguments.context, **options)
    queries = torch.full((rows,), arguments.query_len, **options)
    out_table, out_lens, params = torch.zeros_like(table), torch.zeros_like(lens), window_params(window, device="cuda")

    def kernel(live_columns_only: bool) -> None:
        compact_block_table_(
            table,
            lens,
            queries,
            out_table,
            out_lens,
            params,
            block_size=block_size,
            live_columns_only=live_columns_only,
        )

    variants: dict[str, Callable[[], object]] = {
        "torch reference": lambda: compact_block_table(table, lens, queries, block_size=block_size, window=window),
        "kernel, all columns": lambda: kernel(False),
        "kernel, live columns": lambda: kernel(True),
    }
    print(f"{torch.cuda.get_device_name()}, {rows} rows x {columns} columns, {arguments.context} entries, {window}")
    for name, call in variants.items():
        print(f"{name:<22}{do_bench(call, rep=arguments.milliseconds, return_mode='median'):9.4f} ms")


if __name__ == "__main__":
    main()
