/* Python twin: ipc/tables/partition_table.py. */

#include "ipc/partition_row.h"

#include "base/steps.h"
#include "ipc/mutex.h"

#define READ_TRIES 100

/* Return the first word of the copy that is valid at a version. */
static int64_t
copy_at(int64_t row, int64_t version)
{
    return row_at(row) + L.ROW_COPIES + (version & 1) * L.ROW_COPY_WORDS;
}

int
read_state(const memory *rows, int64_t row, int64_t *state)
{
    const int64_t at = row_at(row);
    for (int tries = 0; tries < READ_TRIES; tries++) {
        int64_t version = load(rows, at + L.ROW_VERSION);
        int64_t copy = copy_at(row, version);
        for (int i = 0; i < STATE_WORDS; i++)
            state[i] = load(rows, copy + i);
        /* The same version: no process has written to this copy while we read it. */
        if (load(rows, at + L.ROW_VERSION) == version)
            return 1;
    }
    return 0;
}

enum lock_result
lock_row(const memory *rows, int64_t row, locked_row *r)
{
    int owner_died;
    r->rows = rows;
    r->row = row;
    r->mutex = mutex_at(rows, row_at(row) + L.ROW_MUTEX);
    int error = lock_mutex(r->mutex, &owner_died);
    if (error) {
        raise_damaged_mutex(error);
        return LOCK_FAILED;
    }
    if (owner_died)
        return LOCK_TO_BE_SETTLED;
    STEP();
    r->version = load(rows, row_at(row) + L.ROW_VERSION);
    for (int i = 0; i < STATE_WORDS; i++)
        r->state[i] = load(rows, copy_at(row, r->version) + i);
    return LOCKED;
}

void
commit_row(locked_row *r)
{
    const int64_t copy = copy_at(r->row, r->version + 1);
    /* The copy that is not valid: readers without the lock read the other one. */
    for (int i = 0; i < STATE_WORDS; i++) {
        store(r->rows, copy + i, r->state[i]);
        STEP();
    }
    /* The commit: one aligned store. If this process is killed before it, nothing has
     * happened, and the next writer overwrites the same copy; if it is killed after it,
     * everything has happened. */
    store(r->rows, row_at(r->row) + L.ROW_VERSION, r->version + 1);
    STEP();
}

void
unlock_row(locked_row *r)
{
    unlock_mutex(r->mutex);
    STEP();
}
