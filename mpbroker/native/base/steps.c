#include "base/steps.h"

#include <signal.h>
#include <unistd.h>

int64_t steps_done, step_to_die_at = -1;
int counts_steps;

void
die_here(void)
{
    kill(getpid(), SIGKILL);
    for (;;)
        pause();
}

PyObject *
die_at_step(PyObject *module, PyObject *number)
{
    int64_t steps = PyLong_AsLongLong(number);
    if (steps == -1 && PyErr_Occurred())
        return NULL;
    counts_steps = 1;
    step_to_die_at = steps < 1 ? -1 : steps_done + steps;
    Py_RETURN_NONE;
}

PyObject *
get_steps_done(PyObject *module, PyObject *unused)
{
    counts_steps = 1;
    return PyLong_FromLongLong(steps_done);
}
