/* mpbroker.native._columns: a batch's records as Arrow columns, without a Python object
 * for each field.
 *
 * Python twin, which is the specification: read_columns_in_python() in
 * protocol/records/record_columns.py (tests/protocol/test_record_columns.py). There are
 * two walks over the records: the first checks every length and adds up the sizes of
 * the columns, the second only copies.
 *
 * Source: Arrow columnar format, "Variable-size Binary Layout": n + 1 int32 offsets,
 * the bytes, and a validity bitmap, least significant bit first.
 */

#include "base/python_objects.h"
#include "protocol/record_walk.h"
#include "protocol/varint.h"

#include <string.h>

/* One variable-size column being filled. */
typedef struct {
    PyObject *offsets_object, *data_object, *validity_object;
    int32_t *offsets;
    uint8_t *data, *validity;
    Py_ssize_t count;
    int32_t used;
    int has_nulls;
} column;

static int
new_column(column *c, Py_ssize_t count, int64_t size)
{
    memset(c, 0, sizeof *c);
    if (size > INT32_MAX) {
        PyErr_SetString(PyExc_OverflowError, "a column of 2 GiB or more");
        return 0;
    }
    c->offsets_object = PyBytes_FromStringAndSize(NULL, (count + 1) * 4);
    c->data_object = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)size);
    c->validity_object = PyBytes_FromStringAndSize(NULL, (count + 7) / 8);
    if (!c->offsets_object || !c->data_object || !c->validity_object)
        return 0;
    c->offsets = (int32_t *)PyBytes_AS_STRING(c->offsets_object);
    c->data = (uint8_t *)PyBytes_AS_STRING(c->data_object);
    c->validity = (uint8_t *)PyBytes_AS_STRING(c->validity_object);
    memset(c->validity, 0, (size_t)(count + 7) / 8);
    c->offsets[0] = 0;
    return 1;
}

static inline void
add(column *c, const record_field *f)
{
    if (f->data != NULL) {
        memcpy(c->data + c->used, f->data, (size_t)f->length);
        c->used += (int32_t)f->length;
        c->validity[c->count >> 3] |= (uint8_t)(1 << (c->count & 7));
    }
    else
        c->has_nulls = 1;
    c->offsets[++c->count] = c->used;
}

static void
drop_column(column *c)
{
    Py_XDECREF(c->offsets_object);
    Py_XDECREF(c->data_object);
    Py_XDECREF(c->validity_object);
}

/* Return (validity or None, offsets, data); the column keeps its own references. */
static PyObject *
column_tuple(const column *c)
{
    return PyTuple_Pack(3, c->has_nulls ? c->validity_object : Py_None,
                        c->offsets_object, c->data_object);
}

typedef struct {
    Py_ssize_t rows, headers;
    int64_t key_size, value_size, header_key_size, header_value_size;
} totals;

/* Check every record, and add up the sizes of those with an offset delta of at least
 * `first_delta`; `*index`: the record with the fault. */
static enum record_fault
measure(cursor batch, long long count, int64_t first_delta, totals *t, long long *index)
{
    record r;
    enum record_fault fault;
    for (*index = 0; *index < count; ++*index) {
        if ((fault = read_record(&batch, 1, 0, &r)) != NO_FAULT)
            return fault;
        if (r.offset_delta < first_delta)
            continue;
        t->rows++;
        t->key_size += r.key.length;
        t->value_size += r.value.length;
        t->headers += (Py_ssize_t)r.header_count;
        for (int64_t left = r.header_count; left > 0; left--) {
            record_field key = {NULL, 0}, value = {NULL, 0};
            (void)read_record_header(&r.headers, &key, &value);
            t->header_key_size += key.length;
            t->header_value_size += value.length;
        }
    }
    return batch.at == batch.end ? NO_FAULT : BYTES_LEFT_IN_BATCH;
}

