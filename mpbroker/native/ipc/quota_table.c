/* Python twin: QuotaRow.charge in ipc/tables/quota_table.py, as far as no client is
 * throttled. */

#include "ipc/quota_table.h"

#include "base/steps.h"
#include "ipc/layout.h"
#include "ipc/mutex.h"

#define NS_PER_S 1000000000
#define NS_PER_MS 1000000

/* The words of a sample; start 0: it is empty. */
enum { SAMPLE_START, SAMPLE_VALUE, SAMPLE_LAST };

int
open_quota_table(quota_table *q, const memory *segment, int64_t samples,
                 int64_t window_ns)
{
    if (!has_words(segment, 0,
                   L.QUOTA_HEADER_WORDS + L.MAX_QUOTA_ROWS * L.QUOTA_ROW_WORDS)
        || samples < 1 || samples > L.MAX_QUOTA_SAMPLES || window_ns < 1)
        return 0;
    q->segment = *segment;
    q->samples = samples;
    q->window_ns = window_ns;
    return 1;
}

static int64_t
quota_row(const quota_limit *limit)
{
    return L.QUOTA_HEADER_WORDS + limit->row * L.QUOTA_ROW_WORDS;
}

static int64_t
sample_at(int64_t row, int64_t sample)
{
    return row + L.QUOTA_SAMPLES + sample * L.QUOTA_SAMPLE_WORDS;
}

/* Return the number of the sample to which an amount is added; `*is_new`: the sample
 * has to be begun. */
static int64_t
current_sample(const quota_table *q, int64_t row, int64_t now, int *is_new)
{
    int64_t current = load_relaxed(&q->segment, row + L.QUOTA_CURRENT);
    if (current < 0 || current > q->samples)
        current = 0; /* the word was written with other settings */
    int64_t start = load_relaxed(&q->segment, sample_at(row, current) + SAMPLE_START);
    *is_new = start == 0 || now - start >= q->window_ns;
    return start != 0 && *is_new ? (current + 1) % (q->samples + 1) : current;
}

/* Return whether a row's rate is within a bound if an amount is added. */
static int
is_within(const quota_table *q, int64_t row, double bound, int64_t amount, int64_t now)
{
    const memory *m = &q->segment;
    int is_new;
    int64_t current = current_sample(q, row, now, &is_new);
    int64_t total = amount, oldest = now, since = now - q->samples * q->window_ns;
    for (int64_t i = 0; i <= q->samples; i++) {
        int64_t sample = sample_at(row, i);
        int64_t start = load_relaxed(m, sample + SAMPLE_START);
        if ((is_new && i == current) || start == 0
            || load_relaxed(m, sample + SAMPLE_LAST) <= since)
            continue;
        total += load_relaxed(m, sample + SAMPLE_VALUE);
        if (start < oldest)
            oldest = start;
    }
    /* The twin of elapsed_ns(): at least all windows but one. */
    int64_t elapsed = now - oldest, missing = q->samples - 1 - elapsed / q->window_ns;
    if (missing > 0)
        elapsed += missing * q->window_ns;
    if (elapsed < NS_PER_MS)
        elapsed = NS_PER_MS;
    return (double)total * NS_PER_S / (double)elapsed <= bound;
}

/* Add an amount to the current sample, under the mutex: QuotaRow._record. */
static void
record_amount(const quota_table *q, int64_t row, int64_t amount, int64_t now)
{
    const memory *m = &q->segment;
    int is_new;
    int64_t current = current_sample(q, row, now, &is_new);
    int64_t sample = sample_at(row, current);
    if (is_new) {
        /* Start 0 says that the sample is empty while its other words change. So a
         * process that is killed here leaves an empty sample, and never one that counts
         * an old window's value in a new window. */
        store(m, sample + SAMPLE_START, 0);
        STEP();
        store(m, sample + SAMPLE_VALUE, 0);
        store(m, sample + SAMPLE_LAST, now);
        STEP();
        store(m, sample + SAMPLE_START, now);
        STEP();
        store(m, row + L.QUOTA_CURRENT, current);
        STEP();
    }
    add_to_word(m, sample + SAMPLE_VALUE, amount);
    STEP();
    store(m, sample + SAMPLE_LAST, now);
    store(m, row + L.QUOTA_USED, now);
    STEP();
    add_to_word(m, row + L.QUOTA_CHARGED, amount);
}

static int
charge(const quota_table *q, const quota_limit *limit, int64_t amount, int64_t now,
       int anyway)
{
    const int64_t row = quota_row(limit);
    void *mutex = mutex_at(&q->segment, row + L.QUOTA_ROW_MUTEX);
    int owner_died = 0;
    if (lock_mutex(mutex, &owner_died))
        return 0; /* the mutex is damaged: Python finds that, too, and reports it */
    STEP();
    int is_charged =
        load_relaxed(&q->segment, row + L.QUOTA_GENERATION) == limit->generation
        && (anyway || is_within(q, row, limit->bound, amount, now));
    if (is_charged)
        record_amount(q, row, amount, now);
    STEP();
    unlock_mutex(mutex);
    if (owner_died)
        report_repairs();
    return is_charged;
}

int
charge_within(const quota_table *q, const quota_limit *limit, int64_t amount,
              int64_t now_ns)
{
    return charge(q, limit, amount, now_ns, 0);
}

void
charge_anyway(const quota_table *q, const quota_limit *limit, int64_t amount,
              int64_t now_ns)
{
    charge(q, limit, amount, now_ns, 1);
}

int
is_within_limit(const quota_table *q, const quota_limit *limit, int64_t now_ns)
{
    const int64_t row = quota_row(limit);
    return load(&q->segment, row + L.QUOTA_GENERATION) == limit->generation
           && is_within(q, row, limit->bound, 0, now_ns);
}
