/* A processor's turn over its connections, as far as it is the same for all of them: a
 * whole frame in the slot's block, an answer that is one run of bytes and goes out at
 * once. The twins are network/processor.py, request_reader.py and connection_rows.py,
 * whose order of stores this is; what is not plain is left to them, in a state from
 * which they go on.
 */

#include "network/processor_end.h"

#include "ipc/request_metrics.h"

#include <errno.h>
#include <stddef.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#define SIZE_BYTES 4
#define CLEARED_WORDS 16
#define HANG_UP (EPOLLRDHUP | EPOLLHUP | EPOLLERR)

/* -- making and unmaking ------------------------------------------------------------------ */

static int
find_channel_fields(channel_fields *at, PyTypeObject *type)
{
    return field_offset(type, "fd", &at->fd) && field_offset(type, "row", &at->row)
           && field_offset(type, "state", &at->state)
           && field_offset(type, "readable", &at->readable)
           && field_offset(type, "closing", &at->closing)
           && field_offset(type, "waiting", &at->waiting)
           && field_offset(type, "slot", &at->slot)
           && field_offset(type, "block", &at->block)
           && field_offset(type, "base", &at->base)
           && field_offset(type, "start", &at->start)
           && field_offset(type, "end", &at->end)
           && field_offset(type, "frame_end", &at->frame_end)
           && field_offset(type, "extent", &at->extent)
           && field_offset(type, "sent", &at->sent)
           && field_offset(type, "active_ns", &at->active_ns);
}

static PyObject *
processor_end_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *control, *arena, *channel, *reading, *in_flight_state, *in_flight,
        *unpublished;
    long long counters, first_slot, processor;
    if (!is_configured()
        || !PyArg_ParseTuple(args, "OOLLO!OOO!O!L", &control, &arena, &counters,
                             &first_slot, &PyType_Type, &channel, &reading,
                             &in_flight_state, &PyList_Type, &in_flight,
                             &PyList_Type, &unpublished, &processor))
        return NULL;
    processor_end *self = (processor_end *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->counters = counters;
    self->first_slot = first_slot;
    self->processor = processor;
    self->reading = Py_NewRef(reading);
    self->in_flight_state = Py_NewRef(in_flight_state);
    self->in_flight = Py_NewRef(in_flight);
    self->unpublished = Py_NewRef(unpublished);
    self->keep = PyTuple_Pack(3, control, arena, channel);
    if (self->keep == NULL || !get_memory(control, &self->control)
        || !get_memory(arena, &self->arena)
        || !find_channel_fields(&self->at, (PyTypeObject *)channel)) {
        Py_DECREF(self);
        return NULL;
    }
    if (!has_words(&self->control, 0, L.CONTROL_WORDS)
        || !has_words(&self->control, counters, L.COUNT_EMPTY_POLLS + 1)
        || L.COUNT_REQUESTS > L.COUNT_EMPTY_POLLS
        || L.COUNT_BYTES_IN > L.COUNT_EMPTY_POLLS
        || L.COUNT_BYTES_OUT > L.COUNT_EMPTY_POLLS || L.COUNT_POLLS > L.COUNT_EMPTY_POLLS
        || !is_slot(first_slot) || processor < 0 || processor >= L.MAX_PROCESSORS
        || PyList_GET_SIZE(in_flight) > L.MAX_SLOTS - first_slot) {
        Py_DECREF(self);
        return PyErr_Format(PyExc_ValueError, "segments smaller than their layout");
    }
    return (PyObject *)self;
}

static int
processor_end_traverse(PyObject *object, visitproc visit, void *arg)
{
    processor_end *self = (processor_end *)object;
    Py_VISIT(self->keep);
    Py_VISIT(self->in_flight);
    Py_VISIT(self->unpublished);
    Py_VISIT(self->requests);
    Py_VISIT(self->responses);
    Py_VISIT(self->channels);
    return 0;
}

static int
processor_end_clear(PyObject *object)
{
    processor_end *self = (processor_end *)object;
    Py_CLEAR(self->keep);
    Py_CLEAR(self->reading);
    Py_CLEAR(self->in_flight_state);
    Py_CLEAR(self->in_flight);
    Py_CLEAR(self->unpublished);
    Py_CLEAR(self->requests);
    Py_CLEAR(self->responses);
    Py_CLEAR(self->channels);
    return 0;
}

static void
processor_end_dealloc(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    processor_end_clear(object);
    Py_TYPE(object)->tp_free(object);
}

/* -- a channel's numbers --------------------------------------------------------------------- */

typedef struct {
    int64_t fd, row, slot, block, base, start, end, frame_end, extent, sent;
} numbers;

