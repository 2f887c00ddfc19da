/* The coordinator's appends: of its own records to its log, and of the markers that end
 * transactions to other partitions.
 *
 * As with Produce requests, an append that the core does not support is left to Python
 * before anything was written. An append is not noted in the slot of any request: a
 * successor of the coordinator reads the coordinator's log, and looks for its
 * predecessor's markers in the partitions.
 */

#ifndef MPBROKER_COORDINATOR_END_H
#define MPBROKER_COORDINATOR_END_H

#include "base/python_objects.h"

extern PyTypeObject CoordinatorEnd_Type;

#endif
