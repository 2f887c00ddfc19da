/* Partition rows: the committed state of each partition's log, in the partition segment.
 *
 *     words           written by
 *     mutex           its owner
 *     copies          whoever appends, rolls or truncates, under the mutex: the copy that
 *                     does not count
 *     version         the same, under the mutex: the commit, says which copy counts
 *     intent          whoever appends for a request, under the mutex: slot + 1
 *     status, log start offset, structure     Python, under the mutex
 *     waiters         handlers add their bit under the mutex; who appends takes them all
 *
 * Python twin: ipc/tables/partition_table.py, which also settles the intent of an owner that has
 * died. A row is named by its number; row_at() is its first word.
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

/* Read the committed state without the lock; 0 if it never stands still. */
int read_state(const memory *rows, int64_t row, int64_t *state);

#endif
