/* The plainest batch: one uncompressed, of no producer or the next one of a known producer
 * (producers.c), perhaps of its open transaction, to a segment that needs not be rolled.
 *
 * The twins: protocol/records/log_validator.py and storage/log/partition_log.py, whose order of
 * stores this is. Whatever is not exactly plain is left to them, before anything of it
 * was written: so this file decides nothing about validity, and refuses nobody.
 * tests/server/test_plain_requests.py and test_plain_partitions.py hold both against
 * each other.
 */

#include "core.h"
#include "protocol/record_walk.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

#define BATCH_HEADER 61
#define TRANSACTIONAL 0x10
/* Larger ones cost their bytes, and the crc32c package reads those faster. */
#define MAX_BATCH_BYTES (256 * 1024)
#define OFFSET_ENTRY_BYTES 8
#define TIME_ENTRY_BYTES 12

/* -- the batch ------------------------------------------------------------------------ */

/* Far beyond any time, and from where anything could overflow. */
#define MAX_PLAIN_TIME ((int64_t)1 << 60)

/* Visit every record; the newest and oldest delta, or 0 if one is not plain. */
static int
walk_plain(cursor c, int64_t count, int64_t *newest, int64_t *oldest)
{
    for (int64_t index = 0; index < count; index++) {
        record r;
        if (read_record(&c, 0, index, &r) != NO_FAULT)
            return 0;
        if (index == 0 || r.timestamp_delta > *newest)
            *newest = r.timestamp_delta;
        if (index == 0 || r.timestamp_delta < *oldest)
            *oldest = r.timestamp_delta;
    }
    return c.at == c.end && *newest < MAX_PLAIN_TIME && *oldest > -MAX_PLAIN_TIME;
}

/* Whether all is plain but the records and their checksum, which take longer to see. */
int
has_plain_header(produce_part *part, int64_t max_message_bytes)
{
    const uint8_t *b = part->batch;
    const int64_t size = part->batch_bytes;
    if (size < BATCH_HEADER || read_big(b + 8, 4) + 12 != size || b[16] != 2
        || size > max_message_bytes || size > MAX_BATCH_BYTES)
        return 0;
    part->is_transactional = b[22] == TRANSACTIONAL;
    /* no codec, no flag of any other kind; counts that agree */
    int64_t count = read_big(b + 57, 4);
    return !b[21] && (!b[22] || part->is_transactional) && count > 0
           && read_big(b + 23, 4) == count - 1;
}

/* Whether the records are, of a batch whose header is. */
int
has_plain_records(const produce_part *part, int64_t now_ms)
{
    const uint8_t *b = part->batch;
    const int64_t size = part->batch_bytes;
    int64_t newest = 0, oldest = 0;
    if (crc32c(b + 21, size - 21) != (uint32_t)read_big(b + 17, 4))
        return 0;
    cursor records = {b + BATCH_HEADER, b + size};
    if (!walk_plain(records, read_big(b + 57, 4), &newest, &oldest))
        return 0;
    int64_t base = read_big(b + 27, 8);
    if (base < 0 || base > MAX_PLAIN_TIME || base + oldest < 0)
        return 0;
    newest += base;
    oldest += base;
    return newest == read_big(b + 35, 8) && newest - now_ms <= part->after_max_ms
           && now_ms - oldest <= part->before_max_ms;
}

/* -- the append ------------------------------------------------------------------------ */

/* The descriptor of one of a segment's indexes; -1 if it is not open. */
static int64_t
index_fd(PyObject *segment, Py_ssize_t index, Py_ssize_t fd)
{
    PyObject *object = get_field(segment, index);
    int64_t value;
    return object != NULL && read_int_field(object, fd, &value) ? value : -1;
}

int
read_append_plan(const append_plan_fields *at, PyObject *plan, append_plan *a)
{
    PyObject *segment = get_field(plan, at->segment);
    if (segment == NULL || segment == Py_None
        || !read_int_field(segment, at->segment_fd, &a->fd) || a->fd < 0
        || !read_int_field(plan, at->row, &a->row)
        || !read_int_field(plan, at->active_base, &a->active_base)
        || !read_int_field(plan, at->structure, &a->structure)
        || !read_int_field(plan, at->max_size, &a->max_size)
        || !read_int_field(plan, at->max_entries, &a->max_entries)
        || !read_int_field(plan, at->max_time_entries, &a->max_time_entries)
        || !read_int_field(plan, at->index_interval, &a->index_interval)
        || !read_int_field(plan, at->epoch, &a->epoch)
        || !read_int_field(plan, at->roll_after, &a->roll_after)
        || !read_int_field(plan, at->producers_end, &a->producers_end))
        return 0;
    a->offset_index_fd = index_fd(segment, at->offset_index, at->offset_index_fd);
    a->time_index_fd = index_fd(segment, at->time_index, at->time_index_fd);
    return a->row >= 0 && a->row < L.MAX_PARTITIONS;
}

