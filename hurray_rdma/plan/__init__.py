"""Plans in pure NumPy: which pages travel, which bytes go where, and what the block table says afterwards.

Knows page IDs, strides and byte offsets; does no I/O, and knows neither asyncio nor UCX nor any device library.
"""

from hurray_rdma.plan.cutting import Cutter, Pieces
from hurray_rdma.plan.keys import map_keys
from hurray_rdma.plan.lookups import check_table, entries_among
from hurray_rdma.plan.mapping import map_pages
from hurray_rdma.plan.negotiate import check_pair, common_heads
from hurray_rdma.plan.operations import Plan
from hurray_rdma.plan.packed import pack, packed_nbytes, unpack
from hurray_rdma.plan.pagemap import PageMap
from hurray_rdma.plan.rewrite import rewrite
from hurray_rdma.plan.tables import PlacedTables, dedupe, valid_pages
from hurray_rdma.plan.transfer import Move, MovesTogether, Program, TransferPlan, plan_transfer
from hurray_rdma.plan.whole import WholePages

__all__ = [
    "Cutter",
    "Move",
    "MovesTogether",
    "PageMap",
    "Pieces",
    "PlacedTables",
    "Plan",
    "Program",
    "TransferPlan",
    "WholePages",
    "check_pair",
    "check_table",
    "common_heads",
    "dedupe",
    "entries_among",
    "map_keys",
    "map_pages",
    "pack",
    "packed_nbytes",
    "plan_transfer",
    "rewrite",
    "unpack",
    "valid_pages",
]
