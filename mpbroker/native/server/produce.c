/* Python twins: server/produce/produce_handler.py; storage/log/partition_log.py for the
 * appends.
 *
 * All of a request is checked first, so nothing is done of a request that is left to
 * Python. Then its partitions are appended to, one after another, each under its row's
 * lock.
 */

#include "server/produce.h"

#include "base/clock.h"
#include "base/steps.h"
#include "ipc/partition_row.h"
#include "ipc/request_slot.h"
#include "ipc/transaction_table.h"
#include "protocol/batch_header.h"
#include "protocol/log_validator.h"
#include "protocol/request_fields.h"
#include "protocol/request_header.h"
#include "server/produce_request.h"
#include "server/result_flags.h"
#include "server/verdicts.h"
#include "storage/append.h"
#include "storage/producers.h"

#include <string.h>

/* -- the tables -------------------------------------------------------------------- */

PyObject *
handler_set_tables(PyObject *object, PyObject *args)
{
    handler_end *self = (handler_end *)object;
    PyObject *rows, *plan, *segment, *index, *time_index;
    long long news_word;
    memory mapping;
    append_plan_fields fields;
    if (!PyArg_ParseTuple(args, "OLO!O!O!O!", &rows, &news_word, &PyType_Type, &plan,
                          &PyType_Type, &segment, &PyType_Type, &index, &PyType_Type,
                          &time_index)
        || !get_memory(rows, &mapping)
        || !find_append_plan_fields(&fields, (PyTypeObject *)plan,
                                    (PyTypeObject *)segment, (PyTypeObject *)index,
                                    (PyTypeObject *)time_index))
        return NULL;
    if (!has_words(&self->control, news_word, 1))
        return PyErr_Format(PyExc_IndexError, "no such word");
    if (!keep_alive(self, rows))
        return NULL;
    self->logs.rows = mapping;
    self->logs.plan = fields;
    self->news_word = news_word;
    Py_RETURN_NONE;
}

PyObject *
handler_set_producers(PyObject *object, PyObject *args)
{
    handler_end *self = (handler_end *)object;
    PyObject *plan, *state, *entry, *batch;
    producer_fields fields;
    if (!PyArg_ParseTuple(args, "O!O!O!O!", &PyType_Type, &plan, &PyType_Type, &state,
                          &PyType_Type, &entry, &PyType_Type, &batch)
        || !find_producer_fields(&fields, (PyTypeObject *)plan, (PyTypeObject *)state,
                                 (PyTypeObject *)entry, (PyTypeObject *)batch)
        || !keep_alive(self, args))
        return NULL;
    self->logs.producers = fields;
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
        || !get_memory(view, &segment) || !keep_alive(self, view))
        return NULL;
    if (!open_transaction_table(&self->transactions, &segment, first, capacity,
                                epoch_bits))
        return PyErr_Format(PyExc_ValueError, "no table of transactions");
    Py_RETURN_NONE;
}

/* -- may it be appended? ----------------------------------------------------------- */

enum verdict {
    LEAVE,        /* to Python; perhaps with an exception */
    APPEND,
    BEGINS_FIRST, /* valid, but the transaction is not open in one of the partitions */
};

/* Return a topic's entry in the tables, (max_message_bytes, before_max_ms,
 * after_max_ms, plans by partition), borrowed, if the slot's sender may write to the
 * topic. NULL: left to Python, perhaps with an exception. */
static PyObject *
find_topic(const handler_end *self, int64_t slot, const request_topic *topic,
           int version)
{
    PyObject *name = topic_key(topic, version);
    if (name == NULL)
        return NULL;
    PyObject *known = PyDict_GetItemWithError(self->topics, name);
    int is_allowed = known != NULL ? may_write(self, slot, name) : 0;
    Py_DECREF(name);
    return is_allowed > 0 && PyTuple_Check(known) && PyTuple_GET_SIZE(known) == 4
                   && PyDict_CheckExact(PyTuple_GET_ITEM(known, 3))
               ? known
               : NULL;
}

