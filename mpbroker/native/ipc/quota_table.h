/* The quota table: what each client with a quota has used, counted by all handlers
 * together in the quota segment.
 *
 * A row counts one kind of use (bytes produced, bytes fetched, time) of one client, in
 * windowed samples. Any handler writes any row, under the row's mutex; the exporter
 * reads without the mutex. If a handler is killed while it writes, each number is still
 * valid by itself, and one charge is too many or missing. Python gives rows to clients
 * (ipc/tables/quota_table.py); a row's generation says whether the row still belongs to
 * the same client.
 */

#ifndef MPBROKER_QUOTA_TABLE_H
#define MPBROKER_QUOTA_TABLE_H

#include "ipc/shared_memory.h"

typedef struct {
    memory segment;
    int64_t samples, window_ns;
} quota_table;

typedef struct {
    int64_t row, generation; /* row -1: there is no limit */
    double bound;            /* the quota a second, in the unit of the row's kind */
} quota_limit;

/* Use a segment as the table; 0: it is too short, or a number is out of range. */
int open_quota_table(quota_table *q, const memory *segment, int64_t samples,
                     int64_t window_ns);

/* Charge an amount, if the client stays within its limit with it. 0: nothing was
 * charged, because the limit would be exceeded, or another client has the row. */
int charge_within(const quota_table *q, const quota_limit *limit, int64_t amount,
                  int64_t now_ns);
/* Charge an amount (or refund it, if it is negative) without regard to the limit. */
void charge_anyway(const quota_table *q, const quota_limit *limit, int64_t amount,
                   int64_t now_ns);

/* Return whether a client is within its limit now. This reads without the lock, so some
 * words may be older than others. */
int is_within_limit(const quota_table *q, const quota_limit *limit, int64_t now_ns);

#endif
