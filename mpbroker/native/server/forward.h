/* Requests that a handler only forwards: those of groups and transactions go to the
 * coordinator's lane, whatever they say. Who may send them, and what they cost, is
 * asked over there.
 */

#ifndef MPBROKER_FORWARD_H
#define MPBROKER_FORWARD_H

#include "base/python_objects.h"

typedef struct handler_end handler_end;

#define MAX_API_KEYS 128

typedef struct {
    int oldest, newest; /* versions; the newest is -1: it is not forwarded */
    int flexible_from;
} forwarded_api;

/* Forward a claimed slot's request, if it is the coordinator's and has a header that
 * the core reads. 1: neither the slot nor its request is ours any more. 0: nothing was
 * done. */
int forward_request(const handler_end *self, int64_t slot, int64_t api_key,
                    const uint8_t *frame, int64_t size);

PyObject *handler_set_lane(PyObject *object, PyObject *args);

#endif
