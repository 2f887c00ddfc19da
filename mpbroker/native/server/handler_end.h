/* What handler_end.c, handler_execute.c and what these call share. */

#ifndef MPBROKER_HANDLER_END_H
#define MPBROKER_HANDLER_END_H

#include "core.h"
#include "ipc/quota_table.h"

typedef struct {
    int64_t *slots;
    Py_ssize_t count, room;
} pending;

/* Clients with quotas: see quotas.c. */
typedef struct {
    quota_table table;
    PyObject *clients; /* dict: principal and client id -> two limits */
    char are_set;      /* whether requests have to be looked up there */
} quotas;

/* Who may do what, where there is an authorizer: see verdicts.c. */
typedef struct {
    PyObject *writers, *readers; /* dict: sender -> set of topics */
    PyObject *anybody_writes, *anybody_reads; /* set of topics */
    char are_needed;
} verdicts;

/* What a request that is being executed has been charged. */
typedef struct {
    int is_charged;
    int64_t begun, size;
    quota_limit bytes, time;
} quota_charge;

/* An API whose requests are handed on to the coordinator: see forward.c. */
#define MAX_API_KEYS 128
typedef struct {
    int oldest, newest; /* versions; the newest is -1: it is not handed on */
    int flexible_from;
} forwarded_api;

typedef struct {
    PyObject_HEAD
    PyObject *keep; /* what keeps the mappings alive */
    memory control, arena, rows;
    int64_t region_bytes;
    Py_ssize_t processors;
    PyObject *rings;  /* tuple of ResponseRing, by processor */
    pending *answered; /* by processor, not yet pushed */
    int has_answers;
    /* of the short cut */
    int64_t news_word; /* the metadata log's committed end */
    long long position;      /* where the tables below were right */
    PyObject *remembered;    /* dict: ApiVersions request -> answer's body */
    PyObject *topics;        /* dict: name, and id -> (limits, plans by partition) */
    append_plan_fields plan;
    producer_fields producers;
    transaction_table transactions;
    char syncs_acks_all;
    PyObject *readable; /* dict: name, and id -> read plans by partition */
    read_plan_fields read_plan;
    long long fetch_max_bytes; /* 0: no fetches */
    int64_t claimed;           /* a slot's state and handler while we execute it */
    int64_t fetched;           /* the first of this handler's words: fetched_bytes.py */
    plain_fetch fetch;         /* the last one, for fetch_waits() */
    plain_produce produce;     /* the last one, for appended() */
    quotas quotas;
    verdicts verdicts;
    /* The coordinator's lane, of which a response ring's push is what is needed; NULL:
     * nothing is handed on. */
    PyObject *lane;
    forwarded_api forwarded[MAX_API_KEYS];
    /* of handler_wait.c */
    PyObject *requests; /* the ring; or NULL */
    PyObject *waiting;  /* dict: partition row -> the slot of a plain fetch that waits */
    int64_t handler, handler_row;
    int epoll_fd;
    long long row; /* whose lock execute() left held */
    long long answer_bytes; /* of the answer that waits */
} handler_end;

/* Where a slot's request lies, which has room for a plain header; NULL: nowhere. */
uint8_t *request_of(const handler_end *self, int64_t slot, int64_t *size);
/* Read the header of a request of any kind; its size, or 0 if it is not plain. */
int64_t header_size(const uint8_t *frame, int64_t size, int flexible);
/* Read a Python int that is a slot; 0 and an exception. */
int read_slot(PyObject *number, int64_t *slot);
/* Where a slot's answer goes; -1: outside the arena. */
int64_t answer_offset(const handler_end *self, int64_t slot);
/* Say what a slot's answer is, and queue it for the next flush; 0 and an exception. */
int answer_slot(handler_end *self, int64_t slot, int64_t kind, int64_t offset,
                int64_t length);

/* Push all answers to their processors' rings; 0 and an exception. */
int flush_answers(handler_end *self);

/* The methods of handler_execute.c, as _core.pyi has them. */
PyObject *handler_set_tables(PyObject *object, PyObject *args);
PyObject *handler_set_producers(PyObject *object, PyObject *args);
PyObject *handler_set_transactions(PyObject *object, PyObject *args);
PyObject *handler_set_fetches(PyObject *object, PyObject *args);
PyObject *handler_execute(PyObject *object, PyObject *slot);
PyObject *handler_fetch(PyObject *object, PyObject *const *args, Py_ssize_t nargs);
PyObject *handler_fetch_waits(PyObject *object, PyObject *unused);
PyObject *handler_appended(PyObject *object, PyObject *unused);
PyObject *handler_set_quotas(PyObject *object, PyObject *args);
PyObject *handler_set_lane(PyObject *object, PyObject *args);

/* Hand a claimed slot's request on, if it is the coordinator's and plain. 1: the slot
 * is ours no more, nor is its request. 0: nothing was done.
 */
int forward_plain(const handler_end *self, int64_t slot, int64_t api_key,
                  const uint8_t *frame, int64_t size);
/* What execute() adds to a Produce's key if others wait for what it has appended to. */
#define NOTIFY 0x10000
/* Whether the tables are right: there are any, and the metadata log has no news. */
int are_current(const handler_end *self);
/* Answer a fetch of this frame, if it is plain and there is enough. */
enum fetched execute_fetch(handler_end *self, int64_t slot, const uint8_t *frame,
                           int64_t size, int is_parked, int must_answer);
/* Those of handler_wait.c. */
PyObject *handler_set_wait(PyObject *object, PyObject *args);
PyObject *handler_wait(PyObject *object, PyObject *const *args, Py_ssize_t nargs);

/* Charge a request before it is executed; 0: it was not, and must not be executed here. */
int quota_begin(const handler_end *self, int64_t slot, int64_t api_key,
                const uint8_t *frame, int64_t size, quota_charge *charge);
/* Charge its time, unless nobody is ever answered; or give back what it was charged.
 * `is_held_back`: the answer goes later, so the slot does not say yet that there is one.
 */
void quota_end(const handler_end *self, int64_t slot, int was_executed, int is_held_back,
               const quota_charge *charge);

/* Whether a slot's sender is known to have a right to a topic, or to all that a fetch
 * names; -1 and an exception. */
int may_write(const handler_end *self, int64_t slot, PyObject *topic);
int may_read(const handler_end *self, int64_t slot, const plain_fetch *fetch,
             int uses_ids);

#endif
