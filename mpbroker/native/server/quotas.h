/* What requests cost their clients, for those that the core executes.
 *
 * A request is charged before it is executed, so that handlers do not exceed a quota
 * together; if it is left to Python after all, the charge is given back. A client that
 * would be over a quota is left to Python, uncharged: Python throttles it. Which rows
 * are a client's, server/quotas/client_quotas.py says, in the dict `clients`.
 */

#ifndef MPBROKER_QUOTAS_H
#define MPBROKER_QUOTAS_H

#include "ipc/quota_table.h"

typedef struct handler_end handler_end;

typedef struct {
    quota_table table;
    PyObject *clients; /* dict: principal and client id -> two limits, bytes and time */
    char are_set;      /* whether requests cost their clients anything */
} quotas;

/* What a request that is being executed has been charged. */
typedef struct {
    int is_charged;
    int64_t begun_ns, size;
    quota_limit bytes, time;
} quota_charge;

/* Charge a request; 0: leave it to Python. */
int quota_begin(const handler_end *self, int64_t slot, int64_t api_key,
                const uint8_t *frame, int64_t size, quota_charge *charge);

/* Charge an executed request's time, unless it has no answer; or give back what one was
 * charged that is left to Python. `is_held_back`: it has an answer, which goes later,
 * so that its slot does not say so yet. */
void quota_end(const handler_end *self, int64_t slot, int was_executed, int is_held_back,
               const quota_charge *charge);

PyObject *handler_set_quotas(PyObject *object, PyObject *args);

#endif
