/*
 * What the listening end of page streams permits, of one session: which pages each transfer may write, or read. Whoever
 * moves a byte does so between `enter` and `leave`, which keep the permit from ending meanwhile. No policy, no sockets.
 */
#ifndef HURRAY_PAGE_PERMITS_H
#define HURRAY_PAGE_PERMITS_H

#include <stdint.h>
#include <sys/uio.h>

#include "page_stream_wire.h"

typedef struct hurray_permits hurray_permits_t;

hurray_permits_t *hurray_permits_new(void);
void hurray_permits_free(hurray_permits_t *permits);

/*
 * Permits a transfer to write into pages, or else to read them; in place of any other permit of that number.
 *   regions   [num_regions][4]: address, nbytes, index of its first segment, number of its segments
 *   segments  [..][3]: offset of page 0 in the region, stride of its pages, bytes from a page's first to its last
 *   page_ids  [num_pages], ascending, distinct
 * The arrays and the regions must stay until it is removed. Returns 0, or -1 if there is no memory.
 */
int hurray_permits_add(hurray_permits_t *permits, uint32_t transfer_id, int writes, const uint64_t *regions,
                       uint64_t num_regions, const uint64_t *segments, const uint32_t *page_ids, uint64_t num_pages);

/* When it returns, no byte of the transfer is moved any more; it waits for one call of the kernel's at most. */
void hurray_permits_remove(hurray_permits_t *permits, uint32_t transfer_id);

/*
 * Where the pieces of a parcel are, if all of them are permitted: OK, ENDED, or FORBIDDEN with the `wrong` one. What is
 * found holds only as long as the permit with this `serial`.
 */
hurray_stream_status_t hurray_permits_place(hurray_permits_t *permits, const hurray_parcel_t *parcel,
                                            const hurray_piece_t *pieces, struct iovec *iov, uint64_t *serial,
                                            uint32_t *wrong);

/* Whether that permit is still there; if so it is until `leave`, which must come soon. */
int hurray_permits_enter(hurray_permits_t *permits, uint32_t transfer_id, uint64_t serial);
void hurray_permits_leave(hurray_permits_t *permits);

#endif
