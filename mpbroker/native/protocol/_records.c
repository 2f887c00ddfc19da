/* mpbroker.native._records: the four loops over a batch's records: the walk over records
 * that are appended to a log, the search for one by its timestamp, the decoding of records
 * for a consumer, and their encoding by a producer.
 *
 * Python twins, which are the specification: walk_records_in_python() in
 * protocol/records/record_walk.py, with the same faults in the same order for the same
 * bytes (tests/protocol/test_record_walk.py); find_record_in_python() in
 * protocol/records/record_find.py (tests/protocol/test_record_find.py);
 * read_records_in_python() in protocol/records/record_read.py
 * (tests/protocol/test_record_read.py);
 * encode_records_in_python() in
 * protocol/records/record_encode.py, with the same bytes for the same records
 * (tests/protocol/test_record_encode.py). Only the result is allocated.
 */

#include "base/python_objects.h"
#include "protocol/batch_header.h"
#include "protocol/record_walk.h"
#include "protocol/varint.h"

#include <string.h>

/* -- the walk ---------------------------------------------------------------------- */

typedef struct {
    int64_t max_delta;       /* of the records that have timestamps */
    long long max_index;     /* the first record with max_delta; -1: no timestamps */
    int64_t min_delta;
    long long first_keyless; /* -1: all have keys */
} walk;

/* Update the result of a walk by one more record. */
static inline void
add_record(walk *w, long long index, const record *r, int64_t no_timestamp_delta)
{
    const int64_t delta = r->timestamp_delta;
    if (r->key.data == NULL && w->first_keyless < 0)
        w->first_keyless = index;
    if (delta == no_timestamp_delta)
        return;
    if (w->max_index < 0) {
        w->max_delta = w->min_delta = delta;
        w->max_index = index;
    }
    else if (delta > w->max_delta) {
        w->max_delta = delta;
        w->max_index = index;
    }
    else if (delta < w->min_delta)
        w->min_delta = delta;
}

PyDoc_STRVAR(walk_records_doc,
"walk_records(data, start, record_count, no_timestamp_delta, /)\n--\n\n"
"See mpbroker.protocol.records.record_walk.walk_records_in_python.");

static PyObject *
walk_records(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 4) {
        PyErr_SetString(PyExc_TypeError, "walk_records() takes 4 arguments");
        return NULL;
    }
    Py_ssize_t start = PyLong_AsSsize_t(args[1]);
    if (start == -1 && PyErr_Occurred())
        return NULL;
    long long count = PyLong_AsLongLong(args[2]);
    if (count == -1 && PyErr_Occurred())
        return NULL;
    long long no_timestamp_delta = PyLong_AsLongLong(args[3]);
    if (no_timestamp_delta == -1 && PyErr_Occurred())
        return NULL;
    Py_buffer buffer;
    if (PyObject_GetBuffer(args[0], &buffer, PyBUF_SIMPLE) < 0)
        return NULL;
    if (start < 0 || start > buffer.len) {
        PyBuffer_Release(&buffer);
        PyErr_SetString(PyExc_ValueError, "start lies outside the data");
        return NULL;
    }
    const uint8_t *data = buffer.buf;
    cursor batch = {data + start, data + buffer.len};
    walk w = {0, -1, 0, -1};
    enum record_fault fault = NO_FAULT;
    long long index = 0;
    for (; index < count; index++) {
        record r;
        if ((fault = read_record(&batch, 0, index, &r)) != NO_FAULT)
            break;
        add_record(&w, index, &r, no_timestamp_delta);
    }
    if (fault == NO_FAULT && batch.at != batch.end)
        fault = BYTES_LEFT_IN_BATCH;
    PyBuffer_Release(&buffer);
    return Py_BuildValue("(iLLLLL)", fault, index, (long long)w.max_delta,
                         w.max_index, (long long)w.min_delta, w.first_keyless);
}

PyDoc_STRVAR(find_record_doc,
"find_record(data, record_count, timestamp_delta, offset_delta, /)\n--\n\n"
"See mpbroker.protocol.records.record_find.find_record_in_python. None: the records\n"
"have a fault, which the Python function names.");

