/* Robust process-shared mutexes, which Python makes: see ipc/robust_mutex.py.
 *
 * If an owner dies, the kernel lets the next one in and says so. That one must look at
 * what the mutex guards before it trusts it: lock_mutex() tells. Most of what mutexes
 * guard here is whole at any moment, because each operation commits by one store; then
 * there is nothing to look at.
 */

#ifndef MPBROKER_MUTEX_H
#define MPBROKER_MUTEX_H

#include "ipc/shared_memory.h"

static inline void *
mutex_at(const memory *m, int64_t index)
{
    return m->base + index * 8;
}

/* Take a mutex that is mostly held for microseconds. Return as pthread_mutex_lock does:
 * 0, EOWNERDEAD, or an error that means damage. */
int lock_spinning(void *mutex);
/* The same, and make a dead owner's mutex usable again; 0, or an error that means
 * damage: then the mutex is not held. */
int lock_mutex(void *mutex, int *owner_died);
void unlock_mutex(void *mutex);

/* Call the hook once for each dead owner since the last time; call this when no lock is
 * held, as it runs Python. */
void report_repairs(void);

/* Raise DamagedSegmentError with a text as PyErr_Format makes it; return NULL. */
PyObject *raise_damaged(const char *format, ...);
/* That of a mutex which lock_mutex() could not take. */
PyObject *raise_damaged_mutex(int error);

/* The module's functions: mutexes by address, and the hook. */
PyObject *spin_lock(PyObject *module, PyObject *address);
PyObject *unlock_address(PyObject *module, PyObject *address);
PyObject *mark_consistent(PyObject *module, PyObject *address);
PyObject *on_repair(PyObject *module, PyObject *hook);

#endif
