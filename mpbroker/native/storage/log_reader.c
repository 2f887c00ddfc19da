/* Python twin: LogReader.read in storage/log/log_reader.py. */

#include "storage/log_reader.h"

#include "protocol/batch_header.h"
#include "storage/positions.h"

#include <errno.h>
#include <unistd.h>

int
find_read_plan_fields(read_plan_fields *at, PyTypeObject *plan, PyTypeObject *segment)
{
    return field_offset(plan, "row", &at->row)
           && field_offset(plan, "segment", &at->segment)
           && field_offset(segment, "_fd", &at->segment_fd)
           && field_offset(plan, "active_base", &at->active_base)
           && field_offset(plan, "structure", &at->structure)
           && field_offset(plan, "leader_epoch", &at->leader_epoch)
           && field_offset(plan, "positions", &at->positions)
           && field_offset(plan, "txn_index_path", &at->txn_index_path);
}

/* Return whether no transaction was ever aborted in the plan's segment. */
static int
has_no_aborted(const read_plan_fields *at, PyObject *plan)
{
    PyObject *path = get_field(plan, at->txn_index_path);
    return path != NULL && PyBytes_Check(path)
           && access(PyBytes_AS_STRING(path), F_OK) != 0 && errno == ENOENT;
}

/* Return how many of `length` bytes to read: LogReader._limit. -1: left to Python. */
static int64_t
limit_length(const read_region *r, int64_t length, const read_request *wanted)
{
    uint8_t head[LOG_OVERHEAD];
    if (length <= wanted->max_bytes)
        return length;
    if (pread((int)r->fd, head, sizeof head, r->position) != (ssize_t)sizeof head)
        return -1;
    const int64_t first = batch_size(head);
    if (first < BATCH_HEADER_SIZE || first > length)
        return -1;
    if (first <= wanted->max_bytes)
        return wanted->max_bytes;
    return wanted->min_one_batch ? first : 0;
}

/* Read the plan and the log's committed state, and check that they agree; 0: left to
 * Python. */
static int
read_log(const memory *rows, const read_plan_fields *at, PyObject *plan,
         const read_request *wanted, read_region *r, int64_t *state)
{
    PyObject *segment = get_field(plan, at->segment);
    int64_t active_base, leader_epoch;
    if (segment == NULL || segment == Py_None
        || !read_int_field(segment, at->segment_fd, &r->fd) || r->fd < 0
        || !read_int_field(plan, at->row, &r->row) || !has_row(rows, r->row)
        || !read_int_field(plan, at->active_base, &active_base)
        || !read_int_field(plan, at->structure, &r->structure)
        || !read_int_field(plan, at->leader_epoch, &leader_epoch))
        return 0;
    /* The client's epoch is not ours, or ours is not known yet: Python finds out which
     * error this is. */
    if (wanted->leader_epoch >= 0 && wanted->leader_epoch != leader_epoch)
        return 0;
    const int64_t row = row_at(r->row);
    return load(rows, row + L.ROW_STATUS) == L.ROW_ONLINE
           && read_state(rows, r->row, state) && state[ACTIVE_BASE] == active_base
           && load(rows, row + L.ROW_STRUCTURE) == r->structure;
}

int
find_records(const memory *rows, const read_plan_fields *at, PyObject *plan,
             const read_request *wanted, read_region *r)
{
    int64_t state[STATE_WORDS];
    if (!read_log(rows, at, plan, wanted, r, state))
        return 0;
    const int is_stable = state[FIRST_UNSTABLE] < 0;
    r->log_start_offset = load(rows, row_at(r->row) + L.ROW_LOG_START_OFFSET);
    r->end_offset = state[END_OFFSET];
    r->stable_offset = is_stable ? r->end_offset : state[FIRST_UNSTABLE];
    if (r->stable_offset < r->log_start_offset)
        r->stable_offset = r->log_start_offset; /* the records before were deleted */
    r->length = 0;
    r->end_position = -1;
    if (wanted->offset < r->log_start_offset || wanted->offset > r->end_offset
        || (wanted->read_committed && !is_stable))
        return 0;
    if (wanted->offset == r->end_offset)
        return 1;
    r->position = find_position(get_field(plan, at->positions),
                                get_field(plan, at->segment), wanted->offset);
    const int64_t length = state[ACTIVE_SIZE] - r->position;
    if (r->position < 0 || length <= 0
        || (wanted->read_committed && !has_no_aborted(at, plan)))
        return 0;
    r->length = limit_length(r, length, wanted);
    if (length <= wanted->max_bytes)
        r->end_position = state[ACTIVE_SIZE];
    return r->length >= 0;
}

int
read_records(const read_region *r, uint8_t *into)
{
    return r->length == 0
           || pread((int)r->fd, into, r->length, r->position) == (ssize_t)r->length;
}

int
is_unmoved(const memory *rows, const read_region *r)
{
    return load(rows, row_at(r->row) + L.ROW_STRUCTURE) == r->structure;
}

int
remember_end(const read_plan_fields *at, PyObject *plan, const read_region *r)
{
    return r->end_position < 0
           || remember_position(get_field(plan, at->positions),
                                get_field(plan, at->segment), r->end_offset,
                                r->end_position);
}
