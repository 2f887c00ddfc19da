/* Requests that a handler only forwards: those about groups and transactions go to the
 * coordinator's lane, whatever their content. The coordinator checks if the sender is
 * authorized, and charges its quotas.
 */

#ifndef MPBROKER_FORWARD_H
#define MPBROKER_FORWARD_H

#include "base/python_objects.h"

typedef struct handler_end handler_end;

#define MAX_API_KEYS 128

typedef struct {
    int oldest, newest; /* versions; if newest is -1, the API is not forwarded */
    int flexible_from;
} forwarded_api;

/* Forward a claimed slot's request, if it is for the coordinator and has a header that
 * the core can read. 1: forwarded; this process must not touch the slot or its request
 * any more. 0: nothing was done. */
int forward_request(const handler_end *self, int64_t slot, int64_t api_key,
                    const uint8_t *frame, int64_t size);

PyObject *handler_set_lane(PyObject *object, PyObject *args);

#endif
