/* Answers that Python has given before, and that may be given again: to ApiVersions,
 * Metadata, FindCoordinator and ListOffsets requests that are equal to earlier ones.
 *
 * The table `repeatable` of a handler's end maps a key to a tuple of two bytes objects:
 * an answer behind its correlation id, and its places. The table is filled by
 * server/repeated/repeated_answers.py. The key is all that an answer depends on beside
 * the metadata log, offline partitions and the rules of the authorizer, with which the
 * table is emptied:
 *
 *     words      0 listener, 1-2 local address, 3 local port: an answer may name the
 *                address that the client has connected to
 *                4 principal, 5-6 peer address: what the client may see; 0 if there is
 *                no authorizer
 *     bytes      the request without its correlation id
 *
 * Nobody's permission and no address is in the answer to ApiVersions, so its words are 0.
 *
 * A place is an offset in the answer that is read from a partition's row for each
 * client. This reads the rows' status, log start offset and committed state, and writes
 * no words of theirs.
 */

#ifndef MPBROKER_REPEATED_ANSWERS_H
#define MPBROKER_REPEATED_ANSWERS_H

#include "base/outcome.h"
#include "server/handler_end.h"

/* Which offset of a partition a place has: OffsetKind in
 * server/repeated/repeatable.py. */
enum offset_kind {
    LOG_START_OFFSET,
    LOG_END_OFFSET,
    LAST_STABLE_OFFSET,
};

/* A place, in native-endian words, as repeated_answers.py packs it. */
typedef struct {
    int64_t at;   /* where the 8 bytes of the offset are, behind the correlation id */
    int64_t row;  /* the partition's row */
    int64_t kind; /* an offset_kind */
    int64_t since; /* the rest of the answer holds for offsets from this one on */
} offset_place;

/* Answer a request that is equal to an earlier one, if its answer is in the table and
 * all partitions of its places are online. */
enum outcome repeat_answer(handler_end *self, int64_t slot, const uint8_t *frame,
                           int64_t size);

PyObject *handler_answer_key(PyObject *object, PyObject *slot);

#endif
