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

#include "base/clock.h"
#include "base/python_objects.h"
#include "base/steps.h"

#include <stdatomic.h>
#include <stdint.h>

/* name here, and where mpbroker.ipc.compiled finds its value */
#define LAYOUT_FIELDS(X)                                                              \
    X(RING_MUTEX, "layout.RING_MUTEX")                                                \
    X(RING_HEAD, "layout.RING_HEAD")                                                  \
    X(RING_TAIL, "layout.RING_TAIL")                                                  \
    X(RING_SLEEPERS, "layout.RING_SLEEPERS")                                          \
    X(RING_ENTRIES, "layout.RING_ENTRIES")                                            \
    X(MAX_SLOTS, "layout.MAX_SLOTS")                                                  \
    X(MAX_PROCESSORS, "layout.MAX_PROCESSORS")                                        \
    X(MAX_PARTITIONS, "layout.MAX_PARTITIONS")                                        \
    X(SLOTS_PER_PROCESSOR, "layout.SLOTS_PER_PROCESSOR")                              \
    X(PROCESSORS, "layout.PROCESSORS")                                                \
    X(PROCESSOR_WORDS, "layout.PROCESSOR_WORDS")                                      \
    X(PROCESSOR_UNIT_COST, "layout.PROCESSOR_UNIT_COST")                              \
    X(UNIT_SHIFT, "layout.UNIT_SHIFT")                                                \
    X(CONTROL_WORDS, "layout.CONTROL_WORDS")                                          \
    X(HEADER_PHASE, "layout.HEADER_PHASE")                                            \
    X(HEADER_ACTIVE_HANDLERS, "layout.HEADER_ACTIVE_HANDLERS")                        \
    X(PHASE_STOPPED, "layout.Phase.STOPPED")                                          \
    X(HANDLER_ACTIVE, "layout.HANDLER_ACTIVE")                                        \
    X(HANDLER_BUSY_SLOT, "layout.HANDLER_BUSY_SLOT")                                  \
    X(HANDLER_BUSY_SINCE, "layout.HANDLER_BUSY_SINCE")                                \
    X(SLOTS, "layout.SLOTS")                                                          \
    X(SLOT_WORDS, "layout.SLOT_WORDS")                                                \
    X(SLOT_STATE, "layout.SLOT_STATE")                                                \
    X(SLOT_REQUEST_OFFSET, "layout.SLOT_REQUEST_OFFSET")                              \
    X(SLOT_REQUEST_LENGTH, "layout.SLOT_REQUEST_LENGTH")                              \
    X(SLOT_RECEIVED, "layout.SLOT_RECEIVED")                                          \
    X(SLOT_BLOCK, "layout.SLOT_BLOCK")                                                \
    X(SLOT_INTENT, "layout.SLOT_INTENT")                                              \
    X(SLOT_INTENT_BASE, "layout.SLOT_INTENT_BASE")                                    \
    X(SLOT_PROGRESS, "layout.SLOT_PROGRESS")                                          \
    X(SLOT_PROGRESS_OFFSET, "layout.SLOT_PROGRESS_OFFSET")                            \
    X(SLOT_RESPONSE_KIND, "layout.SLOT_RESPONSE_KIND")                                \
    X(SLOT_RESPONSE_OFFSET, "layout.SLOT_RESPONSE_OFFSET")                            \
    X(SLOT_RESPONSE_LENGTH, "layout.SLOT_RESPONSE_LENGTH")                            \
    X(SLOT_CONNECTION, "layout.SLOT_CONNECTION")                                      \
    X(SLOT_DEQUEUED, "layout.SLOT_DEQUEUED")                                          \
    X(SLOT_COMPLETED, "layout.SLOT_COMPLETED")                                        \
    X(SLOT_PARKED, "layout.SLOT_PARKED")                                              \
    X(METRICS, "layout.METRICS")                                                      \
    X(METRICS_LOG_ABOVE, "layout.METRICS_LOG_ABOVE")                                  \
    X(API_TABLES, "layout.API_TABLES")                                                \
    X(API_ROWS, "layout.API_ROWS")                                                    \
    X(API_ROW_WORDS, "layout.API_ROW_WORDS")                                          \
    X(API_REQUEST_BYTES, "layout.API_REQUEST_BYTES")                                  \
    X(API_RESPONSE_BYTES, "layout.API_RESPONSE_BYTES")                                \
    X(API_HISTOGRAMS, "layout.API_HISTOGRAMS")                                        \
    X(API_VERSIONS, "layout.API_VERSIONS")                                            \
    X(HISTOGRAM_WORDS, "layout.HISTOGRAM_WORDS")                                      \
    X(HISTOGRAM_BUCKETS, "layout.HISTOGRAM_BUCKETS")                                  \
    X(HISTOGRAM_SHIFT, "layout.HISTOGRAM_SHIFT")                                      \
    X(REQUEST_LOGS, "layout.REQUEST_LOGS")                                            \
    X(LOG_NOTED, "layout.LOG_NOTED")                                                  \
    X(LOG_FIRST, "layout.LOG_FIRST")                                                  \
    X(LOG_ENTRIES, "layout.LOG_ENTRIES")                                              \
    X(LOG_ENTRY_WORDS, "layout.LOG_ENTRY_WORDS")                                      \
    X(LOG_WORDS, "layout.LOG_WORDS")                                                  \
    X(CONNECTION_COOKIE, "layout.CONNECTION_COOKIE")                                  \
    X(CONNECTION_ROWS, "layout.CONNECTIONS")                                          \
    X(CONNECTION_SOFTWARE, "layout.CONNECTION_SOFTWARE")                              \
    X(SOFTWARE_SHIFT, "layout.SOFTWARE_SHIFT")                                        \
    X(STATE_HANDLER_SHIFT, "layout.STATE_HANDLER_SHIFT")                              \
    X(STATE_MASK, "layout.STATE_MASK")                                                \
    X(GENERATION_SHIFT, "layout.GENERATION_SHIFT")                                    \
    X(STATE_HELD, "layout.SlotState.HELD")                                            \
    X(STATE_READY, "layout.SlotState.READY")                                          \
    X(STATE_CLAIMED, "layout.SlotState.CLAIMED")                                      \
    X(STATE_RESPONDING, "layout.SlotState.RESPONDING")                                \
    X(STATE_PARKED, "layout.SlotState.PARKED")                                        \
    X(CONNECTION_WORDS, "layout.CONNECTION_WORDS")                                    \
    X(CONNECTION_STATE, "layout.CONNECTION_STATE")                                    \
    X(CONNECTION_POSITION, "layout.CONNECTION_POSITION")                              \
    X(CONNECTION_SENT, "layout.CONNECTION_SENT")                                      \
    X(CONNECTION_ACTIVE, "layout.CONNECTION_ACTIVE")                                  \
    X(CONNECTION_MUTED_UNTIL, "layout.CONNECTION_MUTED_UNTIL")                        \
    X(CONNECTION_PRINCIPAL, "layout.CONNECTION_PRINCIPAL")                            \
    X(CONNECTION_LISTENER, "layout.CONNECTION_LISTENER")                              \
    X(CONNECTION_PEER_ADDRESS, "layout.CONNECTION_PEER_ADDRESS")                      \
    X(CONNECTION_SLOT, "layout.CONNECTION_SLOT")                                      \
    X(QUOTA_HEADER_WORDS, "quota_layout.QUOTA_HEADER_WORDS")                          \
    X(QUOTA_ROW_WORDS, "quota_layout.QUOTA_ROW_WORDS")                                \
    X(QUOTA_ROW_MUTEX, "quota_layout.QUOTA_ROW_MUTEX")                                \
    X(QUOTA_GENERATION, "quota_layout.QUOTA_GENERATION")                              \
    X(QUOTA_USED, "quota_layout.QUOTA_USED")                                          \
    X(QUOTA_CURRENT, "quota_layout.QUOTA_CURRENT")                                    \
    X(QUOTA_CHARGED, "quota_layout.QUOTA_CHARGED")                                    \
    X(QUOTA_SAMPLES, "quota_layout.QUOTA_SAMPLES")                                    \
    X(QUOTA_SAMPLE_WORDS, "quota_layout.QUOTA_SAMPLE_WORDS")                          \
    X(MAX_QUOTA_ROWS, "quota_layout.MAX_QUOTA_ROWS")                                  \
    X(MAX_QUOTA_SAMPLES, "quota_layout.MAX_QUOTA_SAMPLES")                            \
    X(CONNECTION_COPY_SHIFT, "layout.CONNECTION_COPY_SHIFT")                          \
    X(POSITION_SHIFT, "layout.POSITION_SHIFT")                                        \
    X(CONNECTION_READING, "layout.ConnectionState.READING")                           \
    X(CONNECTION_IN_FLIGHT, "layout.ConnectionState.IN_FLIGHT")                       \
    X(COUNT_REQUESTS, "layout.ProcessorCounter.REQUESTS")                             \
    X(COUNT_BYTES_IN, "layout.ProcessorCounter.BYTES_IN")                             \
    X(COUNT_BYTES_OUT, "layout.ProcessorCounter.BYTES_OUT")                           \
    X(COUNT_POLLS, "layout.ProcessorCounter.POLLS")                                   \
    X(COUNT_EMPTY_POLLS, "layout.ProcessorCounter.EMPTY_POLLS")                       \
    X(KIND_NONE, "layout.ResponseKind.NONE")                                          \
    X(KIND_BYTES, "layout.ResponseKind.BYTES")                                        \
    X(ROW_WORDS, "layout.ROW_WORDS")                                                  \
    X(ROW_MUTEX, "layout.ROW_MUTEX")                                                  \
    X(ROW_VERSION, "layout.ROW_VERSION")                                              \
    X(ROW_INTENT, "layout.ROW_INTENT")                                                \
    X(ROW_STATUS, "layout.ROW_STATUS")                                                \
    X(ROW_LOG_START_OFFSET, "layout.ROW_LOG_START_OFFSET")                            \
    X(ROW_STRUCTURE, "layout.ROW_STRUCTURE")                                          \
    X(ROW_WAITERS, "layout.ROW_WAITERS")                                              \
    X(ROW_COPIES, "layout.ROW_COPIES")                                                \
    X(ROW_COPY_WORDS, "layout.ROW_COPY_WORDS")                                        \
    X(ROW_ONLINE, "layout.RowStatus.ONLINE")                                          \
    X(FETCHED_BYTES, "fetched_bytes.FIRST")                                           \
    X(ANSWER_AT, "arena.ANSWER_AT")                                                   \
    X(ANSWER_BYTES, "arena.ANSWER_BYTES")                                             \
    X(BLOCK_BYTES, "arena.BLOCK_BYTES")                                               \
    X(REQUEST_PART_BYTES, "arena.REQUEST_PART_BYTES")

