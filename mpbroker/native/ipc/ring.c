/* Python twin: ipc/ring.py, with the same stores in the same order under the same
 * mutexes.
 *
 * Each operation commits by one store: put and push by the store to the tail, take and
 * pop by the store to the head. A process that is killed before its commit has done
 * nothing that counts, and the supervisor resets the states that it has changed:
 * retract() after a put, reclaim() after a take. A process that is killed between its
 * commit and the doorbell leaves a sleeper that is not woken; so after each death the
 * supervisor rings all doorbells.
 */

#include "ipc/ring.h"

#include "base/steps.h"
#include "ipc/mutex.h"
#include "ipc/request_slot.h"

#include <unistd.h>

#define MAX_BATCH 256

typedef struct {
    PyObject_HEAD
    PyObject *view;
    memory control;
    int64_t base, mask, limit;
    int bell_count;
    int *bells; /* descriptors: of each handler, or of the one processor */
} ring;

/* -- making and unmaking ----------------------------------------------------------- */

static int
take_bells(ring *self, PyObject *fds)
{
    PyObject *list = PySequence_Fast(fds, "doorbells: a sequence of descriptors");
    if (list == NULL)
        return 0;
    Py_ssize_t count = PySequence_Fast_GET_SIZE(list);
    self->bells = PyMem_Calloc(count ? count : 1, sizeof *self->bells);
    if (self->bells == NULL) {
        Py_DECREF(list);
        PyErr_NoMemory();
        return 0;
    }
    for (Py_ssize_t i = 0; i < count; i++)
        self->bells[i] = PyLong_AsLong(PySequence_Fast_GET_ITEM(list, i));
    self->bell_count = count;
    Py_DECREF(list);
    return !PyErr_Occurred();
}

static PyObject *
ring_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *view, *bells;
    long long base, capacity, limit;
    if (!is_configured()
        || !PyArg_ParseTuple(args, "OLLLO", &view, &base, &capacity, &limit, &bells))
        return NULL;
    ring *self = (ring *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->view = Py_NewRef(view);
    self->base = base;
    self->mask = capacity - 1;
    self->limit = limit;
    if (!get_memory(view, &self->control) || !take_bells(self, bells)) {
        Py_DECREF(self);
        return NULL;
    }
    if (capacity <= 0 || capacity & (capacity - 1)
        || !has_words(&self->control, base, L.RING_ENTRIES + capacity)
        || !has_words(&self->control, L.SLOTS, L.MAX_SLOTS * L.SLOT_WORDS)) {
        Py_DECREF(self);
        PyErr_SetString(PyExc_ValueError, "no such ring in this segment");
        return NULL;
    }
    return (PyObject *)self;
}

static void
ring_dealloc(PyObject *object)
{
    ring *self = (ring *)object;
    PyMem_Free(self->bells);
    Py_XDECREF(self->view);
    Py_TYPE(object)->tp_free(object);
}

/* -- what the operations share ----------------------------------------------------- */

/* Return the word of the entry at a position. Positions never wrap; entries do. */
static inline int64_t
entry(const ring *r, int64_t position)
{
    return r->base + L.RING_ENTRIES + (position & r->mask);
}

/* Take the ring's mutex; 0 and an exception.
 *
 * After a dead owner nothing has to be settled here: what it did not commit does not
 * count.
 */
static int
lock_ring(ring *r, void **mutex)
{
    int owner_died;
    *mutex = mutex_at(&r->control, r->base + L.RING_MUTEX);
    int error = lock_mutex(*mutex, &owner_died);
    if (error)
        raise_damaged_mutex(error);
    return error == 0;
}

static void
unlock_ring(void *mutex)
{
    unlock_mutex(mutex);
    STEP();
    report_repairs();
}

/* Wake a sleeper; a negative id: wake none. To be called without the mutex, which the
 * woken process takes at once. */
static void
wake(const ring *r, int64_t id)
{
    const uint64_t one = 1;
    if (id < 0 || id >= r->bell_count)
        return;
    /* A write to an eventfd fails only if it is full, and then it wakes as well. */
    ssize_t written = write(r->bells[id], &one, sizeof one);
    (void)written;
}

/* Clear the flag of the sleeper with the lowest id, and return its id; -1: none sleeps.
 * Under the mutex. */
