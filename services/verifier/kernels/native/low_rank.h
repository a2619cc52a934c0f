/* Products of low rank that are added to those of linear layers; see low_rank.c. */
#ifndef OUTRIDER_LOW_RANK_H
#define OUTRIDER_LOW_RANK_H
#include "vectors.h"

/* up * scale * (down * x), beside one linear layer. Mirrored by low_rank_kernel.py. */
struct low_rank {
    const void *down; /* [inputs, rank], floats, or bfloat16 numbers if `halves` */
    const void *up;   /* [outputs / COLUMNS, rank, COLUMNS], likewise */
    float scale;
    int32_t halves;
    int64_t inputs, rank, outputs; /* the rank in whole COLUMNS; it and the last outputs are filled up with zeros */
    int64_t at;                    /* where its outputs begin in a row of `out` */
    int64_t begin;                 /* where its inner numbers begin in a row of `inner` */
};

/* out += up * (down * in), for `count` layers of one input: in [rows, inputs], inner [rows, inner_row], out [rows, out_row]. */
void outrider_low_rank(const struct low_rank *parts, int64_t count, int64_t rows, const float *in, float *inner,
                       int64_t inner_row, float *out, int64_t out_row);
#endif
