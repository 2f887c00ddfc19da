/* Which topics a request's sender may write to and read.
 *
 * server/authorization/verdicts.py fills the tables with what the authorizer has
 * allowed, and empties them when its rules change. The core refuses no request: what
 * the tables do not allow is left to Python, which asks the authorizer. So nothing is
 * allowed here that was not allowed there, under the same version of the rules.
 */

#ifndef MPBROKER_VERDICTS_H
#define MPBROKER_VERDICTS_H

#include "protocol/request_fields.h"

typedef struct handler_end handler_end;

typedef struct {
    PyObject *writers, *readers; /* dict: sender -> set of topics */
    PyObject *anybody_writes, *anybody_reads; /* set of topics */
    char are_needed; /* whether there is an authorizer */
} verdicts;

/* Return whether a slot's sender is known to be allowed to write to a topic, or to read
 * all of these topics; -1 and an exception. */
int may_write(const handler_end *self, int64_t slot, PyObject *topic);
int may_read(const handler_end *self, int64_t slot, const request_topic *topics,
             int count, int version);

#endif