static int64_t
take_sleeper(const ring *r)
{
    for (int64_t i = 0; i < L.MASK_WORDS; i++) {
        const int64_t at = r->base + L.RING_SLEEPERS + i;
        const int64_t sleepers = load(&r->control, at);
        if (sleepers) {
            store(&r->control, at, sleepers & (sleepers - 1));
            STEP();
            return i * L.MASK_BITS + __builtin_ctzll((unsigned long long)sleepers);
        }
    }
    return -1;
}

/* Read a sequence of slots, and check that all are in range; NULL and an exception. The
 * result is `few` if they fit in there, else memory that the caller frees. */
static int64_t *
slots_of(PyObject *sequence, int64_t *few, Py_ssize_t *count)
{
    PyObject *list = PySequence_Fast(sequence, "slots: a sequence");
    if (list == NULL)
        return NULL;
    *count = PySequence_Fast_GET_SIZE(list);
    int64_t *slots = few;
    if (*count > MAX_BATCH && (slots = PyMem_Calloc(*count, sizeof *slots)) == NULL) {
        Py_DECREF(list);
        PyErr_NoMemory();
        return NULL;
    }
    for (Py_ssize_t i = 0; i < *count; i++) {
        slots[i] = PyLong_AsLongLong(PySequence_Fast_GET_ITEM(list, i));
        if (!is_slot(slots[i])) {
            if (!PyErr_Occurred())
                PyErr_Format(PyExc_IndexError, "slot %lld", (long long)slots[i]);
            if (slots != few)
                PyMem_Free(slots);
            Py_DECREF(list);
            return NULL;
        }
    }
    Py_DECREF(list);
    return slots;
}

static PyObject *
list_of(const int64_t *slots, Py_ssize_t count)
{
    PyObject *list = PyList_New(count);
    for (Py_ssize_t i = 0; list != NULL && i < count; i++) {
        PyObject *slot = PyLong_FromLongLong(slots[i]);
        if (slot == NULL)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, i, slot);
    }
    return list;
}

/* Read the keyword `arm` of take() and pop(). */
static int
read_arm(PyObject *const *args, Py_ssize_t nargs, PyObject *names)
{
    return names != NULL && PyTuple_GET_SIZE(names) == 1 && args[nargs] == Py_True;
}

/* -- the request ring -------------------------------------------------------------- */

/* Put `count` slots, for which there is room, behind the tail. Under the mutex. Return
 * the id of the sleeper that is to be woken, or -1. */
static inline int64_t
put_locked(const ring *r, int64_t tail, const int64_t *slots, Py_ssize_t count)
{
    const memory *control = &r->control;
    for (Py_ssize_t i = 0; i < count; i++) {
        store(control, entry(r, tail + i), slots[i]);
        STEP();
        /* Before the tail: a handler that takes the slot stores CLAIMED, which must not
         * be overwritten. If this process is killed in between, the slot is READY
         * without being on the ring, and retract() makes it HELD again. */
        set_slot_state(control, slots[i], L.STATE_READY);
        STEP();
    }
    /* The commit, as one aligned store: before it no handler sees the entries. */
    store(control, r->base + L.RING_TAIL, tail + count);
    STEP();
    return take_sleeper(r);
}

Py_ssize_t
ring_put(PyObject *object, PyObject *sequence)
{
    ring *r = (ring *)object;
    const memory *control = &r->control;
    int64_t few[MAX_BATCH];
    Py_ssize_t count;
    void *mutex;
    int64_t *slots = slots_of(sequence, few, &count);
    if (slots == NULL)
        return -1;
    if (lock_ring(r, &mutex)) {
        const int64_t tail = load(control, r->base + L.RING_TAIL);
        const int64_t room = r->limit - (tail - load(control, r->base + L.RING_HEAD));
        if (room < count)
            count = room > 0 ? room : 0;
        const int64_t sleeper = room > 0 ? put_locked(r, tail, slots, count) : -1;
        unlock_ring(mutex);
        wake(r, sleeper);
    }
    else
        count = -1;
    if (slots != few)
        PyMem_Free(slots);
    return count;
}

static PyObject *
put(PyObject *object, PyObject *sequence)
{
    Py_ssize_t count = ring_put(object, sequence);
    return count < 0 ? NULL : PyLong_FromSsize_t(count);
}

/* Mark the slots from `head` on as claimed by the handler. Under the mutex. 0: an entry
 * is no slot's number. */
static int
claim(const ring *r, int64_t head, int64_t count, int64_t handler, int64_t *taken)
{
    const memory *control = &r->control;
    const int64_t claimed = state_of_handler(handler, L.STATE_CLAIMED);
    for (int64_t i = 0; i < count; i++) {
        taken[i] = load(control, entry(r, head + i));
        if (!is_slot(taken[i]))
            return 0;
        /* Before the head moves: from then on the slot is on no ring, and only its
         * state says which process is responsible for it. If this process is killed in
         * between, reclaim() undoes this store. */
        set_slot_state(control, taken[i], claimed);
        STEP();
    }
    return 1;
}

