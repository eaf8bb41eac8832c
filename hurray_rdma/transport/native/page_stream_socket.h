/*
 * What both ends of a page stream do with its socket, which is non-blocking.
 */
#ifndef HURRAY_PAGE_STREAM_SOCKET_H
#define HURRAY_PAGE_STREAM_SOCKET_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>

/* How long a loop sleeps at most before it looks at the clock, and at whether it is to stop. */
enum { HURRAY_LOOK_MS = 10 };

uint64_t hurray_now_ns(void);

/* Whether a call that failed may be tried again when the socket is ready. */
int hurray_would_block(void);

/* Sleeps until the socket is ready for `events` (as of poll), or the time is over, or a signal has come. */
void hurray_wait_for(int fd, short events, int timeout_ms);

/* The same until `nbytes` that are sure to come can be read; most of them, where they are many: to be woken for each
 * segment costs more than to copy it. */
void hurray_wait_for_bytes(int fd, uint64_t nbytes, int timeout_ms);

/* Whether the other end is a process of this machine, as far as addresses tell: nothing that was sent waits here then,
 * but in what the other end has for it. */
int hurray_is_on_this_host(int fd);

/* What the socket takes now of a list, or has for it; as sendmsg and recvmsg. `more`: it waits for more to send. */
ssize_t hurray_send(int fd, struct iovec *iov, size_t count, int more);
ssize_t hurray_receive(int fd, struct iovec *iov, size_t count);

/* Takes `nbytes` off the front of a list. */
void hurray_advance(struct iovec **iov, size_t *count, size_t nbytes);

#endif
