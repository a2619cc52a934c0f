/* Rows that step states which hold values by their keys; see keyed_states.c. */
#ifndef OUTRIDER_KEYED_STATES_H
#define OUTRIDER_KEYED_STATES_H
#include "row_paths.h"
#include "vectors.h"

/* What the rows of a pass are given; mirrored by step_kernel.py. */
struct keyed_rows {
    struct row_paths paths;
    int64_t heads, key_heads, keys, values, scratch_per_thread, threads;
    int64_t per_key;        /* whether factor has a number for each key, rather than one */
    const float *key;       /* [key heads, rows, keys] */
    const float *query;     /* [key heads, rows, keys] */
    const float *value;     /* [heads, rows, values] */
    const float *factor;    /* [heads, rows, 1 or keys] the state decays by it first, or none: by e^(time * decay) */
    const float *time;      /* [heads, rows, values], or none */
    const float *decay;     /* [heads, keys, values], or none */
    const float *part;      /* [heads, rows] how much is written of what the state lacks of the value, or none: the value is */
    float *state;           /* [slots, heads, keys, values] */
    float *made;            /* [heads, rows, values] */
    float *scratch;         /* [threads, scratch_per_thread] */
};

/* Step all rows. keys is a multiple of 4, values of COLUMNS. */
void outrider_step_keyed(const struct keyed_rows *all);
#endif
