/* The layout of shared memory: the offsets of its words.
 *
 * The core has no offsets of its own. At import it gets the values of ipc/layout.py,
 * and of the few other Python files with offsets, from ipc/compiled.py. A core that was
 * built for another layout asks for a name that does not exist, or gets numbers that do
 * not fit each other; then it is not used.
 *
 * Unless said otherwise an offset counts 8-byte words; L.RING_TAIL is the value of
 * RING_TAIL. ipc/layout.py says what each word means, and which process writes it.
 */

#ifndef MPBROKER_LAYOUT_H
#define MPBROKER_LAYOUT_H

#include "base/python_objects.h"

/* X(name here, where ipc/compiled.py finds the value) */
#define LAYOUT_FIELDS(X)                                                              \
    /* the control segment: its size and header */                                    \
    X(CONTROL_WORDS, "layout.CONTROL_WORDS")                                          \
    X(MASK_BITS, "layout.MASK_BITS")                                                  \
    X(MASK_WORDS, "layout.MASK_WORDS")                                                \
    X(HANDLER_IDS, "layout.HANDLER_IDS")                                              \
    X(HEADER_PHASE, "layout.HEADER_PHASE")                                            \
    X(HEADER_ACTIVE_HANDLERS, "layout.HEADER_ACTIVE_HANDLERS")                        \
    X(HEADER_OFFLINE_CHANGES, "layout.HEADER_OFFLINE_CHANGES")                        \
    X(PHASE_STOPPED, "layout.Phase.STOPPED")                                          \
    /* rings */                                                                       \
    X(RING_MUTEX, "layout.RING_MUTEX")                                                \
    X(RING_HEAD, "layout.RING_HEAD")                                                  \
    X(RING_TAIL, "layout.RING_TAIL")                                                  \
    X(RING_SLEEPERS, "layout.RING_SLEEPERS")                                          \
    X(RING_ENTRIES, "layout.RING_ENTRIES")                                            \
    /* request slots */                                                               \
    X(MAX_SLOTS, "layout.MAX_SLOTS")                                                  \
    X(SLOTS_PER_PROCESSOR, "layout.SLOTS_PER_PROCESSOR")                              \
    X(SLOTS, "layout.SLOTS")                                                          \
    X(SLOT_WORDS, "layout.SLOT_WORDS")                                                \
    X(SLOT_STATE, "layout.SLOT_STATE")                                                \
    X(SLOT_REQUEST_OFFSET, "layout.SLOT_REQUEST_OFFSET")                              \
    X(SLOT_REQUEST_LENGTH, "layout.SLOT_REQUEST_LENGTH")                              \
    X(SLOT_RECEIVED, "layout.SLOT_RECEIVED")                                          \
    X(SLOT_ERROR, "layout.SLOT_ERROR")                                                \
    X(SLOT_ERROR_OF, "layout.SLOT_ERROR_OF")                                          \
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
    X(STATE_HANDLER_SHIFT, "layout.STATE_HANDLER_SHIFT")                              \
    X(STATE_MASK, "layout.STATE_MASK")                                                \
    X(GENERATION_SHIFT, "layout.GENERATION_SHIFT")                                    \
    X(STATE_HELD, "layout.SlotState.HELD")                                            \
    X(STATE_READY, "layout.SlotState.READY")                                          \
    X(STATE_CLAIMED, "layout.SlotState.CLAIMED")                                      \
    X(STATE_RESPONDING, "layout.SlotState.RESPONDING")                                \
    X(STATE_PARKED, "layout.SlotState.PARKED")                                        \
    X(KIND_NONE, "layout.ResponseKind.NONE")                                          \
    X(KIND_BYTES, "layout.ResponseKind.BYTES")                                        \
    /* rows of processors and handlers */                                             \
    X(MAX_PROCESSORS, "layout.MAX_PROCESSORS")                                        \
    X(PROCESSORS, "layout.PROCESSORS")                                                \
    X(PROCESSOR_WORDS, "layout.PROCESSOR_WORDS")                                      \
    X(PROCESSOR_UNIT_COST, "layout.PROCESSOR_UNIT_COST")                              \
    X(UNIT_SHIFT, "layout.UNIT_SHIFT")                                                \
    X(HANDLER_ACTIVE, "layout.HANDLER_ACTIVE")                                        \
    X(HANDLER_BUSY_SLOT, "layout.HANDLER_BUSY_SLOT")                                  \
    X(HANDLER_BUSY_SINCE, "layout.HANDLER_BUSY_SINCE")                                \
    X(COUNT_REQUESTS, "layout.ProcessorCounter.REQUESTS")                             \
    X(COUNT_BYTES_IN, "layout.ProcessorCounter.BYTES_IN")                             \
    X(COUNT_BYTES_OUT, "layout.ProcessorCounter.BYTES_OUT")                           \
    X(COUNT_POLLS, "layout.ProcessorCounter.POLLS")                                   \
    X(COUNT_EMPTY_POLLS, "layout.ProcessorCounter.EMPTY_POLLS")                       \
    /* rows of connections */                                                         \
    X(CONNECTION_COOKIE, "layout.CONNECTION_COOKIE")                                  \
    X(CONNECTION_ROWS, "layout.CONNECTIONS")                                          \
    X(CONNECTION_WORDS, "layout.CONNECTION_WORDS")                                    \
    X(CONNECTION_STATE, "layout.CONNECTION_STATE")                                    \
    X(CONNECTION_POSITION, "layout.CONNECTION_POSITION")                              \
    X(CONNECTION_SENT, "layout.CONNECTION_SENT")                                      \
    X(CONNECTION_ACTIVE, "layout.CONNECTION_ACTIVE")                                  \
    X(CONNECTION_MUTED_UNTIL, "layout.CONNECTION_MUTED_UNTIL")                        \
    X(CONNECTION_PRINCIPAL, "layout.CONNECTION_PRINCIPAL")                            \
    X(CONNECTION_LISTENER, "layout.CONNECTION_LISTENER")                              \
    X(CONNECTION_LOCAL_ADDRESS, "layout.CONNECTION_LOCAL_ADDRESS")                    \
    X(CONNECTION_LOCAL_PORT, "layout.CONNECTION_LOCAL_PORT")                          \
    X(CONNECTION_PEER_ADDRESS, "layout.CONNECTION_PEER_ADDRESS")                      \
    X(CONNECTION_SLOT, "layout.CONNECTION_SLOT")                                      \
    X(CONNECTION_COPY_SHIFT, "layout.CONNECTION_COPY_SHIFT")                          \
    X(POSITION_SHIFT, "layout.POSITION_SHIFT")                                        \
    X(CONNECTION_READING, "layout.ConnectionState.READING")                           \
    X(CONNECTION_IN_FLIGHT, "layout.ConnectionState.IN_FLIGHT")                       \
    /* request metrics, and what software clients are */                              \
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
    X(CONNECTION_SOFTWARE, "layout.CONNECTION_SOFTWARE")                              \
    X(SOFTWARE_SHIFT, "layout.SOFTWARE_SHIFT")                                        \
    /* the partition segment */                                                       \
    X(MAX_PARTITIONS, "layout.MAX_PARTITIONS")                                        \
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
    /* the quota segment */                                                           \
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
    /* the arena */                                                                   \
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

/* Return whether the core has got its layout; 0 and an exception if not. */
int is_configured(void);

/* The module's functions layout_names() and configure(). */
PyObject *layout_names(PyObject *module, PyObject *unused);
PyObject *configure(PyObject *module, PyObject *values);

#endif
