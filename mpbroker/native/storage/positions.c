/* Python twin: PartitionView.remember in storage/log/partition_view.py. */

#include "storage/positions.h"

#define POSITIONS_KEPT 64

int
remember_position(PyObject *positions, PyObject *segment, int64_t offset,
                  int64_t position)
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

int64_t
find_position(PyObject *positions, PyObject *segment, int64_t offset)
{
    if (positions == NULL || !PyDict_CheckExact(positions))
        return -1;
    PyObject *number = PyLong_FromLongLong(offset);
    PyObject *place = number ? PyDict_GetItemWithError(positions, number) : NULL;
    Py_XDECREF(number);
    if (place == NULL || !PyTuple_CheckExact(place) || PyTuple_GET_SIZE(place) != 2
        || PyTuple_GET_ITEM(place, 0) != segment
        || !PyLong_Check(PyTuple_GET_ITEM(place, 1)))
        return -1;
    int overflow;
    int64_t position =
        PyLong_AsLongLongAndOverflow(PyTuple_GET_ITEM(place, 1), &overflow);
    return overflow ? -1 : position;
}
