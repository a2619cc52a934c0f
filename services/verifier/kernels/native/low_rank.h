/* Products of low rank that are added to those of linear layers; see low_rank.c. */
#ifndef OUTRIDER_LOW_RANK_H
#define OUTRIDER_LOW_RANK_H
#include "vectors.h"

/* Parts of the inputs that are summed up apart: threads share one row's sums. Mirrored by low_rank_kernel.py. */
enum { PIECES = 4 };

/* up * scale * (down * x), beside one linear layer. Mirrored by low_rank_kernel.py, as are the next two. */
struct low_rank {
    const void *down; /* [inputs, rank], floats, or bfloat16 numbers if `halves` */
    const void *up;   /* [outputs / COLUMNS, rank, COLUMNS], likewise */
    float scale;
    int32_t halves;
    int64_t inputs, rank, outputs; /* the rank in whole COLUMNS; it and the last outputs are filled up with zeros */
    int64_t at;                    /* where its outputs begin in a row of `out` */
    int64_t begin;                 /* where its inner numbers begin in a row of `inner` */
};

/* Those of one input. */
struct low_ranks {
    struct low_rank part[3];
    int64_t count;
};

/* Neighbouring rows, and what is added to theirs: by[place]. */
struct span {
    const struct low_ranks *by;
    int64_t first, rows;
};

/* out += up * (down * in), for all spans: in [rows, inputs], inner [rows, inner_row], out [rows, out_row]. */
void outrider_low_rank(const struct span *spans, int64_t count, int64_t place, const float *in, float *inner, int64_t inner_row,
                       float *out, int64_t out_row);
#endif
