/* Linear layers for few rows: float32 sums, weights as they are stored, every core of the caller's OpenMP team.
 *
 * Why in C: over 1 to 16 rows a layer costs what reading its weights costs. Laid out in panels that are read once, from
 * the first byte to the last, they come at the speed of the memory (docs/log.md); and weights of 4, 8 or 16 bits are made
 * floats in registers, which costs less than reading floats.
 *
 * Exactness: every element is summed up by fused multiply-adds in the order of the inputs, however many rows there are. A
 * stored weight becomes the very float that unpacking the whole file would have given: d, of 11 significant bits, times
 * a number of up to 8 bits is exact, so that only adding the minimum rounds, once, as it does there. Where each block has a
 * zero point, the weight is d * (number - zero point): the minimum, d times the zero point, is exact, too, so the sum rounds
 * once to that product. as_blocks.py lets only such zero points come here whose difference from every number is exact.
 *
 * A panel is PANEL outputs side by side. Of float32 it is [inputs, PANEL]. Else it is made of blocks of BLOCK inputs:
 * scales (halves, [PANEL]), minima or zero points (of Q4_1, or of Q8_Z and Q4_Z; likewise), then words [bits, PANEL] of
 * 32 bits: word w of an output holds its inputs w, bits + w, 2 * bits + w, ..., the first one in its lowest bits.
 */
#include "linear.h"

/* Rows that a panel meets one after the other: their inputs stay in a cache, too. */
enum { BLOCK = 32, CHUNK = 128, GROUP = 96, MOST_ROWS = 12, AHEAD = 4096 };
enum weights { FLOAT32, BFLOAT16, Q8_0, Q4_0, Q4_1, Q8_Z, Q4_Z };

INLINE int bits_of(enum weights type) { return type == BFLOAT16 ? 16 : type == Q8_0 || type == Q8_Z ? 8 : 4; }

/* Whether each block of an output has a zero point beside its scale. */
INLINE int has_zeros(enum weights type) { return type == Q8_Z || type == Q4_Z; }

INLINE int64_t scale_bytes(enum weights type) {
    return type == BFLOAT16 ? 0 : type == Q4_1 || has_zeros(type) ? 4 * PANEL : 2 * PANEL;
}

INLINE int64_t block_bytes(enum weights type) {
    return type == FLOAT32 ? 4 * BLOCK * PANEL : scale_bytes(type) + 4 * bits_of(type) * PANEL;
}

/* Unrolled, so that what is indexed by it lies in registers. */
#define EACH(i, count) _Pragma("GCC unroll 16") for (int i = 0; i < (count); i++)

/* What a block's weights are made with: of vectors `v` of its panel. */
struct scales {
    vec scale[PANEL_VECS], minimum[PANEL_VECS];
};

INLINE void read_scales(enum weights type, int vecs, const char *block, int first, struct scales *into) {
    const uint16_t *halves = (const uint16_t *)block + first * LANES;
    if (type == BFLOAT16 || type == FLOAT32) return;
    EACH(v, vecs) {
        const vec scale = into->scale[v] = load_halves(halves + v * LANES);
        if (type == Q4_1) into->minimum[v] = load_halves(halves + PANEL + v * LANES);
        if (has_zeros(type)) into->minimum[v] = scale * -load_halves(halves + PANEL + v * LANES);
        /* Stored from 0 on. */
        if (type == Q4_0) into->minimum[v] = scale * -8.0f;
        if (type == Q8_0) into->minimum[v] = scale * -128.0f;
    }
}

/* Number `part` of a word as a float. Left where it stands in the word, it is 2^(bits * part) times too large: `scale` is
 * that much smaller, which costs nothing, where shifting would. */
INLINE vec weight_of(enum weights type, int part, uvec word, vec scale, vec minimum) {
    const int bits = bits_of(type), shift = bits * part;
    if (type == BFLOAT16) return (vec)(part ? word & 0xffff0000u : word << 16);
    const uvec number = shift + bits == 32 ? word >> shift : word & (((1u << bits) - 1) << shift);
    return fma_of(to_floats(number), scale, minimum);
}

/* What `part` takes off the scale: see weight_of. */
INLINE float shrunk(enum weights type, int part) {
    const int shift = bits_of(type) * part;
    return shift + bits_of(type) == 32 ? 1.0f : 1.0f / (float)(1u << shift);
}

INLINE void prefetch(const char *from, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + AHEAD + at);
}

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
 * begin with what they hold, or with zero. Inlined with constant `type`, `count` and `vecs`. */
