/* Python twin: RequestMetrics.record in ipc/counters/request_metrics.py. */

#include "ipc/request_metrics.h"

#include "base/big_endian.h"
#include "base/steps.h"
#include "ipc/request_slot.h"

#define SIZE_BYTES 4
#define SHORTEST_HEADER 8 /* API key, version, correlation id */
#define STAGES 6
#define TOTAL (STAGES - 1)

static int64_t
bucket_of(int64_t ns)
{
    int64_t bucket = 0;
    for (ns >>= L.HISTOGRAM_SHIFT; ns > 0; ns >>= 1)
        bucket++;
    return bucket < L.HISTOGRAM_BUCKETS ? bucket : L.HISTOGRAM_BUCKETS - 1;
}

static int64_t
later(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* What is known of a request whose answer is out. */
typedef struct {
    int64_t api_key, version, correlation_id, connection, request_bytes, response_bytes;
    /* received, dequeued, parked, completed, taken, sent; in ns, none before the
     * last */
    int64_t times[STAGES];
} measured;

/* Add a request to the processor's log: RequestMetrics._log_request. */
static void
log_request(const memory *control, int64_t processor, const measured *m)
{
    const int64_t log = L.REQUEST_LOGS + processor * L.LOG_WORDS;
    const int64_t noted = load(control, log + L.LOG_NOTED);
    if (noted < 0)
        return;
    const int64_t at = log + L.LOG_FIRST + noted % L.LOG_ENTRIES * L.LOG_ENTRY_WORDS;
    const int64_t fields[] = {m->api_key, m->version, m->correlation_id, m->connection};
    int64_t next = at + 1;
    /* The number first and last: a reader takes an entry whose number is right before
     * and after. An entry that is left half written by a kill is taken by none. */
    store(control, at, 0);
    for (int i = 0; i < 4; i++)
        store(control, next++, fields[i]);
    for (int i = 0; i < STAGES; i++)
        store(control, next++, m->times[i]);
    store(control, next++, m->request_bytes);
    store(control, next, m->response_bytes);
    STEP();
    store(control, at, noted + 1);
    store(control, log + L.LOG_NOTED, noted + 1);
}

/* Read the times from a slot's row. Some may be missing, if a successor went on with
 * it. */
static void
read_times(const memory *control, int64_t row, int64_t taken, int64_t sent,
           int64_t *times)
{
    times[0] = load(control, row + L.SLOT_RECEIVED);
    times[1] = later(load(control, row + L.SLOT_DEQUEUED), times[0]);
    times[3] = later(load(control, row + L.SLOT_COMPLETED), times[1]);
    times[2] = load(control, row + L.SLOT_PARKED);
    if (times[2] < times[1] || times[2] > times[3])
        times[2] = times[3]; /* it did not have to wait */
    times[4] = later(taken, times[3]);
    times[5] = later(sent, times[4]);
}

/* Read what a slot and its request's header say; `counted_as`: the row of its API. */
static void
measure(const memory *control, const memory *arena, int64_t slot, measured *m,
        int64_t *counted_as, int64_t *counted_version)
{
    const int64_t row = slot_row(slot);
    const int64_t offset = load(control, row + L.SLOT_REQUEST_OFFSET);
    const int64_t length = load(control, row + L.SLOT_REQUEST_LENGTH);
    static const uint8_t none[SHORTEST_HEADER];
    const uint8_t *head = none;
    *counted_as = L.API_ROWS - 1; /* of requests that are of no API */
    *counted_version = 0;
    if (length >= SHORTEST_HEADER && has_bytes(arena, offset, SHORTEST_HEADER)) {
        head = arena->base + offset;
        if (head[0] == 0 && head[1] < L.API_ROWS) {
            *counted_as = head[1];
            *counted_version = head[2] << 8 | head[3];
        }
    }
    if (*counted_version >= L.API_VERSIONS)
        *counted_version = L.API_VERSIONS - 1;
    m->api_key = *counted_as;
    m->version = read_big(head + 2, 2);
    m->correlation_id = read_big(head + 4, 4);
    m->connection = load(control, row + L.SLOT_CONNECTION);
    m->request_bytes = length + SIZE_BYTES;
    m->response_bytes = load(control, row + L.SLOT_RESPONSE_LENGTH);
}

void
record_request(const memory *control, const memory *arena, int64_t processor,
               int64_t slot, int64_t taken_ns, int64_t sent_ns)
{
    measured m;
    int64_t api, version;
    measure(control, arena, slot, &m, &api, &version);
    read_times(control, slot_row(slot), taken_ns, sent_ns, m.times);
    int64_t at = L.API_TABLES + (processor * L.API_ROWS + api) * L.API_ROW_WORDS;
    add_to_word(control, at + L.API_REQUEST_BYTES, m.request_bytes);
    add_to_word(control, at + L.API_RESPONSE_BYTES, m.response_bytes);
    const int64_t total = m.times[STAGES - 1] - m.times[0];
    at += L.API_HISTOGRAMS;
    for (int stage = 0; stage < STAGES; stage++, at += L.HISTOGRAM_WORDS) {
        int64_t ns = stage == TOTAL ? total : m.times[stage + 1] - m.times[stage];
        add_to_word(control, at + bucket_of(ns), 1);
        STEP();
        /* Killed in between, the sum lacks one request that its buckets have. */
        add_to_word(control, at + L.HISTOGRAM_BUCKETS, ns);
    }
    add_to_word(control, at + version, 1);
    const int64_t above = load_relaxed(control, L.METRICS + L.METRICS_LOG_ABOVE);
    if (above && total >= above - 1)
        log_request(control, processor, &m);
}
