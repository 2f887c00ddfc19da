/* What all handlers together have done for each client with a quota, in the quota
 * segment.
 *
 * A row counts one thing (bytes produced, bytes fetched, time) for one client, in
 * windowed samples. Any handler writes any row, under the row's mutex; the exporter
 * reads without it. A handler that is killed there leaves numbers that mean something
 * each by itself: a charge too many or too few, once. Python gives rows to clients
 * (ipc/tables/quota_table.py), and a row's generation says whether it still is the client's.
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
    double bound;            /* a second, in the unit of what the row counts */
} quota_limit;

/* Use a segment as the table; 0: it is none, or its samples do not fit. */
int open_quota_table(quota_table *q, const memory *segment, int64_t samples,
                     int64_t window_ns);

/* Charge an amount, if the client stays within its limit; 0: nothing was charged, for
 * it would not, or the row is another client's. */
int charge_within(const quota_table *q, const quota_limit *limit, int64_t amount,
                  int64_t now_ns);
/* Charge an amount, or give back a negative one, whatever the limit says. */
void charge_anyway(const quota_table *q, const quota_limit *limit, int64_t amount,
                   int64_t now_ns);

/* Return whether a client is within its limit so far: a look without the lock, whose
 * words may be of two moments. */
int is_within_limit(const quota_table *q, const quota_limit *limit, int64_t now_ns);

#endif
