/* Where batches begin in a segment: the dict `positions` of a log, which AppendPlan and
 * ReadPlan share with it. Offset -> (segment, position). This process's own.
 */

#ifndef MPBROKER_POSITIONS_H
#define MPBROKER_POSITIONS_H

#include "base/python_objects.h"

/* Note where the batch at an offset begins, or will; 0 and an exception. `positions`
 * that are no dict (None: no reader has come) are left alone. */
int remember_position(PyObject *positions, PyObject *segment, int64_t offset,
                      int64_t position);

/* Return where in a segment the batch begins that holds an offset; -1: unknown, perhaps
 * with an exception. */
int64_t find_position(PyObject *positions, PyObject *segment, int64_t offset);

#endif
