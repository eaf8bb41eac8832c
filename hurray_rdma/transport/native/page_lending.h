/*
 * Sends memory over a socket by reference: the kernel is lent the pages (`vmsplice` into a pipe, `splice` from there
 * into the socket), and copies no byte of them here. On one machine the receiver copies straight from them, once and
 * not twice; a network card reads them itself.
 *
 * What is lent is read when it leaves, or when the receiver takes it. So its owner may change it only when the other
 * end has answered for all of it: then nobody reads it any more; what TCP should send again is thrown away there, since
 * it is there already. Who is asked for pages lends them to its own host only, as its exchange has no such end; that a
 * reader took all in time is what the acknowledgement of its transfer says. Where the exchange of one who writes ends
 * earlier, `end` resets the connection, which throws away all that has not left. What the receiver's kernel has by then
 * is on this same machine, and may be read as it changes: into pages of the transfer that has just failed here, so is
 * never completed there, while that permits it; others get those pages only when that permit has ended, and then
 * nothing of it lands any more. One who keeps to no rules may thus see what comes after in the pages that he was being
 * sent.
 */
#ifndef HURRAY_PAGE_LENDING_H
#define HURRAY_PAGE_LENDING_H

#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>

typedef struct {
    int ends[2];    /* of the pipe; -1: there is none yet */
    size_t nbytes;  /* in the pipe */
    int refused;    /* this memory or this process cannot lend: all is copied */
    int used;
    int holds_signal;
    int had_signal; /* a SIGPIPE was waiting before */
    sigset_t mask;
} hurray_lending_t;

/* For one exchange, on one thread; `end` ends it. */
hurray_lending_t hurray_lending_begin(void);

/* Whether so large a list, in so long pieces, is lent faster than copied, and can be. */
int hurray_lending_suits(hurray_lending_t *lending, const struct iovec *iov, size_t count, size_t nbytes);

/* Lends what the socket takes now, and copies what cannot be lent; takes it off the list. As sendmsg. All has been
 * handed over once both the list is empty and `lending->nbytes` is 0. */
ssize_t hurray_lending_send(hurray_lending_t *lending, int fd, struct iovec **iov, size_t *count);

/* Of an exchange that goes on later, maybe: gives the pipe back, and what is in it is not sent. */
void hurray_lending_drop(hurray_lending_t *lending);

/* `answered`: the other end has answered for all. Returns 0 where what was lent is still being read, although it should
 * not: then the connection has been reset. */
int hurray_lending_end(hurray_lending_t *lending, int fd, int answered);

#endif
