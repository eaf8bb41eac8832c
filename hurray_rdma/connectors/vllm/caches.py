"""vLLM's cache tensors as a pool, in place, whatever their physical order.

vLLM 0.32 registers a tensor for each layer, logically ``[blocks, heads, tokens, content]`` with keys and values packed
into the content (a latent cache has one head), in six physical orders: a fused role, heads before tokens, with strides.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hurray_rdma.cache import CacheSpec, PagePool
from hurray_rdma.connectors.vllm.handoff import Layout
from hurray_rdma.engine.compat import pages_nbytes
from hurray_rdma.errors import GeometryError, RegistrationError

__all__ = ["KEYS", "VALUES", "WHOLE", "Caches", "planes_of", "pool_of"]

_log = logging.getLogger(__name__)

WHOLE, KEYS, VALUES = "", "/keys", "/values"
"""Ends of the keys under which a prompt is published: blocks as they are, or their planes."""


@dataclass(frozen=True, slots=True)
class Caches:
    """The cache tensors of a worker as pools over the same memory."""

    pools: Mapping[str, PagePool]
    """`WHOLE`, and where there are planes `KEYS` and `VALUES`."""
    names: Mapping[str, int]
    """vLLM's names of the layers, and the number of each in `whole`; those that share a tensor have the same."""
    opaque: bool
    """Whether a block cannot be cut between tokens: it travels whole then."""

    @classmethod
    def of(cls, kv_caches: Mapping[str, Any], layout: str, *, mappable: bool = False, **geometry: Any) -> Caches:
        """Arguments and errors as of `pool_of`; ``layout`` is what is inside a block (`Layout`)."""
        pools = {WHOLE: pool_of(kv_caches, mappable=mappable, **geometry)}
        if layout == Layout.CPU_VEC:
            pools[KEYS], pools[VALUES] = planes_of(kv_caches, block_size=geometry["block_size"])
        return cls(pools, _indices(kv_caches), layout != Layout.ROWS)

    @property
    def whole(self) -> PagePool:
        return self.pools[WHOLE]

    @property
    def block_nbytes(self) -> int:
        """Of all layers, with everything that is in them."""
        return pages_nbytes(self.whole.spec)

    def ends_for(self, block_size: int, /) -> tuple[str, ...]:
        """What is exchanged with an instance that has blocks of that size."""
        if self.opaque and block_size != self.whole.spec.page_size:
            return KEYS, VALUES
        return (WHOLE,)

    def num_tokens(self, end: str, block_ids: list[int], num_tokens: int) -> int:
        """How many tokens are said to be in the blocks of a prompt: all that fit, where a block cannot be cut."""
        return len(block_ids) * self.whole.spec.page_size if end == WHOLE and self.opaque else num_tokens

    def layers_of(self, end: str) -> Mapping[str, range]:
        """The layers of a pool that belong to each of vLLM's: of planes there is one for each head."""
        count = 1 if end == WHOLE else self.whole.spec.num_heads
        return {name: range(index * count, (index + 1) * count) for name, index in self.names.items()}

    def close(self) -> None:
        """Deregisters the memory."""
        for pool in self.pools.values():
            pool.close()


