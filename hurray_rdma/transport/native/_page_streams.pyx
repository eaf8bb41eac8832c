# cython: language_level=3, boundscheck=False, wraparound=False, embedsignature=True
"""The loops that move pages over a TCP connection, at both of its ends: arrays in, counts and a status out, the GIL
released. What goes over the wire is described in page_stream_wire.h. No policy: see hurray_rdma/transport/page_streams.py.
"""
from libc.stdint cimport uint32_t, uint64_t, uintptr_t

from page_streams cimport *

MAX_PIECES = <int>HURRAY_PARCEL_PIECES
MAX_NBYTES = <int>HURRAY_PARCEL_NBYTES

OK = <int>HURRAY_STREAM_OK
ENDED = <int>HURRAY_STREAM_ENDED
FORBIDDEN = <int>HURRAY_STREAM_FORBIDDEN
BROKEN = <int>HURRAY_STREAM_BROKEN
LOST = <int>HURRAY_STREAM_LOST
STOPPED = <int>HURRAY_STREAM_STOPPED
TIMED_OUT = <int>HURRAY_STREAM_TIMED_OUT
NO_MEMORY = <int>HURRAY_STREAM_NO_MEMORY


cdef class Permits:
    """What one session may write and read, transfer by transfer. Thread-safe."""
    cdef hurray_permits_t *permits
    cdef dict kept

    def __cinit__(self):
        self.permits = hurray_permits_new()
        if self.permits == NULL:
            raise MemoryError
        self.kept = {}

    def __dealloc__(self):
        if self.permits != NULL:
            hurray_permits_free(self.permits)

    def add(self, uint32_t transfer_id, bint writes, const uint64_t[:, ::1] regions not None,
            const uint64_t[:, ::1] segments not None, const uint32_t[::1] page_ids not None):
        """Permits a transfer to write into pages, or else to read them; in place of any other of that number.

        ``regions``, uint64 ``[num_regions, 4]``: address, length, first segment, number of segments; the memory must
        stay until `remove`. ``segments``, uint64 ``[num_segments, 3]``: offset of page 0, stride of the pages (> 0),
        bytes from a page's first to its last. ``page_ids``, uint32 ``[num_pages]``: ascending, each once."""
        cdef int failed
        if regions.shape[1] != 4 or segments.shape[1] != 3 or not regions.shape[0] or not segments.shape[0]:
            raise ValueError("regions are rows of four, segments of three, and there is one of each at least")
        if not page_ids.shape[0]:
            self.remove(transfer_id)
            return
        with nogil:
            failed = hurray_permits_add(self.permits, transfer_id, writes, &regions[0, 0], regions.shape[0],
                                        &segments[0, 0], &page_ids[0], page_ids.shape[0])
        if failed:
            raise MemoryError
        self.kept[transfer_id] = regions, segments, page_ids

    def remove(self, uint32_t transfer_id):
        """Ends a permit: when this returns, nothing is moved under it any more. False if there was none."""
        with nogil:
            hurray_permits_remove(self.permits, transfer_id)
        return self.kept.pop(transfer_id, None) is not None

    def serve(self, int socket):
        """Does what comes over a connected, non-blocking socket, until it ends; blocks.

        Returns ``(status, transfer_id, region, offset, nbytes)``: `OK` if the other end has closed it in order, and
        else of the parcel, and of the piece, that ended it."""
        cdef hurray_served_t served
        with nogil:
            served = hurray_stream_serve(self.permits, socket)
        return <int>served.status, served.transfer_id, served.region, served.offset, served.nbytes


def move(int socket, bint get, uint32_t transfer_id, uint32_t region, uint64_t local_base,
         const uint64_t[::1] local_offsets not None, const uint64_t[::1] remote_offsets not None,
         const uint64_t[::1] lengths not None, uintptr_t stop, uint64_t deadline_ns):
    """Moves a plan into a region of the other end, or (``get``) out of it; see ``hurray_stream_move`` in page_streams.h.

    ``stop`` is the address of a `StopFlag`. Returns ``(nbytes, status, intact)``; the local memory is free."""
    cdef hurray_streamed_t outcome
    if local_offsets.shape[0] != lengths.shape[0] or remote_offsets.shape[0] != lengths.shape[0]:
        raise ValueError("offsets and lengths must have the same length")
    if lengths.shape[0] == 0:
        return 0, <int>HURRAY_STREAM_OK, True
    with nogil:
        outcome = hurray_stream_move(socket, get, transfer_id, region, local_base, &local_offsets[0],
                                     &remote_offsets[0], &lengths[0], lengths.shape[0], <const int *>stop, deadline_ns)
    return outcome.nbytes, <int>outcome.status, bool(outcome.intact)
