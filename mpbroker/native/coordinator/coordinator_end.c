/* The coordinator's end of its partitions: records of its own, and the markers that end
 * transactions. The twins: coordinator/coordinator_topic.py's _append and
 * transaction_markers.py's, with storage/log/partition_log.py behind both.
 *
 * As in append.c: what is not plain is left to them before anything of it was written,
 * and nobody is refused here. No request's slot remembers what was appended: a successor
 * reads its log, and looks for its predecessor's markers in the partitions.
 */

#include "core.h"
#include "protocol/varint.h"

#include <stddef.h>
#include <string.h>

#define BATCH_HEADER 61
#define BATCH_OVERHEAD 12
/* Larger ones are rare: a group's of very many members. */
#define ROOM (16 * 1024)
#define MAX_RECORDS 256
/* A record's bytes beside its key and value: five varints of its size and theirs. */
#define MAX_RECORD_OVERHEAD 24
#define TRANSACTIONAL_CONTROL 0x30
#define HELD (-1)

typedef struct {
    PyObject_HEAD
    PyObject *keep; /* what keeps the mapping and the types alive */
    memory rows;
    append_plan_fields plan;
    producer_fields producers;
    long long row; /* whose lock is left held */
    uint8_t batch[ROOM];
} coordinator_end;

static PyObject *
coordinator_end_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *rows, *plan, *segment, *index, *time_index, *state, *entry, *batch;
    if (!is_configured()
        || !PyArg_ParseTuple(args, "OO!O!O!O!O!O!O!", &rows, &PyType_Type, &plan,
                             &PyType_Type, &segment, &PyType_Type, &index, &PyType_Type,
                             &time_index, &PyType_Type, &state, &PyType_Type, &entry,
                             &PyType_Type, &batch))
        return NULL;
    if (!PyType_IsSubtype((PyTypeObject *)batch, &PyTuple_Type))
        return PyErr_Format(PyExc_TypeError, "batches are tuples");
    coordinator_end *self = (coordinator_end *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->keep = Py_NewRef(args);
    self->row = -1;
    if (!get_memory(rows, &self->rows)
        || !find_append_plan_fields(&self->plan, (PyTypeObject *)plan, (PyTypeObject *)segment,
                            (PyTypeObject *)index, (PyTypeObject *)time_index)
        || !find_producer_fields(&self->producers, (PyTypeObject *)plan,
                                (PyTypeObject *)state, (PyTypeObject *)entry,
                                (PyTypeObject *)batch)) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static void
coordinator_end_dealloc(PyObject *object)
{
    Py_XDECREF(((coordinator_end *)object)->keep);
    Py_TYPE(object)->tp_free(object);
}

/* -- the append ------------------------------------------------------------------------ */

/* Append a batch of the end's own, in its last form but for its place in the log.
 *
 * `effect`: of a marker; NULL for records of no producer. 1: it is in the log, or was.
 * 0: not plain, nothing of it was written. HELD: the lock's last owner died, and its
 * intent is to be settled before it is released. An exception: see PyErr_Occurred().
 */
static int
append_own(coordinator_end *self, const append_plan *a, uint8_t *batch, int64_t size,
           const marker_effect *effect, appended *done)
{
    const memory *rows = &self->rows;
    if (!has_words(rows, a->row * L.ROW_WORDS, L.ROW_WORDS))
        return 0;
    const int64_t row = a->row * L.ROW_WORDS;
    void *mutex = mutex_at(rows, row + L.ROW_MUTEX);
    int owner_died, error = lock_mutex(mutex, &owner_died);
    if (error) {
        raise_damaged_mutex(error);
        return 0;
    }
    if (owner_died) {
        self->row = a->row;
        return HELD;
    }
    STEP();
    int64_t state[STATE_WORDS];
    const int64_t version = load(rows, row + L.ROW_VERSION);
    const int64_t current = row + L.ROW_COPIES + (version & 1) * L.ROW_COPY_WORDS;
    for (int i = 0; i < STATE_WORDS; i++)
        state[i] = load(rows, current + i);
    const int64_t end_offset = state[END_OFFSET], position = state[ACTIVE_SIZE];
    const int64_t last_offset = end_offset + read_big(batch + 23, 4);
    /* Another process's batch since we looked may be of this producer. */
    if ((effect != NULL && a->producers_end != end_offset)
        || !fits(a, rows, row, state, size, last_offset, read_big(batch + 35, 8))) {
        unlock_mutex(mutex);
        return 0;
    }
    done->row = a->row;
    done->base_offset = done->next_offset = end_offset;
    done->position = done->next_position = position;
    if (effect != NULL) {
        if (effect->has_ended) {
            unlock_mutex(mutex);
            return 1;
        }
        state[FIRST_UNSTABLE] = effect->unstable;
    }
    write_big(batch, end_offset, 8);
    write_big(batch + 12, a->epoch, 4);
    const int written = write_batch(a, rows, version, state, batch, size);
    unlock_mutex(mutex);
    STEP();
    if (!written)
        return 0; /* it is tried again the usual way, which says what is wrong */
    done->next_offset = last_offset + 1;
    done->next_position = position + size;
    return 1;
}

/* What append() and append_marker() return. */
static PyObject *
told(int result, const appended *done)
{
    if (PyErr_Occurred())
        return NULL;
    if (result == 0)
        Py_RETURN_NONE;
    return PyLong_FromLongLong(result == HELD ? HELD : done->next_offset);
}

/* -- records ----------------------------------------------------------------------------- */

static uint8_t *
write_bytes(uint8_t *at, PyObject *bytes)
{
    if (bytes == Py_None)
        return write_varint(at, -1);
    const Py_ssize_t size = PyBytes_GET_SIZE(bytes);
    at = write_varint(at, size);
    memcpy(at, PyBytes_AS_STRING(bytes), size);
    return at + size;
}

/* Write a record of no headers, as old as its batch; NULL: it is odd, or has no room. */
static uint8_t *
write_record(uint8_t *at, const uint8_t *end, int64_t number, PyObject *pair)
{
    if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2)
        return NULL;
    PyObject *key = PyTuple_GET_ITEM(pair, 0), *value = PyTuple_GET_ITEM(pair, 1);
    if (!PyBytes_Check(key) || (value != Py_None && !PyBytes_Check(value)))
        return NULL;
    const int64_t key_size = PyBytes_GET_SIZE(key);
    const int64_t value_size = value == Py_None ? -1 : PyBytes_GET_SIZE(value);
    if (key_size > ROOM || value_size > ROOM
        || key_size + value_size + MAX_RECORD_OVERHEAD > end - at)
        return NULL;
    /* attributes and the time's delta, and behind the value: no headers */
    const int64_t size = 3 + varint_size(number) + varint_size(key_size) + key_size
                         + varint_size(value_size) + (value_size > 0 ? value_size : 0);
    at = write_varint(at, size);
    *at++ = 0;
    *at++ = 0;
    at = write_varint(at, number);
    at = write_bytes(at, key);
    at = write_bytes(at, value);
    *at++ = 0;
    return at;
}

