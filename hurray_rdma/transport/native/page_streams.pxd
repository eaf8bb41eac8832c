from libc.stdint cimport uint32_t, uint64_t

cdef extern from "page_streams.h" nogil:
    enum:
        HURRAY_PARCEL_PIECES
        HURRAY_PARCEL_NBYTES

    ctypedef enum hurray_stream_status_t:
        HURRAY_STREAM_OK
        HURRAY_STREAM_ENDED
        HURRAY_STREAM_FORBIDDEN
        HURRAY_STREAM_BROKEN
        HURRAY_STREAM_LOST
        HURRAY_STREAM_STOPPED
        HURRAY_STREAM_TIMED_OUT
        HURRAY_STREAM_NO_MEMORY

    ctypedef struct hurray_permits_t:
        pass

    hurray_permits_t *hurray_permits_new()
    void hurray_permits_free(hurray_permits_t *permits)
    int hurray_permits_add(hurray_permits_t *permits, uint32_t transfer_id, int writes, const uint64_t *regions,
                           uint64_t num_regions, const uint64_t *segments, const uint32_t *page_ids,
                           uint64_t num_pages)
    void hurray_permits_remove(hurray_permits_t *permits, uint32_t transfer_id)

    ctypedef struct hurray_served_t:
        hurray_stream_status_t status
        uint32_t transfer_id
        uint32_t region
        uint64_t offset
        uint64_t nbytes

    hurray_served_t hurray_stream_serve(hurray_permits_t *permits, int fd)

    ctypedef struct hurray_streamed_t:
        uint64_t nbytes
        hurray_stream_status_t status
        int intact

    hurray_streamed_t hurray_stream_move(int fd, int get, uint32_t transfer_id, uint32_t region, uint64_t local_base,
                                         const uint64_t *local_offsets, const uint64_t *remote_offsets,
                                         const uint64_t *lengths, uint64_t count, const int *stop,
                                         uint64_t deadline_ns)
