/* Partition rows: the committed state of each partition's log, in the partition
 * segment.
 *
 *     words           written by
 *     mutex           its owner
 *     copies          an append, a roll or a truncation, under the mutex: the copy that
 *                     is not valid
 *     version         the same, under the mutex: the commit; says which copy is valid
 *     intent          the append of a request, under the mutex: slot + 1
 *     status, log start offset, structure     Python, under the mutex
 *     waiters         handlers, which add their bits under the mutex; an append, which
 *                     takes all bits without the mutex
 *
 * Python twin: ipc/tables/partition_table.py, which also settles the intent of an owner
 * that has died. A row is named by its number; row_at() is its first word.
 */

#ifndef MPBROKER_PARTITION_ROW_H
#define MPBROKER_PARTITION_ROW_H

#include "ipc/layout.h"
#include "ipc/shared_memory.h"

/* The words of a copy, in the order of partition_table.LogState. */
enum state_word {
    END_OFFSET,
    ACTIVE_BASE,
    ACTIVE_SIZE,
    INDEX_ENTRIES,
    TIME_INDEX_ENTRIES,
    BYTES_SINCE_INDEX,
    MAX_TIMESTAMP,
    MAX_TIMESTAMP_OFFSET,
    FIRST_UNSTABLE,
    CREATED_MS,
    BYTES_IN,
    STATE_WORDS,
};

static inline int64_t
row_at(int64_t row)
{
    return row * L.ROW_WORDS;
}

static inline int
has_row(const memory *rows, int64_t row)
{
    return row >= 0 && row < L.MAX_PARTITIONS
           && has_words(rows, row_at(row), L.ROW_WORDS);
}

/* Read the committed state without the lock; 0 if it changed during each of 100
 * tries. */
int read_state(const memory *rows, int64_t row, int64_t *state);

/* A row whose lock this process holds, with the state that was committed last. */
typedef struct {
    const memory *rows;
    void *mutex;
    int64_t row, version;
    int64_t state[STATE_WORDS];
} locked_row;

enum lock_result {
    LOCK_FAILED = -1, /* an exception is set, and the lock is not held */
    /* The last owner died. The lock is held; Python has to settle that owner's intent,
     * and to release the lock. */
    LOCK_TO_BE_SETTLED = 0,
    LOCKED = 1,
};

/* Functions of the module return this to Python in place of a result, if they leave the
 * lock of the row `row` (a field of their object) held. Python has to settle the intent
 * of that row, and to release the lock. */
#define ROW_IS_HELD (-1)

/* Take a row's lock, and read its state. */
enum lock_result lock_row(const memory *rows, int64_t row, locked_row *r);
/* Make the state in `r`, which the caller has changed, the committed one. */
void commit_row(locked_row *r);
void unlock_row(locked_row *r);

#endif
