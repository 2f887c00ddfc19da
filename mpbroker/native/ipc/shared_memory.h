/* Words and bytes of a segment that other processes have mapped too.
 *
 * Any of these processes may be killed between any two instructions, and each other one
 * goes on with what it finds. So:
 *   - a number that was read from shared memory is checked against the mapping before it
 *     is used as an offset or a length;
 *   - a word is stored by one aligned store, so that a reader sees the old number or the
 *     new one; what commits is a release store, and is read by acquire: a reader that
 *     sees it sees all stores before it;
 *   - between taking and releasing a lock nothing allocates, raises or calls Python.
 */

#ifndef MPBROKER_SHARED_MEMORY_H
#define MPBROKER_SHARED_MEMORY_H

#include "base/python_objects.h"

#include <stdatomic.h>

/* A mapping; kept alive by the object that keeps the Python view it came from. */
typedef struct {
    uint8_t *base;
    int64_t size;
} memory;

typedef _Atomic int64_t word;

/* Read `view` (a Segment's bytes) as a mapping; 0 and an exception if it is none. */
int get_memory(PyObject *view, memory *m);

static inline word *
word_at(const memory *m, int64_t index)
{
    return (word *)(m->base + index * 8);
}

static inline int64_t
load(const memory *m, int64_t index)
{
    return atomic_load_explicit(word_at(m, index), memory_order_acquire);
}

/* For words of which this process is the only writer, or holds the lock. */
static inline int64_t
load_relaxed(const memory *m, int64_t index)
{
    return atomic_load_explicit(word_at(m, index), memory_order_relaxed);
}

/* By release even where a lock orders the stores: on x86-64 it costs nothing. */
static inline void
store(const memory *m, int64_t index, int64_t value)
{
    atomic_store_explicit(word_at(m, index), value, memory_order_release);
}

/* Add to a word of which this process is the only writer. */
static inline void
add_to_word(const memory *m, int64_t index, int64_t amount)
{
    store(m, index, load_relaxed(m, index) + amount);
}

static inline int
has_words(const memory *m, int64_t first, int64_t count)
{
    return first >= 0 && count >= 0 && count <= m->size / 8
           && first <= m->size / 8 - count;
}

static inline int
has_bytes(const memory *m, int64_t offset, int64_t length)
{
    return offset >= 0 && length >= 0 && length <= m->size
           && offset <= m->size - length;
}

#endif
