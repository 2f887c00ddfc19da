/* Python twin: HandlerEnd in network/request_channel.py. Answers that do not fit a
 * slot's block are left to it.
 */

#include "server/handler_end.h"

#include "base/clock.h"
#include "base/steps.h"
#include "protocol/request_header.h"
#include "server/fetch.h"
#include "server/handler_execute.h"
#include "server/handler_wait.h"
#include "server/produce.h"
#include "server/repeated_answers.h"

#include <stddef.h>
#include <string.h>

/* -- making and unmaking ----------------------------------------------------------- */

/* Make empty tables; 0 and an exception. */
static int
make_tables(handler_end *self)
{
    verdicts *v = &self->verdicts;
    return (self->repeatable = PyDict_New()) && (self->topics = PyDict_New())
           && (self->readable = PyDict_New()) && (self->waiting = PyDict_New())
           && (self->quotas.clients = PyDict_New()) && (v->writers = PyDict_New())
           && (v->readers = PyDict_New()) && (v->anybody_writes = PySet_New(NULL))
           && (v->anybody_reads = PySet_New(NULL));
}

/* Check that all words and bytes that this object reaches by numbers are in its
 * segments; 0 and an exception. */
static int
check_segments(const handler_end *self)
{
    for (Py_ssize_t i = 0; i < self->processors; i++)
        if (!Py_IS_TYPE(PyTuple_GET_ITEM(self->rings, i), &ResponseRing_Type)) {
            PyErr_SetString(PyExc_TypeError, "response rings of the core are needed");
            return 0;
        }
    if (self->processors <= L.MAX_PROCESSORS
        && self->region_bytes >= L.SLOTS_PER_PROCESSOR * L.BLOCK_BYTES
        && has_words(&self->control, 0, L.CONTROL_WORDS)
        && has_bytes(&self->arena, 0, self->region_bytes * self->processors))
        return 1;
    PyErr_SetString(PyExc_ValueError, "segments smaller than their layout");
    return 0;
}

static PyObject *
handler_end_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *control, *arena, *rings;
    long long region_bytes;
    if (!is_configured()
        || !PyArg_ParseTuple(args, "OOLO!", &control, &arena, &region_bytes,
                             &PyTuple_Type, &rings))
        return NULL;
    handler_end *self = (handler_end *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->processors = PyTuple_GET_SIZE(rings);
    self->rings = Py_NewRef(rings);
    self->region_bytes = region_bytes;
    self->position = -1;
    self->keep = PyTuple_Pack(2, control, arena);
    self->answered = PyMem_Calloc(self->processors + 1, sizeof *self->answered);
    if (self->keep == NULL || self->answered == NULL || !make_tables(self)
        || !get_memory(control, &self->control) || !get_memory(arena, &self->arena)
        || !check_segments(self)) {
        Py_DECREF(self);
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    }
    return (PyObject *)self;
}

static void
handler_end_dealloc(PyObject *object)
{
    handler_end *self = (handler_end *)object;
    for (Py_ssize_t i = 0; self->answered != NULL && i < self->processors; i++)
        PyMem_Free(self->answered[i].slots);
    PyMem_Free(self->answered);
    Py_XDECREF(self->rings);
    Py_XDECREF(self->requests);
    Py_XDECREF(self->waiting);
    Py_XDECREF(self->keep);
    Py_XDECREF(self->lane);
    Py_XDECREF(self->repeatable);
    Py_XDECREF(self->topics);
    Py_XDECREF(self->quotas.clients);
    Py_XDECREF(self->readable);
    Py_XDECREF(self->verdicts.writers);
    Py_XDECREF(self->verdicts.readers);
    Py_XDECREF(self->verdicts.anybody_writes);
    Py_XDECREF(self->verdicts.anybody_reads);
    Py_TYPE(object)->tp_free(object);
}

int
keep_alive(handler_end *self, PyObject *object)
{
    PyObject *keep = PyTuple_Pack(2, self->keep, object);
    if (keep == NULL)
        return 0;
    Py_SETREF(self->keep, keep);
    return 1;
}

/* -- requests ---------------------------------------------------------------------- */

int
are_current(const handler_end *self)
{
    return self->logs.rows.base != NULL
           && load(&self->control, self->news_word) == self->position
           && load(&self->control, L.HEADER_OFFLINE_CHANGES) == self->offline_changes;
}

uint8_t *
request_of(const handler_end *self, int64_t slot, int64_t *size)
{
    const int64_t row = slot_row(slot);
    const int64_t offset = load(&self->control, row + L.SLOT_REQUEST_OFFSET);
    *size = load(&self->control, row + L.SLOT_REQUEST_LENGTH);
    return *size >= MIN_REQUEST_HEADER && has_bytes(&self->arena, offset, *size)
               ? self->arena.base + offset
               : NULL;
}

