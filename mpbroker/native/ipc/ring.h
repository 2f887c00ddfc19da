/* The rings: requests from processors to handlers, answers from handlers to a
 * processor.
 *
 *     words     written by                                   in the control segment
 *     mutex     its owner
 *     entries   put, push: under the mutex
 *     tail      put, push: under the mutex; commits either operation
 *     head      take: under the mutex; pop: by the only reader, without it
 *     sleepers  all, under the mutex; a processor that is awake also without it
 *     state     of each slot: put -> READY, take -> CLAIMED, pop -> RESPONDING
 *
 * The Python twin ipc/ring.py writes the same words, and repairs them after a death.
 */

#ifndef MPBROKER_RING_H
#define MPBROKER_RING_H

#include "base/python_objects.h"

extern PyTypeObject RequestRing_Type, ResponseRing_Type;

/* Publish slots on a RequestRing in order, as many as fit. Return their number; -1 and
 * an exception. */
Py_ssize_t ring_put(PyObject *ring, PyObject *slots);

/* Claim a fair share of the slots on a RequestRing for a handler: their number divided
 * by `handlers`, at most `limit`. Return a list; NULL and an exception. `arm`: if there
 * are no slots, mark the handler as asleep, so that its doorbell will ring. */
PyObject *ring_take(PyObject *ring, int64_t limit, int64_t handler, int64_t handlers,
                    int arm);

/* Push answered slots onto a ResponseRing; 0 and an exception. */
int ring_push(PyObject *ring, const int64_t *slots, Py_ssize_t count);

/* Take all slots from a ResponseRing. Return a list; NULL and an exception. `arm`: if
 * there are no slots, mark the processor as asleep, so that its doorbell will ring. */
PyObject *ring_pop(PyObject *ring, int arm);

/* Clear the sleep flag of a ResponseRing, because its only reader is awake: no doorbell
 * needs to ring. */
void ring_forget_sleeper(PyObject *ring);

#endif
