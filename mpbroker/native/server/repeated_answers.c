/* Python twins: the handlers of these APIs in server/handlers/. */

#include "server/repeated_answers.h"

#include "base/steps.h"
#include "ipc/connection_row.h"
#include "ipc/partition_row.h"
#include "protocol/request_header.h"

#include <string.h>

/* Longer requests are left to Python. */
#define MAX_REPEATED_BYTES 2048
#define CLIENT_WORDS 7
#define MAX_KEY_BYTES (CLIENT_WORDS * 8 + MAX_REPEATED_BYTES)

/* -- the key ----------------------------------------------------------------------- */

/* Read what an answer may depend on of the client and its connection. 0: the connection
 * has ended, and another may have the row. */
static int
read_client(const handler_end *self, int64_t slot, int64_t *words)
{
    const memory *control = &self->control;
    int64_t connection, row;
    if (!find_connection(control, slot, &connection, &row))
        return 0;
    words[0] = load(control, row + L.CONNECTION_LISTENER);
    words[1] = load(control, row + L.CONNECTION_LOCAL_ADDRESS);
    words[2] = load(control, row + L.CONNECTION_LOCAL_ADDRESS + 1);
    words[3] = load(control, row + L.CONNECTION_LOCAL_PORT);
    if (self->verdicts.are_needed) {
        words[4] = load(control, row + L.CONNECTION_PRINCIPAL);
        words[5] = load(control, row + L.CONNECTION_PEER_ADDRESS);
        words[6] = load(control, row + L.CONNECTION_PEER_ADDRESS + 1);
    }
    return is_row_of_slot(control, row, slot);
}

/* Return the key of a request; NULL, perhaps with an exception, if its answer is not to
 * be repeated. */
static PyObject *
key_of(const handler_end *self, int64_t slot, const uint8_t *frame, int64_t size)
{
    uint8_t key[MAX_KEY_BYTES];
    int64_t words[CLIENT_WORDS] = {0};
    const int64_t rest = CORRELATION_ID + CORRELATION_ID_BYTES;
    if (size > MAX_REPEATED_BYTES
        || (request_api_key(frame) != API_VERSIONS && !read_client(self, slot, words)))
        return NULL;
    uint8_t *at = key;
    memcpy(at, words, sizeof words);
    at += sizeof words;
    memcpy(at, frame, CORRELATION_ID);
    at += CORRELATION_ID;
    memcpy(at, frame + rest, size - rest);
    at += size - rest;
    return PyBytes_FromStringAndSize((char *)key, at - key);
}

/* answer_key(slot): return the key of the slot's request; None: its answer is not to be
 * repeated. */
PyObject *
handler_answer_key(PyObject *object, PyObject *number)
{
    handler_end *self = (handler_end *)object;
    int64_t slot, size;
    if (!read_slot(number, &slot))
        return NULL;
    const uint8_t *frame = request_of(self, slot, &size);
    PyObject *key = frame ? key_of(self, slot, frame, size) : NULL;
    return key == NULL && !PyErr_Occurred() ? Py_NewRef(Py_None) : key;
}

/* -- the answer -------------------------------------------------------------------- */

/* Return whether the client software of a connection is noted: client_software.py. If
 * not, Python reads its name from the ApiVersions request, and notes it. */
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

/* Find the answer to a request, borrowed; 0, perhaps with an exception, if the table
 * has none. */
static int
find_answer(const handler_end *self, int64_t slot, const uint8_t *frame, int64_t size,
            PyObject **body, PyObject **places)
{
    PyObject *key = key_of(self, slot, frame, size);
    PyObject *answer = key ? PyDict_GetItemWithError(self->repeatable, key) : NULL;
    Py_XDECREF(key);
    if (answer == NULL || !PyTuple_CheckExact(answer) || PyTuple_GET_SIZE(answer) != 2)
        return 0;
    *body = PyTuple_GET_ITEM(answer, 0);
    *places = PyTuple_GET_ITEM(answer, 1);
    return PyBytes_Check(*body) && PyBytes_Check(*places)
           && PyBytes_GET_SIZE(*body) + ANSWER_HEADER <= L.ANSWER_BYTES;
}

/* Read the offset of a place: LogLookup in storage/log/log_lookup.py. 0: left to
 * Python. */
static int
read_offset(const memory *rows, const offset_place *p, int64_t *offset)
{
    int64_t state[STATE_WORDS];
    if (!has_row(rows, p->row))
        return 0;
    const int64_t row = row_at(p->row);
    if (load(rows, row + L.ROW_STATUS) != L.ROW_ONLINE
        || !read_state(rows, p->row, state))
        return 0;
    const int64_t start = load(rows, row + L.ROW_LOG_START_OFFSET);
    const int64_t unstable = state[FIRST_UNSTABLE];
    if (p->kind == LOG_START_OFFSET)
        *offset = start;
    else if (p->kind == LOG_END_OFFSET || unstable < 0)
        *offset = state[END_OFFSET];
    else
        *offset = unstable < start ? start : unstable;
    return *offset >= p->since;
}

/* Write the offsets of all places into an answer of `size` bytes; 0: left to Python. */
static int
write_offsets(const handler_end *self, PyObject *places, uint8_t *body, int64_t size)
{
    const char *bytes = PyBytes_AS_STRING(places);
    const int64_t count = PyBytes_GET_SIZE(places) / (int64_t)sizeof(offset_place);
    for (int64_t i = 0; i < count; i++) {
        offset_place p;
        int64_t offset;
        memcpy(&p, bytes + i * sizeof p, sizeof p);
        if (p.at < 0 || p.at > size - 8 || !read_offset(&self->logs.rows, &p, &offset))
            return 0;
        write_big(body + p.at, offset, 8);
    }
    return 1;
}

enum outcome
repeat_answer(handler_end *self, int64_t slot, const uint8_t *frame, int64_t size)
{
    PyObject *body, *places;
    const int64_t at = answer_offset(self, slot);
    if (at < 0
        || (request_api_key(frame) == API_VERSIONS && !is_known_client(self, slot)))
        return LEFT_TO_PYTHON;
    if (!find_answer(self, slot, frame, size, &body, &places))
        return PyErr_Occurred() ? FAILED : LEFT_TO_PYTHON;
    const int64_t length = PyBytes_GET_SIZE(body);
    uint8_t *to = begin_answer(self, at, frame, length);
    memcpy(to, PyBytes_AS_STRING(body), length);
    STEP();
    /* If metadata changes meanwhile, a row may be that of another topic by now, and if a
     * directory fails, its partitions have no leader. */
    if (!write_offsets(self, places, to, length) || !are_current(self))
        return LEFT_TO_PYTHON;
    STEP();
    return answer_slot(self, slot, L.KIND_BYTES, at, length + ANSWER_HEADER) ? DONE
                                                                            : FAILED;
}
