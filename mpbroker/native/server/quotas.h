/* The quotas of clients, for requests that the core executes.
 *
 * A request is charged before it is executed, so that several handlers together do not
 * exceed a quota; if the request is left to Python after all, the charge is refunded. A
 * request whose client would exceed a quota is left to Python without a charge: Python
 * throttles the client. server/quotas/client_quotas.py stores the quota rows of each
 * client in the dict `clients`.
 */

#ifndef MPBROKER_QUOTAS_H
#define MPBROKER_QUOTAS_H

#include "ipc/quota_table.h"

typedef struct handler_end handler_end;

typedef struct {
    quota_table table;
    PyObject *clients; /* dict: principal and client id -> two limits, bytes and time */
    char are_set;      /* whether there are quotas */
} quotas;

/* The charge for a request that is being executed. */
typedef struct {
    int is_charged;
    int64_t begun_ns, size;
    quota_limit bytes, time;
} quota_charge;

/* Charge a request before it is executed; 0: leave the request to Python. */
int quota_begin(const handler_end *self, int64_t slot, int64_t api_key,
                const uint8_t *frame, int64_t size, quota_charge *charge);

/* Charge the time of an executed request, unless it has no answer; or refund the charge
 * of a request that is left to Python. `is_held_back`: the request has an answer that
 * is sent later, which its slot does not show yet. */
void quota_end(const handler_end *self, int64_t slot, int was_executed, int is_held_back,
               const quota_charge *charge);

PyObject *handler_set_quotas(PyObject *object, PyObject *args);

#endif
