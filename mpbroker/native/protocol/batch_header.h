/* The header of a record batch of format version 2 (magic 2): the offsets of its
 * fields.
 *
 * Python twin: protocol/records/batch_header.py, which draws the layout.
 * Source: Kafka documentation, "Message Format"; KIP-98.
 */

#ifndef MPBROKER_BATCH_HEADER_H
#define MPBROKER_BATCH_HEADER_H

#include "base/big_endian.h"

enum batch_field {
    BATCH_BASE_OFFSET = 0,        /* int64 */
    BATCH_LENGTH = 8,             /* int32: the bytes that follow this field */
    BATCH_LEADER_EPOCH = 12,      /* int32 */
    BATCH_MAGIC = 16,             /* int8 */
    BATCH_CRC = 17,               /* uint32: CRC-32C of the bytes that follow */
    BATCH_ATTRIBUTES = 21,        /* int16; all defined bits are in the second byte */
    BATCH_LAST_OFFSET_DELTA = 23, /* int32 */
    BATCH_BASE_TIMESTAMP = 27,    /* int64, ms */
    BATCH_MAX_TIMESTAMP = 35,     /* int64, ms */
    BATCH_PRODUCER_ID = 43,       /* int64; -1: none */
    BATCH_PRODUCER_EPOCH = 51,    /* int16 */
    BATCH_BASE_SEQUENCE = 53,     /* int32 */
    BATCH_RECORD_COUNT = 57,      /* int32 */
    BATCH_HEADER_SIZE = 61,
    LOG_OVERHEAD = 12, /* base offset and BATCH_LENGTH, which this does not count */
};

/* Bits of the second byte of the attributes. */
enum batch_attribute {
    CODEC_MASK = 0x07,
    TIMESTAMP_TYPE_FLAG = 0x08,
    TRANSACTIONAL_FLAG = 0x10,
    CONTROL_FLAG = 0x20,
};

static inline uint8_t
batch_attributes(const uint8_t *batch)
{
    return batch[BATCH_ATTRIBUTES + 1];
}

/* Return the size of the whole batch, according to its header. */
static inline int64_t
batch_size(const uint8_t *batch)
{
    return read_big(batch + BATCH_LENGTH, 4) + LOG_OVERHEAD;
}

static inline int64_t
last_offset_delta(const uint8_t *batch)
{
    return read_big(batch + BATCH_LAST_OFFSET_DELTA, 4);
}

static inline int64_t
max_timestamp(const uint8_t *batch)
{
    return read_big(batch + BATCH_MAX_TIMESTAMP, 8);
}

/* Write the base offset and leader epoch that a batch gets in a log. The checksum
 * covers neither of them. */
static inline void
place_batch(uint8_t *batch, int64_t base_offset, int64_t leader_epoch)
{
    write_big(batch + BATCH_BASE_OFFSET, base_offset, 8);
    write_big(batch + BATCH_LEADER_EPOCH, leader_epoch, 4);
}

#endif
