/* Requests that a handler executes without Python: an ApiVersions that was answered
 * before, a plain Produce and a plain Fetch. A short cut through server/request_handler.py's
 * way, by tables that server/core_cache.py fills and empties: it says "no" to anything
 * else but what is only handed on (forward.c), and while the metadata log has news.
 */

#include "server/handler_end.h"

#include <stddef.h>
#include <string.h>

#define PRODUCE 0
#define FETCH 1
#define API_VERSIONS 18
#define PRODUCE_FLEXIBLE_FROM 9
#define MAX_KEY_BYTES 512
#define TOPIC_IDS_FROM 13 /* a produce or a fetch names its topics by id */

/* What execute() returns. None: not for the short cut. An API's key: answered, or handed
 * on. Added to that: NOTIFY, if others wait for a partition that was appended to; WAITS,
 * if a Produce's answer is written and may go when that is on disk (see appended() for
 * both), or if a Fetch has to wait (see fetch_waits()). AT_ONCE: it is of a transaction,
 * whose client has nothing else under way. BEGINS: the coordinator has to take it first,
 * as it writes where its transaction is not open. HELD: not for the short cut, and the
 * lock of the partition `row` is held.
 */
#define WAITS 0x20000
#define AT_ONCE 0x40000
#define BEGINS 0x80000
#define HELD (-1)

/* -- the tables -------------------------------------------------------------------------- */

int
find_append_plan_fields(append_plan_fields *at, PyTypeObject *p, PyTypeObject *s, PyTypeObject *index,
                PyTypeObject *time_index)
{
    return field_offset(p, "row", &at->row) && field_offset(p, "segment", &at->segment)
           && field_offset(s, "_fd", &at->segment_fd)
           && field_offset(s, "offset_index", &at->offset_index)
           && field_offset(index, "_fd", &at->offset_index_fd)
           && field_offset(s, "time_index", &at->time_index)
           && field_offset(time_index, "_fd", &at->time_index_fd)
           && field_offset(p, "active_base", &at->active_base)
           && field_offset(p, "structure", &at->structure)
           && field_offset(p, "max_size", &at->max_size)
           && field_offset(p, "max_entries", &at->max_entries)
           && field_offset(p, "max_time_entries", &at->max_time_entries)
           && field_offset(p, "index_interval", &at->index_interval)
           && field_offset(p, "epoch", &at->epoch)
           && field_offset(p, "roll_after", &at->roll_after)
           && field_offset(p, "positions", &at->positions)
           && field_offset(p, "producers_end", &at->producers_end)
           && field_offset(p, "producers_position", &at->producers_position);
}

PyObject *
handler_set_tables(PyObject *object, PyObject *args)
{
    handler_end *self = (handler_end *)object;
    PyObject *rows, *plan_type, *segment_type, *index_type, *time_index_type;
    long long news_word;
    memory mapping;
    append_plan_fields plan;
    if (!PyArg_ParseTuple(args, "OLO!O!O!O!", &rows, &news_word, &PyType_Type, &plan_type,
                          &PyType_Type, &segment_type, &PyType_Type, &index_type,
                          &PyType_Type, &time_index_type)
        || !get_memory(rows, &mapping)
        || !find_append_plan_fields(&plan, (PyTypeObject *)plan_type,
                            (PyTypeObject *)segment_type, (PyTypeObject *)index_type,
                            (PyTypeObject *)time_index_type))
        return NULL;
    if (!has_words(&self->control, news_word, 1))
        return PyErr_Format(PyExc_IndexError, "no such word");
    PyObject *keep = PyTuple_Pack(2, self->keep, rows);
    if (keep == NULL)
        return NULL;
    Py_SETREF(self->keep, keep);
    self->rows = mapping;
    self->news_word = news_word;
    self->plan = plan;
    Py_RETURN_NONE;
}

