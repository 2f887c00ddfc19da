/* Steps: the places at which tests kill a process.
 *
 * A STEP() stands behind each store that another process can see. So a test can kill a
 * child between any two such stores, and check that other processes, or a successor,
 * can continue from the words that are left (`kill_at_step` in
 * tests/support/children.py). In production a step is one load and a branch that is
 * never taken.
 */

#ifndef MPBROKER_STEPS_H
#define MPBROKER_STEPS_H

#include "base/python_objects.h"

extern int64_t steps_done, step_to_die_at;
extern int counts_steps; /* 0: steps are not counted, until a test asks for it */

/* Kill this process by SIGKILL; does not return. */
void die_here(void);

#define STEP()                                                                        \
    do {                                                                              \
        if (counts_steps && ++steps_done == step_to_die_at)                           \
            die_here();                                                               \
    } while (0)

/* The module's functions die_at_step() and steps_done(). */
PyObject *die_at_step(PyObject *module, PyObject *number);
PyObject *get_steps_done(PyObject *module, PyObject *unused);

#endif
