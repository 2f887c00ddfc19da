/* The plainest Fetch: without a session, of few partitions, whose next records begin
 * where this process has seen others end or begin, and fit the slot's block.
 *
 * The twins: server/fetch/fetch_service.py and storage/log/log_reader.py. Whatever is not exactly that
 * is left to them: an offset that is nowhere in ReadPlan.positions, a file that is not
 * the one the row speaks of, open or aborted transactions for readers of committed data,
 * errors of any kind. A fetch changes nothing but the slot's answer, so it may be tried
 * again and again while its request is parked: nothing is kept between the tries.
 * tests/server/test_plain_fetches.py holds both ways against each other.
 */

#include "core.h"
#include "protocol/request_fields.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

#define FIRST_VERSION 4
#define LAST_VERSION 18
#define FLEXIBLE_FROM 12
#define TOPIC_IDS_FROM 13
#define BATCH_OVERHEAD 12
#define BATCH_HEADER 61
#define READ_COMMITTED 1
#define POSITIONS_KEPT 64
/* What an answer takes at most: in front, a topic without its name, a partition without
 * its records. */
#define HEAD_ROOM 32
#define TOPIC_ROOM 16
#define PARTITION_ROOM 56

/* -- the request -------------------------------------------------------------------- */

static void
parse_partition(reader *r, int version, fetch_target *target)
{
    target->partition = (int)get(r, 4);
    target->leader_epoch = version >= 9 ? get(r, 4) : -1;
    target->fetch_offset = get(r, 8);
    if (version >= 12)
        get(r, 4); /* the last epoch that was fetched */
    if (version >= 5)
        get(r, 8); /* a follower's log start offset */
    target->max_bytes = get(r, 4);
    if (target->max_bytes < 0)
        r->is_bad = 1;
    get_no_tags(r);
}

static void
parse_topic(reader *r, plain_fetch *f)
{
    request_topic *topic = &f->topics[f->topic_count++];
    if (f->version >= TOPIC_IDS_FROM)
        topic->name = get_bytes(r, topic->name_bytes = 16);
    else
        topic->name = get_string(r, &topic->name_bytes);
    topic->first = f->target_count;
    topic->count = (int)get_count(r);
    /* An answer names a topic once: that is the twin's to put together. */
    for (int i = 0; !r->is_bad && i < f->topic_count - 1; i++)
        if (f->topics[i].name_bytes == topic->name_bytes
            && memcmp(f->topics[i].name, topic->name, topic->name_bytes) == 0)
            r->is_bad = 1;
    if (topic->count < 1 || topic->count > MAX_FETCH_TARGETS - f->target_count)
        r->is_bad = 1;
    for (int i = 0; !r->is_bad && i < topic->count; i++)
        parse_partition(r, f->version, &f->targets[f->target_count++]);
    get_no_tags(r);
}

int
parse_plain_fetch(const uint8_t *body, int64_t size, int version, plain_fetch *f)
{
    reader r = {body, body + size, version >= FLEXIBLE_FROM, 0};
    f->version = version;
    f->topic_count = f->target_count = 0;
    if (version < FIRST_VERSION || version > LAST_VERSION)
        return 0;
    if (version < 15)
        get(&r, 4); /* the replica's id */
    f->max_wait_ms = get(&r, 4);
    f->min_bytes = get(&r, 4);
    f->max_bytes = get(&r, 4);
    f->read_committed = get(&r, 1) == READ_COMMITTED;
    if (version >= 7 && (get(&r, 4) != 0 || get(&r, 4) != -1))
        return 0; /* a session's */
    int64_t topics = get_count(&r);
    if (f->max_bytes < 0 || topics < 1 || topics > MAX_FETCH_TOPICS)
        return 0;
    for (; !r.is_bad && topics > 0; topics--)
        parse_topic(&r, f);
    if (version >= 7 && get_count(&r) != 0)
        return 0; /* it forgets some, of no session */
    if (version >= 11) {
        int length;
        const uint8_t *rack = get_string(&r, &length);
        for (int i = 0; !r.is_bad && i < length; i++)
            if (rack[i] >= 0x80)
                return 0;
    }
    get_no_tags(&r);
    return !r.is_bad && r.at == r.end;
}

/* -- the logs ------------------------------------------------------------------------ */

/* The plan of a target; NULL, perhaps with an exception, if there is none. */
static PyObject *
find_read_plan(PyObject *readable, const plain_fetch *f, const request_topic *topic,
               int partition)
{
    PyObject *name =
        f->version >= TOPIC_IDS_FROM
            ? PyBytes_FromStringAndSize((const char *)topic->name, topic->name_bytes)
            : PyUnicode_DecodeUTF8((const char *)topic->name, topic->name_bytes, NULL);
    if (name == NULL) {
        PyErr_Clear();
        return NULL;
    }
    PyObject *plans = PyDict_GetItemWithError(readable, name);
    Py_DECREF(name);
    if (plans == NULL || !PyDict_CheckExact(plans))
        return NULL;
    PyObject *index = PyLong_FromLong(partition);
    PyObject *plan = index ? PyDict_GetItemWithError(plans, index) : NULL;
    Py_XDECREF(index);
    return plan;
}

