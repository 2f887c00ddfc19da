/* Python twin: ipc/robust_mutex.py, which also initialises the mutexes. */

#include "ipc/mutex.h"

#include <errno.h>
#include <pthread.h>

#define SPINS 40
#define RELAXATIONS 16

static inline void
relax(void)
{
#if defined(__x86_64__) && defined(__GNUC__)
    __builtin_ia32_pause();
#else
    atomic_signal_fence(memory_order_seq_cst);
#endif
}

int
lock_spinning(void *mutex)
{
    /* An append holds its partition for some 10 us; being woken costs more. */
    for (int tries = 0; tries <= SPINS; tries++) {
        int result = pthread_mutex_trylock(mutex);
        if (result != EBUSY)
            return result;
        for (int i = 0; i < RELAXATIONS; i++)
            relax();
    }
    return pthread_mutex_lock(mutex);
}

static PyObject *repair_hook;
static int repairs; /* that the hook was not called for yet */

int
lock_mutex(void *mutex, int *owner_died)
{
    int result = lock_spinning(mutex);
    *owner_died = result == EOWNERDEAD;
    if (*owner_died) {
        /* Killed before this, we are the dead owner, and the next one does the same. */
        result = pthread_mutex_consistent(mutex);
        repairs++;
    }
    return result;
}

void
unlock_mutex(void *mutex)
{
    pthread_mutex_unlock(mutex);
}

void
report_repairs(void)
{
    int count = repairs;
    if (count == 0)
        return;
    repairs = 0; /* first: the hook may take locks, too */
    for (; count > 0 && repair_hook != NULL; count--) {
        PyObject *result = PyObject_CallNoArgs(repair_hook);
        if (result == NULL)
            PyErr_WriteUnraisable(repair_hook);
        Py_XDECREF(result);
    }
}

PyObject *
raise_damaged(const char *format, ...)
{
    PyObject *errors = PyImport_ImportModule("mpbroker.ipc.errors");
    if (errors == NULL)
        return NULL;
    PyObject *type = PyObject_GetAttrString(errors, "DamagedSegmentError");
    Py_DECREF(errors);
    if (type == NULL)
        return NULL;
    va_list arguments;
    va_start(arguments, format);
    PyErr_FormatV(type, format, arguments);
    va_end(arguments);
    Py_DECREF(type);
    return NULL;
}

PyObject *
raise_damaged_mutex(int error)
{
    return raise_damaged("a shared mutex cannot be taken: error %d", error);
}

/* -- the module's functions -------------------------------------------------------- */

/* Read a mutex's address; NULL and an exception. */
static void *
address_of(PyObject *number)
{
    void *mutex = PyLong_AsVoidPtr(number);
    if (mutex == NULL && !PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "no mutex");
    return mutex;
}

PyObject *
spin_lock(PyObject *module, PyObject *address)
{
    void *mutex = address_of(address);
    return mutex == NULL ? NULL : PyLong_FromLong(lock_spinning(mutex));
}

PyObject *
unlock_address(PyObject *module, PyObject *address)
{
    void *mutex = address_of(address);
    if (mutex == NULL)
        return NULL;
    unlock_mutex(mutex);
    report_repairs();
    Py_RETURN_NONE;
}

PyObject *
mark_consistent(PyObject *module, PyObject *address)
{
    void *mutex = address_of(address);
    return mutex == NULL ? NULL : PyLong_FromLong(pthread_mutex_consistent(mutex));
}

PyObject *
on_repair(PyObject *module, PyObject *hook)
{
    Py_XSETREF(repair_hook, Py_NewRef(hook));
    Py_RETURN_NONE;
}
