#define _GNU_SOURCE
#include "page_streams.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "structs are the wire's bytes");

/* Frames that wait for their answers: as much as a socket buffers, so that a long move is never idle for a round trip. */
#define WINDOW 8
/* How long a loop sleeps before it looks at `stop` and the clock. */
#define LOOK_MS 10
/* After a stop or the deadline the frames under way may end, as others need the connection: while no pause is longer than
 * the first, and all of it not longer than the second. Then the caller cuts it. */
#define DRAIN_NS 1000000000u
#define MAX_DRAIN_NS 10000000000u
/* What is read of one who broke the rules, so that he hears so before the connection ends. */
#define FAREWELL_NS 1000000000u
#define SCRATCH_NBYTES (64u << 10)

typedef struct {
    uint32_t magic, kind, transfer_id, region, count, seq;
    uint64_t nbytes;
} frame_t;

typedef struct {
    uint64_t offset, nbytes;
} piece_t;

typedef struct {
    uint32_t seq, status;
} answer_t;

_Static_assert(sizeof(frame_t) == 32 && sizeof(piece_t) == 16 && sizeof(answer_t) == 8, "no padding on the wire");

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

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Permits. */

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

int hurray_permits_allow(hurray_permits_t *permits, uint32_t transfer_id, int writes, uint64_t region, uint64_t offset,
                         uint64_t nbytes)
{
    uint64_t hint = 0;
    permit_t *permit;
    int allowed;

    lock_to_change(permits);
    permit = *find(permits, transfer_id);
    allowed = permit != NULL && permit->writes == writes && allows(permit, region, offset, nbytes, &hint);
    pthread_mutex_unlock(&permits->lock);
    return allowed;
}

/* Both ends. */

static int would_block(void)
{
    return errno == EAGAIN || errno == EWOULDBLOCK;
}

static void wait_for(int fd, short events, int timeout_ms)
{
    struct pollfd event = {.fd = fd, .events = events};
    (void)poll(&event, 1, timeout_ms); /* an interrupted sleep is as good as a finished one */
}

/* Takes `nbytes` off the front of a list. */
static void advance(struct iovec **iov, size_t *count, size_t nbytes)
{
    while (nbytes > 0) {
        if (nbytes < (*iov)->iov_len) {
            (*iov)->iov_base = (char *)(*iov)->iov_base + nbytes;
            (*iov)->iov_len -= nbytes;
            return;
        }
        nbytes -= (*iov)->iov_len;
        (*iov)++;
        (*count)--;
    }
}

static ssize_t move(int fd, int send, struct iovec *iov, size_t count)
{
    struct msghdr message = {.msg_iov = iov, .msg_iovlen = count};
    ssize_t done;

    do {
        done = send ? sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL) : recvmsg(fd, &message, MSG_DONTWAIT);
    } while (done < 0 && errno == EINTR);
    return done;
}

/* The listening end. */

/* All of it, however long that takes: 1, or 0 if the other end closed before the first byte, or -1 if it was cut. */
static int take(int fd, void *buffer, size_t nbytes)
{
    struct iovec iov = {.iov_base = buffer, .iov_len = nbytes};

    while (iov.iov_len > 0) {
        ssize_t done = move(fd, 0, &iov, 1);

        if (done > 0) {
            iov.iov_base = (char *)iov.iov_base + done;
            iov.iov_len -= (size_t)done;
        } else if (done == 0) {
            return iov.iov_len == nbytes ? 0 : -1;
        } else if (would_block()) {
            wait_for(fd, POLLIN, -1);
        } else {
            return -1;
        }
    }
    return 1;
}

static int give(int fd, const void *buffer, size_t nbytes)
{
    struct iovec iov = {.iov_base = (void *)buffer, .iov_len = nbytes};

    while (iov.iov_len > 0) {
        ssize_t done = move(fd, 1, &iov, 1);

        if (done >= 0) {
            iov.iov_base = (char *)iov.iov_base + done;
            iov.iov_len -= (size_t)done;
        } else if (would_block()) {
            wait_for(fd, POLLOUT, -1);
        } else {
            return -1;
        }
    }
    return 0;
}

static int answer(int fd, uint32_t seq, hurray_stream_status_t status)
{
    answer_t said = {.seq = seq, .status = (uint32_t)status};

    return give(fd, &said, sizeof(said));
}

