/* Weights as they are stored, laid out in panels, and how they become floats in registers.
 *
 * Exactness: a stored weight becomes the very float that unpacking the whole file would have given. A scale has 11
 * significant bits, or 17 to 18 where it is d, of 11, times a scale of 6 or 7; times a number it has at most 24, and is
 * exact. So only adding the minimum rounds, once, as it does there. A minimum of the K types is dmin times
 * 6 bits, exact, too. Where each block has a zero point, the weight is d * (number - zero point): the minimum, d times the
 * zero point, is exact as well, so the sum rounds once to that product. as_blocks.py lets only such zero points come here
 * whose difference from every number is exact.
 *
 * A panel is PANEL outputs side by side. Of float32 it is [inputs, PANEL]. Else it is made of blocks of BLOCK inputs:
 * scales (halves, [PANEL]), likewise minima (of Q4_1 and Q5_1) or zero points (of Q8_Z and Q4_Z), then words [bits, PANEL]
 * of 32 bits: word w of an output holds its inputs w, bits + w, 2 * bits + w, ..., the first one in its lowest bits.
 *
 * Of the K types a group of GROUP_INPUTS inputs begins with d and, but for Q6_K, dmin (halves, [PANEL]). Its blocks begin
 * with bytes, two of each output: its scale and minimum; of Q6_K the scales of the first and of the second half of the
 * block, from 0 on.
 *
 * Numbers of 5 and 6 bits have their lower 4 in words as those of 4 bits have. The words behind hold what is left: byte b of
 * such a word has it of the inputs 8 * b + i, one after the other; i from 0 to 7 in the one word of 5 bits, from 0 to 3 and
 * from 4 to 7 in the two of 6 bits.
 *
 * Of E4M3 the scales are floats, [PANEL], and the numbers floats of 8 bits. A weight is number * scale, which rounds once, as it
 * does where the file is expanded. NaN among the numbers, and scales from 256 on, never come here (as_blocks.py).
 */
#ifndef OUTRIDER_PANELS_H
#define OUTRIDER_PANELS_H
#include "linear.h"

enum { BLOCK = 32, GROUP_INPUTS = 256, AHEAD = 4096 };
enum weights { FLOAT32, BFLOAT16, Q8_0, Q4_0, Q4_1, Q8_Z, Q4_Z, Q5_0, Q5_1, E4M3, Q4_K, Q5_K, Q6_K };

/* The width (see width_of) of floats of 8 bits: that of bytes, and more, since other operations make them floats. */
enum { FLOATS8 = 9 };

/* Of a number as it is stored. */
INLINE int bits_of(enum weights type) {
    if (type == FLOAT32) return 32;
    if (type == BFLOAT16) return 16;
    if (type == Q8_0 || type == Q8_Z || type == E4M3) return 8;
    if (type == Q5_0 || type == Q5_1 || type == Q5_K) return 5;
    return type == Q6_K ? 6 : 4;
}

/* Of a number in the words that are multiplied: those of 5 and 6 bits are made bytes first. All that a product depends on but
 * for reading a block. */
INLINE int is_widened(enum weights type) { return bits_of(type) == 5 || bits_of(type) == 6; }

INLINE int width_of(enum weights type) { return is_widened(type) ? 8 : type == E4M3 ? FLOATS8 : bits_of(type); }

/* Bits of a number in a word. */
INLINE int bits_in_word(int width) { return width == FLOATS8 ? 8 : width; }

/* Whether each block of an output has a zero point beside its scale. */
INLINE int has_zeros(enum weights type) { return type == Q8_Z || type == Q4_Z; }

/* Or a minimum. */
INLINE int has_minima(enum weights type) { return type == Q4_1 || type == Q5_1; }

/* Whether blocks lie in groups. */
INLINE int is_k(enum weights type) { return type >= Q4_K; }

INLINE int64_t head_bytes(enum weights type) { return !is_k(type) ? 0 : type == Q6_K ? 2 * PANEL : 4 * PANEL; }

INLINE int64_t scale_bytes(enum weights type) {
    return type <= BFLOAT16 ? 0 : has_minima(type) || has_zeros(type) || type == E4M3 ? 4 * PANEL : 2 * PANEL;
}

INLINE int64_t block_bytes(enum weights type) { return scale_bytes(type) + 4 * bits_of(type) * PANEL; }

/* Where the head of the group begins that has input `k`, if there are groups, and where the block does. */
INLINE int64_t group_at(enum weights type, int64_t k) {
    return k / BLOCK * block_bytes(type) - k % GROUP_INPUTS / BLOCK * block_bytes(type) + k / GROUP_INPUTS * head_bytes(type);
}

INLINE int64_t block_at(enum weights type, int64_t k) {
    return k / BLOCK * block_bytes(type) + (k / GROUP_INPUTS + 1) * head_bytes(type);
}

INLINE int64_t panel_bytes(enum weights type, int64_t inputs) {
    if (type == FLOAT32) return 4 * inputs * PANEL;
    return inputs / BLOCK * block_bytes(type) + inputs / GROUP_INPUTS * head_bytes(type);
}

/* Unrolled, so that what is indexed by it lies in registers. */
#define EACH(i, count) _Pragma("GCC unroll 16") for (int i = 0; i < (count); i++)

/* What a block's weights are made with, of some vectors `v` of its panel. */
struct scales {
    vec scale[PANEL_VECS], minimum[PANEL_VECS];
};

