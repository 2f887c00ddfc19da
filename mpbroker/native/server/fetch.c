/* Python twin: server/fetch/fetch_service.py. */

#include "server/fetch.h"

#include "base/steps.h"
#include "ipc/request_slot.h"
#include "protocol/request_fields.h"
#include "protocol/request_header.h"
#include "server/fetch_request.h"
#include "server/verdicts.h"
#include "storage/log_reader.h"

PyObject *
handler_set_fetches(PyObject *object, PyObject *args)
{
    handler_end *self = (handler_end *)object;
    PyObject *plan, *segment;
    long long handler, max_bytes;
    read_plan_fields fields;
    if (!PyArg_ParseTuple(args, "O!O!LL", &PyType_Type, &plan, &PyType_Type, &segment,
                          &handler, &max_bytes)
        || !find_read_plan_fields(&fields, (PyTypeObject *)plan,
                                  (PyTypeObject *)segment))
        return NULL;
    self->read_plan = fields;
    self->claimed = state_of_handler(handler, L.STATE_CLAIMED);
    self->fetched_words = L.FETCHED_BYTES + handler * L.MAX_PARTITIONS;
    self->fetch_max_bytes = max_bytes;
    Py_RETURN_NONE;
}

/* -- finding records --------------------------------------------------------------- */

/* Return a partition's ReadPlan, borrowed; NULL, perhaps with an exception, if there is
 * none. */
static PyObject *
find_plan(const handler_end *self, const request_topic *topic, int version,
          int partition)
{
    PyObject *name = topic_key(topic, version);
    if (name == NULL)
        return NULL;
    PyObject *plans = PyDict_GetItemWithError(self->readable, name);
    Py_DECREF(name);
    if (plans == NULL || !PyDict_CheckExact(plans))
        return NULL;
    PyObject *index = PyLong_FromLong(partition);
    PyObject *plan = index ? PyDict_GetItemWithError(plans, index) : NULL;
    Py_XDECREF(index);
    return plan;
}

/* Find the records of all partitions, within the limits of the request; 0: left to
 * Python, perhaps with an exception. */
static int
find_all(const handler_end *self, fetch_request *f, int64_t *found_bytes)
{
    int64_t left = f->max_bytes;
    *found_bytes = 0;
    for (int i = 0; i < f->topic_count; i++)
        for (int j = 0; j < f->topics[i].count; j++) {
            fetch_partition *part = &f->partitions[f->topics[i].first + j];
            part->plan = find_plan(self, &f->topics[i], f->version, part->index);
            if (part->plan == NULL)
                return 0;
            const read_request wanted = {
                part->offset, part->leader_epoch,
                left < part->max_bytes ? left : part->max_bytes, f->read_committed,
                *found_bytes == 0, /* the first batch of the answer is given whole */
            };
            if (!find_records(&self->logs.rows, &self->read_plan, part->plan, &wanted,
                              &part->found))
                return 0;
            *found_bytes += part->found.length;
            left = left > part->found.length ? left - part->found.length : 0;
        }
    return 1;
}

/* Read a request into self->fetch, and check that its sender may read. */
static enum outcome
read_fetch(handler_end *self, int64_t slot, const uint8_t *frame, int64_t size)
{
    fetch_request *f = &self->fetch;
    const int version = (int)request_api_version(frame);
    const int64_t header =
        request_header_size(frame, size, version >= FETCH_FLEXIBLE_FROM);
    if (self->fetch_max_bytes <= 0 || header == 0 || answer_offset(self, slot) < 0
        || !parse_fetch_request(frame + header, size - header, version, f))
        return LEFT_TO_PYTHON;
    const int is_allowed = may_read(self, slot, f->topics, f->topic_count, version);
    if (is_allowed <= 0)
        return is_allowed < 0 ? FAILED : LEFT_TO_PYTHON;
    if (f->max_bytes > self->fetch_max_bytes)
        f->max_bytes = self->fetch_max_bytes;
    return DONE;
}

/* -- the answer -------------------------------------------------------------------- */

/* Write the records that were found as the answer's body, from `body` on; `*end`: the
 * body's end. LEFT_TO_PYTHON: it does not fit, or a file has changed meanwhile. */
