/* What the compiled walks over records share: a cursor that never reads past its end. */

#ifndef MPBROKER_VARINT_H
#define MPBROKER_VARINT_H

#include <stdint.h>

typedef struct {
    const uint8_t *at;
    const uint8_t *end;
} cursor;

/* Read a zig-zag varint of at most `bits` bits; return 0 if it is cut off or longer. */
static inline int
read_varint(cursor *c, int bits, int64_t *value)
{
    uint64_t raw;
    if (c->at < c->end && *c->at < 0x80) {
        raw = *c->at++;
    }
    else {
        int shift = 0;
        uint64_t byte;
        raw = 0;
        do {
            if (c->at == c->end || shift >= bits)
                return 0;
            byte = *c->at++;
            /* The last byte that fits has room for a few of its seven bits only. */
            if (shift + 7 > bits && (byte & 0x7f) >> (bits - shift))
                return 0;
            raw |= (byte & 0x7f) << shift;
            shift += 7;
        } while (byte & 0x80);
    }
    *value = (int64_t)((raw >> 1) ^ (0 - (raw & 1)));
    return 1;
}

#endif
