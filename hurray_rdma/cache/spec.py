"""What a paged KV cache looks like: the facts that both roles of all layers share.

Knows counts, dtypes and the order of axes inside a page; knows no memory and no page IDs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise

import numpy as np

from hurray_rdma.errors import GeometryError
from hurray_rdma.format import ElementType, KvRole, PerBlockAffine, element_type_of, mark_tensors, storage_dtype

__all__ = ["CacheSpec", "PageOrder"]

_UINT32_MAX = 2**32 - 1
_QUANTIZED = PerBlockAffine.storage
_SCALE_DTYPES = ("float16", "bfloat16", "float32")


class PageOrder(StrEnum):
    """Order of the axes inside a page, outermost first: N tokens, H heads, D content."""

    NHD = "NHD"
    """Tokens, heads, content: the interchange order of ADR-024."""
    HND = "HND"
    """Heads, tokens, content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSpec:
    """Geometry of one cache: pages of ``page_size`` tokens, for each role of each layer.

    Two are equal if they describe the same cache, whether ``layers`` and ``total_heads`` were given or follow.
    `dataclasses.replace` keeps what was given, and what follows does so anew.

    Raises:
        GeometryError: a field is out of its range; the message names it.
    """

    num_layers: int
    """Layers, each with its own pages per role, >= 1."""
    num_heads: int
    """KV heads per token, >= 1 (1 for a latent cache)."""
    head_dim: int
    """Elements per head (twice the model's when keys and values are packed into one fused role), >= 1."""
    page_size: int
    """Tokens per page, >= 1."""
    dtype: str
    """Element type by its name in the format, e.g. ``"bfloat16"``."""
    roles: tuple[str, ...] = ("key", "value")
    """``"key"`` and ``"value"``, or ``"fused"`` alone."""
    order: PageOrder = PageOrder.NHD
    """Order of the axes inside a page."""
    layers: tuple[int, ...] | None = field(default=None, compare=False)
    """The model's index of each layer, ascending; None is 0 to num_layers - 1. A hybrid model's cache groups have some
    of the layers each."""
    head_offset: int = 0
    """The model's index of the first head, where a cache holds a slice of them (tensor parallelism)."""
    total_heads: int | None = field(default=None, compare=False)
    """KV heads of the model; None is ``head_offset + num_heads``."""
    scale_dtype: str | None = None
    """Element type of the quantisation scales, one for each page slot (ADR-024, per-block affine); None is
    unquantised."""
    zero_points: bool = False
    """Whether each page slot has an int32 zero point beside its scale."""
    layer_indices: tuple[int, ...] = field(init=False, repr=False)
    """``layers``, whether given or not, ``[num_layers]``."""
    heads_of_model: int = field(init=False, repr=False)
    """``total_heads``, whether given or not."""
    tensors: tuple[tuple[str, int], ...] = field(init=False, repr=False, compare=False)
    """Every (role, layer), in the order of all lists of them: layer 0 in order of ``roles``, layer 1 ..."""
    tensor_marks: tuple[bytes, ...] = field(init=False, repr=False, compare=False)
    """`hurray_rdma.format.mark_tensors` of ``tensors``."""
    element_type: ElementType = field(init=False, repr=False, compare=False)
    """The format's element type of ``dtype``."""
    row_nbytes: int = field(init=False, repr=False, compare=False)
    """Bytes of one token of one head."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_heads", "head_dim", "page_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _UINT32_MAX:
                raise GeometryError(f"must be an integer from 1 to {_UINT32_MAX}", field=name, value=value)
        object.__setattr__(self, "element_type", element_type_of(self.dtype))
        object.__setattr__(self, "dtype", self.element_type.wire_name)
        object.__setattr__(self, "roles", _roles(self.roles))
        object.__setattr__(self, "order", _order(self.order))
        object.__setattr__(self, "layer_indices", _layers(self.layers, self.num_layers))
        object.__setattr__(self, "layers", None if self.layers is None else self.layer_indices)
        last = self.head_offset + self.num_heads
        object.__setattr__(self, "heads_of_model", last if self.total_heads is None else self.total_heads)
        tensors = tuple((role, layer) for layer in self.layer_indices for role in self.roles)
        object.__setattr__(self, "tensors", tensors)
        object.__setattr__(self, "tensor_marks", mark_tensors(tensors))
        self._check_heads()
        self._check_quantization()
        bits = self.head_dim * self.element_type.bits
        if bits % 8:
            raise GeometryError(
                f"elements of {self.element_type.bits} bits make it {bits} bits: a head must be whole bytes",
                field="head_dim",
                value=self.head_dim,
            )
        object.__setattr__(self, "row_nbytes", bits // 8)

    def _check_heads(self) -> None:
        if self.head_offset < 0 or self.heads[1] > self.heads_of_model:
            raise GeometryError(
                f"the cache's {self.num_heads} heads from there must lie below total_heads {self.heads_of_model}",
                field="head_offset",
                value=self.head_offset,
            )

    def _check_quantization(self) -> None:
        if self.scale_dtype is None:
            if self.zero_points:
                raise GeometryError("zero points need scales: give scale_dtype", field="zero_points", value=True)
            return
        if self.element_type not in _QUANTIZED:
            names = ", ".join(each.wire_name for each in _QUANTIZED)
            raise GeometryError(f"must be one of {names} where slots have scales", field="dtype", value=self.dtype)
        if self.scale_dtype not in _SCALE_DTYPES:
            raise GeometryError(f"must be one of {_SCALE_DTYPES}", field="scale_dtype", value=self.scale_dtype)
        if self.page_size < 2 or self.page_size & (self.page_size - 1):
            raise GeometryError(
                "must be a power of two, 2 or more, where slots have scales", field="page_size", value=self.page_size
            )

    @property
    def heads(self) -> tuple[int, int]:
        """The model's heads that this cache holds: first, and the one after the last."""
        return self.head_offset, self.head_offset + self.num_heads

    @property
    def storage_dtype(self) -> np.dtype[np.generic]:
        """NumPy dtype of the arrays; uint8 where several elements share a byte."""
        return storage_dtype(self.element_type)

    @property
    def itemsize(self) -> int:
        """Bytes of one item of ``storage_dtype``."""
        return self.storage_dtype.itemsize

    @property
    def row_items(self) -> int:
        """Items of ``storage_dtype`` in one token of one head; ``head_dim`` unless elements are packed."""
        return self.row_nbytes // self.itemsize

    @property
    def page_nbytes(self) -> int:
        """Bytes of one page of one role of one layer."""
        return self.page_size * self.num_heads * self.row_nbytes

    @property
    def page_shape(self) -> tuple[int, int, int]:
        """Shape of one page as it is stored: ``(page_size, num_heads, row_items)``, or with heads first for HND."""
        if self.order is PageOrder.HND:
            return self.num_heads, self.page_size, self.row_items
        return self.page_size, self.num_heads, self.row_items

    def with_order(self, order: PageOrder | str, /) -> CacheSpec:
        """The same cache with another order of axes inside its pages.

        Raises:
            GeometryError: no such order.
        """
        chosen = _order(order)
        return self if chosen is self.order else replace(self, order=chosen)

    def index(self, role: str, layer: int, /) -> int:
        """Place of (role, layer) in `tensors`.

        Raises:
            GeometryError: there is no such role or layer.
        """
        if role not in self.roles:
            raise GeometryError(f"must be one of {self.roles}", field="role", value=role)
        layers = self.layer_indices
        place = bisect_left(layers, layer)
        if place == len(layers) or layers[place] != layer:
            known = f"from 0 to {len(layers) - 1}" if layers[-1] == len(layers) - 1 else f"one of {layers}"
            raise GeometryError(f"must be {known}", field="layer", value=layer)
        return place * len(self.roles) + self.roles.index(role)

    def indices(self, layers: Sequence[int], /) -> list[int]:
        """Places in `tensors` of every role of these layers, in their order.

        Raises:
            GeometryError: there is no such layer.
        """
        count = len(self.roles)
        starts = dict(zip(self.layer_indices, range(0, len(self.tensors), count), strict=True))
        for layer in layers:
            if layer not in starts:
                self.index(self.roles[0], layer)  # which says what is wrong
        return [place for layer in layers for place in range(starts[layer], starts[layer] + count)]


