/* A handler's wake-up: wait, take what is there, and if that is one request, execute it as
 * execute() does and push its answer. After a sleep Python comes slowly back from memory:
 * by then the answer is on its way. The twin is RequestHandler.turn, whose order of stores
 * this is.
 */

#include "server/handler_end.h"

#include <errno.h>
#include <sys/epoll.h>

/* The doorbell, the disk's event; however many are told of, Python looks at everything. */
#define MAX_EVENTS 4
#define FETCH 1

PyObject *
handler_set_wait(PyObject *object, PyObject *args)
{
    handler_end *self = (handler_end *)object;
    PyObject *requests;
    long long handler, row;
    int epoll_fd;
    if (!PyArg_ParseTuple(args, "iO!LL", &epoll_fd, &RequestRing_Type, &requests, &handler,
                          &row))
        return NULL;
    if (!has_words(&self->control, row, L.HANDLER_BUSY_SINCE + 1)
        || L.HANDLER_BUSY_SLOT > L.HANDLER_BUSY_SINCE
        || L.HANDLER_ACTIVE > L.HANDLER_BUSY_SINCE)
        return PyErr_Format(PyExc_IndexError, "no such handler");
    Py_XSETREF(self->requests, Py_NewRef(requests));
    self->epoll_fd = epoll_fd;
    self->handler = handler;
    self->handler_row = row;
    Py_RETURN_NONE;
}

/* 0 and an exception. */
static int
sleep_for(const handler_end *self, int timeout_ms)
{
    struct epoll_event events[MAX_EVENTS];
    int found;
    Py_BEGIN_ALLOW_THREADS
    found = epoll_wait(self->epoll_fd, events, MAX_EVENTS, timeout_ms);
    Py_END_ALLOW_THREADS
    if (found >= 0)
        return 1;
    if (errno != EINTR) {
        PyErr_SetFromErrno(PyExc_OSError);
        return 0;
    }
    return PyErr_CheckSignals() == 0;
}

/* RequestHandler._must_stop. */
static int
must_stop(const handler_end *self)
{
    return load(&self->control, L.HEADER_PHASE) >= L.PHASE_STOPPED
           || !load(&self->control, self->handler_row + L.HANDLER_ACTIVE);
}

/* Try the fetch that is parked in a slot; 1: it is answered. */
static int
try_parked(handler_end *self, int64_t slot)
{
    int64_t parked = (self->handler + 1) << L.STATE_HANDLER_SHIFT | L.STATE_PARKED;
    int64_t state = load(&self->control, slot_row(slot) + L.SLOT_STATE), size;
    const uint8_t *frame = request_of(self, slot, &size);
    if (state - generation_of(state) != parked || frame == NULL || !are_current(self)
        || read_big(frame, 2) != FETCH)
        return 0;
    int result = execute_fetch(self, slot, frame, size, 1, 0);
    PyErr_Clear(); /* it is tried again, and what it meets is answered */
    return result == FETCH_DONE;
}

/* After a Produce, by what execute() said of it: answer fetches that waited for it, and
 * add their slots to a list; 0 and an exception.
 *
 * One a partition, in most cases all there are; Python sees to the others.
 */
static int
answer_waiting(handler_end *self, PyObject *result, PyObject *fetched)
{
    long flags = PyLong_Check(result) ? PyLong_AsLong(result) : 0;
    if (flags < 0 || !(flags & NOTIFY))
        return 1;
    for (int i = 0; i < self->produce.part_count; i++) {
        PyObject *row = PyLong_FromLongLong(self->produce.parts[i].done.row);
        PyObject *number = row ? PyDict_GetItemWithError(self->waiting, row) : NULL;
        int64_t slot;
        int is_right = row != NULL && !PyErr_Occurred();
        if (is_right && number != NULL) {
            is_right = read_slot(number, &slot);
            if (is_right && try_parked(self, slot))
                is_right = PyList_Append(fetched, number) == 0;
        }
        Py_XDECREF(row);
        if (!is_right)
            return 0;
    }
    return 1;
}

/* The beginning of RequestHandler._execute, of a single slot. */
static PyObject *
begin(handler_end *self, PyObject *number, int64_t now, PyObject *fetched)
{
    int64_t slot;
    if (!read_slot(number, &slot))
        return NULL;
    store(&self->control, self->handler_row + L.HANDLER_BUSY_SINCE, now);
    store(&self->control, self->handler_row + L.HANDLER_BUSY_SLOT, slot + 1);
    STEP();
    store(&self->control, slot_row(slot) + L.SLOT_DEQUEUED, now);
    PyObject *result = handler_execute((PyObject *)self, number);
    /* Its processor wakes up while Python does what is left to do. */
    if (result != NULL
        && (!answer_waiting(self, result, fetched) || !flush_answers(self)))
        Py_CLEAR(result);
    return result;
}

/* wait(timeout_ms, limit, may_execute) -> (slots, woken_ns, is_begun, result, fetched)
 *
 * Is it begun, then there is one slot, its `result` is what execute() says, and parked
 * fetches that have been answered after it are `fetched`, slots too.
 */
PyObject *
handler_wait(PyObject *object, PyObject *const *args, Py_ssize_t nargs)
{
    handler_end *self = (handler_end *)object;
    if (nargs != 3 || self->requests == NULL)
        return PyErr_Format(PyExc_TypeError,
                            "wait(timeout_ms, limit, may_execute), after set_wait()");
    long timeout_ms = PyLong_AsLong(args[0]);
    int64_t limit = PyLong_AsLongLong(args[1]);
    if (PyErr_Occurred())
        return NULL;
    if (timeout_ms < 0 || timeout_ms > INT32_MAX)
        return PyErr_Format(PyExc_ValueError, "%ld ms", timeout_ms);
    if (!sleep_for(self, (int)timeout_ms))
        return NULL;
    int64_t now = monotonic_ns();
    int64_t handlers = load(&self->control, L.HEADER_ACTIVE_HANDLERS);
    PyObject *slots = must_stop(self) ? PyList_New(0)
                                      : ring_take(self->requests, limit, self->handler,
                                                  handlers > 1 ? handlers : 1, 0);
    if (slots == NULL)
        return NULL;
    int is_begun = args[2] == Py_True && PyList_GET_SIZE(slots) == 1;
    PyObject *fetched = PyList_New(0), *result = NULL;
    if (fetched != NULL)
        result = is_begun ? begin(self, PyList_GET_ITEM(slots, 0), now, fetched)
                          : Py_NewRef(Py_None);
    if (result == NULL) {
        Py_DECREF(slots);
        Py_XDECREF(fetched);
        return NULL;
    }
    return Py_BuildValue("(NLONN)", slots, (long long)now, is_begun ? Py_True : Py_False,
                         result, fetched);
}
