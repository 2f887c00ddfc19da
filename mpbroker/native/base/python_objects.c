#include "base/python_objects.h"

int
field_offset(PyTypeObject *type, const char *name, Py_ssize_t *offset)
{
    PyObject *descriptor = PyObject_GetAttrString((PyObject *)type, name);
    if (descriptor == NULL)
        return 0;
    if (!Py_IS_TYPE(descriptor, &PyMemberDescr_Type)) {
        PyErr_Format(PyExc_TypeError, "%s.%s is not in __slots__", type->tp_name, name);
        Py_DECREF(descriptor);
        return 0;
    }
    *offset = ((PyMemberDescrObject *)descriptor)->d_member->offset;
    Py_DECREF(descriptor);
    return 1;
}