/* Make a batch of (key, value) pairs; its size, or 0 if they are not plain. */
static int64_t
build_batch(uint8_t *batch, PyObject *records, int64_t now_ms)
{
    const Py_ssize_t count = PyList_GET_SIZE(records);
    if (count < 1 || count > MAX_RECORDS)
        return 0;
    uint8_t *at = batch + BATCH_HEADER;
    for (Py_ssize_t i = 0; i < count; i++) {
        at = write_record(at, batch + ROOM, i, PyList_GET_ITEM(records, i));
        if (at == NULL)
            return 0;
    }
    const int64_t size = at - batch;
    at = write_big(batch, 0, 8);
    at = write_big(at, size - BATCH_OVERHEAD, 4);
    at = write_big(at, -1, 4);
    *at = 2; /* magic; behind it the checksum of what follows */
    at = write_big(at + 5, 0, 2);
    at = write_big(at, count - 1, 4);
    at = write_big(at, now_ms, 8);
    at = write_big(at, now_ms, 8);
    at = write_big(at, -1, 8);
    at = write_big(at, -1, 2);
    at = write_big(at, -1, 4);
    write_big(at, count, 4);
    write_big(batch + 17, crc32c(batch + 21, size - 21), 4);
    return size;
}

static PyObject *
append_records(PyObject *object, PyObject *const *args, Py_ssize_t nargs)
{
    coordinator_end *self = (coordinator_end *)object;
    append_plan a;
    appended done;
    if (nargs != 3 || !PyList_Check(args[1]))
        return PyErr_Format(PyExc_TypeError, "append(plan, list of records, now_ms)");
    const int64_t now_ms = PyLong_AsLongLong(args[2]);
    if (PyErr_Occurred())
        return NULL;
    const int64_t size = build_batch(self->batch, args[1], now_ms);
    if (size == 0 || !read_append_plan(&self->plan, args[0], &a))
        return told(0, NULL);
    const int result = append_own(self, &a, self->batch, size, NULL, &done);
    if (result == 1
        && (!keep_up(&self->plan, args[0], &done)
            || !remember_position(&self->plan, args[0], &done)))
        return NULL;
    return told(result, &done);
}

