#include "core.h"
PyTypeObject ProcessorEnd_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "mpbroker._core.ProcessorEnd",
};