struct layout {
#define X(name, where) int64_t name;
    LAYOUT_FIELDS(X)
#undef X
};

extern struct layout L;

/* -- shared memory ------------------------------------------------------------------ */

/* A mapping, kept alive by the Segment that made it. */
typedef struct {
    uint8_t *base;
    int64_t size;
} memory;

typedef _Atomic int64_t word;

static inline word *
word_at(const memory *m, int64_t index)
{
    return (word *)(m->base + index * 8);
}

static inline int64_t
load(const memory *m, int64_t index)
{
    return atomic_load_explicit(word_at(m, index), memory_order_acquire);
}

static inline int64_t
load_relaxed(const memory *m, int64_t index)
{
    return atomic_load_explicit(word_at(m, index), memory_order_relaxed);
}

/* Release even where the order is a lock's business: on x86-64 it costs nothing. */
static inline void
store(const memory *m, int64_t index, int64_t value)
{
    atomic_store_explicit(word_at(m, index), value, memory_order_release);
}

static inline int
has_words(const memory *m, int64_t first, int64_t count)
{
    return first >= 0 && count >= 0 && count <= m->size / 8
           && first <= m->size / 8 - count;
}

static inline int
has_bytes(const memory *m, int64_t offset, int64_t length)
{
    return offset >= 0 && length >= 0 && length <= m->size
           && offset <= m->size - length;
}

