/* The ids of the greatest logits of some rows.
 *
 * Why in C: beside a pass of few rows, each call into torch costs as much as reading the whole row.
 */
#include "likeliest.h"

enum { COMPARED = 4 * LANES, MOST = 64 };

/* Puts a value behind all that are not smaller, and drops the last one if there are `count`. Returns how many there are. */
INLINE int64_t insert(float value, int64_t id, int64_t count, int64_t found, float *values, int64_t *ids) {
    int64_t at = found < count ? found : count - 1;
    for (; at > 0 && values[at - 1] < value; at--) values[at] = values[at - 1], ids[at] = ids[at - 1];
    values[at] = value;
    ids[at] = id;
    return found < count ? found + 1 : count;
}

/* Returns whether there are so many above -inf. What is not a number is passed over. */
static int likeliest(const float *row, int64_t vocabulary, int64_t count, int64_t *ids) {
    float values[MOST], least = -__builtin_inff();
    int64_t found = 0, at = 0;
    while (at < vocabulary) {
        int64_t end = at + COMPARED;
        if (end <= vocabulary) {
            const vec limit = spread(least);
            ivec above = load(row + at) > limit;
            for (int v = 1; v < COMPARED / LANES; v++) above |= load(row + at + v * LANES) > limit;
            if (!any(above)) {
                at = end;
                continue;
            }
        } else {
            end = vocabulary;
        }
        for (; at < end; at++)
            if (row[at] > least) {
                found = insert(row[at], at, count, found, values, ids);
                if (found == count) least = values[count - 1];
            }
    }
    return found == count;
}

int outrider_likeliest(const float *logits, int64_t vocabulary, int64_t stride, const int64_t *rows, int64_t row_count,
                       int64_t count, int64_t *ids) {
    if (count < 1 || count > MOST) return 0;
    for (int64_t at = 0; at < row_count; at++)
        if (!likeliest(logits + rows[at] * stride, vocabulary, count, ids + at * count)) return 0;
    return 1;
}
