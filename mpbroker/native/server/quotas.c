/* What plain requests cost their clients: the twin of ipc/tables/quota_table.py's charge, of
 * ipc/counters/network_costs.py and of server/quotas/client_quotas.py, as far as nobody has to be throttled. A
 * request is charged before it is executed, so that handlers do not exceed a quota
 * together; what is not executed here after all is given back, and charged in Python.
 * Whoever would be over a quota is left to Python, uncharged.
 */

#include "server/handler_end.h"

#include <string.h>

#define PRODUCE 0
#define NS_PER_S 1000000000
#define MAX_CLIENT_ID_BYTES 256

/* -- a row ------------------------------------------------------------------------------- */

static int64_t
sample_at(int64_t row, int64_t sample)
{
    return row + L.QUOTA_SAMPLES + sample * L.QUOTA_SAMPLE_WORDS;
}

/* Which sample an amount goes to; `*is_new` if that begins with it. Under the mutex. */
static int64_t
current_sample(const quotas *q, int64_t row, int64_t now, int *is_new)
{
    int64_t current = load_relaxed(&q->segment, row + L.QUOTA_CURRENT);
    if (current < 0 || current > q->samples)
        current = 0;
    int64_t start = load_relaxed(&q->segment, sample_at(row, current));
    *is_new = start == 0 || now - start >= q->window_ns;
    return start != 0 && *is_new ? (current + 1) % (q->samples + 1) : current;
}

/* Whether a row is within its bound with so much more. Under the mutex. */
static int
is_within(const quotas *q, int64_t row, double bound, int64_t amount, int64_t now)
{
    const memory *m = &q->segment;
    int is_new;
    int64_t current = current_sample(q, row, now, &is_new);
    int64_t total = amount, oldest = now, since = now - q->samples * q->window_ns;
    for (int64_t i = 0; i <= q->samples; i++) {
        int64_t sample = sample_at(row, i), start = load_relaxed(m, sample);
        if ((is_new && i == current) || start == 0 || load_relaxed(m, sample + 2) <= since)
            continue;
        total += load_relaxed(m, sample + 1);
        if (start < oldest)
            oldest = start;
    }
    int64_t elapsed = now - oldest, missing = q->samples - 1 - elapsed / q->window_ns;
    if (missing > 0)
        elapsed += missing * q->window_ns;
    if (elapsed < 1000000)
        elapsed = 1000000;
    return (double)total * NS_PER_S / (double)elapsed <= bound;
}

/* QuotaRow._record. */
static void
record_amount(const quotas *q, int64_t row, int64_t amount, int64_t now)
{
    const memory *m = &q->segment;
    int is_new;
    int64_t current = current_sample(q, row, now, &is_new);
    int64_t sample = sample_at(row, current);
    if (is_new) {
        store(m, sample, 0);
        STEP();
        store(m, sample + 1, 0);
        store(m, sample + 2, now);
        STEP();
        store(m, sample, now);
        STEP();
        store(m, row + L.QUOTA_CURRENT, current);
        STEP();
    }
    store(m, sample + 1, load_relaxed(m, sample + 1) + amount);
    STEP();
    store(m, sample + 2, now);
    store(m, row + L.QUOTA_USED, now);
    STEP();
    store(m, row + L.QUOTA_CHARGED, load_relaxed(m, row + L.QUOTA_CHARGED) + amount);
}

/* Charge an amount. 0: it was not, since it would be too much (unless that is to be
 * charged `anyway`), or the row is another client's.
 */
static int
charge(const quotas *q, const quota_limit *limit, int64_t amount, int64_t now, int anyway)
{
    int64_t row = L.QUOTA_HEADER_WORDS + limit->row * L.QUOTA_ROW_WORDS;
    void *mutex = mutex_at(&q->segment, row + L.QUOTA_ROW_MUTEX);
    int owner_died = 0;
    if (lock_repaired(mutex, &owner_died))
        return 0; /* damaged: Python finds out */
    STEP();
    int done = load_relaxed(&q->segment, row + L.QUOTA_GENERATION) == limit->generation
               && (anyway || is_within(q, row, limit->bound, amount, now));
    if (done)
        record_amount(q, row, amount, now);
    STEP();
    unlock(mutex);
    if (owner_died)
        tell_of_repairs();
    return done;
}

/* Whether a client is within its quota of time so far: a look without the lock, whose
 * words may be of two moments. What the request takes is charged afterwards in any case.
 */
static int
has_time_left(const quotas *q, const quota_limit *limit, int64_t now)
{
    int64_t row = L.QUOTA_HEADER_WORDS + limit->row * L.QUOTA_ROW_WORDS;
    return load(&q->segment, row + L.QUOTA_GENERATION) == limit->generation
           && is_within(q, row, limit->bound, 0, now);
}

/* -- a request's client -------------------------------------------------------------------- */

static int
read_limit(PyObject *values, Py_ssize_t first, quota_limit *limit)
{
    limit->row = PyLong_AsLongLong(PyTuple_GET_ITEM(values, first));
    limit->generation = PyLong_AsLongLong(PyTuple_GET_ITEM(values, first + 1));
    limit->bound = PyFloat_AsDouble(PyTuple_GET_ITEM(values, first + 2));
    return !PyErr_Occurred() && limit->row < L.MAX_QUOTA_ROWS;
}

