/* Python twin: Processor.turn in network/processor.py. */

#include "network/processor_turn.h"

#include "base/clock.h"
#include "ipc/ring.h"
#include "network/processor_end.h"

#include <errno.h>
#include <sys/epoll.h>

#define MAX_EVENTS 256
#define NS_PER_MS 1000000

/* Return whether one of the news words has changed since Python last looked. A process
 * that has news stores a word first and rings the doorbell afterwards. Python looks
 * after this, so it also finds news that come after this. */
static int
has_news(processor_end *self)
{
    int found = 0;
    for (int i = 0; i < NEWS_WORDS; i++) {
        int64_t word = load(&self->control, self->news_words[i]);
        found |= word != self->news[i];
        self->news[i] = word;
    }
    return found;
}

static int
take_news_words(processor_end *self, PyObject *words)
{
    for (int i = 0; i < NEWS_WORDS; i++) {
        int64_t word = PyLong_AsLongLong(PyTuple_GET_ITEM(words, i));
        if (word == -1 && PyErr_Occurred())
            return 0;
        if (!has_words(&self->control, word, 1)) {
            PyErr_SetString(PyExc_IndexError, "no such word");
            return 0;
        }
        self->news_words[i] = word;
        self->news[i] = -1; /* so the first ring counts as news */
    }
    return 1;
}

PyObject *
processor_set_turn(PyObject *object, PyObject *const *args, Py_ssize_t nargs)
{
    processor_end *self = (processor_end *)object;
    if (nargs != 6 || !PyObject_TypeCheck(args[1], &RequestRing_Type)
        || !PyObject_TypeCheck(args[2], &ResponseRing_Type) || !PyDict_Check(args[3])
        || !PyTuple_Check(args[5]) || PyTuple_GET_SIZE(args[5]) != NEWS_WORDS)
        return PyErr_Format(PyExc_TypeError, "set_turn(epoll_fd, request_ring, "
                                             "response_ring, channels, doorbell_fd, "
                                             "news_words)");
    long fds[2] = {PyLong_AsLong(args[0]), PyLong_AsLong(args[4])};
    for (int i = 0; i < 2; i++)
        if (fds[i] < 0 || fds[i] > INT32_MAX)
            return PyErr_Occurred() ? NULL
                                    : PyErr_Format(PyExc_ValueError, "fd %ld", fds[i]);
    if (!take_news_words(self, args[5]))
        return NULL;
    self->epoll_fd = (int)fds[0];
    self->doorbell_fd = (int)fds[1];
    Py_XSETREF(self->requests, Py_NewRef(args[1]));
    Py_XSETREF(self->responses, Py_NewRef(args[2]));
    Py_XSETREF(self->channels, Py_NewRef(args[3]));
    Py_RETURN_NONE;
}

/* Wait for events, and return their number; -1 and an exception. */
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

/* Handle events; return those that are left to Python, as (fd, bits); NULL and an
 * exception. */
static PyObject *
process_events(processor_end *self, const struct epoll_event *events, int count,
               int64_t now)
{
    PyObject *left = PyList_New(0);
    for (int i = 0; left != NULL && i < count; i++) {
        long bits = events[i].events;
        if (events[i].data.fd == self->doorbell_fd && !has_news(self))
            continue; /* it rang for answers, which are looked for anyway */
        PyObject *fd = PyLong_FromLong(events[i].data.fd);
        PyObject *channel = NULL;
        enum outcome outcome = FAILED;
        if (fd != NULL)
            channel = PyDict_GetItemWithError(self->channels, fd);
        if (!PyErr_Occurred())
            outcome = channel == NULL ? LEFT_TO_PYTHON
                                      : process_event(self, channel, bits, now);
        if (outcome == LEFT_TO_PYTHON) {
            PyObject *event = Py_BuildValue("(Ol)", fd, bits);
            if (event == NULL || PyList_Append(left, event) < 0)
                outcome = FAILED;
            Py_XDECREF(event);
        }
        if (outcome == FAILED)
            Py_CLEAR(left);
        Py_XDECREF(fd);
    }
    return left;
}

/* Publish as many requests as the ring has room for; 0 and an exception. */
static int
publish_all(processor_end *self)
{
    if (PyList_GET_SIZE(self->unpublished) == 0)
        return 1;
    Py_ssize_t count = ring_put(self->requests, self->unpublished);
    return count >= 0 && PyList_SetSlice(self->unpublished, 0, count, NULL) == 0;
}

/* The state of one call of turn(). */
typedef struct {
    PyObject *events, *answers; /* those of the last wake-up that are left to Python */
    int64_t now, waited; /* ns */
    int found; /* whether the last wake-up had anything to do */
} turn_state;

