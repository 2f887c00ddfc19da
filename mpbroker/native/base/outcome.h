/* How a function ends that may leave its work to Python. */

#ifndef MPBROKER_OUTCOME_H
#define MPBROKER_OUTCOME_H

enum outcome {
    FAILED = -1, /* an exception is set */
    /* The core does not support this case, or cannot decide it. Nothing of it was done,
     * unless the function says otherwise; the Python beside it does all of it. */
    LEFT_TO_PYTHON = 0,
    DONE = 1,
    MUST_WAIT = 2, /* only of fetches: too little to answer with, yet */
};

#endif