static PyObject *
find_record(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    long long wanted[3]; /* the records, and the least deltas */
    if (nargs != 4) {
        PyErr_SetString(PyExc_TypeError, "find_record() takes 4 arguments");
        return NULL;
    }
    for (int i = 0; i < 3; i++) {
        wanted[i] = PyLong_AsLongLong(args[i + 1]);
        if (wanted[i] == -1 && PyErr_Occurred())
            return NULL;
    }
    Py_buffer buffer;
    if (PyObject_GetBuffer(args[0], &buffer, PyBUF_SIMPLE) < 0)
        return NULL;
    const uint8_t *data = buffer.buf;
    cursor batch = {data, data + buffer.len};
    record r;
    enum record_fault fault = NO_FAULT;
    long long offset_delta = -2, delta = 0;
    for (long long index = 0; index < wanted[0] && offset_delta < 0; index++) {
        if ((fault = read_record(&batch, 1, index, &r)) != NO_FAULT)
            break;
        if (r.offset_delta < 0 || r.offset_delta < wanted[2])
            continue;
        if (offset_delta == -2 || r.timestamp_delta > delta)
            delta = r.timestamp_delta;
        offset_delta = -1;
        if (r.timestamp_delta >= wanted[1]) {
            offset_delta = r.offset_delta;
            delta = r.timestamp_delta;
        }
    }
    int is_faulty = fault != NO_FAULT || (offset_delta < 0 && batch.at != batch.end);
    PyBuffer_Release(&buffer);
    if (is_faulty)
        Py_RETURN_NONE;
    return Py_BuildValue("(LL)", offset_delta, delta);
}

/* -- decoding ---------------------------------------------------------------------- */

/* What the records of one batch have in common. */
typedef struct {
    int64_t first_delta, base_offset, base_timestamp;
    int appended;
    PyTypeObject *type;       /* a subclass of tuple */
    PyObject *before, *after; /* tuples: the fields around a record's own */
    int64_t timestamp;        /* that of `timestamp_object`, if there is one */
    PyObject *timestamp_object;
} record_maker;

static PyObject *
field_object(const record_field *f)
{
    if (f->data == NULL)
        return Py_NewRef(Py_None);
    return PyBytes_FromStringAndSize((const char *)f->data, (Py_ssize_t)f->length);
}

/* Return a checked record's headers: a list of (name, value), or () if it has none. */
static PyObject *
headers_object(const record *r)
{
    if (r->header_count == 0)
        return PyTuple_New(0);
    PyObject *list = PyList_New((Py_ssize_t)r->header_count);
    cursor at = r->headers;
    for (Py_ssize_t i = 0; list != NULL && i < (Py_ssize_t)r->header_count; i++) {
        record_field name = {NULL, 0}, value = {NULL, 0};
        (void)read_record_header(&at, &name, &value);
        PyObject *name_object = PyUnicode_DecodeUTF8(
            (const char *)name.data, (Py_ssize_t)name.length, "surrogateescape");
        PyObject *value_object = field_object(&value);
        PyObject *pair = name_object != NULL && value_object != NULL
                             ? PyTuple_Pack(2, name_object, value_object)
                             : NULL;
        Py_XDECREF(name_object);
        Py_XDECREF(value_object);
        if (pair == NULL)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, i, pair);
    }
    return list;
}

/* Return a timestamp as an int. Many records have that of the record before. */
static PyObject *
timestamp_object(record_maker *m, const record *r)
{
    int64_t timestamp = (int64_t)((uint64_t)m->base_timestamp +
                                  (m->appended ? 0 : (uint64_t)r->timestamp_delta));
    if (m->timestamp_object == NULL || m->timestamp != timestamp) {
        Py_XSETREF(m->timestamp_object, PyLong_FromLongLong(timestamp));
        m->timestamp = timestamp;
    }
    return Py_XNewRef(m->timestamp_object);
}

static Py_ssize_t
copy_items(PyObject *to, Py_ssize_t at, PyObject *from)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(from); i++)
        PyTuple_SET_ITEM(to, at++, Py_NewRef(PyTuple_GET_ITEM(from, i)));
    return at;
}

