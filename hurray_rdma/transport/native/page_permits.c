#include "page_permits.h"

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>

/* So many pieces are looked at before those who change permits, an event loop for one, are let through. */
#define PIECES_PER_HOLD 32

typedef struct permit {
    struct permit *next;
    uint64_t serial; /* of its own: a transfer_id that comes again is another one */
    uint32_t transfer_id;
    int writes;
    const uint64_t *regions;
    uint64_t num_regions;
    const uint64_t *segments;
    const uint32_t *page_ids;
    uint64_t num_pages;
} permit_t;

struct hurray_permits {
    pthread_mutex_t lock; /* held while a byte moves under a permit */
    int wanted;           /* by how many that change permits: they go first */
    uint64_t serial;
    permit_t *first;
};

hurray_permits_t *hurray_permits_new(void)
{
    hurray_permits_t *permits = calloc(1, sizeof(*permits));

    if (permits != NULL) {
        pthread_mutex_init(&permits->lock, NULL);
    }
    return permits;
}

void hurray_permits_free(hurray_permits_t *permits)
{
    while (permits->first != NULL) {
        permit_t *first = permits->first;
        permits->first = first->next;
        free(first);
    }
    pthread_mutex_destroy(&permits->lock);
    free(permits);
}

static void lock_to_change(hurray_permits_t *permits)
{
    __atomic_add_fetch(&permits->wanted, 1, __ATOMIC_ACQ_REL);
    pthread_mutex_lock(&permits->lock);
    __atomic_sub_fetch(&permits->wanted, 1, __ATOMIC_ACQ_REL);
}

/* A mutex is not fair: a loop that has bytes at hand all the time would keep the others waiting for ever. */
static void lock_to_move(hurray_permits_t *permits)
{
    while (__atomic_load_n(&permits->wanted, __ATOMIC_ACQUIRE) != 0) {
        sched_yield();
    }
    pthread_mutex_lock(&permits->lock);
}

static permit_t **find(hurray_permits_t *permits, uint32_t transfer_id)
{
    permit_t **at = &permits->first;

    while (*at != NULL && (*at)->transfer_id != transfer_id) {
        at = &(*at)->next;
    }
    return at;
}

static void drop(hurray_permits_t *permits, uint32_t transfer_id)
{
    permit_t **at = find(permits, transfer_id), *found = *at;

    if (found != NULL) {
        *at = found->next;
        free(found);
    }
}

int hurray_permits_add(hurray_permits_t *permits, uint32_t transfer_id, int writes, const uint64_t *regions,
                       uint64_t num_regions, const uint64_t *segments, const uint32_t *page_ids, uint64_t num_pages)
{
    permit_t *permit = malloc(sizeof(*permit));

    if (permit == NULL) {
        return -1;
    }
    lock_to_change(permits);
    drop(permits, transfer_id);
    *permit = (permit_t){
        .next = permits->first,
        .serial = ++permits->serial,
        .transfer_id = transfer_id,
        .writes = writes,
        .regions = regions,
        .num_regions = num_regions,
        .segments = segments,
        .page_ids = page_ids,
        .num_pages = num_pages,
    };
    permits->first = permit;
    pthread_mutex_unlock(&permits->lock);
    return 0;
}

void hurray_permits_remove(hurray_permits_t *permits, uint32_t transfer_id)
{
    lock_to_change(permits);
    drop(permits, transfer_id);
    pthread_mutex_unlock(&permits->lock);
}

