"""What vLLM loads: `HurrayConnector`, one object in the scheduler and one in each worker.

It only hands on: the two sides know what to do (`scheduler`, `worker`), and this module vLLM's names for it
(KVConnectorBase_V1 of vLLM 0.32).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.platforms import current_platform
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus

from hurray_rdma.connectors.vllm.caches import Caches
from hurray_rdma.connectors.vllm.config import ConnectorConfig
from hurray_rdma.connectors.vllm.fits import check_instance
from hurray_rdma.connectors.vllm.handoff import Layout
from hurray_rdma.connectors.vllm.scheduler import SchedulerSide
from hurray_rdma.connectors.vllm.stats import HurrayPromMetrics, HurrayStats, stats_of
from hurray_rdma.connectors.vllm.steps import Ended, Handshake, Step
from hurray_rdma.connectors.vllm.worker import WorkerSide

__all__ = ["HurrayConnector"]

_COMPLETE = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


class HurrayConnector(KVConnectorBase_V1):  # type: ignore[misc] # vLLM is not there when types are checked
    """Hands the pages of a prompt from the vLLM instance that computed it to the one that continues it.

    Raises:
        ConfigError: ``kv_connector_extra_config``, or what the instance is, does not fit.
    """

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer, self._parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
        self._config = ConnectorConfig.from_extra(transfer.kv_connector_extra_config)
        self._config.check_role(produces=transfer.is_kv_producer)
        self._listens = transfer.is_kv_consumer if self._config.pushes else transfer.is_kv_producer
        self._block_size = int(vllm_config.cache_config.block_size)
        check_instance(vllm_config.parallel_config, kv_cache_config.kv_cache_groups)
        self._caches: Caches | None = None
        self._worker: WorkerSide | None = None
        self._step = Step()
        self._ended = Ended()
        self._scheduler: SchedulerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(
                block_size=self._block_size,
                layout=layout_of(vllm_config, kv_cache_config),
                model=model_of(vllm_config),
                tp_size=self._parallel.tensor_parallel_size,
                lease_s=self._config.lease_s,
                token=self._config.secret(),
                pushes=self._config.pushes,
                push_to=self._config.push_to,
                block_ids_of=lambda request_id: list(self._kv_cache_manager.get_block_ids(request_id)[0]),
            )

    # The scheduler's.

    def _scheduling(self) -> SchedulerSide:
        assert self._scheduler is not None, "only the scheduler's object is asked this"
        return self._scheduler

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, Handshake]) -> None:
        """The workers listen, by rank."""
        self._scheduling().set_addresses(metadata[rank].address for rank in sorted(metadata))

    def on_new_request(self, request: Any) -> None:
        self._scheduling().new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return self._scheduling().matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduling().allocated(request, list(blocks.get_block_ids()[0]), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Step:
        return self._scheduling().take_step(
            scheduler_output.num_scheduled_tokens, preempted=scheduler_output.preempted_req_ids or ()
        )

    def update_connector_output(self, connector_output: Any) -> None:
        self._scheduling().received(connector_output.finished_recving or ())

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduling().finished(request, complete=request.status in _COMPLETE)

    # The workers'.

    def _working(self) -> WorkerSide:
        assert self._worker is not None, "only a worker's object is asked this, after register_kv_caches"
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Makes a pool of vLLM's tensors, in place, and the engine over it."""
        model = self._vllm_config.model_config
        rank, size = _tp_rank(), self._parallel.tensor_parallel_size
        self._caches = Caches.of(
            kv_caches,
            layout_of(self._vllm_config, self._kv_cache_config),
            block_size=self._block_size,
            total_heads=model.get_total_num_kv_heads(),
            tp_rank=rank,
            tp_size=size,
            mappable=self._config.map_caches and current_platform.is_cpu(),
        )
        self._worker = WorkerSide(
            self._caches,
            self._config,
            tp_rank=rank,
            tp_size=size,
            listens=self._listens,
            first_worker=self._parallel.data_parallel_index * size,  # also where vLLM calls each rank the only one
        )

    def get_handshake_metadata(self) -> Handshake:
        return Handshake(self._working().address)

    def handle_preemptions(self, kv_connector_metadata: Step) -> None:
        """Before the step that may write into their blocks."""
        for request_id, keep in kv_connector_metadata.preempted.items():
            self._working().withdraw(request_id, keep=keep)

    def bind_connector_metadata(self, connector_metadata: Step) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._step = connector_metadata
        if self._worker is not None:
            self._worker.push(self._step)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._working().begin(self._step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads end between steps."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Lets the layer go out, where it is pushed."""
        if self._step.publish and self._caches is not None:
            cuda = self._caches.whole.device != "cpu"
            self._working().layer_computed(layer_name, torch.cuda.current_stream() if cuda else None)

    def wait_for_save(self) -> None:
        """The step's pages are computed."""
        if self._step.publish and self._caches is not None:
            if self._caches.whole.device != "cpu":
                torch.cuda.current_stream().synchronize()
            self._working().publish(self._step)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        self._ended = self._working().ended(finished_req_ids)
        return KVConnectorTransferResults(finished_sending=self._ended.sent, finished_recving=self._ended.received)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._ended.failed_block_ids

    def get_kv_connector_stats(self) -> HurrayStats | None:
        return stats_of(self._ended) if self._worker is not None else None

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
        if self._caches is not None:
            self._caches.close()

    # What vLLM asks the class.

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> HurrayStats:
        return HurrayStats(data)

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> HurrayPromMetrics:
        return HurrayPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def model_of(vllm_config: Any) -> str:
    """Names the model: its class, and a digest of its configuration without names of files and versions."""
    facts = vllm_config.model_config.hf_config.to_dict()
    for name in ("_name_or_path", "transformers_version", "dtype", "torch_dtype"):
        facts.pop(name, None)
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
    return f"{'+'.join(facts.get('architectures') or ['?'])}-{digest[:16]}"


def layout_of(vllm_config: Any, kv_cache_config: Any) -> str:
    """What the attention backend keeps inside a block, as of `Layout`; the CPU's depends on its instructions."""
    if not current_platform.is_cpu() or vllm_config.model_config.use_mla:
        return Layout.ROWS
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # noqa: PLC0415 - where there is such a backend

    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    return f"cpu-{_get_attn_isa(spec.dtype, spec.block_size, spec.head_size)}"


def _tp_rank() -> int:
    from vllm.distributed import get_tensor_model_parallel_rank  # noqa: PLC0415 - only workers have one

    return int(get_tensor_model_parallel_rank())
