/* What a partition knows of its producers: whether a batch or a marker is the next one,
 * and what it changes.
 *
 * All of it is this process's own copy of what the log says (ProducerState, of
 * storage/producers/producer_state.py), which no other process sees. Before it is
 * asked, it is caught up with what others have appended since. Left to Python: all but
 * the next batch of a known producer (a repeated one, a gap, a new epoch), markers of
 * unknown producers, and those that abort, since what is aborted has an index of its own.
 */

#ifndef MPBROKER_PRODUCERS_H
#define MPBROKER_PRODUCERS_H

#include "storage/append.h"

/* Where the fields of AppendPlan.producers, ProducerState and ProducerEntry are. */
typedef struct {
    PyTypeObject *state_type, *entry_type, *batch_type; /* NULL: producers are Python's */
    Py_ssize_t producers, end_offset, entries, ongoing, aborted, epoch,
        coordinator_epoch, txn_first_offset, batches, last_timestamp, seen_ms;
} producer_fields;

/* Find them in AppendPlan, ProducerState, ProducerEntry and AppendedBatch (a tuple's
 * subclass); 0 and an exception. */
int find_producer_fields(producer_fields *at, PyTypeObject *plan, PyTypeObject *state,
                         PyTypeObject *entry, PyTypeObject *batch);

/* How this process reaches its logs. */
typedef struct {
    memory rows; /* without a base: no log is known */
    append_plan_fields plan;
    producer_fields producers;
} log_access;

/* What a batch says of its producer; id -1: nothing. */
typedef struct {
    int64_t id, epoch, first_sequence, last_sequence, timestamp;
    int is_transactional;
} batch_producer;

/* Read a batch's header; 0 if what it says of its producer is left to Python. */
int read_producer(const uint8_t *batch, batch_producer *b);

/* Return the entry of a batch's producer, borrowed, if the batch is its next one, and
 * is of its transaction if one is open. NULL: left to Python, perhaps with an
 * exception. */
PyObject *check_batch(const log_access *logs, PyObject *plan, const batch_producer *b,
                      int64_t now_ms);

/* Let a producer's entry follow a batch that is in the log now; 0 and an exception. */
int apply_batch(const log_access *logs, PyObject *plan, PyObject *entry,
                const batch_producer *b, const appended *done, int64_t now_ms);

/* What a marker will change in its partition. */
typedef struct {
    int has_ended; /* nothing: it is there, or there was nothing to be ended */
    int64_t first_unstable; /* offset behind it; -1: none */
} marker_effect;

/* Check a commit marker before it is appended. 0: left to Python, perhaps with an
 * exception. */
int check_marker(const log_access *logs, PyObject *plan, const uint8_t *marker,
                 int64_t now_ms, marker_effect *effect);

/* Let its producer's entry follow a marker that is in the log now. 0: an exception, or
 * the copy is odd. */
int apply_marker(const log_access *logs, PyObject *plan, const uint8_t *marker,
                 const appended *done, int64_t now_ms);

#endif
