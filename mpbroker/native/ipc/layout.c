#include "ipc/layout.h"

struct layout L;
static int configured;

int
is_configured(void)
{
    if (!configured)
        PyErr_SetString(PyExc_RuntimeError, "the core has no layout yet");
    return configured;
}

PyObject *
layout_names(PyObject *module, PyObject *unused)
{
    static const char *const names[] = {
#define X(name, where) where,
        LAYOUT_FIELDS(X)
#undef X
    };
    Py_ssize_t count = sizeof names / sizeof *names;
    PyObject *list = PyTuple_New(count);
    for (Py_ssize_t i = 0; list != NULL && i < count; i++) {
        PyObject *name = PyUnicode_FromString(names[i]);
        if (name == NULL)
            Py_CLEAR(list);
        else
            PyTuple_SET_ITEM(list, i, name);
    }
    return list;
}

/* Return whether the values fit each other, as far as the core relies on this without
 * further checks. */
static int
fit_each_other(void)
{
    return L.SLOTS >= 0 && L.MAX_SLOTS > 0 && L.SLOT_WORDS > L.SLOT_RESPONSE_LENGTH
           && L.SLOTS + L.MAX_SLOTS * L.SLOT_WORDS <= L.CONTROL_WORDS
           && L.SLOTS_PER_PROCESSOR * L.MAX_PROCESSORS == L.MAX_SLOTS
           && 0 < L.MASK_BITS && L.MASK_BITS < 63 && L.MASK_WORDS == 2
           && L.HANDLER_IDS <= L.MASK_BITS * L.MASK_WORDS
           && L.ROW_COPIES + 2 * L.ROW_COPY_WORDS <= L.ROW_WORDS
           && L.ANSWER_AT + L.ANSWER_BYTES <= L.BLOCK_BYTES
           && L.REQUEST_PART_BYTES <= L.ANSWER_AT;
}

PyObject *
configure(PyObject *module, PyObject *values)
{
    int64_t *fields = (int64_t *)&L;
    Py_ssize_t count = sizeof L / sizeof *fields;
    configured = 0;
    if (!PyTuple_Check(values) || PyTuple_GET_SIZE(values) != count) {
        PyErr_SetString(PyExc_ValueError, "a tuple of a value for each name is needed");
        return NULL;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        fields[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(values, i));
        if (fields[i] == -1 && PyErr_Occurred())
            return NULL;
    }
    if (!fit_each_other()) {
        PyErr_SetString(PyExc_ValueError, "a layout that this core was not built for");
        return NULL;
    }
    configured = 1;
    Py_RETURN_NONE;
}
