/* mpbroker.native._core: what it takes from layout.py, what it gives, and how tests
 * kill it.
 */

#include "core.h"

#include <stddef.h>
#include <sys/eventfd.h>
#include <sys/types.h>
#include <unistd.h>

/* Of what is offered here; ipc/compiled.py takes no other. */
#define CORE_VERSION 20

struct layout L;
static int configured;

void
ring_bell(int fd)
{
    uint64_t one = 1;
    /* Full (2**64 - 2 rings that nobody reads) cannot be; and it would wake as well. */
    ssize_t written = write(fd, &one, sizeof one);
    (void)written;
}

int
is_configured(void)
{
    if (!configured)
        PyErr_SetString(PyExc_RuntimeError, "the compiled core has no layout yet");
    return configured;
}

int
get_memory(PyObject *view, memory *m)
{
    Py_buffer buffer;
    if (PyObject_GetBuffer(view, &buffer, PyBUF_WRITABLE) < 0)
        return 0;
    m->base = buffer.buf;
    m->size = buffer.len;
    /* The caller keeps `view`, and so the mapping, for as long as it keeps `m`. */
    PyBuffer_Release(&buffer);
    if ((uintptr_t)m->base % 8) {
        PyErr_SetString(PyExc_ValueError, "shared memory must be aligned to its words");
        return 0;
    }
    return 1;
}

static PyObject *
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

static PyObject *
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
    if (L.SLOTS < 0 || L.MAX_SLOTS <= 0 || L.SLOT_WORDS <= L.SLOT_RESPONSE_LENGTH
        || L.SLOTS + L.MAX_SLOTS * L.SLOT_WORDS > L.CONTROL_WORDS
        || L.SLOTS_PER_PROCESSOR * L.MAX_PROCESSORS != L.MAX_SLOTS
        || L.ROW_COPIES + 2 * L.ROW_COPY_WORDS > L.ROW_WORDS
        || L.ANSWER_AT + L.ANSWER_BYTES > L.BLOCK_BYTES
        || L.REQUEST_PART_BYTES > L.ANSWER_AT) {
        PyErr_SetString(PyExc_ValueError, "a layout that this core was not built for");
        return NULL;
    }
    configured = 1;
    Py_RETURN_NONE;
}

/* -- mutexes, by address ---------------------------------------------------------------- */

static PyObject *
py_spin_lock(PyObject *module, PyObject *address)
{
    void *mutex = PyLong_AsVoidPtr(address);
    if (mutex == NULL)
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "no mutex");
    return PyLong_FromLong(lock_spinning(mutex));
}

static PyObject *
py_unlock(PyObject *module, PyObject *address)
{
    void *mutex = PyLong_AsVoidPtr(address);
    if (mutex == NULL)
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "no mutex");
    unlock(mutex);
    tell_of_repairs();
    Py_RETURN_NONE;
}

static PyObject *
py_mark_consistent(PyObject *module, PyObject *address)
{
    void *mutex = PyLong_AsVoidPtr(address);
    if (mutex == NULL)
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "no mutex");
    return PyLong_FromLong(mark_consistent(mutex));
}

static PyObject *
on_repair(PyObject *module, PyObject *hook)
{
    Py_XSETREF(repair_hook, Py_NewRef(hook));
    Py_RETURN_NONE;
}

/* -- for tests -------------------------------------------------------------------------- */

static PyObject *
py_crc32c(PyObject *module, PyObject *data)
{
    Py_buffer buffer;
    if (PyObject_GetBuffer(data, &buffer, PyBUF_SIMPLE) < 0)
        return NULL;
    uint32_t crc = crc32c(buffer.buf, buffer.len);
    PyBuffer_Release(&buffer);
    return PyLong_FromUnsignedLong(crc);
}

static PyMethodDef methods[] = {
    {"layout_names", layout_names, METH_NOARGS, "Where each value is to be found."},
    {"configure", configure, METH_O, "Take a value for each of layout_names()."},
    {"spin_lock", py_spin_lock, METH_O, "See mpbroker.ipc.robust_mutex.spin_lock."},
    {"unlock", py_unlock, METH_O, "pthread_mutex_unlock."},
    {"mark_consistent", py_mark_consistent, METH_O, "pthread_mutex_consistent."},
    {"on_repair", on_repair, METH_O, "Call this whenever a lock's owner had died."},
    {"crc32c", py_crc32c, METH_O, "CRC-32C of bytes, for tests."},
    {"die_at_step", die_at_step, METH_O, "Be killed at the n-th step from now on."},
    {"steps_done", get_steps_done, METH_NOARGS,
     "How many steps there were since this was first asked."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "mpbroker.native._core",
    .m_doc = "The compiled core; see mpbroker/native/core.h.",
    .m_size = -1,
    .m_methods = methods,
};

PyMODINIT_FUNC
PyInit__core(void)
{
    PyTypeObject *types[] = {&RequestRing_Type, &ResponseRing_Type, &HandlerEnd_Type,
                             &ProcessorEnd_Type, &CoordinatorEnd_Type};
    PyObject *made = PyModule_Create(&module);
    for (size_t i = 0; made != NULL && i < sizeof types / sizeof *types; i++)
        if (PyModule_AddType(made, types[i]) < 0)
            Py_CLEAR(made);
    if (made != NULL && PyModule_AddIntConstant(made, "VERSION", CORE_VERSION) < 0)
        Py_CLEAR(made);
    return made;
}
