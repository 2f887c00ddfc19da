/* Python twins: CoordinatorLane.forward in ipc/lane.py; the reading of headers in
 * server/dispatcher.py. */

#include "server/forward.h"

#include "ipc/ring.h"
#include "protocol/request_header.h"
#include "server/handler_end.h"

#include <string.h>

PyObject *
handler_set_lane(PyObject *object, PyObject *args)
{
    handler_end *self = (handler_end *)object;
    PyObject *lane, *apis, *key, *versions;
    forwarded_api table[MAX_API_KEYS];
    Py_ssize_t at = 0;
    if (!PyArg_ParseTuple(args, "O!O!", &ResponseRing_Type, &lane, &PyDict_Type, &apis))
        return NULL;
    for (int i = 0; i < MAX_API_KEYS; i++)
        table[i] = (forwarded_api){0, -1, 0};
    while (PyDict_Next(apis, &at, &key, &versions)) {
        long long number = PyLong_AsLongLong(key);
        if (PyErr_Occurred())
            return NULL;
        if (number < 0 || number >= MAX_API_KEYS || !PyTuple_Check(versions))
            return PyErr_Format(PyExc_ValueError, "no API, or no versions of one");
        forwarded_api *api = &table[number];
        if (!PyArg_ParseTuple(versions, "iii", &api->oldest, &api->newest,
                              &api->flexible_from))
            return NULL;
    }
    memcpy(self->forwarded, table, sizeof table);
    Py_XSETREF(self->lane, Py_NewRef(lane));
    Py_RETURN_NONE;
}

int
forward_request(const handler_end *self, int64_t slot, int64_t api_key,
                const uint8_t *frame, int64_t size)
{
    if (self->lane == NULL || api_key < 0 || api_key >= MAX_API_KEYS)
        return 0;
    const forwarded_api *api = &self->forwarded[api_key];
    const int64_t version = request_api_version(frame);
    if (version < api->oldest || version > api->newest
        || request_header_size(frame, size, version >= api->flexible_from) == 0)
        return 0;
    /* From the commit of this push on, the coordinator is responsible for the slot: it
     * may have claimed the slot, and written to it, before this returns. */
    if (ring_push(self->lane, &slot, 1))
        return 1;
    PyErr_Clear(); /* the mutex is damaged, so nothing was written; Python reports it */
    return 0;
}
