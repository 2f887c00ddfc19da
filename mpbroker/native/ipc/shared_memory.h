/* Words and bytes of a segment that other processes have mapped too.
 *
 * Any of these processes may be killed between any two instructions, and the others
 * continue with the words that it leaves. So:
 *   - a number that was read from shared memory is checked against the mapping before
 *     it is used as an offset or a length;
 *   - a word is stored by one aligned store, so that a reader sees the old number or
 *     the new one. A commit is a release store, and is read by an acquire load: a
 *     reader that sees the commit sees all stores before it, too;
 *   - between taking and releasing a lock nothing allocates, raises or calls Python.
 */

#ifndef MPBROKER_SHARED_MEMORY_H
#define MPBROKER_SHARED_MEMORY_H

#include "base/python_objects.h"

#include <stdatomic.h>

/* A mapping. It exists as long as the Python view from which it was taken. */
typedef struct {
    uint8_t *base;
    int64_t size;
} memory;

typedef _Atomic int64_t word;

/* Take the mapping of `view` (a Segment's bytes); 0 and an exception if it has none. */
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

/* Read a word of which this process is the only writer, or whose lock it holds. */
static inline int64_t
load_relaxed(const memory *m, int64_t index)
{
    return atomic_load_explicit(word_at(m, index), memory_order_relaxed);
}

/* Store a word. This is a release store even where a lock orders the stores: on x86-64
 * that costs nothing. */
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
