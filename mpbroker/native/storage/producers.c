/* Python twins: storage/producers/producer_state.py and log_producers.py. */

#include "storage/producers.h"

#include "ipc/partition_row.h"
#include "protocol/batch_header.h"
#include "protocol/control_record.h"

#include <unistd.h>

#define MAGIC 2
#define BATCHES_KEPT 5
#define SEQUENCE_MASK 0x7FFFFFFF
#define NO_OFFSET (-1)
/* At most this many batches of other processes are read here; there are more only after
 * a restart or a long pause, and these are left to Python. */
#define MAX_CAUGHT_UP 64
/* Open transactions of at most this many producers in one partition are read here. */
#define MAX_ONGOING 64

int
find_producer_fields(producer_fields *at, PyTypeObject *plan, PyTypeObject *state,
                     PyTypeObject *entry, PyTypeObject *batch)
{
    if (!PyType_IsSubtype(batch, &PyTuple_Type)) {
        PyErr_SetString(PyExc_TypeError, "batches are tuples");
        return 0;
    }
    at->state_type = state;
    at->entry_type = entry;
    at->batch_type = batch;
    return field_offset(plan, "producers", &at->producers)
           && field_offset(state, "end_offset", &at->end_offset)
           && field_offset(state, "entries", &at->entries)
           && field_offset(state, "ongoing", &at->ongoing)
           && field_offset(state, "aborted", &at->aborted)
           && field_offset(entry, "epoch", &at->epoch)
           && field_offset(entry, "coordinator_epoch", &at->coordinator_epoch)
           && field_offset(entry, "txn_first_offset", &at->txn_first_offset)
           && field_offset(entry, "batches", &at->batches)
           && field_offset(entry, "last_timestamp", &at->last_timestamp)
           && field_offset(entry, "seen_ms", &at->seen_ms);
}

int
read_producer(const uint8_t *batch, batch_producer *b)
{
    b->id = read_big(batch + BATCH_PRODUCER_ID, 8);
    b->epoch = read_big(batch + BATCH_PRODUCER_EPOCH, 2);
    b->first_sequence = read_big(batch + BATCH_BASE_SEQUENCE, 4);
    b->last_sequence = (b->first_sequence + last_offset_delta(batch)) & SEQUENCE_MASK;
    b->timestamp = max_timestamp(batch);
    b->is_transactional = (batch_attributes(batch) & TRANSACTIONAL_FLAG) != 0;
    return b->id < 0 || (b->epoch >= 0 && b->first_sequence >= 0);
}

/* -- the copy: ProducerState ------------------------------------------------------- */

/* Return a plan's ProducerState, borrowed; NULL if it has none. */
static PyObject *
state_of(const producer_fields *at, PyObject *plan)
{
    PyObject *state = get_field(plan, at->producers);
    return state != NULL && Py_TYPE(state) == at->state_type ? state : NULL;
}

/* Return a producer's entry, borrowed; NULL, perhaps with an exception, if it is
 * unknown. */
static PyObject *
find_entry(const producer_fields *at, PyObject *plan, int64_t producer_id)
{
    PyObject *producers = state_of(at, plan);
    if (producers == NULL)
        return NULL;
    PyObject *entries = get_field(producers, at->entries);
    if (entries == NULL || !PyDict_CheckExact(entries))
        return NULL;
    PyObject *id = PyLong_FromLongLong(producer_id);
    PyObject *entry = id ? PyDict_GetItemWithError(entries, id) : NULL;
    Py_XDECREF(id);
    if (entry == NULL || Py_TYPE(entry) != at->entry_type)
        return NULL;
    PyObject *batches = get_field(entry, at->batches);
    return batches != NULL && PyList_CheckExact(batches) ? entry : NULL;
}

/* Return the open transactions of the partition: a dict of first offset -> producer id,
 * borrowed; NULL if there is no such dict. */
static PyObject *
ongoing_of(const producer_fields *at, PyObject *plan)
{
    PyObject *producers = state_of(at, plan);
    PyObject *ongoing = producers ? get_field(producers, at->ongoing) : NULL;
    return ongoing != NULL && PyDict_CheckExact(ongoing) ? ongoing : NULL;
}

/* Return the last sequence number of an entry's batches; -1: it has no batches; -2:
 * they are not as expected. */
