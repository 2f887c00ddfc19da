/* Reading a request's fields and writing an answer's: of the versions before compact
 * lengths and tagged fields, and of the ("flexible") ones since.
 */

#ifndef MPBROKER_WIRE_H
#define MPBROKER_WIRE_H

#include "core.h"
#include "protocol/varint.h"

/* Of bytes that a client sent: whatever is not there, or not plain, makes it bad. */
typedef struct {
    const uint8_t *at, *end;
    int flexible, is_bad;
} reader;

static inline int64_t
get(reader *r, int bytes)
{
    if (r->end - r->at < bytes) {
        r->is_bad = 1;
        return 0;
    }
    r->at += bytes;
    return read_big(r->at - bytes, bytes);
}

static inline int64_t
get_unsigned_varint(reader *r)
{
    cursor c = {r->at, r->end};
    uint64_t value;
    if (!read_unsigned_varint(&c, 28, &value)) {
        r->is_bad = 1; /* 256 MB of anything is not plain */
        return 0;
    }
    r->at = c.at;
    return (int64_t)value;
}

/* -1: null. */
static inline int64_t
get_count(reader *r)
{
    return r->flexible ? get_unsigned_varint(r) - 1 : get(r, 4);
}

static inline const uint8_t *
get_bytes(reader *r, int64_t length)
{
    if (length < 0 || length > r->end - r->at) {
        r->is_bad = 1;
        return NULL;
    }
    r->at += length;
    return r->at - length;
}

static inline const uint8_t *
get_string(reader *r, int *length)
{
    int64_t size = r->flexible ? get_unsigned_varint(r) - 1 : get(r, 2);
    *length = (int)size;
    return get_bytes(r, size);
}

static inline void
get_no_tags(reader *r)
{
    if (r->flexible && get(r, 1) != 0)
        r->is_bad = 1;
}

/* -1: null. */
static inline uint8_t *
write_length(uint8_t *at, int64_t value, int flexible, int bytes)
{
    if (!flexible)
        return write_big(at, value, bytes);
    return write_unsigned_varint(at, (uint64_t)value + 1);
}

#endif
