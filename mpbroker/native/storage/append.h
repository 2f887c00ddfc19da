/* Appends to a partition's active segment, under the partition row's lock.
 *
 * A process knows a log by its AppendPlan (storage/log/core_plans.py), which PartitionLog
 * keeps up to date: the files, and the limits. Under the lock the plan is held against
 * the row. If they differ, or the append is more than bytes at the end of a file (a
 * roll, an index that is not open), it is left to PartitionLog.
 *
 * The order of what is written: the batch and then its index entries, to files, beyond
 * what is committed; then the row's new state, whose commit makes all of it count.
 * Killed before the commit, the next append writes over it.
 */

#ifndef MPBROKER_APPEND_H
#define MPBROKER_APPEND_H

#include "base/python_objects.h"
#include "ipc/partition_row.h"

/* Where the fields of AppendPlan and of its segment's classes are. */
typedef struct {
    Py_ssize_t row, segment, segment_fd, offset_index, offset_index_fd, time_index,
        time_index_fd, active_base, structure, max_size, max_entries,
        max_time_entries, index_interval, epoch, roll_after, positions, producers_end,
        producers_position;
} append_plan_fields;

/* Find them in AppendPlan, LogSegment, OffsetIndex and TimeIndex; 0 and an
 * exception. */
int find_append_plan_fields(append_plan_fields *at, PyTypeObject *plan,
                            PyTypeObject *segment, PyTypeObject *index,
                            PyTypeObject *time_index);

/* An AppendPlan as it is just now. */
typedef struct {
    int64_t row, active_base, structure, max_size, max_entries, max_time_entries,
        index_interval, epoch, roll_after, fd, offset_index_fd, time_index_fd,
        producers_end;
} append_plan;

/* Read a plan; 0 if it is not to be used. */
int read_append_plan(const append_plan_fields *at, PyObject *plan, append_plan *a);

/* Return whether the log is as the plan has it, and has room for a batch. */
int fits(const append_plan *a, const locked_row *r, const uint8_t *batch, int64_t size);

/* Write a batch, whose offset and epoch are set, behind what is committed, and commit
 * that it is there: its state is that in `r` with what the batch changes. 0: the disk
 * has failed, and nothing is committed. */
int write_batch(const append_plan *a, locked_row *r, const uint8_t *batch, int64_t size);

/* Where a batch is, once it is committed. */
typedef struct {
    int64_t row, base_offset, next_offset, position, next_position;
} appended;

/* Note in the plan's `positions` where a waiting fetch of this batch will begin to
 * read; 0 and an exception. */
int remember_append(const append_plan_fields *at, PyObject *plan, const appended *done);

/* Let the plan's producers pass a batch that is of none: if they were known up to where
 * it begins, they are up to its end. 0 and an exception. */
int advance_producers(const append_plan_fields *at, PyObject *plan,
                      const appended *done);

#endif
