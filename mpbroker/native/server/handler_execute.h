/* The request handler of the core: it executes, charges, authorizes and answers
 * requests of the kinds that make up nearly all load, and forwards the coordinator's.
 *
 * Those are an ApiVersions that was answered before, a Produce of uncompressed batches
 * and a Fetch of what this process has seen end or begin. All others are left to
 * Python, and so is everything while the metadata log has news for the tables. Nothing
 * of a request is done if any of it is left; but see append_partitions().
 *
 * Python twin: server/request_handler.py and the services behind it.
 */

#ifndef MPBROKER_HANDLER_EXECUTE_H
#define MPBROKER_HANDLER_EXECUTE_H

#include "base/outcome.h"
#include "server/handler_end.h"

/* What execute() returns; the module has these as constants. None: left to Python. An
 * API's key: the request is answered, or forwarded. What is added to the key: */
enum result_flag {
    RESULT_API_KEY = 0xFFFF, /* the bits of the key */
    /* Handlers wait for a partition that was appended to: appended() has them. */
    RESULT_NOTIFY = 0x10000,
    /* The answer to a Produce is written, and may go when the records are on disk:
     * appended(). Or a Fetch has to wait for records: fetch_waits(). */
    RESULT_WAITS = 0x20000,
    /* Of a transaction, whose client has nothing else under way: sync at once. */
    RESULT_AT_ONCE = 0x40000,
    /* The coordinator has to take the request first, for its transaction is not open in
     * one of the partitions. */
    RESULT_BEGINS = 0x80000,
};
/* Or, in place of a key, ROW_IS_HELD: left to Python, behind settling that row. */

/* Return whether the tables hold: there are any, and the metadata log has no news. */
int are_current(const handler_end *self);

/* Execute a claimed slot's request; NULL and an exception. */
PyObject *handler_execute(PyObject *object, PyObject *slot);

#endif
