/* Reads of the end of a log: from where this process has seen batches begin, to the end
 * of the active segment. No lock is taken and nothing is written.
 *
 * A process knows a log by its ReadPlan (storage/log/core_plans.py). Left to Python:
 * offsets that `positions` does not have, other segments, open or aborted transactions
 * for readers of committed data, and all errors.
 */

#ifndef MPBROKER_LOG_READER_H
#define MPBROKER_LOG_READER_H

#include "base/python_objects.h"
#include "ipc/partition_row.h"

/* Where the fields of ReadPlan and of its segment's class are. */
typedef struct {
    Py_ssize_t row, segment, segment_fd, active_base, structure, leader_epoch, positions,
        txn_index_path;
} read_plan_fields;

/* Find them in ReadPlan and LogSegment; 0 and an exception. */
int find_read_plan_fields(read_plan_fields *at, PyTypeObject *plan,
                          PyTypeObject *segment);

/* What is asked for. */
typedef struct {
    int64_t offset;
    int64_t leader_epoch; /* that the client knows; -1: it does not say */
    int64_t max_bytes;
    int read_committed;
    int min_one_batch; /* the first batch, if it is larger than max_bytes */
} read_request;

/* What is found: offsets as they were, and a region of the active segment's file. */
typedef struct {
    int64_t row, end_offset, stable_offset, log_start_offset;
    int64_t fd, position, length; /* length 0: there is nothing to read */
    int64_t end_position;         /* of the log, if all of it was found; else -1 */
    int64_t structure;            /* when this was found */
} read_region;

/* Find what a read gives; 0: left to Python, perhaps with an exception. */
int find_records(const memory *rows, const read_plan_fields *at, PyObject *plan,
                 const read_request *wanted, read_region *found);

/* Copy the records that were found; 0: the file does not give them. */
int read_records(const read_region *found, uint8_t *into);

/* Return whether the file that was read is the one that the row spoke of. */
int is_unmoved(const memory *rows, const read_region *found);

/* Note where the next batch will begin, if that is known now; 0 and an exception. */
int remember_end(const read_plan_fields *at, PyObject *plan, const read_region *found);

#endif
