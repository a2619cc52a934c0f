/* A linear layer's weights, and how it is called; see linear.c. */
#ifndef OUTRIDER_LINEAR_H
#define OUTRIDER_LINEAR_H
#include "vectors.h"

/* Mirrored by linear.py. */
struct linear {
    const void *weights;
    const float *bias; /* [panels * PANEL], or none */
    int64_t type, inputs, panels;
};

/* out = in * weights + bias + add: in [rows, inputs]; out panels * PANEL columns of [rows, out_row]; add likewise, or none: it
 * may be out. */
void outrider_linear(const struct linear *layer, int64_t rows, const float *in, const float *add, float *out,
                     int64_t out_row);
#endif
