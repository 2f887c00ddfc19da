/* The request handler of the core: it executes, charges, authorizes and answers
 * requests of the kinds that make up nearly all load, and forwards requests to the
 * coordinator.
 *
 * These kinds are a Produce of uncompressed batches, a Fetch at an offset whose position
 * in the file this process knows, and requests of other APIs whose answers may be
 * repeated. All other requests are left to Python, and so are all requests while the
 * metadata log has news for the tables. If a part of a request is left to Python,
 * nothing of it is done; but see append_partitions().
 *
 * Python twin: server/request_handler.py and the services behind it.
 */

#ifndef MPBROKER_HANDLER_EXECUTE_H
#define MPBROKER_HANDLER_EXECUTE_H

#include "server/handler_end.h"
#include "server/result_flags.h"

/* Execute a claimed slot's request, and return flags of result_flags.h; NULL and an
 * exception. */
PyObject *handler_execute(PyObject *object, PyObject *slot);

#endif
