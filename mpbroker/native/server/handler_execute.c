#include "server/handler_execute.h"

#include "base/steps.h"
#include "ipc/connection_row.h"
#include "ipc/partition_row.h"
#include "protocol/request_header.h"
#include "server/fetch.h"
#include "server/forward.h"
#include "server/produce.h"
#include "server/quotas.h"

#include <string.h>

/* The requests that core_cache.py remembers are a little shorter. */
#define MAX_REMEMBERED_BYTES 512

/* Return whether the client software of a connection is noted: client_software.py. If
 * not, Python reads its name from the request, and notes it. */
static int
is_known_client(const handler_end *self, int64_t slot)
{
    const memory *control = &self->control;
    int64_t connection, row;
    if (!find_connection(control, slot, &connection, &row)
        || !has_words(control, L.CONNECTION_SOFTWARE + connection, 1))
        return 0;
    const int64_t cookie = load(control, row + L.CONNECTION_COOKIE);
    const int64_t noted = load(control, L.CONNECTION_SOFTWARE + connection);
    return noted >> L.SOFTWARE_SHIFT == cookie;
}

/* Return the answer's body to an ApiVersions that was answered before, borrowed; NULL,
 * perhaps with an exception, if it was not. */
static PyObject *
remembered_body(const handler_end *self, const uint8_t *frame, int64_t size)
{
    uint8_t bytes[MAX_REMEMBERED_BYTES];
    if (size > MAX_REMEMBERED_BYTES)
        return NULL;
    /* The key is the request without its correlation id. */
    const int64_t rest = CORRELATION_ID + CORRELATION_ID_BYTES;
    memcpy(bytes, frame, CORRELATION_ID);
    memcpy(bytes + CORRELATION_ID, frame + rest, size - rest);
    PyObject *key =
        PyBytes_FromStringAndSize((char *)bytes, size - CORRELATION_ID_BYTES);
    PyObject *body = key ? PyDict_GetItemWithError(self->remembered, key) : NULL;
    Py_XDECREF(key);
    return body != NULL && PyBytes_Check(body)
                   && PyBytes_GET_SIZE(body) + ANSWER_HEADER <= L.ANSWER_BYTES
               ? body
               : NULL;
}

static enum outcome
execute_api_versions(handler_end *self, int64_t slot, const uint8_t *frame,
                     int64_t size)
{
    const int64_t at = answer_offset(self, slot);
    if (at < 0 || !is_known_client(self, slot))
        return LEFT_TO_PYTHON;
    PyObject *body = remembered_body(self, frame, size);
    if (body == NULL)
        return PyErr_Occurred() ? FAILED : LEFT_TO_PYTHON;
    const int64_t length = PyBytes_GET_SIZE(body);
    memcpy(begin_answer(self, at, frame, length), PyBytes_AS_STRING(body), length);
    STEP();
    return answer_slot(self, slot, L.KIND_BYTES, at, length + ANSWER_HEADER) ? DONE
                                                                            : FAILED;
}

PyObject *
handler_execute(PyObject *object, PyObject *number)
{
    handler_end *self = (handler_end *)object;
    int64_t slot, size;
    if (!read_slot(number, &slot))
        return NULL;
    uint8_t *frame = request_of(self, slot, &size);
    if (frame == NULL)
        Py_RETURN_NONE;
    const int64_t api_key = request_api_key(frame);
    if (forward_request(self, slot, api_key, frame, size))
        return PyLong_FromLongLong(api_key);
    quota_charge charge;
    if (!are_current(self) || !quota_begin(self, slot, api_key, frame, size, &charge))
        Py_RETURN_NONE;
    enum outcome outcome = LEFT_TO_PYTHON;
    int flags = 0;
    if (api_key == PRODUCE)
        outcome = execute_produce(self, slot, frame, size, &flags);
    else if (api_key == FETCH)
        outcome = execute_fetch(self, slot, frame, size, 0, 0);
    else if (api_key == API_VERSIONS)
        outcome = execute_api_versions(self, slot, frame, size);
    quota_end(self, slot, outcome > 0, flags > 0 && flags & RESULT_WAITS, &charge);
    if (outcome == FAILED)
        return NULL;
    if (flags == ROW_IS_HELD)
        return PyLong_FromLong(ROW_IS_HELD);
    if (outcome == LEFT_TO_PYTHON)
        Py_RETURN_NONE;
    if (outcome == MUST_WAIT)
        flags |= RESULT_WAITS;
    return PyLong_FromLongLong(api_key | flags);
}