/* 0 if the channel is not plain: no slot, an extent, or numbers that cannot be. */
static int
get_numbers(const processor_end *self, PyObject *channel, numbers *n)
{
    const channel_fields *at = &self->at;
    if (!read_int_field(channel, at->slot, &n->slot) || n->slot < self->first_slot
        || n->slot - self->first_slot >= PyList_GET_SIZE(self->in_flight)
        || !read_int_field(channel, at->extent, &n->extent) || n->extent != 0
        || !read_int_field(channel, at->fd, &n->fd) || n->fd < 0
        || !read_int_field(channel, at->row, &n->row)
        || !read_int_field(channel, at->block, &n->block)
        || !read_int_field(channel, at->base, &n->base)
        || !read_int_field(channel, at->start, &n->start)
        || !read_int_field(channel, at->end, &n->end)
        || !read_int_field(channel, at->frame_end, &n->frame_end)
        || !read_int_field(channel, at->sent, &n->sent))
        return 0;
    return has_words(&self->control, n->row, L.CONNECTION_WORDS)
           && has_bytes(&self->arena, n->block, L.BLOCK_BYTES) && n->start >= 0
           && n->start <= n->end && n->end <= L.REQUEST_PART_BYTES;
}

static void
put(PyObject *channel, Py_ssize_t offset, PyObject *value)
{
    set_field(channel, offset, Py_NewRef(value));
}

/* -- requests ---------------------------------------------------------------------------- */

/* The length of the whole frame at `start`, its size field included; 0: not whole.
 * -1: it is none, or will not fit the block.
 */
static int64_t
whole_frame(const processor_end *self, const numbers *n)
{
    if (n->end - n->start < SIZE_BYTES)
        return 0;
    int64_t size = read_big(self->arena.base + n->block + n->start, SIZE_BYTES);
    if (size < 0 || size > L.REQUEST_PART_BYTES - n->start - SIZE_BYTES)
        return -1;
    return size + SIZE_BYTES <= n->end - n->start ? size + SIZE_BYTES : 0;
}