/* Check the header of a partition's batch, by its topic's entry in the tables; 0: left
 * to Python, perhaps with an exception. */
static int
check_header(PyObject *known, produce_partition *part, int is_transactional)
{
    int has_flag;
    validation_limits *limits = &part->limits;
    limits->max_message_bytes = PyLong_AsLongLong(PyTuple_GET_ITEM(known, 0));
    limits->before_max_ms = PyLong_AsLongLong(PyTuple_GET_ITEM(known, 1));
    limits->after_max_ms = PyLong_AsLongLong(PyTuple_GET_ITEM(known, 2));
    return !PyErr_Occurred()
           && is_valid_header(part->batch, part->batch_bytes, limits, &has_flag)
           && has_flag == is_transactional && read_producer(part->batch, &part->producer)
           && (!is_transactional || part->producer.id >= 0);
}

/* Return a partition's plan as a new reference; NULL, perhaps with an exception, if
 * there is none. */
static PyObject *
find_plan(PyObject *known, int partition)
{
    PyObject *index = PyLong_FromLong(partition), *plan = NULL;
    if (index != NULL)
        plan = PyDict_GetItemWithError(PyTuple_GET_ITEM(known, 3), index);
    Py_XDECREF(index);
    return Py_XNewRef(plan);
}

static int
is_open(const handler_end *self, const produce_partition *part)
{
    int64_t row;
    return read_int_field(part->plan, self->logs.plan.row, &row)
           && is_transaction_open(&self->transactions, part->producer.id,
                                  part->producer.epoch, row);
}

/* Check a partition's batch except for its records, whose check takes longest. */
static enum verdict
judge_partition(const handler_end *self, PyObject *known, produce_partition *part,
                int is_transactional, int64_t now_ms)
{
    if (!check_header(known, part, is_transactional))
        return LEAVE;
    part->plan = find_plan(known, part->index);
    if (part->plan == NULL)
        return LEAVE;
    if (part->producer.id < 0)
        return APPEND;
    /* The coordinator charges the requests that it gets. So if there are quotas, the
     * request is left to Python, which forwards it. */
    if (is_transactional && !is_open(self, part))
        return self->quotas.are_set ? LEAVE : BEGINS_FIRST;
    PyObject *entry = check_batch(&self->logs, part->plan, &part->producer, now_ms);
    part->entry = Py_XNewRef(entry);
    return entry != NULL ? APPEND : LEAVE;
}

/* Check the partitions of a topic. Each may be named once only: a second batch would
 * have to be checked after a first one that is not in the log yet. */
static enum verdict
judge_topic(const handler_end *self, int64_t slot, produce_request *p,
            const request_topic *topic, int64_t now_ms)
{
    enum verdict all = APPEND;
    PyObject *known = find_topic(self, slot, topic, p->version);
    if (known == NULL)
        return LEAVE;
    for (int i = topic->first; i < topic->first + topic->count; i++) {
        produce_partition *part = &p->partitions[i];
        enum verdict one =
            judge_partition(self, known, part, p->is_transactional, now_ms);
        if (one == LEAVE)
            return LEAVE;
        if (one == BEGINS_FIRST)
            all = BEGINS_FIRST;
        for (const produce_partition *other = p->partitions; other < part; other++)
            if (other->plan == part->plan)
                return LEAVE;
    }
    return all;
}

/* Check a whole request. The records are checked only if it can be appended. */
static enum verdict
judge_request(const handler_end *self, int64_t slot, produce_request *p, int64_t now_ms)
{
    enum verdict all = APPEND;
    for (int i = 0; i < p->topic_count; i++) {
        enum verdict one = judge_topic(self, slot, p, &p->topics[i], now_ms);
        if (one == LEAVE)
            return LEAVE;
        if (one == BEGINS_FIRST)
            all = BEGINS_FIRST;
    }
    for (int i = 0; all == APPEND && i < p->partition_count; i++) {
        const produce_partition *part = &p->partitions[i];
        if (!has_valid_records(part->batch, part->batch_bytes, &part->limits, now_ms))
            return LEAVE;
    }
    return all;
}

