#define _GNU_SOURCE
#include "page_stream_socket.h"

#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

/* What is worth to be woken for, and what is so little that the next call has it. */
#define WAKE_NBYTES (256 << 10)
#define LEAST_NBYTES (64u << 10)

uint64_t hurray_now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

int hurray_would_block(void)
{
    return errno == EAGAIN || errno == EWOULDBLOCK;
}

void hurray_wait_for(int fd, short events, int timeout_ms)
{
    struct pollfd event = {.fd = fd, .events = events};
    (void)poll(&event, 1, timeout_ms); /* an interrupted sleep is as good as a finished one */
}

void hurray_wait_for_bytes(int fd, uint64_t nbytes, int timeout_ms)
{
    int least = nbytes < WAKE_NBYTES ? (int)nbytes : WAKE_NBYTES, one = 1;

    if (nbytes < LEAST_NBYTES || setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &least, sizeof(least)) != 0) {
        hurray_wait_for(fd, POLLIN, timeout_ms);
        return;
    }
    hurray_wait_for(fd, POLLIN, timeout_ms); /* also where the buffer is full before */
    (void)setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &one, sizeof(one));
}

int hurray_is_on_this_host(int fd)
{
    union {
        struct sockaddr any;
        struct sockaddr_in v4;
        struct sockaddr_in6 v6;
    } here = {{0}}, there = {{0}};
    socklen_t nbytes = sizeof(here), there_nbytes = sizeof(there);

    if (getsockname(fd, &here.any, &nbytes) != 0 || getpeername(fd, &there.any, &there_nbytes) != 0 ||
        here.any.sa_family != there.any.sa_family) {
        return 0;
    }
    switch (here.any.sa_family) {
    case AF_INET:
        return here.v4.sin_addr.s_addr == there.v4.sin_addr.s_addr;
    case AF_INET6:
        return memcmp(&here.v6.sin6_addr, &there.v6.sin6_addr, sizeof(here.v6.sin6_addr)) == 0;
    default:
        return here.any.sa_family == AF_UNIX;
    }
}

ssize_t hurray_send(int fd, struct iovec *iov, size_t count, int more)
{
    struct msghdr message = {.msg_iov = iov, .msg_iovlen = count};
    ssize_t done;

    do {
        done = sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL | (more ? MSG_MORE : 0));
    } while (done < 0 && errno == EINTR);
    return done;
}

ssize_t hurray_receive(int fd, struct iovec *iov, size_t count)
{
    struct msghdr message = {.msg_iov = iov, .msg_iovlen = count};
    ssize_t done;

    do {
        done = recvmsg(fd, &message, MSG_DONTWAIT);
    } while (done < 0 && errno == EINTR);
    return done;
}

void hurray_advance(struct iovec **iov, size_t *count, size_t nbytes)
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
