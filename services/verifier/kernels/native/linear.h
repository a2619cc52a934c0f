/* A linear layer's weights, and how it is called; see linear.c. */
#ifndef OUTRIDER_LINEAR_H
#define OUTRIDER_LINEAR_H
#include "vectors.h"

/* Fewer numbers than this are not worth waking other cores for. */
enum { ALONE = 16384 };

/* Mirrored by linear_kernel.py. */
struct linear {
    const void *weights;
    const float *bias; /* [panels * PANEL], or none */
    int64_t type, inputs, panels;
    const int64_t *order; /* [inputs] which number of a row meets each of the weights; or none: they lie in the same order */
};

/* out = in * weights + bias + add: in [rows, inputs]; out panels * PANEL columns of [rows, out_row]; add likewise, or none: it
 * may be out. */
void outrider_linear(const struct linear *layer, int64_t rows, const float *in, const float *add, float *out,
                     int64_t out_row);

/* The same of several layers that are alike in inputs and panels, each for rows of its own: `count` of them, layers[chosen[n]]
 * for the rows before ends[n] and from ends[n - 1] on. */
void outrider_linears(const struct linear *layers, int64_t count, const int64_t *chosen, const int64_t *ends,
                      const float *in, float *out, int64_t out_row);

/* Rows in the order of their layer's weights, which the products above are given: [rows, inputs], as for outrider_linears. */
void outrider_in_order(const struct linear *layers, int64_t count, const int64_t *chosen, const int64_t *ends,
                       const float *in, float *out);
#endif
