"""Packed elements: several to a byte, low bits first (element-types, Sub-Byte Types). Bits in, codes out and back."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["pack_codes", "unpack_codes"]


def unpack_codes(data: NDArray[np.uint8], *, bits: int, num_elements: int) -> NDArray[np.uint8]:
    """The unsigned codes of packed elements.

    Args:
        data: bytes, uint8 [..., n]; each row is packed by itself.
        bits: width of one element: 1, 2, 4 or 6.
        num_elements: elements in each row.

    Returns:
        uint8 [..., num_elements], each below ``2**bits``.
    """
    flat = np.unpackbits(data, axis=-1, bitorder="little", count=num_elements * bits)
    return _join(flat.reshape(*data.shape[:-1], num_elements, bits))


def pack_codes(codes: NDArray[Any], *, bits: int) -> NDArray[np.uint8]:
    """Packed bytes of codes; unused bits at the end are 0.

    Args:
        codes: integers [..., num_elements]; the low ``bits`` of each count, so signed values are taken as they are.
        bits: width of one element: 1, 2, 4 or 6.

    Returns:
        uint8 [..., ceil(num_elements * bits / 8)].
    """
    planes = codes.astype(np.uint8)[..., None] >> np.arange(bits, dtype=np.uint8) & np.uint8(1)
    return np.packbits(planes.reshape(*codes.shape[:-1], -1), axis=-1, bitorder="little")


def _join(planes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    codes = planes[..., 0].copy()
    for bit in range(1, planes.shape[-1]):
        codes |= planes[..., bit] << np.uint8(bit)
    return codes
