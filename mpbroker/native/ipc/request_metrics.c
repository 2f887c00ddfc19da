/* Python twin: RequestMetrics.record in ipc/counters/request_metrics.py. */

#include "ipc/request_metrics.h"

#include "base/big_endian.h"
#include "base/steps.h"
#include "ipc/connection_row.h"
#include "ipc/request_slot.h"

#define SIZE_BYTES 4
#define SHORTEST_HEADER 8 /* API key, version, correlation id */
#define STAGES 6
#define TOTAL (STAGES - 1)
#define COMPLETED 3
#define NS_PER_MS 1000000
#define TOPIC_WITHIN 1024 /* bytes of a request */
#define PRODUCE 0
#define FETCH 1
#define TOPIC_IDS_SINCE 13

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

/* The numbers of a request whose answer was sent. */
typedef struct {
    int64_t api_key, version, correlation_id, connection, request_bytes, response_bytes;
    /* received, dequeued, parked, completed, taken, sent; in ns, each at least as late
     * as the one before it */
    int64_t times[STAGES];
} measured;

/* A request's bytes, read from front to back. Files in ipc/ do not use the readers in
 * protocol/, so the few that first_topic() needs are here. */
typedef struct {
    const uint8_t *at;
    const uint8_t *end;
} cursor;

/* Read a big-endian integer of `bytes` bytes; -1 if it is cut off. */
static int64_t
next_big(cursor *c, int bytes)
{
    if (c->end - c->at < bytes) {
        c->at = c->end;
        return -1;
    }
    c->at += bytes;
    return read_big(c->at - bytes, bytes);
}

/* Read the length of a text; a number below 0 means null, or that it is cut off. */
static int64_t
next_length(cursor *c, int is_flexible)
{
    if (!is_flexible)
        return next_big(c, 2);
    int64_t value = 0;
    for (int shift = 0; shift < 35 && c->at < c->end; shift += 7) {
        const int64_t byte = *c->at++;
        value |= (byte & 0x7f) << shift;
        if (byte < 0x80)
            return value - 1;
    }
    return -1;
}

static void
skip(cursor *c, int64_t bytes)
{
    if (bytes > 0)
        c->at = bytes < c->end - c->at ? c->at + bytes : c->end;
}

/* The twin of first_topic(). */
static int64_t
first_topic(const uint8_t *request, int64_t length)
{
    cursor c = {request, request + (length < TOPIC_WITHIN ? length : TOPIC_WITHIN)};
    const int64_t key = next_big(&c, 2), version = next_big(&c, 2);
    if ((key != PRODUCE && key != FETCH) || version < 0 || version > 0xff)
        return 0;
    const int is_flexible = version >= (key == PRODUCE ? 9 : 12);
    skip(&c, 4);
    skip(&c, next_big(&c, 2)); /* the client id */
    if (is_flexible && next_big(&c, 1) != 0)
        return 0; /* tagged fields */
    if (key == PRODUCE) {
        skip(&c, next_length(&c, is_flexible)); /* the transactional id */
        skip(&c, 6);
    }
    else {
        skip(&c, (version >= 15 ? 0 : 4) + 8 + (version >= 3 ? 4 : 0)
                     + (version >= 4 ? 1 : 0) + (version >= 7 ? 8 : 0));
    }
    const int64_t count = is_flexible ? next_length(&c, 1) : next_big(&c, 4);
    if (count < 1)
        return 0;
    const int64_t size = version < TOPIC_IDS_SINCE ? next_length(&c, is_flexible) : 16;
    if (size < 1 || size > c.end - c.at)
        return 0;
    uint64_t hash = 0xcbf29ce484222325;
    for (int64_t i = 0; i < size; i++)
        hash = (hash ^ c.at[i]) * 0x100000001b3;
    return (int64_t)(hash >> 1);
}

