"""The same in push mode with a token, by the README's own lines: prefill writes while it computes, the proxy signs.

The servers take a minute to start, and all tests share them; the last one kills the prefill side.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from hurray_rdma.testing.vllm_servers import free_port
from tests.vllm.prompts import PROMPTS
from tests.vllm.serving import (
    BLOCK,
    BLOCK_NBYTES,
    CHAT,
    TEXT,
    Served,
    Stream,
    answer,
    asked,
    chatted,
    serving,
    text_of,
    until,
)

FAILED = "vllm:hurray_failed_transfers_total"
PORT = free_port()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("push")
    secret = folder / "token"
    secret.write_text(secrets.token_hex())
    replaced = {"7400": str(PORT), "/etc/hurray-token": str(secret)}
    # Decode waits while prefill computes, on a CPU that may be busy.
    patient = {'"mode": "push"': '"mode": "push", "timeout_s": 240, "lease_s": 240'}
    with serving("push", replaced | patient, folder) as servers:
        yield servers


def failures(served: Served) -> tuple[float, float]:
    return served.prefill.metric(FAILED), served.decode.metric(FAILED)


def test_the_same_text_as_from_one_and_the_metrics_say_what_was_moved(served: Served) -> None:
    names = [f"vllm:hurray_{name}" for name in ("transfer_seconds_count", "transfer_blocks_total")]
    names += [f"vllm:hurray_{name}" for name in ("resident_blocks_total", "transfer_bytes_total")]
    num_blocks, num_requests = 0, 0
    for path, make, prompts in ((TEXT, asked, PROMPTS[:7]), (CHAT, chatted, PROMPTS[:1])):
        for prompt in prompts:
            both = answer(served.proxy, path, make(prompt))
            alone = answer(served.prefill, path, make(prompt))
            assert text_of(both) == text_of(alone)
            assert both["usage"] == alone["usage"]
            num_blocks += -(-both["usage"]["prompt_tokens"] // BLOCK)
            num_requests += 1
    until(lambda: served.prefill.metric(names[0]) >= num_requests)
    transfers, moved, resident, nbytes = (served.prefill.metric(name) for name in names)
    assert transfers == num_requests
    assert moved + resident == num_blocks
    assert moved > num_blocks / 2
    assert nbytes == moved * BLOCK_NBYTES
    assert failures(served) == (0, 0)


def test_streamed_and_at_once(served: Served) -> None:
    prompts = [f"Request {at}. {prompt}" for at, prompt in enumerate(PROMPTS[:6])]
    with ThreadPoolExecutor(len(prompts)) as clients:
        alone = [text_of(told) for told in clients.map(lambda each: answer(served.prefill, TEXT, asked(each)), prompts)]
        both = [text_of(told) for told in clients.map(lambda each: answer(served.proxy, TEXT, asked(each)), prompts)]
    assert both == alone
    prompt = "A stream begins in the hills and"
    with closing(Stream(served.proxy, TEXT, asked(prompt))) as stream:
        pieces = [event["choices"][0]["text"] for event in stream if event["choices"]]
    assert "".join(pieces) == text_of(answer(served.prefill, TEXT, asked(prompt)))
    assert failures(served) == (0, 0)


def test_a_client_that_chooses_a_name_itself_has_its_prompt_computed_and_nothing_moved(served: Served) -> None:
    """It could be the name of another client's, whose pages would come, or be replaced."""
    prompt, before = "Whose pages are these?", served.prefill.metric("vllm:hurray_transfer_bytes_total")
    name = {"remote_request_id": "name of another"}
    pushing = {"do_remote_decode": True, "remote_addresses": [f"127.0.0.1:{PORT}"]}
    told = answer(served.prefill, TEXT, asked(prompt, max_tokens=1, kv_transfer_params=name | pushing))
    assert told["kv_transfer_params"] is None
    expecting = {"do_remote_prefill": True}
    told = answer(served.decode, TEXT, asked(prompt, kv_transfer_params=name | expecting))
    assert text_of(told) == text_of(answer(served.prefill, TEXT, asked(prompt)))
    until(lambda: failures(served) == (1, 1))
    assert served.prefill.metric("vllm:hurray_transfer_bytes_total") == before
    for server in (served.prefill, served.decode):
        assert "remote_signature" in server.log()


def test_prefill_killed(served: Served) -> None:
    """The last test. A client that waits is told, and decode waits no longer."""
    served.prefill.kill()
    status, told = served.proxy.post(TEXT, asked("The prefill side of this request is dead, and"))
    assert status == 502
    assert f"the prefill instance {served.prefill.url} could not be reached" in told["error"]["message"]
    until(
        lambda: (
            served.decode.metric("vllm:num_requests_waiting") == served.decode.metric("vllm:num_requests_running") == 0
        )
    )