/* Return the word that has a handler's bit in the mask of sleepers. */
static int64_t
sleepers_word(const ring *r, int64_t handler)
{
    return r->base + L.RING_SLEEPERS + handler / L.MASK_BITS;
}

static int64_t
sleeper_bit(int64_t handler)
{
    return (int64_t)1 << handler % L.MASK_BITS;
}

/* Clear the handler's sleep flag after a take; if slots are left, choose another
 * handler to be woken. Under the mutex. Return the id of the other one, or -1. */
static int64_t
update_sleepers(const ring *r, int64_t handler, int are_left)
{
    const int64_t at = sleepers_word(r, handler);
    const int64_t sleepers = load(&r->control, at), bit = sleeper_bit(handler);
    if (sleepers & bit) {
        /* Another event may have woken the caller. The next put must not wake it in
         * place of a handler that sleeps. */
        store(&r->control, at, sleepers & ~bit);
        STEP();
    }
    return are_left ? take_sleeper(r) : -1;
}

PyObject *
ring_take(PyObject *object, int64_t limit, int64_t handler, int64_t handlers, int arm)
{
    ring *r = (ring *)object;
    const memory *control = &r->control;
    const int64_t HEAD = r->base + L.RING_HEAD, TAIL = r->base + L.RING_TAIL;
    if (handler < 0 || handler >= L.HANDLER_IDS || handlers < 1)
        return PyErr_Format(PyExc_ValueError, "no such handler");
    if (!arm && load(control, TAIL) == load(control, HEAD))
        return PyList_New(0); /* a stale value is harmless: see ipc/ring.py */
    void *mutex;
    int64_t taken[MAX_BATCH];
    if (!lock_ring(r, &mutex))
        return NULL;
    const int64_t head = load(control, HEAD), queued = load(control, TAIL) - head;
    if (queued <= 0) {
        /* Under the mutex, under which the next put reads the flag: so no wake-up is
         * lost. */
        if (arm) {
            const int64_t at = sleepers_word(r, handler);
            store(control, at, load(control, at) | sleeper_bit(handler));
        }
        STEP();
        unlock_ring(mutex);
        return PyList_New(0);
    }
    int64_t count = (queued + handlers - 1) / handlers;
    if (count > limit)
        count = limit;
    if (count > MAX_BATCH)
        count = MAX_BATCH;
    if (!claim(r, head, count, handler, taken)) {
        unlock_ring(mutex);
        return raise_damaged("the request ring holds what is no slot");
    }
    store(control, HEAD, head + count); /* the commit */
    STEP();
    const int64_t woken = update_sleepers(r, handler, queued > count);
    unlock_ring(mutex);
    wake(r, woken);
    return list_of(taken, count);
}

static PyObject *
take(PyObject *object, PyObject *const *args, Py_ssize_t nargs, PyObject *names)
{
    if (nargs != 3)
        return PyErr_Format(PyExc_TypeError, "take() takes 3 arguments and arm");
    int64_t limit = PyLong_AsLongLong(args[0]);
    int64_t handler = PyLong_AsLongLong(args[1]);
    int64_t handlers = PyLong_AsLongLong(args[2]);
    if (PyErr_Occurred())
        return NULL;
    return ring_take(object, limit, handler, handlers, read_arm(args, nargs, names));
}

/* -- a response ring --------------------------------------------------------------- */

int
ring_push(PyObject *object, const int64_t *slots, Py_ssize_t count)
{
    ring *r = (ring *)object;
    const memory *control = &r->control;
    void *mutex;
    if (!lock_ring(r, &mutex))
        return 0;
    int64_t tail = load(control, r->base + L.RING_TAIL);
    for (Py_ssize_t i = 0; i < count; i++) {
        store(control, entry(r, tail + i), slots[i]);
        STEP();
    }
    /* The commit. If this process is killed before it, the states of the slots still
     * name this handler, and their requests are executed again. */
    store(control, r->base + L.RING_TAIL, tail + count);
    STEP();
    int64_t asleep = load(control, r->base + L.RING_SLEEPERS);
    if (asleep)
        store(control, r->base + L.RING_SLEEPERS, 0);
    STEP();
    unlock_ring(mutex);
    if (asleep)
        wake(r, 0);
    return 1;
}

