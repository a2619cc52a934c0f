/* How weights become floats in registers. How they lie in panels: blocks.h.
 *
 * Exactness: a stored weight becomes the very float that unpacking the whole file would have given. A scale has 11
 * significant bits, or 15 to 18 where it is d, of 11, times a scale of 4 to 7; times a number it has at most 24, and is
 * exact. So only adding the minimum rounds, once, as it does there. A minimum of the K types is dmin times
 * 4 or 6 bits, exact, too. Where each block has a zero point, the weight is d * (number - zero point): the minimum, d times the
 * zero point, is exact as well, so the sum rounds once to that product. as_blocks.py lets only such zero points come here
 * whose difference from every number is exact. Numbers with a sign are stored from 0 on, and what they are less than that is
 * a minimum, too. So are those that codes stand for.
 *
 * Of E4M3, and where a table has floats, a weight is number * scale, which rounds once, as it does where the file is expanded.
 * NaN among the numbers of E4M3, and scales from 256 on, never come here (as_blocks.py). Nor do powers of two of MXFP4 above 2^124 (stored_blocks.py).
 */
#ifndef OUTRIDER_PANELS_H
#define OUTRIDER_PANELS_H
#include "blocks.h"

enum { AHEAD = 4096 };

/* What a block's weights are made with, of some vectors `v` of its panel. */
struct scales {
    vec scale[PANEL_VECS], minimum[PANEL_VECS];
    /* Where codes stand for floats. */
    const float *table;
};

/* How much greater numbers are where they are stored. */
INLINE float lift_of(enum weights type) {
    switch (type) {
        case Q3_K: return 4.0f;
        case Q4_0: return 8.0f;
        case MXFP4: return 12.0f;
        case Q5_0: return 16.0f;
        case Q6_K: return 32.0f;
        case Q8_0: case IQ4_NL: case IQ4_XS: return 128.0f;
        default: return 0.0f;
    }
}

/* Of a block of the K types, or of its half `half` where each has scales of its own. */
INLINE void read_k_scales(enum weights type, int half, int vecs, const char *head, const char *block, int first,
                          struct scales *into) {
    const uint16_t *halves = (const uint16_t *)head + first * LANES;
    const uint8_t *bytes = (const uint8_t *)block + (has_halves(type) ? half * PANEL : 0) + first * LANES;
    EACH(v, vecs) {
        const vec d = load_halves(halves + v * LANES);
        const uvec scale = load_bytes(bytes + v * LANES);
        if (!has_minima(type)) {
            into->scale[v] = d * (to_floats(scale) - (type == Q6_K ? 128.0f : 32.0f));
            into->minimum[v] = into->scale[v] * -lift_of(type);
            continue;
        }
        const uvec minimum = type == Q2_K ? scale >> 4 : load_bytes(bytes + PANEL + v * LANES);
        into->scale[v] = d * to_floats(type == Q2_K ? scale & 15 : scale);
        into->minimum[v] = -(load_halves(halves + PANEL + v * LANES) * to_floats(minimum));
    }
}

/* Half of 2 to the power of `stored` - 127, of which a float has the bits, but for those of 0. */
INLINE vec half_of_power(uvec stored) {
    return (vec)((ivec)(stored << 23) | (((ivec)stored == 0) & 0x00400000)) * 0.5f;
}

/* bitsandbytes' tables, which stored_blocks.py has, too, and floats of four bits, whose highest bit is the sign. */
static const float NF4_NUMBERS[16] = {
    -1.0f,        -0x1.647362p-1f, -0x1.0cd66p-1f,  -0x1.94654p-2f,  -0x1.23449ap-2f, -0x1.7a6a7ep-3f,
    -0x1.74f0e2p-4f, 0.0f,         0x1.45f5fep-4f,  0x1.4995c6p-3f,  0x1.f809bap-3f,  0x1.5a0674p-2f,
    0x1.c3497p-2f,   0x1.200f56p-1f, 0x1.722766p-1f, 1.0f,
};
static const float FP4_NUMBERS[16] = {
    0.0f, 0x1.555556p-8f,  0x1.555556p-1f,  1.0f,  0x1.555556p-2f,  0.5f,  0x1.555556p-3f,  0.25f,
    0.0f, -0x1.555556p-8f, -0x1.555556p-1f, -1.0f, -0x1.555556p-2f, -0.5f, -0x1.555556p-3f, -0.25f,
};
static const float E2M1_NUMBERS[16] = {
    0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f,
};

