/* Low-rank products beside those of linear layers, as adapters have them: out += up * (down * in), row by row.
 *
 * Exactness: a row's numbers depend on the row alone. Each sum goes strictly from its first term to its last, in every
 * instruction set, and is added to what the layer has made once it is complete.
 */
#include "low_rank.h"

/* Outputs that one thread makes at a time, and multiplications that are worth waking other cores for. */
enum { SLICE = 256, ALONE = 32768 };

typedef uint16_t half_vec __attribute__((vector_size(LANES * sizeof(uint16_t)), aligned(2)));

/* LANES weights from number `at` on. A bfloat16 number is the upper half of the float that it is. */
INLINE vec weights_at(int halves, const void *weights, int64_t at) {
    if (!halves) return load((const float *)weights + at);
    const half_vec upper = *(const half_vec *)((const uint16_t *)weights + at);
    return (vec)(__builtin_convertvector(upper, uvec) << 16);
}

/* inner = scale * (down * in). */
INLINE void shrink_by(int halves, const struct low_rank *part, const float *in, float *inner) {
    for (int64_t at = 0; at < part->rank; at += COLUMNS) {
        vec sums[COLUMN_VECS] = {0};
        for (int64_t k = 0, from = at; k < part->inputs; k++, from += part->rank)
            for (int v = 0; v < COLUMN_VECS; v++)
                sums[v] = fma_of(spread(in[k]), weights_at(halves, part->down, from + v * LANES), sums[v]);
        for (int v = 0; v < COLUMN_VECS; v++) keep(inner + at + v * LANES, sums[v] * spread(part->scale));
    }
}

static void shrink(const struct low_rank *part, const float *in, float *inner) {
    if (part->halves)
        shrink_by(1, part, in, inner);
    else
        shrink_by(0, part, in, inner);
}

/* out += up * inner, for the outputs from `at`, whole COLUMNS, to before `end`. */
INLINE void expand_by(int halves, const struct low_rank *part, int64_t at, int64_t end, const float *inner, float *out) {
    for (; at < end; at += COLUMNS) {
        _Alignas(64) float made[COLUMNS];
        vec sums[COLUMN_VECS] = {0};
        for (int64_t r = 0, from = at * part->rank; r < part->rank; r++, from += COLUMNS)
            for (int v = 0; v < COLUMN_VECS; v++)
                sums[v] = fma_of(spread(inner[r]), weights_at(halves, part->up, from + v * LANES), sums[v]);
        if (at + COLUMNS <= end) {
            for (int v = 0; v < COLUMN_VECS; v++) keep(out + at + v * LANES, load(out + at + v * LANES) + sums[v]);
            continue;
        }
        for (int v = 0; v < COLUMN_VECS; v++) keep(made + v * LANES, sums[v]);
        for (int64_t lane = 0; lane < end - at; lane++) out[at + lane] += made[lane];
    }
}

static void expand(const struct low_rank *part, int64_t at, int64_t end, const float *inner, float *out) {
    if (part->halves)
        expand_by(1, part, at, end, inner, out);
    else
        expand_by(0, part, at, end, inner, out);
}

void outrider_low_rank(const struct low_rank *parts, int64_t count, int64_t rows, const float *in, float *inner,
                       int64_t inner_row, float *out, int64_t out_row) {
    int64_t shrinking = 0, expanding = 0, longest = 0;
    for (int64_t part = 0; part < count; part++) {
        const struct low_rank *own = parts + part;
        shrinking += rows * own->rank * own->inputs;
        expanding += rows * own->rank * own->outputs;
        longest = own->outputs > longest ? own->outputs : longest;
    }
#pragma omp parallel for collapse(2) if (rows * count > 1 && shrinking > ALONE)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t part = 0; part < count; part++)
            shrink(parts + part, in + row * parts[part].inputs, inner + row * inner_row + parts[part].begin);
#pragma omp parallel for collapse(3) if (expanding > ALONE)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t part = 0; part < count; part++)
            for (int64_t at = 0; at < longest; at += SLICE) {
                const struct low_rank *own = parts + part;
                const int64_t end = at + SLICE < own->outputs ? at + SLICE : own->outputs;
                expand(own, at, end, inner + row * inner_row + own->begin, out + row * out_row + own->at);
            }
}
