/* What the files of a processor's end share: processor_end.c (one connection's requests
 * and answers) and processor_turn.c (a whole wake-up).
 */

#ifndef MPBROKER_PROCESSOR_END_H
#define MPBROKER_PROCESSOR_END_H

#include "core.h"

/* Where the slots of network's Channel are in the object. */
typedef struct {
    Py_ssize_t fd, row, state, readable, closing, waiting, slot, block, base, start, end,
        frame_end, extent, sent, active_ns;
} channel_fields;

#define NEWS_WORDS 3

typedef struct {
    PyObject_HEAD
    PyObject *keep;
    memory control, arena;
    int64_t counters, first_slot, processor;
    PyObject *reading, *in_flight_state; /* members of ConnectionState */
    PyObject *in_flight;   /* list: the channel of each slot's request */
    PyObject *unpublished; /* list: slots for the next flush */
    PyObject *requests, *responses; /* the rings, and */
    PyObject *channels;             /* dict: those of processor_turn.c; or NULL */
    int epoll_fd, doorbell_fd;
    /* What a doorbell may be about but answers: where it is, and as it was last told. */
    int64_t news_words[NEWS_WORDS], news[NEWS_WORDS];
    channel_fields at;
} processor_end;

static inline void
count(const processor_end *self, int64_t counter, int64_t amount)
{
    int64_t at = self->counters + counter;
    store(&self->control, at, load_relaxed(&self->control, at) + amount);
}

enum outcome {
    FAILED = -1, /* an exception is set */
    UNUSUAL = 0, /* Python goes on from here */
    PLAIN = 1,
};

/* One event of a channel's socket. */
enum outcome process_event(processor_end *self, PyObject *channel, long event, int64_t now);

/* Send the answers of a list of slots; a list of (channel, slot, bytes sent) of what is
 * not plain, or NULL and an exception.
 */
PyObject *answer_slots(processor_end *self, PyObject *slots, int64_t now, int may_receive);

PyObject *processor_set_turn(PyObject *object, PyObject *const *args, Py_ssize_t nargs);
PyObject *processor_turn(PyObject *object, PyObject *const *args, Py_ssize_t nargs);

#endif