INLINE void multiply(enum weights type, int count, int vecs, const float *in, int64_t in_row, const char *panel, int first,
                     int64_t inputs, struct ahead ahead, float *sums, int begun) {
    vec sum[MOST_ROWS][PANEL_VECS];
    /* Every third row: with the rows between at one and two times `in_row`, all are reached by few registers. */
    const float *rows[(MOST_ROWS + 2) / 3];
    for (int r = 0; r < count; r += 3) rows[r / 3] = in + r * in_row;
    EACH(r, count)
        EACH(v, vecs) sum[r][v] = begun ? load(sums + r * PANEL + v * LANES) : spread(0);
    if (type == FLOAT32) {
        const float *weights = (const float *)panel + first * LANES;
        for (int64_t k = 0; k < inputs; k++, weights += PANEL, ahead.from += ahead.step) {
            vec weight[PANEL_VECS];
            __builtin_prefetch(ahead.from);
            __builtin_prefetch(ahead.from + ahead.step / 2);
            EACH(v, vecs) weight[v] = load(weights + v * LANES);
            add_products(count, vecs, rows, in_row, weight, sum);
        }
    } else {
        const int bits = bits_of(type);
        for (int64_t k = 0; k < inputs; k += BLOCK, panel += block_bytes(type)) {
            struct scales made;
            prefetch(panel, block_bytes(type));
            read_scales(type, vecs, panel, first, &made);
            const uint32_t *words = (const uint32_t *)(panel + scale_bytes(type)) + first * LANES;
#pragma GCC unroll 8
            for (int part = 0; part < 32 / bits; part++) {
                vec scale[PANEL_VECS];
                if (type != BFLOAT16)
                    EACH(v, vecs) scale[v] = made.scale[v] * shrunk(type, part);
#pragma GCC unroll 1
                for (int w = 0; w < bits; w++) {
                    vec weight[PANEL_VECS];
                    EACH(v, vecs) {
                        const uvec word = *(const uvec *)(words + w * PANEL + v * LANES);
                        weight[v] = weight_of(type, part, word, scale[v], made.minimum[v]);
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
INLINE void multiply_some(enum weights type, int64_t count, const float *in, int64_t in_row, const char *panel,
                          int64_t inputs, struct ahead ahead, float *sums, int begun) {
    switch (count) {
#define CASE(COUNT)                                                                                                \
    case COUNT:                                                                                                    \
        if (type == FLOAT32 && COUNT <= ROWS)                                                                      \
            multiply(type, COUNT, PANEL_VECS, in, in_row, panel, 0, inputs, ahead, sums, begun);                   \
        else if (type != FLOAT32 && COUNT == 1)                                                                    \
            multiply(type, COUNT, PANEL_VECS, in, in_row, panel, 0, inputs, ahead, sums, begun);                   \
        else if (type != FLOAT32 && COUNT <= DIRECT_ROWS)                                                          \
            for (int v = 0; v < PANEL_VECS; v += DIRECT_VECS)                                                      \
                multiply(type, COUNT, DIRECT_VECS, in, in_row, panel, v, inputs, ahead, sums + v * LANES, begun);  \
        break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
    }
}

/* A panel's weights of `inputs` inputs, made floats: [inputs, PANEL]. */
INLINE void unpack(enum weights type, const char *panel, int64_t inputs, float *into) {
    const int bits = bits_of(type);
    for (int64_t k = 0; k < inputs; k += BLOCK, panel += block_bytes(type)) {
        struct scales made;
        prefetch(panel, block_bytes(type));
        read_scales(type, PANEL_VECS, panel, 0, &made);
        const uint32_t *words = (const uint32_t *)(panel + scale_bytes(type));
#pragma GCC unroll 8
        for (int part = 0; part < 32 / bits; part++)
#pragma GCC unroll 1
            for (int w = 0; w < bits; w++, into += PANEL)
                EACH(v, PANEL_VECS) {
                    const vec scale = type == BFLOAT16 ? spread(0) : made.scale[v] * shrunk(type, part);
                    const uvec word = *(const uvec *)(words + w * PANEL + v * LANES);
                    keep(into + v * LANES, weight_of(type, part, word, scale, made.minimum[v]));
                }
    }
}

/* Apart from what unpacks, whose constants would take the registers. */
static __attribute__((noinline)) void multiply_floats(int64_t count, const float *in, int64_t in_row, const char *panel,
                                                      int64_t inputs, struct ahead ahead, float *sums, int begun) {
    multiply_some(FLOAT32, count, in, in_row, panel, inputs, ahead, sums, begun);
}

/* Any number of rows times one panel: a part of the inputs after the other, so that its weights stay in the nearest cache,
 * as floats, while all rows pass by, and the next part comes from memory meanwhile. */
INLINE void multiply_all(enum weights type, int64_t rows, const float *in, int64_t inputs, const char *panel, float *sums) {
    _Alignas(64) float floats[CHUNK * PANEL];
    if (rows <= (type == FLOAT32 ? ROWS : DIRECT_ROWS)) {
        const struct ahead ahead = {panel + AHEAD, 4 * PANEL};
        multiply_some(type, rows, in, inputs, panel, inputs, ahead, sums, 0);
        return;
    }
    const int64_t blocks = (rows + ROWS - 1) / ROWS;
    for (int64_t k = 0; k < inputs; k += CHUNK) {
        const int64_t depth = inputs - k < CHUNK ? inputs - k : CHUNK, bytes = depth * (block_bytes(type) / BLOCK);
        const char *weights = panel + k / BLOCK * block_bytes(type);
        struct ahead ahead = {weights + bytes, bytes / depth / blocks};
        if (type != FLOAT32) {
            unpack(type, weights, depth, floats);
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

/* What a layer is asked; see outrider_linear. */
struct product {
    int64_t rows, out_row;
    const float *in, *add;
    float *out;
};

/* A panel's outputs for GROUP rows or fewer, from row `row` on. */
INLINE void one_panel(enum weights type, const struct linear *layer, const struct product *asked, int64_t number,
                      int64_t row) {
    const int64_t inputs = layer->inputs;
    const int64_t panel_bytes = type == FLOAT32 ? 4 * inputs * PANEL : inputs / BLOCK * block_bytes(type);
    const int64_t rows = asked->rows - row < GROUP ? asked->rows - row : GROUP;
    _Alignas(64) float sums[GROUP * PANEL];
    multiply_all(type, rows, asked->in + row * inputs, inputs, (const char *)layer->weights + number * panel_bytes, sums);
    for (int64_t r = 0; r < rows; r++)
        for (int v = 0; v < PANEL; v += LANES) {
            const int64_t at = (row + r) * asked->out_row + number * PANEL + v;
            vec sum = load(sums + r * PANEL + v);
            if (layer->bias) sum += load(layer->bias + number * PANEL + v);
            if (asked->add) sum += load(asked->add + at);
            keep(asked->out + at, sum);
        }
}

void outrider_linear(const struct linear *layer, int64_t rows, const float *in, const float *add, float *out,
                     int64_t out_row) {
    const struct product asked = {.rows = rows, .out_row = out_row, .in = in, .add = add, .out = out};
#pragma omp parallel for collapse(2) schedule(static)
    for (int64_t row = 0; row < rows; row += GROUP)
        for (int64_t number = 0; number < layer->panels; number++) switch (layer->type) {
                case FLOAT32: one_panel(FLOAT32, layer, &asked, number, row); break;
                case BFLOAT16: one_panel(BFLOAT16, layer, &asked, number, row); break;
                case Q8_0: one_panel(Q8_0, layer, &asked, number, row); break;
                case Q4_0: one_panel(Q4_0, layer, &asked, number, row); break;
                case Q4_1: one_panel(Q4_1, layer, &asked, number, row); break;
                case Q8_Z: one_panel(Q8_Z, layer, &asked, number, row); break;
                case Q4_Z: one_panel(Q4_Z, layer, &asked, number, row); break;
            }
}

/* One output's block of BLOCK inputs from a GGUF file, or as many bfloat16 numbers, to its place in the panel. */
INLINE void pack_block(enum weights type, const unsigned char *stored, char *panel_block, int64_t lane) {
    const int bits = bits_of(type);
    uint16_t *halves = (uint16_t *)panel_block + lane;
    uint32_t *words = (uint32_t *)(panel_block + scale_bytes(type)) + lane;
    for (int64_t scale = 0; scale < scale_bytes(type) / (2 * PANEL); scale++, stored += 2)
        memcpy(halves + scale * PANEL, stored, 2);
    for (int w = 0; w < bits; w++) {
        uint32_t word = 0;
        for (int part = 0; part < 32 / bits; part++) {
            const int k = part * bits + w;
            uint32_t number;
            if (type == BFLOAT16)
                number = stored[2 * k] | (uint32_t)stored[2 * k + 1] << 8;
            else if (type == Q8_0)
                /* From -128..127 to 0..255. */
                number = stored[k] ^ 0x80u;
            else if (type == Q8_Z)
                number = stored[k];
            else
                /* The first half lies in the lower bits. */
                number = k < BLOCK / 2 ? stored[k] & 15 : stored[k - BLOCK / 2] >> 4;
            word |= number << (bits * part);
        }
        words[w * PANEL] = word;
    }
}

/* Lay a stored matrix out in panels: [outputs, stored_row bytes] in, outputs that are missing from the last panel are 0. */
void outrider_pack(const struct linear *layer, const unsigned char *stored, int64_t stored_row, int64_t outputs, char *out) {
    const int64_t blocks = layer->inputs / BLOCK, bytes = block_bytes(layer->type);
#pragma omp parallel for schedule(static)
    for (int64_t panel = 0; panel < layer->panels; panel++) {
        memset(out + panel * blocks * bytes, 0, (size_t)(blocks * bytes));
        for (int64_t lane = 0; lane < PANEL && panel * PANEL + lane < outputs; lane++) {
            const unsigned char *row = stored + (panel * PANEL + lane) * stored_row;
            for (int64_t block = 0; block < blocks; block++) {
                char *to = out + (panel * blocks + block) * bytes;
                const unsigned char *from = row + block * (stored_row / blocks);
                switch (layer->type) {
                    case BFLOAT16: pack_block(BFLOAT16, from, to, lane); break;
                    case Q8_0: pack_block(Q8_0, from, to, lane); break;
                    case Q4_0: pack_block(Q4_0, from, to, lane); break;
                    case Q4_1: pack_block(Q4_1, from, to, lane); break;
                    case Q8_Z: pack_block(Q8_Z, from, to, lane); break;
                    case Q4_Z: pack_block(Q4_Z, from, to, lane); break;
                }
            }
        }
    }
}
