"""What vLLM logs and exports of transfers, through its own hooks. Knows vLLM's classes for it, and plain numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

from hurray_rdma.connectors.vllm.steps import Ended

__all__ = ["HurrayPromMetrics", "HurrayStats", "stats_of"]

_LISTS = ("seconds", "moving_seconds", "nbytes", "num_pages", "num_resident")
_COUNTS = ("num_read_prompts", "num_read_blocks", "read_nbytes")


class HurrayStats(KVConnectorStats):  # type: ignore[misc] # vLLM is not there when types are checked
    """Transfers that ended in one interval; ``data`` is plain lists and counts, so that it can travel."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data=data or {})
        if not self.data:
            self.reset()

    def reset(self) -> None:
        """Nothing has happened."""
        lists: dict[str, Any] = {name: [] for name in _LISTS}
        self.data: dict[str, Any] = lists | dict.fromkeys(_COUNTS, 0) | {"lanes": {}, "failures": {}}

    def is_empty(self) -> bool:
        """Whether nothing has happened."""
        return not any(self.data[name] for name in ("seconds", "failures", *_COUNTS))

    def aggregate(self, other: KVConnectorStats) -> HurrayStats:
        """Adds what another worker, or a later interval, has."""
        for name in (*_LISTS, *_COUNTS):
            self.data[name] += other.data[name]
        for name in ("lanes", "failures"):
            for key, count in other.data[name].items():
                self.data[name][key] = self.data[name].get(key, 0) + count
        return self

    def reduce(self) -> dict[str, int | float | str]:
        """For the log."""
        seconds, nbytes = np.array(self.data["seconds"]), np.array(self.data["nbytes"])
        facts: dict[str, int | float | str] = {"Num successful transfers": len(seconds)}
        if len(seconds):
            facts |= {
                "Avg xfer time (ms)": round(float(seconds.mean()) * 1e3, 3),
                "P90 xfer time (ms)": round(float(np.percentile(seconds, 90)) * 1e3, 3),
                "Avg MB per transfer": round(float(nbytes.mean()) / 2**20, 3),
                "Throughput (MB/s)": round(float(nbytes.sum() / seconds.sum()) / 2**20, 1),
                "Lanes": "+".join(sorted(self.data["lanes"])),
            }
        if self.data["num_read_prompts"]:
            facts["Num prompts read by others"] = self.data["num_read_prompts"]
        return facts | {"Num failed transfers": sum(self.data["failures"].values())}


def stats_of(ended: Ended) -> HurrayStats | None:
    """Of one step of one worker; None where nothing has happened."""
    stats = HurrayStats()
    for transfer in ended.transfers:
        stats.data["seconds"].append(transfer.seconds)
        stats.data["moving_seconds"].append(transfer.write_seconds)
        stats.data["nbytes"].append(transfer.sent_nbytes)
        stats.data["num_pages"].append(transfer.num_pages)
        stats.data["num_resident"].append(transfer.num_resident)
        stats.data["lanes"][transfer.lane] = stats.data["lanes"].get(transfer.lane, 0) + 1
    for name in _COUNTS:
        stats.data[name] = getattr(ended, name)
    for kind in ended.failures:
        stats.data["failures"][kind] = stats.data["failures"].get(kind, 0) + 1
    return None if stats.is_empty() else stats


class HurrayPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The same on vLLM's ``/metrics``."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine)
        self._seconds = self._metric(
            self._histogram_cls(
                name="vllm:hurray_transfer_seconds",
                documentation="From asking for a prompt's pages to the confirmation that they are complete.",
                buckets=[0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10],
                labelnames=labelnames,
            )
        )
        self._nbytes = self._counter("vllm:hurray_transfer_bytes", "Page bytes moved.")
        self._pages = self._counter("vllm:hurray_transfer_blocks", "Blocks moved, each layer's together.")
        self._resident = self._counter("vllm:hurray_resident_blocks", "Blocks that were here, and not moved.")
        self._read = {
            "num_read_prompts": self._counter("vllm:hurray_read_prompts", "Prompts that others have read here."),
            "num_read_blocks": self._counter("vllm:hurray_read_blocks", "Blocks of them, also those that they had."),
            "read_nbytes": self._counter("vllm:hurray_read_bytes", "Bytes of these blocks."),
        }
        self._failures = self._counter("vllm:hurray_failed_transfers", "Transfers that failed.")

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds what `HurrayStats.data` says."""
        for seconds in transfer_stats_data["seconds"]:
            self._seconds[engine_idx].observe(seconds)
        for counter, name in ((self._nbytes, "nbytes"), (self._pages, "num_pages"), (self._resident, "num_resident")):
            counter[engine_idx].inc(sum(transfer_stats_data[name]))
        for name, counter in self._read.items():
            counter[engine_idx].inc(transfer_stats_data[name])
        self._failures[engine_idx].inc(sum(transfer_stats_data["failures"].values()))

    def _counter(self, name: str, documentation: str) -> Any:
        return self._metric(self._counter_cls(name=name, documentation=documentation, labelnames=self._labelnames))

    def _metric(self, metric: Any) -> Any:
        return create_metric_per_engine(metric, self.per_engine_labelvalues)