/* How many pages from `page` on, up to `wanted` of them, are among those of the permit without a gap. */
static uint64_t run_of(const permit_t *permit, uint64_t page, uint64_t wanted)
{
    const uint32_t *ids = permit->page_ids;
    uint64_t low = 0, high = permit->num_pages, first;

    while (low < high) {
        uint64_t middle = low + (high - low) / 2;
        if (ids[middle] < page) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    first = low;
    if (first == permit->num_pages || ids[first] != page) {
        return 0;
    }
    high = permit->num_pages - first < wanted ? permit->num_pages - first : wanted;
    low = ids[first + high - 1] - page == high - 1 ? high : 1; /* most often there is no gap */
    while (low < high) {
        uint64_t middle = low + (high - low + 1) / 2;
        if (ids[first + middle - 1] - page == middle - 1) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return low;
}

/* How many bytes from `offset` on, up to `nbytes`, one segment has in permitted pages. */
static uint64_t covered(const permit_t *permit, const uint64_t *segment, uint64_t offset, uint64_t nbytes)
{
    uint64_t start = segment[0], stride = segment[1], extent = segment[2], page, at, end;

    if (offset < start) {
        return 0;
    }
    page = (offset - start) / stride;
    at = (offset - start) % stride;
    if (at >= extent) {
        return 0;
    }
    if (extent == stride) { /* nothing lies between two pages */
        uint64_t pages = run_of(permit, page, (at + nbytes - 1) / stride + 1);
        end = pages * stride;
    } else {
        end = run_of(permit, page, 1) ? extent : 0;
    }
    return end == 0 ? 0 : (end - at < nbytes ? end - at : nbytes);
}

/* Whether each byte is in a permitted page, of whatever segment. `hint` is the segment that the byte before was in. */
static int allows(const permit_t *permit, uint64_t region, uint64_t offset, uint64_t nbytes, uint64_t *hint)
{
    const uint64_t *place;

    if (region >= permit->num_regions) {
        return 0;
    }
    place = permit->regions + 4 * region;
    if (nbytes == 0 || offset > place[1] || nbytes > place[1] - offset) {
        return 0;
    }
    while (nbytes > 0) {
        uint64_t part = 0;

        for (uint64_t tried = 0; tried < place[3] && part == 0; tried++) {
            uint64_t at = (*hint + tried) % place[3];

            part = covered(permit, permit->segments + 3 * (place[2] + at), offset, nbytes);
            if (part > 0) {
                *hint = at;
            }
        }
        if (part == 0) {
            return 0;
        }
        offset += part;
        nbytes -= part;
    }
    return 1;
}

/* Holds the lock if the permit is there; `serial` 0 is any. */
static permit_t *enter(hurray_permits_t *permits, uint32_t transfer_id, uint64_t serial)
{
    permit_t *permit;

    lock_to_move(permits);
    permit = *find(permits, transfer_id);
    if (permit == NULL || (serial != 0 && permit->serial != serial)) {
        pthread_mutex_unlock(&permits->lock);
        return NULL;
    }
    return permit;
}

int hurray_permits_enter(hurray_permits_t *permits, uint32_t transfer_id, uint64_t serial)
{
    return enter(permits, transfer_id, serial) != NULL;
}

void hurray_permits_leave(hurray_permits_t *permits)
{
    pthread_mutex_unlock(&permits->lock);
}

hurray_stream_status_t hurray_permits_place(hurray_permits_t *permits, const hurray_parcel_t *parcel,
                                            const hurray_piece_t *pieces, struct iovec *iov, uint64_t *serial,
                                            uint32_t *wrong)
{
    uint64_t hint = 0;

    *serial = 0;
    for (uint32_t i = 0; i < parcel->count;) {
        permit_t *permit = enter(permits, parcel->transfer_id, *serial);
        uint32_t end = parcel->count - i > PIECES_PER_HOLD ? i + PIECES_PER_HOLD : parcel->count;

        if (permit == NULL) {
            return HURRAY_STREAM_ENDED;
        }
        *serial = permit->serial;
        for (; i < end; i++) {
            if (permit->writes != (parcel->kind == HURRAY_PARCEL_WRITE) ||
                !allows(permit, parcel->region, pieces[i].offset, pieces[i].nbytes, &hint)) {
                hurray_permits_leave(permits);
                *wrong = i;
                return HURRAY_STREAM_FORBIDDEN;
            }
            iov[i].iov_base = (void *)(permit->regions[4 * (uint64_t)parcel->region] + pieces[i].offset);
            iov[i].iov_len = pieces[i].nbytes;
        }
        hurray_permits_leave(permits);
    }
    return HURRAY_STREAM_OK;
}
