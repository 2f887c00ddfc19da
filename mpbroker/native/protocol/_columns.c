/* mpbroker.native._columns: the records of batches as Arrow columns, without a Python
 * object for each field.
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

/* The records of one batch: a tuple's fields, as read_columns_in_python() has them. */
typedef struct {
    Py_buffer payload;
    long long count, first_delta, base_offset, base_timestamp;
    int appended;
} part;

static inline cursor
records_of(const part *p)
{
    const uint8_t *data = p->payload.buf;
    return (cursor){data, data + p->payload.len};
}

/* All columns being filled. */
typedef struct {
    int64_t *offset, *timestamp;
    int32_t *end; /* of the headers of a row; NULL: no headers are read */
    column key, value, header_key, header_value;
} columns;

static void
add_records(columns *c, const part *p)
{
    cursor batch = records_of(p);
    for (long long index = 0; index < p->count; index++) {
        record r;
        (void)read_record(&batch, 1, 0, &r); /* measure() has checked it */
        if (r.offset_delta < p->first_delta)
            continue;
        *c->offset++ = (int64_t)((uint64_t)p->base_offset + (uint64_t)r.offset_delta);
        *c->timestamp++ = (int64_t)((uint64_t)p->base_timestamp +
                                    (p->appended ? 0 : (uint64_t)r.timestamp_delta));
        add(&c->key, &r.key);
        add(&c->value, &r.value);
        if (c->end == NULL)
            continue;
        for (int64_t left = r.header_count; left > 0; left--) {
            record_field name = {NULL, 0}, content = {NULL, 0};
            (void)read_record_header(&r.headers, &name, &content);
            add(&c->header_key, &name);
            add(&c->header_value, &content);
        }
        *c->end++ = (int32_t)c->header_key.count;
    }
}

static PyObject *
fill(const part *parts, Py_ssize_t n, const totals *t, int with_headers)
{
    columns c;
    PyObject *result = NULL, *headers = NULL;
    PyObject *keys = NULL, *values = NULL, *header_keys = NULL, *header_values = NULL;
    Py_ssize_t header_rows = with_headers ? t->rows : 0;
    Py_ssize_t header_count = with_headers ? t->headers : 0;
    PyObject *offsets = PyBytes_FromStringAndSize(NULL, t->rows * 8);
    PyObject *timestamps = PyBytes_FromStringAndSize(NULL, t->rows * 8);
    PyObject *ends = PyBytes_FromStringAndSize(NULL, (header_rows + 1) * 4);
    memset(&c, 0, sizeof c);
    if (header_count > INT32_MAX) {
        PyErr_SetString(PyExc_OverflowError, "a column of 2 GiB or more");
        goto done;
    }
    if (!offsets || !timestamps || !ends ||
        !new_column(&c.key, t->rows, t->key_size) ||
        !new_column(&c.value, t->rows, t->value_size) ||
        !new_column(&c.header_key, header_count,
                    with_headers ? t->header_key_size : 0) ||
        !new_column(&c.header_value, header_count,
                    with_headers ? t->header_value_size : 0))
        goto done;
    c.offset = (int64_t *)PyBytes_AS_STRING(offsets);
    c.timestamp = (int64_t *)PyBytes_AS_STRING(timestamps);
    int32_t *end = (int32_t *)PyBytes_AS_STRING(ends);
    *end = 0;
    c.end = with_headers ? end + 1 : NULL;
    for (Py_ssize_t index = 0; index < n; index++)
        add_records(&c, &parts[index]);
    keys = column_tuple(&c.key);
    values = column_tuple(&c.value);
    header_keys = column_tuple(&c.header_key);
    header_values = column_tuple(&c.header_value);
    if (keys && values && header_keys && header_values) {
        headers = with_headers ? PyTuple_Pack(3, ends, header_keys, header_values)
                               : Py_NewRef(Py_None);
        if (headers)
            result = Py_BuildValue("(inOOOOO)", NO_FAULT, t->rows, offsets, timestamps,
                                   keys, values, headers);
    }
done:
    drop_column(&c.key);
    drop_column(&c.value);
    drop_column(&c.header_key);
    drop_column(&c.header_value);
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
"read_columns(parts, with_headers, /)\n--\n\n"
"See mpbroker.protocol.records.record_columns.read_columns_in_python.");

static PyObject *
read_columns(PyObject *module, PyObject *args)
{
    PyObject *given, *result = NULL;
    int with_headers;
    Py_ssize_t held = 0;
    totals t = {0, 0, 0, 0, 0, 0};
    if (!PyArg_ParseTuple(args, "O!p:read_columns", &PyList_Type, &given,
                          &with_headers))
        return NULL;
    Py_ssize_t n = PyList_GET_SIZE(given);
    part *parts = PyMem_Calloc(n ? (size_t)n : 1, sizeof *parts);
    if (parts == NULL)
        return PyErr_NoMemory();
    /* A strange object's conversion may run Python code, and shorten the list. */
    for (; held < n && held < PyList_GET_SIZE(given); held++) {
        part *p = &parts[held];
        PyObject *fields = Py_NewRef(PyList_GET_ITEM(given, held));
        int is_read = 0;
        if (!PyTuple_Check(fields))
            PyErr_SetString(PyExc_TypeError, "a part is a tuple");
        else
            is_read = PyArg_ParseTuple(fields, "y*LLLLp", &p->payload, &p->count,
                                       &p->first_delta, &p->base_offset,
                                       &p->base_timestamp, &p->appended);
        Py_DECREF(fields);
        if (!is_read)
            goto done;
    }
    for (Py_ssize_t index = 0; index < held; index++) {
        const part *p = &parts[index];
        long long at = 0;
        enum record_fault fault =
            measure(records_of(p), p->count, p->first_delta, &t, &at);
        if (fault != NO_FAULT) {
            result = Py_BuildValue("(iLnOOOO)", fault, at, index, Py_None, Py_None,
                                   Py_None, Py_None);
            goto done;
        }
    }
    result = fill(parts, held, &t, with_headers);
done:
    while (held > 0)
        PyBuffer_Release(&parts[--held].payload);
    PyMem_Free(parts);
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