/* -- the appends ------------------------------------------------------------------- */

/* Note in the slot and in the row that the slot's request is about to append:
 * PartitionRow.set_intent.
 *
 * The row's word is stored last. If this process is killed after this store, the next
 * owner of the lock reads the other two words, and finds out by the offset whether the
 * append was committed. If it is killed before, the row names no slot, and the other
 * two words are not read.
 */
static void
note_intent(const handler_end *self, int64_t slot, int ordinal, const locked_row *r)
{
    const memory *control = &self->control;
    const int64_t words = slot_row(slot);
    store(control, words + L.SLOT_INTENT_BASE, r->state[END_OFFSET]);
    STEP();
    store(control, words + L.SLOT_INTENT, (int64_t)(ordinal + 1) << 32 | (r->row + 1));
    STEP();
    store(r->rows, row_at(r->row) + L.ROW_INTENT, slot + 1);
    STEP();
}

/* Note a committed append as done in its slot: PartitionRow.clear_intent.
 *
 * The progress is stored first, and the intent is cleared last. If this process is
 * killed before the row's word is cleared, the next owner of the lock stores the same
 * numbers again. If it is killed after the progress is stored, the request is executed
 * again, and continues behind this partition.
 */
static void
note_done(const handler_end *self, int64_t slot, int64_t progress, int ordinal,
          int64_t base_offset, const locked_row *r)
{
    const memory *control = &self->control;
    const int64_t words = slot_row(slot);
    store(&self->arena, progress + ordinal, base_offset);
    STEP();
    store(control, words + L.SLOT_PROGRESS, ordinal + 1);
    STEP();
    store(control, words + L.SLOT_INTENT, 0);
    STEP();
    store(r->rows, row_at(r->row) + L.ROW_INTENT, 0);
    STEP();
}

/* Return whether a partition, which is locked now, is still as it was when it was
 * checked. */
static int
may_append(const handler_end *self, const produce_partition *part, const append_plan *a,
           const locked_row *r)
{
    /* If another process has appended since the check, its batch may be of this
     * producer. */
    if (part->entry != NULL && a->producers_end != r->state[END_OFFSET])
        return 0;
    /* The coordinator closes a transaction before it takes this lock for the marker
     * that ends it. So a batch whose transaction is open here is in the log before the
     * marker. */
    if (part->producer.is_transactional
        && !is_transaction_open(&self->transactions, part->producer.id,
                                part->producer.epoch, a->row))
        return 0;
    return fits(a, r, part->batch, part->batch_bytes);
}

/* Append a partition's batch. LEFT_TO_PYTHON: nothing is committed; if `*is_held`, the
 * lock of self->row is held, because its last owner died or the write has failed:
 * Python settles the row's intent, and releases the lock. */
static enum outcome
append_partition(handler_end *self, int64_t slot, produce_request *p, int ordinal,
                 int *is_held)
{
    produce_partition *part = &p->partitions[ordinal];
    append_plan a;
    locked_row r;
    if (!read_append_plan(&self->logs.plan, part->plan, &a)
        || !has_row(&self->logs.rows, a.row))
        return LEFT_TO_PYTHON;
    self->row = a.row;
    const enum lock_result locked = lock_row(&self->logs.rows, a.row, &r);
    if (locked != LOCKED) {
        *is_held = locked == LOCK_TO_BE_SETTLED;
        return *is_held ? LEFT_TO_PYTHON : FAILED;
    }
    if (!may_append(self, part, &a, &r)) {
        unlock_row(&r);
        return LEFT_TO_PYTHON;
    }
    const int64_t base_offset = r.state[END_OFFSET], position = r.state[ACTIVE_SIZE];
    note_intent(self, slot, ordinal, &r);
    /* This changes the request's own bytes. If it is done a second time after a death,
     * it does no harm. */
    place_batch(part->batch, base_offset, a.epoch);
    STEP();
    if (part->producer.is_transactional && r.state[FIRST_UNSTABLE] < 0)
        r.state[FIRST_UNSTABLE] = base_offset;
    if (!write_batch(&a, &r, part->batch, part->batch_bytes)) {
        *is_held = 1;
        return LEFT_TO_PYTHON;
    }
    note_done(self, slot, p->progress, ordinal, base_offset, &r);
    part->done = (appended){a.row, base_offset, r.state[END_OFFSET], position,
                            r.state[ACTIVE_SIZE]};
    part->log_start_offset = load(r.rows, row_at(a.row) + L.ROW_LOG_START_OFFSET);
    unlock_row(&r);
    /* After the lock is released: a handler adds its bit under the lock, and reads the
     * log again afterwards, so no bit is missed. */
    const int64_t waiters = row_at(a.row) + L.ROW_WAITERS;
    part->has_waiters = (load(r.rows, waiters) | load(r.rows, waiters + 1)) != 0;
    return DONE;
}

