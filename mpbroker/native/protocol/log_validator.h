/* The checks of a producer's batch: may it be appended as it is?
 *
 * The core refuses no batch. Batches that it does not find valid, or does not support
 * (codecs, flags, more than 256 KiB, no timestamps), are left to Python, which may
 * refuse them: protocol/records/log_validator.py.
 */

#ifndef MPBROKER_LOG_VALIDATOR_H
#define MPBROKER_LOG_VALIDATOR_H

#include <stdint.h>

/* The limits of a topic for its batches, from ValidationPolicy. */
typedef struct {
    int64_t max_message_bytes;
    int64_t before_max_ms, after_max_ms; /* how far timestamps may be from now */
} validation_limits;

/* Return whether `size` bytes are one batch with a header that is supported and valid.
 * This is cheap, because it does not read the records. */
int is_valid_header(const uint8_t *batch, int64_t size, const validation_limits *limits,
                    int *is_transactional);

/* Return whether the checksum and the records of a batch with a valid header are
 * valid. */
int has_valid_records(const uint8_t *batch, int64_t size, const validation_limits *limits,
                      int64_t now_ms);

#endif