/* Of a half where each has a scale. */
INLINE void read_floats(enum weights type, int half, int vecs, const char *block, int first, struct scales *into) {
    into->table = type == NF4 ? NF4_NUMBERS : type == FP4 ? FP4_NUMBERS : E2M1_NUMBERS;
    EACH(v, vecs) into->scale[v] = load((const float *)block + half * PANEL + (first + v) * LANES);
}

/* Of a half of a block of Q4_H. */
INLINE void read_half(int half, int vecs, const char *block, int first, struct scales *into) {
    const uint16_t *halves = (const uint16_t *)block + half * PANEL + first * LANES;
    EACH(v, vecs) {
        into->scale[v] = load_halves(halves + v * LANES);
        into->minimum[v] = into->scale[v] * -load_halves(halves + 2 * PANEL + v * LANES);
    }
}

INLINE void read_scales(enum weights type, int vecs, const char *block, int first, struct scales *into) {
    const uint16_t *halves = (const uint16_t *)block + first * LANES;
    if (is_tabled(type)) {
        read_floats(type, 0, vecs, block, first, into);
        return;
    }
    if (type == Q4_H) {
        read_half(0, vecs, block, first, into);
        return;
    }
    if (type == E4M3) {
        EACH(v, vecs) into->scale[v] = load((const float *)block + (first + v) * LANES) * 0x1p120f;
        return;
    }
    EACH(v, vecs) {
        const uint8_t *powers = (const uint8_t *)block + (first + v) * LANES;
        const vec scale = type == MXFP4 ? half_of_power(load_bytes(powers)) : load_halves(halves + v * LANES);
        into->scale[v] = scale;
        into->minimum[v] = scale * -lift_of(type);
        if (has_minima(type)) into->minimum[v] = load_halves(halves + PANEL + v * LANES);
        if (has_zeros(type)) into->minimum[v] = scale * -load_halves(halves + PANEL + v * LANES);
    }
}

