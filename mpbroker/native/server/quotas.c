/* Python twins: server/quotas/client_quotas.py and ipc/counters/network_costs.py,
 * except for the throttling of clients.
 */

#include "server/quotas.h"

#include "base/clock.h"
#include "ipc/connection_row.h"
#include "ipc/request_slot.h"
#include "protocol/request_header.h"
#include "server/handler_end.h"

#include <string.h>

#define MAX_CLIENT_ID_BYTES 256
#define PRINCIPAL_BYTES 8

static int
read_limit(PyObject *values, Py_ssize_t first, quota_limit *limit)
{
    limit->row = PyLong_AsLongLong(PyTuple_GET_ITEM(values, first));
    limit->generation = PyLong_AsLongLong(PyTuple_GET_ITEM(values, first + 1));
    limit->bound = PyFloat_AsDouble(PyTuple_GET_ITEM(values, first + 2));
    return !PyErr_Occurred() && limit->row < L.MAX_QUOTA_ROWS;
}

/* Find the limits of a request's client; 0: they are not in the tables. */
static int
find_limits(const handler_end *self, int64_t slot, const uint8_t *frame, int64_t size,
            quota_charge *c)
{
    uint8_t key[PRINCIPAL_BYTES + MAX_CLIENT_ID_BYTES];
    const memory *control = &self->control;
    int64_t length = read_big(frame + CLIENT_ID_LENGTH, 2), connection, row;
    if (length < 0)
        length = 0;
    if (length > MAX_CLIENT_ID_BYTES || length > size - CLIENT_ID
        || !find_connection(control, slot, &connection, &row))
        return 0;
    const int64_t principal = load(control, row + L.CONNECTION_PRINCIPAL);
    if (!is_row_of_slot(control, row, slot))
        return 0;
    memcpy(key, &principal, PRINCIPAL_BYTES);
    memcpy(key + PRINCIPAL_BYTES, frame + CLIENT_ID, length);
    PyObject *bytes = PyBytes_FromStringAndSize((char *)key, PRINCIPAL_BYTES + length);
    PyObject *values = NULL;
    if (bytes != NULL)
        values = PyDict_GetItemWithError(self->quotas.clients, bytes);
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
    const quota_table *table = &self->quotas.table;
    c->is_charged = 0;
    if (!self->quotas.are_set)
        return 1;
    c->begun_ns = monotonic_ns();
    if (!find_limits(self, slot, frame, size, c))
        return 0;
    if (api_key != PRODUCE)
        c->bytes.row = -1;
    if (c->time.row >= 0 && !is_within_limit(table, &c->time, c->begun_ns))
        return 0;
    if (c->bytes.row >= 0 && !charge_within(table, &c->bytes, size, c->begun_ns))
        return 0;
    c->is_charged = 1;
    c->size = size;
    return 1;
}

/* Return the cost of a request and its answer for their processor, in ns:
 * network_costs.network_ns. */
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
    const quota_table *table = &self->quotas.table;
    if (!c->is_charged)
        return;
    const int64_t now = monotonic_ns();
    if (!was_executed && c->bytes.row >= 0)
        charge_anyway(table, &c->bytes, -c->size, now);
    const int64_t kind = load(&self->control, slot_row(slot) + L.SLOT_RESPONSE_KIND);
    if (was_executed && c->time.row >= 0 && (is_held_back || kind != L.KIND_NONE))
        charge_anyway(table, &c->time,
                      now - c->begun_ns + network_ns(self, slot, c->size), now);
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
    if (!keep_alive(self, view))
        return NULL;
    self->quotas.table = table;
    Py_RETURN_NONE;
}
