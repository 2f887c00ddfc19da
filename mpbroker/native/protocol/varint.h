/* Varints, and the cursor by which they are read: one reader and one writer for all C
 * code. A byte has seven bits of the number, the lowest first; signed numbers are
 * zig-zag encoded.
 *
 * Source: Kafka protocol guide, "VARINT", "VARLONG" and "UNSIGNED_VARINT".
 */

#ifndef MPBROKER_VARINT_H
#define MPBROKER_VARINT_H

#include <stdint.h>

/* A buffer that is read from front to back, and never past its end. */
typedef struct {
    const uint8_t *at;
    const uint8_t *end;
} cursor;

/* Read an unsigned varint of at most `bits` bits; 0 if it is cut off or longer. */
static inline int
read_unsigned_varint(cursor *c, int bits, uint64_t *value)
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
    *value = raw;
    return 1;
}

/* Read a zig-zag varint of at most `bits` bits; 0 if it is cut off or longer. */
static inline int
read_varint(cursor *c, int bits, int64_t *value)
{
    uint64_t raw;
    if (!read_unsigned_varint(c, bits, &raw))
        return 0;
    *value = (int64_t)((raw >> 1) ^ (0 - (raw & 1)));
    return 1;
}

static inline uint64_t
zigzag(int64_t value)
{
    return ((uint64_t)value << 1) ^ (uint64_t)(value >> 63);
}

/* Return how many bytes write_varint() takes. */
static inline int64_t
varint_size(int64_t value)
{
    int64_t size = 1;
    for (uint64_t raw = zigzag(value); raw > 0x7f; raw >>= 7)
        size++;
    return size;
}

/* Write a varint; return where the next byte goes. */
static inline uint8_t *
write_unsigned_varint(uint8_t *at, uint64_t value)
{
    for (; value > 0x7f; value >>= 7)
        *at++ = (uint8_t)(value | 0x80);
    *at++ = (uint8_t)value;
    return at;
}

static inline uint8_t *
write_varint(uint8_t *at, int64_t value)
{
    return write_unsigned_varint(at, zigzag(value));
}

#endif