/* Whether the partition is as the plan has it, and has room; under its lock. */
int
fits(const append_plan *a, const memory *rows, int64_t row, const int64_t *state,
     int64_t added, int64_t last_offset, int64_t timestamp)
{
    if (load(rows, row + L.ROW_STATUS) != L.ROW_ONLINE
        || load(rows, row + L.ROW_STRUCTURE) != a->structure
        || state[ACTIVE_BASE] != a->active_base || state[ACTIVE_SIZE] < 0
        || added > a->max_size)
        return 0;
    if (state[BYTES_SINCE_INDEX] > a->index_interval
        && (a->offset_index_fd < 0 || a->time_index_fd < 0))
        return 0;
    return state[ACTIVE_SIZE] == 0
           || !(state[ACTIVE_SIZE] + added > a->max_size
                || last_offset - a->active_base > INT32_MAX
                || state[INDEX_ENTRIES] >= a->max_entries
                || state[TIME_INDEX_ENTRIES] >= a->max_time_entries
                || timestamp > a->roll_after);
}

/* Write an entry of the offset index, and of the time index if it has news. They count
 * once the state that is committed says so. 0: the disk has failed.
 */
static int
write_indexes(const append_plan *a, int64_t *state, int64_t last_offset,
              int64_t position)
{
    uint8_t entry[TIME_ENTRY_BYTES];
    write_big(entry, last_offset - a->active_base, 4);
    write_big(entry + 4, position, 4);
    if (pwrite((int)a->offset_index_fd, entry, OFFSET_ENTRY_BYTES,
               state[INDEX_ENTRIES] * OFFSET_ENTRY_BYTES) != OFFSET_ENTRY_BYTES)
        return 0;
    STEP();
    state[INDEX_ENTRIES]++;
    state[BYTES_SINCE_INDEX] = 0;
    int64_t newest = -1, at = state[TIME_INDEX_ENTRIES] * TIME_ENTRY_BYTES;
    if (at > 0) {
        ssize_t got = pread((int)a->time_index_fd, entry, TIME_ENTRY_BYTES,
                            at - TIME_ENTRY_BYTES);
        if (got < 0)
            return 0;
        if (got == TIME_ENTRY_BYTES)
            newest = read_big(entry, 8);
    }
    if (state[MAX_TIMESTAMP] <= newest)
        return 1;
    write_big(entry, state[MAX_TIMESTAMP], 8);
    write_big(entry + 8, state[MAX_TIMESTAMP_OFFSET] - a->active_base, 4);
    if (pwrite((int)a->time_index_fd, entry, TIME_ENTRY_BYTES, at) != TIME_ENTRY_BYTES)
        return 0;
    STEP();
    state[TIME_INDEX_ENTRIES]++;
    return 1;
}

static void
commit(const memory *rows, int64_t row, int64_t version, const int64_t *state)
{
    int64_t copy = row + L.ROW_COPIES + (version & 1) * L.ROW_COPY_WORDS;
    for (int i = 0; i < STATE_WORDS; i++) {
        store(rows, copy + i, state[i]);
        STEP();
    }
    /* The commit: one aligned store. Before it nothing happened, after it all. */
    store(rows, row + L.ROW_VERSION, version);
    STEP();
}

/* Write a batch where it goes by `state`, which is committed as `version`, and commit that
 * it is there; under the lock. 0: the disk has failed, and nothing has happened.
 */
int
write_batch(const append_plan *a, const memory *rows, int64_t version, int64_t *state,
            const uint8_t *batch, int64_t size)
{
    const int64_t last_offset = state[END_OFFSET] + read_big(batch + 23, 4);
    const int64_t timestamp = read_big(batch + 35, 8), position = state[ACTIVE_SIZE];
    if (timestamp > state[MAX_TIMESTAMP]) {
        state[MAX_TIMESTAMP] = timestamp;
        state[MAX_TIMESTAMP_OFFSET] = last_offset;
    }
    if (pwrite((int)a->fd, batch, size, position) != size
        || (state[BYTES_SINCE_INDEX] > a->index_interval
            && !write_indexes(a, state, last_offset, position)))
        return 0;
    STEP();
    state[END_OFFSET] = last_offset + 1;
    state[ACTIVE_SIZE] = position + size;
    state[BYTES_SINCE_INDEX] += size;
    state[BYTES_IN] += size;
    commit(rows, a->row * L.ROW_WORDS, version + 1, state);
    return 1;
}