PyObject *
handler_set_fetches(PyObject *object, PyObject *args)
{
    handler_end *self = (handler_end *)object;
    PyObject *plan_type, *segment_type;
    long long handler, max_bytes;
    read_plan_fields at;
    if (!PyArg_ParseTuple(args, "O!O!LL", &PyType_Type, &plan_type, &PyType_Type,
                          &segment_type, &handler, &max_bytes))
        return NULL;
    PyTypeObject *plan = (PyTypeObject *)plan_type;
    if (!field_offset(plan, "row", &at.row) || !field_offset(plan, "segment", &at.segment)
        || !field_offset((PyTypeObject *)segment_type, "_fd", &at.segment_fd)
        || !field_offset(plan, "active_base", &at.active_base)
        || !field_offset(plan, "structure", &at.structure)
        || !field_offset(plan, "leader_epoch", &at.leader_epoch)
        || !field_offset(plan, "positions", &at.positions)
        || !field_offset(plan, "txn_index_path", &at.txn_index_path))
        return NULL;
    self->read_plan = at;
    self->claimed = (handler + 1) << L.STATE_HANDLER_SHIFT | L.STATE_CLAIMED;
    self->fetched = L.FETCHED_BYTES + handler * L.MAX_PARTITIONS;
    self->fetch_max_bytes = max_bytes;
    Py_RETURN_NONE;
}

PyObject *
handler_set_transactions(PyObject *object, PyObject *args)
{
    handler_end *self = (handler_end *)object;
    PyObject *view;
    long long first, capacity, epoch_bits;
    memory segment;
    if (!PyArg_ParseTuple(args, "OLLL", &view, &first, &capacity, &epoch_bits)
        || !get_memory(view, &segment))
        return NULL;
    PyObject *keep = PyTuple_Pack(2, self->keep, view);
    if (keep == NULL)
        return NULL;
    Py_SETREF(self->keep, keep);
    if (!open_transaction_table(&self->transactions, &segment, first, capacity, epoch_bits))
        return PyErr_Format(PyExc_ValueError, "no table of transactions");
    Py_RETURN_NONE;
}

PyObject *
handler_set_producers(PyObject *object, PyObject *args)
{
    handler_end *self = (handler_end *)object;
    PyObject *plan, *state, *entry, *batch;
    producer_fields at;
    if (!PyArg_ParseTuple(args, "O!O!O!O!", &PyType_Type, &plan, &PyType_Type, &state,
                          &PyType_Type, &entry, &PyType_Type, &batch))
        return NULL;
    if (!PyType_IsSubtype((PyTypeObject *)batch, &PyTuple_Type))
        return PyErr_Format(PyExc_TypeError, "batches are tuples");
    if (!find_producer_fields(&at, (PyTypeObject *)plan, (PyTypeObject *)state,
                             (PyTypeObject *)entry, (PyTypeObject *)batch))
        return NULL;
    PyObject *keep = PyTuple_Pack(2, self->keep, args);
    if (keep == NULL)
        return NULL;
    Py_SETREF(self->keep, keep);
    self->producers = at;
    Py_RETURN_NONE;
}

/* Whether it is noted what software is behind a connection: client_software.py. */
static int
is_known_client(const handler_end *self, int64_t slot)
{
    const memory *control = &self->control;
    int64_t connection, row;
    if (!find_connection(control, slot, &connection, &row)
        || !has_words(control, L.CONNECTION_SOFTWARE + connection, 1))
        return 0;
    int64_t cookie = load(control, row + L.CONNECTION_COOKIE);
    int64_t noted = load(control, L.CONNECTION_SOFTWARE + connection);
    return noted >> L.SOFTWARE_SHIFT == cookie;
}

