/* Fetches: which records they give, the answer, and trying them again while they wait.
 *
 * A fetch changes nothing but its slot's answer, so it may be tried again and again
 * while its request is parked: nothing is kept between the tries.
 */

#ifndef MPBROKER_FETCH_H
#define MPBROKER_FETCH_H

#include "base/outcome.h"
#include "server/handler_end.h"

/* Answer a fetch, if there is enough. `is_parked`: the slot is, in this handler's care;
 * `must_answer`: with what there is. MUST_WAIT: nothing was done. */
enum outcome execute_fetch(handler_end *self, int64_t slot, const uint8_t *frame,
                           int64_t size, int is_parked, int must_answer);

PyObject *handler_set_fetches(PyObject *object, PyObject *args);
PyObject *handler_fetch(PyObject *object, PyObject *const *args, Py_ssize_t nargs);
PyObject *handler_fetch_waits(PyObject *object, PyObject *unused);

#endif