static inline int64_t
slot_row(int64_t slot)
{
    return L.SLOTS + slot * L.SLOT_WORDS;
}

static inline int
is_slot(int64_t slot)
{
    return slot >= 0 && slot < L.MAX_SLOTS;
}

/* All of a slot's state word but its state and its handler. */
static inline int64_t
generation_of(int64_t state)
{
    return state & ~(((int64_t)1 << L.GENERATION_SHIFT) - 1);
}

/* Read `view` (a Segment's bytes) as a mapping; 0 and an exception if it is none. */
int get_memory(PyObject *view, memory *m);

/* Refuse to work before, or without, a layout; 0 and an exception. */
int is_configured(void);

/* -- locks ---------------------------------------------------------------------------- */

/* As pthread_mutex_lock: 0, EOWNERDEAD, or an error that means damage. */
int lock_spinning(void *mutex);
int lock_repaired(void *mutex, int *owner_died);
void unlock(void *mutex);
int mark_consistent(void *mutex);
/* Let Python know, once no lock is held, that some were repaired. */
void tell_of_repairs(void);
extern PyObject *repair_hook;
PyObject *damaged(int result);

static inline void *
mutex_at(const memory *m, int64_t index)
{
    return m->base + index * 8;
}

/* -- doorbells, clock, CRC -------------------------------------------------------------- */