static int
execute_api_versions(handler_end *self, int64_t slot, const uint8_t *frame,
                     int64_t size)
{
    uint8_t bytes[MAX_KEY_BYTES];
    int64_t at = answer_offset(self, slot);
    if (size > MAX_KEY_BYTES || at < 0 || !is_known_client(self, slot))
        return 0;
    /* All but the correlation id. */
    memcpy(bytes, frame, 4);
    memcpy(bytes + 4, frame + 8, size - 8);
    PyObject *key = PyBytes_FromStringAndSize((char *)bytes, size - 4);
    if (key == NULL)
        return -1;
    PyObject *body = PyDict_GetItemWithError(self->remembered, key);
    Py_DECREF(key);
    if (body == NULL)
        return PyErr_Occurred() ? -1 : 0;
    if (!PyBytes_Check(body) || PyBytes_GET_SIZE(body) + 8 > L.ANSWER_BYTES)
        return 0;
    int64_t length = PyBytes_GET_SIZE(body);
    uint8_t *out = write_big(self->arena.base + at, length + 4, 4);
    memcpy(out, frame + 4, 4);
    memcpy(out + 4, PyBytes_AS_STRING(body), length);
    STEP();
    return answer_slot(self, slot, L.KIND_BYTES, at, length + 8) ? 1 : -1;
}

/* Remember where a waiting fetch of these records will begin to read. */
int
remember_position(const append_plan_fields *at, PyObject *plan, const appended *done)
{
    return remember_place(get_field(plan, at->positions), get_field(plan, at->segment),
                          done->base_offset, done->position);
}

/* Whoever knew all producers before this batch still does. */
int
keep_up(const append_plan_fields *at, PyObject *plan, const appended *done)
{
    PyObject *end = get_field(plan, at->producers_end);
    if (end == NULL || !PyLong_Check(end) || PyLong_AsLongLong(end) != done->base_offset)
        return !PyErr_Occurred();
    return set_int_field(plan, at->producers_end, done->next_offset)
           && set_int_field(plan, at->producers_position, done->next_position);
}

enum plainness {
    NOT_PLAIN,
    PLAIN,
    BEGUN_ELSEWHERE, /* plain, but its transaction is not open there */
};

/* What is known of a topic, (max_message_bytes, before_max_ms, after_max_ms, plans), if
 * the slot's sender may write to it; borrowed. NULL, perhaps with an exception, if not.
 */
static PyObject *
find_topic(handler_end *self, int64_t slot, const request_topic *topic, int version)
{
    const char *text = (const char *)topic->name;
    PyObject *name = version >= TOPIC_IDS_FROM
                         ? PyBytes_FromStringAndSize(text, topic->name_bytes)
                         : PyUnicode_DecodeUTF8(text, topic->name_bytes, NULL);
    if (name == NULL) {
        PyErr_Clear();
        return NULL;
    }
    PyObject *known = PyDict_GetItemWithError(self->topics, name);
    int allowed = known != NULL ? may_write(self, slot, name) : 0;
    Py_DECREF(name);
    return allowed > 0 && PyTuple_Check(known) && PyTuple_GET_SIZE(known) == 4
                   && PyDict_CheckExact(PyTuple_GET_ITEM(known, 3))
               ? known
               : NULL;
}

/* Find how a partition's batch is to be appended, and see that it may be as far as that
 * is seen at once. NOT_PLAIN may be an exception, too.
 */
static enum plainness
find_part(handler_end *self, PyObject *known, produce_part *part, int is_transactional,
          int64_t now)
{
    int64_t row;
    int64_t max_message_bytes = PyLong_AsLongLong(PyTuple_GET_ITEM(known, 0));
    part->before_max_ms = PyLong_AsLongLong(PyTuple_GET_ITEM(known, 1));
    part->after_max_ms = PyLong_AsLongLong(PyTuple_GET_ITEM(known, 2));
    if (PyErr_Occurred() || !has_plain_header(part, max_message_bytes)
        || !read_producer(part->batch, &part->producer)
        || part->is_transactional != is_transactional
        || (is_transactional && part->producer.id < 0))
        return NOT_PLAIN;
    PyObject *index = PyLong_FromLong(part->partition);
    if (index == NULL)
        return NOT_PLAIN;
    part->plan = PyDict_GetItemWithError(PyTuple_GET_ITEM(known, 3), index);
    Py_XINCREF(part->plan);
    Py_DECREF(index);
    if (part->plan == NULL)
        return NOT_PLAIN;
    if (part->producer.id < 0)
        return PLAIN;
    if (is_transactional
        && (!read_int_field(part->plan, self->plan.row, &row)
            || !is_transaction_open(&self->transactions, part->producer.id, part->producer.epoch,
                        row)))
        return self->quotas.are_set ? NOT_PLAIN : BEGUN_ELSEWHERE;
    part->entry = expect_batch(&self->rows, &self->plan, &self->producers, part->plan,
                               &part->producer, is_transactional, now);
    Py_XINCREF(part->entry);
    return part->entry != NULL ? PLAIN : NOT_PLAIN;
}

