/* A processor's wake-ups: wait for events, receive and publish what is whole, send the
 * answers that are there, publish what their connections had sent meanwhile; in one
 * call.
 *
 * After a few milliseconds of sleep all that a process touches has to come from memory
 * again, and Python touches much: in one call the next process is woken, and the answer
 * goes out, before Python gets to see what else there is. And if there is nothing else,
 * the call goes back to sleep: where two processes share a core, the woken one runs
 * only then.
 */

#ifndef MPBROKER_PROCESSOR_TURN_H
#define MPBROKER_PROCESSOR_TURN_H

#include "base/python_objects.h"

PyObject *processor_set_turn(PyObject *object, PyObject *const *args, Py_ssize_t nargs);
PyObject *processor_turn(PyObject *object, PyObject *const *args, Py_ssize_t nargs);

#endif
