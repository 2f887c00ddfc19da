/* The walk over a batch's records, the one cost a record has on its way into the log.
 *
 * A twin of walk_records_in_python() in record_walk.py, which is the specification: the
 * same faults, in the same order, for the same bytes (tests/protocol/test_record_walk.py).
 * Nothing is allocated but the answer, and no byte is read before it is known to be there.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

enum fault {
    NO_FAULT = 0,
    TOO_FEW_RECORDS = 1,
    BAD_VARINT = 2,
    BAD_RECORD_LENGTH = 3,
    BAD_OFFSET_DELTA = 4,
    BAD_KEY_LENGTH = 5,
    BAD_VALUE_LENGTH = 6,
    BAD_HEADER_COUNT = 7,
    BAD_HEADER = 8,
    BYTES_LEFT_IN_RECORD = 9,
    BYTES_LEFT_IN_BATCH = 10,
};

#define MIN_RECORD_LENGTH 6

typedef struct {
    const uint8_t *at;
    const uint8_t *end;
} cursor;

/* Read a zig-zag varint of at most `bits` bits; return 0 if it is cut off or longer. */
static inline int
read_varint(cursor *c, int bits, int64_t *value)
{
    uint64_t raw;
    if (c->at < c->end && *c->at < 0x80) {
        raw = *c->at++;
    }
    else {
        int shift = 0;
        uint64_t byte;
        raw = 0;
        do {
            if (c->at == c->end || shift >= bits)
                return 0;
            byte = *c->at++;
            /* The last byte that fits has room for a few of its seven bits only. */
            if (shift + 7 > bits && (byte & 0x7f) >> (bits - shift))
                return 0;
            raw |= (byte & 0x7f) << shift;
            shift += 7;
        } while (byte & 0x80);
    }
    *value = (int64_t)((raw >> 1) ^ (0 - (raw & 1)));
    return 1;
}

/* Skip a length and as many bytes; -1 is null if `nullable`. */
static inline int
skip_bytes(cursor *c, int nullable, enum fault bad_length, int *is_null)
{
    int64_t length;
    if (!read_varint(c, 32, &length))
        return BAD_VARINT;
    if (length < 0) {
        if (length != -1 || !nullable)
            return bad_length;
        *is_null = 1;
        return NO_FAULT;
    }
    if (length > c->end - c->at)
        return bad_length;
    c->at += length;
    *is_null = 0;
    return NO_FAULT;
}

static int
skip_headers(cursor *c)
{
    int64_t count;
    int fault, is_null;
    if (!read_varint(c, 32, &count))
        return BAD_VARINT;
    if (count < 0 || count > c->end - c->at)
        return BAD_HEADER_COUNT;
    for (; count > 0; count--) {
        if ((fault = skip_bytes(c, 0, BAD_HEADER, &is_null)) != NO_FAULT)
            return fault;
        if ((fault = skip_bytes(c, 1, BAD_HEADER, &is_null)) != NO_FAULT)
            return fault;
    }
    return NO_FAULT;
}

typedef struct {
    long long index;          /* of the record at fault, or how many there are */
    int64_t max_delta;        /* of timestamps, where there is one */
    long long max_index;      /* first record that has it; -1: none has a timestamp */
    int64_t min_delta;
    long long first_keyless;  /* -1: all have keys */
} walk;

static inline int
walk_record(cursor *batch, long long index, int64_t no_timestamp_delta, walk *w)
{
    int64_t length, delta, offset_delta;
    int fault, is_keyless, is_null;
    if (batch->at == batch->end)
        return TOO_FEW_RECORDS;
    if (!read_varint(batch, 32, &length))
        return BAD_VARINT;
    if (length < MIN_RECORD_LENGTH || length > batch->end - batch->at)
        return BAD_RECORD_LENGTH;
    cursor c = {batch->at + 1, batch->at + length}; /* past the attributes */
    if (!read_varint(&c, 64, &delta) || !read_varint(&c, 32, &offset_delta))
        return BAD_VARINT;
    if (offset_delta != index)
        return BAD_OFFSET_DELTA;
    if ((fault = skip_bytes(&c, 1, BAD_KEY_LENGTH, &is_keyless)) != NO_FAULT)
        return fault;
    if ((fault = skip_bytes(&c, 1, BAD_VALUE_LENGTH, &is_null)) != NO_FAULT)
        return fault;
    if (c.at < c.end && *c.at == 0)
        c.at++; /* no headers: nearly always */
    else if ((fault = skip_headers(&c)) != NO_FAULT)
        return fault;
    if (c.at != c.end)
        return BYTES_LEFT_IN_RECORD;
    if (is_keyless && w->first_keyless < 0)
        w->first_keyless = index;
    if (delta != no_timestamp_delta) {
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
    batch->at = c.end;
    return NO_FAULT;
}

PyDoc_STRVAR(walk_records_doc,
"walk_records(data, start, record_count, no_timestamp_delta, /)\n--\n\n"
"See mpbroker.protocol.record_walk.walk_records_in_python.");

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
    walk w = {0, 0, -1, 0, -1};
    int fault = NO_FAULT;
    for (; w.index < count; w.index++)
        if ((fault = walk_record(&batch, w.index, no_timestamp_delta, &w)) != NO_FAULT)
            break;
    if (fault == NO_FAULT && batch.at != batch.end)
        fault = BYTES_LEFT_IN_BATCH;
    PyBuffer_Release(&buffer);
    return Py_BuildValue("(iLLLLL)", fault, w.index, (long long)w.max_delta,
                         w.max_index, (long long)w.min_delta, w.first_keyless);
}

static PyMethodDef methods[] = {
    {"walk_records", (PyCFunction)(void (*)(void))walk_records, METH_FASTCALL,
     walk_records_doc},
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
    .m_name = "mpbroker.protocol._records",
    .m_doc = "Compiled twin of the walk in mpbroker.protocol.record_walk.",
    .m_size = 0,
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC
PyInit__records(void)
{
    return PyModuleDef_Init(&module);
}
