/* Python.h, and the fields of Python objects that declare __slots__: read and written
 * at their offsets, without an attribute's lookup.
 *
 * The offsets are found once, by field_offset(), from the classes that Python hands
 * over. So a class may add or move fields, but must keep those that the C code names.
 */

#ifndef MPBROKER_PYTHON_OBJECTS_H
#define MPBROKER_PYTHON_OBJECTS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#if PY_VERSION_HEX < 0x030C0000
#include <structmember.h>
#define Py_T_LONGLONG T_LONGLONG
#define Py_T_OBJECT_EX T_OBJECT_EX
#define Py_T_BOOL T_BOOL
#define Py_READONLY READONLY
#endif

/* A METH_FASTCALL function, as a PyMethodDef holds it. */
#define FASTCALL(function) ((PyCFunction)(void (*)(void))(function))

/* Find a field's offset by its name; 0 and an exception if the class has no such
 * slot. */
int field_offset(PyTypeObject *type, const char *name, Py_ssize_t *offset);

/* Return a field's object, borrowed; NULL if it was never assigned. */
static inline PyObject *
get_field(PyObject *object, Py_ssize_t offset)
{
    return *(PyObject **)((char *)object + offset);
}

/* Assign a field; takes over the reference to `value`. */
static inline void
set_field(PyObject *object, Py_ssize_t offset, PyObject *value)
{
    PyObject **place = (PyObject **)((char *)object + offset);
    PyObject *old = *place;
    *place = value;
    /* Last, because it may run a destructor, which may read the field. */
    Py_XDECREF(old);
}

/* Read a field that holds an int of 64 bits; 0, without an exception, if it does
 * not. */
static inline int
read_int_field(PyObject *object, Py_ssize_t offset, int64_t *value)
{
    PyObject *number = get_field(object, offset);
    if (number == NULL || !PyLong_Check(number))
        return 0;
    int overflow;
    *value = PyLong_AsLongLongAndOverflow(number, &overflow);
    return !overflow;
}

/* Assign an int to a field; 0 and an exception if there is no memory. */
static inline int
set_int_field(PyObject *object, Py_ssize_t offset, int64_t value)
{
    PyObject *number = PyLong_FromLongLong(value);
    if (number != NULL)
        set_field(object, offset, number);
    return number != NULL;
}

#endif