static int64_t
last_sequence_of(const producer_fields *at, PyObject *entry)
{
    PyObject *batches = get_field(entry, at->batches);
    const Py_ssize_t count = PyList_GET_SIZE(batches);
    int overflow;
    if (count == 0) /* a marker was the first of its epoch */
        return -1;
    PyObject *last = PyList_GET_ITEM(batches, count - 1);
    if (!PyTuple_Check(last) || PyTuple_GET_SIZE(last) != 5
        || !PyLong_Check(PyTuple_GET_ITEM(last, 1)))
        return -2;
    int64_t sequence = PyLong_AsLongLongAndOverflow(PyTuple_GET_ITEM(last, 1), &overflow);
    return overflow ? -2 : sequence;
}

/* -- what is appended changes the copy --------------------------------------------- */

/* Let an entry continue at an epoch. 0: an exception, or the entry is not as
 * expected. */
static int
begin_epoch(const producer_fields *at, PyObject *entry, int64_t epoch)
{
    int64_t known;
    if (!read_int_field(entry, at->epoch, &known))
        return 0;
    if (known == epoch)
        return 1;
    PyObject *batches = get_field(entry, at->batches);
    return set_int_field(entry, at->epoch, epoch)
           && PyList_SetSlice(batches, 0, PyList_GET_SIZE(batches), NULL) == 0;
}

/* Note that a transaction has a batch in this partition; the first one begins the
 * transaction here. 0: an exception, or the copy is not as expected. */
static int
note_transaction(const producer_fields *at, PyObject *plan, PyObject *entry,
                 int64_t producer_id, int64_t base_offset)
{
    int64_t begun_at;
    PyObject *ongoing = ongoing_of(at, plan);
    if (ongoing == NULL || !read_int_field(entry, at->txn_first_offset, &begun_at))
        return 0;
    if (begun_at >= 0)
        return 1;
    PyObject *offset = PyLong_FromLongLong(base_offset);
    PyObject *id = PyLong_FromLongLong(producer_id);
    int done = offset != NULL && id != NULL && PyDict_SetItem(ongoing, offset, id) == 0
               && set_int_field(entry, at->txn_first_offset, base_offset);
    Py_XDECREF(offset);
    Py_XDECREF(id);
    return done;
}

/* Add a batch to its producer's entry: ProducerState.apply. */
static int
note_batch(const producer_fields *at, PyObject *plan, PyObject *entry,
           const batch_producer *b, int64_t base_offset, int64_t last_offset,
           int64_t now_ms)
{
    PyObject *batches = get_field(entry, at->batches);
    if (!begin_epoch(at, entry, b->epoch))
        return 0;
    PyObject *fields = Py_BuildValue("((LLLLL))", (long long)b->first_sequence,
                                     (long long)b->last_sequence,
                                     (long long)base_offset, (long long)last_offset,
                                     (long long)b->timestamp);
    PyObject *made = fields ? PyTuple_Type.tp_new(at->batch_type, fields, NULL) : NULL;
    Py_XDECREF(fields);
    int done = made != NULL && PyList_Append(batches, made) == 0;
    Py_XDECREF(made);
    if (done && PyList_GET_SIZE(batches) > BATCHES_KEPT)
        done = PyList_SetSlice(batches, 0, 1, NULL) == 0;
    return done && set_int_field(entry, at->last_timestamp, b->timestamp)
           && set_int_field(entry, at->seen_ms, now_ms)
           && (!b->is_transactional
               || note_transaction(at, plan, entry, b->id, base_offset));
}

/* End an entry's transaction. 0: an exception, or the copy is not as expected. */
static int
end_transaction(const producer_fields *at, PyObject *plan, PyObject *entry)
{
    int64_t begun_at;
    PyObject *ongoing = ongoing_of(at, plan);
    if (ongoing == NULL || !read_int_field(entry, at->txn_first_offset, &begun_at))
        return 0;
    if (begun_at < 0)
        return 1;
    PyObject *offset = PyLong_FromLongLong(begun_at);
    int found = offset != NULL ? PyDict_Contains(ongoing, offset) : -1;
    if (found > 0)
        found = PyDict_DelItem(ongoing, offset);
    Py_XDECREF(offset);
    return found >= 0 && set_int_field(entry, at->txn_first_offset, NO_OFFSET);
}

/* Add a marker to its producer's entry: ProducerState.apply_marker. 0: an exception, or
 * left to Python, as all markers are while an index of aborted transactions is
 * rebuilt. */
