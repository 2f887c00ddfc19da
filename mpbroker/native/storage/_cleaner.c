/* mpbroker.native._cleaner: the walk over records of a compaction, and its key map.
 *
 * Python twins, which are the specification: KeyMapInPython in
 * storage/cleaning/key_map.py, and the Python part of storage/cleaning/compaction.py,
 * which decides about one batch at a time (tests/storage/test_compaction_in_c.py). The
 * functions here process the plain batches of a chunk: whole ones, uncompressed, with
 * records, outside of transactions, without a delete horizon. They stop at the first
 * batch that is not plain or has a fault; Python decides about it, and calls again.
 *
 * The map is private to a process. An entry has 16 bytes of a hash of the key, as in
 * Kafka's SkimpyOffsetMap, and the offset. The hash is SipHash-1-3 with a random
 * secret, so no client can choose keys with the same hash.
 *
 * Source: Aumasson and Bernstein, "SipHash: a fast short-input PRF", with 128 bits.
 */

#include "base/python_objects.h"
#include "protocol/batch_header.h"
#include "protocol/crc32c.h"
#include "protocol/record_walk.h"

#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define DELETE_HORIZON_FLAG 0x40
#define MAGIC 2
#define FIRST_SLOTS 4096
/* A larger table is filled from the one before it, and both exist for a moment. The
 * factor is so large that the old table is small then. */
#define GROWTH 8
/* The part of a table that may be used, in tenths: the default of Kafka's
 * log.cleaner.io.buffer.load.factor. */
#define LOAD_TENTHS 9

/* -- hashes ------------------------------------------------------------------------ */

typedef struct {
    uint64_t high, low;
} digest;

static inline uint64_t
rotated(uint64_t x, int bits)
{
    return x << bits | x >> (64 - bits);
}

static inline void
sip_round(uint64_t *v)
{
    v[0] += v[1];
    v[2] += v[3];
    v[1] = rotated(v[1], 13) ^ v[0];
    v[3] = rotated(v[3], 16) ^ v[2];
    v[0] = rotated(v[0], 32);
    v[2] += v[1];
    v[0] += v[3];
    v[1] = rotated(v[1], 17) ^ v[2];
    v[3] = rotated(v[3], 21) ^ v[0];
    v[2] = rotated(v[2], 32);
}

static digest
hash_of(const uint64_t *secret, const uint8_t *data, int64_t length)
{
    uint64_t v[4] = {0x736f6d6570736575ULL ^ secret[0], 0x646f72616e646f6dULL ^ secret[1],
                     0x6c7967656e657261ULL ^ secret[0], 0x7465646279746573ULL ^ secret[1]};
    uint64_t word;
    int64_t at = 0;
    v[1] ^= 0xee;
    for (; at + 8 <= length; at += 8) {
        memcpy(&word, data + at, 8);
        v[3] ^= word;
        sip_round(v);
        v[0] ^= word;
    }
    word = (uint64_t)length << 56;
    for (int shift = 0; at < length; at++, shift += 8)
        word |= (uint64_t)data[at] << shift;
    v[3] ^= word;
    sip_round(v);
    v[0] ^= word;
    digest found;
    v[2] ^= 0xee;
    for (int i = 0; i < 3; i++)
        sip_round(v);
    found.low = v[0] ^ v[1] ^ v[2] ^ v[3];
    v[1] ^= 0xdd;
    for (int i = 0; i < 3; i++)
        sip_round(v);
    found.high = v[0] ^ v[1] ^ v[2] ^ v[3];
    return found;
}

/* -- the map ----------------------------------------------------------------------- */

typedef struct {
    digest key;
    int64_t next; /* the offset + 1; 0: the entry is empty */
} entry;

typedef struct {
    PyObject_HEAD
    entry *entries;
    uint64_t slots; /* 0: not made yet */
    int64_t used, max_keys;
    long long latest_offset;
    uint64_t secret[2];
} KeyMap;

/* Return a key's entry; if it has none, the empty entry that it would get. */
static entry *
find_entry(const KeyMap *self, digest key)
{
    uint64_t at = (uint64_t)((unsigned __int128)key.low * self->slots >> 64);
    for (;;) {
        entry *e = &self->entries[at];
        if (e->next == 0 || (e->key.high == key.high && e->key.low == key.low))
            return e;
        if (++at == self->slots)
            at = 0;
    }
}

/* Make the table larger; 0: there is no memory. */
static int
grow(KeyMap *self)
{
    const uint64_t most = (uint64_t)self->max_keys * 10 / LOAD_TENTHS + 2;
    const uint64_t wanted = self->slots ? self->slots * GROWTH : FIRST_SLOTS;
    const uint64_t slots = wanted < most ? wanted : most;
    entry *const before = self->entries;
    const uint64_t count = self->slots;
    entry *made = PyMem_RawCalloc(slots, sizeof(entry));
    if (made == NULL)
        return 0;
    self->entries = made;
    self->slots = slots;
    for (uint64_t i = 0; i < count; i++)
        if (before[i].next)
            *find_entry(self, before[i].key) = before[i];
    PyMem_RawFree(before);
    return 1;
}

