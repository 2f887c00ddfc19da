/* A handler's wake-up, in one call: wait, take the requests that are there and, if
 * there is one, execute it and push its answer. After a sleep Python runs slowly,
 * because its memory has left the processor's caches; by then the answer is on its way.
 */

#ifndef MPBROKER_HANDLER_WAIT_H
#define MPBROKER_HANDLER_WAIT_H

#include "base/python_objects.h"

PyObject *handler_set_wait(PyObject *object, PyObject *args);
PyObject *handler_wait(PyObject *object, PyObject *const *args, Py_ssize_t nargs);

#endif