void ring_bell(int fd);
uint32_t crc32c(const uint8_t *data, size_t length);

/* Push answered slots onto a _core.ResponseRing; 0 and an exception. */
int ring_push(PyObject *ring, const int64_t *slots, Py_ssize_t count);
/* Put a sequence of slots onto a _core.RequestRing; how many had room, -1: exception. */
Py_ssize_t ring_put(PyObject *ring, PyObject *slots);
/* Claim a fair share of a _core.RequestRing, as a list; NULL and an exception. `arm`: if
 * there is nothing, the doorbell will ring. */
PyObject *ring_take(PyObject *ring, int64_t limit, int64_t handler, int64_t handlers,
                    int arm);
/* Take everything from a _core.ResponseRing, as a list; NULL and an exception. `arm`: if
 * there is nothing, the doorbell will ring. */
PyObject *ring_pop(PyObject *ring, int arm);
/* Of a _core.ResponseRing, by its only reader: nobody needs to ring. */
void ring_forget_sleeper(PyObject *ring);

/* -- big-endian numbers of the protocol -------------------------------------------------- */

static inline int64_t
read_big(const uint8_t *at, int bytes)
{
    uint64_t value = at[0] & 0x80 ? ~(uint64_t)0 : 0;
    for (int i = 0; i < bytes; i++)
        value = value << 8 | at[i];
    return (int64_t)value;
}

static inline uint8_t *
write_big(uint8_t *at, int64_t value, int bytes)
{
    for (int i = bytes - 1; i >= 0; i--, value >>= 8)
        at[i] = (uint8_t)value;
    return at + bytes;
}

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

/* The open transactions of all producers (transaction_table.c); no base: not to be used. */
typedef struct {
    memory segment;
    int64_t first, capacity, epoch_bits;
} transaction_table;

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

/* transaction_table.c */
int take_transactions(transaction_table *t, const memory *segment, int64_t first,
                      int64_t capacity, int64_t epoch_bits);
/* Whether a producer's transaction is open in a partition's row, at an epoch. */
int is_open(const transaction_table *t, int64_t producer_id, int64_t epoch, int64_t row);

/* The words of a partition's committed state, in partition_table.LogState's order. */
enum state_word {
    END_OFFSET,
    ACTIVE_BASE,
    ACTIVE_SIZE,
    INDEX_ENTRIES,
    TIME_INDEX_ENTRIES,
    BYTES_SINCE_INDEX,
    MAX_TIMESTAMP,
    MAX_TIMESTAMP_OFFSET,
    FIRST_UNSTABLE,
    CREATED_MS,
    BYTES_IN,
    STATE_WORDS,
};

/* Note in a log's `positions` where a batch begins, or will; 0 and an exception. */
int remember_place(PyObject *positions, PyObject *segment, int64_t offset,
                   int64_t position);

/* The committed state, without the lock; 0 if it never stands still. */
int read_state(const memory *rows, int64_t row, int64_t *state);

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

extern PyTypeObject RequestRing_Type, ResponseRing_Type, HandlerEnd_Type,
    ProcessorEnd_Type, CoordinatorEnd_Type;

#endif
