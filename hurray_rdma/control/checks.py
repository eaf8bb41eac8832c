"""Checks that the private messages share: ranges of numbers, lengths, index arrays.

This module knows no message. What breaks a rule is a typed error that names the field.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hurray_rdma.errors import ConfigError, GeometryError

__all__ = [
    "MAX_NAME_CHARS",
    "U32_MAX",
    "U64_MAX",
    "BoolArray",
    "Uint8Array",
    "Uint32Array",
    "at_most",
    "between",
    "seconds",
    "uint32",
]

Uint32Array: TypeAlias = npt.NDArray[np.uint32]
Uint8Array: TypeAlias = npt.NDArray[np.uint8]
BoolArray: TypeAlias = npt.NDArray[np.bool_]

U32_MAX = 2**32 - 1
U64_MAX = 2**64 - 1
MAX_NAME_CHARS = 256
_UINT32 = np.dtype(np.uint32)
_MAX_DAYS_S = 7 * 86400.0


def between(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(f"must be {low} to {high}", field=name, value=value)


def seconds(name: str, value: float) -> None:
    if not 0 < value <= _MAX_DAYS_S:  # nor is any of these true of what is no number
        raise ConfigError(f"must be a number of seconds above 0 and at most {_MAX_DAYS_S:.0f}", field=name, value=value)


def at_most(name: str, value: str | bytes, limit: int) -> None:
    if len(value) > limit:
        unit = "characters" if isinstance(value, str) else "bytes"
        raise ConfigError(f"{name} has {len(value)} {unit}; at most {limit} are allowed")


def uint32(name: str, values: npt.ArrayLike) -> Uint32Array:
    if isinstance(values, np.ndarray) and values.dtype == _UINT32 and values.ndim == 1 and values.flags.c_contiguous:
        return values
    array = np.asarray(values)
    if array.ndim != 1:
        raise GeometryError("must have one axis", field=f"{name}.shape", value=array.shape)
    if array.dtype != np.uint32:
        if array.size and (array.dtype.kind not in "iu" or int(array.min()) < 0 or int(array.max()) > U32_MAX):
            raise GeometryError(f"{name} ({array.dtype}) must hold integers from 0 to {U32_MAX}")
        array = array.astype(np.uint32)
    return np.ascontiguousarray(array)
