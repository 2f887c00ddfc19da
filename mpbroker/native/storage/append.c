/* Python twin: storage/log/partition_log.py, with the same order of writes. */

#include "storage/append.h"

#include "base/steps.h"
#include "protocol/batch_header.h"
#include "storage/positions.h"

#include <unistd.h>

#define OFFSET_ENTRY_BYTES 8
#define TIME_ENTRY_BYTES 12

/* -- the plan ---------------------------------------------------------------------- */

int
find_append_plan_fields(append_plan_fields *at, PyTypeObject *p, PyTypeObject *s,
                        PyTypeObject *index, PyTypeObject *time_index)
{
    return field_offset(p, "row", &at->row) && field_offset(p, "segment", &at->segment)
           && field_offset(s, "_fd", &at->segment_fd)
           && field_offset(s, "offset_index", &at->offset_index)
           && field_offset(index, "_fd", &at->offset_index_fd)
           && field_offset(s, "time_index", &at->time_index)
           && field_offset(time_index, "_fd", &at->time_index_fd)
           && field_offset(p, "active_base", &at->active_base)
           && field_offset(p, "structure", &at->structure)
           && field_offset(p, "max_size", &at->max_size)
           && field_offset(p, "max_entries", &at->max_entries)
           && field_offset(p, "max_time_entries", &at->max_time_entries)
           && field_offset(p, "index_interval", &at->index_interval)
           && field_offset(p, "epoch", &at->epoch)
           && field_offset(p, "roll_after", &at->roll_after)
           && field_offset(p, "positions", &at->positions)
           && field_offset(p, "producers_end", &at->producers_end)
           && field_offset(p, "producers_position", &at->producers_position);
}

/* Return the descriptor of one of a segment's indexes; -1 if it is not open. */
static int64_t
index_fd(PyObject *segment, Py_ssize_t index, Py_ssize_t fd)
{
    PyObject *object = get_field(segment, index);
    int64_t value;
    return object != NULL && read_int_field(object, fd, &value) ? value : -1;
}

int
read_append_plan(const append_plan_fields *at, PyObject *plan, append_plan *a)
{
    PyObject *segment = get_field(plan, at->segment);
    if (segment == NULL || segment == Py_None
        || !read_int_field(segment, at->segment_fd, &a->fd) || a->fd < 0
        || !read_int_field(plan, at->row, &a->row)
        || !read_int_field(plan, at->active_base, &a->active_base)
        || !read_int_field(plan, at->structure, &a->structure)
        || !read_int_field(plan, at->max_size, &a->max_size)
        || !read_int_field(plan, at->max_entries, &a->max_entries)
        || !read_int_field(plan, at->max_time_entries, &a->max_time_entries)
        || !read_int_field(plan, at->index_interval, &a->index_interval)
        || !read_int_field(plan, at->epoch, &a->epoch)
        || !read_int_field(plan, at->roll_after, &a->roll_after)
        || !read_int_field(plan, at->producers_end, &a->producers_end))
        return 0;
    a->offset_index_fd = index_fd(segment, at->offset_index, at->offset_index_fd);
    a->time_index_fd = index_fd(segment, at->time_index, at->time_index_fd);
    return a->row >= 0 && a->row < L.MAX_PARTITIONS;
}

/* -- the append -------------------------------------------------------------------- */

int
fits(const append_plan *a, const locked_row *r, const uint8_t *batch, int64_t size)
{
    const memory *rows = r->rows;
    const int64_t *state = r->state, at = row_at(r->row);
    const int64_t last_offset = state[END_OFFSET] + last_offset_delta(batch);
    if (load(rows, at + L.ROW_STATUS) != L.ROW_ONLINE
        || load(rows, at + L.ROW_STRUCTURE) != a->structure
        || state[ACTIVE_BASE] != a->active_base || state[ACTIVE_SIZE] < 0
        || size > a->max_size)
        return 0;
    if (state[BYTES_SINCE_INDEX] > a->index_interval
        && (a->offset_index_fd < 0 || a->time_index_fd < 0))
        return 0;
    /* An empty segment takes any batch; otherwise a full segment is rolled first. */
    return state[ACTIVE_SIZE] == 0
           || !(state[ACTIVE_SIZE] + size > a->max_size
                || last_offset - a->active_base > INT32_MAX
                || state[INDEX_ENTRIES] >= a->max_entries
                || state[TIME_INDEX_ENTRIES] >= a->max_time_entries
                || max_timestamp(batch) > a->roll_after);
}

