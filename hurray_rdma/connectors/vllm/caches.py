"""vLLM's cache tensors as a pool, in place, whatever their physical order.

vLLM 0.32 registers a tensor for each layer, logically ``[blocks, heads, tokens, content]`` with keys and values packed
into the content (a latent cache has one head), in six physical orders: a fused role, heads before tokens, with strides.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hurray_rdma.cache import CacheSpec, PagePool
from hurray_rdma.errors import GeometryError

__all__ = ["pool_of"]


def pool_of(
    kv_caches: Mapping[str, Any], *, block_size: int, total_heads: int, tp_rank: int = 0, tp_size: int = 1
) -> PagePool:
    """A pool over the tensors; they stay alive while it is open.

    Args:
        kv_caches: by the names of the layers; layers that share a tensor with another are left out.
        block_size: tokens of a block, as vLLM's block manager counts.
        total_heads: KV heads of the model.
        tp_rank, tp_size: of this worker, which has a slice of the heads, or a copy of one that others have, too.

    Raises:
        GeometryError: a tensor has another shape; the message names the layer.
        RegistrationError: UCX refuses the memory.
    """
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
        tensors.setdefault((_address(tensor), tuple(tensor.shape)), tensor)
    layers = list(tensors.values())
    if not layers:
        raise GeometryError("must have a tensor for each layer", field="kv_caches", value={})
    num_heads, head_dim = int(layers[0].shape[1]), int(layers[0].shape[3])
    spec = CacheSpec(
        num_layers=len(layers),
        num_heads=num_heads,
        head_dim=head_dim,
        page_size=block_size,
        dtype=str(layers[0].dtype).removeprefix("torch."),
        roles=("fused",),
        head_offset=min(tp_rank * total_heads // tp_size, max(0, total_heads - num_heads)),
        total_heads=max(total_heads, num_heads),
    )
    return PagePool.from_arrays(spec, {"fused": layers}, order="HND", external=True)


def _numbers(name: str) -> tuple[int, ...]:
    """``model.layers.10.self_attn`` comes after ``model.layers.9.self_attn``."""
    return tuple(int(number) for number in re.findall(r"\d+", name))


def _address(tensor: Any) -> int:
    return int(tensor.data_ptr()) if hasattr(tensor, "data_ptr") else int(tensor.__array_interface__["data"][0])
