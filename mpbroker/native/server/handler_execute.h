/* The request handler of the core: it executes, charges, authorizes and answers
 * requests of the kinds that make up nearly all load, and forwards requests to the
 * coordinator.
 *
 * These kinds are an ApiVersions that was answered before, a Produce of uncompressed
 * batches, and a Fetch at an offset whose position in the file this process knows. All
 * other requests are left to Python, and so are all requests while the metadata log has
 * news for the tables. If a part of a request is left to Python, nothing of it is done;
 * but see append_partitions().
 *
 * Python twin: server/request_handler.py and the services behind it.
 */

#ifndef MPBROKER_HANDLER_EXECUTE_H
#define MPBROKER_HANDLER_EXECUTE_H

#include "base/outcome.h"
#include "server/handler_end.h"

/* The results of execute(); the module has these flags as constants. None: left to
 * Python. An API's key: the request is answered or forwarded. These flags are added to
 * the key: */
enum result_flag {
    RESULT_API_KEY = 0xFFFF, /* the bits of the key */
    /* Handlers wait for a partition that was appended to: appended() returns them. */
    RESULT_NOTIFY = 0x10000,
    /* The answer to a Produce is written, and may be sent when the records are on disk:
     * see appended(). Or a Fetch has to wait for records: see fetch_waits(). */
    RESULT_WAITS = 0x20000,
    /* The Produce is part of a transaction, and its client sends nothing else before
     * the answer: sync at once. */
    RESULT_AT_ONCE = 0x40000,
    /* The coordinator has to get the request first, because its transaction is not open
     * in one of the partitions. */
    RESULT_BEGINS = 0x80000,
};
/* In place of a key the result may be ROW_IS_HELD: the request is left to Python, which
 * first settles that row. */

/* Return whether the tables are valid: set, and as new as the metadata log. */
int are_current(const handler_end *self);

/* Execute a claimed slot's request; NULL and an exception. */
PyObject *handler_execute(PyObject *object, PyObject *slot);

#endif
