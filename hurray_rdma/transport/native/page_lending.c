#define _GNU_SOURCE
#include "page_lending.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/sockios.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "page_stream_socket.h"

/* A pipe of a few dozen pages is as fast as a larger one, and a user may have many. */
#define PIPE_NBYTES (256 << 10)
/* The pipe costs some 10 us, and lending as much for each page of the kernel's as copying two thirds of it. */
#define LEAST_NBYTES (256u << 10)

hurray_lending_t hurray_lending_begin(void)
{
    return (hurray_lending_t){.ends = {-1, -1}};
}

static void close_pipe(hurray_lending_t *lending)
{
    close(lending->ends[0]);
    close(lending->ends[1]);
    lending->ends[0] = lending->ends[1] = -1;
}

/* `splice` into a socket that was cut raises SIGPIPE, and cannot be told not to. */
static void hold_signal(hurray_lending_t *lending)
{
    sigset_t signals;

    sigpending(&signals);
    lending->had_signal = sigismember(&signals, SIGPIPE);
    sigemptyset(&signals);
    sigaddset(&signals, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &signals, &lending->mask);
    lending->holds_signal = 1;
}

static void drop_signal(hurray_lending_t *lending)
{
    const struct timespec now = {0};
    sigset_t signals;

    sigemptyset(&signals);
    sigaddset(&signals, SIGPIPE);
    while (!lending->had_signal && sigtimedwait(&signals, NULL, &now) < 0 && errno == EINTR) {
    }
    pthread_sigmask(SIG_SETMASK, &lending->mask, NULL);
}

/* The signal is held from the first pipe to the end. */
static int open_pipe(hurray_lending_t *lending)
{
    if (pipe2(lending->ends, O_CLOEXEC | O_NONBLOCK) != 0) {
        return -1;
    }
    if (fcntl(lending->ends[1], F_SETPIPE_SZ, PIPE_NBYTES) < PIPE_NBYTES) { /* the user has too many */
        close_pipe(lending);
        return -1;
    }
    if (!lending->holds_signal) {
        hold_signal(lending);
    }
    return 0;
}

int hurray_lending_suits(hurray_lending_t *lending, const struct iovec *iov, size_t count, size_t nbytes)
{
    uintptr_t page_nbytes = (uintptr_t)sysconf(_SC_PAGESIZE), pages = 0;

    if (lending->refused || nbytes < LEAST_NBYTES) {
        return 0;
    }
    for (size_t i = 0; i < count; i++) {
        uintptr_t first = (uintptr_t)iov[i].iov_base / page_nbytes;
        pages += ((uintptr_t)iov[i].iov_base + iov[i].iov_len - 1) / page_nbytes - first + 1;
    }
    if (nbytes < pages * (page_nbytes / 4 * 3)) {
        return 0;
    }
    if (lending->ends[0] < 0 && open_pipe(lending) != 0) {
        lending->refused = 1;
        return 0;
    }
    return 1;
}

ssize_t hurray_lending_send(hurray_lending_t *lending, int fd, struct iovec **iov, size_t *count)
{
    ssize_t done;

    if (*count > 0 && !lending->refused) {
        done = vmsplice(lending->ends[1], *iov, *count, SPLICE_F_NONBLOCK);
        if (done > 0) {
            lending->nbytes += (size_t)done;
            hurray_advance(iov, count, (size_t)done);
        } else if (done < 0 && !hurray_would_block() && errno != EINTR) {
            lending->refused = 1; /* mapped by a driver, for one: only the processor may read it */
        }
    }
    if (lending->nbytes == 0) {
        done = hurray_send(fd, *iov, *count, 0);
        if (done > 0) {
            hurray_advance(iov, count, (size_t)done);
        }
        return done;
    }
    do {
        done = splice(lending->ends[0], NULL, fd, NULL, lending->nbytes,
                      SPLICE_F_NONBLOCK | (*count > 0 ? SPLICE_F_MORE : 0));
    } while (done < 0 && errno == EINTR);
    if (done > 0) {
        lending->nbytes -= (size_t)done;
        lending->used = 1;
    }
    return done;
}

void hurray_lending_drop(hurray_lending_t *lending)
{
    if (lending->ends[0] >= 0) {
        close_pipe(lending);
    }
    lending->nbytes = 0;
    lending->refused = 0;
}

int hurray_lending_end(hurray_lending_t *lending, int fd, int answered)
{
    int unsent = 0;

    if (lending->ends[0] >= 0) {
        close_pipe(lending);
    }
    if (lending->holds_signal) {
        drop_signal(lending);
    }
    if (!lending->used || (answered && ioctl(fd, SIOCOUTQ, &unsent) == 0 && unsent == 0)) {
        return 1;
    }
    (void)connect(fd, &(struct sockaddr){.sa_family = AF_UNSPEC}, sizeof(struct sockaddr)); /* tcp_disconnect */
    return 0;
}
