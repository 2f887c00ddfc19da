/* A processor's end of the request channel: the requests and answers of its
 * connections, as far as they are the same for nearly all: a whole frame in the slot's
 * block, and an answer that is one run of bytes and goes out at once. The rest is left
 * to Python, in a state from which that goes on: frames in extents, partial frames and
 * answers, hang-ups.
 *
 * It works on the Channel objects of network/channel.py, and on words of the control
 * segment that only this processor writes: its connections' rows, its counters and
 * metrics, and line 1 of its slots. Line 2 of a slot it clears before it publishes the
 * request.
 */

#ifndef MPBROKER_PROCESSOR_END_H
#define MPBROKER_PROCESSOR_END_H

#include "base/outcome.h"
#include "ipc/layout.h"
#include "ipc/shared_memory.h"

/* Where the fields of Channel are. */
typedef struct {
    Py_ssize_t fd, row, state, readable, closing, waiting, slot, block, base, start, end,
        frame_end, extent, sent, active_ns;
} channel_fields;

#define NEWS_WORDS 3

typedef struct {
    PyObject_HEAD
    PyObject *keep; /* what keeps the mappings and the type alive */
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
    /* What a doorbell may be about but answers: the words, and what Python was told. */
    int64_t news_words[NEWS_WORDS], news[NEWS_WORDS];
} processor_end;

/* Add to a counter of this processor's (ProcessorCounter). */
static inline void
count(const processor_end *self, int64_t counter, int64_t amount)
{
    add_to_word(&self->control, self->counters + counter, amount);
}

/* See to one event of a channel's socket. */
enum outcome process_event(processor_end *self, PyObject *channel, long event,
                           int64_t now);

/* Send the answers of a list of slots, and receive the next requests of their
 * connections if `may_receive`. Return what is left to Python: a list of (channel,
 * slot, bytes sent); -1 bytes: all is sent, and the channel wants to be read from. NULL
 * and an exception. */
PyObject *answer_slots(processor_end *self, PyObject *slots, int64_t now,
                       int may_receive);

extern PyTypeObject ProcessorEnd_Type;

#endif
