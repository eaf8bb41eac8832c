"""What a paged KV cache looks like: the facts that both roles of all layers share.

Knows counts, dtypes and the order of axes inside a page; knows no memory and no page IDs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from hurray_rdma.errors import GeometryError
from hurray_rdma.format import ElementType, KvRole, numpy_dtype

__all__ = ["CacheSpec", "PageOrder"]

_UINT32_MAX = 2**32 - 1


class PageOrder(StrEnum):
    """Order of the axes inside a page, outermost first: N tokens, H heads, D content."""

    NHD = "NHD"
    """Tokens, heads, content: the interchange order of ADR-024."""
    HND = "HND"
    """Heads, tokens, content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSpec:
    """Geometry of one cache: pages of ``page_size`` tokens, for each role of each layer.

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

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_heads", "head_dim", "page_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _UINT32_MAX:
                raise GeometryError(f"must be an integer from 1 to {_UINT32_MAX}", field=name, value=value)
        object.__setattr__(self, "dtype", _element_type(self.dtype).wire_name)
        object.__setattr__(self, "roles", _roles(self.roles))
        object.__setattr__(self, "order", _order(self.order))
        bits = self.head_dim * self.element_type.bits
        if bits % 8:
            raise GeometryError(
                f"elements of {self.element_type.bits} bits make it {bits} bits: a head must be whole bytes",
                field="head_dim",
                value=self.head_dim,
            )

    @property
    def element_type(self) -> ElementType:
        """The format's element type of ``dtype``."""
        return ElementType.from_name(self.dtype)

    @property
    def storage_dtype(self) -> np.dtype[np.generic]:
        """NumPy dtype of the arrays; uint8 where several elements share a byte."""
        return numpy_dtype(self.element_type)

    @property
    def itemsize(self) -> int:
        """Bytes of one item of ``storage_dtype``."""
        return self.storage_dtype.itemsize

    @property
    def row_nbytes(self) -> int:
        """Bytes of one token of one head."""
        return self.head_dim * self.element_type.bits // 8

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

    @property
    def tensors(self) -> tuple[tuple[str, int], ...]:
        """Every (role, layer), in the order of all lists of them: layer 0 in order of ``roles``, layer 1 ..."""
        return tuple((role, layer) for layer in range(self.num_layers) for role in self.roles)

    def with_order(self, order: PageOrder | str, /) -> CacheSpec:
        """The same cache with another order of axes inside its pages.

        Raises:
            GeometryError: no such order.
        """
        return replace(self, order=_order(order))

    def index(self, role: str, layer: int, /) -> int:
        """Place of (role, layer) in `tensors`.

        Raises:
            GeometryError: there is no such role or layer.
        """
        if role not in self.roles:
            raise GeometryError(f"must be one of {self.roles}", field="role", value=role)
        if not 0 <= layer < self.num_layers:
            raise GeometryError(f"must be from 0 to {self.num_layers - 1}", field="layer", value=layer)
        return layer * len(self.roles) + self.roles.index(role)


def _element_type(name: object) -> ElementType:
    text = name if isinstance(name, str) else str(np.dtype(name))  # type: ignore[call-overload]
    try:
        return ElementType.from_name(text)
    except (ValueError, KeyError) as error:
        raise GeometryError("is no element type of the format", field="dtype", value=name) from error


def _roles(roles: object) -> tuple[str, ...]:
    known = tuple(role.name.lower() for role in KvRole)
    names = (roles,) if isinstance(roles, str) else tuple(roles)  # type: ignore[arg-type]
    if not names or len(set(names)) != len(names) or not set(names) <= set(known):
        raise GeometryError(f"must be one or more of {known}, each at most once", field="roles", value=roles)
    if "fused" in names and len(names) > 1:
        raise GeometryError("a fused role holds keys and values: it stands alone", field="roles", value=names)
    return names


def _order(order: object) -> PageOrder:
    try:
        return PageOrder(order)
    except ValueError as error:
        raise GeometryError(f"must be one of {[str(o) for o in PageOrder]}", field="order", value=order) from error
