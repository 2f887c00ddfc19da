/* What a partition knows of its producers, for batches that carry the next sequence of
 * one that is known, in a transaction or not, and for markers. The twins:
 * storage/producers/producer_state.py and log_producers.py, on whose objects this works: on a
 * process's own copy of what the log says, so nothing here is anybody else's to see.
 * Whatever is not the next batch of a known producer (a repeated one, a gap, another
 * epoch), and the markers of who is not known, are left to them.
 */

#include "core.h"

#include <string.h>
#include <unistd.h>

#define BATCH_HEADER 61
#define BATCH_OVERHEAD 12
#define BATCHES_KEPT 5
#define SEQUENCE_MASK 0x7FFFFFFF
#define CODEC_OR_TIME 0x0F
#define TRANSACTIONAL 0x10
#define CONTROL 0x20
/* So many batches of others' are read here; more are a restart, or somebody's pause. */
#define MAX_CAUGHT_UP 64
/* Transactions of so many producers in one partition are looked at here. */
#define MAX_OPEN 64

int
read_producer(const uint8_t *batch, batch_producer *b)
{
    b->id = read_big(batch + 43, 8);
    b->epoch = read_big(batch + 51, 2);
    b->first_sequence = read_big(batch + 53, 4);
    b->last_sequence = (b->first_sequence + read_big(batch + 23, 4)) & SEQUENCE_MASK;
    b->timestamp = read_big(batch + 35, 8);
    return b->id < 0 || (b->epoch >= 0 && b->first_sequence >= 0);
}

/* A partition's ProducerState, borrowed; NULL if there is none of that kind. */
static PyObject *
state_of(const producer_fields *at, PyObject *plan)
{
    PyObject *state = get_field(plan, at->producers);
    return state != NULL && Py_TYPE(state) == at->state_type ? state : NULL;
}

/* The entry of a producer, borrowed; NULL, perhaps with an exception. */
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

/* Go on at an epoch; 0: an exception, or something odd. */
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

/* Where transactions are open in the partition: first offset -> producer id. */
static PyObject *
ongoing_of(const producer_fields *at, PyObject *plan)
{
    PyObject *producers = state_of(at, plan);
    PyObject *ongoing = producers ? get_field(producers, at->ongoing) : NULL;
    return ongoing != NULL && PyDict_CheckExact(ongoing) ? ongoing : NULL;
}

/* A batch of a transaction is there: if it is the first, it begins it. */
static int
note_transaction(const producer_fields *at, PyObject *plan, PyObject *entry,
                 const batch_producer *b, int64_t base_offset)
{
    int64_t open;
    PyObject *ongoing = ongoing_of(at, plan);
    if (ongoing == NULL || !read_int_field(entry, at->txn_first_offset, &open))
        return 0;
    if (open >= 0)
        return 1;
    PyObject *offset = PyLong_FromLongLong(base_offset);
    PyObject *id = PyLong_FromLongLong(b->id);
    int done = offset != NULL && id != NULL && PyDict_SetItem(ongoing, offset, id) == 0
               && set_int_field(entry, at->txn_first_offset, base_offset);
    Py_XDECREF(offset);
    Py_XDECREF(id);
    return done;
}

/* ProducerState.apply. */
static int
note_batch(const producer_fields *at, PyObject *plan, PyObject *entry,
           const batch_producer *b, int is_transactional, int64_t base_offset,
           int64_t last_offset, int64_t now_ms)
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
           && (!is_transactional
               || note_transaction(at, plan, entry, b, base_offset));
}

/* ProducerState.apply_marker, of a producer that is known; 0: not plain, or an
 * exception. What is aborted is noted only by who rebuilds an index: not here.
 */
