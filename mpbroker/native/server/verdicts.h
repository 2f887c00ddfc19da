/* The verdicts of the authorizer: the topics that a request's sender may write to, and
 * those that it may read.
 *
 * server/authorization/verdicts.py fills the tables with operations that the authorizer
 * has allowed, and empties them when its rules change. The core refuses no request: an
 * operation that the tables do not allow is left to Python, which asks the authorizer.
 * So the core allows only operations that the authorizer has allowed by the same rules.
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

/* Return whether, according to the tables, a slot's sender may write to a topic, or may
 * read all of these topics; -1 and an exception. */
int may_write(const handler_end *self, int64_t slot, PyObject *topic);
int may_read(const handler_end *self, int64_t slot, const request_topic *topics,
             int count, int version);

#endif