/* Whether all of a request is plain: nothing of it is done if one partition is not. Or
 * whether all is but that a transaction is not open somewhere: what the records are is
 * for later.
 */
static enum plainness
see_all(handler_end *self, int64_t slot, plain_produce *p, int64_t now)
{
    enum plainness all = PLAIN;
    for (int i = 0; i < p->topic_count; i++) {
        const request_topic *topic = &p->topics[i];
        PyObject *known = find_topic(self, slot, topic, p->version);
        if (known == NULL)
            return NOT_PLAIN;
        for (int j = topic->first; j < topic->first + topic->count; j++) {
            enum plainness one =
                find_part(self, known, &p->parts[j], p->is_transactional, now);
            if (one == NOT_PLAIN)
                return NOT_PLAIN;
            if (one == BEGUN_ELSEWHERE)
                all = BEGUN_ELSEWHERE;
            /* A partition's second batch follows a first that is not there yet. */
            for (int k = 0; k < j; k++)
                if (p->parts[k].plan == p->parts[j].plan)
                    return NOT_PLAIN;
        }
    }
    for (int i = 0; all == PLAIN && i < p->part_count; i++)
        if (!has_plain_records(&p->parts[i], now))
            return NOT_PLAIN;
    return all;
}

/* Append one batch after the other, each noted as done in the slot. 0: one turned out not
 * to be plain, as others have changed its partition meanwhile. Then, as after a death,
 * whoever executes the request again finds what is done and goes on from there: the
 * usual way, of which this one takes no request that was begun.
 */
static int
append_parts(handler_end *self, int64_t slot, plain_produce *p, int64_t now,
             int *row_is_held)
{
    for (int i = 0; i < p->part_count; i++) {
        produce_part *part = &p->parts[i];
        int result = append_plain(&self->control, &self->arena, &self->rows,
                                  &self->transactions, &self->plan, slot, p, i);
        if (result <= 0) {
            *row_is_held = part->done.row_is_held;
            self->row = part->done.row;
            return result;
        }
        int known = part->entry == NULL
                        ? keep_up(&self->plan, part->plan, &part->done)
                        : accept_batch(&self->plan, &self->producers, part->plan,
                                       part->entry, &part->producer, part->is_transactional,
                                       &part->done, now);
        if (!known || !remember_position(&self->plan, part->plan, &part->done))
            return -1;
    }
    return 1;
}

/* Take what was found in the tables out of hand. */
static void
forget_parts(plain_produce *p)
{
    for (int i = 0; i < p->part_count; i++) {
        Py_CLEAR(p->parts[i].plan);
        Py_CLEAR(p->parts[i].entry);
    }
}