INLINE void read_k_scales(int vecs, const char *head, const char *block, int first, struct scales *into) {
    const uint16_t *halves = (const uint16_t *)head + first * LANES;
    const uint8_t *bytes = (const uint8_t *)block + first * LANES;
    EACH(v, vecs) {
        into->scale[v] = load_halves(halves + v * LANES) * load_bytes(bytes + v * LANES);
        into->minimum[v] = -(load_halves(halves + PANEL + v * LANES) * load_bytes(bytes + PANEL + v * LANES));
    }
}

/* Of one half of a block: each has scales of its own. */
INLINE void read_q6_k_scales(int half, int vecs, const char *head, const char *block, int first, struct scales *into) {
    const uint16_t *halves = (const uint16_t *)head + first * LANES;
    const uint8_t *bytes = (const uint8_t *)block + half * PANEL + first * LANES;
    EACH(v, vecs) {
        into->scale[v] = load_halves(halves + v * LANES) * (load_bytes(bytes + v * LANES) - 128.0f);
        /* Stored from 0 on. */
        into->minimum[v] = into->scale[v] * -32.0f;
    }
}

INLINE void read_scales(enum weights type, int vecs, const char *block, int first, struct scales *into) {
    const uint16_t *halves = (const uint16_t *)block + first * LANES;
    if (type == E4M3) {
        EACH(v, vecs) into->scale[v] = load((const float *)block + (first + v) * LANES) * 0x1p120f;
        return;
    }
    EACH(v, vecs) {
        const vec scale = into->scale[v] = load_halves(halves + v * LANES);
        if (has_minima(type)) into->minimum[v] = load_halves(halves + PANEL + v * LANES);
        if (has_zeros(type)) into->minimum[v] = scale * -load_halves(halves + PANEL + v * LANES);
        /* Stored from 0 on. */
        if (type == Q4_0) into->minimum[v] = scale * -8.0f;
        if (type == Q5_0) into->minimum[v] = scale * -16.0f;
        if (type == Q8_0) into->minimum[v] = scale * -128.0f;
    }
}

/* The words of a block with numbers of 5 or 6 bits as those of a block with bytes would be: [8, PANEL]. */
INLINE void widen(int rest, int vecs, const uint32_t *words, uint32_t *into) {
    const uint32_t kept = ((1u << rest) - 1) * 0x10101010u;
    EACH(v, vecs) EACH(w, 8) {
        const int place = w * rest % 8;
        const uvec low = *(const uvec *)(words + w % 4 * PANEL + v * LANES) >> (w < 4 ? 0 : 4);
        const uvec high = *(const uvec *)(words + (4 + w * rest / 8) * PANEL + v * LANES);
        const uvec moved = place < 4 ? high << (4 - place) : high >> (place - 4);
        *(uvec *)(into + w * PANEL + v * LANES) = (low & 0x0f0f0f0fu) | (moved & kept);
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
    if (type == Q6_K)
        read_q6_k_scales(0, vecs, panel + group_at(type, k), block, first, into);
    else if (is_k(type))
        read_k_scales(vecs, panel + group_at(type, k), block, first, into);
    else if (type != BFLOAT16)
        read_scales(type, vecs, block, first, into);
    if (!is_widened(type)) return words;
    widen(bits_of(type) - 4, vecs, words, bytes);
    return bytes;
}

/* The same for any type of one width, so that nothing else has to be compiled for each type. */
INLINE const uint32_t *read_any(int width, enum weights type, int vecs, const char *panel, int64_t k, int first,
                                struct scales *into, uint32_t *bytes) {
    switch (type) {
#define READ(TYPE)                                                                              \
    case TYPE:                                                                                  \
        if (width == width_of(TYPE)) return read_block(TYPE, vecs, panel, k, first, into, bytes); \
        break;
        READ(BFLOAT16) READ(Q8_0) READ(Q4_0) READ(Q4_1) READ(Q8_Z) READ(Q4_Z) READ(Q5_0) READ(Q5_1) READ(E4M3) READ(Q4_K)
        READ(Q5_K) READ(Q6_K)
        case FLOAT32: break;
    }
    __builtin_unreachable();
}

/* Before `part` of a block: its scales, where they are others than before. */
INLINE void read_again(int width, enum weights type, int part, int vecs, const char *panel, int64_t k, int first,
                       struct scales *into) {
    if (width == 8 && part == 2 && type == Q6_K)
        read_q6_k_scales(1, vecs, panel + group_at(Q6_K, k), panel + block_at(Q6_K, k), first, into);
}

/* Number `part` of a word as a float. Left where it stands in the word, it is 2^(width * part) times too large: `scale` is
 * that much smaller, which costs nothing, where shifting would. */
INLINE vec weight_of(int width, int part, uvec word, vec scale, vec minimum) {
    const int shift = bits_in_word(width) * part;
    /* Sign, exponent and mantissa where a float has them, which is then the number times 2^-120: the scale is 2^120 times as
     * large. Subnormal numbers come right as well. The product rounds once. */
    if (width == FLOATS8) return (vec)((uvec)((ivec)(word << (24 - shift)) >> 4) & 0x87f00000u) * scale;
    if (width == 16) return (vec)(part ? word & 0xffff0000u : word << 16);
    const uvec number = shift + width == 32 ? word >> shift : word & (((1u << width) - 1) << shift);
    return fma_of(to_floats(number), scale, minimum);
}

/* What `part` takes off the scale: see weight_of. */
INLINE float shrunk(int width, int part) {
    const int shift = width * part;
    return width == FLOATS8 || shift + width == 32 ? 1.0f : 1.0f / (float)(1u << shift);
}
#endif
