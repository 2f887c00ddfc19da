/* A processor's end of the request channel: it receives the requests of connections,
 * and sends their answers.
 *
 * It does the usual case: a whole frame in the slot's block, and an answer that is one
 * run of bytes and is sent at once. The rest is left to Python, in a state from which
 * Python can continue: frames in extents, partial frames and answers, hang-ups.
 *
 * It works on the Channel objects of network/channel.py, and on words of the control
 * segment that only this processor writes: its connections' rows, its counters and
 * metrics, and line 1 of its slots. It clears line 2 of a slot before it publishes the
 * request.
 */

#ifndef MPBROKER_PROCESSOR_END_H
#define MPBROKER_PROCESSOR_END_H

#include "base/outcome.h"
#include "ipc/layout.h"
#include "ipc/shared_memory.h"

/* The offsets of Channel's fields. */
typedef struct {
    Py_ssize_t fd, row, state, readable, closing, waiting, slot, block, base, start, end,
        frame_end, extent, sent, active_ns;
} channel_fields;

#define NEWS_WORDS 4

typedef struct {
    PyObject_HEAD
    PyObject *keep; /* objects that keep the mappings and the type alive */
    memory control, arena;
    int64_t counters, first_slot, processor;
    PyObject *reading, *in_flight_state; /* members of ConnectionState */
    PyObject *in_flight;   /* list: the channel of each slot's request */
    PyObject *unpublished; /* list: slots for the next flush */
    channel_fields at;
    /* -- a whole turn: processor_turn.c */
    PyObject *requests, *responses; /* the rings; NULL before set_turn() */
    PyObject *channels;             /* dict: channel by descriptor */
    int epoll_fd, doorbell_fd;
    /* The words that may have changed when the doorbell rings for another reason than
     * answers, and their values when Python last looked. */
    int64_t news_words[NEWS_WORDS], news[NEWS_WORDS];
} processor_end;

/* Add to one of this processor's counters (ProcessorCounter). */
static inline void
count(const processor_end *self, int64_t counter, int64_t amount)
{
    add_to_word(&self->control, self->counters + counter, amount);
}

/* Handle one event of a channel's socket. */
enum outcome process_event(processor_end *self, PyObject *channel, long event,
                           int64_t now);

/* Send the answers of a list of slots, and receive the next requests of their
 * connections if `may_receive`. Return the answers that are left to Python, as a list
 * of (channel, slot, bytes sent); -1 bytes: the answer was sent, and the channel has to
 * be read. NULL and an exception. */
PyObject *answer_slots(processor_end *self, PyObject *slots, int64_t now,
                       int may_receive);

extern PyTypeObject ProcessorEnd_Type;

#endif
