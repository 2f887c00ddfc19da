/* Python twin: RequestHandler.turn in server/request_handler.py, with the same order of
 * stores. In its handler's row this writes two words: busy slot and busy since.
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

/* There are two descriptors: the doorbell and the disk's event. Whichever event comes,
 * Python looks at both. */
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

/* Wait for an event, but not longer than `timeout_ms`; 0 and an exception. */
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

/* The twin of RequestHandler._must_stop. */
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
    PyErr_Clear(); /* Python tries it again, and answers the error if it comes again */
    return outcome == DONE;
}

/* After a Produce with the result RESULT_NOTIFY: answer parked fetches that waited for
 * its records, and add their slots to the list `fetched`; 0 and an exception.
 *
 * This tries one fetch for each partition: in most cases there are no more, and Python
 * tries the others.
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

/* Execute the request of a claimed slot and push its answer: the beginning of
 * RequestHandler._execute. Return the result of execute(). */
static PyObject *
execute_one(handler_end *self, PyObject *number, int64_t now, PyObject *fetched)
{
    int64_t slot;
    if (!read_slot(number, &slot))
        return NULL;
    /* Before the request is read: if it kills this process, the supervisor reads here
     * which request it was, and counts the death against it. */
    store(&self->control, self->handler_row + L.HANDLER_BUSY_SINCE, now);
    store(&self->control, self->handler_row + L.HANDLER_BUSY_SLOT, slot + 1);
    STEP();
    store(&self->control, slot_row(slot) + L.SLOT_DEQUEUED, now);
    PyObject *result = handler_execute((PyObject *)self, number);
    /* The answers are pushed now: the processors wake up while Python does the rest. */
    if (result != NULL
        && (!answer_waiting_fetches(self, result, fetched) || !flush_answers(self)))
        Py_CLEAR(result);
    return result;
}

/* wait(timeout_ms, limit, may_execute) -> (slots, woken_ns, is_begun, result, fetched)
 *
 * If `is_begun`, there is one slot, whose request was executed: `result` is the result
 * of execute(), and `fetched` are the slots of parked fetches that were answered after
 * it.
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