/* Where the batch that holds an offset stands in the plan's segment; -1: unknown. */
static int64_t
find_position(const read_plan_fields *at, PyObject *plan, int64_t offset)
{
    PyObject *positions = get_field(plan, at->positions);
    if (positions == NULL || !PyDict_CheckExact(positions))
        return -1;
    PyObject *number = PyLong_FromLongLong(offset);
    PyObject *place = number ? PyDict_GetItemWithError(positions, number) : NULL;
    Py_XDECREF(number);
    int64_t position;
    if (place == NULL || !PyTuple_CheckExact(place) || PyTuple_GET_SIZE(place) != 2
        || PyTuple_GET_ITEM(place, 0) != get_field(plan, at->segment)
        || !PyLong_Check(PyTuple_GET_ITEM(place, 1)))
        return -1;
    int overflow;
    position = PyLong_AsLongLongAndOverflow(PyTuple_GET_ITEM(place, 1), &overflow);
    return overflow ? -1 : position;
}

int
remember_place(PyObject *positions, PyObject *segment, int64_t offset, int64_t position)
{
    if (positions == NULL || !PyDict_CheckExact(positions))
        return 1;
    if (PyDict_GET_SIZE(positions) >= POSITIONS_KEPT)
        PyDict_Clear(positions);
    PyObject *number = PyLong_FromLongLong(offset);
    PyObject *place = Py_BuildValue("(OL)", segment, (long long)position);
    int result = number != NULL && place != NULL
                 && PyDict_SetItem(positions, number, place) == 0;
    Py_XDECREF(number);
    Py_XDECREF(place);
    return result;
}

/* Whether no transaction was ever aborted in the plan's segment. */
static int
has_no_aborted(const read_plan_fields *at, PyObject *plan)
{
    PyObject *path = get_field(plan, at->txn_index_path);
    return path != NULL && PyBytes_Check(path)
           && access(PyBytes_AS_STRING(path), F_OK) != 0 && errno == ENOENT;
}

/* How much to read of what there is: see LogReader._limit; -1: not plain. */
static int64_t
limit_length(const fetch_target *t, int64_t length, int64_t limit, int min_one_batch)
{
    uint8_t head[BATCH_OVERHEAD];
    if (length <= limit)
        return length;
    if (pread((int)t->fd, head, sizeof head, t->position) != (ssize_t)sizeof head)
        return -1;
    int64_t first = read_big(head + 8, 4) + BATCH_OVERHEAD;
    if (first < BATCH_HEADER || first > length)
        return -1;
    if (first <= limit)
        return limit;
    return min_one_batch ? first : 0;
}

/* LogReader.read, of the end of the active segment. 0: not plain. */
static int
locate(const memory *rows, const read_plan_fields *at, const plain_fetch *f,
       fetch_target *t, int64_t limit, int min_one_batch)
{
    PyObject *segment = get_field(t->plan, at->segment);
    int64_t active_base, leader_epoch, state[STATE_WORDS];
    if (segment == NULL || segment == Py_None
        || !read_int_field(segment, at->segment_fd, &t->fd) || t->fd < 0
        || !read_int_field(t->plan, at->row, &t->row) || t->row < 0
        || t->row >= L.MAX_PARTITIONS
        || !has_row(rows, t->row)
        || !read_int_field(t->plan, at->active_base, &active_base)
        || !read_int_field(t->plan, at->structure, &t->structure)
        || !read_int_field(t->plan, at->leader_epoch, &leader_epoch))
        return 0;
    /* Another epoch than ours, or we do not know it yet: the twin says what that is. */
    if (t->leader_epoch >= 0 && t->leader_epoch != leader_epoch)
        return 0;
    const int64_t row = t->row * L.ROW_WORDS;
    if (load(rows, row + L.ROW_STATUS) != L.ROW_ONLINE || !read_state(rows, t->row, state)
        || state[ACTIVE_BASE] != active_base
        || load(rows, row + L.ROW_STRUCTURE) != t->structure)
        return 0;
    t->log_start_offset = load(rows, row + L.ROW_LOG_START_OFFSET);
    t->end_offset = state[END_OFFSET];
    t->stable_offset =
        state[FIRST_UNSTABLE] >= 0 ? state[FIRST_UNSTABLE] : t->end_offset;
    if (t->stable_offset < t->log_start_offset)
        t->stable_offset = t->log_start_offset; /* what came before was deleted */
    t->length = 0;
    t->end_position = -1;
    if (t->fetch_offset < t->log_start_offset || t->fetch_offset > t->end_offset
        || (f->read_committed && state[FIRST_UNSTABLE] >= 0))
        return 0;
    if (t->fetch_offset == t->end_offset)
        return 1;
    t->position = find_position(at, t->plan, t->fetch_offset);
    int64_t length = state[ACTIVE_SIZE] - t->position;
    if (t->position < 0 || length <= 0
        || (f->read_committed && !has_no_aborted(at, t->plan)))
        return 0;
    t->length = limit_length(t, length, limit, min_one_batch);
    if (length <= limit)
        t->end_position = state[ACTIVE_SIZE];
    return t->length >= 0;
}

