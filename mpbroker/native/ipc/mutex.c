/* Robust process-shared mutexes: see ipc/robust_mutex.py, which initialises them. */

#include "core.h"

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

PyObject *repair_hook;
static int repairs;

void
tell_of_repairs(void)
{
    if (repairs == 0)
        return;
    int told = repairs;
    repairs = 0;
    for (; told > 0 && repair_hook != NULL; told--) {
        PyObject *result = PyObject_CallNoArgs(repair_hook);
        if (result == NULL)
            PyErr_WriteUnraisable(repair_hook);
        Py_XDECREF(result);
    }
}

/* Take it; a dead owner's is marked usable again. 0: taken; else it is damaged. */
int
lock_repaired(void *mutex, int *owner_died)
{
    int result = lock_spinning(mutex);
    *owner_died = result == EOWNERDEAD;
    if (*owner_died) {
        result = pthread_mutex_consistent(mutex);
        repairs++;
    }
    return result;
}

int
mark_consistent(void *mutex)
{
    return pthread_mutex_consistent(mutex);
}

void
unlock(void *mutex)
{
    pthread_mutex_unlock(mutex);
}

PyObject *
damaged(int result)
{
    PyObject *errors = PyImport_ImportModule("mpbroker.ipc.errors");
    if (errors == NULL)
        return NULL;
    PyObject *type = PyObject_GetAttrString(errors, "DamagedSegmentError");
    Py_DECREF(errors);
    if (type != NULL) {
        PyErr_Format(type, "a shared mutex cannot be taken: error %d", result);
        Py_DECREF(type);
    }
    return NULL;
}
