/* A processor's wake-ups: wait for events, receive and publish what is whole, send the
 * answers that are there, publish what their connections had sent meanwhile.
 *
 * After a few milliseconds of sleep all that a process touches has to come from memory
 * again, and Python touches much: in one call the next process is woken, and the answer
 * goes out, before Python gets to see what else there is. And if there is nothing else,
 * the call goes back to sleep: on a core that both share, who was woken runs only then.
 * The twin is Processor.turn.
 */

#include "network/processor_end.h"

#include <errno.h>
#include <sys/epoll.h>

#define MAX_EVENTS 256

/* Whether there may be news since Python was last told: whoever has any rings after its
 * store, and Python looks after this.
 */
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
        self->news[i] = -1; /* the first bell is news */
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
        if (events[i].data.fd == self->doorbell_fd && !has_news(self))
            continue; /* about answers, which are looked for anyway */
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

typedef struct {
    PyObject *events, *answers; /* what is left to Python */
    int64_t now, waited;
    int found; /* whether there was anything to do */
} pass;

static void
forget_lists(pass *p)
{
    Py_CLEAR(p->events);
    Py_CLEAR(p->answers);
}

/* Send these answers, and publish what their connections had sent meanwhile. */
static int
answer_and_publish(processor_end *self, PyObject *slots, pass *p)
{
    int is_blocked = PyList_GET_SIZE(self->unpublished) > 0;
    p->found |= PyList_GET_SIZE(slots) > 0;
    p->answers = answer_slots(self, slots, p->now, !is_blocked);
    return p->answers != NULL && (is_blocked || publish_all(self));
}

/* One wake-up; 0 and an exception. */
static int
wake_up(processor_end *self, int timeout_ms, pass *p)
{
    struct epoll_event events[MAX_EVENTS];
    int64_t before = timeout_ms ? monotonic_ns() : 0;
    int found = wait_for_events(self, events, timeout_ms);
    if (found < 0)
        return 0;
    p->now = monotonic_ns();
    p->found = found > 0;
    p->events = process_events(self, events, found, p->now);
    int64_t waited = timeout_ms ? p->now - before : 0;
    p->waited += waited;
    count(self, L.COUNT_POLLS, 1);
    if (timeout_ms && !found && waited < timeout_ms * (int64_t)500000)
        count(self, L.COUNT_EMPTY_POLLS, 1); /* see network/polls.py */
    /* Its owner is awake, and looks there before it sleeps again. */
    ring_forget_sleeper(self->responses);
    if (p->events == NULL || !publish_all(self))
        return 0;
    PyObject *slots = ring_pop(self->responses, 0);
    int result = slots != NULL && answer_and_publish(self, slots, p);
    Py_XDECREF(slots);
    return result;
}

/* Whether Python would do nothing now but come here again, to wait. */
static int
may_go_on(const processor_end *self, const pass *p, int64_t until)
{
    return p->found && PyList_GET_SIZE(p->events) == 0
           && PyList_GET_SIZE(p->answers) == 0
           && PyList_GET_SIZE(self->unpublished) == 0 && p->now < until;
}

/* Answer what is there, or wait for more as ``turn(timeout_ms)`` does; 0 and an exception. */
static int
go_on(processor_end *self, int64_t until, pass *p)
{
    if (PyErr_CheckSignals())
        return 0;
    PyObject *slots = ring_pop(self->responses, 1);
    if (slots == NULL)
        return 0;
    int result;
    if (PyList_GET_SIZE(slots) > 0) {
        Py_CLEAR(p->answers);
        p->now = monotonic_ns();
        result = answer_and_publish(self, slots, p);
    }
    else {
        forget_lists(p);
        result = wake_up(self, (int)((until - p->now + 999999) / 1000000), p);
    }
    Py_DECREF(slots);
    return result;
}

/* turn(timeout_ms, may_stay) -> (events, answers, now_ns, waited_ns, is_busy)
 *
 * What the lists say is left to Python: events as (fd, bits), answers as answer() has
 * them. Requests for which the ring has no room stay in the list of the unpublished.
 * Who may stay comes back when there is something for Python, or the time is over.
 */
PyObject *
processor_turn(PyObject *object, PyObject *const *args, Py_ssize_t nargs)
{
    processor_end *self = (processor_end *)object;
    if (nargs != 2 || self->channels == NULL)
        return PyErr_Format(PyExc_TypeError, "turn(timeout_ms, may_stay), after set_turn()");
    long timeout_ms = PyLong_AsLong(args[0]);
    if (timeout_ms < 0 || timeout_ms > INT32_MAX)
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "%ld ms", timeout_ms);
    int may_stay = args[1] == Py_True && timeout_ms;
    int64_t until = may_stay ? monotonic_ns() + timeout_ms * (int64_t)1000000 : 0;
    pass p = {NULL, NULL, 0, 0, 0};
    int is_right = wake_up(self, (int)timeout_ms, &p);
    while (is_right && may_stay && may_go_on(self, &p, until))
        is_right = go_on(self, until, &p);
    PyObject *result = NULL;
    if (is_right)
        result = Py_BuildValue("(OOLLO)", p.events, p.answers, (long long)p.now,
                               (long long)p.waited, p.found ? Py_True : Py_False);
    forget_lists(&p);
    return result;
}
