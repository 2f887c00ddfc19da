/* A handler's wake-up: wait, take what is there and, if that is one request, execute it
 * and push its answer, in one call. After a sleep Python comes slowly back from memory;
 * by then the answer is on its way.
 */

#ifndef MPBROKER_HANDLER_WAIT_H
#define MPBROKER_HANDLER_WAIT_H

#include "base/python_objects.h"

PyObject *handler_set_wait(PyObject *object, PyObject *args);
PyObject *handler_wait(PyObject *object, PyObject *const *args, Py_ssize_t nargs);

#endif
