"""Compacted block tables and ring slots: hand-worked values, exhaustive small cases, the kernel, bad input."""

import importlib.util
import itertools
import re
import subprocess
import sys
from types import ModuleType

import pytest
import torch

from windowed_mtp.errors import WindowError
from windowed_mtp.paging import (
    compact_block_table,
    dropped_blocks,
    dropped_per_row,
    ring_kept,
    ring_slot,
    ring_slots_per_sequence,
)
from windowed_mtp.window import SinkWindow


def int32(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def refused(message: str):
    return pytest.raises(WindowError, match=f"^{re.escape(message)}$")


def random_batch(
    seed: int, rows: int, columns: int, block_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A block table with lengths and query lengths, padding rows included."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(1, 2**30, (rows, columns), generator=generator, dtype=torch.int32)
    lens = torch.randint(0, columns * block_size + 1, (rows,), generator=generator, dtype=torch.int32)
    lens *= torch.rand(rows, generator=generator) > 0.1
    queries = torch.randint(1, 9, (rows,), generator=generator, dtype=torch.int32).minimum(lens)
    return table, lens, queries


class TestCompactBlockTable:
    def test_by_hand(self):
        table = int32([[11, 12, 13, 14, 15, 16, 17, 18]])
        # Sinks 0..4 are in blocks 0 and 1; the query at 29 of 30 entries reads from 25 on, in block 6: 2..5 go.
        new_table, new_lens = compact_block_table(
            table, int32([30]), int32([1]), block_size=4, window=SinkWindow(sink=5, window=5)
        )
        assert new_table.tolist() == [[11, 12, 17, 18, 0, 0, 0, 0]]
        assert new_lens.tolist() == [14]
        assert new_table.dtype == new_lens.dtype == torch.int32

    def test_the_first_query_gives_the_bound(self):
        table = int32([[11, 12, 13, 14, 15, 16, 17, 18]] * 3)
        new_table, new_lens = compact_block_table(
            table, int32([30, 30, 30]), int32([2, 3, 7]), block_size=4, window=SinkWindow(sink=5, window=5)
        )
        assert new_lens.tolist() == [14, 18, 22]
        assert new_table[:, 2:6].tolist() == [[17, 18, 0, 0], [16, 17, 18, 0], [15, 16, 17, 18]]

    @pytest.mark.parametrize("min_context", [0, 40])
    def test_many_rows_drop_what_each_of_them_does(self, min_context: int):
        window = SinkWindow(5, 11, min_context)
        cases = [(s, q) for s in range(80) for q in range(min(s, 9) + 1)]
        lens, queries = (int32(list(column)) for column in zip(*cases, strict=True))
        for block_size in (1, 3, 16):
            rows = dropped_per_row(lens, queries, block_size=block_size, window=window)
            assert rows.tolist() == [dropped_blocks(s, q, block_size=block_size, window=window) for s, q in cases]
            assert rows.any()

    def test_without_sinks_the_row_starts_at_the_window(self):
        new_table, new_lens = compact_block_table(
            int32([[7, 8, 9]]), int32([3]), int32([1]), block_size=1, window=SinkWindow(sink=0, window=1)
        )
        assert new_table.tolist() == [[9, 0, 0]]
        assert new_lens.tolist() == [1]

    @pytest.mark.parametrize("block_size", [1, 2, 3, 4])
    def test_what_is_left_is_every_block_that_holds_a_read_position(self, block_size: int):
        cases = [(s, q) for s in range(1, 25) for q in range(1, min(s, 4) + 1)]
        lens, queries = (int32(list(column)) for column in zip(*cases, strict=True))
        table = torch.randperm(len(cases) * 24).int().reshape(len(cases), 24) + 1
        for sink, window, min_context in itertools.product(range(6), range(1, 7), (0, 13)):
            policy = SinkWindow(sink, window, min_context)
            new_table, new_lens = compact_block_table(table, lens, queries, block_size=block_size, window=policy)
            for row, (s, q) in enumerate(cases):
                held = sorted({p // block_size for p in policy.positions(s, q)})
                assert new_table[row, : len(held)].tolist() == table[row, held].tolist()
                assert new_lens[row] == s - (-(-s // block_size) - len(held)) * block_size

    def test_a_row_within_the_span_is_untouched(self):
        for block_size, sink, window in itertools.product((1, 2, 3, 4, 7), range(9), range(1, 9)):
            cases = [(s, q) for s in range(sink + window + 1) for q in range(min(1, s), min(s, 5) + 1)]
            lens, queries = (int32(list(column)) for column in zip(*cases, strict=True))
            table = torch.arange(len(cases) * 17, dtype=torch.int32).reshape(len(cases), 17) - 50
            new_table, new_lens = compact_block_table(
                table, lens, queries, block_size=block_size, window=SinkWindow(sink, window)
            )
            assert torch.equal(new_table, table)
            assert torch.equal(new_lens, lens)

    def test_min_context_looks_at_the_rows_length(self):
        table = int32([[1, 2, 3, 4, 5, 6, 7, 8]] * 2)
        new_table, new_lens = compact_block_table(
            table, int32([7, 8]), int32([3, 3]), block_size=1, window=SinkWindow(sink=1, window=2, min_context=8)
        )
        assert new_lens.tolist() == [7, 5]
        assert new_table.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8], [1, 5, 6, 7, 8, 0, 0, 0]]

    def test_padding_rows_are_untouched(self):
        table = int32([[-1, 5, 2**31 - 1], [9, 9, 9]])
        new_table, new_lens = compact_block_table(
            table, int32([0, 0]), int32([0, 0]), block_size=1, window=SinkWindow(sink=0, window=1)
        )
        assert torch.equal(new_table, table)
        assert new_lens.tolist() == [0, 0]

    @pytest.mark.parametrize(("rows", "columns"), [(0, 0), (0, 5), (3, 0)])
    def test_an_empty_table(self, rows: int, columns: int):
        table, lens = torch.zeros(rows, columns, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32)
        new_table, new_lens = compact_block_table(table, lens, lens, block_size=4, window=SinkWindow(1, 2))
        assert new_table.shape == (rows, columns)
        assert torch.equal(new_lens, lens)

    def test_inputs_are_not_modified_and_not_shared(self):
        inputs = random_batch(0, 50, 12, 4)
        before = [tensor.clone() for tensor in inputs]
        for tensor in compact_block_table(*inputs, block_size=4, window=SinkWindow(3, 5)):
            tensor.fill_(-1)
        assert all(torch.equal(now, then) for now, then in zip(inputs, before, strict=True))

    @pytest.mark.parametrize(("window", "expected"), [(16, [31, 100]), (2**31 + 200, [2**31 - 1, 100])])
    def test_values_near_the_end_of_int32_do_not_wrap(self, window: int, expected: list[int]):
        table = int32([[1, 2, 3, 4, 5, 6, 7]] * 2)
        _, new_lens = compact_block_table(
            table, int32([2**31 - 1, 100]), int32([1, 100]), block_size=16, window=SinkWindow(0, window)
        )
        assert new_lens.tolist() == expected

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"block_table": int32([1])}, "block_table has 1 dimensions, but it must have 2; reshape it."),
            ({"seq_lens": int32([[4]])}, "seq_lens has 2 dimensions, but it must have 1; reshape it."),
            ({"query_lens": int32(1)}, "query_lens has 0 dimensions, but it must have 1; reshape it."),
            (
                {"block_table": torch.ones(1, 2)},
                "block_table is torch.float32, but it must be torch.int32; convert it.",
            ),
            ({"seq_lens": torch.tensor([4])}, "seq_lens is torch.int64, but it must be torch.int32; convert it."),
            ({"query_lens": torch.tensor([1])}, "query_lens is torch.int64, but it must be torch.int32; convert it."),
            ({"seq_lens": int32([4, 4])}, "seq_lens has 2 rows, but block_table has 1; pass one length a row."),
            ({"query_lens": int32([])}, "query_lens has 0 rows, but block_table has 1; pass one length a row."),
            ({"seq_lens": int32([4]).to("meta")}, "seq_lens is on meta, but block_table is on cpu; move it there."),
            ({"query_lens": int32([1]).to("meta")}, "query_lens is on meta, but block_table is on cpu; move it there."),
            ({"block_size": 0}, "block_size is 0, but it must be at least 1; pass the attention kernel's block."),
            ({"block_size": 2.0}, "block_size is 2.0, but it must be a whole number; pass an integer."),
        ],
    )
    def test_bad_input_is_refused_in_one_sentence(self, change: dict, message: str):
        good = {"block_table": int32([[1, 2]]), "seq_lens": int32([4]), "query_lens": int32([1]), "block_size": 2}
        with refused(message):
            compact_block_table(**(good | change), window=SinkWindow(1, 2))


