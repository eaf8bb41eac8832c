"""From the caller's arrays to memory to register: do they fit the spec, and which bytes are they.

Knows shapes, strides and addresses; registers through the context it is given.
"""

from __future__ import annotations

import importlib
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hurray_rdma.cache.layout import Part, Segment, parts_of
from hurray_rdma.cache.spec import CacheSpec, PageOrder
from hurray_rdma.cache.views import StridedView, strided_view
from hurray_rdma.errors import GeometryError, RegistrationError
from hurray_rdma.format import ElementType, numpy_dtype

if TYPE_CHECKING:
    from hurray_rdma.transport import Context, Region

__all__ = [
    "ALIGNMENT_NBYTES",
    "checked_views",
    "device_arrays",
    "part_dtype",
    "part_shape",
    "register_views",
    "segment_of",
]

Arrays = Mapping[str, Sequence[Any]]

ALIGNMENT_NBYTES = 4096
"""Of each part of each role of each layer in memory that a pool allocates: what ADR-024 asks of RDMA buffers."""


def part_dtype(spec: CacheSpec, part: Part) -> np.dtype[np.generic]:
    """NumPy dtype of the arrays of a part."""
    if part is Part.PAGES:
        return spec.storage_dtype
    return np.dtype(np.int32) if part is Part.ZERO_POINTS else numpy_dtype(ElementType.from_name(str(spec.scale_dtype)))


def part_shape(spec: CacheSpec, part: Part) -> tuple[int, ...]:
    """Shape of one page of a part."""
    return spec.page_shape if part is Part.PAGES else (spec.page_size,)


def segment_of(
    spec: CacheSpec, part: Part, strides_nbytes: Sequence[int], *, region_index: int, offset_nbytes: int
) -> Segment:
    """The segment of an array of that part with those strides."""
    if part is not Part.PAGES:
        return Segment(region_index, offset_nbytes, strides_nbytes[0], strides_nbytes[1], 0)
    page, first, second = strides_nbytes[:3]
    token, head = (second, first) if spec.order is PageOrder.HND else (first, second)
    return Segment(region_index, offset_nbytes, page, token, head)


