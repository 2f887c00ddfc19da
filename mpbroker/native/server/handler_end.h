/* A handler's end of the request channel, and the tables by which it executes requests.
 *
 * Words of the control segment that it writes, of slots that its handler has claimed:
 * the answer, time stamps, intent and progress; no other process writes them meanwhile.
 * The answer's bytes go to the slot's block in the arena, behind the request, which
 * stays as it is: after a death it is executed again.
 *
 * The tables are dicts and sets that server/core_cache.py, authorization/verdicts.py
 * and quotas/client_quotas.py fill and empty; they hold for one position of the metadata
 * log.
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
    PyObject *keep; /* nested tuples of what keeps mappings and types alive */
    memory control, arena;
    /* -- answers: handler_end.c */
    int64_t region_bytes; /* of the arena, a processor */
    Py_ssize_t processors;
    PyObject *rings;   /* tuple of ResponseRing, by processor */
    pending *answered; /* by processor */
    int has_answers;
    /* -- requests: handler_execute.c */
    log_access logs;
    int64_t news_word;    /* the control word of the metadata log's committed end */
    long long position;   /* the end that the tables hold for */
    PyObject *remembered; /* dict: ApiVersions request -> answer's body */
    long long row;        /* whose lock execute() left held */
    quotas quotas;
    verdicts verdicts;
    PyObject *lane; /* of the coordinator, as the ring that forwards push to; or NULL */
    forwarded_api forwarded[MAX_API_KEYS];
    /* -- produces: produce.c */
    PyObject *topics; /* dict: name, and id -> (limits, append plans by partition) */
    transaction_table transactions;
    char syncs_acks_all;     /* acks=all waits for the disk */
    produce_request produce; /* the last one: for appended() */
    long long answer_bytes;  /* of its answer, if that waits for the disk */
    /* -- fetches: fetch.c */
    PyObject *readable; /* dict: name, and id -> read plans by partition */
    read_plan_fields read_plan;
    long long fetch_max_bytes; /* 0: fetches are Python's */
    int64_t claimed;           /* a slot's state and handler while this one executes it */
    int64_t fetched_words;     /* of the partition segment: see count_fetched() */
    fetch_request fetch;       /* the last one: for fetch_waits() */
    /* -- wake-ups: handler_wait.c */
    PyObject *requests; /* the request ring; or NULL */
    PyObject *waiting;  /* dict: partition row -> the slot of a fetch that waits for it */
    int64_t handler, handler_row;
    int epoll_fd;
};

/* Keep an object alive as long as the handler's end; 0 and an exception. */
int keep_alive(handler_end *self, PyObject *object);

/* Return where a slot's request lies, from its API key on; NULL: nowhere, or it is
 * shorter than a header. */
uint8_t *request_of(const handler_end *self, int64_t slot, int64_t *size);

/* Read a Python int that is a slot; 0 and an exception. */
int read_slot(PyObject *number, int64_t *slot);

/* Return where in the arena a slot's answer goes, which has L.ANSWER_BYTES; -1:
 * outside. */
int64_t answer_offset(const handler_end *self, int64_t slot);

/* Write an answer's size and correlation id, and return where its body begins. */
uint8_t *begin_answer(const handler_end *self, int64_t at, const uint8_t *frame,
                      int64_t body_bytes);

/* Say what a slot's answer is, and queue it for the next flush; 0 and an exception. */
int answer_slot(handler_end *self, int64_t slot, int64_t kind, int64_t offset,
                int64_t length);

/* Push all answers to their processors' rings; 0 and an exception. */
int flush_answers(handler_end *self);

extern PyTypeObject HandlerEnd_Type;

#endif
