/* Python twin: ipc/robust_mutex.py, which also initialises the mutexes. */

#include "ipc/mutex.h"

#include <errno.h>
#include <pthread.h>
#include <time.h>

#define SPINS 40
#define RELAXATIONS 16
#define LOOK_AGAIN_NS 100000000
#define NS_PER_S 1000000000
/* glibc has the futex of a robust mutex in front, and the kernel wants the owner's
 * thread id in its lower bits: see FUTEX_TID_MASK in linux/futex.h. */
#define OWNER_MASK 0x3fffffff

static inline void
relax(void)
{
#if defined(__x86_64__) && defined(__GNUC__)
    __builtin_ia32_pause();
#else
    atomic_signal_fence(memory_order_seq_cst);
#endif
}

static int64_t *awaits_at; /* the word of this process that names the lock's owner */
static PyObject *wait_hook;

static void
call_wait_hook(uint32_t owner)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *result = PyObject_CallFunction(wait_hook, "I", owner);
    if (result == NULL)
        PyErr_WriteUnraisable(wait_hook);
    Py_XDECREF(result);
    PyErr_Restore(type, value, trace);
}

static void
note_awaited(int64_t owner)
{
    if (awaits_at != NULL)
        __atomic_store_n(awaits_at, owner, __ATOMIC_RELAXED);
}

/* Sleep until this process gets a mutex, and show meanwhile which thread holds it, so
 * that the supervisor does not kill this process: the owner may wait for a disk. */
static int
sleep_for(void *mutex)
{
    int result;
    do {
        struct timespec until;
        uint32_t owner = __atomic_load_n((uint32_t *)mutex, __ATOMIC_RELAXED);
        note_awaited(owner & OWNER_MASK);
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += LOOK_AGAIN_NS;
        if (until.tv_nsec >= NS_PER_S) {
            until.tv_nsec -= NS_PER_S;
            until.tv_sec++;
        }
        result = pthread_mutex_timedlock(mutex, &until);
        if (result == ETIMEDOUT && wait_hook != NULL)
            call_wait_hook(owner & OWNER_MASK);
    } while (result == ETIMEDOUT);
    note_awaited(0);
    return result;
}

int
lock_spinning(void *mutex)
{
    /* An append holds a partition's mutex for about 10 us; a sleep and a wake-up cost
     * more. */
    for (int tries = 0; tries <= SPINS; tries++) {
        int result = pthread_mutex_trylock(mutex);
        if (result != EBUSY)
            return result;
        for (int i = 0; i < RELAXATIONS; i++)
            relax();
    }
    return sleep_for(mutex);
}

static PyObject *repair_hook;
static int repairs; /* the number of repairs for which the hook was not called yet */

int
lock_mutex(void *mutex, int *owner_died)
{
    int result = lock_spinning(mutex);
    *owner_died = result == EOWNERDEAD;
    if (*owner_died) {
        /* If this process is killed before this call, it is the dead owner itself, and
         * the next owner makes the same repair. */
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
    repairs = 0; /* before the calls: the hook may take locks, and count repairs, too */
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

PyObject *
show_waits_at(PyObject *module, PyObject *address)
{
    awaits_at = PyLong_AsVoidPtr(address);
    if (awaits_at == NULL && PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

PyObject *
on_wait(PyObject *module, PyObject *hook)
{
    Py_XSETREF(wait_hook, hook == Py_None ? NULL : Py_NewRef(hook));
    Py_RETURN_NONE;
}