def pool_of(
    kv_caches: Mapping[str, Any],
    *,
    block_size: int,
    total_heads: int,
    tp_rank: int = 0,
    tp_size: int = 1,
    mappable: bool = False,
) -> PagePool:
    """A pool over the tensors; they stay alive while it is open.

    Args:
        kv_caches: by the names of the layers; layers that share a tensor with another are left out.
        block_size: tokens of a block, as vLLM's block manager counts.
        total_heads: KV heads of the model.
        tp_rank, tp_size: of this worker, which has a slice of the heads, or a copy of one that others have, too.
        mappable: as of `PagePool.from_arrays`, where it can be.

    Raises:
        GeometryError: a tensor has another shape; the message names the layer.
        RegistrationError: UCX refuses the memory.
    """
    layers = _layers(kv_caches, block_size=block_size)
    num_heads, head_dim = int(layers[0].shape[1]), int(layers[0].shape[3])
    spec = CacheSpec(
        num_layers=len(layers),
        num_heads=num_heads,
        head_dim=head_dim,
        page_size=block_size,
        dtype=_dtype(layers[0]),
        roles=("fused",),
        head_offset=min(tp_rank * total_heads // tp_size, max(0, total_heads - num_heads)),
        total_heads=max(total_heads, num_heads),
    )
    if mappable:
        try:
            return PagePool.from_arrays(spec, {"fused": layers}, order="HND", external=True, mappable=True)
        except RegistrationError as error:
            _log.warning("instances on this host copy pages through the kernel, at half the speed: %s", error)
    return PagePool.from_arrays(spec, {"fused": layers}, order="HND", external=True)


def planes_of(kv_caches: Mapping[str, Any], *, block_size: int) -> tuple[PagePool, PagePool]:
    """Keys and values of a `Layout.CPU_VEC` cache by themselves, so that blocks of another size can be made of them.

    Each head of each layer counts as a layer. Of the keys each element of the content counts as a head: its tokens lie
    together.

    Raises:
        GeometryError, RegistrationError: as `pool_of`.
    """
    keys, values = [], []
    for layer in _layers(kv_caches, block_size=block_size):
        num_blocks, num_heads, _, content = layer.shape
        planes = layer.reshape(num_blocks, num_heads, 2, block_size * content // 2)
        if _address(planes) != _address(layer):  # a copy
            raise GeometryError("must be whole blocks", field="kv_caches strides", value=str(layer))
        for head in range(num_heads):
            keys.append(planes[:, head, 0].reshape(num_blocks, content // 2, block_size, 1))
            values.append(planes[:, head, 1].reshape(num_blocks, 1, block_size, content // 2))
    return _plane("key", keys), _plane("value", values)


def _plane(role: str, arrays: list[Any]) -> PagePool:
    spec = CacheSpec(
        num_layers=len(arrays),
        num_heads=int(arrays[0].shape[1]),
        head_dim=int(arrays[0].shape[3]),
        page_size=int(arrays[0].shape[2]),
        dtype=_dtype(arrays[0]),
        roles=(role,),
    )
    return PagePool.from_arrays(spec, {role: arrays}, order="HND", external=True)


def _layers(kv_caches: Mapping[str, Any], *, block_size: int) -> list[Any]:
    """The tensors by layer, each once."""
    tensors: dict[tuple[int, tuple[int, ...]], Any] = {}
    for name in sorted(kv_caches, key=_numbers):
        tensor = kv_caches[name]
        if len(tensor.shape) != 4:
            raise GeometryError(
                "must be [blocks, heads, tokens, content]",
                field=f"kv_caches[{name!r}].shape",
                value=tuple(tensor.shape),
            )
        if tensor.shape[2] != block_size:
            raise GeometryError(
                f"must be the {block_size} tokens of a block: the attention backend splits blocks",
                field=f"kv_caches[{name!r}].shape[2]",
                value=tensor.shape[2],
            )
        tensors.setdefault(_identity(tensor), tensor)
    if not tensors:
        raise GeometryError("must have a tensor for each layer", field="kv_caches", value={})
    return list(tensors.values())


def _indices(kv_caches: Mapping[str, Any]) -> dict[str, int]:
    """The number of each layer in `_layers`."""
    numbers: dict[tuple[int, tuple[int, ...]], int] = {}
    return {
        name: numbers.setdefault(_identity(kv_caches[name]), len(numbers)) for name in sorted(kv_caches, key=_numbers)
    }


def _identity(tensor: Any) -> tuple[int, tuple[int, ...]]:
    """The same for layers that share a tensor."""
    return _address(tensor), tuple(tensor.shape)


def _dtype(array: Any) -> str:
    return str(array.dtype).removeprefix("torch.")


def _numbers(name: str) -> tuple[int, ...]:
    """``model.layers.10.self_attn`` comes after ``model.layers.9.self_attn``."""
    return tuple(int(number) for number in re.findall(r"\d+", name))


def _address(tensor: Any) -> int:
    return int(tensor.data_ptr()) if hasattr(tensor, "data_ptr") else int(tensor.__array_interface__["data"][0])
