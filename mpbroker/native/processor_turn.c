/* One wake-up of a processor: wait for events, receive and publish what is whole, send the
 * answers that are there, publish what their connections had sent meanwhile.
 *
 * After a few milliseconds of sleep all that a process touches has to come from memory
 * again, and Python touches much: in one call the next process is woken, and the answer
 * goes out, before Python gets to see what else there is. The twin is Processor.turn.
 */

#include "processor_end.h"

#include <errno.h>
#include <sys/epoll.h>

#define MAX_EVENTS 256

PyObject *
processor_set_turn(PyObject *object, PyObject *const *args, Py_ssize_t nargs)
{
    processor_end *self = (processor_end *)object;
    if (nargs != 4 || !PyObject_TypeCheck(args[1], &RequestRing_Type)
        || !PyObject_TypeCheck(args[2], &ResponseRing_Type) || !PyDict_Check(args[3]))
        return PyErr_Format(PyExc_TypeError,
                            "set_turn(epoll_fd, request_ring, response_ring, channels)");
    long fd = PyLong_AsLong(args[0]);
    if (fd < 0 || fd > INT32_MAX)
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "epoll %ld", fd);
    self->epoll_fd = (int)fd;
    Py_XSETREF(self->requests, Py_NewRef(args[1]));
    Py_XSETREF(self->responses, Py_NewRef(args[2]));
    Py_XSETREF(self->channels, Py_NewRef(args[3]));
    Py_RETURN_NONE;
}

/* How many events there are; -1 and an exception. */
static int
wait_for_events(const processor_end *self, struct epoll_event *events, int timeout_ms)
{
    int found;
    if (timeout_ms == 0)
        found = epoll_wait(self->epoll_fd, events, MAX_EVENTS, 0);
    else {
        Py_BEGIN_ALLOW_THREADS
        found = epoll_wait(self->epoll_fd, events, MAX_EVENTS, timeout_ms);
        Py_END_ALLOW_THREADS
    }
    if (found >= 0)
        return found;
    if (errno != EINTR) {
        PyErr_SetFromErrno(PyExc_OSError);
        return -1;
    }
    return PyErr_CheckSignals() ? -1 : 0;
}

/* The events that Python sees to, as (fd, bits); NULL and an exception. */
static PyObject *
process_events(processor_end *self, const struct epoll_event *events, int count,
               int64_t now)
{
    PyObject *unusual = PyList_New(0);
    for (int i = 0; unusual != NULL && i < count; i++) {
        long bits = events[i].events;
        PyObject *fd = PyLong_FromLong(events[i].data.fd);
        PyObject *channel = NULL;
        enum outcome outcome = FAILED;
        if (fd != NULL)
            channel = PyDict_GetItemWithError(self->channels, fd);
        if (!PyErr_Occurred())
            outcome = channel == NULL ? UNUSUAL : process_event(self, channel, bits, now);
        if (outcome == UNUSUAL) {
            PyObject *event = Py_BuildValue("(Ol)", fd, bits);
            if (event == NULL || PyList_Append(unusual, event) < 0)
                outcome = FAILED;
            Py_XDECREF(event);
        }
        if (outcome == FAILED)
            Py_CLEAR(unusual);
        Py_XDECREF(fd);
    }
    return unusual;
}

/* Publish what there is room for; 0 and an exception. */
static int
publish_all(processor_end *self)
{
    if (PyList_GET_SIZE(self->unpublished) == 0)
        return 1;
    Py_ssize_t count = ring_put(self->requests, self->unpublished);
    return count >= 0 && PyList_SetSlice(self->unpublished, 0, count, NULL) == 0;
}

/* turn(timeout_ms) -> (events, answers, now_ns, waited_ns, is_busy)
 *
 * What the lists say is left to Python: events as (fd, bits), answers as answer() has
 * them. Requests for which the ring has no room stay in the list of the unpublished.
 */
PyObject *
processor_turn(PyObject *object, PyObject *const *args, Py_ssize_t nargs)
{
    processor_end *self = (processor_end *)object;
    struct epoll_event events[MAX_EVENTS];
    if (nargs != 1 || self->channels == NULL)
        return PyErr_Format(PyExc_TypeError, "turn(timeout_ms), after set_turn()");
    long timeout_ms = PyLong_AsLong(args[0]);
    if (timeout_ms < 0 || timeout_ms > INT32_MAX)
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "%ld ms", timeout_ms);
    int64_t before = timeout_ms ? monotonic_ns() : 0;
    int found = wait_for_events(self, events, (int)timeout_ms);
    if (found < 0)
        return NULL;
    int64_t now = monotonic_ns();
    PyObject *left = process_events(self, events, found, now), *slots = NULL,
             *answers = NULL, *result = NULL;
    int64_t waited = timeout_ms ? now - before : 0;
    count(self, L.COUNT_POLLS, 1);
    if (timeout_ms && !found && waited < timeout_ms * (int64_t)500000)
        count(self, L.COUNT_EMPTY_POLLS, 1); /* see network/polls.py */
    /* Its owner is awake, and looks there before it sleeps again. */
    ring_forget_sleeper(self->responses);
    if (left != NULL && publish_all(self))
        slots = ring_pop(self->responses);
    if (slots != NULL) {
        int is_blocked = PyList_GET_SIZE(self->unpublished) > 0;
        answers = answer_slots(self, slots, now, !is_blocked);
        if (answers != NULL && (is_blocked || publish_all(self)))
            result = Py_BuildValue("(OOLLO)", left, answers, (long long)now,
                                   (long long)waited,
                                   found || PyList_GET_SIZE(slots) ? Py_True : Py_False);
    }
    Py_XDECREF(left);
    Py_XDECREF(slots);
    Py_XDECREF(answers);
    return result;
}
