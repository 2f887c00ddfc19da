/* The coordinator's end of its partitions: appends of records that it has made itself,
 * and of the markers that end transactions.
 *
 * As with produces, what the core does not support is left to Python before anything of
 * it was written. No request's slot remembers what was appended: a successor of the
 * coordinator reads its log, and looks for its predecessor's markers in the partitions.
 */

#ifndef MPBROKER_COORDINATOR_END_H
#define MPBROKER_COORDINATOR_END_H

#include "base/python_objects.h"

extern PyTypeObject CoordinatorEnd_Type;

#endif