/* The arena's words where a slot notes what of its request is done, one a partition; -1
 * if there is no room for so many.
 */
int64_t
progress_room(const memory *control, const memory *arena, int64_t slot, int count)
{
    int64_t where = load(control, slot_row(slot) + L.SLOT_PROGRESS_OFFSET) >> 3;
    return where > 0 && has_words(arena, where, count) ? where : -1;
}

/* Append the batch of a request's partition number `ordinal`, all before which are done.
 * 1: it is. 0: not plain, nothing of it was written; if `row_is_held`, the caller must
 * settle the row's intent and release its lock: its last owner died, or the write
 * failed. -1: an exception.
 */
int
append_plain(const memory *control, const memory *arena, const memory *rows,
             const transaction_table *open, const append_plan_fields *at, int64_t slot,
             plain_produce *p, int ordinal)
{
    append_plan a;
    produce_part *part = &p->parts[ordinal];
    appended *result = &part->done;
    int owner_died;
    result->row_is_held = 0;
    if (!read_append_plan(at, part->plan, &a) || slot < 0
        || !has_words(rows, a.row * L.ROW_WORDS, L.ROW_WORDS))
        return 0;
    const int64_t row = a.row * L.ROW_WORDS, words = slot_row(slot);
    void *mutex = mutex_at(rows, row + L.ROW_MUTEX);
    int error = lock_mutex(mutex, &owner_died);
    if (error) {
        raise_damaged_mutex(error);
        return -1;
    }
    result->row = a.row;
    if (owner_died) {
        result->row_is_held = 1;
        return 0;
    }
    STEP();
    int64_t state[STATE_WORDS];
    const int64_t version = load(rows, row + L.ROW_VERSION);
    const int64_t current = row + L.ROW_COPIES + (version & 1) * L.ROW_COPY_WORDS;
    for (int i = 0; i < STATE_WORDS; i++)
        state[i] = load(rows, current + i);
    const int64_t added = part->batch_bytes, end_offset = state[END_OFFSET];
    const int64_t last_offset = end_offset + read_big(part->batch + 23, 4);
    const int64_t timestamp = read_big(part->batch + 35, 8);
    const int64_t position = state[ACTIVE_SIZE];
    /* Another process's batch since we looked at the producers may be of this one; and a
     * transaction is closed before the marker that ends it comes, under this lock. */
    if ((part->entry != NULL && a.producers_end != end_offset)
        || (part->is_transactional
            && !is_transaction_open(open, part->producer.id, part->producer.epoch, a.row))
        || !fits(&a, rows, row, state, added, last_offset, timestamp)) {
        unlock_mutex(mutex);
        return 0;
    }
    store(control, words + L.SLOT_INTENT_BASE, end_offset);
    STEP();
    store(control, words + L.SLOT_INTENT, (int64_t)(ordinal + 1) << 32 | (a.row + 1));
    STEP();
    store(rows, row + L.ROW_INTENT, slot + 1);
    STEP();
    write_big(part->batch, end_offset, 8);
    write_big(part->batch + 12, a.epoch, 4);
    STEP();
    if (part->is_transactional && state[FIRST_UNSTABLE] < 0)
        state[FIRST_UNSTABLE] = end_offset;
    if (!write_batch(&a, rows, version, state, part->batch, added)) {
        result->row_is_held = 1;
        return 0;
    }
    /* What clear_intent does: we know what a successor would have to find out. */
    store(arena, p->progress + ordinal, end_offset);
    STEP();
    store(control, words + L.SLOT_PROGRESS, ordinal + 1);
    STEP();
    store(control, words + L.SLOT_INTENT, 0);
    STEP();
    store(rows, row + L.ROW_INTENT, 0);
    STEP();
    result->base_offset = end_offset;
    result->next_offset = last_offset + 1;
    result->position = position;
    result->next_position = position + added;
    result->log_start_offset = load(rows, row + L.ROW_LOG_START_OFFSET);
    unlock_mutex(mutex);
    STEP();
    result->has_waiters = load(rows, row + L.ROW_WAITERS) != 0;
    return 1;
}
