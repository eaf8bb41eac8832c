"""Three tensor-parallel workers, one KV head each: what one of them has, the one of the same rank reads.

One instance on both sides, since such a one takes a minute of two cores to start: each worker reads from itself, into
other blocks, as from another instance.
"""

from __future__ import annotations

import json
from pathlib import Path

from hurray_rdma.testing.vllm_servers import free_port, vllm_serve
from tests.vllm.prompts import MODEL
from tests.vllm.serving import BLOCK, BLOCK_NBYTES, TEXT, answer, asked, text_of, until

TP = 3
CONFIG = {
    "kv_role": "kv_both",
    "kv_connector": "HurrayConnector",
    "kv_connector_module_path": "hurray_rdma.connectors.vllm",
    # Three workers on two cores take their time, which is not what is tried.
    "kv_connector_extra_config": {"timeout_s": 240, "lease_s": 240},
}
PROMPT = "The capital of France is a city of which it is said that it has more than one river, and"


def test_each_worker_reads_what_the_one_of_its_rank_has(tmp_path: Path) -> None:
    port = free_port()
    options = [MODEL, f"--port={port}", "--no-enable-prefix-caching", f"--kv-transfer-config={json.dumps(CONFIG)}"]
    log = tmp_path / "log"
    with vllm_serve(options, port=port, core="0|1|0", log=log, tensor_parallel_size=TP, max_model_len=256) as both:
        both.ready(timeout_s=500)
        alone = answer(both, TEXT, asked(PROMPT, max_tokens=2))
        handed = asked(PROMPT, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
        params = answer(both, TEXT, handed)["kv_transfer_params"]
        assert len(set(params["remote_addresses"])) == TP
        loaded = answer(both, TEXT, asked(PROMPT, max_tokens=2, kv_transfer_params=params))
        assert text_of(loaded) == text_of(alone)
        num_blocks = -(-alone["usage"]["prompt_tokens"] // BLOCK)
        nbytes = num_blocks * BLOCK_NBYTES  # a third for each
        until(lambda: both.metric("vllm:hurray_transfer_seconds_count") == TP)
        assert both.metric("vllm:hurray_transfer_bytes_total") == nbytes
        until(lambda: both.metric("vllm:hurray_read_bytes_total") == nbytes)
        assert both.metric("vllm:hurray_read_prompts_total") == 1
        # An instance with another number of workers is refused by name.
        fewer = params | {"remote_addresses": params["remote_addresses"][1:]}
        status, _ = both.post(TEXT, asked(PROMPT, max_tokens=2, kv_transfer_params=fewer))
        assert status == 500
        assert "tensor_parallel_size = 2: of the prefill side; this side has 3" in both.log()
        assert both.metric("vllm:hurray_failed_transfers_total") >= 1