static int
follow_marker(const producer_fields *at, PyObject *plan, const uint8_t *marker,
              int64_t now_ms)
{
    static const uint8_t one_record[] = {0, 0, 0, 1, 0x20, 0, 0, 0, 0x08};
    if (marker[22] & CODEC_OR_TIME || memcmp(marker + 57, one_record, sizeof one_record)
        || marker[70] != 0x0C || marker[77] != 0)
        return 0;
    int64_t producer_id = read_big(marker + 43, 8), open;
    if (producer_id < 0)
        return 1;
    PyObject *entry = find_entry(at, plan, producer_id);
    PyObject *ongoing = ongoing_of(at, plan);
    if (entry == NULL || ongoing == NULL
        || get_field(state_of(at, plan), at->aborted) != Py_None
        || !read_int_field(entry, at->txn_first_offset, &open)
        || !begin_epoch(at, entry, read_big(marker + 51, 2)))
        return 0;
    if (open >= 0) {
        PyObject *offset = PyLong_FromLongLong(open);
        int found = offset != NULL ? PyDict_Contains(ongoing, offset) : -1;
        if (found > 0)
            found = PyDict_DelItem(ongoing, offset);
        Py_XDECREF(offset);
        if (found < 0 || !set_int_field(entry, at->txn_first_offset, -1))
            return 0;
    }
    return set_int_field(entry, at->coordinator_epoch, read_big(marker + 73, 4))
           && set_int_field(entry, at->last_timestamp, read_big(marker + 27, 8))
           && set_int_field(entry, at->seen_ms, now_ms);
}

/* Take over one batch that somebody else has appended; 0: not plain, or an exception.
 *
 * `head`: its header or, of a marker, all of it.
 */
static int
follow(const producer_fields *at, PyObject *plan, const uint8_t *head, int64_t size,
       int64_t offset, int64_t now_ms)
{
    batch_producer b;
    if (head[22] & CONTROL)
        return size == MARKER_BYTES && follow_marker(at, plan, head, now_ms);
    if (!read_producer(head, &b))
        return 0;
    if (b.id < 0)
        return 1;
    PyObject *entry = find_entry(at, plan, b.id);
    int64_t last_offset = offset + read_big(head + 23, 4);
    return entry != NULL
           && note_batch(at, plan, entry, &b, head[22] & TRANSACTIONAL, offset,
                         last_offset, now_ms);
}

/* LogProducers._catch_up, without the lock; 0: not plain, or an exception. */
static int
catch_up(const memory *rows, const append_plan_fields *p, const producer_fields *at,
         PyObject *plan, int64_t now_ms)
{
    int64_t row, fd, end, position, active_base, structure, in_python;
    int64_t state[STATE_WORDS];
    PyObject *segment = get_field(plan, p->segment), *producers = state_of(at, plan);
    if (segment == NULL || segment == Py_None || producers == NULL
        || !read_int_field(segment, p->segment_fd, &fd) || fd < 0
        || !read_int_field(plan, p->row, &row) || !has_row(rows, row)
        || !read_int_field(plan, p->active_base, &active_base)
        || !read_int_field(plan, p->structure, &structure)
        || !read_int_field(plan, p->producers_end, &end)
        || !read_int_field(plan, p->producers_position, &position)
        || !read_int_field(producers, at->end_offset, &in_python))
        return 0;
    /* Python has read on without an append: what it took over is not to come again. */
    if (in_python > end)
        return 0;
    if (end < 0 || !read_state(rows, row, state) || state[ACTIVE_BASE] != active_base
        || load(rows, row_at(row) + L.ROW_STRUCTURE) != structure)
        return 0;
    for (int batches = 0; end != state[END_OFFSET]; batches++) {
        /* Of a batch its header, and whatever is behind that: a marker is no more. */
        uint8_t head[MARKER_BYTES];
        if (batches == MAX_CAUGHT_UP || position < 0)
            return 0;
        const int64_t got = pread((int)fd, head, sizeof head, position);
        if (got < BATCH_HEADER)
            return 0;
        int64_t size = read_big(head + 8, 4) + BATCH_OVERHEAD;
        int64_t next = end + read_big(head + 23, 4) + 1;
        if (size < BATCH_HEADER || (size <= MARKER_BYTES && size > got)
            || size > state[ACTIVE_SIZE] - position || head[16] != 2
            || read_big(head, 8) != end || next <= end || next > state[END_OFFSET]
            || !follow(at, plan, head, size, end, now_ms))
            return 0;
        position += size;
        end = next;
        if (!set_int_field(plan, p->producers_position, position)
            || !set_int_field(plan, p->producers_end, end))
            return 0;
    }
    return 1;
}

/* Whether a batch is the next one of a producer that is known, and of its transaction if
 * it has one open: its entry, borrowed; NULL, perhaps with an exception, if not. */