static PyObject *
push(PyObject *object, PyObject *sequence)
{
    int64_t few[MAX_BATCH];
    Py_ssize_t count;
    int64_t *slots = slots_of(sequence, few, &count);
    if (slots == NULL)
        return NULL;
    int pushed = ring_push(object, slots, count);
    if (slots != few)
        PyMem_Free(slots);
    return pushed ? Py_NewRef(Py_None) : NULL;
}

/* Read the tail again, under the mutex; if the ring is still empty, mark the processor
 * as asleep. 0 and an exception. */
static int
arm_bell(ring *r, int64_t head, int64_t *tail)
{
    void *mutex;
    if (!lock_ring(r, &mutex))
        return 0;
    *tail = load(&r->control, r->base + L.RING_TAIL);
    if (head == *tail)
        store(&r->control, r->base + L.RING_SLEEPERS, 1);
    STEP();
    unlock_ring(mutex);
    return 1;
}

PyObject *
ring_pop(PyObject *object, int arm)
{
    ring *r = (ring *)object;
    const memory *control = &r->control;
    const int64_t head = load(control, r->base + L.RING_HEAD);
    int64_t tail = load(control, r->base + L.RING_TAIL);
    if (head == tail && arm && !arm_bell(r, head, &tail))
        return NULL;
    if (tail < head || tail - head > r->mask + 1)
        return raise_damaged("a response ring of %lld to %lld", (long long)head,
                             (long long)tail);
    /* The list is made first: slots that are marked as popped must not be lost if there
     * is no memory for it. */
    PyObject *taken = PyList_New(tail - head);
    for (int64_t position = head; taken != NULL && position < tail; position++) {
        int64_t slot = load(control, entry(r, position));
        PyObject *number = is_slot(slot)
                               ? PyLong_FromLongLong(slot)
                               : raise_damaged("a response ring holds what is no slot");
        if (number == NULL)
            Py_CLEAR(taken);
        else
            PyList_SET_ITEM(taken, position - head, number);
    }
    if (taken == NULL || head == tail)
        return taken;
    for (int64_t position = head; position < tail; position++) {
        /* Before the head moves: a successor that finds the slot RESPONDING knows that
         * its predecessor may have sent a part of the answer. */
        set_slot_state(control, load(control, entry(r, position)), L.STATE_RESPONDING);
        STEP();
    }
    store(control, r->base + L.RING_HEAD, tail);
    STEP();
    return taken;
}

static PyObject *
pop(PyObject *object, PyObject *const *args, Py_ssize_t nargs, PyObject *names)
{
    return ring_pop(object, read_arm(args, nargs, names));
}

/* This takes no mutex: a handler that has just read the flag rings once for nothing. */
void
ring_forget_sleeper(PyObject *object)
{
    ring *r = (ring *)object;
    if (load(&r->control, r->base + L.RING_SLEEPERS))
        store(&r->control, r->base + L.RING_SLEEPERS, 0);
}

/* -- types ------------------------------------------------------------------------- */

static PyMethodDef request_ring_methods[] = {
    {"put", put, METH_O, "See mpbroker.ipc.ring.RequestRing.put."},
    {"take", FASTCALL(take), METH_FASTCALL | METH_KEYWORDS,
     "See mpbroker.ipc.ring.RequestRing.take."},
    {NULL, NULL, 0, NULL},
};

static PyMethodDef response_ring_methods[] = {
    {"push", push, METH_O, "See mpbroker.ipc.ring.ResponseRing.push."},
    {"pop", FASTCALL(pop), METH_FASTCALL | METH_KEYWORDS,
     "See mpbroker.ipc.ring.ResponseRing.pop."},
    {NULL, NULL, 0, NULL},
};

#define RING_TYPE(variable, title, table)                                             \
    PyTypeObject variable = {                                                         \
        PyVarObject_HEAD_INIT(NULL, 0).tp_name = "mpbroker.native._core." title,      \
        .tp_basicsize = sizeof(ring),                                                 \
        .tp_flags = Py_TPFLAGS_DEFAULT,                                               \
        .tp_doc = title "(view, base_word, capacity, limit, doorbell_fds)",           \
        .tp_new = ring_new,                                                           \
        .tp_dealloc = ring_dealloc,                                                   \
        .tp_methods = table,                                                          \
    }

RING_TYPE(RequestRing_Type, "RequestRing", request_ring_methods);
RING_TYPE(ResponseRing_Type, "ResponseRing", response_ring_methods);