/* Receive once; 0 if nothing came, whatever the reason. */
static int
receive_bytes(processor_end *self, PyObject *channel, numbers *n)
{
    int64_t room = L.REQUEST_PART_BYTES - n->end;
    if (room <= 0)
        return 0;
    uint8_t *into = self->arena.base + n->block + n->end;
    ssize_t got = recv((int)n->fd, into, room, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
        put(channel, self->at.readable, Py_False);
    if (got <= 0)
        return 0; /* an end, or an error: Python finds it again */
    n->end += got;
    /* A short read drained the socket. Not so after a hang-up: see the twin. */
    if (got < room && get_field(channel, self->at.closing) == Py_False)
        put(channel, self->at.readable, Py_False);
    return 1;
}

/* ProcessorEnd.send_request: fill the slot in; the flush publishes it. */
static int
send_request(processor_end *self, const numbers *n, int64_t frame_bytes, int64_t now)
{
    const memory *control = &self->control;
    int64_t row = slot_row(n->slot);
    store(control, row + L.SLOT_REQUEST_OFFSET, n->block + n->start + SIZE_BYTES);
    STEP();
    store(control, row + L.SLOT_REQUEST_LENGTH, frame_bytes - SIZE_BYTES);
    STEP();
    store(control, row + L.SLOT_RECEIVED, now);
    for (int i = 0; i < CLEARED_WORDS; i++)
        store(control, row + L.SLOT_INTENT + i, 0);
    STEP();
    store(control, row + L.SLOT_PROGRESS_OFFSET, n->block + L.REQUEST_PART_BYTES);
    STEP();
    int64_t state = load(control, row + L.SLOT_STATE);
    int64_t next = generation_of(state) + ((int64_t)1 << L.GENERATION_SHIFT);
    store(control, row + L.SLOT_STATE, next | L.STATE_HELD);
    STEP();
    PyObject *slot = PyLong_FromLongLong(n->slot);
    int result = slot == NULL ? -1 : PyList_Append(self->unpublished, slot);
    Py_XDECREF(slot);
    return result == 0;
}

/* Processor._publish. */
static int
publish(processor_end *self, PyObject *channel, const numbers *n, int64_t frame_bytes,
        int64_t now)
{
    const memory *control = &self->control;
    /* Mute first: a handler may answer before the flush returns. */
    put(channel, self->at.state, self->in_flight_state);
    store(control, n->row + L.CONNECTION_ACTIVE, now);
    STEP();
    int64_t state = load(control, n->row + L.CONNECTION_STATE);
    store(control, n->row + L.CONNECTION_STATE,
          (state & ~L.STATE_MASK) | L.CONNECTION_IN_FLIGHT);
    STEP();
    if (PyList_SetItem(self->in_flight, n->slot - self->first_slot, Py_NewRef(channel)))
        return 0;
    if (!send_request(self, n, frame_bytes, now))
        return 0;
    count(self, L.COUNT_REQUESTS, 1);
    count(self, L.COUNT_BYTES_IN, frame_bytes);
    return 1;
}

/* Get one whole frame, which may be there already, and publish it. */
static enum outcome
receive_request(processor_end *self, PyObject *channel, int64_t now)
{
    numbers n;
    if (!get_numbers(self, channel, &n)
        || load_relaxed(&self->control, n.row + L.CONNECTION_MUTED_UNTIL))
        return UNUSUAL;
    int64_t frame_bytes = whole_frame(self, &n);
    if (frame_bytes == 0 && get_field(channel, self->at.readable) == Py_True) {
        if (!receive_bytes(self, channel, &n))
            return UNUSUAL;
        if (!set_int_field(channel, self->at.end, n.end))
            return FAILED;
        frame_bytes = whole_frame(self, &n);
    }
    if (frame_bytes <= 0)
        return UNUSUAL;
    if (!set_int_field(channel, self->at.active_ns, now)
        || !set_int_field(channel, self->at.frame_end, n.start + frame_bytes)
        || !publish(self, channel, &n, frame_bytes, now))
        return FAILED;
    return PLAIN;
}

/* One event of a channel's socket. */
enum outcome
process_event(processor_end *self, PyObject *channel, long event, int64_t now)
{
    PyObject *state = get_field(channel, self->at.state);
    if (event & HANG_UP || (state != self->reading && state != self->in_flight_state))
        return UNUSUAL;
    if (!(event & EPOLLIN))
        return PLAIN; /* it can be written to, and nothing waits for that */
    put(channel, self->at.readable, Py_True);
    if (state != self->reading || get_field(channel, self->at.waiting) != Py_False)
        return PLAIN;
    return receive_request(self, channel, now);
}

/* -- answers ---------------------------------------------------------------------------- */

/* RequestReader.finish_request, of a request in the slot's block. */
static int
finish_request(processor_end *self, PyObject *channel, numbers *n, int64_t now)
{
    const memory *control = &self->control;
    if (n->frame_end < n->end)
        n->start = n->frame_end;
    else {
        n->base += n->end;
        n->start = n->end = 0;
    }
    if (!set_int_field(channel, self->at.base, n->base)
        || !set_int_field(channel, self->at.start, n->start)
        || !set_int_field(channel, self->at.end, n->end)
        || !set_int_field(channel, self->at.sent, n->sent))
        return 0;
    int64_t state = load(control, n->row + L.CONNECTION_STATE)
                    ^ (int64_t)1 << L.CONNECTION_COPY_SHIFT;
    int64_t copy = n->row + (state >> L.CONNECTION_COPY_SHIFT & 1);
    store(control, copy + L.CONNECTION_POSITION, n->base << L.POSITION_SHIFT | n->start);
    STEP();
    store(control, copy + L.CONNECTION_SENT, n->sent);
    STEP();
    store(control, n->row + L.CONNECTION_ACTIVE, now);
    STEP();
    /* The commit: killed before it, the answer is out and its successor says so. */
    store(control, n->row + L.CONNECTION_STATE,
          (state & ~L.STATE_MASK) | L.CONNECTION_READING);
    STEP();
    /* Not before the commit: HELD means that its request was never published. */
    int64_t word = slot_row(n->slot) + L.SLOT_STATE;
    store(control, word, generation_of(load(control, word)) | L.STATE_HELD);
    STEP();
    put(channel, self->at.state, self->reading);
    return 1;
}

/* Send one slot's answer; `*sent` of it went out if that was not all. */
static enum outcome
send_answer(processor_end *self, int64_t slot, int64_t now, int may_receive,
            int64_t *sent)
{
    const memory *control = &self->control;
    numbers n;
    int64_t index = slot - self->first_slot;
    *sent = 0;
    if (index < 0 || index >= PyList_GET_SIZE(self->in_flight))
        return UNUSUAL;
    PyObject *channel = PyList_GET_ITEM(self->in_flight, index);
    if (channel == Py_None || !get_numbers(self, channel, &n) || n.slot != slot
        || get_field(channel, self->at.state) != self->in_flight_state
        || n.frame_end < n.start || n.frame_end > n.end)
        return UNUSUAL;
    int64_t row = slot_row(slot), length = 0;
    int64_t kind = load(control, row + L.SLOT_RESPONSE_KIND);
    if (kind == L.KIND_BYTES) {
        int64_t offset = load(control, row + L.SLOT_RESPONSE_OFFSET);
        length = load(control, row + L.SLOT_RESPONSE_LENGTH);
        if (length <= 0 || !has_bytes(&self->arena, offset, length))
            return UNUSUAL;
        const int flags = MSG_DONTWAIT | MSG_NOSIGNAL;
        ssize_t out = send((int)n.fd, self->arena.base + offset, length, flags);
        STEP();
        if (out != length) {
            *sent = out < 0 ? 0 : out; /* an error comes again */
            return UNUSUAL;
        }
    }
    else if (kind != L.KIND_NONE)
        return UNUSUAL;
    count(self, L.COUNT_BYTES_OUT, length);
    n.sent += length;
    record_request(control, &self->arena, self->processor, slot, now, monotonic_ns());
    Py_INCREF(channel);
    int done = PyList_SetItem(self->in_flight, index, Py_NewRef(Py_None)) == 0
               && finish_request(self, channel, &n, now);
    enum outcome outcome = done ? PLAIN : FAILED;
    if (done && (n.start < n.end || get_field(channel, self->at.readable) == Py_True)) {
        outcome = may_receive ? receive_request(self, channel, now) : UNUSUAL;
        if (outcome == UNUSUAL)
            *sent = -1; /* all is out; the channel wants to be read from */
    }
    Py_DECREF(channel);
    return outcome;
}

/* The channel of a slot whose answer is out may be somebody else's by now: say which. */
static PyObject *
left_over(PyObject *channel, PyObject *slot, int64_t sent)
{
    return Py_BuildValue("(OOL)", channel, slot, (long long)sent);
}

PyObject *
answer_slots(processor_end *self, PyObject *slots, int64_t now, int may_receive)
{
    PyObject *unusual = PyList_New(0);
    for (Py_ssize_t i = 0; unusual != NULL && i < PyList_GET_SIZE(slots); i++) {
        PyObject *number = PyList_GET_ITEM(slots, i);
        int64_t slot = PyLong_AsLongLong(number), sent = 0;
        int64_t index = slot - self->first_slot;
        PyObject *channel = Py_None;
        if (index >= 0 && index < PyList_GET_SIZE(self->in_flight))
            channel = PyList_GET_ITEM(self->in_flight, index);
        Py_INCREF(channel);
        enum outcome outcome = FAILED;
        if (!PyErr_Occurred())
            outcome = send_answer(self, slot, now, may_receive, &sent);
        if (outcome == FAILED)
            Py_CLEAR(unusual);
        else if (outcome == UNUSUAL) {
            PyObject *rest = left_over(channel, number, sent);
            if (rest == NULL || PyList_Append(unusual, rest) < 0)
                Py_CLEAR(unusual);
            Py_XDECREF(rest);
        }
        Py_DECREF(channel);
    }
    return unusual;
}

static PyObject *
answer(PyObject *object, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 3 || !PyList_Check(args[0]))
        return PyErr_Format(PyExc_TypeError, "answer(slots, now_ns, may_receive)");
    int64_t now = PyLong_AsLongLong(args[1]);
    if (now == -1 && PyErr_Occurred())
        return NULL;
    return answer_slots((processor_end *)object, args[0], now, args[2] == Py_True);
}