/* -- markers ----------------------------------------------------------------------------- */

static PyObject *
append_marker(PyObject *object, PyObject *const *args, Py_ssize_t nargs)
{
    coordinator_end *self = (coordinator_end *)object;
    append_plan a;
    appended done;
    marker_effect effect;
    if (nargs != 3 || !PyBytes_Check(args[1])
        || PyBytes_GET_SIZE(args[1]) != MARKER_BYTES)
        return PyErr_Format(PyExc_TypeError, "append_marker(plan, marker, now_ms)");
    const int64_t now_ms = PyLong_AsLongLong(args[2]);
    if (PyErr_Occurred())
        return NULL;
    uint8_t *marker = self->batch;
    memcpy(marker, PyBytes_AS_STRING(args[1]), MARKER_BYTES);
    /* The plan after that: it may have moved on with what others have appended. */
    if (marker[21] != 0 || marker[22] != TRANSACTIONAL_CONTROL
        || !expect_marker(&self->rows, &self->plan, &self->producers, args[0], marker,
                          now_ms, &effect)
        || !read_append_plan(&self->plan, args[0], &a))
        return told(0, NULL);
    const int result = append_own(self, &a, marker, MARKER_BYTES, &effect, &done);
    if (result == 1 && !effect.has_ended
        && (!accept_marker(&self->plan, &self->producers, args[0], marker, &done, now_ms)
            || !remember_position(&self->plan, args[0], &done)))
        /* An exception; or the process's own copy is odd, and is read once more. */
        return PyErr_Occurred() ? NULL : told(result, &done);
    return told(result, &done);
}

/* -- the type --------------------------------------------------------------------------- */

static PyMethodDef coordinator_end_methods[] = {
    {"append", FASTCALL(append_records), METH_FASTCALL,
     "append(plan, records, now_ms): append (key, value) pairs as one batch; the offset\n"
     "behind it. None: not plain. -1: not plain, and the lock of the partition `row` is\n"
     "held."},
    {"append_marker", FASTCALL(append_marker), METH_FASTCALL,
     "append_marker(plan, marker, now_ms): append a transaction's end, unless it is\n"
     "there; as append."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef coordinator_end_members[] = {
    {"row", Py_T_LONGLONG, offsetof(coordinator_end, row), Py_READONLY,
     "The partition row whose lock was left held."},
    {NULL, 0, 0, 0, NULL},
};

PyTypeObject CoordinatorEnd_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "mpbroker.native._core.CoordinatorEnd",
    .tp_basicsize = sizeof(coordinator_end),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "CoordinatorEnd(rows, AppendPlan, LogSegment, OffsetIndex, TimeIndex,\n"
              "ProducerState, ProducerEntry, AppendedBatch)",
    .tp_new = coordinator_end_new,
    .tp_dealloc = coordinator_end_dealloc,
    .tp_methods = coordinator_end_methods,
    .tp_members = coordinator_end_members,
};
