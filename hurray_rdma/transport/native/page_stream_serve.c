#include "page_lending.h"
#include "page_stream_socket.h"
#include "page_streams.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>

/* What is read of one who broke the rules, so that he hears so before the connection ends. */
#define FAREWELL_NS 1000000000u
#define SCRATCH_NBYTES (64u << 10)
/* How long the pipe of a reader that takes nothing outlasts its permit. */
#define LET_GO_MS 100

/* All of it, however long that takes: 1, or 0 if the other end closed before the first byte, or -1 if it was cut. */
static int take(int fd, void *buffer, size_t nbytes)
{
    struct iovec iov = {.iov_base = buffer, .iov_len = nbytes};

    while (iov.iov_len > 0) {
        ssize_t done = hurray_receive(fd, &iov, 1);

        if (done > 0) {
            iov.iov_base = (char *)iov.iov_base + done;
            iov.iov_len -= (size_t)done;
        } else if (done == 0) {
            return iov.iov_len == nbytes ? 0 : -1;
        } else if (hurray_would_block()) {
            hurray_wait_for(fd, POLLIN, -1);
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
        ssize_t done = hurray_send(fd, &iov, 1, 0);

        if (done >= 0) {
            iov.iov_base = (char *)iov.iov_base + done;
            iov.iov_len -= (size_t)done;
        } else if (hurray_would_block()) {
            hurray_wait_for(fd, POLLOUT, -1);
        } else {
            return -1;
        }
    }
    return 0;
}

static int answer(int fd, uint32_t seq, hurray_stream_status_t status)
{
    hurray_answer_t said = {.seq = seq, .status = (uint32_t)status};

    return give(fd, &said, sizeof(said));
}

/* What is left of a parcel that must not touch the pages (any more): thrown away, or zeros. */
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

/* Between pages and socket, as long as the permit lasts. What was lent by then may be taken later: who reads learns
 * from the acknowledgement of its transfer whether all of it was taken before. `lending`: NULL where all is copied. */
static hurray_stream_status_t move_pages(hurray_permits_t *permits, int fd, const hurray_parcel_t *parcel,
                                         uint64_t serial, struct iovec *iov, size_t count, hurray_lending_t *lending)
{
    int send = parcel->kind == HURRAY_PARCEL_READ;
    int lends = send && lending != NULL && hurray_lending_suits(lending, iov, count, parcel->nbytes);
    uint64_t left = parcel->nbytes;

    while (left > 0) {
        ssize_t done;
        int error;

        if (!hurray_permits_enter(permits, parcel->transfer_id, serial)) {
            if (lends) {
                hurray_lending_drop(lending);
            }
            return pass(fd, send, left) == 0 ? HURRAY_STREAM_ENDED : HURRAY_STREAM_LOST;
        }
        if (lends) {
            done = hurray_lending_send(lending, fd, &iov, &count);
        } else {
            done = send ? hurray_send(fd, iov, count, 0) : hurray_receive(fd, iov, count);
        }
        error = errno;
        hurray_permits_leave(permits);
        errno = error;
        if (done > 0) {
            left -= (uint64_t)done;
            if (!lends) {
                hurray_advance(&iov, &count, (size_t)done);
            }
        } else if (done < 0 && hurray_would_block()) {
            if (send) {
                hurray_wait_for(fd, POLLOUT, lends ? LET_GO_MS : -1);
            } else {
                hurray_wait_for_bytes(fd, left, -1);
            }
        } else {
            return HURRAY_STREAM_LOST;
        }
    }
    return HURRAY_STREAM_OK;
}

static int is_parcel(const hurray_parcel_t *parcel)
{
    return parcel->magic == HURRAY_PARCEL_MAGIC &&
           (parcel->kind == HURRAY_PARCEL_WRITE || parcel->kind == HURRAY_PARCEL_READ) && parcel->count >= 1 &&
           parcel->count <= HURRAY_PARCEL_PIECES && parcel->nbytes >= 1 && parcel->nbytes <= HURRAY_PARCEL_NBYTES;
}

static int adds_up(const hurray_parcel_t *parcel, const hurray_piece_t *pieces)
{
    uint64_t nbytes = 0;

    for (uint32_t i = 0; i < parcel->count; i++) {
        if (pieces[i].nbytes > parcel->nbytes - nbytes) {
            return 0;
        }
        nbytes += pieces[i].nbytes;
    }
    return nbytes == parcel->nbytes;
}

/* The other end is told why, which it can only read if the connection ends in order: what it still sends is read. */
static void farewell(int fd, uint32_t seq, hurray_stream_status_t status)
{
    hurray_answer_t said = {.seq = seq, .status = (uint32_t)status};
    struct iovec iov = {.iov_base = &said, .iov_len = sizeof(said)};
    uint64_t until = hurray_now_ns() + FAREWELL_NS;
    char scratch[SCRATCH_NBYTES];

    if (hurray_send(fd, &iov, 1, 0) != (ssize_t)sizeof(said) || shutdown(fd, SHUT_WR) != 0) {
        return;
    }
    while (hurray_now_ns() < until) {
        struct iovec into = {.iov_base = scratch, .iov_len = sizeof(scratch)};
        ssize_t done = hurray_receive(fd, &into, 1);

        if (done == 0 || (done < 0 && !hurray_would_block())) {
            return;
        }
        if (done < 0) {
            hurray_wait_for(fd, POLLIN, HURRAY_LOOK_MS);
        }
    }
}

/* As `take`. While nothing is asked for it keeps no pipe: of these a user may have few, and of connections many. */
static int next(int fd, hurray_parcel_t *parcel, hurray_lending_t *lending)
{
    struct pollfd event = {.fd = fd, .events = POLLIN};

    if ((lending->ends[0] >= 0 || lending->refused) && poll(&event, 1, 0) == 0) {
        hurray_lending_drop(lending);
    }
    return take(fd, parcel, sizeof(*parcel));
}

static hurray_served_t serve(hurray_permits_t *permits, int fd, hurray_lending_t *lending)
{
    hurray_served_t served = {.status = HURRAY_STREAM_OK};
    struct iovec iov[HURRAY_PARCEL_PIECES];
    hurray_piece_t pieces[HURRAY_PARCEL_PIECES];
    hurray_parcel_t parcel;
    int came, lends = hurray_is_on_this_host(fd);

    while ((came = next(fd, &parcel, lending)) == 1) {
        uint64_t serial = 0;
        uint32_t wrong = 0;

        served.transfer_id = parcel.transfer_id;
        served.region = parcel.region;
        if (!is_parcel(&parcel)) {
            served.status = HURRAY_STREAM_BROKEN;
        } else if (take(fd, pieces, parcel.count * sizeof(hurray_piece_t)) != 1) {
            served.status = HURRAY_STREAM_LOST;
        } else if (!adds_up(&parcel, pieces)) {
            served.status = HURRAY_STREAM_BROKEN;
        } else {
            served.status = hurray_permits_place(permits, &parcel, pieces, iov, &serial, &wrong);
        }
        if (served.status == HURRAY_STREAM_FORBIDDEN) {
            served.offset = pieces[wrong].offset;
            served.nbytes = pieces[wrong].nbytes;
        }
        if (served.status == HURRAY_STREAM_OK) {
            if (parcel.kind == HURRAY_PARCEL_READ && answer(fd, parcel.seq, HURRAY_STREAM_OK) != 0) {
                served.status = HURRAY_STREAM_LOST;
            } else {
                served.status = move_pages(permits, fd, &parcel, serial, iov, parcel.count, lends ? lending : NULL);
            }
        } else if (served.status == HURRAY_STREAM_ENDED && parcel.kind == HURRAY_PARCEL_WRITE) {
            served.status = pass(fd, 0, parcel.nbytes) == 0 ? HURRAY_STREAM_ENDED : HURRAY_STREAM_LOST;
        }
        if (served.status > HURRAY_STREAM_ENDED) {
            if (served.status != HURRAY_STREAM_LOST) {
                farewell(fd, parcel.seq, served.status);
            }
            return served;
        }
        if (answer(fd, parcel.seq, served.status) != 0) {
            served.status = HURRAY_STREAM_LOST;
            return served;
        }
    }
    served.status = came == 0 ? HURRAY_STREAM_OK : HURRAY_STREAM_LOST;
    return served;
}

hurray_served_t hurray_stream_serve(hurray_permits_t *permits, int fd)
{
    hurray_lending_t lending = hurray_lending_begin();
    hurray_served_t served = serve(permits, fd, &lending);

    hurray_lending_end(&lending, fd, served.status == HURRAY_STREAM_OK);
    return served;
}
