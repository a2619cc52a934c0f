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

/* The same of several layers that are alike in inputs and panels, each for rows of its own: `count` of them, layers[chosen[n]]
 * for the rows before ends[n] and from ends[n - 1] on. */
void outrider_linears(const struct linear *layers, int64_t count, const int64_t *chosen, const int64_t *ends,
                      const float *in, float *out, int64_t out_row);
#endif
