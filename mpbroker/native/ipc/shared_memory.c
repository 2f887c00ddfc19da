#include "ipc/shared_memory.h"

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
