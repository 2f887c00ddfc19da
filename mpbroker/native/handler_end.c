/* A handler's end of the request channel: answers, and requests that need no Python.
 *
 * The twin is network/request_channel.py's HandlerEnd; execute() is a short cut through
 * server/request_handler.py's way for two requests that are all alike: an ApiVersions
 * that was answered before, and a plain Produce. It says "no" to anything else, and
 * while the metadata log has news.
 */

#include "core.h"

#include <stddef.h>
#include <string.h>
#include <time.h>

#define PRODUCE 0
#define API_VERSIONS 18
#define MAX_KEY_BYTES 512
#define POSITIONS_KEPT 64

typedef struct {
    int64_t *slots;
    Py_ssize_t count, room;
} pending;

typedef struct {
    PyObject_HEAD
    PyObject *keep; /* what keeps the mappings alive */
    memory control, arena, rows;
    int64_t region_bytes;
    Py_ssize_t processors;
    PyObject *rings;  /* tuple of ResponseRing, by processor */
    pending *answered; /* by processor, not yet pushed */
    int has_answers;
    /* of the short cut */
    int64_t news_word; /* the metadata log's committed end */
    long long position;      /* where the tables below were right */
    PyObject *remembered;    /* dict: ApiVersions request -> answer's body */
    PyObject *topics;        /* dict: name -> (limits, plans by partition) */
    plan_offsets plan;
    char syncs_acks_all;
    /* of the partition that execute() had to do with, and of the answer that waits */
    long long row, next_offset, answer_bytes;
} handler_end;

/* -- making and unmaking ------------------------------------------------------------------ */

