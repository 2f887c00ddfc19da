#include "server/handler_execute.h"

#include "ipc/partition_row.h"
#include "protocol/request_header.h"
#include "server/fetch.h"
#include "server/forward.h"
#include "server/produce.h"
#include "server/quotas.h"
#include "server/repeated_answers.h"

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
    else
        outcome = repeat_answer(self, slot, frame, size);
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