def device_arrays(spec: CacheSpec, num_pages: int, *, device: str) -> dict[Part, dict[str, list[Any]]]:
    """New CuPy arrays for the pages of a pool, all zeros, in one allocation of their own, by part and role.

    Raises:
        ConfigError: it names no GPU.
        RegistrationError: CuPy is not installed, or there is no such memory.
    """
    from hurray_rdma.transport.devices import device_index  # noqa: PLC0415 - loads UCX, which specs need not

    index = device_index(device)
    try:
        cupy = importlib.import_module("cupy")
    except ImportError as error:
        raise RegistrationError(
            "CuPy allocates memory on a GPU, and is not installed",
            field="device",
            value=device,
            fix="pip install 'hurray-rdma[gpu]', or allocate with your GPU library and use PagePool.from_arrays",
        ) from error
    places = [(part, role) for role, _ in spec.tensors for part in parts_of(spec)]
    shapes = [(num_pages, *part_shape(spec, part)) for part, _ in places]
    dtypes = [_cupy_dtype(part_dtype(spec, part)) for part, _ in places]
    sizes = [
        -(-math.prod(shape) * dtype.itemsize // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    try:
        with cupy.cuda.Device(index):
            # Not from CuPy's pool, whose blocks share an allocation with whatever else: an rkey may cover all of one.
            memory = cupy.cuda.MemoryPointer(cupy.cuda.Memory(sum(sizes)), 0)
            # Done before anybody writes there, on a stream that waits for no other: not the default, nor the caller's.
            stream = cupy.cuda.Stream(non_blocking=True)
            memory.memset_async(0, sum(sizes), stream)
            stream.synchronize()
            arrays: dict[Part, dict[str, list[Any]]] = {}
            offset = 0
            for (part, role), shape, dtype, size in zip(places, shapes, dtypes, sizes, strict=True):
                arrays.setdefault(part, {}).setdefault(role, []).append(cupy.ndarray(shape, dtype, memory + offset))
                offset += size
    except (cupy.cuda.runtime.CUDARuntimeError, MemoryError) as error:
        raise RegistrationError(f"no such memory on {device}: {error}", field="num_pages", value=num_pages) from error
    return arrays


def _cupy_dtype(dtype: np.dtype[np.generic]) -> np.dtype[np.generic]:
    """The dtype itself, or unsigned integers that hold its bits: CuPy has none of ml_dtypes'."""
    return dtype if dtype.isbuiltin == 1 else np.dtype(f"uint{8 * dtype.itemsize}")


def checked_views(spec: CacheSpec, arrays: Mapping[Part, Arrays]) -> tuple[StridedView, ...]:
    """The arrays in the order of `PoolLayout.segments`.

    Raises:
        GeometryError: roles, layers, shapes, dtypes, devices or strides do not fit ``spec``.
    """
    for part in Part:
        given = arrays.get(part)
        if (given is not None) != (part in parts_of(spec)):
            state = "has none" if given is not None else "needs them"
            raise GeometryError(f"the spec {state}", field=_NAMES[part], value=None if given is None else tuple(given))
        if given is not None:
            _check_lists(spec, given, name=_NAMES[part])
    views: list[StridedView] = []
    seen: dict[tuple[int, tuple[int, ...]], str] = {}
    for role, layer in spec.tensors:
        for part in parts_of(spec):
            place = spec.index(role, layer) // len(spec.roles)
            name = f"{_NAMES[part]}[{role!r}][{place}]"
            view = strided_view(arrays[part][role][place], name=name)
            _check_view(spec, part, view, views[0] if views else view, name=name)
            twin = seen.setdefault((view.address, view.strides_nbytes), name)
            if twin != name:
                raise GeometryError(f"is the same memory as {twin}", field=name, value=hex(view.address))
            views.append(view)
    return tuple(views)


_NAMES = {Part.PAGES: "arrays", Part.SCALES: "scales", Part.ZERO_POINTS: "zero_points"}
"""Arguments of `PagePool.from_arrays`."""


def _check_lists(spec: CacheSpec, arrays: Arrays, *, name: str) -> None:
    if set(arrays) != set(spec.roles):
        raise GeometryError(f"must have the roles {spec.roles}", field=name, value=tuple(arrays))
    for role in spec.roles:
        if len(arrays[role]) != spec.num_layers:
            raise GeometryError(
                f"must have one array for each of the {spec.num_layers} layers",
                field=f"len({name}[{role!r}])",
                value=len(arrays[role]),
            )


def _check_view(spec: CacheSpec, part: Part, view: StridedView, first: StridedView, *, name: str) -> None:
    num_pages = first.shape[0] if first.shape else 0
    page_shape = part_shape(spec, part)
    if view.shape != (num_pages, *page_shape):
        raise GeometryError(
            f"must be [num_pages, {', '.join(map(str, page_shape))}] in order {spec.order}"
            + (f" with num_pages {num_pages} as the first array" if view is not first else ""),
            field=f"{name}.shape",
            value=view.shape,
        )
    dtype = part_dtype(spec, part)
    if view.dtype_name not in {str(dtype), f"uint{8 * dtype.itemsize}"}:
        raise GeometryError(
            f"must be {dtype}, or unsigned integers of its size that hold its bits",
            field=f"{name}.dtype",
            value=view.dtype_name,
        )
    if view.device != first.device:
        raise GeometryError(
            f"must be on {first.device} as all arrays of the pool", field=f"{name}.device", value=view.device
        )
    if part is Part.PAGES:
        _check_content(view, name=name)
    _check_disjoint(view, name=name)


def _check_content(view: StridedView, *, name: str) -> None:
    if view.shape[-1] > 1 and view.strides_nbytes[-1] != view.itemsize:
        raise GeometryError(
            f"must be {view.itemsize} along the last axis: a head's content lies together",
            field=f"{name}.strides",
            value=view.strides_nbytes,
        )


def _check_disjoint(view: StridedView, *, name: str) -> None:
    extent = view.itemsize
    for stride, size in sorted(zip(view.strides_nbytes, view.shape, strict=True)):
        if size > 1 and stride < extent:
            raise GeometryError(
                f"has a stride of {stride} over elements of {extent} bytes: they would overlap",
                field=f"{name}.strides",
                value=view.strides_nbytes,
            )
        extent += (size - 1) * stride


@dataclass(slots=True, eq=False)
class _Place:
    """Bytes to register once."""

    start: int
    end: int
    allocation: int
    owners: list[object]


def register_views(
    views: Sequence[StridedView], context: Context, *, replace: bool = False
) -> tuple[tuple[Region, ...], tuple[tuple[int, int], ...]]:
    """Registers the memory under the views, no byte twice, and nothing between views that lie apart.

    Args:
        views: of one device.
        context: UCX's.
        replace: as of `Context.replace`.

    Returns:
        The regions, and for each view its region's index and its offset there in bytes.

    Raises:
        RegistrationError: UCX refuses; nothing stays registered.
    """
    places: list[_Place] = []
    for view in sorted(views, key=lambda view: view.span):
        start, end = view.span
        last = places[-1] if places else None
        if last is not None and (start < last.end or (start == last.end and view.allocation == last.allocation)):
            last.end = max(last.end, end)
            last.owners.append(view.owner)
        else:
            places.append(_Place(start, end, view.allocation, [view.owner]))
    regions: list[Region] = []
    try:
        for place in places:
            nbytes, owner = place.end - place.start, tuple(place.owners)
            if replace:
                regions.append(context.replace(place.start, nbytes, owner=owner))
            else:
                regions.append(context.register(place.start, nbytes, owner=owner, device=views[0].device))
    except BaseException:
        for region in regions:
            region.close()
        raise
    starts = [place.start for place in places]
    indices = (bisect_right(starts, view.address) - 1 for view in views)
    found = tuple((index, view.address - starts[index]) for index, view in zip(indices, views, strict=True))
    return tuple(regions), found