static PyObject *
record_object(record_maker *m, const record *r)
{
    const Py_ssize_t first = PyTuple_GET_SIZE(m->before);
    PyObject *made =
        m->type->tp_alloc(m->type, first + 5 + PyTuple_GET_SIZE(m->after));
    if (made == NULL)
        return NULL;
    PyObject *const own[] = {
        PyLong_FromLongLong(
            (int64_t)((uint64_t)m->base_offset + (uint64_t)r->offset_delta)),
        timestamp_object(m, r),
        field_object(&r->key),
        field_object(&r->value),
        headers_object(r),
    };
    int failed = 0;
    Py_ssize_t at = copy_items(made, 0, m->before);
    for (int i = 0; i < 5; i++) {
        failed |= own[i] == NULL;
        PyTuple_SET_ITEM(made, at++, own[i]);
    }
    copy_items(made, at, m->after);
    if (failed)
        Py_CLEAR(made); /* a tuple may have items that are NULL when it is destroyed */
    return made;
}

/* Return the records as a list; NULL with `*fault` NO_FAULT: an exception is set.
 * `*index`: the record with the fault. */
static PyObject *
make_records(cursor batch, long long count, record_maker *m, enum record_fault *fault,
             long long *index)
{
    PyObject *records = PyList_New(0);
    *fault = NO_FAULT;
    for (*index = 0; records != NULL && *index < count; ++*index) {
        record r;
        if ((*fault = read_record(&batch, 1, 0, &r)) != NO_FAULT) {
            Py_CLEAR(records);
            return NULL;
        }
        if (r.offset_delta < m->first_delta)
            continue;
        PyObject *made = record_object(m, &r);
        if (made == NULL || PyList_Append(records, made) < 0)
            Py_CLEAR(records);
        Py_XDECREF(made);
    }
    if (records != NULL && batch.at != batch.end) {
        *fault = BYTES_LEFT_IN_BATCH;
        Py_CLEAR(records);
    }
    return records;
}

PyDoc_STRVAR(read_records_doc,
"read_records(payload, record_count, first_delta, base_offset, base_timestamp,\n"
"             appended, shape, /)\n--\n\n"
"See mpbroker.protocol.records.record_read.read_records_in_python.");

static PyObject *
read_records(PyObject *module, PyObject *args)
{
    Py_buffer buffer;
    long long count, first_delta, base_offset, base_timestamp, index;
    record_maker m = {0};
    enum record_fault fault;
    if (!PyArg_ParseTuple(args, "y*LLLLp(O!O!O!):read_records", &buffer, &count,
                          &first_delta, &base_offset, &base_timestamp, &m.appended,
                          &PyType_Type, &m.type, &PyTuple_Type, &m.before,
                          &PyTuple_Type, &m.after))
        return NULL;
    if (!PyType_IsSubtype(m.type, &PyTuple_Type)) {
        PyBuffer_Release(&buffer);
        PyErr_SetString(PyExc_TypeError, "records are of a subclass of tuple");
        return NULL;
    }
    m.first_delta = first_delta;
    m.base_offset = base_offset;
    m.base_timestamp = base_timestamp;
    const uint8_t *data = buffer.buf;
    cursor batch = {data, data + buffer.len};
    PyObject *records = make_records(batch, count, &m, &fault, &index);
    Py_XDECREF(m.timestamp_object);
    PyBuffer_Release(&buffer);
    if (records != NULL)
        return Py_BuildValue("(iLN)", fault, index, records);
    return fault == NO_FAULT ? NULL : Py_BuildValue("(iLO)", fault, index, Py_None);
}

/* -- encoding ---------------------------------------------------------------------- */

/* Return the size of a field with its length; -1 and TypeError unless the field is
 * bytes or, if it is nullable, None. */
static inline Py_ssize_t
field_size(PyObject *field, int nullable)
{
    if (PyBytes_CheckExact(field)) {
        Py_ssize_t size = PyBytes_GET_SIZE(field);
        return varint_size(size) + size;
    }
    if (field == Py_None && nullable)
        return 1;
    PyErr_Format(PyExc_TypeError, "a record's fields are bytes%s, not %.100s",
                 nullable ? " or None" : "", Py_TYPE(field)->tp_name);
    return -1;
}

