/* Fetch requests: find their records, answer them, and try them again while they are
 * parked.
 *
 * A fetch changes only the answer of its slot. So it may be tried again and again while
 * its request is parked, and nothing is kept between the tries.
 */

#ifndef MPBROKER_FETCH_H
#define MPBROKER_FETCH_H

#include "base/outcome.h"
#include "server/handler_end.h"

/* Answer a fetch, if there are enough records. `is_parked`: this handler has parked the
 * slot; `must_answer`: answer with the records that there are. MUST_WAIT: nothing was
 * done. */
enum outcome execute_fetch(handler_end *self, int64_t slot, const uint8_t *frame,
                           int64_t size, int is_parked, int must_answer);

PyObject *handler_set_fetches(PyObject *object, PyObject *args);
PyObject *handler_fetch(PyObject *object, PyObject *const *args, Py_ssize_t nargs);
PyObject *handler_fetch_waits(PyObject *object, PyObject *unused);

#endif