enum put_result { PUT, FULL, NO_MEMORY };

static enum put_result
put_key(KeyMap *self, const uint8_t *data, int64_t length, int64_t offset)
{
    if ((uint64_t)self->used * 10 >= self->slots * LOAD_TENTHS
        && self->used < self->max_keys && !grow(self))
        return NO_MEMORY;
    const digest key = hash_of(self->secret, data, length);
    entry *e = find_entry(self, key);
    if (e->next == 0) {
        if (self->used >= self->max_keys)
            return FULL;
        self->used++;
        e->key = key;
    }
    e->next = offset + 1;
    return PUT;
}

/* Return a key's newest offset; -1: the key is not in the map. */
static int64_t
offset_of(const KeyMap *self, const uint8_t *data, int64_t length)
{
    if (self->slots == 0)
        return -1;
    return find_entry(self, hash_of(self->secret, data, length))->next - 1;
}

static PyObject *
new_map(PyTypeObject *type, PyObject *args, PyObject *named)
{
    long long max_keys;
    static char *names[] = {"max_keys", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, named, "L", names, &max_keys))
        return NULL;
    KeyMap *self = (KeyMap *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->max_keys = max_keys < 1 ? 1 : max_keys > INT32_MAX ? INT32_MAX : max_keys;
    self->latest_offset = -1;
    /* Wheels are for glibc 2.17, which does not have getrandom(); Linux does. */
    const long size = sizeof self->secret;
    if (syscall(SYS_getrandom, self->secret, size, 0) != size) {
        Py_DECREF(self);
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    if (!grow(self)) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    return (PyObject *)self;
}

static void
free_map(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    PyMem_RawFree(((KeyMap *)object)->entries);
    type->tp_free(object);
    Py_DECREF(type);
}

static Py_ssize_t
map_length(PyObject *object)
{
    return (Py_ssize_t)((KeyMap *)object)->used;
}

static PyObject *
map_put(PyObject *object, PyObject *args)
{
    Py_buffer key;
    long long offset;
    if (!PyArg_ParseTuple(args, "y*L", &key, &offset))
        return NULL;
    enum put_result result = put_key((KeyMap *)object, key.buf, key.len, offset);
    PyBuffer_Release(&key);
    return result == NO_MEMORY ? PyErr_NoMemory() : PyBool_FromLong(result == PUT);
}

static PyObject *
map_get(PyObject *object, PyObject *key)
{
    Py_buffer buffer;
    if (PyObject_GetBuffer(key, &buffer, PyBUF_SIMPLE) < 0)
        return NULL;
    int64_t offset = offset_of((KeyMap *)object, buffer.buf, buffer.len);
    PyBuffer_Release(&buffer);
    return PyLong_FromLongLong(offset);
}

/* -- batches ----------------------------------------------------------------------- */

typedef struct {
    const uint8_t *bytes;
    int64_t size, base_offset, last_offset, count;
} plain_batch;

/* Read the header of the batch at `at`; 0: the batch is not plain, or not whole. */
static int
read_plain(const uint8_t *at, const uint8_t *end, plain_batch *b)
{
    if (end - at < BATCH_HEADER_SIZE || at[BATCH_MAGIC] != MAGIC)
        return 0;
    b->bytes = at;
    b->size = batch_size(at);
    if (b->size < BATCH_HEADER_SIZE || b->size > end - at)
        return 0;
    if (batch_attributes(at)
        & (CODEC_MASK | TRANSACTIONAL_FLAG | CONTROL_FLAG | DELETE_HORIZON_FLAG))
        return 0;
    b->base_offset = read_big(at + BATCH_BASE_OFFSET, 8);
    b->last_offset = b->base_offset + last_offset_delta(at);
    b->count = read_big(at + BATCH_RECORD_COUNT, 4);
    return b->count > 0 && b->base_offset >= 0;
}

static cursor
records_of(const plain_batch *b)
{
    return (cursor){b->bytes + BATCH_HEADER_SIZE, b->bytes + b->size};
}

/* Check the chunk and the position that a walk was called with; 0 and an exception. */
static int
get_chunk(PyObject *data, long long at)
{
    if (!PyBytes_Check(data)) {
        PyErr_SetString(PyExc_TypeError, "a chunk is bytes");
        return 0;
    }
    if (at < 0 || at > PyBytes_GET_SIZE(data)) {
        PyErr_SetString(PyExc_ValueError, "the position lies outside the chunk");
        return 0;
    }
    return 1;
}

PyDoc_STRVAR(map_batches_doc,
"map_batches(chunk, at, start, /)\n--\n\n"
"Note the keys of plain batches from a position on, of records from an offset on.\n\n"
"Returns the position of the first batch that was not noted as a whole, and whether\n"
"the map is full.");

static PyObject *
map_batches(PyObject *object, PyObject *args)
{
    KeyMap *self = (KeyMap *)object;
    PyObject *data;
    long long at, start;
    if (!PyArg_ParseTuple(args, "OLL", &data, &at, &start) || !get_chunk(data, at))
        return NULL;
    const uint8_t *bytes = (const uint8_t *)PyBytes_AS_STRING(data);
    const uint8_t *end = bytes + PyBytes_GET_SIZE(data);
    plain_batch b;
    enum put_result result = PUT;
    while (read_plain(bytes + at, end, &b)) {
        cursor c = records_of(&b);
        record r;
        int64_t i = 0;
        for (; i < b.count && read_record(&c, 1, i, &r) == NO_FAULT; i++) {
            const int64_t offset = b.base_offset + r.offset_delta;
            if (r.key.data == NULL || offset < start)
                continue;
            result = put_key(self, r.key.data, r.key.length, offset);
            if (result != PUT)
                goto stop;
        }
        if (i < b.count)
            break;
        if (b.last_offset > self->latest_offset)
            self->latest_offset = b.last_offset;
        at += b.size;
    }
stop:
    if (result == NO_MEMORY)
        return PyErr_NoMemory();
    return Py_BuildValue("(LO)", at, result == FULL ? Py_True : Py_False);
}

/* Return whether a record stays: it is the newest of its key, or its offset is above
 * those that the map covers. */
static inline int
stays(const KeyMap *self, const record *r, int64_t offset)
{
    if (offset > self->latest_offset)
        return 1;
    return r->key.data != NULL
           && offset_of(self, r->key.data, r->key.length) <= offset;
}

enum verdict { KEEP_ALL, KEEP_SOME, KEEP_NONE, ASK_PYTHON };

/* Copy the records of a batch that stay to `out`. `*length`: their bytes; `*kept`:
 * their number; `*newest`: their largest timestamp delta. */
static enum verdict
filter_records(const KeyMap *self, const plain_batch *b, uint8_t *out, int64_t *length,
               int64_t *kept, int64_t *newest)
{
    cursor c = records_of(b);
    uint8_t *to = out;
    *kept = 0;
    *newest = INT64_MIN;
    for (int64_t i = 0; i < b->count; i++) {
        const uint8_t *begin = c.at;
        record r;
        if (read_record(&c, 1, i, &r) != NO_FAULT)
            return ASK_PYTHON;
        if (!stays(self, &r, b->base_offset + r.offset_delta))
            continue;
        if (r.value.data == NULL)
            return ASK_PYTHON; /* a tombstone needs a delete horizon */
        memcpy(to, begin, (size_t)(c.at - begin));
        to += c.at - begin;
        ++*kept;
        if (r.timestamp_delta > *newest)
            *newest = r.timestamp_delta;
    }
    *length = to - out;
    if (*kept == b->count)
        return c.at == c.end ? KEEP_ALL : ASK_PYTHON;
    return *kept ? KEEP_SOME : KEEP_NONE;
}

/* Write the header of a batch that has lost records; its other records are already
 * behind it in `out`. Return the batch's largest timestamp in ms. */
static int64_t
write_filtered_header(const plain_batch *b, uint8_t *out, int64_t length, int64_t kept,
                      int64_t newest)
{
    int64_t timestamp = max_timestamp(b->bytes);
    memcpy(out, b->bytes, BATCH_HEADER_SIZE);
    if (!(batch_attributes(out) & TIMESTAMP_TYPE_FLAG)) {
        timestamp = (int64_t)((uint64_t)read_big(out + BATCH_BASE_TIMESTAMP, 8)
                              + (uint64_t)newest);
        write_big(out + BATCH_MAX_TIMESTAMP, timestamp, 8);
    }
    write_big(out + BATCH_RECORD_COUNT, kept, 4);
    write_big(out + BATCH_LENGTH, BATCH_HEADER_SIZE - LOG_OVERHEAD + length, 4);
    const int64_t size = BATCH_HEADER_SIZE + length;
    write_big(out + BATCH_CRC,
              crc32c(out + BATCH_ATTRIBUTES, (size_t)(size - BATCH_ATTRIBUTES)), 4);
    return timestamp;
}

/* Add (size, last offset, timestamp) of a batch that stays; 0 and an exception. */
static int
add_span(PyObject *spans, int64_t size, int64_t last_offset, int64_t timestamp)
{
    PyObject *span = Py_BuildValue("(LLL)", (long long)size, (long long)last_offset,
                                   (long long)timestamp);
    const int done = span != NULL && PyList_Append(spans, span) == 0;
    Py_XDECREF(span);
    return done;
}

PyDoc_STRVAR(filter_batches_doc,
"filter_batches(chunk, at, last_offset, /)\n--\n\n"
"Copy what stays of plain batches from a position on.\n\n"
"Stops at a batch that keeps a tombstone; and at one that keeps nothing, if it has a\n"
"producer or ends at `last_offset`.\n\n"
"Returns the position of the first batch that was left alone, the bytes that stay, and\n"
"(size, last offset, timestamp) of each batch in them.");

static PyObject *
filter_batches(PyObject *object, PyObject *args)
{
    const KeyMap *self = (KeyMap *)object;
    PyObject *data;
    long long at, last_offset;
    if (!PyArg_ParseTuple(args, "OLL", &data, &at, &last_offset) || !get_chunk(data, at))
        return NULL;
    const uint8_t *bytes = (const uint8_t *)PyBytes_AS_STRING(data);
    const uint8_t *end = bytes + PyBytes_GET_SIZE(data);
    PyObject *out = PyBytes_FromStringAndSize(NULL, end - bytes - at);
    PyObject *spans = PyList_New(0);
    if (out == NULL || spans == NULL)
        goto failed;
    uint8_t *to = (uint8_t *)PyBytes_AS_STRING(out);
    plain_batch b;
    while (read_plain(bytes + at, end, &b)) {
        int64_t length, kept, newest;
        int64_t size = b.size, timestamp = max_timestamp(b.bytes);
        const enum verdict verdict = filter_records(self, &b, to + BATCH_HEADER_SIZE,
                                                    &length, &kept, &newest);
        if (verdict == ASK_PYTHON)
            break;
        if (verdict == KEEP_NONE) {
            if (read_big(b.bytes + BATCH_PRODUCER_ID, 8) >= 0
                || b.last_offset == last_offset)
                break;
            at += b.size;
            continue;
        }
        if (verdict == KEEP_ALL) {
            memcpy(to, b.bytes, BATCH_HEADER_SIZE);
        }
        else {
            timestamp = write_filtered_header(&b, to, length, kept, newest);
            size = BATCH_HEADER_SIZE + length;
        }
        if (!add_span(spans, size, b.last_offset, timestamp))
            goto failed;
        to += size;
        at += b.size;
    }
    if (_PyBytes_Resize(&out, to - (uint8_t *)PyBytes_AS_STRING(out)) < 0)
        goto failed;
    return Py_BuildValue("(LNN)", at, out, spans);
failed:
    Py_XDECREF(out);
    Py_XDECREF(spans);
    return NULL;
}

/* -- the module -------------------------------------------------------------------- */

static PyMethodDef map_methods[] = {
    {"put", map_put, METH_VARARGS,
     "put(key, offset, /)\n--\n\nNote a key's offset; False if the map is full."},
    {"get", map_get, METH_O,
     "get(key, /)\n--\n\nReturn a key's newest offset; -1: it is not in the map."},
    {"map_batches", map_batches, METH_VARARGS, map_batches_doc},
    {"filter_batches", filter_batches, METH_VARARGS, filter_batches_doc},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef map_members[] = {
    {"latest_offset", Py_T_LONGLONG, offsetof(KeyMap, latest_offset), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot map_slots[] = {
    {Py_tp_doc, "KeyMap(max_keys)\n--\n\nSee mpbroker.storage.cleaning.key_map."},
    {Py_tp_new, new_map},
    {Py_tp_dealloc, free_map},
    {Py_tp_methods, map_methods},
    {Py_tp_members, map_members},
    {Py_mp_length, map_length},
    {0, NULL},
};

static PyType_Spec map_spec = {
    .name = "mpbroker.native._cleaner.KeyMap",
    .basicsize = sizeof(KeyMap),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = map_slots,
};

static int
add_types(PyObject *module)
{
    PyObject *type = PyType_FromModuleAndSpec(module, &map_spec, NULL);
    if (type == NULL)
        return -1;
    const int failed = PyModule_AddObjectRef(module, "KeyMap", type);
    Py_DECREF(type);
    return failed < 0
               ? -1
               : PyModule_AddIntConstant(module, "BYTES_PER_KEY",
                                         (sizeof(entry) * 10 + LOAD_TENTHS - 1)
                                             / LOAD_TENTHS);
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, add_types},
#if PY_VERSION_HEX >= 0x030C0000
    {Py_mod_multiple_interpreters, Py_MOD_PER_INTERPRETER_GIL_SUPPORTED},
#endif
    {0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "mpbroker.native._cleaner",
    .m_doc = "Compiled twin of a compaction's walk over records.",
    .m_size = 0,
    .m_slots = slots,
};

PyMODINIT_FUNC
PyInit__cleaner(void)
{
    return PyModuleDef_Init(&module);
}
