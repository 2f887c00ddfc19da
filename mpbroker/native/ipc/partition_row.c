/* Python twin: ipc/tables/partition_table.py. */

#include "ipc/partition_row.h"

#define READ_TRIES 100

int
read_state(const memory *rows, int64_t row, int64_t *state)
{
    const int64_t at = row_at(row);
    for (int tries = 0; tries < READ_TRIES; tries++) {
        int64_t version = load(rows, at + L.ROW_VERSION);
        int64_t copy = at + L.ROW_COPIES + (version & 1) * L.ROW_COPY_WORDS;
        for (int i = 0; i < STATE_WORDS; i++)
            state[i] = load(rows, copy + i);
        /* The version has not moved: no writer was at this copy while we read it. */
        if (load(rows, at + L.ROW_VERSION) == version)
            return 1;
    }
    return 0;
}