static enum outcome
write_body(const handler_end *self, fetch_request *f, uint8_t *body, int64_t room,
           uint8_t **end)
{
    if (fetch_answer_bound(f) > room)
        return LEFT_TO_PYTHON;
    *end = write_fetch_answer(body, f);
    if (*end == NULL)
        return LEFT_TO_PYTHON;
    STEP();
    /* After all records are read: if a row's structure word has changed, a file may
     * have been replaced or removed before it was read. */
    for (int i = 0; i < f->partition_count; i++)
        if (!is_unmoved(&self->logs.rows, &f->partitions[i].found))
            return LEFT_TO_PYTHON;
    for (int i = 0; i < f->partition_count; i++)
        if (!remember_end(&self->read_plan, f->partitions[i].plan,
                          &f->partitions[i].found))
            return FAILED;
    return DONE;
}

/* Count the bytes of each partition in the answer, in words of the partition segment
 * that only this handler id writes: ipc/counters/fetched_bytes.py. */
static void
count_fetched(const handler_end *self, const fetch_request *f)
{
    const memory *rows = &self->logs.rows;
    for (int i = 0; i < f->partition_count; i++) {
        const read_region *found = &f->partitions[i].found;
        const int64_t at = self->fetched_words + found->row;
        if (found->length > 0 && has_words(rows, at, 1)) {
            add_to_word(rows, at, found->length);
            STEP();
        }
    }
}

enum outcome
execute_fetch(handler_end *self, int64_t slot, const uint8_t *frame, int64_t size,
              int is_parked, int must_answer)
{
    fetch_request *f = &self->fetch;
    int64_t found_bytes;
    enum outcome outcome = read_fetch(self, slot, frame, size);
    if (outcome != DONE)
        return outcome;
    if (!find_all(self, f, &found_bytes))
        return PyErr_Occurred() ? FAILED : LEFT_TO_PYTHON;
    if (found_bytes < f->min_bytes && f->max_wait_ms > 0 && !must_answer)
        return MUST_WAIT;
    const int64_t at = answer_offset(self, slot);
    uint8_t *start = self->arena.base + at, *end = NULL;
    uint8_t *body = write_no_tagged_fields(start + ANSWER_HEADER,
                                           f->version >= FETCH_FLEXIBLE_FROM);
    outcome = write_body(self, f, body, L.ANSWER_BYTES - (body - start), &end);
    if (outcome != DONE)
        return outcome;
    begin_answer(self, at, frame, end - start - ANSWER_HEADER);
    STEP();
    if (is_parked) {
        /* Before the slot is pushed: a slot on a response ring has to be CLAIMED, or
         * the supervisor's repair would take its request for one that still waits. If
         * this process is killed in between, the request is executed again. */
        set_slot_state(&self->control, slot, self->claimed);
        STEP();
    }
    if (!answer_slot(self, slot, L.KIND_BYTES, at, end - start))
        return FAILED;
    count_fetched(self, f);
    return DONE;
}

/* fetch(slot, must_answer): try a parked fetch. True: it is answered. False: it has to
 * wait longer. None: left to Python. */
PyObject *
handler_fetch(PyObject *object, PyObject *const *args, Py_ssize_t nargs)
{
    handler_end *self = (handler_end *)object;
    int64_t slot, size;
    if (nargs != 2)
        return PyErr_Format(PyExc_TypeError, "fetch(slot, must_answer)");
    if (!read_slot(args[0], &slot))
        return NULL;
    const uint8_t *frame = request_of(self, slot, &size);
    if (frame == NULL || !are_current(self) || request_api_key(frame) != FETCH)
        Py_RETURN_NONE;
    switch (execute_fetch(self, slot, frame, size, 1, args[1] == Py_True)) {
    case DONE:
        Py_RETURN_TRUE;
    case MUST_WAIT:
        Py_RETURN_FALSE;
    case LEFT_TO_PYTHON:
        Py_RETURN_NONE;
    default:
        return NULL;
    }
}

/* fetch_waits(): after execute() has returned RESULT_WAITS for a Fetch, return for how
 * long it may wait in ms, and for which partition rows. */
PyObject *
handler_fetch_waits(PyObject *object, PyObject *unused)
{
    const fetch_request *f = &((handler_end *)object)->fetch;
    PyObject *rows = PyTuple_New(f->partition_count);
    for (int i = 0; rows != NULL && i < f->partition_count; i++) {
        PyObject *row = PyLong_FromLongLong(f->partitions[i].found.row);
        if (row == NULL)
            Py_CLEAR(rows);
        else
            PyTuple_SET_ITEM(rows, i, row);
    }
    return rows == NULL ? NULL : Py_BuildValue("(LN)", (long long)f->max_wait_ms, rows);
}
