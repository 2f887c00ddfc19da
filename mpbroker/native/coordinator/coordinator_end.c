/* Python twins: the callers of storage/log/own_appends.py, which are
 * coordinator/coordinator_topic.py and coordinator/transactions/transaction_markers.py,
 * with storage/log/partition_log.py behind both.
 */

#include "coordinator/coordinator_end.h"

#include "base/outcome.h"
#include "ipc/partition_row.h"
#include "protocol/batch_header.h"
#include "protocol/control_record.h"
#include "protocol/crc32c.h"
#include "protocol/varint.h"
#include "storage/append.h"
#include "storage/producers.h"

#include <stddef.h>
#include <string.h>

/* Larger batches are rare: they are those of groups with very many members. */
#define MAX_BATCH_BYTES (16 * 1024)
#define MAX_RECORDS 256
/* The bytes of a record beside its key and value: its attributes, time delta, number of
 * headers, and varints. */
#define MAX_RECORD_OVERHEAD 24
#define MAGIC 2

typedef struct {
    PyObject_HEAD
    PyObject *keep; /* the arguments, which keep the mapping and the types alive */
    log_access logs;
    long long row; /* the row whose lock was left held */
    uint8_t batch[MAX_BATCH_BYTES];
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
    coordinator_end *self = (coordinator_end *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->keep = Py_NewRef(args);
    self->row = -1;
    if (!get_memory(rows, &self->logs.rows)
        || !find_append_plan_fields(&self->logs.plan, (PyTypeObject *)plan,
                                    (PyTypeObject *)segment, (PyTypeObject *)index,
                                    (PyTypeObject *)time_index)
        || !find_producer_fields(&self->logs.producers, (PyTypeObject *)plan,
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

/* -- the append -------------------------------------------------------------------- */

/* Append a batch that is complete except for its base offset and leader epoch.
 *
 * `effect`: the effect of a marker; NULL for records, which have no producer.
 * LEFT_TO_PYTHON: nothing is committed; if `*is_held`, the lock of self->row is held,
 * because its last owner died: Python settles the row's intent, and releases the lock.
 */
static enum outcome
append_batch(coordinator_end *self, const append_plan *a, uint8_t *batch, int64_t size,
             const marker_effect *effect, appended *done, int *is_held)
{
    locked_row r;
    if (!has_row(&self->logs.rows, a->row))
        return LEFT_TO_PYTHON;
    self->row = a->row;
    const enum lock_result locked = lock_row(&self->logs.rows, a->row, &r);
    if (locked != LOCKED) {
        *is_held = locked == LOCK_TO_BE_SETTLED;
        return *is_held ? LEFT_TO_PYTHON : FAILED;
    }
    const int64_t end_offset = r.state[END_OFFSET], position = r.state[ACTIVE_SIZE];
    /* If another process has appended since the check, its batch may be of this
     * producer. */
    if ((effect != NULL && a->producers_end != end_offset)
        || !fits(a, &r, batch, size)) {
        unlock_row(&r);
        return LEFT_TO_PYTHON;
    }
    *done = (appended){a->row, end_offset, end_offset, position, position};
    if (effect != NULL && effect->has_ended) {
        unlock_row(&r);
        return DONE;
    }
    if (effect != NULL)
        r.state[FIRST_UNSTABLE] = effect->first_unstable;
    place_batch(batch, end_offset, a->epoch);
    const int is_written = write_batch(a, &r, batch, size);
    unlock_row(&r);
    if (!is_written)
        return LEFT_TO_PYTHON; /* Python tries again, and reports the error */
    done->next_offset = r.state[END_OFFSET];
    done->next_position = r.state[ACTIVE_SIZE];
    return DONE;
}

/* Return the result of append() and append_marker(): the offset behind the batch, None
 * or ROW_IS_HELD; NULL if there is an exception. */
static PyObject *
result_of(enum outcome outcome, const appended *done, int is_held)
{
    if (PyErr_Occurred())
        return NULL;
    if (is_held)
        return PyLong_FromLong(ROW_IS_HELD);
    if (outcome == LEFT_TO_PYTHON)
        Py_RETURN_NONE;
    return PyLong_FromLongLong(done->next_offset);
}

/* -- records ----------------------------------------------------------------------- */

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

/* Write a record without headers, with the batch's timestamp; NULL: left to Python, or
 * there is no room for the record. */
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
    if (key_size > MAX_BATCH_BYTES || value_size > MAX_BATCH_BYTES
        || key_size + value_size + MAX_RECORD_OVERHEAD > end - at)
        return NULL;
    /* 3: the bytes of the attributes, the time delta, and the number of headers */
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

/* Write the header of a batch without a producer, whose records are already there. The
 * base offset and leader epoch are written later, by place_batch(). */
static void
write_header(uint8_t *batch, int64_t size, int64_t count, int64_t now_ms)
{
    const uint8_t *covered = batch + BATCH_ATTRIBUTES;
    place_batch(batch, 0, -1);
    write_big(batch + BATCH_LENGTH, size - LOG_OVERHEAD, 4);
    batch[BATCH_MAGIC] = MAGIC;
    write_big(batch + BATCH_ATTRIBUTES, 0, 2);
    write_big(batch + BATCH_LAST_OFFSET_DELTA, count - 1, 4);
    write_big(batch + BATCH_BASE_TIMESTAMP, now_ms, 8);
    write_big(batch + BATCH_MAX_TIMESTAMP, now_ms, 8);
    write_big(batch + BATCH_PRODUCER_ID, -1, 8);
    write_big(batch + BATCH_PRODUCER_EPOCH, -1, 2);
    write_big(batch + BATCH_BASE_SEQUENCE, -1, 4);
    write_big(batch + BATCH_RECORD_COUNT, count, 4);
    write_big(batch + BATCH_CRC, crc32c(covered, batch + size - covered), 4);
}

/* Make a batch of (key, value) pairs; return its size in bytes; 0: left to Python. */
static int64_t
build_batch(uint8_t *batch, PyObject *records, int64_t now_ms)
{
    const Py_ssize_t count = PyList_GET_SIZE(records);
    if (count < 1 || count > MAX_RECORDS)
        return 0;
    uint8_t *at = batch + BATCH_HEADER_SIZE;
    for (Py_ssize_t i = 0; i < count; i++) {
        at = write_record(at, batch + MAX_BATCH_BYTES, i, PyList_GET_ITEM(records, i));
        if (at == NULL)
            return 0;
    }
    write_header(batch, at - batch, count, now_ms);
    return at - batch;
}

static PyObject *
append_records(PyObject *object, PyObject *const *args, Py_ssize_t nargs)
{
    coordinator_end *self = (coordinator_end *)object;
    append_plan a;
    appended done;
    int is_held = 0;
    if (nargs != 3 || !PyList_Check(args[1]))
        return PyErr_Format(PyExc_TypeError, "append(plan, list of records, now_ms)");
    PyObject *plan = args[0];
    const int64_t now_ms = PyLong_AsLongLong(args[2]);
    if (PyErr_Occurred())
        return NULL;
    const int64_t size = build_batch(self->batch, args[1], now_ms);
    if (size == 0 || !read_append_plan(&self->logs.plan, plan, &a))
        return result_of(LEFT_TO_PYTHON, NULL, 0);
    const enum outcome outcome =
        append_batch(self, &a, self->batch, size, NULL, &done, &is_held);
    if (outcome == DONE
        && (!advance_producers(&self->logs.plan, plan, &done)
            || !remember_append(&self->logs.plan, plan, &done)))
        return NULL;
    return result_of(outcome, &done, is_held);
}

/* -- markers ----------------------------------------------------------------------- */

static PyObject *
append_marker(PyObject *object, PyObject *const *args, Py_ssize_t nargs)
{
    coordinator_end *self = (coordinator_end *)object;
    append_plan a;
    appended done;
    marker_effect effect;
    int is_held = 0;
    if (nargs != 3 || !PyBytes_Check(args[1])
        || PyBytes_GET_SIZE(args[1]) != MARKER_SIZE)
        return PyErr_Format(PyExc_TypeError, "append_marker(plan, marker, now_ms)");
    PyObject *plan = args[0];
    const int64_t now_ms = PyLong_AsLongLong(args[2]);
    if (PyErr_Occurred())
        return NULL;
    uint8_t *marker = self->batch;
    memcpy(marker, PyBytes_AS_STRING(args[1]), MARKER_SIZE);
    /* The plan is read after the check, because the check reads the batches of other
     * processes, and updates the plan. */
    if (marker[BATCH_ATTRIBUTES] != 0
        || batch_attributes(marker) != (TRANSACTIONAL_FLAG | CONTROL_FLAG)
        || !check_marker(&self->logs, plan, marker, now_ms, &effect)
        || !read_append_plan(&self->logs.plan, plan, &a))
        return result_of(LEFT_TO_PYTHON, NULL, 0);
    const enum outcome outcome =
        append_batch(self, &a, marker, MARKER_SIZE, &effect, &done, &is_held);
    if (outcome == DONE && !effect.has_ended
        && apply_marker(&self->logs, plan, marker, &done, now_ms))
        /* If the marker cannot be applied, and there is no exception, this process's
         * copy is not as expected, and Python reads the log once more. */
        remember_append(&self->logs.plan, plan, &done);
    return result_of(outcome, &done, is_held);
}

/* -- the type ---------------------------------------------------------------------- */

static PyMethodDef coordinator_end_methods[] = {
    {"append", FASTCALL(append_records), METH_FASTCALL,
     "append(plan, records, now_ms): append (key, value) pairs as one batch; return\n"
     "the offset behind it. None: left to Python. ROW_IS_HELD: the same, and the lock\n"
     "of the partition `row` is held."},
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
