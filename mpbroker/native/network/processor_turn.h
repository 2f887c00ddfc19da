/* A processor's wake-ups, in one call: wait for events, receive and publish the
 * requests that are whole, send the answers that are there, and publish the requests
 * that their connections had sent meanwhile.
 *
 * After a few milliseconds of sleep all memory that a process uses has to be loaded
 * into the processor's caches again, and Python uses much of it. In one call the next
 * process is woken, and the answer is sent, before Python code runs. If there is
 * nothing else to do, the call sleeps again: where two processes share a core, the
 * woken one runs only then.
 */

#ifndef MPBROKER_PROCESSOR_TURN_H
#define MPBROKER_PROCESSOR_TURN_H

#include "base/python_objects.h"

PyObject *processor_set_turn(PyObject *object, PyObject *const *args, Py_ssize_t nargs);
PyObject *processor_turn(PyObject *object, PyObject *const *args, Py_ssize_t nargs);

#endif
