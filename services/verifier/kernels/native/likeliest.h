/* Which logits of a row are greatest; see likeliest.c. */
#ifndef OUTRIDER_LIKELIEST_H
#define OUTRIDER_LIKELIEST_H
#include "vectors.h"

/* For each of `rows`, the ids of the `count` greatest of its logits, greatest first, of equals the first one first.
 *
 * logits: a row every `stride` floats. Returns 0, and ids mean nothing, if a row has too few numbers above -inf or `count` is
 * not from 1 to 64.
 */
int outrider_likeliest(const float *logits, int64_t vocabulary, int64_t stride, const int64_t *rows, int64_t row_count,
                       int64_t count, int64_t *ids);
#endif
