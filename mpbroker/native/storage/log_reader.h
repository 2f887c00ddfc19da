/* Reads of the end of a log: from a position at which this process has seen a batch
 * begin, to the end of the active segment. No lock is taken and nothing is written.
 *
 * A process knows a log by its ReadPlan (storage/log/core_plans.py). Left to Python:
 * offsets that `positions` does not have, other segments, open or aborted transactions
 * for readers of committed data, and all errors.
 */

#ifndef MPBROKER_LOG_READER_H
#define MPBROKER_LOG_READER_H

#include "base/python_objects.h"
#include "ipc/partition_row.h"

/* The offsets of the fields of ReadPlan and of its segment's class. */
typedef struct {
    Py_ssize_t row, segment, segment_fd, active_base, structure, leader_epoch, positions,
        txn_index_path;
} read_plan_fields;

/* Find these offsets in the classes ReadPlan and LogSegment; 0 and an exception. */
int find_read_plan_fields(read_plan_fields *at, PyTypeObject *plan,
                          PyTypeObject *segment);

/* A read of one partition, as a Fetch request asks for it. */
typedef struct {
    int64_t offset;
    int64_t leader_epoch; /* the epoch that the client knows; -1: it does not say */
    int64_t max_bytes;
    int read_committed;
    int min_one_batch; /* return the first batch even if it exceeds max_bytes */
} read_request;

/* The result of a read: the log's offsets at that time, and a region of the active
 * segment's file. */
typedef struct {
    int64_t row, end_offset, stable_offset, log_start_offset;
    int64_t fd, position, length; /* length 0: there is nothing to read */
    int64_t end_position;         /* the log's end, if the region reaches it; else -1 */
    int64_t structure;            /* the row's structure word at that time */
} read_region;

/* Find the region of a read; 0: left to Python, perhaps with an exception. */
int find_records(const memory *rows, const read_plan_fields *at, PyObject *plan,
                 const read_request *wanted, read_region *found);

/* Copy the records of a region; 0: the file does not have all of them. */
int read_records(const read_region *found, uint8_t *into);

/* Return whether the list of segments has not changed since the region was found: then
 * the right file was read. */
int is_unmoved(const memory *rows, const read_region *found);

/* Note where the next batch will begin, if the region shows it; 0 and an exception. */
int remember_end(const read_plan_fields *at, PyObject *plan, const read_region *found);

#endif
