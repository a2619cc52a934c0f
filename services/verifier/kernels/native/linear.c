/* Linear layers for few rows: float32 sums, weights as they are stored, every core of the caller's OpenMP team.
 *
 * Why in C: over 1 to 16 rows a layer costs what reading its weights costs. Laid out in panels that are read once, from
 * the first byte to the last, they come at the speed of the memory (docs/log.md); and weights of 4, 8 or 16 bits are made
 * floats in registers, which costs less than reading floats.
 *
 * Exactness: every element is summed up by fused multiply-adds in the order of the inputs, however many rows there are. What
 * the weights are, and how they lie in panels: panels.h, blocks.h.
 */
#include "panels.h"

/* Rows that a panel meets one after the other: their inputs stay in a cache, too. */
enum { CHUNK = 128, GROUP = 96, MOST_ROWS = 12 };

/* What is fetched from memory meanwhile: so many bytes for every input. */
struct ahead {
    const char *from;
    int64_t step;
};

/* One input of `count` rows, on which `rows` step, times its weights. */
INLINE void add_products(int count, int vecs, const float **rows, int64_t in_row, const vec *weight,
                         vec (*sum)[PANEL_VECS]) {
    EACH(r, count) {
        const vec in = spread(rows[r / 3][r % 3 * in_row]);
        EACH(v, vecs) sum[r][v] = fma_of(in, weight[v], sum[r][v]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < count; r += 3) rows[r / 3]++;
}

/* `count` rows times `vecs` vectors of a panel, from vector `first` on, over `inputs` inputs; `sums`, [count, PANEL],
 * begin with what they hold, or with zero. Inlined with constant `width` (see width_of), `count` and `vecs`. */
INLINE void multiply(int width, int count, int vecs, enum weights type, const float *in, int64_t in_row, const char *panel,
                     int first, int64_t inputs, struct ahead ahead, float *sums, int begun) {
    vec sum[MOST_ROWS][PANEL_VECS];
    /* Every third row: with the rows between at one and two times `in_row`, all are reached by few registers. */
    const float *rows[(MOST_ROWS + 2) / 3];
    for (int r = 0; r < count; r += 3) rows[r / 3] = in + r * in_row;
    EACH(r, count)
        EACH(v, vecs) sum[r][v] = begun ? load(sums + r * PANEL + v * LANES) : spread(0);
    if (width == 32) {
        const float *weights = (const float *)panel + first * LANES;
        for (int64_t k = 0; k < inputs; k++, weights += PANEL, ahead.from += ahead.step) {
            vec weight[PANEL_VECS];
            __builtin_prefetch(ahead.from);
            __builtin_prefetch(ahead.from + ahead.step / 2);
            EACH(v, vecs) weight[v] = load(weights + v * LANES);
            add_products(count, vecs, rows, in_row, weight, sum);
        }
    } else {
        for (int64_t k = 0; k < inputs; k += BLOCK) {
            struct scales made;
            _Alignas(64) uint32_t bytes[8 * PANEL];
            const uint32_t *words = read_any(width, type, vecs, panel, k, first, &made, bytes);
#pragma GCC unroll 8
            for (int part = 0; part < 32 / bits_in_word(width); part++) {
                vec scale[PANEL_VECS];
                read_again(width, type, part, vecs, panel, k, first, &made);
                if (width < 16)
                    EACH(v, vecs) scale[v] = made.scale[v] * shrunk(width, part);
#pragma GCC unroll 1
                for (int w = 0; w < bits_in_word(width); w++) {
                    vec weight[PANEL_VECS];
                    if (width == 4 || width == 8)
                        EACH(v, vecs) FROM_MEMORY(made.minimum[v]);
                    EACH(v, vecs) {
                        const uvec word = *(const uvec *)(words + w * PANEL + v * LANES);
                        weight[v] = weight_of(width, part, word, scale[v], v, &made);
                    }
                    add_products(count, vecs, rows, in_row, weight, sum);
                }
            }
        }
    }
    EACH(r, count)
        EACH(v, vecs) keep(sums + r * PANEL + v * LANES, sum[r][v]);
}

/* The same for any count of rows up to ROWS, or DIRECT_ROWS, over the whole panel. */
INLINE void multiply_some(int width, int64_t count, enum weights type, const float *in, int64_t in_row, const char *panel,
                          int64_t inputs, struct ahead ahead, float *sums, int begun) {
    switch (count) {
#define CASE(COUNT)                                                                                                      \
    case COUNT:                                                                                                          \
        if (width == 32 && COUNT <= ROWS)                                                                                \
            multiply(width, COUNT, PANEL_VECS, type, in, in_row, panel, 0, inputs, ahead, sums, begun);                  \
        else if (width != 32 && COUNT == 1)                                                                              \
            multiply(width, COUNT, PANEL_VECS, type, in, in_row, panel, 0, inputs, ahead, sums, begun);                  \
        else if (width != 32 && COUNT <= DIRECT_ROWS)                                                                    \
            for (int v = 0; v < PANEL_VECS; v += DIRECT_VECS)                                                            \
                multiply(width, COUNT, DIRECT_VECS, type, in, in_row, panel, v, inputs, ahead, sums + v * LANES, begun); \
        break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
    }
}

/* A panel's weights of `inputs` inputs from input `from` on, made floats: [inputs, PANEL]. */
INLINE void unpack(int width, enum weights type, const char *panel, int64_t from, int64_t inputs, float *into) {
    for (int64_t k = from; k < from + inputs; k += BLOCK) {
        struct scales made;
        _Alignas(64) uint32_t bytes[8 * PANEL];
        const uint32_t *words = read_any(width, type, PANEL_VECS, panel, k, 0, &made, bytes);
#pragma GCC unroll 8
        for (int part = 0; part < 32 / bits_in_word(width); part++) {
            read_again(width, type, part, PANEL_VECS, panel, k, 0, &made);
#pragma GCC unroll 1
            for (int w = 0; w < bits_in_word(width); w++, into += PANEL)
                EACH(v, PANEL_VECS) {
                    const vec scale = width == 16 ? spread(0) : made.scale[v] * shrunk(width, part);
                    const uvec word = *(const uvec *)(words + w * PANEL + v * LANES);
                    keep(into + v * LANES, weight_of(width, part, word, scale, v, &made));
                }
        }
    }
}

/* Apart from what unpacks, whose constants would take the registers. */
static __attribute__((noinline)) void multiply_floats(int64_t count, const float *in, int64_t in_row, const char *panel,
                                                      int64_t inputs, struct ahead ahead, float *sums, int begun) {
    multiply_some(32, count, FLOAT32, in, in_row, panel, inputs, ahead, sums, begun);
}

/* Any number of rows times one panel: a part of the inputs after the other, so that its weights stay in the nearest cache,
 * as floats, while all rows pass by, and the next part comes from memory meanwhile. */
INLINE void multiply_all(int width, enum weights type, int64_t rows, const float *in, int64_t inputs, const char *panel,
                         float *sums) {
    _Alignas(64) float floats[CHUNK * PANEL];
    if (rows <= (width == 32 ? ROWS : DIRECT_ROWS)) {
        const struct ahead ahead = {panel + AHEAD, 4 * PANEL};
        multiply_some(width, rows, type, in, inputs, panel, inputs, ahead, sums, 0);
        return;
    }
    const int64_t blocks = (rows + ROWS - 1) / ROWS;
    for (int64_t k = 0; k < inputs; k += CHUNK) {
        const int64_t depth = inputs - k < CHUNK ? inputs - k : CHUNK;
        const char *weights = panel + 4 * PANEL * k;
        struct ahead ahead = {weights + 4 * PANEL * depth, 4 * PANEL / blocks};
        if (width != 32) {
            unpack(width, type, panel, k, depth, floats);
            weights = (const char *)floats;
            /* Few bytes, which unpacking fetches by itself. */
            ahead = (struct ahead){weights, 0};
        }
        for (int64_t block = 0; block < blocks; block++, ahead.from += ahead.step * depth) {
            const int64_t row = block * rows / blocks, count = (block + 1) * rows / blocks - row;
            multiply_floats(count, in + row * inputs + k, inputs, weights, depth, ahead, sums + row * PANEL, k > 0);
        }
    }
}

/* What layers are asked; see outrider_linear. */
struct product {
    int64_t out_row;
    const float *in, *add;
    float *out;
};

/* A panel's outputs for `rows` rows, GROUP at most, from row `row` on. */
INLINE void one_panel(int width, const struct linear *layer, const struct product *asked, int64_t number, int64_t row,
                      int64_t rows) {
    const enum weights type = (enum weights)layer->type;
    const int64_t inputs = layer->inputs;
    _Alignas(64) float sums[GROUP * PANEL];
    const char *panel = (const char *)layer->weights + number * panel_bytes(type, inputs);
    multiply_all(width, type, rows, asked->in + row * inputs, inputs, panel, sums);
    for (int64_t r = 0; r < rows; r++)
        for (int v = 0; v < PANEL; v += LANES) {
            const int64_t at = (row + r) * asked->out_row + number * PANEL + v;
            vec sum = load(sums + r * PANEL + v);
            if (layer->bias) sum += load(layer->bias + number * PANEL + v);
            if (asked->add) sum += load(asked->add + at);
            keep(asked->out + at, sum);
        }
}

/* Group `group` of the `groups` of equal size that `rows` rows from row `first` on are in, times a panel. */
static void one_group(const struct linear *layer, const struct product *asked, int64_t number, int64_t first, int64_t rows,
                      int64_t group, int64_t groups) {
    const int64_t row = first + group * rows / groups, count = first + (group + 1) * rows / groups - row;
    switch (width_of((enum weights)layer->type)) {
        case 32: one_panel(32, layer, asked, number, row, count); break;
        case 16: one_panel(16, layer, asked, number, row, count); break;
        case FLOATS8: one_panel(FLOATS8, layer, asked, number, row, count); break;
        case TABLED: one_panel(TABLED, layer, asked, number, row, count); break;
        case 8: one_panel(8, layer, asked, number, row, count); break;
        case 4: one_panel(4, layer, asked, number, row, count); break;
    }
}

/* Groups are of equal size, since threads get equal numbers of panels: of 96 and 32 rows one thread would have the 96. */
void outrider_linear(const struct linear *layer, int64_t rows, const float *in, const float *add, float *out,
                     int64_t out_row) {
    const struct product asked = {.out_row = out_row, .in = in, .add = add, .out = out};
    const int64_t groups = (rows + GROUP - 1) / GROUP;
#pragma omp parallel for collapse(2) schedule(static)
    for (int64_t group = 0; group < groups; group++)
        for (int64_t number = 0; number < layer->panels; number++)
            one_group(layer, &asked, number, 0, rows, group, groups);
}

void outrider_in_order(const struct linear *layers, int64_t count, const int64_t *chosen, const int64_t *ends,
                       const float *in, float *out) {
    const int64_t inputs = layers->inputs;
    for (int64_t at = 0; at < count; at++) {
        const int64_t *order = layers[chosen[at]].order;
#pragma omp parallel for if ((ends[at] - (at ? ends[at - 1] : 0)) * inputs > ALONE)
        for (int64_t row = at ? ends[at - 1] : 0; row < ends[at]; row++)
            for (int64_t k = 0; k < inputs; k++) out[row * inputs + k] = in[row * inputs + order[k]];
    }
}

/* Threads take panels as they come, since layers have different numbers of rows. A panel stays in a cache for all of them. */
void outrider_linears(const struct linear *layers, int64_t count, const int64_t *chosen, const int64_t *ends,
                      const float *in, float *out, int64_t out_row) {
    const struct product asked = {.out_row = out_row, .in = in, .out = out};
    const int64_t panels = layers->panels;
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (int64_t at = 0; at < count; at++)
        for (int64_t number = 0; number < panels; number++) {
            const int64_t first = at ? ends[at - 1] : 0, rows = ends[at] - first, groups = (rows + GROUP - 1) / GROUP;
            for (int64_t group = 0; group < groups; group++)
                one_group(layers + chosen[at], &asked, number, first, rows, group, groups);
        }
}