def _layers(layers: Iterable[int] | None, num_layers: int) -> tuple[int, ...]:
    if layers is None:
        return tuple(range(num_layers))
    indices = tuple(layers)
    if len(indices) != num_layers:
        raise GeometryError(f"must be num_layers {num_layers}", field="len(layers)", value=len(indices))
    if indices[0] < 0 or indices[-1] >= _UINT32_MAX or any(a >= b for a, b in pairwise(indices)):
        raise GeometryError(f"must ascend, from 0 to {_UINT32_MAX - 1}", field="layers", value=indices)
    return indices


def _roles(roles: object) -> tuple[str, ...]:
    known = tuple(role.name.lower() for role in KvRole)
    names = (roles,) if isinstance(roles, str) else tuple(roles)  # type: ignore[arg-type]
    if not names or len(set(names)) != len(names) or not set(names) <= set(known):
        raise GeometryError(f"must be one or more of {known}, each at most once", field="roles", value=roles)
    if "fused" in names and len(names) > 1:
        raise GeometryError("a fused role holds keys and values: it stands alone", field="roles", value=names)
    return names


def _order(order: PageOrder | str) -> PageOrder:
    try:
        return PageOrder(order)
    except ValueError as error:
        raise GeometryError(f"must be one of {[str(o) for o in PageOrder]}", field="order", value=order) from error
