"""Between a model's keys and values and pages: what is written into a pool, and what comes out of one.

Knows torch tensors and pools; moves nothing between processes. A pool of int8 pages gets each token's values divided by
a scale of its own, which stands in the page's slot beside them (ADR-024 section 6, per-block affine, symmetric).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hurray_rdma.cache import CacheSpec, PagePool, Snapshot
from hurray_rdma.demo.continuation import side_by_side
from hurray_rdma.demo.language_model import Layers
from hurray_rdma.demo.llm_batch import PackedPrompts, PageTables
from hurray_rdma.errors import GeometryError

__all__ = ["layer_from_pages", "layers_from_memory", "quantize", "write_layer"]

_INT8_MAX = 127


def write_layer(pool: PagePool, layer: int, keys: Any, values: Any, *, pages: PageTables) -> None:
    """Writes one layer's keys and values of packed prompts into their pages, quantised if the pool is.

    Args:
        pool: written in place.
        layer: index.
        keys, values: torch tensors ``[1, num_heads, num_packed, head_dim]``.
        pages: where each token goes.

    Raises:
        GeometryError: the model keeps something else in its cache than the pool's spec says.
    """
    spec = pool.spec
    for role, tensor in (("key", keys), ("value", values)):
        if tuple(tensor.shape) != (1, spec.num_heads, len(pages.page_ids), spec.head_dim):
            raise GeometryError(
                f"must be [1, {spec.num_heads}, {len(pages.page_ids)}, {spec.head_dim}]",
                field=f"shape of the {role} cache of layer {layer}",
                value=tuple(tensor.shape),
            )
        tokens = tensor[0].permute(1, 0, 2).contiguous()
        if spec.scale_dtype is None:
            pool.pages(role, layer)[pages.page_ids, pages.offsets] = _as_stored(tokens, spec)
        else:
            stored, scales = quantize(tokens)
            pool.pages(role, layer)[pages.page_ids, pages.offsets] = stored
            pool.scales(role, layer)[pages.page_ids, pages.offsets] = scales


def quantize(tokens: Any) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Symmetric int8 with a scale for each token.

    Args:
        tokens: a torch tensor ``[num_tokens, num_heads, head_dim]``.

    Returns:
        int8 of the same shape and float32 ``[num_tokens]``, finite and above 0; their product is within half a scale of
        ``tokens``.
    """
    values = tokens.to(torch.float32).numpy()
    largest = np.abs(values).max(axis=(1, 2))
    scales = np.maximum(largest / np.float32(_INT8_MAX), np.finfo(np.float32).tiny)
    return np.rint(values / scales[:, None, None]).astype(np.int8), scales


def layer_from_pages(snapshot: Snapshot, layer: int, *, dtype: Any) -> tuple[Any, Any]:
    """One layer's keys and values out of pages, as `side_by_side` joins them (a gathered copy).

    Args:
        snapshot: whose pages of that layer hold their content.
        layer: index.
        dtype: torch dtype that the model computes in.
    """
    keys, values = (
        side_by_side([_tokens(snapshot, role, layer, seq, dtype) for seq in range(snapshot.num_seqs)])
        for role in ("key", "value")
    )
    return keys, values


def layers_from_memory(prompts: PackedPrompts, layers: Layers, *, quantized: bool) -> Layers:
    """What `layer_from_pages` gives where nothing was lost, for all layers, from the model's own tensors: no pages.

    Args:
        prompts: what was read.
        layers: as `LanguageModel.read` returned them.
        quantized: to int8 and back on the way.
    """
    places = [torch.from_numpy(prompts.places(seq)) for seq in range(prompts.num_seqs)]
    return [(_joined(keys, places, quantized), _joined(values, places, quantized)) for keys, values in layers]


def _joined(packed: Any, places: Sequence[Any], quantized: bool) -> Any:
    tokens = packed[0].permute(1, 0, 2).contiguous()
    if quantized:
        stored, scales = quantize(tokens)
        tokens = torch.from_numpy(stored.astype(np.float32) * scales[:, None, None]).to(packed.dtype)
    return side_by_side([tokens[chosen] for chosen in places])


def _tokens(snapshot: Snapshot, role: str, layer: int, seq: int, dtype: Any) -> Any:
    if snapshot.pool.spec.scale_dtype is not None:
        return torch.from_numpy(snapshot.dequantize(role, layer=layer, seq=seq)).to(dtype)
    return torch.from_numpy(snapshot.tokens(role, layer=layer, seq=seq).view(np.uint8)).view(dtype)


def _as_stored(tokens: Any, spec: CacheSpec) -> NDArray[Any]:
    return tokens.view(torch.uint8).numpy().view(spec.storage_dtype)  # type: ignore[no-any-return]