/* Find what is known of the client of a request; 0: nothing, or it is not plain. */
static int
find_client(const handler_end *self, int64_t slot, const uint8_t *frame, int64_t size,
            quota_charge *c)
{
    uint8_t key[8 + MAX_CLIENT_ID_BYTES];
    const memory *control = &self->control;
    int64_t length = read_big(frame + 8, 2);
    int64_t connection = load(control, slot_row(slot) + L.SLOT_CONNECTION);
    if (length < 0)
        length = 0;
    if (length > MAX_CLIENT_ID_BYTES || length > size - 10 || connection < 0
        || connection >= L.CONTROL_WORDS
        || !has_words(control, L.CONNECTION_ROWS + connection * L.CONNECTION_WORDS,
                      L.CONNECTION_WORDS))
        return 0;
    int64_t row = L.CONNECTION_ROWS + connection * L.CONNECTION_WORDS;
    int64_t principal = load(control, row + L.CONNECTION_PRINCIPAL);
    /* After it: of a client that has gone, the row may be another's by now. */
    if (load(control, row + L.CONNECTION_SLOT) != slot + 1)
        return 0;
    memcpy(key, &principal, 8);
    memcpy(key + 8, frame + 10, length);
    PyObject *bytes = PyBytes_FromStringAndSize((char *)key, 8 + length);
    PyObject *values = bytes ? PyDict_GetItemWithError(self->quotas.clients, bytes) : NULL;
    Py_XDECREF(bytes);
    int known = values != NULL && PyTuple_Check(values) && PyTuple_GET_SIZE(values) == 6
                && read_limit(values, 0, &c->bytes) && read_limit(values, 3, &c->time);
    if (PyErr_Occurred())
        PyErr_Clear();
    return known;
}

int
quota_begin(const handler_end *self, int64_t slot, int64_t api_key, const uint8_t *frame,
            int64_t size, quota_charge *c)
{
    const quotas *q = &self->quotas;
    c->is_charged = 0;
    if (!q->are_set)
        return 1;
    c->begun = monotonic_ns();
    if (!find_client(self, slot, frame, size, c))
        return 0;
    if (api_key != PRODUCE)
        c->bytes.row = -1;
    if (c->time.row >= 0 && !has_time_left(q, &c->time, c->begun))
        return 0;
    if (c->bytes.row >= 0 && !charge(q, &c->bytes, size, c->begun, 0))
        return 0;
    c->is_charged = 1;
    c->size = size;
    return 1;
}

/* network_costs.network_ns: what a request and its answer cost their processor. */
static int64_t
network_ns(const handler_end *self, int64_t slot, int64_t request_bytes)
{
    const memory *control = &self->control;
    int64_t bytes = request_bytes, row = slot_row(slot);
    if (load(control, row + L.SLOT_RESPONSE_KIND) == L.KIND_BYTES)
        bytes += load(control, row + L.SLOT_RESPONSE_LENGTH);
    int64_t processor = L.PROCESSORS + slot / L.SLOTS_PER_PROCESSOR * L.PROCESSOR_WORDS;
    int64_t unit_ns = load_relaxed(control, processor + L.PROCESSOR_UNIT_COST);
    return unit_ns * (((int64_t)1 << L.UNIT_SHIFT) + bytes) >> L.UNIT_SHIFT;
}

void
quota_end(const handler_end *self, int64_t slot, int was_executed, int is_held_back,
          const quota_charge *c)
{
    if (!c->is_charged)
        return;
    int64_t now = monotonic_ns();
    if (!was_executed && c->bytes.row >= 0)
        charge(&self->quotas, &c->bytes, -c->size, now, 1);
    if (was_executed && c->time.row >= 0
        && (is_held_back
            || load(&self->control, slot_row(slot) + L.SLOT_RESPONSE_KIND) != L.KIND_NONE))
        charge(&self->quotas, &c->time,
               now - c->begun + network_ns(self, slot, c->size), now, 1);
}

PyObject *
handler_set_quotas(PyObject *object, PyObject *args)
{
    handler_end *self = (handler_end *)object;
    PyObject *view;
    long long samples, window_ns;
    memory segment;
    if (!PyArg_ParseTuple(args, "OLL", &view, &samples, &window_ns)
        || !get_memory(view, &segment))
        return NULL;
    if (!has_words(&segment, 0,
                   L.QUOTA_HEADER_WORDS + L.MAX_QUOTA_ROWS * L.QUOTA_ROW_WORDS)
        || samples < 1 || samples > L.MAX_QUOTA_SAMPLES || window_ns < 1)
        return PyErr_Format(PyExc_ValueError, "no table of quotas");
    PyObject *keep = PyTuple_Pack(2, self->keep, view);
    if (keep == NULL)
        return NULL;
    Py_SETREF(self->keep, keep);
    self->quotas.segment = segment;
    self->quotas.samples = samples;
    self->quotas.window_ns = window_ns;
    Py_RETURN_NONE;
}
