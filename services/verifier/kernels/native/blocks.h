/* Types of stored weights, and where they lie in a panel.
 *
 * A panel is PANEL outputs side by side. Of float32 it is [inputs, PANEL]. Else it is made of blocks of BLOCK inputs:
 * scales (halves, [PANEL]), likewise minima (of Q4_1 and Q5_1) or zero points (of Q8_Z and Q4_Z), then words [bits, PANEL]
 * of 32 bits: word w of an output holds its inputs w, bits + w, 2 * bits + w, ..., the first one in its lowest bits.
 *
 * Numbers of 3, 5 and 6 bits have pieces, of 4, 2 and 1 bits, the greatest one from the lowest bit on: first the words of all
 * greatest pieces, laid out as if they were the numbers, then those of the rest.
 *
 * Of the K types a group of GROUP_INPUTS inputs begins with d and, of those with minima, dmin (halves, [PANEL]). Its blocks
 * begin with bytes. Each output has its scale and its minimum there; where halves of a block have scales of their own, the
 * first half's and the second's; of IQ4_XS its scale alone. Scales with a sign are stored from 0 on. In each byte of Q2_K the
 * lower half is a scale, the upper one a minimum.
 *
 * Of Q4_H each half of a block has a scale and a zero point: the scales of the first and of the second, then the zero points.
 *
 * Of E4M3 the scales are floats, [PANEL], and the numbers floats of 8 bits. Of MXFP4 the scales are bytes: powers of two.
 * Of NF4, FP4 and E2M1 they are floats, too, of E2M1 for each half of a block, and the numbers codes of a table of floats.
 */
#ifndef OUTRIDER_BLOCKS_H
#define OUTRIDER_BLOCKS_H
#include "linear.h"

enum { BLOCK = 32, GROUP_INPUTS = 256 };
enum weights {
    FLOAT32, BFLOAT16, Q8_0, Q4_0, Q4_1, Q8_Z, Q4_Z, Q5_0, Q5_1, E4M3, IQ4_NL, MXFP4, NF4, FP4, E2M1,
    /* The K types. */
    Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_XS,
    /* Another that has blocks of its own. */
    Q4_H
};

/* The widths (see width_of) of floats of 8 bits, and of codes of a table of floats: other operations make these floats. */
enum { FLOATS8 = 9, TABLED = 5 };

/* Of a number as it is stored. */
INLINE int bits_of(enum weights type) {
    switch (type) {
        case FLOAT32: return 32;
        case BFLOAT16: return 16;
        case Q8_0: case Q8_Z: case E4M3: return 8;
        case Q6_K: return 6;
        case Q5_0: case Q5_1: case Q5_K: return 5;
        case Q3_K: return 3;
        case Q2_K: return 2;
        default: return 4;
    }
}

/* Whether numbers are codes of a table of 16 floats, which has as many bits as they have. */
INLINE int is_tabled(enum weights type) { return type == NF4 || type == FP4 || type == E2M1; }

/* Whether numbers are codes of a table of 16 whole numbers. */
INLINE int is_coded(enum weights type) { return type == IQ4_NL || type == IQ4_XS || type == MXFP4; }

/* Whether numbers are made bytes before they are multiplied: of Q4_H so that products by other types of four bits, which are
 * many, need not ask in the middle of a block. */
INLINE int is_widened(enum weights type) {
    return is_coded(type) || type == Q4_H || (bits_of(type) < 8 && bits_of(type) != 4);
}

/* Of a number in the words that are multiplied. All that a product depends on but for reading a block. */
INLINE int width_of(enum weights type) {
    return is_widened(type) ? 8 : type == E4M3 ? FLOATS8 : is_tabled(type) ? TABLED : bits_of(type);
}

/* Bits of a number in a word. */
INLINE int bits_in_word(int width) { return width == FLOATS8 ? 8 : width == TABLED ? 4 : width; }

/* Whether each block of an output has a zero point beside its scale. */
INLINE int has_zeros(enum weights type) { return type == Q8_Z || type == Q4_Z || type == Q4_H; }

/* Or a minimum. */
INLINE int has_minima(enum weights type) {
    return type == Q4_1 || type == Q5_1 || type == Q2_K || type == Q4_K || type == Q5_K;
}

/* Whether blocks lie in groups. */
INLINE int is_k(enum weights type) { return type >= Q2_K && type <= IQ4_XS; }

/* Whether each half of a block has a scale of its own. */
INLINE int has_halves(enum weights type) {
    return type == Q2_K || type == Q3_K || type == Q6_K || type == E2M1 || type == Q4_H;
}

INLINE int64_t head_bytes(enum weights type) { return !is_k(type) ? 0 : has_minima(type) ? 4 * PANEL : 2 * PANEL; }

/* Bytes of one of the numbers that a block of an output begins with, and how many there are. */
INLINE int64_t scale_size(enum weights type) {
    return is_k(type) || type == MXFP4 ? 1 : type == E4M3 || is_tabled(type) ? 4 : 2;
}

INLINE int64_t scale_count(enum weights type) {
    if (type <= BFLOAT16) return 0;
    if (type == Q4_H) return 4;
    return has_minima(type) || has_zeros(type) || has_halves(type) ? 2 : 1;
}

INLINE int64_t scale_bytes(enum weights type) { return scale_size(type) * scale_count(type) * PANEL; }

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

/* The pieces of numbers of `bits` bits: `size` bits each, `at` bits being before them, and as many words of an output. */
#define EACH_PIECE(size, at, bits)                                                                                   \
    _Pragma("GCC unroll 8") for (int size = 16, at = 0; size; at = (bits) & -size, size /= 2) if ((bits) & size)
#endif
