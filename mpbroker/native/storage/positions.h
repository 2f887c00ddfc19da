/* Positions: where batches begin in a segment's file. They are in the dict `positions`
 * of a log (offset -> (segment, position)), which its AppendPlan and ReadPlan share.
 * The dict is private to this process.
 */

#ifndef MPBROKER_POSITIONS_H
#define MPBROKER_POSITIONS_H

#include "base/python_objects.h"

/* Note the position at which the batch with an offset begins, or will begin; 0 and an
 * exception. If `positions` is no dict (it is None until there is a reader), nothing is
 * noted. */
int remember_position(PyObject *positions, PyObject *segment, int64_t offset,
                      int64_t position);

/* Return the position in a segment of the batch that contains an offset; -1: it is
 * unknown, perhaps with an exception. */
int64_t find_position(PyObject *positions, PyObject *segment, int64_t offset);

#endif