/* Append to all partitions, each noted as done in the slot.
 *
 * LEFT_TO_PYTHON after some appends: another process has changed a partition since it
 * was checked. Then, as after a death, Python executes the request again, finds the
 * partitions that are done, and continues behind them; the core executes no request
 * that was begun before.
 */
static enum outcome
append_partitions(handler_end *self, int64_t slot, produce_request *p, int64_t now_ms,
                  int *is_held)
{
    for (int i = 0; i < p->partition_count; i++) {
        produce_partition *part = &p->partitions[i];
        enum outcome outcome = append_partition(self, slot, p, i, is_held);
        if (outcome != DONE)
            return outcome;
        int is_known = part->entry == NULL
                           ? advance_producers(&self->logs.plan, part->plan, &part->done)
                           : apply_batch(&self->logs, part->plan, part->entry,
                                         &part->producer, &part->done, now_ms);
        if (!is_known || !remember_append(&self->logs.plan, part->plan, &part->done))
            return FAILED;
    }
    return DONE;
}

/* -- the request ------------------------------------------------------------------- */

/* Return the arena word of the first partition's progress; -1: there is no room for so
 * many partitions, or some are already done. */
static int64_t
find_progress(const handler_end *self, int64_t slot, int partitions)
{
    const memory *control = &self->control;
    const int64_t row = slot_row(slot);
    const int64_t where = load(control, row + L.SLOT_PROGRESS_OFFSET) >> 3;
    if (load(control, row + L.SLOT_PROGRESS) != 0)
        return -1;
    return where > 0 && has_words(&self->arena, where, partitions) ? where : -1;
}

/* Read a request into self->produce; 0: left to Python. */
static int
read_produce(handler_end *self, int64_t slot, uint8_t *frame, int64_t size)
{
    produce_request *p = &self->produce;
    const int version = (int)request_api_version(frame);
    const int64_t header =
        request_header_size(frame, size, version >= PRODUCE_FLEXIBLE_FROM);
    if (header == 0
        || !parse_produce_request(frame + header, size - header, version, p)
        || produce_answer_bound(p) > L.ANSWER_BYTES || answer_offset(self, slot) < 0)
        return 0;
    /* If there is an authorizer, Python asks it if the sender may use the transactional
     * id. */
    if (p->is_transactional
        && (self->transactions.segment.base == NULL || self->verdicts.are_needed))
        return 0;
    p->progress = find_progress(self, slot, p->partition_count);
    return p->progress >= 0;
}

/* Answer a request whose batches are in the log, or write the answer that waits for the
 * disk. */
static enum outcome
answer_produce(handler_end *self, int64_t slot, const uint8_t *frame, int *flags)
{
    const produce_request *p = &self->produce;
    const int64_t at = answer_offset(self, slot);
    for (int i = 0; i < p->partition_count; i++)
        if (p->partitions[i].has_waiters)
            *flags |= RESULT_NOTIFY;
    if (p->acks == 0)
        return answer_slot(self, slot, L.KIND_NONE, 0, 0) ? DONE : FAILED;
    uint8_t *start = self->arena.base + at, *body = start + ANSWER_HEADER;
    body = write_no_tagged_fields(body, p->version >= PRODUCE_FLEXIBLE_FROM);
    const int64_t length = write_produce_answer(body, p) - start;
    begin_answer(self, at, frame, length - ANSWER_HEADER);
    STEP();
    if (p->acks == -1 && self->syncs_acks_all) {
        *flags |= p->is_transactional ? RESULT_WAITS | RESULT_AT_ONCE : RESULT_WAITS;
        self->answer_bytes = length;
        return DONE;
    }
    return answer_slot(self, slot, L.KIND_BYTES, at, length) ? DONE : FAILED;
}

