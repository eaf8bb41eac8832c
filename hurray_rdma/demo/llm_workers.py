"""The two processes of ``--llm``: one reads a prompt and sends its cache, one continues the text from pages alone."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import numpy as np

from hurray_rdma.cache import PagePool, Snapshot
from hurray_rdma.demo.child import Link
from hurray_rdma.demo.config import DemoConfig
from hurray_rdma.demo.messages import Command, Continued, FirstToken, Listening, Prefilled, Ready, Verdict
from hurray_rdma.demo.prefill import ucx_options
from hurray_rdma.engine import Engine, Peer, TransferStats
from hurray_rdma.errors import ConfigError
from hurray_rdma.transport import default_context

__all__ = ["llm_decode", "llm_prefill"]


async def llm_prefill(link: Link, config: DemoConfig, path: Path) -> None:
    """Life of the prefill process: each layer's pages leave while the next layers are computed."""
    _quiet()
    from hurray_rdma.demo.language_model import LanguageModel, write_layer  # noqa: PLC0415 - torch

    model = LanguageModel(path)
    spec = model.spec(page_size=config.llm.page_size)
    prompt = model.tokens_of(config.llm.prompt)
    if len(prompt) > config.llm.max_prompt_tokens:
        raise ConfigError(
            f"must be at least the {len(prompt)} tokens of llm.prompt",
            field="llm.max_prompt_tokens",
            value=config.llm.max_prompt_tokens,
        )
    num_pages = -(-len(prompt) // spec.page_size)
    page_ids = np.random.default_rng(config.batch.seed).permutation(2 * num_pages).astype(np.uint32)[:num_pages]
    with PagePool.allocate(spec, num_pages=2 * num_pages, context=default_context(ucx_options(config))) as pool:
        snapshot = Snapshot.from_block_tables(pool, [page_ids], seq_lens=[len(prompt)])
        link.send(Ready())
        receiver = await link.receive(Listening)
        async with Engine(pool) as engine, engine.connect(receiver.address) as peer:
            loop = asyncio.get_running_loop()
            done: asyncio.Queue[int | None] = asyncio.Queue()

            def on_layer(layer: int, keys: Any, values: Any) -> None:
                write_layer(pool, layer, keys, values, page_ids=page_ids)
                loop.call_soon_threadsafe(done.put_nowait, layer)

            reading = asyncio.create_task(asyncio.to_thread(model.read, prompt, on_layer=on_layer))
            reading.add_done_callback(lambda _: done.put_nowait(None))
            stats = await _send_layers(peer, snapshot, done)
            cache, first_token = await reading
            link.send(Prefilled(stats, spec, FirstToken(first_token)))
            continued = await link.receive(Continued)
        tokens = model.continue_greedily(cache, first_token, num_tokens=config.llm.new_tokens)
        link.send(Verdict(tokens, model.text_of(continued.tokens)))


async def _send_layers(peer: Peer, snapshot: Snapshot, done: asyncio.Queue[int | None]) -> TransferStats:
    """Sends each layer as ``done`` names it; None before the last layer means that the model failed."""
    async with peer.begin(snapshot, key="prompt") as transfer:
        for _ in range(snapshot.pool.spec.num_layers):
            layer = await done.get()
            if layer is None:
                break
            await transfer.send_layer(layer)
    return transfer.stats


async def llm_decode(link: Link, config: DemoConfig, path: Path) -> None:
    """Life of the decode process: it has the model, and what arrives."""
    _quiet()
    from hurray_rdma.demo.language_model import LanguageModel, cache_from_pages  # noqa: PLC0415 - torch

    model = LanguageModel(path)
    spec = model.spec(page_size=config.llm.page_size)
    num_pages = -(-config.llm.max_prompt_tokens // spec.page_size)
    with PagePool.allocate(spec, num_pages=num_pages, context=default_context(ucx_options(config))) as pool:
        async with Engine(pool, listen="127.0.0.1:0") as engine:
            link.send(Listening(engine.address))
            arrival = await anext(aiter(engine.arrivals()))
            snapshot = await arrival.snapshot(timeout_s=config.llm.deadline_s)
            first = await link.receive(FirstToken)
            cache = cache_from_pages(snapshot, seq=0)
            arrival.release()
            tokens = await asyncio.to_thread(
                model.continue_greedily, cache, first.token_id, num_tokens=config.llm.new_tokens
            )
            link.send(Continued(tokens))
            await link.receive(Command)


def _quiet() -> None:
    """No progress bars of the loader's across the supervisor's own: tqdm reads this when it is imported."""
    os.environ["TQDM_DISABLE"] = "1"
