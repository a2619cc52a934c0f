/* Rows that step states of some numbers for each channel; see vector_steps.c. */
#ifndef OUTRIDER_VECTOR_STEPS_H
#define OUTRIDER_VECTOR_STEPS_H
#include "row_paths.h"
#include "vectors.h"

/* Mirrored by vector_kernel.py. The width is a multiple of COLUMNS. */
struct gated_rows {
    struct row_paths paths;
    int64_t width, threads;
    int64_t apart;       /* numbers from one row of factor and added to the next */
    const float *factor; /* [rows, width] by which the state decays */
    const float *added;  /* [rows, width] what is added then */
    float *state;        /* [slots, width] */
    float *made;         /* [rows, width] the states */
};

/* As above. A state is a weighted sum of values, the sum of weights, and the largest exponent so far, which scales both. */
struct averaged_rows {
    struct row_paths paths;
    int64_t width, threads, scratch_per_thread;
    int64_t apart;       /* numbers from one row of key and value to the next */
    const float *key;    /* [rows, width] */
    const float *value;  /* [rows, width] */
    const float *decay;  /* [width] added to the exponents of earlier rows */
    const float *bonus;  /* [width] added to that of a row's own key */
    float *state;        /* [slots, 3, width] */
    float *made;         /* [rows, width] */
    float *scratch;      /* [threads, scratch_per_thread], each at least [1 + nodes of a request, 3, 256] */
};

void outrider_step_gated(const struct gated_rows *all);
void outrider_step_mean(const struct averaged_rows *all);
#endif
