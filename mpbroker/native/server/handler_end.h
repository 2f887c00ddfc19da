/* A handler's end of the request channel, and the tables by which it executes requests.
 *
 * In the control segment it writes words of slots that its handler has claimed: the
 * answer, time stamps, intent and progress. No other process writes them meanwhile. The
 * answer's bytes are written to the slot's block in the arena, behind the request. The
 * request is not changed, because after a death it is executed again.
 *
 * The tables are dicts and sets that server/core_cache.py, authorization/verdicts.py
 * and quotas/client_quotas.py fill and empty; they are valid for one position of the
 * metadata log.
 */

#ifndef MPBROKER_HANDLER_END_H
#define MPBROKER_HANDLER_END_H

#include "ipc/request_slot.h"
#include "ipc/ring.h"
#include "ipc/transaction_table.h"
#include "server/fetch_request.h"
#include "server/forward.h"
#include "server/produce_request.h"
#include "server/quotas.h"
#include "server/verdicts.h"

/* Answered slots that are not pushed yet. */
typedef struct {
    int64_t *slots;
    Py_ssize_t count, room;
} pending;

struct handler_end {
    PyObject_HEAD
    PyObject *keep; /* nested tuples of objects that keep mappings and types alive */
    memory control, arena;
    /* -- answers: handler_end.c */
    int64_t region_bytes; /* the arena's bytes for each processor */
    Py_ssize_t processors;
    PyObject *rings;   /* tuple of ResponseRing, by processor */
    pending *answered; /* by processor */
    int has_answers;
    /* -- requests: handler_execute.c */
    log_access logs;
    int64_t news_word;    /* the control word of the metadata log's committed end */
    long long position;   /* the log's end for which the tables are valid */
    long long offline_changes; /* the layout's word for which the tables are valid */
    PyObject *repeatable; /* dict: see repeated_answers.h */
    long long row;        /* the row whose lock execute() left held */
    quotas quotas;
    verdicts verdicts;
    PyObject *lane; /* the coordinator's lane, as a ring to push to; or NULL */
    forwarded_api forwarded[MAX_API_KEYS];
    /* -- produces: produce.c */
    PyObject *topics; /* dict: name, and id -> (limits, append plans by partition) */
    transaction_table transactions;
    char syncs_acks_all;     /* acks=all waits for the disk */
    produce_request produce; /* the last Produce: for appended() */
    long long answer_bytes;  /* the bytes of its answer, if that waits for the disk */
    /* -- fetches: fetch.c */
    PyObject *readable; /* dict: name, and id -> read plans by partition */
    read_plan_fields read_plan;
    long long fetch_max_bytes; /* 0: fetches are left to Python */
    int64_t claimed;           /* the state of slots that this handler has claimed */
    int64_t fetched_words;     /* in the partition segment: see count_fetched() */
    fetch_request fetch;       /* the last Fetch: for fetch_waits() */
    /* -- wake-ups: handler_wait.c */
    PyObject *requests; /* the request ring; or NULL */
    PyObject *waiting;  /* dict: partition row -> slot of a fetch that waits for it */
    int64_t handler, handler_row;
    int epoll_fd;
};

/* Keep an object alive as long as this handler's end lives; 0 and an exception. */
int keep_alive(handler_end *self, PyObject *object);

/* Return whether the tables are valid: set, as new as the metadata log, and as what is
 * known of offline partitions. */
int are_current(const handler_end *self);

/* Return a slot's request, from its API key on, and its size; NULL: the request lies
 * outside the arena, or is shorter than a header. */
uint8_t *request_of(const handler_end *self, int64_t slot, int64_t *size);

/* Read a slot's number from a Python int; 0 and an exception if it is out of range. */
int read_slot(PyObject *number, int64_t *slot);

/* Return the arena offset of a slot's answer, for which there are L.ANSWER_BYTES; -1:
 * it lies outside the arena. */
int64_t answer_offset(const handler_end *self, int64_t slot);

/* Write an answer's size and correlation id at the arena offset `at`, and return where
 * its body begins. */
uint8_t *begin_answer(const handler_end *self, int64_t at, const uint8_t *frame,
                      int64_t body_bytes);

/* Store the kind and place of a slot's answer in the slot, and queue the slot for the
 * next flush; 0 and an exception. */
int answer_slot(handler_end *self, int64_t slot, int64_t kind, int64_t offset,
                int64_t length);

/* Push all answers to their processors' rings; 0 and an exception. */
int flush_answers(handler_end *self);

extern PyTypeObject HandlerEnd_Type;

#endif