enum outcome
execute_produce(handler_end *self, int64_t slot, uint8_t *frame, int64_t size, int *flags)
{
    produce_request *p = &self->produce;
    int is_held = 0;
    if (!read_produce(self, slot, frame, size))
        return LEFT_TO_PYTHON;
    for (int i = 0; i < p->partition_count; i++)
        p->partitions[i].plan = p->partitions[i].entry = NULL;
    const int64_t now_ms = wall_clock_ms();
    const enum verdict verdict = judge_request(self, slot, p, now_ms);
    enum outcome outcome = PyErr_Occurred() ? FAILED : LEFT_TO_PYTHON;
    if (verdict == APPEND)
        outcome = append_partitions(self, slot, p, now_ms, &is_held);
    for (int i = 0; i < p->partition_count; i++) {
        Py_CLEAR(p->partitions[i].plan);
        Py_CLEAR(p->partitions[i].entry);
    }
    if (is_held)
        *flags = ROW_IS_HELD;
    if (verdict == BEGINS_FIRST && outcome == LEFT_TO_PYTHON) {
        *flags = RESULT_BEGINS;
        return DONE;
    }
    return outcome == DONE ? answer_produce(self, slot, frame, flags) : outcome;
}

/* Read and clear one word of the handlers that wait for a row. This takes no lock: a
 * handler adds its bit under the lock, and then reads the log again. So a bit may be
 * seen twice, but no handler misses records. */
static int64_t
take_waiters(const handler_end *self, int64_t row, int word_of_mask)
{
    word *waiters =
        word_at(&self->logs.rows, row_at(row) + L.ROW_WAITERS + word_of_mask);
    const int64_t taken = atomic_exchange_explicit(waiters, 0, memory_order_acq_rel);
    /* If this process is killed here, these handlers are not told; but after a death
     * all handlers check every partition that they wait for. */
    STEP();
    return taken;
}

/* Read and clear both words of a row's waiters; return them as one Python int. */
static PyObject *
take_mask(const handler_end *self, int64_t row)
{
    PyObject *low = PyLong_FromLongLong(take_waiters(self, row, 0));
    const int64_t rest = take_waiters(self, row, 1);
    if (low == NULL || rest == 0)
        return low;
    PyObject *high = PyLong_FromLongLong(rest), *bits = PyLong_FromLongLong(L.MASK_BITS);
    PyObject *shifted = high && bits ? PyNumber_Lshift(high, bits) : NULL;
    PyObject *mask = shifted ? PyNumber_Or(low, shifted) : NULL;
    Py_DECREF(low);
    Py_XDECREF(high);
    Py_XDECREF(bits);
    Py_XDECREF(shifted);
    return mask;
}

/* appended(): after execute() of a Produce, return (row, next offset, handlers to be
 * told) of each partition, in the request's order. */
PyObject *
handler_appended(PyObject *object, PyObject *unused)
{
    const handler_end *self = (handler_end *)object;
    const produce_request *p = &self->produce;
    PyObject *all = PyTuple_New(p->partition_count);
    for (int i = 0; all != NULL && i < p->partition_count; i++) {
        const produce_partition *part = &p->partitions[i];
        const int64_t row = part->done.row;
        PyObject *waiters =
            part->has_waiters ? take_mask(self, row) : PyLong_FromLong(0);
        PyObject *one = Py_BuildValue("(LLN)", (long long)row,
                                      (long long)part->done.next_offset, waiters);
        if (one == NULL)
            Py_CLEAR(all);
        else
            PyTuple_SET_ITEM(all, i, one);
    }
    return all;
}
