/* What plain requests cost their clients: the twin of ipc/tables/quota_table.py's charge, of
 * ipc/counters/network_costs.py and of server/quotas/client_quotas.py, as far as nobody has to be throttled. A
 * request is charged before it is executed, so that handlers do not exceed a quota
 * together; what is not executed here after all is given back, and charged in Python.
 * Whoever would be over a quota is left to Python, uncharged.
 */

#include "server/handler_end.h"

#include <string.h>

#define PRODUCE 0
#define MAX_CLIENT_ID_BYTES 256

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
    int64_t connection, row;
    if (length < 0)
        length = 0;
    if (length > MAX_CLIENT_ID_BYTES || length > size - 10
        || !find_connection(control, slot, &connection, &row))
        return 0;
    int64_t principal = load(control, row + L.CONNECTION_PRINCIPAL);
    if (!is_row_of_slot(control, row, slot))
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
    if (c->time.row >= 0 && !is_within_limit(&q->table, &c->time, c->begun))
        return 0;
    if (c->bytes.row >= 0 && !charge_within(&q->table, &c->bytes, size, c->begun))
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
        charge_anyway(&self->quotas.table, &c->bytes, -c->size, now);
    if (was_executed && c->time.row >= 0
        && (is_held_back
            || load(&self->control, slot_row(slot) + L.SLOT_RESPONSE_KIND) != L.KIND_NONE))
        charge_anyway(&self->quotas.table, &c->time,
                      now - c->begun + network_ns(self, slot, c->size), now);
}

PyObject *
handler_set_quotas(PyObject *object, PyObject *args)
{
    handler_end *self = (handler_end *)object;
    PyObject *view;
    long long samples, window_ns;
    memory segment;
    quota_table table;
    if (!PyArg_ParseTuple(args, "OLL", &view, &samples, &window_ns)
        || !get_memory(view, &segment))
        return NULL;
    if (!open_quota_table(&table, &segment, samples, window_ns))
        return PyErr_Format(PyExc_ValueError, "no table of quotas");
    PyObject *keep = PyTuple_Pack(2, self->keep, view);
    if (keep == NULL)
        return NULL;
    Py_SETREF(self->keep, keep);
    self->quotas.table = table;
    Py_RETURN_NONE;
}