int
read_slot(PyObject *number, int64_t *slot)
{
    *slot = PyLong_AsLongLong(number);
    if (is_slot(*slot))
        return 1;
    if (!PyErr_Occurred())
        PyErr_Format(PyExc_IndexError, "slot %lld", (long long)*slot);
    return 0;
}

/* -- answers ----------------------------------------------------------------------- */

int64_t
answer_offset(const handler_end *self, int64_t slot)
{
    const int64_t processor = slot / L.SLOTS_PER_PROCESSOR;
    const int64_t local = slot % L.SLOTS_PER_PROCESSOR;
    const int64_t at =
        processor * self->region_bytes + local * L.BLOCK_BYTES + L.ANSWER_AT;
    return has_bytes(&self->arena, at, L.ANSWER_BYTES) ? at : -1;
}

uint8_t *
begin_answer(const handler_end *self, int64_t at, const uint8_t *frame,
             int64_t body_bytes)
{
    const int64_t size = CORRELATION_ID_BYTES + body_bytes;
    uint8_t *out = write_big(self->arena.base + at, size, 4);
    memcpy(out, frame + CORRELATION_ID, CORRELATION_ID_BYTES);
    return out + CORRELATION_ID_BYTES;
}

/* Make room for one more answered slot of a processor; 0 and an exception. */
static int
make_room(pending *p)
{
    if (p->count < p->room)
        return 1;
    const Py_ssize_t room = p->room ? 2 * p->room : 64;
    int64_t *slots = PyMem_Realloc(p->slots, room * sizeof *slots);
    if (slots == NULL) {
        PyErr_NoMemory();
        return 0;
    }
    p->slots = slots;
    p->room = room;
    return 1;
}

/* The order of these stores does not matter: no process reads these words before the
 * slot is pushed. If the slot is never pushed, its request is executed again. */
int
answer_slot(handler_end *self, int64_t slot, int64_t kind, int64_t offset,
            int64_t length)
{
    const int64_t row = slot_row(slot), processor = slot / L.SLOTS_PER_PROCESSOR;
    if (processor >= self->processors) {
        PyErr_Format(PyExc_IndexError, "slot %lld of no processor", (long long)slot);
        return 0;
    }
    pending *p = &self->answered[processor];
    if (!make_room(p))
        return 0;
    store(&self->control, row + L.SLOT_RESPONSE_KIND, kind);
    STEP();
    store(&self->control, row + L.SLOT_RESPONSE_OFFSET, offset);
    STEP();
    store(&self->control, row + L.SLOT_RESPONSE_LENGTH, length);
    STEP();
    store(&self->control, row + L.SLOT_COMPLETED, monotonic_ns());
    p->slots[p->count++] = slot;
    self->has_answers = 1;
    return 1;
}