static int
find_plan_slots(plan_offsets *at, PyTypeObject *p, PyTypeObject *s, PyTypeObject *index,
                PyTypeObject *time_index)
{
    return slot_offset(p, "row", &at->row) && slot_offset(p, "segment", &at->segment)
           && slot_offset(s, "_fd", &at->segment_fd)
           && slot_offset(s, "offset_index", &at->offset_index)
           && slot_offset(index, "_fd", &at->offset_index_fd)
           && slot_offset(s, "time_index", &at->time_index)
           && slot_offset(time_index, "_fd", &at->time_index_fd)
           && slot_offset(p, "active_base", &at->active_base)
           && slot_offset(p, "structure", &at->structure)
           && slot_offset(p, "max_size", &at->max_size)
           && slot_offset(p, "max_entries", &at->max_entries)
           && slot_offset(p, "max_time_entries", &at->max_time_entries)
           && slot_offset(p, "index_interval", &at->index_interval)
           && slot_offset(p, "epoch", &at->epoch)
           && slot_offset(p, "roll_after", &at->roll_after)
           && slot_offset(p, "positions", &at->positions)
           && slot_offset(p, "producers_end", &at->producers_end)
           && slot_offset(p, "producers_position", &at->producers_position);
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
    self->keep = PyTuple_Pack(2, control, arena);
    self->answered = PyMem_Calloc(self->processors + 1, sizeof *self->answered);
    self->position = -1;
    self->remembered = PyDict_New();
    self->topics = PyDict_New();
    if (self->keep == NULL || self->answered == NULL || self->remembered == NULL
        || self->topics == NULL || !get_memory(control, &self->control)
        || !get_memory(arena, &self->arena)) {
        Py_DECREF(self);
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; i < self->processors; i++)
        if (!Py_IS_TYPE(PyTuple_GET_ITEM(rings, i), &ResponseRing_Type)) {
            Py_DECREF(self);
            return PyErr_Format(PyExc_TypeError, "compiled response rings are needed");
        }
    if (self->processors > L.MAX_PROCESSORS || region_bytes <= 0
        || !has_words(&self->control, 0, L.CONTROL_WORDS)
        || !has_bytes(&self->arena, 0, region_bytes * self->processors)
        || region_bytes < L.SLOTS_PER_PROCESSOR * L.BLOCK_BYTES) {
        Py_DECREF(self);
        return PyErr_Format(PyExc_ValueError, "segments smaller than their layout");
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
    Py_XDECREF(self->keep);
    Py_XDECREF(self->remembered);
    Py_XDECREF(self->topics);
    Py_TYPE(object)->tp_free(object);
}

/* -- answers ---------------------------------------------------------------------------- */

/* Say what a slot's answer is, and queue it for the next flush. */
static int
answer_slot(handler_end *self, int64_t slot, int64_t kind, int64_t offset,
            int64_t length)
{
    int64_t row = slot_row(slot), processor = slot / L.SLOTS_PER_PROCESSOR;
    if (processor >= self->processors) {
        PyErr_Format(PyExc_IndexError, "slot %lld of no processor", (long long)slot);
        return 0;
    }
    pending *p = &self->answered[processor];
    if (p->count == p->room) {
        Py_ssize_t room = p->room ? 2 * p->room : 64;
        int64_t *slots = PyMem_Realloc(p->slots, room * sizeof *slots);
        if (slots == NULL) {
            PyErr_NoMemory();
            return 0;
        }
        p->slots = slots;
        p->room = room;
    }
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

static int
read_slot(PyObject *number, int64_t *slot)
{
    *slot = PyLong_AsLongLong(number);
    if (is_slot(*slot))
        return 1;
    if (!PyErr_Occurred())
        PyErr_Format(PyExc_IndexError, "slot %lld", (long long)*slot);
    return 0;
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

/* Where a slot's answer goes; -1: outside the arena. */
static int64_t
answer_offset(const handler_end *self, int64_t slot)
{
    int64_t processor = slot / L.SLOTS_PER_PROCESSOR;
    int64_t local = slot % L.SLOTS_PER_PROCESSOR;
    int64_t at = processor * self->region_bytes + local * L.BLOCK_BYTES + L.ANSWER_AT;
    return has_bytes(&self->arena, at, L.ANSWER_BYTES) ? at : -1;
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
    int64_t length = PyBytes_GET_SIZE(args[1]), at = answer_offset(self, slot);
    if (length > L.ANSWER_BYTES || at < 0)
        Py_RETURN_FALSE;
    memcpy(self->arena.base + at, PyBytes_AS_STRING(args[1]), length);
    STEP();
    if (!answer_slot(self, slot, L.KIND_BYTES, at, length))
        return NULL;
    Py_RETURN_TRUE;
}

static PyObject *
flush(PyObject *object, PyObject *unused)
{
    handler_end *self = (handler_end *)object;
    if (!self->has_answers)
        Py_RETURN_NONE;
    self->has_answers = 0;
    for (Py_ssize_t i = 0; i < self->processors; i++) {
        pending *p = &self->answered[i];
        if (p->count) {
            Py_ssize_t count = p->count;
            p->count = 0;
            if (!ring_push(PyTuple_GET_ITEM(self->rings, i), p->slots, count))
                return NULL;
        }
    }
    Py_RETURN_NONE;
}

/* -- the short cut ------------------------------------------------------------------------- */

static PyObject *
set_tables(PyObject *object, PyObject *args)
{
    handler_end *self = (handler_end *)object;
    PyObject *rows, *plan_type, *segment_type, *index_type, *time_index_type;
    long long news_word;
    memory mapping;
    plan_offsets plan;
    if (!PyArg_ParseTuple(args, "OLO!O!O!O!", &rows, &news_word, &PyType_Type, &plan_type,
                          &PyType_Type, &segment_type, &PyType_Type, &index_type,
                          &PyType_Type, &time_index_type)
        || !get_memory(rows, &mapping)
        || !find_plan_slots(&plan, (PyTypeObject *)plan_type,
                            (PyTypeObject *)segment_type, (PyTypeObject *)index_type,
                            (PyTypeObject *)time_index_type))
        return NULL;
    if (!has_words(&self->control, news_word, 1))
        return PyErr_Format(PyExc_IndexError, "no such word");
    PyObject *keep = PyTuple_Pack(2, self->keep, rows);
    if (keep == NULL)
        return NULL;
    Py_SETREF(self->keep, keep);
    self->rows = mapping;
    self->news_word = news_word;
    self->plan = plan;
    Py_RETURN_NONE;
}

/* Read the header of a request of either kind; its size, or 0 if it is not plain. */
static int64_t
header_size(const uint8_t *frame, int64_t size, int flexible)
{
    int64_t at = 10, length = read_big(frame + 8, 2);
    if (length < -1 || length > size - at)
        return 0;
    for (; length > 0; length--)
        if (frame[at++] >= 0x80) /* only ASCII is plain */
            return 0;
    if (flexible && (at >= size || frame[at++] != 0))
        return 0;
    return at;
}

/* Whether it is noted what software is behind a connection: client_software.py. */
static int
is_known_client(const handler_end *self, int64_t slot)
{
    const memory *control = &self->control;
    int64_t connection = load(control, slot_row(slot) + L.SLOT_CONNECTION);
    if (connection < 0 || connection >= L.CONTROL_WORDS
        || !has_words(control, L.CONNECTION_SOFTWARE + connection, 1)
        || !has_words(control, L.CONNECTION_ROWS + connection * L.CONNECTION_WORDS,
                      L.CONNECTION_WORDS))
        return 0;
    int64_t cookie = load(control, L.CONNECTION_ROWS + connection * L.CONNECTION_WORDS
                                       + L.CONNECTION_COOKIE);
    int64_t noted = load(control, L.CONNECTION_SOFTWARE + connection);
    return noted >> L.SOFTWARE_SHIFT == cookie;
}

static int
execute_api_versions(handler_end *self, int64_t slot, const uint8_t *frame,
                     int64_t size)
{
    uint8_t bytes[MAX_KEY_BYTES];
    int64_t at = answer_offset(self, slot);
    if (size > MAX_KEY_BYTES || at < 0 || !is_known_client(self, slot))
        return 0;
    /* All but the correlation id. */
    memcpy(bytes, frame, 4);
    memcpy(bytes + 4, frame + 8, size - 8);
    PyObject *key = PyBytes_FromStringAndSize((char *)bytes, size - 4);
    if (key == NULL)
        return -1;
    PyObject *body = PyDict_GetItemWithError(self->remembered, key);
    Py_DECREF(key);
    if (body == NULL)
        return PyErr_Occurred() ? -1 : 0;
    if (!PyBytes_Check(body) || PyBytes_GET_SIZE(body) + 8 > L.ANSWER_BYTES)
        return 0;
    int64_t length = PyBytes_GET_SIZE(body);
    uint8_t *out = write_big(self->arena.base + at, length + 4, 4);
    memcpy(out, frame + 4, 4);
    memcpy(out + 4, PyBytes_AS_STRING(body), length);
    STEP();
    return answer_slot(self, slot, L.KIND_BYTES, at, length + 8) ? 1 : -1;
}

static int
set_number(PyObject *object, Py_ssize_t offset, int64_t value)
{
    PyObject *number = PyLong_FromLongLong(value);
    if (number != NULL)
        set_slot(object, offset, number);
    return number != NULL;
}

/* Remember where a waiting fetch of these records will begin to read. */
static int
remember_position(const plan_offsets *at, PyObject *plan, const appended *done)
{
    PyObject *positions = get_slot(plan, at->positions);
    if (positions == NULL || !PyDict_CheckExact(positions))
        return 1;
    if (PyDict_GET_SIZE(positions) >= POSITIONS_KEPT)
        PyDict_Clear(positions);
    PyObject *offset = PyLong_FromLongLong(done->base_offset);
    PyObject *place = Py_BuildValue("(OL)", get_slot(plan, at->segment),
                                    (long long)done->position);
    int result = offset != NULL && place != NULL
                 && PyDict_SetItem(positions, offset, place) == 0;
    Py_XDECREF(offset);
    Py_XDECREF(place);
    return result;
}

/* Whoever knew all producers before this batch still does. */
static int
keep_up(const plan_offsets *at, PyObject *plan, const appended *done)
{
    PyObject *end = get_slot(plan, at->producers_end);
    if (end == NULL || !PyLong_Check(end) || PyLong_AsLongLong(end) != done->base_offset)
        return !PyErr_Occurred();
    return set_number(plan, at->producers_end, done->next_offset)
           && set_number(plan, at->producers_position, done->next_position);
}

/* Find (max_message_bytes, before_max_ms, after_max_ms, plans) and a partition's plan. */
static PyObject *
find_plan(handler_end *self, const single_produce *p, int64_t limits[3])
{
    PyObject *name = PyUnicode_DecodeUTF8((const char *)p->topic, p->topic_bytes, NULL);
    if (name == NULL) {
        PyErr_Clear();
        return NULL;
    }
    PyObject *known = PyDict_GetItemWithError(self->topics, name);
    Py_DECREF(name);
    if (known == NULL || !PyTuple_Check(known) || PyTuple_GET_SIZE(known) != 4)
        return NULL;
    for (int i = 0; i < 3; i++)
        limits[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(known, i));
    PyObject *plans = PyTuple_GET_ITEM(known, 3);
    if (PyErr_Occurred() || !PyDict_CheckExact(plans))
        return NULL;
    PyObject *index = PyLong_FromLong(p->partition);
    PyObject *plan = index ? PyDict_GetItemWithError(plans, index) : NULL;
    Py_XDECREF(index);
    return plan;
}

static int64_t
now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static int
execute_produce(handler_end *self, int64_t slot, uint8_t *frame, int64_t size,
                appended *done)
{
    single_produce p;
    int64_t limits[3];
    int version = (int)read_big(frame + 2, 2);
    int64_t header = header_size(frame, size, version >= 9);
    if (version < 3 || header == 0
        || !parse_single_produce(frame + header, size - header, version, &p)
        || p.acks < -1 || p.acks > 1)
        return 0;
    int64_t at = answer_offset(self, slot);
    if (at < 0 || p.topic_bytes + 128 > L.ANSWER_BYTES)
        return 0;
    PyObject *plan = find_plan(self, &p, limits);
    if (plan == NULL)
        return PyErr_Occurred() ? -1 : 0;
    if (!is_plain_batch(&p, limits[0], limits[1], limits[2], now_ms()))
        return 0;
    int result = append_plain(&self->control, &self->arena, &self->rows, &self->plan,
                              plan, slot, &p, done);
    if (result <= 0)
        return result;
    if (!remember_position(&self->plan, plan, done)
        || !keep_up(&self->plan, plan, done))
        return -1;
    if (p.acks == 0)
        return answer_slot(self, slot, L.KIND_NONE, 0, 0) ? 1 : -1;
    uint8_t *start = self->arena.base + at, *out = start + 4;
    memcpy(out, frame + 4, 4);
    out += 4;
    if (version >= 9)
        *out++ = 0; /* no tagged fields in the header */
    int64_t room = L.ANSWER_BYTES - (out - start);
    int64_t length = out - start + encode_single_answer(out, room, &p, done);
    write_big(start, length - 4, 4);
    STEP();
    if (p.acks == -1 && self->syncs_acks_all) {
        done->waits_for_sync = 1;
        done->answer_bytes = length;
        return 1;
    }
    return answer_slot(self, slot, L.KIND_BYTES, at, length) ? 1 : -1;
}

/* None: not for the short cut. An API's key: answered; if NOTIFY is set, others wait for
 * the partition `row`. If WAITS is set, the answer is written and may go when all of
 * `row` below `next_offset` is on disk. HELD: not for the short cut, and the lock of `row` is held.
 */
#define NOTIFY 0x10000
#define WAITS 0x20000
#define HELD (-1)

static PyObject *
execute(PyObject *object, PyObject *number)
{
    handler_end *self = (handler_end *)object;
    int64_t slot;
    if (!read_slot(number, &slot))
        return NULL;
    if (self->rows.base == NULL
        || load(&self->control, self->news_word) != self->position)
        Py_RETURN_NONE;
    int64_t row = slot_row(slot);
    int64_t offset = load(&self->control, row + L.SLOT_REQUEST_OFFSET);
    int64_t size = load(&self->control, row + L.SLOT_REQUEST_LENGTH);
    if (size < 10 || !has_bytes(&self->arena, offset, size))
        Py_RETURN_NONE;
    uint8_t *frame = self->arena.base + offset;
    appended done = {0};
    int result = 0;
    int64_t api_key = read_big(frame, 2);
    if (api_key == PRODUCE)
        result = execute_produce(self, slot, frame, size, &done);
    else if (api_key == API_VERSIONS)
        result = execute_api_versions(self, slot, frame, size);
    if (result < 0)
        return NULL;
    self->row = done.row;
    if (result == 0) {
        if (done.row_is_held)
            return PyLong_FromLong(HELD);
        Py_RETURN_NONE;
    }
    self->next_offset = done.next_offset;
    self->answer_bytes = done.answer_bytes;
    return PyLong_FromLongLong(api_key | (done.has_waiters ? NOTIFY : 0)
                               | (done.waits_for_sync ? WAITS : 0));
}

/* -- the type --------------------------------------------------------------------------- */

static PyMethodDef handler_end_methods[] = {
    {"answer", (PyCFunction)(void (*)(void))answer, METH_FASTCALL,
     "answer(slot, kind, offset, length): see HandlerEnd."},
    {"send_bytes", (PyCFunction)(void (*)(void))send_bytes, METH_FASTCALL,
     "send_bytes(slot, frame): False if it does not fit the slot's block."},
    {"flush", flush, METH_NOARGS, "Push all answers to their processors' rings."},
    {"set_tables", set_tables, METH_VARARGS,
     "set_tables(rows, news_word, AppendPlan, LogSegment, OffsetIndex, TimeIndex): begin\n"
     "to take short cuts."},
    {"execute", execute, METH_O, "Execute a request that needs no Python."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef handler_end_members[] = {
    {"position", Py_T_LONGLONG, offsetof(handler_end, position), 0,
     "The end of the metadata log that remembered and topics fit."},
    {"row", Py_T_LONGLONG, offsetof(handler_end, row), Py_READONLY,
     "The partition row that the last execute() says something about."},
    {"next_offset", Py_T_LONGLONG, offsetof(handler_end, next_offset), Py_READONLY, NULL},
    {"answer_bytes", Py_T_LONGLONG, offsetof(handler_end, answer_bytes), Py_READONLY,
     "How long the answer is that waits for the disk."},
    {"syncs_acks_all", Py_T_BOOL, offsetof(handler_end, syncs_acks_all), 0,
     "Whether acks=all waits for the disk."},
    {"remembered", Py_T_OBJECT_EX, offsetof(handler_end, remembered), Py_READONLY, NULL},
    {"topics", Py_T_OBJECT_EX, offsetof(handler_end, topics), Py_READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

PyTypeObject HandlerEnd_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "mpbroker._core.HandlerEnd",
    .tp_basicsize = sizeof(handler_end),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "HandlerEnd(control, arena, region_bytes, response_rings)",
    .tp_new = handler_end_new,
    .tp_dealloc = handler_end_dealloc,
    .tp_methods = handler_end_methods,
    .tp_members = handler_end_members,
};