static inline uint8_t *
write_field(uint8_t *at, PyObject *field)
{
    if (field == Py_None) {
        *at++ = 1; /* -1 */
        return at;
    }
    Py_ssize_t size = PyBytes_GET_SIZE(field);
    at = write_varint(at, size);
    memcpy(at, PyBytes_AS_STRING(field), (size_t)size);
    return at + size;
}

/* Return the size of a record's headers with their count; -1 and TypeError.
 *
 * Headers are a tuple of pairs. They are checked here, and only read in the second
 * pass: tuples, bytes and ints cannot change between the two passes. */
static Py_ssize_t
headers_size(PyObject *headers)
{
    if (!PyTuple_CheckExact(headers)) {
        PyErr_SetString(PyExc_TypeError, "a record's headers are a tuple of pairs");
        return -1;
    }
    Py_ssize_t count = PyTuple_GET_SIZE(headers);
    Py_ssize_t total = varint_size(count);
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *pair = PyTuple_GET_ITEM(headers, i);
        if (!PyTuple_CheckExact(pair) || PyTuple_GET_SIZE(pair) != 2) {
            PyErr_SetString(PyExc_TypeError, "a header is a pair of name and value");
            return -1;
        }
        Py_ssize_t name = field_size(PyTuple_GET_ITEM(pair, 0), 0);
        if (name < 0)
            return -1;
        Py_ssize_t value = field_size(PyTuple_GET_ITEM(pair, 1), 1);
        if (value < 0)
            return -1;
        total += name + value;
    }
    return total;
}

/* Return the size of a record without its length field; -1 and an exception if the
 * object is no record. */
static Py_ssize_t
body_size(PyObject *record, Py_ssize_t index, int64_t base, int64_t *timestamp)
{
    if (!PyTuple_CheckExact(record) || PyTuple_GET_SIZE(record) != 4) {
        PyErr_SetString(PyExc_TypeError,
                        "a record is a tuple of timestamp, key, value and headers");
        return -1;
    }
    if (!PyLong_Check(PyTuple_GET_ITEM(record, 0))) {
        PyErr_SetString(PyExc_TypeError, "a record's timestamp is an int");
        return -1;
    }
    long long time = PyLong_AsLongLong(PyTuple_GET_ITEM(record, 0));
    if (time == -1 && PyErr_Occurred())
        return -1;
    *timestamp = time;
    Py_ssize_t key = field_size(PyTuple_GET_ITEM(record, 1), 1);
    if (key < 0)
        return -1;
    Py_ssize_t value = field_size(PyTuple_GET_ITEM(record, 2), 1);
    if (value < 0)
        return -1;
    Py_ssize_t headers = headers_size(PyTuple_GET_ITEM(record, 3));
    if (headers < 0)
        return -1;
    int64_t delta = index ? (int64_t)((uint64_t)time - (uint64_t)base) : 0;
    return 1 + varint_size(delta) + varint_size(index) + key + value + headers;
}

typedef struct {
    int64_t base, highest; /* timestamps: the first record's, and the newest */
    Py_ssize_t size;
} measured;

/* Check all records and add up their size; 0 and an exception. */
static int
measure_records(PyObject *rows, measured *m)
{
    const Py_ssize_t count = PyTuple_GET_SIZE(rows);
    *m = (measured){-1, -1, 0};
    for (Py_ssize_t i = 0; i < count; i++) {
        int64_t timestamp;
        Py_ssize_t size = body_size(PyTuple_GET_ITEM(rows, i), i, m->base, &timestamp);
        if (size < 0)
            return 0;
        if (i == 0)
            m->base = m->highest = timestamp;
        else if (timestamp > m->highest)
            m->highest = timestamp;
        m->size += varint_size(size) + size;
    }
    return 1;
}

