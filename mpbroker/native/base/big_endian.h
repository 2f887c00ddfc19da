/* Big-endian integers of 1 to 8 bytes, as in Kafka's protocol and files. */

#ifndef MPBROKER_BIG_ENDIAN_H
#define MPBROKER_BIG_ENDIAN_H

#include <stdint.h>

/* Read a signed one. */
static inline int64_t
read_big(const uint8_t *at, int bytes)
{
    uint64_t value = at[0] & 0x80 ? ~(uint64_t)0 : 0;
    for (int i = 0; i < bytes; i++)
        value = value << 8 | at[i];
    return (int64_t)value;
}

/* Write one; return where the next byte goes. */
static inline uint8_t *
write_big(uint8_t *at, int64_t value, int bytes)
{
    for (int i = bytes - 1; i >= 0; i--, value >>= 8)
        at[i] = (uint8_t)value;
    return at + bytes;
}

#endif
