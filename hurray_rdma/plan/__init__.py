"""Plans in pure NumPy: which pages travel, which bytes go where, and what the block table says afterwards.

Knows page IDs, strides and byte offsets; does no I/O, and knows neither asyncio nor UCX nor any device library.
"""

from hurray_rdma.plan.operations import Plan, build_plan
from hurray_rdma.plan.tables import dedupe, rewrite, valid_pages

__all__ = ["Plan", "build_plan", "dedupe", "rewrite", "valid_pages"]
