/* The results of functions that may leave their work to Python. */

#ifndef MPBROKER_OUTCOME_H
#define MPBROKER_OUTCOME_H

enum outcome {
    FAILED = -1, /* an exception is set */
    /* The core does not support this case, or cannot decide it. Nothing was done,
     * unless the function says otherwise; the Python twin does all of the work. */
    LEFT_TO_PYTHON = 0,
    DONE = 1,
    MUST_WAIT = 2, /* only of fetches: there are too few records for an answer, yet */
};

#endif
