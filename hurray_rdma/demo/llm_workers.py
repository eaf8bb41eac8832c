"""The two processes of ``--llm``: one reads prompts and sends its cache, one continues the texts from pages alone."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hurray_rdma.cache import CacheSpec, PagePool, Snapshot
from hurray_rdma.demo.child import Link
from hurray_rdma.demo.config import DemoConfig, LlmConfig
from hurray_rdma.demo.llm_batch import PackedPrompts, PageTables, lay_out, pack
from hurray_rdma.demo.llm_messages import Arrived, Continued, FirstTokens, Loaded, Prefilled
from hurray_rdma.demo.llm_plan import Move, moves, variants
from hurray_rdma.demo.messages import Command, Listening
from hurray_rdma.demo.prefill import ucx_options
from hurray_rdma.engine import Arrival, Engine, Peer, TransferStats
from hurray_rdma.errors import ConfigError
from hurray_rdma.transport import default_context

if TYPE_CHECKING:
    from hurray_rdma.demo.continuation import Continuation
    from hurray_rdma.demo.language_model import LanguageModel, Layers

__all__ = ["check_room", "llm_decode", "llm_prefill"]


async def llm_prefill(link: Link, config: DemoConfig, path: Path) -> None:
    """Life of the prefill process: reads and sends as `moves` says, then generates everything by itself."""
    _settle()
    from hurray_rdma.demo.language_model import LanguageModel  # noqa: PLC0415 - torch
    from hurray_rdma.demo.llm_alone import Alone  # noqa: PLC0415

    model = LanguageModel(path)
    spec = model.spec(page_size=config.llm.page_size)
    system = config.llm.system_prompt
    prompts = pack([model.prompt_of(system, prompt) for prompt in config.llm.prompts], page_size=spec.page_size)
    check_room(prompts, config.llm)
    pages = lay_out(prompts, page_size=spec.page_size, seed=config.batch.seed)
    specs = [variant.source(spec) for variant in variants(config.llm)]
    with _pools(specs, [pages.pool_pages] * len(specs), config) as pools:
        link.send(Loaded(spec, tuple(prompts.seq_lens.tolist()), prompts.prefix_tokens))
        receiver = await link.receive(Listening)
        async with Engine(pools[0]) as engine, engine.connect(receiver.address) as peer:
            sender = _Sender(link, peer, model, prompts, pages)
            for number, move in enumerate(moves(config)):
                await link.receive(Command)
                into = variants(config.llm)[move.variant].pool if move.variant else None
                layers, first_tokens = await sender.run(move, pools[move.variant], key=f"batch-{number}", into=into)
    await link.receive(Command)
    alone = Alone(model, prompts, layers, first_tokens, num_tokens=config.llm.new_tokens)
    continued = await link.receive(Continued)
    link.send(alone.verdict(variants(config.llm), continued))


@dataclass(frozen=True, slots=True)
class _Sender:
    """Reads the batch and sends it."""

    link: Link
    peer: Peer
    model: LanguageModel
    prompts: PackedPrompts
    pages: PageTables

    async def run(self, move: Move, pool: PagePool, *, key: str, into: str | None) -> tuple[Layers, tuple[int, ...]]:
        """One move; the keys and values of each layer as the model has them, and the first tokens."""
        from hurray_rdma.demo.llm_pages import write_layer  # noqa: PLC0415 - torch

        snapshot = Snapshot.from_block_tables(pool, self.pages.tables, seq_lens=self.prompts.seq_lens)
        loop = asyncio.get_running_loop()
        written: asyncio.Queue[int | None] = asyncio.Queue()

        def on_layer(layer: int, keys: Any, values: Any) -> None:
            write_layer(pool, layer, keys, values, pages=self.pages)
            loop.call_soon_threadsafe(written.put_nowait, layer)

        def read() -> tuple[Layers, tuple[int, ...], float]:
            layers, logits = self.model.read(self.prompts, on_layer=on_layer)
            first_tokens = tuple(logits.argmax(dim=-1).tolist())
            read_at_s = time.monotonic()
            self.link.send(FirstTokens(first_tokens))
            return layers, first_tokens, read_at_s

        started_at_s = time.monotonic()
        reading = asyncio.create_task(asyncio.to_thread(read))
        if move.layer_by_layer:
            reading.add_done_callback(lambda _: written.put_nowait(None))
            stats = await self._send_layers(snapshot, written, reading, key=key, into=into)
        else:
            await reading
            stats = await self.peer.send(snapshot, key=key, pool=into)
        layers, first_tokens, read_at_s = await reading
        self.link.send(Prefilled(stats, started_at_s, read_at_s))
        return layers, first_tokens

    async def _send_layers(
        self,
        snapshot: Snapshot,
        written: asyncio.Queue[int | None],
        reading: asyncio.Task[Any],
        *,
        key: str,
        into: str | None,
    ) -> TransferStats:
        """Sends each layer as ``written`` names it; None before the last layer means that the model failed."""
        async with self.peer.begin(snapshot, key=key, pool=into) as transfer:
            for _ in range(snapshot.pool.spec.num_layers):
                layer = await written.get()
                if layer is None:
                    await reading  # raises here, so that the transfer ends by the model's error and not by its own
                    break
                await transfer.send_layer(layer)
        return transfer.stats


async def llm_decode(link: Link, config: DemoConfig, path: Path) -> None:
    """Life of the decode process: it has the model, and what arrives. No prompt is among its settings."""
    _settle()
    from hurray_rdma.demo.language_model import LanguageModel  # noqa: PLC0415 - torch

    model = LanguageModel(path)
    spec = model.spec(page_size=config.llm.page_size)
    kinds = variants(config.llm)
    num_pages = [-(-config.llm.max_prompt_tokens // kind.dst_page_size) for kind in kinds]
    texts: dict[int, Continuation] = {}
    with _pools([kind.dest(spec) for kind in kinds], num_pages, config) as pools:
        async with Engine(pools[0], listen="127.0.0.1:0", timeout_s=config.llm.deadline_s) as engine:
            for kind, pool in zip(kinds[1:], pools[1:], strict=True):
                engine.add_pool(pool, name=kind.pool)
            link.send(Listening(engine.address))
            arrivals = aiter(engine.arrivals())
            for move in moves(config):
                await link.receive(Command)
                texts[move.variant] = await _receive(link, await anext(arrivals), pools[move.variant], model)
    await link.receive(Command)
    for text in texts.values():
        text.run(config.llm.new_tokens)
    link.send(Continued(tuple(texts[index].generated for index in range(len(kinds)))))
    await link.receive(Command)


async def _receive(link: Link, arrival: Arrival, pool: PagePool, model: LanguageModel) -> Continuation:
    """Takes each layer out of its pages as it arrives, gives them back, and generates the first token of its own."""
    from hurray_rdma.demo.continuation import Continuation  # noqa: PLC0415 - torch
    from hurray_rdma.demo.llm_pages import layer_from_pages  # noqa: PLC0415

    arriving = Snapshot(pool, arrival.block_table, arrival.seq_ptr, arrival.seq_lens)
    layers = []
    for layer in pool.spec.layer_indices:
        await arrival.wait_layer(layer)
        layers.append(await asyncio.to_thread(layer_from_pages, arriving, layer, dtype=model.dtype))
    await arrival.snapshot()
    arrival.release()
    first = await link.receive(FirstTokens)
    ready_at_s = time.monotonic()
    text = Continuation(model, layers, seq_lens=arriving.seq_lens, first_tokens=first.token_ids)
    await asyncio.to_thread(text.step)
    link.send(Arrived(ready_at_s, time.monotonic()))
    return text


@contextmanager
def _pools(specs: list[CacheSpec], num_pages: list[int], config: DemoConfig) -> Iterator[list[PagePool]]:
    with ExitStack() as stack:
        context = default_context(ucx_options(config))
        yield [
            stack.enter_context(PagePool.allocate(spec, num_pages=count, context=context))
            for spec, count in zip(specs, num_pages, strict=True)
        ]


def check_room(prompts: PackedPrompts, config: LlmConfig) -> None:
    """Raises ConfigError unless the receive pools, made before any prompt is known there, take all of the prompts."""
    page_size = max(config.page_size, config.decode_page_size)
    needed = int((-(-prompts.seq_lens.astype(int) // page_size)).sum()) * page_size
    if needed > config.max_prompt_tokens:
        raise ConfigError(
            f"must be at least the {needed} tokens of {prompts.num_seqs} prompts in whole pages of {page_size}",
            field="llm.max_prompt_tokens",
            value=config.max_prompt_tokens,
        )


def _settle() -> None:
    """Before torch is imported: no progress bars of the loader's across the supervisor's own (tqdm reads it then), and
    one thread for each process, so that sums have one order and both find a core."""
    os.environ["TQDM_DISABLE"] = "1"
    os.environ["OMP_NUM_THREADS"] = "1"
