/* The open transactions of all producers, in a segment of their own.
 *
 * Only the coordinator writes it (ipc/tables/transaction_table.py); the core only
 * reads. An entry is a key and a value. The coordinator stores the value first and then
 * the key, and removes an entry by a store to its key. So one store adds or removes an
 * entry.
 */

#ifndef MPBROKER_TRANSACTION_TABLE_H
#define MPBROKER_TRANSACTION_TABLE_H

#include "ipc/shared_memory.h"

typedef struct {
    memory segment; /* without a base: there is no table */
    int64_t first, capacity, epoch_bits;
} transaction_table;

/* Use the table of `capacity` entries from word `first` of a segment; 0: the segment
 * has no room for such a table. */
int open_transaction_table(transaction_table *t, const memory *segment, int64_t first,
                           int64_t capacity, int64_t epoch_bits);

/* Return whether a producer's transaction is open in a partition (its row's number), at
 * an epoch of the producer. */
int is_transaction_open(const transaction_table *t, int64_t producer_id, int64_t epoch,
                        int64_t row);

#endif
