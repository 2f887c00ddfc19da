/* Robust process-shared mutexes, which Python makes: see ipc/robust_mutex.py.
 *
 * If an owner dies, the next process that locks the mutex gets it, and is told of the
 * death (lock_mutex()). It must check the state that the mutex guards before it relies
 * on this state. Most states here are consistent at any moment, because each operation
 * commits by one store; then there is nothing to check.
 */

#ifndef MPBROKER_MUTEX_H
#define MPBROKER_MUTEX_H

#include "ipc/shared_memory.h"

static inline void *
mutex_at(const memory *m, int64_t index)
{
    return m->base + index * 8;
}

/* Take a mutex; try for a while before sleeping, as it is mostly held for microseconds.
 * Return what pthread_mutex_lock returns: 0, EOWNERDEAD, or an error, which means that
 * the memory is damaged. */
int lock_spinning(void *mutex);
/* Take a mutex as lock_spinning() does, and make a dead owner's mutex usable again.
 * Return 0; or an error, which means damage: then the mutex is not held. */
int lock_mutex(void *mutex, int *owner_died);
void unlock_mutex(void *mutex);

/* Call the repair hook once for each dead owner since the last call. To be called when
 * no lock is held, because the hook runs Python. */
void report_repairs(void);

/* Raise DamagedSegmentError with a text as PyErr_Format makes it; return NULL. */
PyObject *raise_damaged(const char *format, ...);
/* Raise DamagedSegmentError for a mutex that lock_mutex() could not take. */
PyObject *raise_damaged_mutex(int error);

/* The module's functions: for mutexes by address; for the hooks; and for the word in
 * which this process shows the owner of the lock that it sleeps for (address 0: it
 * shows it nowhere). */
PyObject *spin_lock(PyObject *module, PyObject *address);
PyObject *unlock_address(PyObject *module, PyObject *address);
PyObject *mark_consistent(PyObject *module, PyObject *address);
PyObject *on_repair(PyObject *module, PyObject *hook);
PyObject *on_wait(PyObject *module, PyObject *hook);
PyObject *show_waits_at(PyObject *module, PyObject *address);

#endif
