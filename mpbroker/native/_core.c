/* mpbroker.native._core: its functions, types and constants. See README.md. */

#include "base/python_objects.h"
#include "base/steps.h"
#include "coordinator/coordinator_end.h"
#include "ipc/layout.h"
#include "ipc/mutex.h"
#include "ipc/partition_row.h"
#include "ipc/ring.h"
#include "network/processor_end.h"
#include "protocol/crc32c.h"
#include "server/handler_end.h"
#include "server/handler_execute.h"

/* The version of the functions below; ipc/compiled.py uses a core of its own version
 * only. */
#define CORE_VERSION 24

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
    {"spin_lock", spin_lock, METH_O, "See mpbroker.ipc.robust_mutex.spin_lock."},
    {"unlock", unlock_address, METH_O, "pthread_mutex_unlock."},
    {"mark_consistent", mark_consistent, METH_O, "pthread_mutex_consistent."},
    {"on_repair", on_repair, METH_O, "Call this whenever a lock's owner had died."},
    {"on_wait", on_wait, METH_O, "Call this with the owner of a lock we sleep for."},
    {"show_waits_at", show_waits_at, METH_O, "Store the owner of such a lock there."},
    {"crc32c", py_crc32c, METH_O, "CRC-32C of bytes, for tests."},
    {"die_at_step", die_at_step, METH_O, "Be killed at the n-th step from now on."},
    {"steps_done", get_steps_done, METH_NOARGS,
     "How many steps there were since this was first asked."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "mpbroker.native._core",
    .m_doc = "The compiled core; see mpbroker/native/README.md.",
    .m_size = -1,
    .m_methods = methods,
};

static PyTypeObject *const types[] = {
    &RequestRing_Type,  &ResponseRing_Type,   &HandlerEnd_Type,
    &ProcessorEnd_Type, &CoordinatorEnd_Type,
};

/* Constants that Python reads from this module, and of which it has no copy. */
static const struct {
    const char *name;
    long value;
} constants[] = {
    {"VERSION", CORE_VERSION},
    {"RESULT_API_KEY", RESULT_API_KEY},
    {"RESULT_NOTIFY", RESULT_NOTIFY},
    {"RESULT_WAITS", RESULT_WAITS},
    {"RESULT_AT_ONCE", RESULT_AT_ONCE},
    {"RESULT_BEGINS", RESULT_BEGINS},
    {"ROW_IS_HELD", ROW_IS_HELD},
};

PyMODINIT_FUNC
PyInit__core(void)
{
    PyObject *made = PyModule_Create(&module);
    for (size_t i = 0; made != NULL && i < sizeof types / sizeof *types; i++)
        if (PyModule_AddType(made, types[i]) < 0)
            Py_CLEAR(made);
    for (size_t i = 0; made != NULL && i < sizeof constants / sizeof *constants; i++)
        if (PyModule_AddIntConstant(made, constants[i].name, constants[i].value) < 0)
            Py_CLEAR(made);
    return made;
}
