/* The compiled core: the leaf operations of the request path, on the same words in
 * shared memory, and the same slots of Python objects, as their Python twins.
 *
 * Rules, beside those of ipc/README.md:
 *   - an offset comes from ipc/layout.py at import (struct layout), never from here;
 *   - a number read from shared memory is checked against the mapping before it is used;
 *   - a commit is a release store; what another process publishes is read by acquire;
 *   - between taking and releasing a lock nothing allocates, raises or calls Python;
 *   - STEP() stands where a death would be interesting: tests die at each of them.
 */

#ifndef MPBROKER_CORE_H
#define MPBROKER_CORE_H

#include "base/big_endian.h"
#include "base/clock.h"
#include "base/python_objects.h"
#include "base/steps.h"
#include "ipc/connection_row.h"
#include "ipc/layout.h"
#include "ipc/mutex.h"
#include "ipc/partition_row.h"
#include "ipc/request_slot.h"
#include "ipc/ring.h"
#include "ipc/shared_memory.h"
#include "ipc/transaction_table.h"

uint32_t crc32c(const uint8_t *data, size_t length);

/* -- plain produces ------------------------------------------------------------ */

/* Where the slots of storage's AppendPlan are in the object. */
typedef struct {
    Py_ssize_t row, segment, segment_fd, offset_index, offset_index_fd, time_index,
        time_index_fd, active_base, structure, max_size, max_entries,
        max_time_entries, index_interval, epoch, roll_after, positions, producers_end,
        producers_position;
} append_plan_fields;

/* What the batches of a partition say of their producer; id -1: nothing. */
typedef struct {
    int64_t id, epoch, first_sequence, last_sequence, timestamp;
} batch_producer;

/* What has become of a batch that was to be appended. */
typedef struct {
    int64_t base_offset, next_offset, log_start_offset, row, position, next_position;
    int has_waiters, row_is_held;
} appended;

typedef struct {
    const uint8_t *name; /* or its id, in versions that know topics by that */
    int name_bytes, first, count;
} request_topic;

typedef struct {
    int partition, is_transactional;
    uint8_t *batch;
    int64_t batch_bytes;
    batch_producer producer;
    /* How far its timestamps may lie before and after now. */
    int64_t before_max_ms, after_max_ms;
    /* Found in the tables, and owned while the request is executed; no entry: the batch
     * is of no producer. */
    PyObject *plan, *entry;
    appended done;
} produce_part;

/* As many as a slot's block has room to answer; and to note, which has more. */
#define MAX_PRODUCE_PARTS 40

typedef struct {
    int version, acks, topic_count, part_count;
    int is_transactional; /* it names a transactional id */
    int64_t progress; /* the arena's word for the first one that is done */
    request_topic topics[MAX_PRODUCE_PARTS];
    produce_part parts[MAX_PRODUCE_PARTS];
} plain_produce;

/* produce_request.c */
int parse_plain_produce(uint8_t *body, int64_t size, int version, plain_produce *p);
int64_t produce_answer_bound(const plain_produce *p);
uint8_t *write_produce_answer(uint8_t *at, const plain_produce *p);

/* An AppendPlan as it is just now. */
typedef struct {
    int64_t row, active_base, structure, max_size, max_entries, max_time_entries,
        index_interval, epoch, roll_after, fd, offset_index_fd, time_index_fd,
        producers_end;
} append_plan;

/* append.c */
int read_append_plan(const append_plan_fields *at, PyObject *plan, append_plan *a);
int fits(const append_plan *a, const memory *rows, int64_t row, const int64_t *state,
         int64_t added, int64_t last_offset, int64_t timestamp);
int write_batch(const append_plan *a, const memory *rows, int64_t version, int64_t *state,
                const uint8_t *batch, int64_t size);
int has_plain_header(produce_part *part, int64_t max_message_bytes);
int has_plain_records(const produce_part *part, int64_t now_ms);
int64_t progress_room(const memory *control, const memory *arena, int64_t slot,
                      int count);
int append_plain(const memory *control, const memory *arena, const memory *rows,
                 const transaction_table *open, const append_plan_fields *at, int64_t slot,
                 plain_produce *p, int ordinal);