/* What is left of a frame that must not touch the pages (any more): thrown away, or zeros. */
static int pass(int fd, int send, uint64_t nbytes)
{
    char scratch[SCRATCH_NBYTES];

    if (send) {
        memset(scratch, 0, sizeof(scratch));
    }
    while (nbytes > 0) {
        size_t part = nbytes < sizeof(scratch) ? nbytes : sizeof(scratch);

        if (send ? give(fd, scratch, part) != 0 : take(fd, scratch, part) != 1) {
            return -1;
        }
        nbytes -= part;
    }
    return 0;
}

/* Between pages and socket, as long as the permit lasts. */
static hurray_stream_status_t move_pages(hurray_permits_t *permits, int fd, const frame_t *frame, uint64_t serial,
                                         struct iovec *iov, size_t count)
{
    int send = frame->kind == HURRAY_FRAME_READ;
    uint64_t left = frame->nbytes;

    while (left > 0) {
        permit_t *permit;
        ssize_t done;
        int error;

        lock_to_move(permits);
        permit = *find(permits, frame->transfer_id);
        if (permit == NULL || permit->serial != serial) {
            pthread_mutex_unlock(&permits->lock);
            return pass(fd, send, left) == 0 ? HURRAY_STREAM_ENDED : HURRAY_STREAM_LOST;
        }
        done = move(fd, send, iov, count);
        error = errno;
        pthread_mutex_unlock(&permits->lock);
        errno = error;
        if (done > 0) {
            left -= (uint64_t)done;
            advance(&iov, &count, (size_t)done);
        } else if (done < 0 && would_block()) {
            wait_for(fd, send ? POLLOUT : POLLIN, -1);
        } else {
            return HURRAY_STREAM_LOST;
        }
    }
    return HURRAY_STREAM_OK;
}

/* Where the pieces are, if all of them are permitted; `serial` of the permit. */
static hurray_stream_status_t place(hurray_permits_t *permits, const frame_t *frame, const piece_t *pieces,
                                    struct iovec *iov, uint64_t *serial, hurray_served_t *served)
{
    hurray_stream_status_t status = HURRAY_STREAM_OK;
    uint64_t hint = 0;
    permit_t *permit;

    lock_to_move(permits);
    permit = *find(permits, frame->transfer_id);
    if (permit == NULL) {
        status = HURRAY_STREAM_ENDED;
    } else {
        *serial = permit->serial;
    }
    for (uint32_t i = 0; i < frame->count && status == HURRAY_STREAM_OK; i++) {
        if (permit->writes != (frame->kind == HURRAY_FRAME_WRITE) ||
            !allows(permit, frame->region, pieces[i].offset, pieces[i].nbytes, &hint)) {
            served->offset = pieces[i].offset;
            served->nbytes = pieces[i].nbytes;
            status = HURRAY_STREAM_FORBIDDEN;
        } else {
            iov[i].iov_base = (void *)(permit->regions[4 * (uint64_t)frame->region] + pieces[i].offset);
            iov[i].iov_len = pieces[i].nbytes;
        }
    }
    pthread_mutex_unlock(&permits->lock);
    return status;
}

static int is_frame(const frame_t *frame)
{
    return frame->magic == HURRAY_FRAME_MAGIC &&
           (frame->kind == HURRAY_FRAME_WRITE || frame->kind == HURRAY_FRAME_READ) && frame->count >= 1 &&
           frame->count <= HURRAY_FRAME_PIECES && frame->nbytes >= 1 && frame->nbytes <= HURRAY_FRAME_NBYTES;
}

static int adds_up(const frame_t *frame, const piece_t *pieces)
{
    uint64_t nbytes = 0;

    for (uint32_t i = 0; i < frame->count; i++) {
        if (pieces[i].nbytes > frame->nbytes - nbytes) {
            return 0;
        }
        nbytes += pieces[i].nbytes;
    }
    return nbytes == frame->nbytes;
}

/* The other end is told why, which it can only read if the connection ends in order: what it still sends is read. */
static void farewell(int fd, uint32_t seq, hurray_stream_status_t status)
{
    answer_t said = {.seq = seq, .status = (uint32_t)status};
    struct iovec iov = {.iov_base = &said, .iov_len = sizeof(said)};
    uint64_t until = now_ns() + FAREWELL_NS;
    char scratch[SCRATCH_NBYTES];

    if (move(fd, 1, &iov, 1) != (ssize_t)sizeof(said) || shutdown(fd, SHUT_WR) != 0) {
        return;
    }
    while (now_ns() < until) {
        struct iovec into = {.iov_base = scratch, .iov_len = sizeof(scratch)};
        ssize_t done = move(fd, 0, &into, 1);

        if (done == 0 || (done < 0 && !would_block())) {
            return;
        }
        if (done < 0) {
            wait_for(fd, POLLIN, LOOK_MS);
        }
    }
}

