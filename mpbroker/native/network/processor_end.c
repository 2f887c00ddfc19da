/* Python twins: network/processor.py, request_reader.py and connection_rows.py, with
 * the same order of stores. The table in network/moves/succession.py says how a
 * successor continues from each state that a killed process may leave.
 */

#include "network/processor_end.h"

#include "base/big_endian.h"
#include "base/clock.h"
#include "base/steps.h"
#include "ipc/request_metrics.h"
#include "ipc/request_slot.h"
#include "network/processor_turn.h"

#include <errno.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#define SIZE_BYTES 4
#define CLEARED_WORDS 16 /* all words of line 2 of a slot */
#define HANG_UP (EPOLLRDHUP | EPOLLHUP | EPOLLERR | EPOLLPRI)

/* -- making and unmaking ----------------------------------------------------------- */

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

/* Return whether all words and bytes that this object reaches by numbers are in its
 * segments. */
static int
is_within_segments(const processor_end *self)
{
    const int64_t last = L.COUNT_EMPTY_POLLS;
    return has_words(&self->control, 0, L.CONTROL_WORDS)
           && has_words(&self->control, self->counters, last + 1)
           && L.COUNT_REQUESTS <= last && L.COUNT_BYTES_IN <= last
           && L.COUNT_BYTES_OUT <= last && L.COUNT_POLLS <= last
           && is_slot(self->first_slot) && self->processor >= 0
           && self->processor < L.MAX_PROCESSORS
           && PyList_GET_SIZE(self->in_flight) <= L.MAX_SLOTS - self->first_slot;
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
    if (!is_within_segments(self)) {
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

/* -- a channel's numbers ----------------------------------------------------------- */

typedef struct {
    int64_t fd, row, slot, block, base, start, end, frame_end, extent, sent;
} channel_numbers;

/* Read the numbers of a channel that has a slot, and a frame in the slot's block; 0:
 * the channel is left to Python. */
static int
read_numbers(const processor_end *self, PyObject *channel, channel_numbers *n)
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
set_object(PyObject *channel, Py_ssize_t offset, PyObject *value)
{
    set_field(channel, offset, Py_NewRef(value));
}

/* -- requests ---------------------------------------------------------------------- */

/* Return the length of the frame at `start`, its size field included. 0: the frame is
 * not whole yet. -1: its length is negative, or it does not fit the block. */
static int64_t
whole_frame(const processor_end *self, const channel_numbers *n)
{
    if (n->end - n->start < SIZE_BYTES)
        return 0;
    int64_t size = read_big(self->arena.base + n->block + n->start, SIZE_BYTES);
    if (size < 0 || size > L.REQUEST_PART_BYTES - n->start - SIZE_BYTES)
        return -1;
    return size + SIZE_BYTES <= n->end - n->start ? size + SIZE_BYTES : 0;
}

/* Receive bytes from the socket once; 0 if no byte came, for whatever reason. */
static int
receive_bytes(processor_end *self, PyObject *channel, channel_numbers *n)
{
    int64_t room = L.REQUEST_PART_BYTES - n->end;
    if (room <= 0)
        return 0;
    uint8_t *into = self->arena.base + n->block + n->end;
    ssize_t got = recv((int)n->fd, into, room, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
        set_object(channel, self->at.readable, Py_False);
    if (got <= 0)
        return 0; /* the end, or an error: Python gets the same when it receives */
    n->end += got;
    /* A short read has drained the socket, except after a hang-up: then the end of the
     * stream is still to be read. See request_reader.py. */
    if (got < room && get_field(channel, self->at.closing) == Py_False)
        set_object(channel, self->at.readable, Py_False);
    return 1;
}

/* Fill in a slot, which the next flush publishes: ProcessorEnd.send_request. 0 and an
 * exception.
 *
 * The state is stored last: its new generation says that the slot has another request.
 * The state stays HELD: until the flush stores READY, a successor reads the same bytes
 * as a request again.
 */
static int
send_request(processor_end *self, const channel_numbers *n, int64_t frame_bytes,
             int64_t now)
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

/* Mute a connection and send its request: Processor._publish. 0 and an exception.
 *
 * The connection is muted first, because a handler may answer before the flush returns.
 * If this process is killed in between, the row is IN_FLIGHT and the slot HELD; from
 * that a successor knows that nothing was published.
 */
static int
publish(processor_end *self, PyObject *channel, const channel_numbers *n,
        int64_t frame_bytes, int64_t now)
{
    const memory *control = &self->control;
    set_object(channel, self->at.state, self->in_flight_state);
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

/* Get one whole frame, which may have been received before, and publish it. After a
 * hang-up this is left to Python: the request must not wait then, see
 * network/waits.py. */
static enum outcome
receive_request(processor_end *self, PyObject *channel, int64_t now)
{
    channel_numbers n;
    if (get_field(channel, self->at.closing) != Py_False
        || !read_numbers(self, channel, &n)
        || load_relaxed(&self->control, n.row + L.CONNECTION_MUTED_UNTIL))
        return LEFT_TO_PYTHON;
    int64_t frame_bytes = whole_frame(self, &n);
    if (frame_bytes == 0 && get_field(channel, self->at.readable) == Py_True) {
        if (!receive_bytes(self, channel, &n))
            return LEFT_TO_PYTHON;
        if (!set_int_field(channel, self->at.end, n.end))
            return FAILED;
        frame_bytes = whole_frame(self, &n);
    }
    if (frame_bytes <= 0)
        return LEFT_TO_PYTHON;
    if (!set_int_field(channel, self->at.active_ns, now)
        || !set_int_field(channel, self->at.frame_end, n.start + frame_bytes)
        || !publish(self, channel, &n, frame_bytes, now))
        return FAILED;
    return DONE;
}

enum outcome
process_event(processor_end *self, PyObject *channel, long event, int64_t now)
{
    PyObject *state = get_field(channel, self->at.state);
    if (event & HANG_UP || (state != self->reading && state != self->in_flight_state))
        return LEFT_TO_PYTHON;
    if (!(event & EPOLLIN))
        return DONE; /* the socket can be written to, but nothing waits for that */
    set_object(channel, self->at.readable, Py_True);
    if (state != self->reading || get_field(channel, self->at.waiting) != Py_False)
        return DONE;
    return receive_request(self, channel, now);
}

/* -- answers ----------------------------------------------------------------------- */

/* Move a connection's row behind a finished request and its answer:
 * ConnectionRows.finish.
 *
 * Position and sent change together: they are written to the copy that is not valid,
 * and the store to the state makes this copy valid. If this process is killed before
 * that store, the row is IN_FLIGHT and the slot RESPONDING: the successor asks the
 * kernel how much of the answer was sent, and finds that all was sent.
 */
static void
finish_row(const memory *control, const channel_numbers *n, int64_t now)
{
    int64_t state = load(control, n->row + L.CONNECTION_STATE)
                    ^ (int64_t)1 << L.CONNECTION_COPY_SHIFT;
    int64_t copy = n->row + (state >> L.CONNECTION_COPY_SHIFT & 1);
    store(control, copy + L.CONNECTION_POSITION, n->base << L.POSITION_SHIFT | n->start);
    STEP();
    store(control, copy + L.CONNECTION_SENT, n->sent);
    STEP();
    store(control, n->row + L.CONNECTION_ACTIVE, now);
    STEP();
    store(control, n->row + L.CONNECTION_STATE,
          (state & ~L.STATE_MASK) | L.CONNECTION_READING);
    STEP();
}

/* Finish the request in the slot's block after its answer was sent:
 * RequestReader.finish_request. 0 and an exception. */
static int
finish_request(processor_end *self, PyObject *channel, channel_numbers *n, int64_t now)
{
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
    finish_row(&self->control, n, now);
    /* After the row: IN_FLIGHT and HELD together would mean that nothing was published,
     * and a successor would send the request to the handlers a second time. */
    set_slot_state(&self->control, n->slot, L.STATE_HELD);
    STEP();
    set_object(channel, self->at.state, self->reading);
    return 1;
}

/* Return the channel of a slot's request, which is in flight in the slot's block. NULL:
 * left to Python. The reference is borrowed. */
static PyObject *
find_in_flight(const processor_end *self, int64_t slot, channel_numbers *n)
{
    const int64_t index = slot - self->first_slot;
    if (index < 0 || index >= PyList_GET_SIZE(self->in_flight))
        return NULL;
    PyObject *channel = PyList_GET_ITEM(self->in_flight, index);
    return channel != Py_None && read_numbers(self, channel, n) && n->slot == slot
                   && get_field(channel, self->at.state) == self->in_flight_state
                   && n->frame_end >= n->start && n->frame_end <= n->end
               ? channel
               : NULL;
}

/* Send the answer of a slot, if it has one. `*length`: the answer's bytes. 0: left to
 * Python, after `*sent` bytes were sent. */
static int
send_bytes(const processor_end *self, int64_t slot, int64_t fd, int64_t *length,
           int64_t *sent)
{
    const memory *control = &self->control;
    const int64_t row = slot_row(slot), kind = load(control, row + L.SLOT_RESPONSE_KIND);
    *length = 0;
    if (kind == L.KIND_NONE)
        return 1;
    if (kind != L.KIND_BYTES)
        return 0;
    const int64_t offset = load(control, row + L.SLOT_RESPONSE_OFFSET);
    *length = load(control, row + L.SLOT_RESPONSE_LENGTH);
    if (*length <= 0 || !has_bytes(&self->arena, offset, *length))
        return 0;
    const int flags = MSG_DONTWAIT | MSG_NOSIGNAL;
    ssize_t out = send((int)fd, self->arena.base + offset, *length, flags);
    STEP();
    if (out == *length)
        return 1;
    *sent = out < 0 ? 0 : out; /* Python gets the same error when it sends */
    return 0;
}

/* Send one slot's answer. LEFT_TO_PYTHON: `*sent` bytes of it were sent; -1: all were
 * sent, and the channel has to be read. */
static enum outcome
send_answer(processor_end *self, int64_t slot, int64_t now, int may_receive,
            int64_t *sent)
{
    channel_numbers n;
    int64_t length;
    *sent = 0;
    PyObject *channel = find_in_flight(self, slot, &n);
    if (channel == NULL || !send_bytes(self, slot, n.fd, &length, sent))
        return LEFT_TO_PYTHON;
    count(self, L.COUNT_BYTES_OUT, length);
    n.sent += length;
    record_request(&self->control, &self->arena, self->processor, slot, now,
                   monotonic_ns());
    Py_INCREF(channel);
    int is_done = PyList_SetItem(self->in_flight, slot - self->first_slot,
                                 Py_NewRef(Py_None)) == 0
                  && finish_request(self, channel, &n, now);
    enum outcome outcome = is_done ? DONE : FAILED;
    if (is_done
        && (n.start < n.end || get_field(channel, self->at.readable) == Py_True)) {
        outcome = may_receive ? receive_request(self, channel, now) : LEFT_TO_PYTHON;
        if (outcome == LEFT_TO_PYTHON)
            *sent = -1;
    }
    Py_DECREF(channel);
    return outcome;
}

/* Add a slot's answer and its channel to the list of answers that are left to Python; 0
 * and an exception. */
static int
leave_answer(PyObject *left, PyObject *channel, PyObject *slot, int64_t sent)
{
    PyObject *rest = Py_BuildValue("(OOL)", channel, slot, (long long)sent);
    int result = rest == NULL ? -1 : PyList_Append(left, rest);
    Py_XDECREF(rest);
    return result == 0;
}

PyObject *
answer_slots(processor_end *self, PyObject *slots, int64_t now, int may_receive)
{
    PyObject *left = PyList_New(0);
    for (Py_ssize_t i = 0; left != NULL && i < PyList_GET_SIZE(slots); i++) {
        PyObject *number = PyList_GET_ITEM(slots, i);
        int64_t slot = PyLong_AsLongLong(number), sent = 0;
        const int64_t index = slot - self->first_slot;
        /* The channel is read before the answer is sent: afterwards another channel may
         * have the slot. */
        PyObject *channel = Py_None;
        if (index >= 0 && index < PyList_GET_SIZE(self->in_flight))
            channel = PyList_GET_ITEM(self->in_flight, index);
        Py_INCREF(channel);
        enum outcome outcome = FAILED;
        if (!PyErr_Occurred())
            outcome = send_answer(self, slot, now, may_receive, &sent);
        if (outcome == FAILED
            || (outcome == LEFT_TO_PYTHON && !leave_answer(left, channel, number, sent)))
            Py_CLEAR(left);
        Py_DECREF(channel);
    }
    return left;
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

/* -- the type ---------------------------------------------------------------------- */

static PyMethodDef processor_end_methods[] = {
    {"answer", FASTCALL(answer), METH_FASTCALL,
     "answer(slots, now_ns, may_receive): send; return (channel, slot, bytes sent) of\n"
     "what is left to Python, -1 bytes if the channel only wants to be read from."},
    {"set_turn", FASTCALL(processor_set_turn), METH_FASTCALL,
     "set_turn(epoll_fd, request_ring, response_ring, channels, doorbell_fd,\n"
     "news_words): what turn() needs."},
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
