/* The rings of ipc/ring.py: the same stores in the same order, under the same mutexes. */

#include "core.h"

#include <stddef.h>

#define MAX_BATCH 256

typedef struct {
    PyObject_HEAD
    PyObject *view;
    memory control;
    int64_t base, mask, limit;
    int bell_count;
    int *bells;
} ring;

/* -- making and unmaking ------------------------------------------------------------ */

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

/* -- pieces --------------------------------------------------------------------------- */

static inline int64_t
entry(const ring *r, int64_t position)
{
    return r->base + L.RING_ENTRIES + (position & r->mask);
}

static inline void
set_state(const memory *control, int64_t slot, int64_t state)
{
    int64_t at = slot_row(slot) + L.SLOT_STATE;
    store(control, at, generation_of(load(control, at)) | state);
}

static int
lock_ring(ring *r, void **mutex)
{
    int owner_died;
    *mutex = mutex_at(&r->control, r->base + L.RING_MUTEX);
    int result = lock_repaired(*mutex, &owner_died);
    if (result)
        damaged(result);
    return result == 0;
}

static void
unlock_ring(void *mutex)
{
    unlock(mutex);
    STEP();
    tell_of_repairs();
}

static void
ring_lowest(ring *r, int64_t bits)
{
    int lowest = __builtin_ctzll((unsigned long long)bits);
    if (lowest < r->bell_count)
        ring_bell(r->bells[lowest]);
}

/* Slots of a sequence as numbers, all in range; NULL and an exception. */
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

/* -- the request ring ------------------------------------------------------------------ */

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
    if (!lock_ring(r, &mutex)) {
        if (slots != few)
            PyMem_Free(slots);
        return -1;
    }
    int64_t tail = load(control, r->base + L.RING_TAIL);
    int64_t room = r->limit - (tail - load(control, r->base + L.RING_HEAD));
    int64_t sleepers = 0;
    if (room <= 0)
        count = 0;
    else {
        if (room < count)
            count = room;
        for (Py_ssize_t i = 0; i < count; i++) {
            store(control, entry(r, tail + i), slots[i]);
            STEP();
            set_state(control, slots[i], L.STATE_READY);
            STEP();
        }
        /* Last, and as one aligned store: until here no handler sees anything. */
        store(control, r->base + L.RING_TAIL, tail + count);
        STEP();
        sleepers = load(control, r->base + L.RING_SLEEPERS);
        if (sleepers)
            store(control, r->base + L.RING_SLEEPERS, sleepers & (sleepers - 1));
        STEP();
    }
    unlock_ring(mutex);
    if (sleepers)
        ring_lowest(r, sleepers);
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

/* The claiming half of take(), under the mutex; -1: a damaged entry. */
static Py_ssize_t
claim(ring *r, int64_t head, int64_t count, int64_t handler, int64_t *taken)
{
    const memory *control = &r->control;
    int64_t claimed = (handler + 1) << L.STATE_HANDLER_SHIFT | L.STATE_CLAIMED;
    Py_ssize_t found = 0;
    for (int64_t position = head; position < head + count; position++) {
        int64_t slot = load(control, entry(r, position));
        if (!is_slot(slot))
            return -1;
        set_state(control, slot, claimed);
        taken[found++] = slot;
        STEP();
    }
    return found;
}

static int
read_arm(PyObject *const *args, Py_ssize_t nargs, PyObject *names)
{
    return names != NULL && PyTuple_GET_SIZE(names) == 1 && args[nargs] == Py_True;
}