hurray_served_t hurray_stream_serve(hurray_permits_t *permits, int fd)
{
    hurray_served_t served = {.status = HURRAY_STREAM_OK};
    struct iovec iov[HURRAY_FRAME_PIECES];
    piece_t pieces[HURRAY_FRAME_PIECES];
    frame_t frame;
    int came;

    while ((came = take(fd, &frame, sizeof(frame))) == 1) {
        uint64_t serial = 0;

        served.transfer_id = frame.transfer_id;
        served.region = frame.region;
        if (!is_frame(&frame)) {
            served.status = HURRAY_STREAM_BROKEN;
        } else if (take(fd, pieces, frame.count * sizeof(piece_t)) != 1) {
            served.status = HURRAY_STREAM_LOST;
        } else if (!adds_up(&frame, pieces)) {
            served.status = HURRAY_STREAM_BROKEN;
        } else {
            served.status = place(permits, &frame, pieces, iov, &serial, &served);
        }
        if (served.status == HURRAY_STREAM_OK) {
            if (frame.kind == HURRAY_FRAME_READ && answer(fd, frame.seq, HURRAY_STREAM_OK) != 0) {
                served.status = HURRAY_STREAM_LOST;
            } else {
                served.status = move_pages(permits, fd, &frame, serial, iov, frame.count);
            }
        } else if (served.status == HURRAY_STREAM_ENDED && frame.kind == HURRAY_FRAME_WRITE) {
            served.status = pass(fd, 0, frame.nbytes) == 0 ? HURRAY_STREAM_ENDED : HURRAY_STREAM_LOST;
        }
        if (served.status > HURRAY_STREAM_ENDED) {
            if (served.status != HURRAY_STREAM_LOST) {
                farewell(fd, frame.seq, served.status);
            }
            return served;
        }
        if (answer(fd, frame.seq, served.status) != 0) {
            served.status = HURRAY_STREAM_LOST;
            return served;
        }
    }
    served.status = came == 0 ? HURRAY_STREAM_OK : HURRAY_STREAM_LOST;
    return served;
}

/* The connecting end. */

/* A plan, and how much of it has been put into frames. */
typedef struct {
    uint64_t local_base;
    const uint64_t *local_offsets, *remote_offsets, *lengths;
    uint64_t count;
} plan_t;

typedef struct {
    uint64_t index, skip; /* the next byte of a plan */
} cursor_t;

/* The next frame: local pieces, remote pieces, each put together with its neighbours on its own side. */
static cursor_t cut(const plan_t *plan, cursor_t from, struct iovec *iov, size_t *num_iov, piece_t *pieces,
                    uint32_t *num_pieces, uint64_t *nbytes)
{
    *num_iov = 0;
    *num_pieces = 0;
    *nbytes = 0;
    while (from.index < plan->count && *nbytes < HURRAY_FRAME_NBYTES) {
        uint64_t part = plan->lengths[from.index] - from.skip, room = HURRAY_FRAME_NBYTES - *nbytes;
        char *local = (char *)(plan->local_base + plan->local_offsets[from.index] + from.skip);
        uint64_t remote = plan->remote_offsets[from.index] + from.skip;
        struct iovec *last_iov = *num_iov > 0 ? iov + *num_iov - 1 : NULL;
        piece_t *last_piece = *num_pieces > 0 ? pieces + *num_pieces - 1 : NULL;
        int joins_iov = last_iov != NULL && (char *)last_iov->iov_base + last_iov->iov_len == local;
        int joins_piece = last_piece != NULL && last_piece->offset + last_piece->nbytes == remote;

        if ((!joins_iov && *num_iov == HURRAY_FRAME_PIECES) || (!joins_piece && *num_pieces == HURRAY_FRAME_PIECES)) {
            break;
        }
        part = part < room ? part : room;
        if (joins_iov) {
            last_iov->iov_len += part;
        } else {
            iov[(*num_iov)++] = (struct iovec){.iov_base = local, .iov_len = part};
        }
        if (joins_piece) {
            last_piece->nbytes += part;
        } else {
            pieces[(*num_pieces)++] = (piece_t){.offset = remote, .nbytes = part};
        }
        *nbytes += part;
        from.skip += part;
        if (from.skip == plan->lengths[from.index]) {
            from.index++;
            from.skip = 0;
        }
    }
    return from;
}