/* The twin of RequestMetrics._notes(). */
static int64_t
notes_of(const memory *control, int64_t slot, const measured *m, int64_t connection)
{
    const int64_t row = slot_row(slot);
    const int64_t is_its = load(control, row + L.SLOT_ERROR_OF)
                           == load(control, row + L.SLOT_RECEIVED);
    const int64_t error = is_its ? load(control, row + L.SLOT_ERROR) & 0xffff : 0;
    const int64_t muted = load_relaxed(control, connection + L.CONNECTION_MUTED_UNTIL)
                          - m->times[COMPLETED];
    const int64_t throttle_ms = muted > 0 ? (muted + NS_PER_MS - 1) / NS_PER_MS : 0;
    const int64_t listener = load(control, connection + L.CONNECTION_LISTENER) & 0xffff;
    return throttle_ms << 32 | listener << 16 | error;
}

/* Add a request to the processor's log: RequestMetrics._log_request. */
static void
log_request(const memory *control, const memory *arena, int64_t processor, int64_t slot,
            const measured *m)
{
    const int64_t log = L.REQUEST_LOGS + processor * L.LOG_WORDS;
    const int64_t noted = load(control, log + L.LOG_NOTED);
    if (noted < 0)
        return;
    const int64_t at = log + L.LOG_FIRST + noted % L.LOG_ENTRIES * L.LOG_ENTRY_WORDS;
    const int64_t fields[] = {m->api_key, m->version, m->correlation_id, m->connection};
    int64_t next = at + 1;
    /* The number is cleared first and stored last: a reader takes an entry only if its
     * number is right before and after reading it. So no reader takes an entry that was
     * left half written by a killed process. */
    store(control, at, 0);
    for (int i = 0; i < 4; i++)
        store(control, next++, fields[i]);
    for (int i = 0; i < STAGES; i++)
        store(control, next++, m->times[i]);
    store(control, next++, m->request_bytes);
    store(control, next++, m->response_bytes);
    int64_t number, connection;
    if (!find_connection(control, slot, &number, &connection))
        return;
    const int64_t row = slot_row(slot);
    const int64_t offset = load(control, row + L.SLOT_REQUEST_OFFSET);
    const int64_t length = load(control, row + L.SLOT_REQUEST_LENGTH);
    const int64_t within = length < TOPIC_WITHIN ? length : TOPIC_WITHIN;
    store(control, next++, load(control, connection + L.CONNECTION_PRINCIPAL));
    store(control, next++, notes_of(control, slot, m, connection));
    store(control, next,
          has_bytes(arena, offset, within) ? first_topic(arena->base + offset, length)
                                           : 0);
    STEP();
    store(control, at, noted + 1);
    store(control, log + L.LOG_NOTED, noted + 1);
}

/* Read the times from a slot's row. Some may be missing, if a successor finished the
 * work of a dead process. */
static void
read_times(const memory *control, int64_t row, int64_t taken, int64_t sent,
           int64_t *times)
{
    times[0] = load(control, row + L.SLOT_RECEIVED);
    times[1] = later(load(control, row + L.SLOT_DEQUEUED), times[0]);
    times[3] = later(load(control, row + L.SLOT_COMPLETED), times[1]);
    times[2] = load(control, row + L.SLOT_PARKED);
    if (times[2] < times[1] || times[2] > times[3])
        times[2] = times[3]; /* the request did not have to wait */
    times[4] = later(taken, times[3]);
    times[5] = later(sent, times[4]);
}

/* Read the numbers of a request from its slot and its header. `counted_as`: the row of
 * the API in the processor's table. */
static void
measure(const memory *control, const memory *arena, int64_t slot, measured *m,
        int64_t *counted_as, int64_t *counted_version)
{
    const int64_t row = slot_row(slot);
    const int64_t offset = load(control, row + L.SLOT_REQUEST_OFFSET);
    const int64_t length = load(control, row + L.SLOT_REQUEST_LENGTH);
    static const uint8_t none[SHORTEST_HEADER];
    const uint8_t *head = none;
    *counted_as = L.API_ROWS - 1; /* the row of requests without a valid API key */
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
        /* If the processor is killed in between, the sum lacks one request that the
         * buckets have. */
        add_to_word(control, at + L.HISTOGRAM_BUCKETS, ns);
    }
    add_to_word(control, at + version, 1);
    const int64_t above = load_relaxed(control, L.METRICS + L.METRICS_LOG_ABOVE);
    if (above && total >= above - 1)
        log_request(control, arena, processor, slot, &m);
}
