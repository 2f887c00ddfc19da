/* Python twin: TransactionTable.contains in ipc/tables/transaction_table.py. */

#include "ipc/transaction_table.h"

/* Return where the probing of a producer and a row begins, as _start() does. */
static uint64_t
hash(int64_t producer_id, int64_t row)
{
    uint64_t mixed = (uint64_t)producer_id * 0x9E3779B1u ^ (uint64_t)row * 0x85EBCA6Bu;
    return mixed >> 7;
}

int
is_transaction_open(const transaction_table *t, int64_t producer_id, int64_t epoch,
                    int64_t row)
{
    if (t->segment.base == NULL || producer_id < 0 || producer_id == INT64_MAX)
        return 0;
    const int64_t key = producer_id + 1, value = row << t->epoch_bits | epoch;
    const uint64_t mask = (uint64_t)t->capacity - 1;
    uint64_t at = hash(producer_id, row) & mask;
    for (int64_t looked = 0; looked < t->capacity; looked++) {
        int64_t word = t->first + 2 * (int64_t)at;
        int64_t found = load(&t->segment, word);
        if (found == 0)
            return 0;
        /* The key is read a second time, after the value: in between the coordinator
         * may have removed the entry, and used its place for another producer. */
        if (found == key && load(&t->segment, word + 1) == value
            && load(&t->segment, word) == key)
            return 1;
        at = (at + 1) & mask;
    }
    return 0;
}

int
open_transaction_table(transaction_table *t, const memory *segment, int64_t first,
                       int64_t capacity, int64_t epoch_bits)
{
    if (capacity < 1 || capacity > INT32_MAX || (capacity & (capacity - 1))
        || epoch_bits < 1 || epoch_bits > 32 || !has_words(segment, first, 2 * capacity))
        return 0;
    t->segment = *segment;
    t->first = first;
    t->capacity = capacity;
    t->epoch_bits = epoch_bits;
    return 1;
}