/* handler_execute.c */
int find_append_plan_fields(append_plan_fields *at, PyTypeObject *plan, PyTypeObject *segment,
                    PyTypeObject *index, PyTypeObject *time_index);
int remember_position(const append_plan_fields *at, PyObject *plan, const appended *done);
int keep_up(const append_plan_fields *at, PyObject *plan, const appended *done);

/* Note in a log's `positions` where a batch begins, or will; 0 and an exception. */
int remember_place(PyObject *positions, PyObject *segment, int64_t offset,
                   int64_t position);

/* -- producers (producers.c) --------------------------------------------------------------- */

/* Where the slots of storage's ProducerState and ProducerEntry are. */
typedef struct {
    PyTypeObject *state_type, *entry_type, *batch_type; /* NULL: producers are not plain */
    Py_ssize_t producers, end_offset, entries, ongoing, aborted, epoch,
        coordinator_epoch, txn_first_offset, batches, last_timestamp, seen_ms;
} producer_fields;

/* A marker as every broker writes it: producer_replay.py's _USUAL_MARKER. */
#define MARKER_BYTES 78

/* What a marker will change in its partition. */
typedef struct {
    int has_ended; /* nothing: it is there, or there was nothing to be ended */
    int64_t unstable; /* the first unstable offset behind it */
} marker_effect;

int find_producer_fields(producer_fields *at, PyTypeObject *plan, PyTypeObject *state,
                        PyTypeObject *entry, PyTypeObject *batch);
/* Read a batch's header; 0 if what it says of its producer is not plain. */
int read_producer(const uint8_t *batch, batch_producer *b);
PyObject *expect_batch(const memory *rows, const append_plan_fields *p,
                       const producer_fields *at, PyObject *plan,
                       const batch_producer *b, int is_transactional, int64_t now_ms);
int accept_batch(const append_plan_fields *p, const producer_fields *at, PyObject *plan,
                 PyObject *entry, const batch_producer *b, int is_transactional,
                 const appended *done, int64_t now_ms);
int expect_marker(const memory *rows, const append_plan_fields *p, const producer_fields *at,
                  PyObject *plan, const uint8_t *marker, int64_t now_ms,
                  marker_effect *effect);
int accept_marker(const append_plan_fields *p, const producer_fields *at, PyObject *plan,
                  const uint8_t *marker, const appended *done, int64_t now_ms);

/* -- plain fetches (fetch.c) --------------------------------------------------------------- */

#define MAX_FETCH_TOPICS 8
#define MAX_FETCH_TARGETS 24

/* Where the slots of storage's ReadPlan are in the object. */
typedef struct {
    Py_ssize_t row, segment, segment_fd, active_base, structure, leader_epoch, positions,
        txn_index_path;
} read_plan_fields;

typedef struct {
    int partition;
    int64_t fetch_offset, max_bytes, leader_epoch;
    /* found by reading; `plan` is borrowed from the tables */
    PyObject *plan;
    int64_t row, fd, structure, position, length, end_position;
    int64_t end_offset, stable_offset, log_start_offset;
} fetch_target;

typedef struct {
    int version, read_committed, topic_count, target_count;
    int64_t max_wait_ms, min_bytes, max_bytes;
    request_topic topics[MAX_FETCH_TOPICS];
    fetch_target targets[MAX_FETCH_TARGETS];
} plain_fetch;

enum fetched {
    FETCH_FAILED = -1, /* an exception is set */
    FETCH_NOT_PLAIN,
    FETCH_DONE,
    FETCH_WAITS,
};

int parse_plain_fetch(const uint8_t *body, int64_t size, int version, plain_fetch *f);
enum fetched read_plain_fetch(const memory *rows, const read_plan_fields *at,
                              PyObject *readable, plain_fetch *f, int must_answer,
                              uint8_t *out, int64_t room, int64_t *length);
/* Count what an answer that is on its way has of each partition, in a handler's words. */
void count_fetched(const memory *rows, int64_t first, const plain_fetch *f);

extern PyTypeObject HandlerEnd_Type, ProcessorEnd_Type, CoordinatorEnd_Type;

#endif
