/*
 * The loops that move a plan: post puts or gets over one endpoint and wait for them, or copy through a mapping of the
 * peer's memory. They know addresses, offsets and lengths, and nothing of pages; they decide nothing. Whatever
 * copies, posts or waits runs without the GIL.
 */
#ifndef HURRAY_MOVES_H
#define HURRAY_MOVES_H

#include <stdint.h>
#include <ucp/api/ucp.h>

typedef enum { HURRAY_PUT = 0, HURRAY_GET = 1 } hurray_direction_t;

typedef struct {
    const uint64_t *local_offsets;  /* bytes, relative to local_base */
    const uint64_t *remote_offsets; /* bytes, relative to remote_base */
    const uint64_t *lengths;        /* bytes, each > 0 */
    uint64_t count;
} hurray_plan_t;

typedef struct {
    uint64_t posted;      /* operations handed to UCX, or pieces copied */
    uint64_t completed;   /* of those, locally complete */
    uint64_t nbytes;      /* bytes of the posted operations */
    ucs_status_t status;  /* UCS_OK, the first failure, UCS_ERR_TIMED_OUT or UCS_ERR_CANCELED (stopped) */
    int settled;          /* whether all that was posted is at its destination, so that nothing can land later */
} hurray_outcome_t;

typedef struct {
    uint64_t src_start;  /* of row 0, bytes, relative to src_base */
    uint64_t src_stride; /* bytes from one row to the next */
    uint64_t dst_start;
    uint64_t dst_stride;
    uint64_t nbytes; /* of each row */
} hurray_place_t;

typedef struct {
    const hurray_place_t *places;
    uint64_t num_places;
    const uint32_t *src_rows; /* src_rows[i] goes to dst_rows[i] */
    const uint32_t *dst_rows;
    uint64_t num_rows;
} hurray_rows_t;

/* Bytes that a description takes, its end included. */
#define HURRAY_DESCRIPTION_SIZE 512

/*
 * Posts every piece with at most `window` operations outstanding, then flushes the endpoint: on UCS_OK all bytes are
 * at their destination. `stop` may become non-zero at any time (from another thread): posting ends, what is in flight
 * is waited for. `deadline_ns` is CLOCK_MONOTONIC. When outcome.completed < outcome.posted the local memory is still
 * in use by UCX: only closing the endpoint by force ends that. `description`, if not NULL, becomes UCX's own words for
 * what it did with the first piece (ucp_request_query); it stays as it is where that was done at once, or failed.
 */
hurray_outcome_t hurray_post(ucp_worker_h worker, ucp_ep_h ep, hurray_direction_t direction, uint64_t local_base,
                             ucp_mem_h local_memory, uint64_t remote_base, ucp_rkey_h rkey, hurray_plan_t plan,
                             uint64_t window, const volatile int *stop, uint64_t deadline_ns, char *description);

/* Waits until all that was posted on the endpoint before is complete at the remote side (ucp_ep_flush_nbx). */
ucs_status_t hurray_flush(ucp_worker_h worker, ucp_ep_h ep, const volatile int *stop, uint64_t deadline_ns);

typedef struct hurray_closing hurray_closing_t;

/*
 * Begins to close an endpoint (ucp_ep_close_nbx); no other call may use it from now on. By force what is in flight is
 * cancelled at once, which UCX allows only with error handling; without, the close waits for the peer to take it.
 * NULL: out of memory, nothing was begun.
 */
hurray_closing_t *hurray_close_begin(ucp_ep_h ep, int force);

/* UCS_OK once UCX has let go of the endpoint and of all memory it used; UCS_ERR_TIMED_OUT: not yet, call again. */
ucs_status_t hurray_close_wait(ucp_worker_h worker, hurray_closing_t *closing, uint64_t deadline_ns);

/* Ends the caller's interest; a close that is still going on goes on. */
void hurray_close_drop(hurray_closing_t *closing);

/*
 * Copies pieces between two addresses of this process, with stores that bypass the cache where the CPU has them
 * (the pages are not read here again). A store fence orders all of them before anything that follows.
 */
hurray_outcome_t hurray_copy(uint64_t src_base, uint64_t dst_base, const uint64_t *src_offsets,
                             const uint64_t *dst_offsets, const uint64_t *lengths, uint64_t count,
                             const volatile int *stop, uint64_t deadline_ns);

/* Whether all rows of all places lie in memories of these lengths. */
int hurray_rows_inside(hurray_rows_t rows, uint64_t src_nbytes, uint64_t dst_nbytes);

/*
 * As hurray_copy, of rows that lie inside; place by place, neighbours on both sides as one piece. When all is copied
 * `token` is stored at `bell`, unless that is NULL.
 */
hurray_outcome_t hurray_copy_rows(uint64_t src_base, uint64_t dst_base, hurray_rows_t rows, const volatile int *stop,
                                  uint64_t deadline_ns, uint64_t *bell, uint64_t token);

/* Whether `bell` holds the token within that time; what was copied before it was stored there is visible if so. */
int hurray_rings(const uint64_t *bell, uint64_t token, uint64_t timeout_ns);

/* The same with memcpy: the yardstick that reports compare with. */
void hurray_memcpy(uint64_t src_base, uint64_t dst_base, const uint64_t *src_offsets, const uint64_t *dst_offsets,
                   const uint64_t *lengths, uint64_t count);

/*
 * Puts the shared memory at `from` also where other memory is mapped now, at `to`, in one step: whoever reads there
 * never finds nothing. Returns 0, or errno.
 */
int hurray_map_over(uint64_t from, uint64_t to, uint64_t nbytes);

/* Whether no memory is mapped in the pages that hold those bytes. */
int hurray_unmapped(uint64_t start, uint64_t nbytes);

#endif
