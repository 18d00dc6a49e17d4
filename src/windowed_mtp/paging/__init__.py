"""The visible set in physical slots: compacted block tables and lengths of paged caches, and slots of a ring.

The Triton kernel lives in :mod:`windowed_mtp.paging.triton` and is not imported here, so that this package needs
nothing but torch.
"""

from windowed_mtp.paging.blocks import compact_block_table, dropped_per_row
from windowed_mtp.paging.lengths import dropped_blocks, may_drop, windowed_length, windowed_length_bound
from windowed_mtp.paging.ring import ring_kept, ring_slot, ring_slots_per_sequence

__all__ = [
    "compact_block_table",
    "dropped_blocks",
    "dropped_per_row",
    "may_drop",
    "ring_kept",
    "ring_slot",
    "ring_slots_per_sequence",
    "windowed_length",
    "windowed_length_bound",
]