PyObject *
ring_take(PyObject *object, int64_t limit, int64_t handler, int64_t handlers, int arm)
{
    ring *r = (ring *)object;
    const memory *control = &r->control;
    const int64_t HEAD = r->base + L.RING_HEAD, TAIL = r->base + L.RING_TAIL,
                  SLEEPERS = r->base + L.RING_SLEEPERS;
    if (handler < 0 || handler > 61 || handlers < 1)
        return PyErr_Format(PyExc_ValueError, "no such handler");
    if (!arm && load(control, TAIL) == load(control, HEAD))
        return PyList_New(0); /* a stale look is harmless: it is asked again, armed */
    void *mutex;
    int64_t taken[MAX_BATCH];
    if (!lock_ring(r, &mutex))
        return NULL;
    int64_t head = load(control, HEAD), tail = load(control, TAIL);
    int64_t queued = tail - head;
    if (queued <= 0) {
        if (arm)
            store(control, SLEEPERS, load(control, SLEEPERS) | (int64_t)1 << handler);
        STEP();
        unlock_ring(mutex);
        return PyList_New(0);
    }
    int64_t count = (queued + handlers - 1) / handlers;
    if (count > limit)
        count = limit;
    if (count > MAX_BATCH)
        count = MAX_BATCH;
    Py_ssize_t found = claim(r, head, count, handler, taken);
    if (found < 0) {
        unlock_ring(mutex);
        return damaged(0);
    }
    store(control, HEAD, head + count);
    STEP();
    int64_t sleepers = load(control, SLEEPERS), woken = 0;
    if (sleepers) {
        /* Something else may have woken the caller: it sleeps no more. */
        sleepers &= ~((int64_t)1 << handler);
        if (queued > count)
            woken = sleepers & -sleepers;
        store(control, SLEEPERS, sleepers ^ woken);
        STEP();
    }
    unlock_ring(mutex);
    if (woken)
        ring_lowest(r, woken);
    return list_of(taken, found);
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

/* -- a response ring ---------------------------------------------------------------------- */

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
    store(control, r->base + L.RING_TAIL, tail + count);
    STEP();
    int64_t asleep = load(control, r->base + L.RING_SLEEPERS);
    if (asleep)
        store(control, r->base + L.RING_SLEEPERS, 0);
    STEP();
    unlock_ring(mutex);
    if (asleep)
        ring_lowest(r, 1);
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

static PyObject *
pop_slots(PyObject *object, int arm)
{
    ring *r = (ring *)object;
    const memory *control = &r->control;
    int64_t head = load(control, r->base + L.RING_HEAD);
    int64_t tail = load(control, r->base + L.RING_TAIL);
    if (head == tail) {
        void *mutex;
        if (!arm)
            return PyList_New(0);
        if (!lock_ring(r, &mutex))
            return NULL;
        tail = load(control, r->base + L.RING_TAIL);
        if (head == tail)
            store(control, r->base + L.RING_SLEEPERS, 1);
        STEP();
        unlock_ring(mutex);
        if (head == tail)
            return PyList_New(0);
    }
    if (tail < head || tail - head > r->mask + 1)
        return damaged(0);
    /* The list first: what is marked as popped must not be lost to a lack of memory. */
    PyObject *taken = PyList_New(tail - head);
    for (int64_t position = head; taken != NULL && position < tail; position++) {
        int64_t slot = load(control, entry(r, position));
        PyObject *number = is_slot(slot) ? PyLong_FromLongLong(slot) : damaged(0);
        if (number == NULL)
            Py_CLEAR(taken);
        else
            PyList_SET_ITEM(taken, position - head, number);
    }
    if (taken == NULL)
        return NULL;
    for (int64_t position = head; position < tail; position++) {
        /* Before the head moves: a successor that finds the slot RESPONDING knows
         * that it was popped. */
        set_state(control, load(control, entry(r, position)), L.STATE_RESPONDING);
        STEP();
    }
    store(control, r->base + L.RING_HEAD, tail);
    STEP();
    return taken;
}

PyObject *
ring_pop(PyObject *object, int arm)
{
    return pop_slots(object, arm);
}

/* Without the mutex: whoever has read the flag before rings for nothing. */
void
ring_forget_sleeper(PyObject *object)
{
    ring *r = (ring *)object;
    if (load(&r->control, r->base + L.RING_SLEEPERS))
        store(&r->control, r->base + L.RING_SLEEPERS, 0);
}

static PyObject *
pop(PyObject *object, PyObject *const *args, Py_ssize_t nargs, PyObject *names)
{
    return pop_slots(object, read_arm(args, nargs, names));
}

/* -- types ---------------------------------------------------------------------------- */

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