static int
note_marker(const producer_fields *at, PyObject *plan, const uint8_t *marker,
            int64_t now_ms)
{
    if (!is_usual_marker(marker))
        return 0;
    const int64_t producer_id = read_big(marker + BATCH_PRODUCER_ID, 8);
    if (producer_id < 0)
        return 1;
    PyObject *entry = find_entry(at, plan, producer_id);
    return entry != NULL && ongoing_of(at, plan) != NULL
           && get_field(state_of(at, plan), at->aborted) == Py_None
           && begin_epoch(at, entry, read_big(marker + BATCH_PRODUCER_EPOCH, 2))
           && end_transaction(at, plan, entry)
           && set_int_field(entry, at->coordinator_epoch, coordinator_epoch(marker))
           && set_int_field(entry, at->last_timestamp,
                            read_big(marker + BATCH_BASE_TIMESTAMP, 8))
           && set_int_field(entry, at->seen_ms, now_ms);
}

/* -- catching up ------------------------------------------------------------------- */

/* Add a batch that another process has appended. `head`: the header of the batch; of a
 * marker, all of it. 0: an exception, or left to Python. */
static int
note_foreign(const producer_fields *at, PyObject *plan, const uint8_t *head,
             int64_t size, int64_t offset, int64_t now_ms)
{
    batch_producer b;
    if (batch_attributes(head) & CONTROL_FLAG)
        return size == MARKER_SIZE && note_marker(at, plan, head, now_ms);
    if (!read_producer(head, &b))
        return 0;
    if (b.id < 0)
        return 1;
    PyObject *entry = find_entry(at, plan, b.id);
    return entry != NULL
           && note_batch(at, plan, entry, &b, offset, offset + last_offset_delta(head),
                         now_ms);
}

/* The place in the log up to which this process's copy is computed. */
typedef struct {
    int64_t row, fd, end, position;
} place;

/* Find the place, and the log's committed state; 0: left to Python. */
static int
find_place(const log_access *logs, PyObject *plan, place *where, int64_t *state)
{
    const append_plan_fields *p = &logs->plan;
    int64_t active_base, structure, in_python;
    PyObject *segment = get_field(plan, p->segment);
    PyObject *producers = state_of(&logs->producers, plan);
    if (segment == NULL || segment == Py_None || producers == NULL
        || !read_int_field(segment, p->segment_fd, &where->fd) || where->fd < 0
        || !read_int_field(plan, p->row, &where->row) || !has_row(&logs->rows, where->row)
        || !read_int_field(plan, p->active_base, &active_base)
        || !read_int_field(plan, p->structure, &structure)
        || !read_int_field(plan, p->producers_end, &where->end)
        || !read_int_field(plan, p->producers_position, &where->position)
        || !read_int_field(producers, logs->producers.end_offset, &in_python))
        return 0;
    /* Python has read further without an append: batches that it has added must not be
     * added a second time. */
    if (in_python > where->end || where->end < 0)
        return 0;
    return read_state(&logs->rows, where->row, state)
           && state[ACTIVE_BASE] == active_base
           && load(&logs->rows, row_at(where->row) + L.ROW_STRUCTURE) == structure;
}

/* Add the batch at a place to the copy, and move the place behind it; 0: left to
 * Python, or an exception. */
static int
take_over_batch(const log_access *logs, PyObject *plan, place *where,
                const int64_t *state, int64_t now_ms)
{
    /* The header and some bytes behind it: a marker is no longer than that. */
    uint8_t head[MARKER_SIZE];
    if (where->position < 0)
        return 0;
    const int64_t got = pread((int)where->fd, head, sizeof head, where->position);
    if (got < BATCH_HEADER_SIZE)
        return 0;
    const int64_t size = batch_size(head);
    const int64_t next = where->end + last_offset_delta(head) + 1;
    if (size < BATCH_HEADER_SIZE || (size <= MARKER_SIZE && size > got)
        || size > state[ACTIVE_SIZE] - where->position || head[BATCH_MAGIC] != MAGIC
        || read_big(head + BATCH_BASE_OFFSET, 8) != where->end || next <= where->end
        || next > state[END_OFFSET]
        || !note_foreign(&logs->producers, plan, head, size, where->end, now_ms))
        return 0;
    where->position += size;
    where->end = next;
    return set_int_field(plan, logs->plan.producers_position, where->position)
           && set_int_field(plan, logs->plan.producers_end, where->end);
}