@pytest.fixture(scope="module")
def kernel() -> ModuleType:
    """A private copy of the kernel's module in Triton's interpreter; the importable module stays compiled."""
    pytest.importorskip("triton", reason="Triton is not installed")
    found = importlib.util.find_spec("windowed_mtp.paging.triton")
    spec = importlib.util.spec_from_file_location("interpreted_paging_kernel", found.origin)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        spec.loader.exec_module(module)
    return module


class TestKernel:
    @pytest.mark.parametrize(
        ("rows", "columns", "block_size"), [(250, 40, 1), (250, 24, 4), (250, 9, 16), (250, 3, 1104), (20, 2500, 2)]
    )
    @pytest.mark.parametrize(
        "policy",
        [SinkWindow(0, 1), SinkWindow(1, 2), SinkWindow(5, 17), SinkWindow(64, 40), SinkWindow(3, 2, 21)],
        ids=str,
    )
    def test_equals_the_reference(
        self, kernel: ModuleType, policy: SinkWindow, rows: int, columns: int, block_size: int
    ):
        inputs = random_batch(rows + columns, rows, columns, block_size)
        out_table, out_lens = torch.full_like(inputs[0], -7), torch.full_like(inputs[1], -7)
        params = kernel.window_params(policy, device="cpu")
        kernel.compact_block_table_(*inputs, out_table, out_lens, params, block_size=block_size)
        new_table, new_lens = compact_block_table(*inputs, block_size=block_size, window=policy)
        assert torch.equal(out_table, new_table)
        assert torch.equal(out_lens, new_lens)

    def test_strided_tables_and_rows_beyond_the_batch(self, kernel: ModuleType):
        table, lens, queries = random_batch(1, 60, 20, 4)
        strided = torch.full((60, 33), -3, dtype=torch.int32)
        strided[:, :20] = table
        persistent, out_lens = torch.full((64, 48), -7, dtype=torch.int32), torch.full((64,), -7, dtype=torch.int32)
        policy = SinkWindow(5, 11)
        params = kernel.window_params(policy, device="cpu")
        kernel.compact_block_table_(strided[:, :20], lens, queries, persistent[:, :25], out_lens, params, block_size=4)
        new_table, new_lens = compact_block_table(table, lens, queries, block_size=4, window=policy)
        assert torch.equal(persistent[:60, :20], new_table)
        assert (persistent[:60, 20:25] == 0).all()
        assert (persistent[:60, 25:] == -7).all()
        assert (persistent[60:] == -7).all()
        assert torch.equal(out_lens[:60], new_lens)
        assert (out_lens[60:] == -7).all()
        assert (strided[:, 20:] == -3).all()

    def test_live_columns_only_leaves_the_others(self, kernel: ModuleType):
        table, lens, queries = random_batch(2, 300, 20, 4)
        out_table, out_lens = torch.full_like(table, -7), torch.empty_like(lens)
        policy = SinkWindow(5, 11)
        params = kernel.window_params(policy, device="cpu")
        kernel.compact_block_table_(
            table, lens, queries, out_table, out_lens, params, block_size=4, live_columns_only=True
        )
        new_table, new_lens = compact_block_table(table, lens, queries, block_size=4, window=policy)
        live = torch.arange(20) < (new_lens[:, None] + 3) // 4
        assert torch.equal(out_table, torch.where(live, new_table, -7))
        assert torch.equal(out_lens, new_lens)

    def test_the_parameter_tensor_decides(self, kernel: ModuleType):
        inputs = random_batch(3, 100, 20, 4)
        params = kernel.window_params(SinkWindow(), device="cpu")
        for policy in (SinkWindow(1, 2), SinkWindow(9, 30), SinkWindow(1, 2, 40), SinkWindow(0, 2**31 - 1)):
            params.copy_(kernel.window_params(policy, device="cpu"))
            out_table, out_lens = torch.empty_like(inputs[0]), torch.empty_like(inputs[1])
            kernel.compact_block_table_(*inputs, out_table, out_lens, params, block_size=4)
            new_table, new_lens = compact_block_table(*inputs, block_size=4, window=policy)
            assert torch.equal(out_table, new_table)
            assert torch.equal(out_lens, new_lens)

    def test_running_starts_do_for_counts(self, kernel: ModuleType):
        table, lens, queries = random_batch(6, 100, 20, 4)
        starts = torch.nn.functional.pad(queries.cumsum(0), (1, 5)).int()
        params = kernel.window_params(SinkWindow(3, 9), device="cpu")
        made = [(torch.empty_like(table), torch.empty_like(lens)) for _ in range(2)]
        kernel.compact_block_table_(table, lens, queries, *made[0], params, block_size=4)
        kernel.compact_block_table_(table, lens, starts, *made[1], params, block_size=4, query_starts=True)
        assert torch.equal(made[0][0], made[1][0]) and torch.equal(made[0][1], made[1][1])
        with refused("query_lens has 100 starts, but block_table has 100 rows; pass one start more than rows."):
            kernel.compact_block_table_(table, lens, starts[:100], *made[1], params, block_size=4, query_starts=True)

    @pytest.mark.parametrize("live", [False, True])
    def test_a_table_as_wide_as_a_windowed_row_is_wide_enough(self, kernel: ModuleType, live: bool):
        window = SinkWindow(5, 11)
        table, lens, queries = random_batch(8, 40, 60, 4)
        new_table, new_lens = compact_block_table(table, lens, queries, block_size=4, window=window)
        width = -(-int(new_lens.max()) // 4)
        assert width < 60 // 4
        out_table, out_lens = torch.full((40, width), -7, dtype=torch.int32), torch.empty_like(lens)
        params = kernel.window_params(window, device="cpu")
        kernel.compact_block_table_(
            table, lens, queries, out_table, out_lens, params, block_size=4, live_columns_only=live
        )
        assert torch.equal(out_lens, new_lens)
        written = torch.arange(width) < -(-new_lens[:, None] // 4) if live else torch.ones_like(out_table, dtype=bool)
        assert torch.equal(out_table, torch.where(written, new_table[:, :width], -7))

    @pytest.mark.parametrize(("rows", "columns", "out_columns"), [(0, 4, 4), (3, 0, 4), (3, 0, 0)])
    def test_an_empty_table(self, kernel: ModuleType, rows: int, columns: int, out_columns: int):
        table, lens = torch.zeros(rows, columns, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32)
        out_table, out_lens = (torch.full(shape, -7, dtype=torch.int32) for shape in ((3, out_columns), (3,)))
        params = kernel.window_params(SinkWindow(0, 1), device="cpu")
        kernel.compact_block_table_(table, lens, lens, out_table, out_lens, params, block_size=4)
        assert (out_table[:rows] == 0).all()
        assert (out_lens[:rows] == 0).all()
        assert (out_table[rows:] == -7).all()
        assert (out_lens[rows:] == -7).all()

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"seq_lens": torch.ones(2)}, "seq_lens is torch.float32, but it must be torch.int32; convert it."),
            ({"block_size": 0}, "block_size is 0, but it must be at least 1; pass the attention kernel's block."),
            ({"out_table": torch.ones(2, 4)}, "out_table is torch.float32, but it must be torch.int32; convert it."),
            ({"out_lens": int32(1)}, "out_lens has 0 dimensions, but it must have 1; reshape it."),
            (
                {"params": int32([1, 2, 0]).to("meta")},
                "params is on meta, but block_table is on cpu; move it there.",
            ),
            ({"params": int32([1, 2])}, "params has 2 values, but it must have 3; make it with window_params."),
            (
                {"out_table": int32([[0] * 4])},
                "out_table has 1 rows, but block_table has 2; pass one with at least as many.",
            ),
            ({"out_lens": int32([0])}, "out_lens has 1 rows, but block_table has 2; pass one with at least as many."),
            (
                {"block_table": torch.ones(4, 2, dtype=torch.int32).T},
                "block_table has columns 2 apart, but they must be adjacent; copy it.",
            ),
            (
                {"out_table": torch.ones(4, 2, dtype=torch.int32).T},
                "out_table has columns 2 apart, but they must be adjacent; copy it.",
            ),
            ({"seq_lens": int32([4, 0, 4, 0])[::2]}, "seq_lens is not contiguous, but it must be; copy it."),
            ({"out_lens": int32([4, 0, 4, 0])[::2]}, "out_lens is not contiguous, but it must be; copy it."),
        ],
    )
    def test_bad_buffers_are_refused_in_one_sentence(self, kernel: ModuleType, change: dict, message: str):
        good = {
            "block_table": int32([[1, 2, 3, 4]] * 2),
            "seq_lens": int32([8, 8]),
            "query_lens": int32([1, 1]),
            "out_table": int32([[0] * 4] * 2),
            "out_lens": int32([0, 0]),
            "params": int32([1, 2, 0]),
            "block_size": 2,
        }
        with refused(message):
            kernel.compact_block_table_(**(good | change))

    def test_writing_into_an_input_is_refused(self, kernel: ModuleType):
        table, lens, queries = random_batch(4, 4, 6, 2)
        out_table, out_lens, params = table.clone(), lens.clone(), kernel.window_params(SinkWindow(1, 2), device="cpu")
        message = "{} shares its storage with an input, which other programs still read; pass another."
        with refused(message.format("out_table")):
            kernel.compact_block_table_(table, lens, queries, table, out_lens, params, block_size=2)
        for shared in (lens, queries):
            with refused(message.format("out_lens")):
                kernel.compact_block_table_(table, lens, queries, out_table, shared, params, block_size=2)

    def test_cpu_tensors_are_refused_by_the_compiled_kernel(self, kernel: ModuleType, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        monkeypatch.setattr(kernel, "_compact_rows", kernel.triton.jit(kernel._compact_rows.fn))
        table, lens, queries = random_batch(5, 4, 6, 2)
        params = kernel.window_params(SinkWindow(1, 2), device="cpu")
        with refused(
            "the tensors are on the CPU, where Triton does not run; use windowed_mtp.paging.compact_block_table."
        ):
            kernel.compact_block_table_(table, lens, queries, table.clone(), lens.clone(), params, block_size=2)

    def test_a_window_beyond_32_bits_is_refused(self, kernel: ModuleType):
        with refused(
            "SinkWindow(sink=0, window=2147483648, min_context=0) does not fit 32 bits; pass values below 2**31."
        ):
            kernel.window_params(SinkWindow(0, 2**31), device="cpu")


def test_paging_needs_no_triton():
    code = "import sys; sys.modules['triton'] = None; import windowed_mtp.paging"
    subprocess.run([sys.executable, "-c", code], check=True)


class TestRing:
    def test_by_hand(self):
        policy = SinkWindow(sink=2, window=3)
        assert ring_slots_per_sequence(policy, 2) == 7
        slots = [ring_slot(0, p, window=policy, num_speculative_tokens=2) for p in range(14)]
        assert slots == [0, 1, 2, 3, 4, 5, 6, 2, 3, 4, 5, 6, 2, 3]
        assert ring_slot(3, 7, window=policy, num_speculative_tokens=2) == 23

    def test_without_sinks(self):
        slots = [ring_slot(1, p, window=SinkWindow(0, 1), num_speculative_tokens=1) for p in range(5)]
        assert slots == [2, 3, 2, 3, 2]

    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
    def test_tensors_broadcast_and_equal_the_ints(self, dtype: torch.dtype):
        options = {"window": SinkWindow(3, 5), "num_speculative_tokens": 2}
        rows, positions = torch.arange(4, dtype=dtype), torch.arange(50, dtype=dtype)
        expected = [[ring_slot(r, p, **options) for p in range(50)] for r in range(4)]
        slots = ring_slot(rows[:, None], positions, **options)
        assert slots.dtype == torch.int64
        assert slots.tolist() == expected
        assert ring_slot(2, positions, **options).tolist() == expected[2]
        assert ring_slot(rows, 17, **options).tolist() == [row[17] for row in expected]

    def test_rows_far_out_do_not_wrap(self):
        row = torch.tensor(2**31 - 1, dtype=torch.int32)
        slot = ring_slot(row, 0, window=SinkWindow(), num_speculative_tokens=6)
        assert slot.item() == (2**31 - 1) * 4102

    def test_every_row_uses_all_of_its_slots_and_no_others(self):
        for sink, window, tokens in itertools.product(range(4), range(1, 5), range(1, 4)):
            policy = SinkWindow(sink, window)
            owned = ring_slots_per_sequence(policy, tokens)
            assert owned == sink + window + tokens
            for row in range(3):
                used = {ring_slot(row, p, window=policy, num_speculative_tokens=tokens) for p in range(40)}
                assert used == set(range(row * owned, (row + 1) * owned))

    @pytest.mark.parametrize(
        ("length", "expected"),
        [
            (0, []),
            (1, [0]),
            (2, [0, 1]),
            (7, [0, 1, 2, 3, 4, 5, 6]),
            (8, [0, 1, 3, 4, 5, 6, 7]),
            (20, [0, 1, 15, 16, 17, 18, 19]),
        ],
    )
    def test_what_stays_after_a_pass(self, length: int, expected: list[int]):
        assert ring_kept(length, window=SinkWindow(2, 3), num_speculative_tokens=2) == expected

    @pytest.mark.parametrize(
        ("row", "position", "tokens", "message"),
        [
            (0, -1, 2, "position is -1, but it must be at least 0; pass a larger value."),
            (-1, 0, 2, "row is -1, but it must be at least 0; pass a larger value."),
            (0, 1.0, 2, "position is 1.0, but it must be a whole number; pass an integer."),
            (0, 1, 0, "num_speculative_tokens is 0, but it must be at least 1; pass a larger value."),
            (0, torch.tensor([1]), 0, "num_speculative_tokens is 0, but it must be at least 1; pass a larger value."),
            (0, 1, 2.5, "num_speculative_tokens is 2.5, but it must be a whole number; pass an integer."),
            (0, torch.ones(2), 2, "position is a torch.float32 tensor, but it must hold integers; convert it."),
            (torch.tensor([True]), 0, 2, "row is a torch.bool tensor, but it must hold integers; convert it."),
        ],
    )
    def test_bad_input_is_refused_in_one_sentence(self, row: object, position: object, tokens: object, message: str):
        with refused(message):
            ring_slot(row, position, window=SinkWindow(1, 2), num_speculative_tokens=tokens)

    def test_bad_lengths_are_refused_in_one_sentence(self):
        with refused("length is -1, but it must be at least 0; pass a larger value."):
            ring_kept(-1, window=SinkWindow(1, 2), num_speculative_tokens=2)
        with refused("num_speculative_tokens is 0, but it must be at least 1; pass a larger value."):
            ring_slots_per_sequence(SinkWindow(1, 2), 0)

    def test_min_context_above_the_span_is_refused(self):
        assert ring_slots_per_sequence(SinkWindow(1, 2, min_context=3), 2) == 5
        policy = SinkWindow(1, 2, min_context=4)
        options = {"window": policy, "num_speculative_tokens": 2}
        message = "min_context is 4, but a ring keeps only sink + window = 3 keys; lower min_context or keep all keys."
        for call in (
            lambda: ring_slots_per_sequence(policy, 2),
            lambda: ring_slot(0, 0, **options),
            lambda: ring_kept(9, **options),
        ):
            with refused(message):
                call()