static PyObject *
fill(cursor batch, long long count, int64_t first_delta, const totals *t,
     long long base_offset, long long base_timestamp, int appended, int with_headers)
{
    column key, value, header_key, header_value;
    PyObject *result = NULL, *headers = NULL;
    PyObject *keys = NULL, *values = NULL, *header_keys = NULL, *header_values = NULL;
    Py_ssize_t header_rows = with_headers ? t->rows : 0;
    Py_ssize_t header_count = with_headers ? t->headers : 0;
    PyObject *offsets = PyBytes_FromStringAndSize(NULL, t->rows * 8);
    PyObject *timestamps = PyBytes_FromStringAndSize(NULL, t->rows * 8);
    PyObject *ends = PyBytes_FromStringAndSize(NULL, (header_rows + 1) * 4);
    memset(&key, 0, sizeof key);
    value = header_key = header_value = key;
    if (!offsets || !timestamps || !ends ||
        !new_column(&key, t->rows, t->key_size) ||
        !new_column(&value, t->rows, t->value_size) ||
        !new_column(&header_key, header_count, with_headers ? t->header_key_size : 0) ||
        !new_column(&header_value, header_count, with_headers ? t->header_value_size : 0))
        goto done;
    int64_t *offset = (int64_t *)PyBytes_AS_STRING(offsets);
    int64_t *timestamp = (int64_t *)PyBytes_AS_STRING(timestamps);
    int32_t *end = (int32_t *)PyBytes_AS_STRING(ends);
    *end++ = 0;
    for (long long index = 0; index < count; index++) {
        record r;
        (void)read_record(&batch, 1, 0, &r); /* measure() has checked it */
        if (r.offset_delta < first_delta)
            continue;
        *offset++ = (int64_t)((uint64_t)base_offset + (uint64_t)r.offset_delta);
        *timestamp++ = (int64_t)((uint64_t)base_timestamp +
                                 (appended ? 0 : (uint64_t)r.timestamp_delta));
        add(&key, &r.key);
        add(&value, &r.value);
        if (!with_headers)
            continue;
        for (int64_t left = r.header_count; left > 0; left--) {
            record_field name = {NULL, 0}, content = {NULL, 0};
            (void)read_record_header(&r.headers, &name, &content);
            add(&header_key, &name);
            add(&header_value, &content);
        }
        *end++ = (int32_t)header_key.count;
    }
    keys = column_tuple(&key);
    values = column_tuple(&value);
    header_keys = column_tuple(&header_key);
    header_values = column_tuple(&header_value);
    if (keys && values && header_keys && header_values) {
        headers = with_headers ? PyTuple_Pack(3, ends, header_keys, header_values)
                               : Py_NewRef(Py_None);
        if (headers)
            result = Py_BuildValue("(inOOOOO)", NO_FAULT, t->rows, offsets, timestamps,
                                   keys, values, headers);
    }
done:
    drop_column(&key);
    drop_column(&value);
    drop_column(&header_key);
    drop_column(&header_value);
    Py_XDECREF(offsets);
    Py_XDECREF(timestamps);
    Py_XDECREF(ends);
    Py_XDECREF(keys);
    Py_XDECREF(values);
    Py_XDECREF(header_keys);
    Py_XDECREF(header_values);
    Py_XDECREF(headers);
    return result;
}

PyDoc_STRVAR(read_columns_doc,
"read_columns(payload, record_count, first_delta, base_offset, base_timestamp,\n"
"             appended, with_headers, /)\n--\n\n"
"See mpbroker.protocol.records.record_columns.read_columns_in_python.");

static PyObject *
read_columns(PyObject *module, PyObject *args)
{
    Py_buffer buffer;
    long long count, first_delta, base_offset, base_timestamp, index = 0;
    int appended, with_headers;
    totals t = {0, 0, 0, 0, 0, 0};
    PyObject *result;
    if (!PyArg_ParseTuple(args, "y*LLLLpp:read_columns", &buffer, &count, &first_delta,
                          &base_offset, &base_timestamp, &appended, &with_headers))
        return NULL;
    const uint8_t *data = buffer.buf;
    cursor batch = {data, data + buffer.len};
    enum record_fault fault = measure(batch, count, first_delta, &t, &index);
    if (fault != NO_FAULT)
        result = Py_BuildValue("(iLOOOOO)", fault, index, Py_None, Py_None, Py_None,
                               Py_None, Py_None);
    else
        result = fill(batch, count, first_delta, &t, base_offset, base_timestamp,
                      appended, with_headers);
    PyBuffer_Release(&buffer);
    return result;
}

static PyMethodDef methods[] = {
    {"read_columns", read_columns, METH_VARARGS, read_columns_doc},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {
#if PY_VERSION_HEX >= 0x030C0000
    {Py_mod_multiple_interpreters, Py_MOD_PER_INTERPRETER_GIL_SUPPORTED},
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "mpbroker.native._columns",
    .m_doc = "Compiled twins of mpbroker.protocol.records.record_columns.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC
PyInit__columns(void)
{
    return PyModuleDef_Init(&definition);
}
