/* Short causal convolutions of the rows of a pass; see convolved_rows.c. */
#ifndef OUTRIDER_CONVOLVED_ROWS_H
#define OUTRIDER_CONVOLVED_ROWS_H
#include "vectors.h"

/* What is convolved; mirrored by vector_kernel.py. A row's inputs before it are numbered: first those that the requests' states
 * hold, taps - 1 each, then the rows' own. */
struct convolved_rows {
    int64_t accepted, rows; /* rows that come before the pass's own, and all of them */
    int64_t requests, channels, taps, threads;
    int64_t apart;          /* numbers from one row of `given` to the next */
    const int64_t *slot;    /* [requests] of its state */
    const int64_t *end;     /* [requests] the row at the end of its chain */
    const int64_t *window;  /* [rows, taps - 1] numbers of the inputs before a row, the oldest first */
    const float *given;     /* [rows, channels] */
    const float *weight;    /* [channels, taps]; the last tap is the row's own */
    const float *bias;      /* [channels], or none */
    float *state;           /* [slots, taps - 1, channels], the oldest first */
    float *made;            /* [rows - accepted, channels] */
};

/* Convolve the pass's own rows, and let states be those at the ends of the chains. channels is a multiple of COLUMNS, and taps is
 * from 1 to 8. */
void outrider_convolve(const struct convolved_rows *all);
#endif
