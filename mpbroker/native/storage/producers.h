/* The state of a partition's producers: is a batch or a marker the next one of its
 * producer, and what does it change?
 *
 * The state (ProducerState, of storage/producers/producer_state.py) is computed from
 * the log, and each process has its own copy. Before the copy is used, the batches that
 * other processes have appended since are read. Left to Python: all batches except the
 * next one of a known producer (that is, repeated ones, gaps, new epochs), markers of
 * unknown producers, and markers that abort, because aborted transactions have an index
 * of their own.
 */

#ifndef MPBROKER_PRODUCERS_H
#define MPBROKER_PRODUCERS_H

#include "storage/append.h"

/* The offsets of the fields of AppendPlan, ProducerState and ProducerEntry. */
typedef struct {
    PyTypeObject *state_type, *entry_type, *batch_type; /* NULL: left to Python */
    Py_ssize_t producers, end_offset, entries, ongoing, aborted, epoch,
        coordinator_epoch, txn_first_offset, batches, last_timestamp, seen_ms;
} producer_fields;

/* Find these offsets in AppendPlan, ProducerState, ProducerEntry and AppendedBatch (a
 * subclass of tuple); 0 and an exception. */
int find_producer_fields(producer_fields *at, PyTypeObject *plan, PyTypeObject *state,
                         PyTypeObject *entry, PyTypeObject *batch);

/* The means by which this process reaches its logs: the partition rows, and the fields
 * of the plans. */
typedef struct {
    memory rows; /* without a base: no log is known */
    append_plan_fields plan;
    producer_fields producers;
} log_access;

/* The fields of a batch's header about its producer; id -1: there is no producer. */
typedef struct {
    int64_t id, epoch, first_sequence, last_sequence, timestamp;
    int is_transactional;
} batch_producer;

/* Read the producer from a batch's header; 0: left to Python. */
int read_producer(const uint8_t *batch, batch_producer *b);

/* Return the entry of a batch's producer, borrowed, if the batch is the producer's next
 * one and, while a transaction of the producer is open, belongs to it. NULL: left to
 * Python, perhaps with an exception. */
PyObject *check_batch(const log_access *logs, PyObject *plan, const batch_producer *b,
                      int64_t now_ms);

/* Update a producer's entry by a batch that was appended; 0 and an exception. */
int apply_batch(const log_access *logs, PyObject *plan, PyObject *entry,
                const batch_producer *b, const appended *done, int64_t now_ms);

/* The effect of a marker on its partition. */
typedef struct {
    int has_ended; /* 1: no effect, as the marker is there, or no transaction is open */
    int64_t first_unstable; /* the first unstable offset after it; -1: none */
} marker_effect;

/* Check a commit marker before it is appended. 0: left to Python, perhaps with an
 * exception. */
int check_marker(const log_access *logs, PyObject *plan, const uint8_t *marker,
                 int64_t now_ms, marker_effect *effect);

/* Update the producer's entry by a marker that was appended. 0: an exception, or this
 * process's copy is not as expected. */
int apply_marker(const log_access *logs, PyObject *plan, const uint8_t *marker,
                 const appended *done, int64_t now_ms);

#endif