static void
release_lists(turn_state *t)
{
    Py_CLEAR(t->events);
    Py_CLEAR(t->answers);
}

/* Send these answers, and publish the requests that their connections had sent
 * meanwhile; 0 and an exception. While the request ring is full nothing more is
 * received. */
static int
answer_and_publish(processor_end *self, PyObject *slots, turn_state *t)
{
    int is_blocked = PyList_GET_SIZE(self->unpublished) > 0;
    t->found |= PyList_GET_SIZE(slots) > 0;
    t->answers = answer_slots(self, slots, t->now, !is_blocked);
    return t->answers != NULL && (is_blocked || publish_all(self));
}

/* Wait for events, and then do all that there is to do; 0 and an exception. */
static int
wake_up(processor_end *self, int timeout_ms, turn_state *t)
{
    struct epoll_event events[MAX_EVENTS];
    int64_t before = timeout_ms ? monotonic_ns() : 0;
    int found = wait_for_events(self, events, timeout_ms);
    if (found < 0)
        return 0;
    t->now = monotonic_ns();
    t->found = found > 0;
    t->events = process_events(self, events, found, t->now);
    int64_t waited = timeout_ms ? t->now - before : 0;
    t->waited += waited;
    count(self, L.COUNT_POLLS, 1);
    if (timeout_ms && !found && waited < timeout_ms * (int64_t)NS_PER_MS / 2)
        count(self, L.COUNT_EMPTY_POLLS, 1); /* see network/polls.py */
    /* This process is awake, and reads the ring before it sleeps again. */
    ring_forget_sleeper(self->responses);
    if (t->events == NULL || !publish_all(self))
        return 0;
    PyObject *slots = ring_pop(self->responses, 0);
    int result = slots != NULL && answer_and_publish(self, slots, t);
    Py_XDECREF(slots);
    return result;
}

/* Return whether Python has nothing to do but to call this again, to wait. */
static int
may_continue(const processor_end *self, const turn_state *t, int64_t until)
{
    return t->found && PyList_GET_SIZE(t->events) == 0
           && PyList_GET_SIZE(t->answers) == 0
           && PyList_GET_SIZE(self->unpublished) == 0 && t->now < until;
}

/* Send the answers that are there, or wait for more events as Processor.turn does; 0
 * and an exception. */
static int
continue_turn(processor_end *self, int64_t until, turn_state *t)
{
    if (PyErr_CheckSignals())
        return 0;
    PyObject *slots = ring_pop(self->responses, 1);
    if (slots == NULL)
        return 0;
    int result;
    if (PyList_GET_SIZE(slots) > 0) {
        Py_CLEAR(t->answers);
        t->now = monotonic_ns();
        result = answer_and_publish(self, slots, t);
    }
    else {
        release_lists(t);
        const int64_t left_ns = until - t->now;
        result = wake_up(self, (int)((left_ns + NS_PER_MS - 1) / NS_PER_MS), t);
    }
    Py_DECREF(slots);
    return result;
}

/* turn(timeout_ms, may_stay) -> (events, answers, now_ns, waited_ns, is_busy)
 *
 * The lists have the events that are left to Python, as (fd, bits), and the answers
 * that are left to Python, as answer() returns them. Requests for which the ring has no
 * room stay in the list of unpublished slots. With `may_stay` the call returns when
 * there is something for Python to do, or when the time is over.
 */
PyObject *
processor_turn(PyObject *object, PyObject *const *args, Py_ssize_t nargs)
{
    processor_end *self = (processor_end *)object;
    if (nargs != 2 || self->channels == NULL)
        return PyErr_Format(PyExc_TypeError,
                            "turn(timeout_ms, may_stay), after set_turn()");
    long timeout_ms = PyLong_AsLong(args[0]);
    if (timeout_ms < 0 || timeout_ms > INT32_MAX)
        return PyErr_Occurred() ? NULL
                                : PyErr_Format(PyExc_ValueError, "%ld ms", timeout_ms);
    int may_stay = args[1] == Py_True && timeout_ms;
    int64_t until = may_stay ? monotonic_ns() + timeout_ms * (int64_t)NS_PER_MS : 0;
    turn_state t = {NULL, NULL, 0, 0, 0};
    int is_right = wake_up(self, (int)timeout_ms, &t);
    while (is_right && may_stay && may_continue(self, &t, until))
        is_right = continue_turn(self, until, &t);
    PyObject *result = NULL;
    if (is_right)
        result = Py_BuildValue("(OOLLO)", t.events, t.answers, (long long)t.now,
                               (long long)t.waited, t.found ? Py_True : Py_False);
    release_lists(&t);
    return result;
}