/* What is being sent, and what is being received. */
typedef struct {
    frame_t frame;
    piece_t pieces[HURRAY_FRAME_PIECES];
    struct iovec iov[HURRAY_FRAME_PIECES + 2];
    struct iovec *out;
    size_t num_out; /* 0: no frame is under way */

    cursor_t starts[WINDOW]; /* of the frames that are outstanding, by their numbers */
    uint64_t sizes[WINDOW];
    uint32_t sent, done;     /* frames begun, frames answered to their end */

    answer_t answer;
    size_t answer_nbytes;    /* of it that have come */
    piece_t in_pieces[HURRAY_FRAME_PIECES];
    struct iovec in_iov[HURRAY_FRAME_PIECES];
    struct iovec *in;
    size_t num_in;           /* 0: no pages are coming */
    int in_begun;            /* the pages of this frame have come: the answer that follows is the second */
} moving_t;

static void begin_frame(moving_t *moving, const plan_t *plan, cursor_t *cursor, int get, uint32_t transfer_id,
                        uint32_t region)
{
    size_t num_iov;
    uint32_t slot = moving->sent % WINDOW;

    moving->starts[slot] = *cursor;
    *cursor = cut(plan, *cursor, moving->iov + 2, &num_iov, moving->pieces, &moving->frame.count, &moving->frame.nbytes);
    moving->sizes[slot] = moving->frame.nbytes;
    moving->frame.magic = HURRAY_FRAME_MAGIC;
    moving->frame.kind = get ? HURRAY_FRAME_READ : HURRAY_FRAME_WRITE;
    moving->frame.transfer_id = transfer_id;
    moving->frame.region = region;
    moving->frame.seq = moving->sent;
    moving->iov[0] = (struct iovec){.iov_base = &moving->frame, .iov_len = sizeof(moving->frame)};
    moving->iov[1] = (struct iovec){.iov_base = moving->pieces, .iov_len = moving->frame.count * sizeof(piece_t)};
    moving->out = moving->iov;
    moving->num_out = get ? 2 : 2 + num_iov;
    moving->sent++;
}

/* 1: something was sent; 0: not now; -1: the connection is lost. */
static int send_some(int fd, moving_t *moving)
{
    ssize_t sent;

    if (moving->num_out == 0) {
        return 0;
    }
    sent = move(fd, 1, moving->out, moving->num_out);
    if (sent < 0) {
        return would_block() ? 0 : -1;
    }
    advance(&moving->out, &moving->num_out, (size_t)sent);
    return 1;
}

/* An answer is whole. Sets `refused` where it is not OK; returns -1 where it makes no sense. */
static int hear(moving_t *moving, const plan_t *plan, int get, hurray_stream_status_t *refused)
{
    hurray_stream_status_t status = (hurray_stream_status_t)moving->answer.status;
    uint32_t slot = moving->done % WINDOW, num_pieces;
    uint64_t nbytes;

    moving->answer_nbytes = 0;
    if (status == HURRAY_STREAM_FORBIDDEN || status == HURRAY_STREAM_BROKEN) {
        *refused = status;
        return 0;
    }
    if (moving->answer.seq != moving->done || status > HURRAY_STREAM_ENDED) {
        return -1;
    }
    if (moving->num_out > 0 && moving->done + 1 == moving->sent) {
        return -1; /* the frame that it answers is still being sent */
    }
    if (get && status == HURRAY_STREAM_OK && !moving->in_begun) {
        cut(plan, moving->starts[slot], moving->in_iov, &moving->num_in, moving->in_pieces, &num_pieces, &nbytes);
        moving->in = moving->in_iov;
        moving->in_begun = 1;
        return 0;
    }
    moving->in_begun = 0;
    moving->done++;
    if (status != HURRAY_STREAM_OK && *refused == HURRAY_STREAM_OK) {
        *refused = status;
    }
    return 0;
}

