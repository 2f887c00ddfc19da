/* Big-endian integers of 1, 2, 4 or 8 bytes, as in Kafka's protocol and files. */

#ifndef MPBROKER_BIG_ENDIAN_H
#define MPBROKER_BIG_ENDIAN_H

#include <endian.h>
#include <stdint.h>
#include <string.h>

/* Read a signed integer of `bytes` bytes. `bytes` is a constant, so the compiler leaves
 * a load and a swap of this. */
static inline int64_t
read_big(const uint8_t *at, int bytes)
{
    uint64_t raw8;
    uint32_t raw4;
    uint16_t raw2;
    switch (bytes) {
    case 8:
        memcpy(&raw8, at, 8);
        return (int64_t)be64toh(raw8);
    case 4:
        memcpy(&raw4, at, 4);
        return (int32_t)be32toh(raw4);
    case 2:
        memcpy(&raw2, at, 2);
        return (int16_t)be16toh(raw2);
    default:
        return (int8_t)*at;
    }
}

/* Write an integer of `bytes` bytes; return where the next byte goes. */
static inline uint8_t *
write_big(uint8_t *at, int64_t value, int bytes)
{
    uint64_t raw8 = htobe64((uint64_t)value);
    uint32_t raw4 = htobe32((uint32_t)value);
    uint16_t raw2 = htobe16((uint16_t)value);
    switch (bytes) {
    case 8:
        memcpy(at, &raw8, 8);
        break;
    case 4:
        memcpy(at, &raw4, 4);
        break;
    case 2:
        memcpy(at, &raw2, 2);
        break;
    default:
        *at = (uint8_t)value;
    }
    return at + bytes;
}

#endif