/* -- the answer ----------------------------------------------------------------------- */

/* One partition and its records; NULL if the file does not give them. */
static uint8_t *
write_partition(uint8_t *at, const plain_fetch *f, const fetch_target *t)
{
    const int flexible = f->version >= FLEXIBLE_FROM;
    at = write_big(at, t->partition, 4);
    at = write_big(at, 0, 2); /* no error */
    at = write_big(at, t->end_offset, 8);
    at = write_big(at, t->stable_offset, 8);
    if (f->version >= 5)
        at = write_big(at, t->log_start_offset, 8);
    /* Aborted transactions: none, or none asked for. */
    at = write_length(at, f->read_committed ? 0 : -1, flexible, 4);
    if (f->version >= 11)
        at = write_big(at, -1, 4); /* no other replica is preferred */
    at = write_length(at, t->length, flexible, 4);
    if (t->length > 0
        && pread((int)t->fd, at, t->length, t->position) != (ssize_t)t->length)
        return NULL;
    at += t->length;
    if (flexible)
        *at++ = 0;
    return at;
}

static int64_t
answer_bound(const plain_fetch *f)
{
    int64_t bound = HEAD_ROOM;
    for (int i = 0; i < f->topic_count; i++)
        bound += TOPIC_ROOM + f->topics[i].name_bytes;
    for (int i = 0; i < f->target_count; i++)
        bound += PARTITION_ROOM + f->targets[i].length;
    return bound;
}

static uint8_t *
write_answer(uint8_t *at, const plain_fetch *f)
{
    const int flexible = f->version >= FLEXIBLE_FROM;
    at = write_big(at, 0, 4); /* throttle time */
    if (f->version >= 7) {
        at = write_big(at, 0, 2); /* no error */
        at = write_big(at, 0, 4); /* no session */
    }
    at = write_length(at, f->topic_count, flexible, 4);
    for (int i = 0; i < f->topic_count; i++) {
        const request_topic *topic = &f->topics[i];
        if (f->version < TOPIC_IDS_FROM)
            at = write_length(at, topic->name_bytes, flexible, 2);
        memcpy(at, topic->name, topic->name_bytes);
        at = write_length(at + topic->name_bytes, topic->count, flexible, 4);
        for (int j = 0; at != NULL && j < topic->count; j++)
            at = write_partition(at, f, &f->targets[topic->first + j]);
        if (at == NULL)
            return NULL;
        if (flexible)
            *at++ = 0;
    }
    if (flexible)
        *at++ = 0;
    return at;
}

/* -- both ------------------------------------------------------------------------------ */

/* Read what a fetch asks for, and write the answer's body if that is enough. */
enum fetched
read_plain_fetch(const memory *rows, const read_plan_fields *at, PyObject *readable,
                 plain_fetch *f, int must_answer, uint8_t *out, int64_t room,
                 int64_t *length)
{
    int64_t left = f->max_bytes, found = 0;
    for (int i = 0; i < f->topic_count; i++)
        for (int j = 0; j < f->topics[i].count; j++) {
            fetch_target *t = &f->targets[f->topics[i].first + j];
            t->plan = find_read_plan(readable, f, &f->topics[i], t->partition);
            if (t->plan == NULL)
                return PyErr_Occurred() ? FETCH_FAILED : FETCH_NOT_PLAIN;
            int64_t limit = left < t->max_bytes ? left : t->max_bytes;
            if (!locate(rows, at, f, t, limit, found == 0))
                return PyErr_Occurred() ? FETCH_FAILED : FETCH_NOT_PLAIN;
            found += t->length;
            left = left > t->length ? left - t->length : 0;
        }
    if (found < f->min_bytes && f->max_wait_ms > 0 && !must_answer)
        return FETCH_WAITS;
    if (answer_bound(f) > room)
        return FETCH_NOT_PLAIN;
    uint8_t *end = write_answer(out, f);
    if (end == NULL)
        return FETCH_NOT_PLAIN;
    STEP();
    for (int i = 0; i < f->target_count; i++) {
        const fetch_target *t = &f->targets[i];
        /* Unmoved: the file that was read is the one that the row spoke of. */
        if (load(rows, t->row * L.ROW_WORDS + L.ROW_STRUCTURE) != t->structure)
            return FETCH_NOT_PLAIN;
    }
    for (int i = 0; i < f->target_count; i++) {
        const fetch_target *t = &f->targets[i];
        if (t->end_position >= 0
            && !remember_place(get_field(t->plan, at->positions),
                               get_field(t->plan, at->segment), t->end_offset,
                               t->end_position))
            return FETCH_FAILED;
    }
    *length = end - out;
    return FETCH_DONE;
}

void
count_fetched(const memory *rows, int64_t first, const plain_fetch *f)
{
    for (int i = 0; i < f->target_count; i++) {
        const int64_t at = first + f->targets[i].row;
        if (f->targets[i].length > 0 && has_words(rows, at, 1)) {
            store(rows, at, load_relaxed(rows, at) + f->targets[i].length);
            STEP();
        }
    }
}