/* As `send_some`; -2: what came makes no sense. */
static int receive_some(int fd, moving_t *moving, const plan_t *plan, int get, hurray_stream_status_t *refused,
                        uint64_t *nbytes)
{
    struct iovec word = {
        .iov_base = (char *)&moving->answer + moving->answer_nbytes,
        .iov_len = sizeof(moving->answer) - moving->answer_nbytes,
    };
    ssize_t came;

    if (moving->done == moving->sent) {
        return 0; /* nothing is owed */
    }
    came = moving->num_in > 0 ? move(fd, 0, moving->in, moving->num_in) : move(fd, 0, &word, 1);
    if (came <= 0) {
        return came < 0 && would_block() ? 0 : -1;
    }
    if (moving->num_in > 0) {
        advance(&moving->in, &moving->num_in, (size_t)came);
        return 1;
    }
    moving->answer_nbytes += (size_t)came;
    if (moving->answer_nbytes == sizeof(moving->answer)) {
        uint32_t done = moving->done;

        if (hear(moving, plan, get, refused) != 0) {
            return -2;
        }
        if (moving->done != done && *refused == HURRAY_STREAM_OK) {
            *nbytes += moving->sizes[done % WINDOW];
        }
    }
    return 1;
}

/* Why the other end has closed the connection may be there to be read, although nothing can be sent any more. */
static int last_words(int fd, moving_t *moving, const plan_t *plan, int get, hurray_stream_status_t *refused,
                      uint64_t *nbytes)
{
    int came;

    do {
        came = receive_some(fd, moving, plan, get, refused, nbytes);
    } while (came > 0 && *refused <= HURRAY_STREAM_ENDED);
    return came;
}

hurray_streamed_t hurray_stream_move(int fd, int get, uint32_t transfer_id, uint32_t region, uint64_t local_base,
                                     const uint64_t *local_offsets, const uint64_t *remote_offsets,
                                     const uint64_t *lengths, uint64_t count, const volatile int *stop,
                                     uint64_t deadline_ns)
{
    plan_t plan = {local_base, local_offsets, remote_offsets, lengths, count};
    hurray_streamed_t outcome = {0, HURRAY_STREAM_OK, 0};
    hurray_stream_status_t refused = HURRAY_STREAM_OK;
    moving_t *moving = calloc(1, sizeof(*moving));
    cursor_t cursor = {0, 0};
    uint64_t cut_ns = UINT64_MAX, last_ns = 0; /* once it is to end early: until when it may, without bytes and at all */

    if (moving == NULL) {
        outcome.status = HURRAY_STREAM_NO_MEMORY;
        outcome.intact = 1;
        return outcome;
    }
    for (;;) {
        int idle = moving->num_out == 0 && moving->done == moving->sent, sent, came;
        uint64_t now = now_ns();

        if (idle && (cursor.index == count || refused != HURRAY_STREAM_OK)) {
            outcome.intact = 1;
            break;
        }
        if (outcome.status == HURRAY_STREAM_OK && (*stop || now >= deadline_ns)) {
            outcome.status = *stop ? HURRAY_STREAM_STOPPED : HURRAY_STREAM_TIMED_OUT;
        }
        if (outcome.status != HURRAY_STREAM_OK || refused != HURRAY_STREAM_OK) {
            if (cut_ns == UINT64_MAX) {
                cut_ns = now + DRAIN_NS;
                last_ns = now + MAX_DRAIN_NS;
            }
            if (idle || now >= cut_ns || now >= last_ns) {
                outcome.intact = idle;
                break;
            }
        } else if (moving->num_out == 0 && cursor.index < count && moving->sent - moving->done < WINDOW) {
            begin_frame(moving, &plan, &cursor, get, transfer_id, region);
        }
        sent = send_some(fd, moving);
        came = sent < 0 ? last_words(fd, moving, &plan, get, &refused, &outcome.nbytes)
                        : receive_some(fd, moving, &plan, get, &refused, &outcome.nbytes);
        if (refused > HURRAY_STREAM_ENDED) {
            outcome.status = refused;
            break;
        }
        if (sent < 0 || came < 0) {
            outcome.status = came == -2 ? HURRAY_STREAM_BROKEN : HURRAY_STREAM_LOST;
            break;
        }
        if (sent == 0 && came == 0) {
            wait_for(fd, (moving->num_out > 0 ? POLLOUT : 0) | (moving->done != moving->sent ? POLLIN : 0), LOOK_MS);
        } else if (cut_ns != UINT64_MAX) {
            cut_ns = now + DRAIN_NS;
        }
    }
    if (outcome.status == HURRAY_STREAM_OK) {
        outcome.status = refused;
    }
    free(moving);
    return outcome;
}