/* Write a record that measure_records() has checked; return where the next one goes. */
static uint8_t *
write_record(uint8_t *at, PyObject *record, Py_ssize_t index, int64_t base)
{
    int64_t timestamp;
    at = write_varint(at, body_size(record, index, base, &timestamp));
    *at++ = 0; /* attributes */
    at = write_varint(at, (int64_t)((uint64_t)timestamp - (uint64_t)base));
    at = write_varint(at, index);
    at = write_field(at, PyTuple_GET_ITEM(record, 1));
    at = write_field(at, PyTuple_GET_ITEM(record, 2));
    PyObject *headers = PyTuple_GET_ITEM(record, 3);
    const Py_ssize_t pairs = PyTuple_GET_SIZE(headers);
    at = write_varint(at, pairs);
    for (Py_ssize_t i = 0; i < pairs; i++) {
        PyObject *pair = PyTuple_GET_ITEM(headers, i);
        at = write_field(at, PyTuple_GET_ITEM(pair, 0));
        at = write_field(at, PyTuple_GET_ITEM(pair, 1));
    }
    return at;
}

/* Encode a tuple of records into new bytes or, if `room` is above 0, into a new
 * bytearray behind `room` zeros. */
static PyObject *
encode_rows(PyObject *rows, Py_ssize_t room)
{
    measured m;
    if (!measure_records(rows, &m))
        return NULL;
    if (m.size > PY_SSIZE_T_MAX - room)
        return PyErr_NoMemory();
    PyObject *payload = room ? PyByteArray_FromStringAndSize(NULL, room + m.size)
                             : PyBytes_FromStringAndSize(NULL, m.size);
    if (payload == NULL)
        return NULL;
    uint8_t *at = (uint8_t *)(room ? PyByteArray_AS_STRING(payload)
                                   : PyBytes_AS_STRING(payload));
    memset(at, 0, (size_t)room);
    at += room;
    const Py_ssize_t count = PyTuple_GET_SIZE(rows);
    for (Py_ssize_t i = 0; i < count; i++)
        at = write_record(at, PyTuple_GET_ITEM(rows, i), i, m.base);
    return Py_BuildValue("(NLL)", payload, (long long)m.base, (long long)m.highest);
}

static PyObject *
encode_list(PyObject *records, Py_ssize_t room)
{
    if (!PyList_CheckExact(records)) {
        PyErr_SetString(PyExc_TypeError, "records are given in a list");
        return NULL;
    }
    /* A tuple cannot shrink while it is read, as the list might. */
    PyObject *rows = PyList_AsTuple(records);
    if (rows == NULL)
        return NULL;
    PyObject *encoded = encode_rows(rows, room);
    Py_DECREF(rows);
    return encoded;
}

PyDoc_STRVAR(encode_records_doc,
"encode_records(records, /)\n--\n\n"
"See mpbroker.protocol.records.record_encode.encode_records_in_python.");

static PyObject *
encode_records(PyObject *module, PyObject *records)
{
    return encode_list(records, 0);
}

PyDoc_STRVAR(encode_batch_doc,
"encode_batch(records, /)\n--\n\n"
"See mpbroker.protocol.records.record_encode.encode_batch_in_python.");

static PyObject *
encode_batch(PyObject *module, PyObject *records)
{
    return encode_list(records, BATCH_HEADER_SIZE);
}

static PyMethodDef methods[] = {
    {"walk_records", FASTCALL(walk_records), METH_FASTCALL,
     walk_records_doc},
    {"find_record", FASTCALL(find_record), METH_FASTCALL, find_record_doc},
    {"read_records", read_records, METH_VARARGS, read_records_doc},
    {"encode_records", encode_records, METH_O, encode_records_doc},
    {"encode_batch", encode_batch, METH_O, encode_batch_doc},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {
#if PY_VERSION_HEX >= 0x030C0000
    {Py_mod_multiple_interpreters, Py_MOD_PER_INTERPRETER_GIL_SUPPORTED},
#endif
#ifdef Py_GIL_DISABLED
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "mpbroker.native._records",
    .m_doc = "Compiled twins of the loops over records in protocol/records.",
    .m_size = 0,
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC
PyInit__records(void)
{
    return PyModuleDef_Init(&module);
}