/* What the codes stand for, from 0 on. Of MXFP4 it is twice the number. */
static const uint8_t IQ4_NUMBERS[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
static const uint8_t MXFP4_NUMBERS[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

/* The words of a block as those of a block with bytes would be: [8, PANEL]. */
INLINE void widen(enum weights type, int vecs, const uint32_t *words, uint32_t *into) {
    EACH(v, vecs) EACH(w, 8) {
        uvec made = {0};
        EACH_PIECE(size, at, bits_of(type)) {
            const uvec word = *(const uvec *)(words + (at + w % size) * PANEL + v * LANES);
            const int shift = w / size * size - at;
            made |= (shift < 0 ? word << -shift : word >> shift) & (((1u << size) - 1) << at) * 0x01010101u;
        }
        if (is_coded(type)) made = looked_up(type == MXFP4 ? MXFP4_NUMBERS : IQ4_NUMBERS, made);
        *(uvec *)(into + w * PANEL + v * LANES) = made;
    }
}

INLINE void prefetch(const char *from, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + AHEAD + at);
}

/* Reads the block with input `k`, of vectors from `first` on; returns its words. `bytes`, [8, PANEL], is room for those that
 * are widened. */
INLINE const uint32_t *read_block(enum weights type, int vecs, const char *panel, int64_t k, int first, struct scales *into,
                                  uint32_t *bytes) {
    const char *block = panel + block_at(type, k);
    const uint32_t *words = (const uint32_t *)(block + scale_bytes(type)) + first * LANES;
    prefetch(block, block_bytes(type));
    if (is_k(type))
        read_k_scales(type, 0, vecs, panel + group_at(type, k), block, first, into);
    else if (type != BFLOAT16)
        read_scales(type, vecs, block, first, into);
    if (!is_widened(type)) return words;
    widen(type, vecs, words, bytes);
    return bytes;
}

#define READ(TYPE) \
    case TYPE: return read_block(TYPE, vecs, panel, k, first, into, bytes);

INLINE const uint32_t *read_widened(enum weights type, int vecs, const char *panel, int64_t k, int first,
                                    struct scales *into, uint32_t *bytes) {
    switch (type) {
        READ(Q5_0) READ(Q5_1) READ(IQ4_NL) READ(MXFP4) READ(Q2_K) READ(Q3_K) READ(Q5_K) READ(Q6_K) READ(IQ4_XS)
        READ(Q4_H)
        default: __builtin_unreachable();
    }
}

/* Called, not inlined: what reads these is long, and products of many counts of rows would each have it. */
static __attribute__((noinline)) const uint32_t *read_widened_panel(enum weights type, const char *panel, int64_t k,
                                                                    struct scales *into, uint32_t *bytes) {
    return read_widened(type, PANEL_VECS, panel, k, 0, into, bytes);
}

static __attribute__((noinline)) const uint32_t *read_widened_part(enum weights type, const char *panel, int64_t k, int first,
                                                                   struct scales *into, uint32_t *bytes) {
    return read_widened(type, DIRECT_VECS, panel, k, first, into, bytes);
}

static __attribute__((noinline)) void read_second_half(enum weights type, int vecs, const char *panel, int64_t k, int first,
                                                       struct scales *into) {
    switch (type) {
#define HALF(TYPE)                                                                                                \
    case TYPE: read_k_scales(TYPE, 1, vecs, panel + group_at(TYPE, k), panel + block_at(TYPE, k), first, into); break;
        HALF(Q2_K) HALF(Q3_K) HALF(Q6_K)
        case Q4_H: read_half(1, vecs, panel + block_at(type, k), first, into); break;
        default: break;
    }
}

/* The same for any type of one width, so that nothing else has to be compiled for each type. */
INLINE const uint32_t *read_any(int width, enum weights type, int vecs, const char *panel, int64_t k, int first,
                                struct scales *into, uint32_t *bytes) {
    if (width == 16) return read_block(BFLOAT16, vecs, panel, k, first, into, bytes);
    if (width == FLOATS8) return read_block(E4M3, vecs, panel, k, first, into, bytes);
    if (width == 4) switch (type) {
            READ(Q4_0) READ(Q4_1) READ(Q4_Z) READ(Q4_K)
            default: __builtin_unreachable();
        }
    if (width == TABLED) switch (type) {
            READ(NF4) READ(FP4) READ(E2M1)
            default: __builtin_unreachable();
        }
    switch (type) {
        READ(Q8_0) READ(Q8_Z)
        default: break;
    }
    return vecs == PANEL_VECS ? read_widened_panel(type, panel, k, into, bytes)
                              : read_widened_part(type, panel, k, first, into, bytes);
}

/* Before `part` of a block: its scales, where they are others than before. */
INLINE void read_again(int width, enum weights type, int part, int vecs, const char *panel, int64_t k, int first,
                       struct scales *into) {
    if (width == 8 && part == 2 && has_halves(type)) read_second_half(type, vecs, panel, k, first, into);
    if (width == TABLED && part == 4 && has_halves(type)) read_floats(type, 1, vecs, panel + block_at(type, k), first, into);
}

/* Number `part` of a word as a float, for vector `v` of a panel. Left where it stands in the word, it is 2^(width * part) times
 * too large: `scale` is that much smaller, which costs nothing, where shifting would. */
INLINE vec weight_of(int width, int part, uvec word, vec scale, int v, const struct scales *made) {
    const int shift = bits_in_word(width) * part;
    /* Sign, exponent and mantissa where a float has them, which is then the number times 2^-120: the scale is 2^120 times as
     * large. Subnormal numbers come right as well. The product rounds once. */
    if (width == FLOATS8) return (vec)((uvec)((ivec)(word << (24 - shift)) >> 4) & 0x87f00000u) * scale;
    if (width == TABLED) return from_table(made->table, word >> shift) * scale;
    if (width == 16) return (vec)(part ? word & 0xffff0000u : word << 16);
    const uvec number = shift + width == 32 ? word >> shift : word & (((1u << width) - 1) << shift);
    return fma_of(to_floats(number), scale, made->minimum[v]);
}

/* What `part` takes off the scale: see weight_of. */
INLINE float shrunk(int width, int part) {
    const int shift = width * part;
    return width == FLOATS8 || width == TABLED || shift + width == 32 ? 1.0f : 1.0f / (float)(1u << shift);
}
#endif
