/* Python twin: RequestHandler.turn in server/request_handler.py, whose order of stores
 * this is. Words of its own handler's row that it writes: busy slot and busy since.
 */

#include "server/handler_wait.h"

#include "base/clock.h"
#include "base/steps.h"
#include "ipc/request_slot.h"
#include "ipc/ring.h"
#include "protocol/request_header.h"
#include "server/fetch.h"
#include "server/handler_execute.h"

#include <errno.h>
#include <sys/epoll.h>

/* The doorbell and the disk's event; whatever comes, Python looks at everything. */
#define MAX_EVENTS 4

PyObject *
handler_set_wait(PyObject *object, PyObject *args)
{
    handler_end *self = (handler_end *)object;
    PyObject *requests;
    long long handler, row;
    int epoll_fd;
    if (!PyArg_ParseTuple(args, "iO!LL", &epoll_fd, &RequestRing_Type, &requests,
                          &handler, &row))
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

/* Wait for an event, or for the time to be over; 0 and an exception. */
static int
wait_for_event(const handler_end *self, int timeout_ms)
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
try_parked_fetch(handler_end *self, int64_t slot)
{
    const int64_t parked = state_of_handler(self->handler, L.STATE_PARKED);
    const int64_t state = load(&self->control, slot_row(slot) + L.SLOT_STATE);
    int64_t size;
    const uint8_t *frame = request_of(self, slot, &size);
    if (state - generation_of(state) != parked || frame == NULL || !are_current(self)
        || request_api_key(frame) != FETCH)
        return 0;
    const enum outcome outcome = execute_fetch(self, slot, frame, size, 1, 0);
    PyErr_Clear(); /* it is tried again, and what it meets then is answered */
    return outcome == DONE;
}

/* After a Produce that execute() has told of: answer fetches that waited for it, and
 * add their slots to a list; 0 and an exception.
 *
 * One fetch a partition: in most cases that is all there are, and Python sees to the
 * rest.
 */
static int
answer_waiting_fetches(handler_end *self, PyObject *result, PyObject *fetched)
{
    const long flags = PyLong_Check(result) ? PyLong_AsLong(result) : 0;
    if (flags < 0 || !(flags & RESULT_NOTIFY))
        return 1;
    for (int i = 0; i < self->produce.partition_count; i++) {
        PyObject *row = PyLong_FromLongLong(self->produce.partitions[i].done.row);
        PyObject *number = row ? PyDict_GetItemWithError(self->waiting, row) : NULL;
        int64_t slot;
        int is_right = row != NULL && !PyErr_Occurred();
        if (is_right && number != NULL) {
            is_right = read_slot(number, &slot);
            if (is_right && try_parked_fetch(self, slot))
                is_right = PyList_Append(fetched, number) == 0;
        }
        Py_XDECREF(row);
        if (!is_right)
            return 0;
    }
    return 1;
}

/* Execute a single claimed slot's request and push its answer: the beginning of
 * RequestHandler._execute. Return what execute() does. */
static PyObject *
execute_one(handler_end *self, PyObject *number, int64_t now, PyObject *fetched)
{
    int64_t slot;
    if (!read_slot(number, &slot))
        return NULL;
    /* Before the request is touched: if it kills us, the supervisor reads here which
     * one it was, and counts it against the request. */
    store(&self->control, self->handler_row + L.HANDLER_BUSY_SINCE, now);
    store(&self->control, self->handler_row + L.HANDLER_BUSY_SLOT, slot + 1);
    STEP();
    store(&self->control, slot_row(slot) + L.SLOT_DEQUEUED, now);
    PyObject *result = handler_execute((PyObject *)self, number);
    /* The processors wake up while Python does what is left to do. */
    if (result != NULL
        && (!answer_waiting_fetches(self, result, fetched) || !flush_answers(self)))
        Py_CLEAR(result);
    return result;
}

/* wait(timeout_ms, limit, may_execute) -> (slots, woken_ns, is_begun, result, fetched)
 *
 * If it is begun there is one slot, its `result` is what execute() says, and `fetched`
 * are the slots of parked fetches that have been answered after it.
 */
PyObject *
handler_wait(PyObject *object, PyObject *const *args, Py_ssize_t nargs)
{
    handler_end *self = (handler_end *)object;
    if (nargs != 3 || self->requests == NULL)
        return PyErr_Format(PyExc_TypeError,
                            "wait(timeout_ms, limit, may_execute), after set_wait()");
    const long timeout_ms = PyLong_AsLong(args[0]);
    const int64_t limit = PyLong_AsLongLong(args[1]);
    if (PyErr_Occurred())
        return NULL;
    if (timeout_ms < 0 || timeout_ms > INT32_MAX)
        return PyErr_Format(PyExc_ValueError, "%ld ms", timeout_ms);
    if (!wait_for_event(self, (int)timeout_ms))
        return NULL;
    const int64_t now = monotonic_ns();
    const int64_t handlers = load(&self->control, L.HEADER_ACTIVE_HANDLERS);
    PyObject *slots = must_stop(self) ? PyList_New(0)
                                      : ring_take(self->requests, limit, self->handler,
                                                  handlers > 1 ? handlers : 1, 0);
    if (slots == NULL)
        return NULL;
    const int is_begun = args[2] == Py_True && PyList_GET_SIZE(slots) == 1;
    PyObject *fetched = PyList_New(0), *result = NULL;
    if (fetched != NULL)
        result = is_begun ? execute_one(self, PyList_GET_ITEM(slots, 0), now, fetched)
                          : Py_NewRef(Py_None);
    if (result == NULL) {
        Py_DECREF(slots);
        Py_XDECREF(fetched);
        return NULL;
    }
    return Py_BuildValue("(NLONN)", slots, (long long)now, is_begun ? Py_True : Py_False,
                         result, fetched);
}
