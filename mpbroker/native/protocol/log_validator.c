/* Python twin: protocol/records/log_validator.py. */

#include "protocol/log_validator.h"

#include "protocol/batch_header.h"
#include "protocol/crc32c.h"
#include "protocol/record_walk.h"

#define MAGIC 2
/* For larger batches most of the cost is the checksum, and the crc32c package computes
 * it faster. */
#define MAX_BATCH_BYTES (256 * 1024)
/* Far beyond any time, and far from where a sum could overflow. */
#define MAX_TIME ((int64_t)1 << 60)

int
is_valid_header(const uint8_t *batch, int64_t size, const validation_limits *limits,
                int *is_transactional)
{
    if (size < BATCH_HEADER_SIZE || batch_size(batch) != size
        || batch[BATCH_MAGIC] != MAGIC || size > limits->max_message_bytes
        || size > MAX_BATCH_BYTES)
        return 0;
    const uint8_t attributes = batch_attributes(batch);
    const int64_t count = read_big(batch + BATCH_RECORD_COUNT, 4);
    *is_transactional = attributes == TRANSACTIONAL_FLAG;
    return batch[BATCH_ATTRIBUTES] == 0 && (attributes == 0 || *is_transactional)
           && count > 0 && last_offset_delta(batch) == count - 1;
}

/* Visit all records; find the newest and the oldest delta of their timestamps. */
static int
walk_records(cursor c, int64_t count, int64_t *newest, int64_t *oldest)
{
    for (int64_t index = 0; index < count; index++) {
        record r;
        if (read_record(&c, 0, index, &r) != NO_FAULT)
            return 0;
        if (index == 0 || r.timestamp_delta > *newest)
            *newest = r.timestamp_delta;
        if (index == 0 || r.timestamp_delta < *oldest)
            *oldest = r.timestamp_delta;
    }
    return c.at == c.end;
}

int
has_valid_records(const uint8_t *batch, int64_t size, const validation_limits *limits,
                  int64_t now_ms)
{
    const uint8_t *covered = batch + BATCH_ATTRIBUTES, *end = batch + size;
    const int64_t count = read_big(batch + BATCH_RECORD_COUNT, 4);
    const int64_t base = read_big(batch + BATCH_BASE_TIMESTAMP, 8);
    int64_t newest = 0, oldest = 0;
    if (crc32c(covered, end - covered) != (uint32_t)read_big(batch + BATCH_CRC, 4)
        || !walk_records((cursor){batch + BATCH_HEADER_SIZE, end}, count, &newest,
                         &oldest))
        return 0;
    /* A record with a negative timestamp may be one without a timestamp: Python decides
     * that. */
    if (base < 0 || base > MAX_TIME || newest > MAX_TIME || oldest < -MAX_TIME
        || base + oldest < 0)
        return 0;
    newest += base;
    oldest += base;
    return newest == max_timestamp(batch) && newest - now_ms <= limits->after_max_ms
           && now_ms - oldest <= limits->before_max_ms;
}
