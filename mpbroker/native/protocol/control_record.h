/* Markers: the control batches that end a producer's transaction in a partition, in the
 * shape in which all brokers write them.
 *
 *     61  length 16      66  key version    70  value's length 6   73  coordinator
 *     epoch 65  key's length 4 68  type           71  value version      77  no headers
 *
 * Python twins: protocol/records/control_record.py; parse_marker in
 * storage/producers/producer_replay.py.
 * Source: KIP-98.
 */

#ifndef MPBROKER_CONTROL_RECORD_H
#define MPBROKER_CONTROL_RECORD_H

#include "protocol/batch_header.h"

#include <string.h>

#define MARKER_SIZE 78
#define MARKER_TYPE 68              /* int16: 0 abort, 1 commit */
#define MARKER_COORDINATOR_EPOCH 73 /* int32 */
#define COMMIT_MARKER 1

static inline int
is_commit_marker(const uint8_t *marker)
{
    return read_big(marker + MARKER_TYPE, 2) == COMMIT_MARKER;
}

static inline int64_t
coordinator_epoch(const uint8_t *marker)
{
    return read_big(marker + MARKER_COORDINATOR_EPOCH, 4);
}

/* Return whether a control batch of MARKER_SIZE bytes has the usual shape: not
 * compressed, one record with the lengths above, no headers. */
static inline int
is_usual_marker(const uint8_t *marker)
{
    static const uint8_t one_record[] = {0, 0, 0, 1, 16 << 1, 0, 0, 0, 4 << 1};
    return !(batch_attributes(marker) & (CODEC_MASK | TIMESTAMP_TYPE_FLAG))
           && memcmp(marker + BATCH_RECORD_COUNT, one_record, sizeof one_record) == 0
           && marker[70] == 6 << 1 && marker[MARKER_SIZE - 1] == 0;
}

#endif