/* Says in `*flags` what is left to Python. */
static int
execute_produce(handler_end *self, int64_t slot, uint8_t *frame, int64_t size, int *flags)
{
    plain_produce *p = &self->produce;
    const int version = (int)read_big(frame + 2, 2);
    const int flexible = version >= PRODUCE_FLEXIBLE_FROM;
    int64_t header = header_size(frame, size, flexible), at = answer_offset(self, slot);
    int row_is_held = 0;
    if (header == 0 || at < 0
        || !parse_plain_produce(frame + header, size - header, version, p)
        || produce_answer_bound(p) > L.ANSWER_BYTES)
        return 0;
    /* Who may use a transactional id is asked the usual way, if anybody is. */
    if (p->is_transactional
        && (self->transactions.segment.base == NULL || self->verdicts.are_needed))
        return 0;
    p->progress = progress_room(&self->control, &self->arena, slot, p->part_count);
    if (p->progress < 0 || load(&self->control, slot_row(slot) + L.SLOT_PROGRESS) != 0)
        return 0;
    for (int i = 0; i < p->part_count; i++)
        p->parts[i].plan = p->parts[i].entry = NULL;
    const int64_t now = wall_clock_ms();
    const enum plainness found = see_all(self, slot, p, now);
    int result = PyErr_Occurred() ? -1 : 0;
    if (found == PLAIN)
        result = append_parts(self, slot, p, now, &row_is_held);
    forget_parts(p);
    if (found == BEGUN_ELSEWHERE && result == 0) {
        *flags = BEGINS;
        return 1;
    }
    if (row_is_held)
        *flags = HELD;
    if (result <= 0)
        return result;
    for (int i = 0; i < p->part_count; i++)
        if (p->parts[i].done.has_waiters)
            *flags |= NOTIFY;
    if (p->acks == 0)
        return answer_slot(self, slot, L.KIND_NONE, 0, 0) ? 1 : -1;
    uint8_t *start = self->arena.base + at, *out = start + 4;
    memcpy(out, frame + 4, 4);
    out += 4;
    if (flexible)
        *out++ = 0; /* no tagged fields in the header */
    int64_t length = write_produce_answer(out, p) - start;
    write_big(start, length - 4, 4);
    STEP();
    if (p->acks == -1 && self->syncs_acks_all) {
        *flags |= p->is_transactional ? WAITS | AT_ONCE : WAITS;
        self->answer_bytes = length;
        return 1;
    }
    return answer_slot(self, slot, L.KIND_BYTES, at, length) ? 1 : -1;
}

/* Take the handlers that want to hear of a row. Who asks does so under the row's lock,
 * and looks again: without it a bit may be seen twice, and none is lost.
 */
static int64_t
take_waiters(const handler_end *self, int64_t row)
{
    word *waiters = word_at(&self->rows, row * L.ROW_WORDS + L.ROW_WAITERS);
    const int64_t taken = atomic_exchange_explicit(waiters, 0, memory_order_acq_rel);
    STEP(); /* after a death everybody looks at everything */
    return taken;
}

/* After execute() of a Produce: (row, next offset, the handlers that wait for it, who are
 * to be told now) of each partition, in their order.
 */
PyObject *
handler_appended(PyObject *object, PyObject *unused)
{
    const handler_end *self = (handler_end *)object;
    const plain_produce *p = &self->produce;
    PyObject *all = PyTuple_New(p->part_count);
    for (int i = 0; all != NULL && i < p->part_count; i++) {
        const appended *done = &p->parts[i].done;
        const int64_t waiters = done->has_waiters ? take_waiters(self, done->row) : 0;
        PyObject *one = Py_BuildValue("(LLL)", (long long)done->row,
                                      (long long)done->next_offset, (long long)waiters);
        if (one == NULL)
            Py_CLEAR(all);
        else
            PyTuple_SET_ITEM(all, i, one);
    }
    return all;
}

enum fetched
execute_fetch(handler_end *self, int64_t slot, const uint8_t *frame, int64_t size,
              int is_parked, int must_answer)
{
    plain_fetch *f = &self->fetch;
    int version = (int)read_big(frame + 2, 2);
    int64_t header = header_size(frame, size, version >= 12);
    int64_t at = answer_offset(self, slot), length = 0;
    if (self->fetch_max_bytes <= 0 || header == 0 || at < 0
        || !parse_plain_fetch(frame + header, size - header, version, f))
        return FETCH_NOT_PLAIN;
    int allowed = may_read(self, slot, f, version >= TOPIC_IDS_FROM);
    if (allowed <= 0)
        return allowed < 0 ? FETCH_FAILED : FETCH_NOT_PLAIN;
    if (f->max_bytes > self->fetch_max_bytes)
        f->max_bytes = self->fetch_max_bytes;
    uint8_t *start = self->arena.base + at, *out = start + 8;
    if (version >= 12)
        *out++ = 0; /* no tagged fields in the header */
    enum fetched result =
        read_plain_fetch(&self->rows, &self->read_plan, self->readable, f, must_answer,
                         out, L.ANSWER_BYTES - (out - start), &length);
    if (result != FETCH_DONE)
        return result;
    length += out - start;
    write_big(start, length - 4, 4);
    memcpy(start + 4, frame + 4, 4);
    STEP();
    if (is_parked) {
        /* First: what is on a response ring is claimed, for whoever repairs it. */
        int64_t state = slot_row(slot) + L.SLOT_STATE;
        store(&self->control, state,
              generation_of(load(&self->control, state)) | self->claimed);
        STEP();
    }
    if (!answer_slot(self, slot, L.KIND_BYTES, at, length))
        return FETCH_FAILED;
    count_fetched(&self->rows, self->fetched, f);
    return FETCH_DONE;
}