PyObject *
expect_batch(const memory *rows, const append_plan_fields *p, const producer_fields *at,
             PyObject *plan, const batch_producer *b, int is_transactional,
             int64_t now_ms)
{
    int64_t epoch, open, sequence = -1;
    if (at->state_type == NULL || !catch_up(rows, p, at, plan, now_ms))
        return NULL;
    PyObject *entry = find_entry(at, plan, b->id);
    if (entry == NULL || !read_int_field(entry, at->epoch, &epoch) || epoch != b->epoch
        || !read_int_field(entry, at->txn_first_offset, &open)
        || (open >= 0 && !is_transactional))
        return NULL;
    PyObject *batches = get_field(entry, at->batches);
    Py_ssize_t count = PyList_GET_SIZE(batches);
    if (count > 0) { /* else a marker was the first of its epoch */
        PyObject *last = PyList_GET_ITEM(batches, count - 1);
        if (!PyTuple_Check(last) || PyTuple_GET_SIZE(last) != 5
            || !PyLong_Check(PyTuple_GET_ITEM(last, 1)))
            return NULL;
        int overflow;
        sequence = PyLong_AsLongLongAndOverflow(PyTuple_GET_ITEM(last, 1), &overflow);
        if (overflow)
            return NULL;
    }
    return ((sequence + 1) & SEQUENCE_MASK) == b->first_sequence ? entry : NULL;
}

/* The same batch is in the log: move on with it; 0 and an exception. */
int
accept_batch(const append_plan_fields *p, const producer_fields *at, PyObject *plan,
             PyObject *entry, const batch_producer *b, int is_transactional,
             const appended *done, int64_t now_ms)
{
    return note_batch(at, plan, entry, b, is_transactional, done->base_offset,
                      done->next_offset - 1, now_ms)
           && set_int_field(plan, p->producers_position, done->next_position)
           && set_int_field(plan, p->producers_end, done->next_offset);
}

/* Where the first transaction begins that stays open without a producer's; -1: none.
 * 0: there are odd ones, or too many to look at; perhaps an exception. */
static int
first_open_without(const producer_fields *at, PyObject *plan, int64_t producer_id,
                   int64_t *first)
{
    PyObject *ongoing = ongoing_of(at, plan), *offset, *producer;
    if (ongoing == NULL || PyDict_GET_SIZE(ongoing) > MAX_OPEN)
        return 0;
    *first = -1;
    for (Py_ssize_t at_entry = 0; PyDict_Next(ongoing, &at_entry, &offset, &producer);) {
        const int64_t begins = PyLong_AsLongLong(offset);
        const int64_t id = PyLong_AsLongLong(producer);
        if (PyErr_Occurred())
            return 0;
        if (id != producer_id && (*first < 0 || begins < *first))
            *first = begins;
    }
    return 1;
}

/* Whether a marker, to be appended, is of a producer that is known, and ends what this
 * may end: what is aborted goes into an index. 0: not plain, or an exception.
 */
int
expect_marker(const memory *rows, const append_plan_fields *p, const producer_fields *at,
              PyObject *plan, const uint8_t *marker, int64_t now_ms,
              marker_effect *effect)
{
    const int64_t id = read_big(marker + 43, 8), ending = read_big(marker + 51, 2);
    const int is_commit = read_big(marker + 68, 2) == 1;
    int64_t epoch, coordinator_epoch, open;
    if (at->state_type == NULL || !catch_up(rows, p, at, plan, now_ms))
        return 0;
    PyObject *entry = find_entry(at, plan, id);
    if (entry == NULL || !read_int_field(entry, at->epoch, &epoch) || ending < epoch
        || !read_int_field(entry, at->coordinator_epoch, &coordinator_epoch)
        || read_big(marker + 73, 4) < coordinator_epoch
        || !read_int_field(entry, at->txn_first_offset, &open)
        || (open >= 0 && !is_commit))
        return 0;
    effect->has_ended = open < 0 && ending == epoch;
    return first_open_without(at, plan, id, &effect->unstable);
}

/* The same marker is in the log: move on with it; 0 and an exception. */
int
accept_marker(const append_plan_fields *p, const producer_fields *at, PyObject *plan,
              const uint8_t *marker, const appended *done, int64_t now_ms)
{
    return follow_marker(at, plan, marker, now_ms)
           && set_int_field(plan, p->producers_position, done->next_position)
           && set_int_field(plan, p->producers_end, done->next_offset);
}

int
find_producer_fields(producer_fields *at, PyTypeObject *plan, PyTypeObject *state,
                    PyTypeObject *entry, PyTypeObject *batch)
{
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
