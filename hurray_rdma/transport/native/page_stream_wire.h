/*
 * What goes over a page stream, little-endian:
 *   parcel   u32 magic, kind, transfer_id, region, count, seq; u64 nbytes; count x {u64 offset, u64 nbytes}; if it is
 *            to be written, nbytes bytes
 *   answer   u32 seq, status. Where a parcel that is permitted is to be read it is followed by nbytes bytes, and by a
 *            second answer, which tells whether the bytes between were permitted to their end, as they left
 */
#ifndef HURRAY_PAGE_STREAM_WIRE_H
#define HURRAY_PAGE_STREAM_WIRE_H

#include <stdint.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "structs are the wire's bytes");

enum { HURRAY_PARCEL_MAGIC = 0x31465248, HURRAY_PARCEL_WRITE = 1, HURRAY_PARCEL_READ = 2 };
enum { HURRAY_PARCEL_PIECES = 512 };     /* at most, in one parcel */
enum { HURRAY_PARCEL_NBYTES = 2 << 20 }; /* page bytes of one parcel, at most */

typedef struct {
    uint32_t magic, kind, transfer_id, region, count, seq;
    uint64_t nbytes;
} hurray_parcel_t;

typedef struct {
    uint64_t offset, nbytes;
} hurray_piece_t;

typedef struct {
    uint32_t seq, status;
} hurray_answer_t;

_Static_assert(sizeof(hurray_parcel_t) == 32 && sizeof(hurray_piece_t) == 16 && sizeof(hurray_answer_t) == 8,
               "no padding on the wire");

/* The first four are answers; all are outcomes. */
typedef enum {
    HURRAY_STREAM_OK = 0,
    HURRAY_STREAM_ENDED = 1,     /* the transfer is not under way (any more): its bytes were thrown away */
    HURRAY_STREAM_FORBIDDEN = 2, /* a piece is not inside what the transfer permits; the connection ends */
    HURRAY_STREAM_BROKEN = 3,    /* what came is no parcel, or no answer to one; the connection ends */
    HURRAY_STREAM_LOST = 4,      /* the connection was cut */
    HURRAY_STREAM_STOPPED = 5,
    HURRAY_STREAM_TIMED_OUT = 6,
    HURRAY_STREAM_NO_MEMORY = 7
} hurray_stream_status_t;

#endif
