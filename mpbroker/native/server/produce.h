/* Produce requests: check which partitions they may append to, append, and answer. */

#ifndef MPBROKER_PRODUCE_H
#define MPBROKER_PRODUCE_H

#include "base/outcome.h"
#include "server/handler_end.h"

/* Execute a Produce. `*flags`: flags of result_flags.h for the result; or
 * ROW_IS_HELD, only with LEFT_TO_PYTHON. */
enum outcome execute_produce(handler_end *self, int64_t slot, uint8_t *frame,
                             int64_t size, int *flags);

PyObject *handler_set_tables(PyObject *object, PyObject *args);
PyObject *handler_set_producers(PyObject *object, PyObject *args);
PyObject *handler_set_transactions(PyObject *object, PyObject *args);
PyObject *handler_appended(PyObject *object, PyObject *unused);

#endif
