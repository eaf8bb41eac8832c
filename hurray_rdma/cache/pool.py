"""Page pools: all pages of all roles and layers, in memory that is registered with UCX.

A pool is spans with strides: either one region that UCX allocated, or the caller's own arrays, in place. It knows where
each page is and, through its allocator, who holds it; it knows nothing of sequences or peers.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hurray_rdma.cache.allocator import PageAllocator
from hurray_rdma.cache.arrays import (
    ALIGNMENT_NBYTES,
    Arrays,
    checked_views,
    device_arrays,
    part_dtype,
    part_shape,
    register_views,
    segment_of,
)
from hurray_rdma.cache.gate import MemoryGate
from hurray_rdma.cache.layout import Part, PoolLayout, Segment, page_nbytes_of, parts_of
from hurray_rdma.cache.resident import ResidentIndex
from hurray_rdma.cache.spec import CacheSpec, PageOrder
from hurray_rdma.errors import ConfigError, GeometryError, RegistrationError

if TYPE_CHECKING:
    from hurray_rdma.transport import Backing, Context, Region

__all__ = ["BELLS_NBYTES", "PagePool"]

BELLS_NBYTES = 4096
"""What a pool of memory of its own has behind its pages, for senders of this host."""


class PagePool:
    """Pages of fixed size in registered memory. Made by `allocate` and `from_arrays`; a context manager.

    Views from `pages` stay valid memory after `close`; every other call raises then.
    """

    def __init__(
        self,
        layout: PoolLayout,
        *,
        regions: tuple[Region, ...],
        views: tuple[Any, ...],
        external: bool = False,
        bells_offset_nbytes: int | None = None,
    ) -> None:
        self._layout = layout
        self._regions = regions
        self._views = views
        self._allocator = PageAllocator(layout.num_pages)
        self._resident = ResidentIndex(self._allocator)
        self._closed = False
        self._receiver: object | None = None
        self._watching_close: dict[Callable[[], None], None] = {}
        self._external = self._allocator.lease(layout.num_pages) if external else None
        self.bells_offset_nbytes = bells_offset_nbytes
        """Where `BELLS_NBYTES` of the first region begin that are for `hurray_rdma.transport.Bells`; None: nowhere."""
        self.gate = MemoryGate()
        """Whoever moves bytes into the pool or out of it passes here."""

    @classmethod
    def allocate(
        cls,
        spec: CacheSpec,
        num_pages: int,
        *,
        device: str = "cpu",
        pinned: bool = False,
        context: Context | None = None,
    ) -> PagePool:
        """A pool in one region of memory of its own, zero-filled: the fastest kind for a receiver.

        On the host UCX allocates it, where processes of this host can map it, and `BELLS_NBYTES` more for what their
        copies tell there. On a GPU CuPy does (the extra ``gpu``), and `pages` are CuPy arrays: of unsigned integers
        where CuPy lacks the dtype.

        Args:
            spec: geometry of the pages.
            num_pages: pages of each role of each layer.
            device: ``"cpu"``, or a GPU: ``"cuda:N"``.
            pinned: host memory that is page-locked for CUDA, so that copies to and from GPUs run at full speed.
            context: the UCX context; None is the process's own.

        Raises:
            ConfigError: there is no such kind of device, or pages on a GPU are to be pinned.
            GeometryError: ``num_pages`` is out of range.
            RegistrationError: no memory, or no CuPy for that of a GPU.
            TransportError: there is no CUDA driver.
        """
        if isinstance(num_pages, bool) or not isinstance(num_pages, int) or not 1 <= num_pages < 2**32:
            raise GeometryError("must be an integer from 1 to 2**32 - 1", field="num_pages", value=num_pages)
        if device != "cpu":
            if pinned:
                raise ConfigError("is for pools on the host", field="pinned", value=True)
            pages = device_arrays(spec, num_pages, device=device)
            return cls.from_arrays(
                spec,
                pages[Part.PAGES],
                scales=pages.get(Part.SCALES),
                zero_points=pages.get(Part.ZERO_POINTS),
                context=context,
            )
        parts = [part for _ in spec.tensors for part in parts_of(spec)]
        dtypes = [part_dtype(spec, part) for part in parts]
        shapes = [(num_pages, *part_shape(spec, part)) for part in parts]
        lengths = [dtype.itemsize * math.prod(shape) for dtype, shape in zip(dtypes, shapes, strict=True)]
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + -(-length // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES)
        region = _context(context).allocate(starts[-1] + BELLS_NBYTES, pinned=pinned)
        memory = region.array()
        views = tuple(
            memory[start : start + length].view(dtype).reshape(shape)
            for start, length, dtype, shape in zip(starts, lengths, dtypes, shapes, strict=False)
        )
        segments = tuple(
            segment_of(spec, part, view.strides, region_index=0, offset_nbytes=start)
            for part, view, start in zip(parts, views, starts, strict=False)
        )
        layout = PoolLayout(spec=spec, num_pages=num_pages, segments=segments)
        return cls(layout, regions=(region,), views=views, bells_offset_nbytes=starts[-1])

    @classmethod
    def from_arrays(
        cls,
        spec: CacheSpec,
        arrays: Arrays,
        *,
        scales: Arrays | None = None,
        zero_points: Arrays | None = None,
        order: PageOrder | str | None = None,
        external: bool = False,
        mappable: bool = False,
        context: Context | None = None,
    ) -> PagePool:
        """A pool over the caller's arrays, in place; they stay alive while the pool is open.

        Args:
            spec: geometry of the pages.
            arrays: per role one array per layer, each ``[num_pages, page_size, num_heads, head_dim]``, or
                ``[num_pages, num_heads, page_size, head_dim]`` with order HND: NumPy, CuPy, torch, or anything that
                shows its memory by DLPack or an array interface. Strides may be any that keep a head's content
                together; arrays may be interleaved views of one allocation. All on one device.
            scales: the same of ``[num_pages, page_size]``, where ``spec.scale_dtype`` is set.
            zero_points: int32 ``[num_pages, page_size]``, where ``spec.zero_points`` is set.
            order: replaces ``spec.order``.
            external: the caller hands out the pages himself, as the block manager of an inference engine does: the pool
                holds a lease of all of them, and snapshots come into pages that he names (`hurray_rdma.Placement`).
            mappable: replaces the host memory under the arrays, in place and with its content, by such as `allocate`
                gives: processes of this host move pages twice as fast. Nobody may write there during the call; what is
                next to the arrays in a page of memory goes along; a child of a fork shares the memory afterwards. CUDA
                and other libraries may have no registration of this memory: it would go on with the former pages. The
                arrays keep the new memory when the pool is closed (`close`).
            context: the UCX context; None is the process's own.

        Raises:
            ConfigError: ``mappable``, and the arrays are on a GPU.
            GeometryError: roles, layers, shapes, dtypes or strides do not fit ``spec``; nothing is registered then.
            RegistrationError: UCX refuses the memory, or GPUDirect cannot reach it, or it cannot be replaced
                (`Context.replace`); nothing stays registered.
        """
        if order is not None:
            spec = spec.with_order(order)
        given: Mapping[Part, Arrays | None] = {
            Part.PAGES: arrays,
            Part.SCALES: scales,
            Part.ZERO_POINTS: zero_points,
        }
        views = checked_views(spec, {part: each for part, each in given.items() if each is not None})
        if mappable and views[0].device != "cpu":
            raise ConfigError("is for arrays in host memory", field="mappable", value=True)
        regions, places = register_views(views, _context(context, device=views[0].device), replace=mappable)
        parts = [part for _ in spec.tensors for part in parts_of(spec)]
        segments = tuple(
            segment_of(spec, part, view.strides_nbytes, region_index=index, offset_nbytes=offset)
            for part, view, (index, offset) in zip(parts, views, places, strict=True)
        )
        if (device := regions[0].device_index) is not None:
            try:
                regions[0].context.zeros_on(device, max(page_nbytes_of(spec, part) for part in parts_of(spec)))
            except BaseException:
                for region in regions:
                    region.close()
                raise
        layout = PoolLayout(spec=spec, num_pages=views[0].shape[0], segments=segments)
        return cls(layout, regions=regions, views=tuple(view.array for view in views), external=external)

    @property
    def layout(self) -> PoolLayout:
        """Where everything is, as numbers that can travel."""
        self._check_open("layout")
        return self._layout

    @property
    def spec(self) -> CacheSpec:
        return self._layout.spec

    @property
    def num_pages(self) -> int:
        """Pages of each role of each layer."""
        return self._layout.num_pages

    @property
    def allocator(self) -> PageAllocator:
        """Who holds which page."""
        return self._allocator

    @property
    def resident(self) -> ResidentIndex:
        """Which complete pages are here, by the keys of their content."""
        return self._resident

    @property
    def regions(self) -> tuple[Region, ...]:
        """The registered spans; none contains a byte of another."""
        self._check_open("regions")
        return self._regions

    @property
    def context(self) -> Context:
        """The UCX context of all of them."""
        self._check_open("context")
        return self._regions[0].context

    @property
    def device(self) -> str:
        """``"cpu"`` or ``"cuda:N"``."""
        return self._regions[0].device

    @property
    def external(self) -> bool:
        """Whether its pages are handed out by the caller, and not by the allocator."""
        return self._external is not None

    def check_grantable(self) -> None:
        """Raises unless the allocator hands out pages.

        Raises:
            ConfigError: the pool is external.
        """
        if self.external:
            raise ConfigError(
                "is handed out by its caller, who must say which pages",
                field="pool",
                value=repr(self),
                fix="Pass a Placement",
            )

    @property
    def device_index(self) -> int | None:
        """Number of the GPU; None on the host."""
        return self._regions[0].device_index

    @property
    def backing(self) -> Backing:
        """What kind of memory of the device it is; pinned and managed where all of it is."""
        backings = {region.backing for region in self._regions}
        return backings.pop() if len(backings) == 1 else self._regions[0].backing.PLAIN

    @property
    def needs_flush(self) -> bool:
        """Whether `make_visible` has anything to do: it may block, then."""
        return self._regions[0].needs_flush

    def make_visible(self) -> None:
        """Lets kernels that are launched later see what peers have written into the pages (`Region.make_visible`)."""
        self._regions[0].make_visible()

    @property
    def closed(self) -> bool:
        return self._closed

    def pages(self, role: str, layer: int) -> Any:
        """All pages of one role of one layer, writable, in place: ``[num_pages, *spec.page_shape]``.

        Raises:
            GeometryError: there is no such role or layer.
        """
        self._check_open("pages")
        return self._view(role, layer, Part.PAGES)

    def scales(self, role: str, layer: int) -> Any:
        """The scale of every page slot, writable, in place: ``[num_pages, page_size]``.

        Raises:
            GeometryError: there is no such role or layer, or the cache has no scales.
        """
        self._check_open("scales")
        return self._view(role, layer, Part.SCALES)

    def zero_points(self, role: str, layer: int) -> Any:
        """The zero point of every page slot, int32, writable, in place: ``[num_pages, page_size]``.

        Raises:
            GeometryError: there is no such role or layer, or the cache has no zero points.
        """
        self._check_open("zero_points")
        return self._view(role, layer, Part.ZERO_POINTS)

    def segment(self, role: str, layer: int, *, part: Part = Part.PAGES) -> Segment:
        """Where one part of one role of one layer is.

        Raises:
            GeometryError: there is no such role, layer or part.
        """
        self._check_open("segment")
        return self._layout.segment(role, layer, part=part)

    def claim(self, receiver: object) -> None:
        """Says who grants pages of the pool to senders: one receiver at a time.

        Raises:
            ConfigError: somebody else does.
        """
        if self._receiver is not None and self._receiver is not receiver:
            raise ConfigError(
                "an engine receives into it already",
                field="pool",
                value=repr(self),
                fix="Make a pool for each receiver",
            )
        self._receiver = receiver

    def disclaim(self, receiver: object) -> None:
        """Ends `claim`. Harmless when it was another's."""
        if self._receiver is receiver:
            self._receiver = None

    def renew(self, *, timeout_s: float = 30.0) -> None:
        """Registers the memory anew, in place: what peers know of it gives them no access any more (`Region.renew`).

        Views and pages stay as they are; nobody may write pages during the call. An engine that receives into the pool
        must do it itself: `Engine.reregister`.

        Args:
            timeout_s: for the moves out of the pool, or into it, that are under way in this process.

        Raises:
            DeadlineExceededError: they did not end in time; nothing was done.
            RegistrationError: the pool is closed, a region is in use, or UCX refuses: some regions may be renewed, as
                their ``num_renewals`` tell.
            TransportError: CUDA does not let go of page-locked memory; the same.
        """
        self._check_open("renew")
        with self.gate.renewal(timeout_s=timeout_s):
            for region in self._regions:
                region.check_renewable()
            for region in self._regions:
                region.renew()

    def watch_close(self, end: Callable[[], None]) -> None:
        """Has somebody told, on the thread that closes the pool, before its memory is let go of; else here, if that has
        begun: maybe twice, if just now."""
        self._watching_close[end] = None
        if self._closed:
            end()

    def unwatch_close(self, end: Callable[[], None]) -> None:
        """Ends `watch_close`. Harmless when it has ended."""
        self._watching_close.pop(end, None)

    def close(self) -> None:
        """Deregisters the memory; peers can reach none of it any more. Idempotent.

        But for what processes of this host have mapped: only they can let go of it, and honest ones do. Arrays of
        `from_arrays` with ``mappable`` stay such memory: what their owner keeps there afterwards a dishonest peer that
        has mapped it can still read and write, as long as the arrays' memory is mapped here.

        Raises:
            TransportError: CUDA does not let go of page-locked memory; all of it is deregistered all the same.
        """
        if not self._closed:
            self._closed = True
            for end in tuple(self._watching_close):
                end()
            with contextlib.ExitStack() as closing:
                for region in self._regions:
                    closing.callback(region.close)

    def __enter__(self) -> PagePool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = " [closed]" if self._closed else ""
        return f"<PagePool of {self.num_pages} pages x {len(self._views)} arrays, {self.spec.dtype}{state}>"

    def _view(self, role: str, layer: int, part: Part) -> Any:
        parts = parts_of(self.spec)
        if part not in parts:
            raise GeometryError(f"the cache has {tuple(map(str, parts))}", field="part", value=str(part))
        return self._views[self.spec.index(role, layer) * len(parts) + parts.index(part)]

    def _check_open(self, name: str) -> None:
        if self._closed:
            raise RegistrationError(f"PagePool.{name}: the pool is closed")


def _context(context: Context | None, *, device: str = "cpu") -> Context:
    if context is not None:
        return context
    # Here and not at the top, so that pools can be described and planned without loading UCX.
    from hurray_rdma.transport import default_context  # noqa: PLC0415
    from hurray_rdma.transport.devices import device_index  # noqa: PLC0415

    return default_context(device_index=device_index(device))
