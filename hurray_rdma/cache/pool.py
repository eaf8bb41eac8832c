"""Page pools: all pages of all roles and layers, in memory that is registered with UCX.

A pool is spans with strides: either one region that UCX allocated, or the caller's own arrays, in place. It knows where
each page is and, through its allocator, who holds it; it knows nothing of sequences or peers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hurray_rdma.cache.allocator import PageAllocator
from hurray_rdma.cache.spec import CacheSpec, PageOrder
from hurray_rdma.cache.views import StridedView, strided_view
from hurray_rdma.errors import GeometryError, RegistrationError

if TYPE_CHECKING:
    from hurray_rdma.transport import Context, Region

__all__ = ["PagePool", "Segment"]

_ALIGNMENT_NBYTES = 4096
"""Of each role of each layer in memory that the pool allocates: what ADR-024 asks of RDMA buffers."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Where the pages of one role of one layer are. Token t, head h of page p starts at ``region.address +
    offset_nbytes + p * page_stride_nbytes + t * token_stride_nbytes + h * head_stride_nbytes``."""

    region_index: int
    """Into `PagePool.regions`."""
    offset_nbytes: int
    """Of page 0, from the first byte of the region."""
    page_stride_nbytes: int
    """From one page to the next; `CacheSpec.page_nbytes` when nothing lies between them."""
    token_stride_nbytes: int
    head_stride_nbytes: int


class PagePool:
    """Pages of fixed size in registered memory. Made by `allocate` and `from_arrays`; a context manager.

    Views from `pages` stay valid memory after `close`; every other call raises then.
    """

    def __init__(
        self,
        spec: CacheSpec,
        num_pages: int,
        *,
        regions: tuple[Region, ...],
        segments: tuple[Segment, ...],
        views: tuple[Any, ...],
    ) -> None:
        self._spec = spec
        self._num_pages = num_pages
        self._regions = regions
        self._segments = segments
        self._views = views
        self._allocator = PageAllocator(num_pages)
        self._closed = False

    @classmethod
    def allocate(
        cls, spec: CacheSpec, num_pages: int, *, device: str = "cpu", context: Context | None = None
    ) -> PagePool:
        """A pool in one region of memory that UCX allocates, zero-filled: the fastest kind for a receiver.

        Args:
            spec: geometry of the pages.
            num_pages: pages of each role of each layer.
            device: ``"cpu"``.
            context: the UCX context; None is the process's own.

        Raises:
            GeometryError: ``num_pages`` is out of range.
            RegistrationError: no memory.
        """
        _check_num_pages(num_pages)
        if device != "cpu":
            raise RegistrationError(
                "a pool can allocate memory on the host only",
                field="device",
                value=device,
                fix="Allocate with your GPU library and use PagePool.from_arrays",
            )
        tensor_nbytes = num_pages * spec.page_nbytes
        pitch = -(-tensor_nbytes // _ALIGNMENT_NBYTES) * _ALIGNMENT_NBYTES
        region = _context(context).allocate(pitch * len(spec.tensors), device=device)
        memory = region.array()
        segments = []
        views = []
        for index in range(len(spec.tensors)):
            span = memory[index * pitch : index * pitch + tensor_nbytes]
            view = span.view(spec.storage_dtype).reshape(num_pages, *spec.page_shape)
            views.append(view)
            segments.append(_segment(spec, view.strides, region_index=0, offset_nbytes=index * pitch))
        return cls(spec, num_pages, regions=(region,), segments=tuple(segments), views=tuple(views))

    @classmethod
    def from_arrays(
        cls,
        spec: CacheSpec,
        arrays: Mapping[str, Sequence[Any]],
        *,
        order: PageOrder | str | None = None,
        context: Context | None = None,
    ) -> PagePool:
        """A pool over the caller's arrays, in place; they stay alive while the pool is open.

        Args:
            spec: geometry of the pages.
            arrays: per role one array per layer, each ``[num_pages, page_size, num_heads, head_dim]``, or
                ``[num_pages, num_heads, page_size, head_dim]`` with order HND. Strides may be any that keep a head's
                content together; arrays may be interleaved views of one allocation.
            order: replaces ``spec.order``.
            context: the UCX context; None is the process's own.

        Raises:
            GeometryError: roles, layers, shapes, dtypes or strides do not fit ``spec``; nothing is registered then.
            RegistrationError: UCX refuses the memory.
        """
        if order is not None:
            spec = spec.with_order(order)
        views = _checked_views(spec, arrays)
        num_pages = views[0].shape[0]
        places = _merge_spans(views)
        regions = _register(places, _context(context))
        starts = [place.start for place in places]
        segments = []
        for view in views:
            region_index = bisect_right(starts, view.address) - 1
            offset = view.address - places[region_index].start
            segments.append(_segment(spec, view.strides_nbytes, region_index=region_index, offset_nbytes=offset))
        return cls(
            spec,
            num_pages,
            regions=regions,
            segments=tuple(segments),
            views=tuple(view.array for view in views),
        )

    @property
    def spec(self) -> CacheSpec:
        return self._spec

    @property
    def num_pages(self) -> int:
        """Pages of each role of each layer."""
        return self._num_pages

    @property
    def allocator(self) -> PageAllocator:
        """Who holds which page."""
        return self._allocator

    @property
    def regions(self) -> tuple[Region, ...]:
        """The registered spans; none contains a byte of another."""
        self._check_open("regions")
        return self._regions

    @property
    def device(self) -> str:
        """``"cpu"`` or ``"cuda:N"``."""
        return self._regions[0].device

    @property
    def closed(self) -> bool:
        return self._closed

    def pages(self, role: str, layer: int) -> Any:
        """All pages of one role of one layer, writable, in place: ``[num_pages, *spec.page_shape]``.

        Raises:
            GeometryError: there is no such role or layer.
        """
        self._check_open("pages")
        return self._views[self._spec.index(role, layer)]

    def segment(self, role: str, layer: int) -> Segment:
        """Where the pages of one role of one layer are.

        Raises:
            GeometryError: there is no such role or layer.
        """
        self._check_open("segment")
        return self._segments[self._spec.index(role, layer)]

    def close(self) -> None:
        """Deregisters the memory; peers can reach none of it any more. Idempotent."""
        if not self._closed:
            self._closed = True
            for region in self._regions:
                region.close()

    def __enter__(self) -> PagePool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = " [closed]" if self._closed else ""
        return f"<PagePool of {self._num_pages} pages x {len(self._segments)} tensors, {self._spec.dtype}{state}>"

    def _check_open(self, name: str) -> None:
        if self._closed:
            raise RegistrationError(f"PagePool.{name}: the pool is closed")


@dataclass(slots=True, eq=False)
class _Place:
    """Bytes to register once."""

    start: int
    end: int
    allocation: int
    device: str
    owners: list[object]


def _context(context: Context | None) -> Context:
    if context is not None:
        return context
    # Here and not at the top, so that pools can be described and planned without loading UCX.
    from hurray_rdma.transport import default_context  # noqa: PLC0415

    return default_context()


def _segment(spec: CacheSpec, strides: Sequence[int], *, region_index: int, offset_nbytes: int) -> Segment:
    token, head = (strides[2], strides[1]) if spec.order is PageOrder.HND else (strides[1], strides[2])
    return Segment(region_index, offset_nbytes, strides[0], token, head)


def _check_num_pages(num_pages: int) -> None:
    if isinstance(num_pages, bool) or not isinstance(num_pages, int) or not 1 <= num_pages < 2**32:
        raise GeometryError("must be an integer from 1 to 2**32 - 1", field="num_pages", value=num_pages)


def _checked_views(spec: CacheSpec, arrays: Mapping[str, Sequence[Any]]) -> tuple[StridedView, ...]:
    if set(arrays) != set(spec.roles):
        raise GeometryError(f"must have the roles {spec.roles}", field="arrays", value=tuple(arrays))
    for role in spec.roles:
        if len(arrays[role]) != spec.num_layers:
            raise GeometryError(
                f"must have one array for each of the {spec.num_layers} layers",
                field=f"len(arrays[{role!r}])",
                value=len(arrays[role]),
            )
    views = tuple(strided_view(arrays[role][layer], name=f"arrays[{role!r}][{layer}]") for role, layer in spec.tensors)
    first = views[0]
    num_pages = first.shape[0] if first.shape else 0
    seen: dict[tuple[int, tuple[int, ...]], str] = {}
    for (role, layer), view in zip(spec.tensors, views, strict=True):
        name = f"arrays[{role!r}][{layer}]"
        if view.shape != (num_pages, *spec.page_shape):
            raise GeometryError(
                f"must be [num_pages, {', '.join(map(str, spec.page_shape))}] in order {spec.order}"
                + (f" with num_pages {num_pages} as arrays[{spec.roles[0]!r}][0]" if view is not first else ""),
                field=f"{name}.shape",
                value=view.shape,
            )
        if view.dtype_name != str(spec.storage_dtype):
            raise GeometryError(
                f"must be {spec.storage_dtype} ({spec.dtype})", field=f"{name}.dtype", value=view.dtype_name
            )
        if view.device != first.device:
            raise GeometryError(
                f"must be on {first.device} as all arrays of the pool", field=f"{name}.device", value=view.device
            )
        _check_strides(name, view)
        twin = seen.setdefault((view.address, view.strides_nbytes), name)
        if twin != name:
            raise GeometryError(f"is the same memory as {twin}", field=name, value=hex(view.address))
    _check_num_pages(num_pages)
    return views


def _check_strides(name: str, view: StridedView) -> None:
    """Content contiguous, and no two elements on one byte."""
    if view.shape[-1] > 1 and view.strides_nbytes[-1] != view.itemsize:
        raise GeometryError(
            f"must be {view.itemsize} along the last axis: a head's content lies together",
            field=f"{name}.strides",
            value=view.strides_nbytes,
        )
    extent = view.itemsize
    for stride, size in sorted(zip(view.strides_nbytes, view.shape, strict=True)):
        if size > 1 and stride < extent:
            raise GeometryError(
                f"has a stride of {stride} over elements of {extent} bytes: they would overlap",
                field=f"{name}.strides",
                value=view.strides_nbytes,
            )
        extent += (size - 1) * stride


def _merge_spans(views: Sequence[StridedView]) -> tuple[_Place, ...]:
    places: list[_Place] = []
    for view in sorted(views, key=lambda view: view.span):
        start, end = view.span
        last = places[-1] if places else None
        if last is not None and (start < last.end or (start == last.end and view.allocation == last.allocation)):
            last.end = max(last.end, end)
            last.owners.append(view.owner)
        else:
            places.append(_Place(start, end, view.allocation, view.device, [view.owner]))
    return tuple(places)


def _register(places: Sequence[_Place], context: Context) -> tuple[Region, ...]:
    regions: list[Region] = []
    try:
        for place in places:
            nbytes = place.end - place.start
            region = context.register(place.start, nbytes, owner=tuple(place.owners), device=place.device)
            regions.append(region)
    except BaseException:
        for region in regions:
            region.close()
        raise
    return tuple(regions)