static PyObject *
answer(PyObject *object, PyObject *const *args, Py_ssize_t nargs)
{
    int64_t slot;
    if (nargs != 4)
        return PyErr_Format(PyExc_TypeError, "answer() takes 4 arguments");
    if (!read_slot(args[0], &slot))
        return NULL;
    int64_t kind = PyLong_AsLongLong(args[1]);
    int64_t offset = PyLong_AsLongLong(args[2]);
    int64_t length = PyLong_AsLongLong(args[3]);
    if (PyErr_Occurred()
        || !answer_slot((handler_end *)object, slot, kind, offset, length))
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *
send_bytes(PyObject *object, PyObject *const *args, Py_ssize_t nargs)
{
    handler_end *self = (handler_end *)object;
    int64_t slot;
    if (nargs != 2 || !PyBytes_Check(args[1]))
        return PyErr_Format(PyExc_TypeError, "send_bytes() takes a slot and bytes");
    if (!read_slot(args[0], &slot))
        return NULL;
    const int64_t length = PyBytes_GET_SIZE(args[1]), at = answer_offset(self, slot);
    if (length > L.ANSWER_BYTES || at < 0)
        Py_RETURN_FALSE;
    memcpy(self->arena.base + at, PyBytes_AS_STRING(args[1]), length);
    STEP();
    if (!answer_slot(self, slot, L.KIND_BYTES, at, length))
        return NULL;
    Py_RETURN_TRUE;
}

int
flush_answers(handler_end *self)
{
    if (!self->has_answers)
        return 1;
    self->has_answers = 0;
    for (Py_ssize_t i = 0; i < self->processors; i++) {
        pending *p = &self->answered[i];
        if (p->count) {
            Py_ssize_t count = p->count;
            p->count = 0;
            if (!ring_push(PyTuple_GET_ITEM(self->rings, i), p->slots, count))
                return 0;
        }
    }
    return 1;
}

static PyObject *
flush(PyObject *object, PyObject *unused)
{
    return flush_answers((handler_end *)object) ? Py_NewRef(Py_None) : NULL;
}

/* -- the type ---------------------------------------------------------------------- */

static PyMethodDef handler_end_methods[] = {
    {"answer", FASTCALL(answer), METH_FASTCALL,
     "answer(slot, kind, offset, length): see HandlerEnd."},
    {"send_bytes", FASTCALL(send_bytes), METH_FASTCALL,
     "send_bytes(slot, frame): False if it does not fit the slot's block."},
    {"flush", flush, METH_NOARGS, "Push all answers to their processors' rings."},
    {"set_tables", handler_set_tables, METH_VARARGS,
     "set_tables(rows, news_word, AppendPlan, LogSegment, OffsetIndex, TimeIndex):\n"
     "what execute() needs."},
    {"set_producers", handler_set_producers, METH_VARARGS,
     "set_producers(AppendPlan, ProducerState, ProducerEntry, AppendedBatch): execute\n"
     "produces of idempotent producers, too."},
    {"set_transactions", handler_set_transactions, METH_VARARGS,
     "set_transactions(table, first_word, capacity, epoch_bits): execute produces of\n"
     "open transactions, too."},
    {"set_fetches", handler_set_fetches, METH_VARARGS,
     "set_fetches(ReadPlan, LogSegment, handler, fetch_max_bytes): execute fetches,\n"
     "too."},
    {"set_quotas", handler_set_quotas, METH_VARARGS,
     "set_quotas(quotas, samples, window_ns): charge clients for what is executed."},
    {"set_lane", handler_set_lane, METH_VARARGS,
     "set_lane(lane, {api_key: (oldest, newest, flexible_from)}): forward the\n"
     "coordinator's requests, too."},
    {"set_wait", handler_set_wait, METH_VARARGS,
     "set_wait(epoll_fd, request_ring, handler, handler_row): what wait() needs."},
    {"wait", FASTCALL(handler_wait), METH_FASTCALL,
     "wait(timeout_ms, limit, may_execute): see native/server/handler_wait.c."},
    {"execute", handler_execute, METH_O,
     "execute(slot): see native/server/handler_execute.h."},
    {"answer_key", handler_answer_key, METH_O,
     "answer_key(slot): the key of a request in `repeatable`, or None."},
    {"fetch", FASTCALL(handler_fetch), METH_FASTCALL,
     "fetch(slot, must_answer): try a parked fetch; None: it is left to Python."},
    {"appended", handler_appended, METH_NOARGS,
     "(row, next_offset, waiting handlers) of each partition that was appended to."},
    {"fetch_waits", handler_fetch_waits, METH_NOARGS,
     "(max_wait_ms, rows) of the fetch that execute() has just found nothing for."},
    {NULL, NULL, 0, NULL},
};

#define TABLE(name, field)                                                            \
    {name, Py_T_OBJECT_EX, offsetof(handler_end, field), Py_READONLY, NULL}

static PyMemberDef handler_end_members[] = {
    {"position", Py_T_LONGLONG, offsetof(handler_end, position), 0,
     "The end of the metadata log that the tables hold for."},
    {"offline_changes", Py_T_LONGLONG, offsetof(handler_end, offline_changes), 0,
     "The change of offline partitions that the tables hold for."},
    {"row", Py_T_LONGLONG, offsetof(handler_end, row), Py_READONLY,
     "The partition row whose lock the last execute() left held."},
    {"answer_bytes", Py_T_LONGLONG, offsetof(handler_end, answer_bytes), Py_READONLY,
     "How long the answer is that waits for the disk."},
    {"syncs_acks_all", Py_T_BOOL, offsetof(handler_end, syncs_acks_all), 0,
     "Whether acks=all waits for the disk."},
    {"has_quotas", Py_T_BOOL, offsetof(handler_end, quotas.are_set), 0,
     "Whether requests cost their clients anything."},
    {"has_authorizer", Py_T_BOOL, offsetof(handler_end, verdicts.are_needed), 0,
     "Whether a sender's right to a topic must be known."},
    TABLE("repeatable", repeatable),
    TABLE("topics", topics),
    TABLE("readable", readable),
    TABLE("waiting", waiting),
    TABLE("clients", quotas.clients),
    TABLE("writers", verdicts.writers),
    TABLE("readers", verdicts.readers),
    TABLE("anybody_writes", verdicts.anybody_writes),
    TABLE("anybody_reads", verdicts.anybody_reads),
    {NULL, 0, 0, 0, NULL},
};

PyTypeObject HandlerEnd_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "mpbroker.native._core.HandlerEnd",
    .tp_basicsize = sizeof(handler_end),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "HandlerEnd(control, arena, region_bytes, response_rings)",
    .tp_new = handler_end_new,
    .tp_dealloc = handler_end_dealloc,
    .tp_methods = handler_end_methods,
    .tp_members = handler_end_members,
};