/* Add the batches that other processes have appended to the copy, without the lock:
 * LogProducers._catch_up. 0: left to Python, or an exception. */
static int
catch_up(const log_access *logs, PyObject *plan, int64_t now_ms)
{
    int64_t state[STATE_WORDS];
    place where;
    if (!find_place(logs, plan, &where, state))
        return 0;
    for (int batches = 0; where.end != state[END_OFFSET]; batches++)
        if (batches == MAX_CAUGHT_UP
            || !take_over_batch(logs, plan, &where, state, now_ms))
            return 0;
    return 1;
}

/* -- batches and markers to be appended -------------------------------------------- */

PyObject *
check_batch(const log_access *logs, PyObject *plan, const batch_producer *b,
            int64_t now_ms)
{
    const producer_fields *at = &logs->producers;
    int64_t epoch, begun_at;
    if (at->state_type == NULL || !catch_up(logs, plan, now_ms))
        return NULL;
    PyObject *entry = find_entry(at, plan, b->id);
    if (entry == NULL || !read_int_field(entry, at->epoch, &epoch) || epoch != b->epoch
        || !read_int_field(entry, at->txn_first_offset, &begun_at)
        || (begun_at >= 0 && !b->is_transactional))
        return NULL;
    const int64_t last = last_sequence_of(at, entry);
    return last >= -1 && ((last + 1) & SEQUENCE_MASK) == b->first_sequence ? entry : NULL;
}

/* Store up to which batch this process knows the producers now. */
static int
move_on(const append_plan_fields *at, PyObject *plan, const appended *done)
{
    return set_int_field(plan, at->producers_position, done->next_position)
           && set_int_field(plan, at->producers_end, done->next_offset);
}

int
apply_batch(const log_access *logs, PyObject *plan, PyObject *entry,
            const batch_producer *b, const appended *done, int64_t now_ms)
{
    return note_batch(&logs->producers, plan, entry, b, done->base_offset,
                      done->next_offset - 1, now_ms)
           && move_on(&logs->plan, plan, done);
}

/* Find the first offset of the open transactions of all other producers; -1: there are
 * none. 0: they are not as expected, or too many; perhaps an exception. */
static int
first_open_without(const producer_fields *at, PyObject *plan, int64_t producer_id,
                   int64_t *first)
{
    PyObject *ongoing = ongoing_of(at, plan), *offset, *producer;
    if (ongoing == NULL || PyDict_GET_SIZE(ongoing) > MAX_ONGOING)
        return 0;
    *first = NO_OFFSET;
    for (Py_ssize_t next = 0; PyDict_Next(ongoing, &next, &offset, &producer);) {
        const int64_t begins = PyLong_AsLongLong(offset);
        const int64_t id = PyLong_AsLongLong(producer);
        if (PyErr_Occurred())
            return 0;
        if (id != producer_id && (*first < 0 || begins < *first))
            *first = begins;
    }
    return 1;
}

int
check_marker(const log_access *logs, PyObject *plan, const uint8_t *marker,
             int64_t now_ms, marker_effect *effect)
{
    const producer_fields *at = &logs->producers;
    const int64_t id = read_big(marker + BATCH_PRODUCER_ID, 8);
    const int64_t ended_epoch = read_big(marker + BATCH_PRODUCER_EPOCH, 2);
    int64_t epoch, known_coordinator, begun_at;
    if (at->state_type == NULL || !catch_up(logs, plan, now_ms))
        return 0;
    PyObject *entry = find_entry(at, plan, id);
    if (entry == NULL || !read_int_field(entry, at->epoch, &epoch) || ended_epoch < epoch
        || !read_int_field(entry, at->coordinator_epoch, &known_coordinator)
        || coordinator_epoch(marker) < known_coordinator
        || !read_int_field(entry, at->txn_first_offset, &begun_at)
        || (begun_at >= 0 && !is_commit_marker(marker)))
        return 0;
    effect->has_ended = begun_at < 0 && ended_epoch == epoch;
    return first_open_without(at, plan, id, &effect->first_unstable);
}

int
apply_marker(const log_access *logs, PyObject *plan, const uint8_t *marker,
             const appended *done, int64_t now_ms)
{
    return note_marker(&logs->producers, plan, marker, now_ms)
           && move_on(&logs->plan, plan, done);
}
