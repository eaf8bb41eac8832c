#include "page_lending.h"
#include "page_stream_socket.h"
#include "page_streams.h"

#include <poll.h>
#include <stdlib.h>

/* Parcels that wait for their answers: as much as a socket buffers, so that a long move is never idle for a round
 * trip. */
#define WINDOW 8
/* After a stop or the deadline the parcels under way may end, as others need the connection: while no pause is longer
 * than the first, and all of it not longer than the second. Then the caller cuts it. */
#define DRAIN_NS 1000000000u
#define MAX_DRAIN_NS 10000000000u

/* A plan, and how much of it has been put into parcels. */
typedef struct {
    uint64_t local_base;
    const uint64_t *local_offsets, *remote_offsets, *lengths;
    uint64_t count;
} plan_t;

typedef struct {
    uint64_t index, skip; /* the next byte of a plan */
} cursor_t;

/* The next parcel: local pieces, remote pieces, each put together with its neighbours on its own side. */
static cursor_t cut(const plan_t *plan, cursor_t from, struct iovec *iov, size_t *num_iov, hurray_piece_t *pieces,
                    uint32_t *num_pieces, uint64_t *nbytes)
{
    *num_iov = 0;
    *num_pieces = 0;
    *nbytes = 0;
    while (from.index < plan->count && *nbytes < HURRAY_PARCEL_NBYTES) {
        uint64_t part = plan->lengths[from.index] - from.skip, room = HURRAY_PARCEL_NBYTES - *nbytes;
        char *local = (char *)(plan->local_base + plan->local_offsets[from.index] + from.skip);
        uint64_t remote = plan->remote_offsets[from.index] + from.skip;
        struct iovec *last_iov = *num_iov > 0 ? iov + *num_iov - 1 : NULL;
        hurray_piece_t *last_piece = *num_pieces > 0 ? pieces + *num_pieces - 1 : NULL;
        int joins_iov = last_iov != NULL && (char *)last_iov->iov_base + last_iov->iov_len == local;
        int joins_piece = last_piece != NULL && last_piece->offset + last_piece->nbytes == remote;

        if ((!joins_iov && *num_iov == HURRAY_PARCEL_PIECES) || (!joins_piece && *num_pieces == HURRAY_PARCEL_PIECES)) {
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
            pieces[(*num_pieces)++] = (hurray_piece_t){.offset = remote, .nbytes = part};
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
    hurray_parcel_t parcel;
    hurray_piece_t pieces[HURRAY_PARCEL_PIECES];
    struct iovec iov[HURRAY_PARCEL_PIECES + 2];
    struct iovec *out;
    size_t num_out;
    hurray_lending_t lending;
    int lends;               /* the pages of this parcel */

    cursor_t starts[WINDOW]; /* of the parcels that are outstanding, by their numbers */
    uint64_t sizes[WINDOW];
    uint32_t sent, done;     /* parcels begun, parcels answered to their end */

    hurray_answer_t answer;
    size_t answer_nbytes;    /* of it that have come */
    hurray_piece_t in_pieces[HURRAY_PARCEL_PIECES];
    struct iovec in_iov[HURRAY_PARCEL_PIECES];
    struct iovec *in;
    size_t num_in;           /* 0: no pages are coming */
    int in_begun;            /* the pages of this parcel have come: the answer that follows is the second */
} moving_t;

static int is_sending(const moving_t *moving)
{
    return moving->num_out > 0 || moving->lending.nbytes > 0;
}

static void begin_parcel(moving_t *moving, const plan_t *plan, cursor_t *cursor, int get, uint32_t transfer_id,
                        uint32_t region)
{
    size_t num_iov;
    uint32_t slot = moving->sent % WINDOW;

    moving->starts[slot] = *cursor;
    *cursor = cut(plan, *cursor, moving->iov + 2, &num_iov, moving->pieces, &moving->parcel.count,
                  &moving->parcel.nbytes);
    moving->sizes[slot] = moving->parcel.nbytes;
    moving->parcel.magic = HURRAY_PARCEL_MAGIC;
    moving->parcel.kind = get ? HURRAY_PARCEL_READ : HURRAY_PARCEL_WRITE;
    moving->parcel.transfer_id = transfer_id;
    moving->parcel.region = region;
    moving->parcel.seq = moving->sent;
    moving->iov[0] = (struct iovec){.iov_base = &moving->parcel, .iov_len = sizeof(moving->parcel)};
    moving->iov[1] = (struct iovec){
        .iov_base = moving->pieces,
        .iov_len = moving->parcel.count * sizeof(hurray_piece_t),
    };
    moving->out = moving->iov;
    moving->num_out = get ? 2 : 2 + num_iov;
    moving->lends = !get && hurray_lending_suits(&moving->lending, moving->iov + 2, num_iov, moving->parcel.nbytes);
    moving->sent++;
}

/* 1: something was sent; 0: not now; -1: the connection is lost. */
static int send_some(int fd, moving_t *moving)
{
    struct iovec *pages = moving->iov + 2;
    ssize_t sent;

    if (!is_sending(moving)) {
        return 0;
    }
    if (moving->lends && moving->out >= pages) {
        sent = hurray_lending_send(&moving->lending, fd, &moving->out, &moving->num_out);
    } else {
        size_t count = moving->lends ? (size_t)(pages - moving->out) : moving->num_out;

        sent = hurray_send(fd, moving->out, count, moving->lends);
        if (sent > 0) {
            hurray_advance(&moving->out, &moving->num_out, (size_t)sent);
        }
    }
    return sent >= 0 ? 1 : hurray_would_block() ? 0 : -1;
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
    if (is_sending(moving) && moving->done + 1 == moving->sent) {
        return -1; /* the parcel that it answers is still being sent */
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
    came = moving->num_in > 0 ? hurray_receive(fd, moving->in, moving->num_in) : hurray_receive(fd, &word, 1);
    if (came <= 0) {
        return came < 0 && hurray_would_block() ? 0 : -1;
    }
    if (moving->num_in > 0) {
        hurray_advance(&moving->in, &moving->num_in, (size_t)came);
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

static uint64_t total(const struct iovec *iov, size_t count)
{
    uint64_t nbytes = 0;

    for (size_t i = 0; i < count; i++) {
        nbytes += iov[i].iov_len;
    }
    return nbytes;
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
    uint64_t cut_ns = UINT64_MAX, last_ns = 0; /* it is to end early: until when it may, without bytes and at all */

    if (moving == NULL) {
        outcome.status = HURRAY_STREAM_NO_MEMORY;
        outcome.intact = 1;
        return outcome;
    }
    moving->lending = hurray_lending_begin();
    for (;;) {
        int idle = !is_sending(moving) && moving->done == moving->sent, sent, came;
        uint64_t now = hurray_now_ns();

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
        } else if (!is_sending(moving) && cursor.index < count && moving->sent - moving->done < WINDOW) {
            begin_parcel(moving, &plan, &cursor, get, transfer_id, region);
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
        if (sent == 0 && came == 0 && moving->num_in > 0 && !is_sending(moving)) {
            hurray_wait_for_bytes(fd, total(moving->in, moving->num_in), HURRAY_LOOK_MS);
        } else if (sent == 0 && came == 0) {
            hurray_wait_for(fd, (is_sending(moving) ? POLLOUT : 0) | (moving->done != moving->sent ? POLLIN : 0),
                            HURRAY_LOOK_MS);
        } else if (cut_ns != UINT64_MAX) {
            cut_ns = now + DRAIN_NS;
        }
    }
    if (outcome.status == HURRAY_STREAM_OK) {
        outcome.status = refused;
    }
    if (!hurray_lending_end(&moving->lending, fd, outcome.intact) && outcome.intact) { /* answered, and not taken */
        outcome.status = HURRAY_STREAM_BROKEN;
        outcome.intact = 0;
    }
    free(moving);
    return outcome;
}