int
are_current(const handler_end *self)
{
    return self->rows.base != NULL
           && load(&self->control, self->news_word) == self->position;
}

/* Try a parked fetch. True: answered. False: it waits on. None: not for the short cut. */
PyObject *
handler_fetch(PyObject *object, PyObject *const *args, Py_ssize_t nargs)
{
    handler_end *self = (handler_end *)object;
    int64_t slot, size;
    if (nargs != 2)
        return PyErr_Format(PyExc_TypeError, "fetch(slot, must_answer)");
    if (!read_slot(args[0], &slot))
        return NULL;
    const uint8_t *frame = request_of(self, slot, &size);
    if (frame == NULL || !are_current(self) || read_big(frame, 2) != FETCH)
        Py_RETURN_NONE;
    switch (execute_fetch(self, slot, frame, size, 1, args[1] == Py_True)) {
    case FETCH_DONE:
        Py_RETURN_TRUE;
    case FETCH_WAITS:
        Py_RETURN_FALSE;
    case FETCH_NOT_PLAIN:
        Py_RETURN_NONE;
    default:
        return NULL;
    }
}

/* After execute() said WAITS for a fetch: how long in ms, and for which rows. */
PyObject *
handler_fetch_waits(PyObject *object, PyObject *unused)
{
    const plain_fetch *f = &((handler_end *)object)->fetch;
    PyObject *rows = PyTuple_New(f->target_count);
    for (int i = 0; rows != NULL && i < f->target_count; i++) {
        PyObject *row = PyLong_FromLongLong(f->targets[i].row);
        if (row == NULL)
            Py_CLEAR(rows);
        else
            PyTuple_SET_ITEM(rows, i, row);
    }
    return rows == NULL ? NULL : Py_BuildValue("(LN)", (long long)f->max_wait_ms, rows);
}

PyObject *
handler_execute(PyObject *object, PyObject *number)
{
    handler_end *self = (handler_end *)object;
    int64_t slot, size;
    if (!read_slot(number, &slot))
        return NULL;
    uint8_t *frame = request_of(self, slot, &size);
    if (frame == NULL)
        Py_RETURN_NONE;
    int result = 0, flags = 0;
    int64_t api_key = read_big(frame, 2);
    quota_charge charge;
    if (forward_plain(self, slot, api_key, frame, size))
        return PyLong_FromLongLong(api_key);
    if (!are_current(self)
        || !quota_begin(self, slot, api_key, frame, size, &charge))
        Py_RETURN_NONE;
    if (api_key == PRODUCE)
        result = execute_produce(self, slot, frame, size, &flags);
    else if (api_key == FETCH) {
        result = execute_fetch(self, slot, frame, size, 0, 0);
        flags = result == FETCH_WAITS ? WAITS : 0;
    }
    else if (api_key == API_VERSIONS)
        result = execute_api_versions(self, slot, frame, size);
    quota_end(self, slot, result > 0, flags & WAITS && api_key == PRODUCE, &charge);
    if (result < 0)
        return NULL;
    if (result > 0)
        return PyLong_FromLongLong(api_key | flags);
    if (flags)
        return PyLong_FromLong(HELD);
    Py_RETURN_NONE;
}
