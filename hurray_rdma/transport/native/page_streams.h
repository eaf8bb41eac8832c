/*
 * Pages over a TCP connection of their own: the loops of both ends. One end asks, in frames: write these bytes into
 * pieces of a region, or read them out of it; the other checks every piece against what it has permitted, moves bytes
 * straight between its pages and the socket, and answers each frame in order. All of it runs without the GIL. No policy:
 * who may connect, what is permitted and for how long is decided in the Python modules.
 *
 * On the wire, little-endian:
 *   frame   u32 magic, kind, transfer_id, region, count, seq; u64 nbytes; count x {u64 offset, u64 nbytes}; if it is a
 *           write, nbytes bytes
 *   answer  u32 seq, status. To a read that is permitted it is followed by nbytes bytes, and by a second answer, which
 *           tells whether the bytes between were permitted to their end
 */
#ifndef HURRAY_PAGE_STREAMS_H
#define HURRAY_PAGE_STREAMS_H

#include <stdint.h>

enum { HURRAY_FRAME_MAGIC = 0x31465248, HURRAY_FRAME_WRITE = 1, HURRAY_FRAME_READ = 2 };
enum { HURRAY_FRAME_PIECES = 512 };          /* at most, in one frame */
enum { HURRAY_FRAME_NBYTES = 2 << 20 };      /* page bytes of one frame, at most */

/* Answers on the wire; the first three are also among the outcomes below. */
typedef enum {
    HURRAY_STREAM_OK = 0,
    HURRAY_STREAM_ENDED = 1,     /* the transfer is not under way (any more): its bytes were thrown away */
    HURRAY_STREAM_FORBIDDEN = 2, /* a piece is not inside what the transfer permits; the connection ends */
    HURRAY_STREAM_BROKEN = 3,    /* what came is no frame, or no answer to one; the connection ends */
    HURRAY_STREAM_LOST = 4,      /* the connection was cut */
    HURRAY_STREAM_STOPPED = 5,
    HURRAY_STREAM_TIMED_OUT = 6,
    HURRAY_STREAM_NO_MEMORY = 7
} hurray_stream_status_t;

/* What the listening end permits, of one session. */
typedef struct hurray_permits hurray_permits_t;

hurray_permits_t *hurray_permits_new(void);
void hurray_permits_free(hurray_permits_t *permits);

/*
 * Permits a transfer to write into pages, or else to read them.
 *   regions   [num_regions][4]: address, nbytes, index of its first segment, number of its segments
 *   segments  [..][3]: offset of page 0 in the region, stride of its pages, bytes from a page's first to its last
 *   page_ids  [num_pages], ascending, distinct
 * The arrays and the regions must stay until it is removed. Returns 0, or -1 if there is no memory.
 */
int hurray_permits_add(hurray_permits_t *permits, uint32_t transfer_id, int writes, const uint64_t *regions,
                       uint64_t num_regions, const uint64_t *segments, const uint32_t *page_ids, uint64_t num_pages);

/* When it returns, no byte of the transfer is moved any more; it waits for one call of the kernel's at most. */
void hurray_permits_remove(hurray_permits_t *permits, uint32_t transfer_id);

/* Whether a piece is permitted. */
int hurray_permits_allow(hurray_permits_t *permits, uint32_t transfer_id, int writes, uint64_t region, uint64_t offset,
                         uint64_t nbytes);

typedef struct {
    hurray_stream_status_t status; /* OK: the other end has closed it, between two frames */
    uint32_t transfer_id;          /* of the frame that ended it, as it came, and of its piece that is not permitted */
    uint32_t region;
    uint64_t offset;
    uint64_t nbytes;
} hurray_served_t;

/* Does what comes over a connected, non-blocking socket, until it ends, or is shut down by another thread. */
hurray_served_t hurray_stream_serve(hurray_permits_t *permits, int fd);

typedef struct {
    uint64_t nbytes; /* of the frames that were done */
    hurray_stream_status_t status;
    int intact;      /* whether the connection is between two frames, and may be used on */
} hurray_streamed_t;

/*
 * Moves a plan into a region of the other end, or (`get`) out of it, several frames outstanding; on OK all of it is in
 * place. `stop` and `deadline_ns` as of `hurray_post`: what is outstanding is finished while that goes on, for
 * 10 s at most. The local memory is free when it returns. One call at a time for each socket, which is non-blocking.
 */
hurray_streamed_t hurray_stream_move(int fd, int get, uint32_t transfer_id, uint32_t region, uint64_t local_base,
                                     const uint64_t *local_offsets, const uint64_t *remote_offsets,
                                     const uint64_t *lengths, uint64_t count, const volatile int *stop,
                                     uint64_t deadline_ns);

#endif