/* Write an entry of the offset index, and of the time index if there is a newer time.
 * The entries count once the state with their number is committed. 0: the disk has
 * failed. */
static int
write_indexes(const append_plan *a, int64_t *state, int64_t last_offset,
              int64_t position)
{
    uint8_t entry[TIME_ENTRY_BYTES];
    write_big(entry, last_offset - a->active_base, 4);
    write_big(entry + 4, position, 4);
    if (pwrite((int)a->offset_index_fd, entry, OFFSET_ENTRY_BYTES,
               state[INDEX_ENTRIES] * OFFSET_ENTRY_BYTES) != OFFSET_ENTRY_BYTES)
        return 0;
    STEP();
    state[INDEX_ENTRIES]++;
    state[BYTES_SINCE_INDEX] = 0;
    int64_t newest = -1, at = state[TIME_INDEX_ENTRIES] * TIME_ENTRY_BYTES;
    if (at > 0) {
        ssize_t got = pread((int)a->time_index_fd, entry, TIME_ENTRY_BYTES,
                            at - TIME_ENTRY_BYTES);
        if (got < 0)
            return 0;
        if (got == TIME_ENTRY_BYTES)
            newest = read_big(entry, 8);
    }
    if (state[MAX_TIMESTAMP] <= newest)
        return 1;
    write_big(entry, state[MAX_TIMESTAMP], 8);
    write_big(entry + 8, state[MAX_TIMESTAMP_OFFSET] - a->active_base, 4);
    if (pwrite((int)a->time_index_fd, entry, TIME_ENTRY_BYTES, at) != TIME_ENTRY_BYTES)
        return 0;
    STEP();
    state[TIME_INDEX_ENTRIES]++;
    return 1;
}

int
write_batch(const append_plan *a, locked_row *r, const uint8_t *batch, int64_t size)
{
    int64_t *state = r->state;
    const int64_t last_offset = state[END_OFFSET] + last_offset_delta(batch);
    const int64_t position = state[ACTIVE_SIZE];
    if (max_timestamp(batch) > state[MAX_TIMESTAMP]) {
        state[MAX_TIMESTAMP] = max_timestamp(batch);
        state[MAX_TIMESTAMP_OFFSET] = last_offset;
    }
    /* The batch before its index entries, so that an entry never names bytes that are
     * not there. If this process is killed after either write, the bytes lie behind the
     * committed ones, and do not count. */
    if (pwrite((int)a->fd, batch, size, position) != size
        || (state[BYTES_SINCE_INDEX] > a->index_interval
            && !write_indexes(a, state, last_offset, position)))
        return 0;
    STEP();
    state[END_OFFSET] = last_offset + 1;
    state[ACTIVE_SIZE] = position + size;
    state[BYTES_SINCE_INDEX] += size;
    state[BYTES_IN] += size;
    commit_row(r);
    return 1;
}

/* -- what this process knows of the log -------------------------------------------- */

int
remember_append(const append_plan_fields *at, PyObject *plan, const appended *done)
{
    return remember_position(get_field(plan, at->positions), get_field(plan, at->segment),
                             done->base_offset, done->position);
}

int
advance_producers(const append_plan_fields *at, PyObject *plan, const appended *done)
{
    int64_t end;
    if (!read_int_field(plan, at->producers_end, &end) || end != done->base_offset)
        return 1;
    return set_int_field(plan, at->producers_end, done->next_offset)
           && set_int_field(plan, at->producers_position, done->next_position);
}
