/* Whether a producer's batch may be appended as it is.
 *
 * The core refuses no batch: what it does not find valid, or does not support (codecs,
 * flags, more than 256 KiB, no timestamps), Python judges:
 * protocol/records/log_validator.py.
 */

#ifndef MPBROKER_LOG_VALIDATOR_H
#define MPBROKER_LOG_VALIDATOR_H

#include <stdint.h>

/* What a topic accepts; of ValidationPolicy. */
typedef struct {
    int64_t max_message_bytes;
    int64_t before_max_ms, after_max_ms; /* how far timestamps may be from now */
} validation_limits;

/* Return whether `size` bytes are one batch with a header that is supported and valid.
 * Cheap: what the records are is not looked at. */
int is_valid_header(const uint8_t *batch, int64_t size, const validation_limits *limits,
                    int *is_transactional);

/* Return whether the checksum and the records of a batch with a valid header are
 * valid. */
int has_valid_records(const uint8_t *batch, int64_t size, const validation_limits *limits,
                      int64_t now_ms);

#endif
