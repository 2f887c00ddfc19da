/* Appends to a partition's active segment, under the partition row's lock.
 *
 * A process knows a log by its AppendPlan (storage/log/core_plans.py): the files, and
 * the limits. PartitionLog keeps the plan up to date. Under the lock the plan is
 * compared with the row. If they differ, or if the append does more than write bytes at
 * the end of files (a roll, an index that is not open), it is left to PartitionLog.
 *
 * The order of writes: first the batch and then its index entries go to files, behind
 * the committed bytes; then the row's new state is committed, which makes all of them
 * count. If the process is killed before the commit, the next append overwrites the
 * bytes.
 */

#ifndef MPBROKER_APPEND_H
#define MPBROKER_APPEND_H

#include "base/python_objects.h"
#include "ipc/partition_row.h"

/* The offsets of the fields of AppendPlan and of its segment's classes. */
typedef struct {
    Py_ssize_t row, segment, segment_fd, offset_index, offset_index_fd, time_index,
        time_index_fd, active_base, structure, max_size, max_entries,
        max_time_entries, index_interval, epoch, roll_after, positions, producers_end,
        producers_position;
} append_plan_fields;

/* Find these offsets in the classes AppendPlan, LogSegment, OffsetIndex and TimeIndex;
 * 0 and an exception. */
int find_append_plan_fields(append_plan_fields *at, PyTypeObject *plan,
                            PyTypeObject *segment, PyTypeObject *index,
                            PyTypeObject *time_index);

/* The present values of an AppendPlan. */
typedef struct {
    int64_t row, active_base, structure, max_size, max_entries, max_time_entries,
        index_interval, epoch, roll_after, fd, offset_index_fd, time_index_fd,
        producers_end;
} append_plan;

/* Read a plan; 0 if it cannot be used. */
int read_append_plan(const append_plan_fields *at, PyObject *plan, append_plan *a);

/* Return whether the log agrees with the plan, and has room for a batch. */
int fits(const append_plan *a, const locked_row *r, const uint8_t *batch, int64_t size);

/* Write a batch, whose offset and epoch are set, behind the committed bytes, and commit
 * it: the new state is that in `r`, changed by the batch. 0: the disk has failed, and
 * nothing is committed. */
int write_batch(const append_plan *a, locked_row *r, const uint8_t *batch, int64_t size);

/* The offsets and the position of a batch that is committed. */
typedef struct {
    int64_t row, base_offset, next_offset, position, next_position;
} appended;

/* Note the position of the batch in the plan's `positions`, for fetches that wait for
 * it; 0 and an exception. */
int remember_append(const append_plan_fields *at, PyObject *plan, const appended *done);

/* Advance the offset up to which the plan's producers are known over a batch without a
 * producer, if they were known up to its beginning. 0 and an exception. */
int advance_producers(const append_plan_fields *at, PyObject *plan,
                      const appended *done);

#endif
