/*
 * Pages over a TCP connection of their own: the loops of both ends. One end asks, in parcels: write these bytes into
 * pieces of a region, or read them out of it; the other checks every piece against what it has permitted, moves bytes
 * straight between its pages and the socket, and answers each parcel in order. All of it runs without the GIL. No
 * policy: who may connect, what is permitted and for how long is decided in the Python modules.
 */
#ifndef HURRAY_PAGE_STREAMS_H
#define HURRAY_PAGE_STREAMS_H

#include "page_permits.h"
#include "page_stream_wire.h"

typedef struct {
    hurray_stream_status_t status; /* OK: the other end has closed it, between two parcels */
    uint32_t transfer_id;          /* of the parcel that ended it, as it came, and of its piece that is not permitted */
    uint32_t region;
    uint64_t offset;
    uint64_t nbytes;
} hurray_served_t;

/* Does what comes over a connected, non-blocking socket, until it ends, or is shut down by another thread. */
hurray_served_t hurray_stream_serve(hurray_permits_t *permits, int fd);

typedef struct {
    uint64_t nbytes; /* of the parcels that were done */
    hurray_stream_status_t status;
    int intact;      /* whether the connection is between two parcels, and may be used on */
} hurray_streamed_t;

/*
 * Moves a plan into a region of the other end, or (`get`) out of it, several parcels outstanding; on OK all of it is in
 * place; whether what was got was there in time says the acknowledgement of the transfer. `stop` and `deadline_ns` as
 * of `hurray_post`: what is outstanding is finished while that goes on, for 10 s at most. The local memory is free when
 * it returns; where it has failed, see page_lending.h. One call at a time for each socket, which is non-blocking.
 */
hurray_streamed_t hurray_stream_move(int fd, int get, uint32_t transfer_id, uint32_t region, uint64_t local_base,
                                     const uint64_t *local_offsets, const uint64_t *remote_offsets,
                                     const uint64_t *lengths, uint64_t count, const volatile int *stop,
                                     uint64_t deadline_ns);

#endif