/* -- the type --------------------------------------------------------------------------- */

static PyMethodDef processor_end_methods[] = {
    {"answer", FASTCALL(answer), METH_FASTCALL,
     "answer(slots, now_ns, may_receive): send; return (channel, slot, bytes sent) of\n"
     "what is not plain, -1 if all is sent and the channel wants to be read from."},
    {"set_turn", FASTCALL(processor_set_turn), METH_FASTCALL,
     "set_turn(epoll_fd, request_ring, response_ring, channels, doorbell_fd, news_words):\n"
     "what turn() needs."},
    {"turn", FASTCALL(processor_turn), METH_FASTCALL,
     "turn(timeout_ms, may_stay): see native/network/processor_turn.c."},
    {NULL, NULL, 0, NULL},
};

PyTypeObject ProcessorEnd_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "mpbroker.native._core.ProcessorEnd",
    .tp_basicsize = sizeof(processor_end),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_doc = "ProcessorEnd(control, arena, counters_word, first_slot, channel_type,\n"
              "reading, in_flight, in_flight_list, unpublished_list, processor)",
    .tp_new = processor_end_new,
    .tp_dealloc = processor_end_dealloc,
    .tp_traverse = processor_end_traverse,
    .tp_clear = processor_end_clear,
    .tp_methods = processor_end_methods,
};
