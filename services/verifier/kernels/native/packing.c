/* Lays a stored matrix out in panels: see blocks.h. */
#include "blocks.h"

/* Of one output's block: what stands before its numbers, and its numbers. */
struct stored_block {
    /* Halves at the head of its group. */
    uint16_t head[2];
    /* As it begins in a panel. */
    uint8_t scales[8];
    uint32_t numbers[BLOCK];
};

/* Scale and minimum, six bits each, of block `number` of a group of Q4_K or Q5_K. */
static void read_six_bits(const unsigned char *stored, int64_t number, uint8_t *into) {
    const unsigned char *scales = stored, *minima = stored + 4, *rest = stored + 8;
    const int64_t at = number % 4;
    into[0] = number < 4 ? scales[at] & 63 : (uint8_t)((rest[at] & 15) | (scales[at] >> 2 & 0x30));
    into[1] = number < 4 ? minima[at] & 63 : (uint8_t)(rest[at] >> 4 | (minima[at] >> 2 & 0x30));
}

/* Block `number` of a group of Q4_K or Q5_K: d, dmin, scales and minima, the fifth bits, then two blocks in each 32 bytes. */
INLINE void read_with_minima(enum weights type, const unsigned char *group, int64_t number, struct stored_block *into) {
    const unsigned char *fifth = group + 16, *low = fifth + (type == Q5_K ? 32 : 0) + number / 2 * BLOCK;
    memcpy(into->head, group, 4);
    read_six_bits(group + 4, number, into->scales);
    for (int k = 0; k < BLOCK; k++) {
        into->numbers[k] = number % 2 ? low[k] >> 4 : low[k] & 15;
        if (type == Q5_K) into->numbers[k] |= (uint32_t)(fifth[k] >> number & 1) << 4;
    }
}

/* Block `number` of a group of Q6_K: the lower 4 bits, the upper 2, 16 scales with a sign, d. */
static void read_q6_k(const unsigned char *group, int64_t number, struct stored_block *into) {
    const int64_t half = number / 4, at = number % 4;
    const unsigned char *low = group + half * 64 + at % 2 * BLOCK, *high = group + 128 + half * BLOCK;
    memcpy(into->head, group + 208, 2);
    /* From -128..127 to 0..255. */
    for (int part = 0; part < 2; part++) into->scales[part] = group[192 + 2 * number + part] ^ 0x80u;
    for (int k = 0; k < BLOCK; k++)
        into->numbers[k] = (at < 2 ? low[k] & 15u : low[k] >> 4) | (uint32_t)(high[k] >> 2 * at & 3) << 4;
}

/* Numbers of two bits, of which each byte has those of four blocks. */
static void read_two_bits(const unsigned char *stored, int64_t number, uint32_t *into) {
    for (int k = 0; k < BLOCK; k++) into[k] = stored[number / 4 * BLOCK + k] >> number % 4 * 2 & 3u;
}

/* Block `number` of a group of Q2_K: 16 bytes of a scale and a minimum each, numbers, d, dmin. */
static void read_q2_k(const unsigned char *group, int64_t number, struct stored_block *into) {
    memcpy(into->head, group + 80, 4);
    memcpy(into->scales, group + 2 * number, 2);
    read_two_bits(group + 16, number, into->numbers);
}

/* Of Q3_K: the third bits, the lower 2, 16 scales of six bits, of which the upper two lie behind all others, d. */
static void read_q3_k(const unsigned char *group, int64_t number, struct stored_block *into) {
    const unsigned char *scales = group + 96;
    memcpy(into->head, group + 108, 2);
    for (int part = 0; part < 2; part++) {
        const int64_t at = 2 * number + part;
        into->scales[part] = (uint8_t)((scales[at % 8] >> at / 8 * 4 & 15) | (scales[8 + at % 4] >> at / 4 * 2 & 3) << 4);
    }
    read_two_bits(group + 32, number, into->numbers);
    for (int k = 0; k < BLOCK; k++) into->numbers[k] |= (group[k] >> number & 1u) << 2;
}

/* Numbers, or codes, of four bits: the first half lies in the lower bits. */
static void read_four_bits(const unsigned char *stored, uint32_t *into) {
    for (int k = 0; k < BLOCK; k++) into[k] = k < BLOCK / 2 ? stored[k] & 15u : stored[k - BLOCK / 2] >> 4;
}

/* Of IQ4_XS: d, the upper two bits of 8 scales, their lower four, codes. */
static void read_iq4_xs(const unsigned char *group, int64_t number, struct stored_block *into) {
    uint16_t upper;
    memcpy(into->head, group, 2);
    memcpy(&upper, group + 2, 2);
    into->scales[0] = (uint8_t)((group[4 + number / 2] >> number % 2 * 4 & 15) | (upper >> 2 * number & 3) << 4);
    read_four_bits(group + 8 + number * BLOCK / 2, into->numbers);
}

/* A block of another type: scales and the like, the fifth bits, then numbers. */
INLINE void read_plain(enum weights type, const unsigned char *stored, struct stored_block *into) {
    const size_t scales = (size_t)scale_bytes(type) / PANEL;
    uint32_t fifth = 0;
    memcpy(into->scales, stored, scales);
    stored += scales;
    if (bits_of(type) == 5) memcpy(&fifth, stored, 4), stored += 4;
    if (bits_of(type) < 8) read_four_bits(stored, into->numbers);
    for (int k = 0; k < BLOCK; k++)
        if (type == BFLOAT16)
            into->numbers[k] = stored[2 * k] | (uint32_t)stored[2 * k + 1] << 8;
        else if (bits_of(type) == 8)
            /* With a sign: from -128..127 to 0..255. */
            into->numbers[k] = stored[k] ^ (type == Q8_0 ? 0x80u : 0);
        else
            into->numbers[k] |= (fifth >> k & 1) << 4;
}

INLINE void read_stored(enum weights type, const unsigned char *group, int64_t number, struct stored_block *into) {
    switch (type) {
        case Q2_K: read_q2_k(group, number, into); break;
        case Q3_K: read_q3_k(group, number, into); break;
        case Q4_K: case Q5_K: read_with_minima(type, group, number, into); break;
        case Q6_K: read_q6_k(group, number, into); break;
        case IQ4_XS: read_iq4_xs(group, number, into); break;
        default: read_plain(type, group, into);
    }
}

/* Numbers to words that lie PANEL apart. */
INLINE void put_numbers(enum weights type, const uint32_t *numbers, uint32_t *words) {
    EACH_PIECE(size, at, bits_of(type))
        for (int k = 0; k < BLOCK; k++) {
            const uint32_t piece = numbers[k] >> at & ((1u << size) - 1);
            words[(at + k % size) * PANEL] |= piece << k / size * size;
        }
}

/* Block `number` of an output's row to its place in the panel, of which everything is 0. */
INLINE void pack_block(enum weights type, const unsigned char *row, int64_t group_size, int64_t number, char *panel,
                       int64_t lane) {
    const int64_t each = is_k(type) ? GROUP_INPUTS / BLOCK : 1, k = number * BLOCK, size = scale_size(type);
    char *block = panel + block_at(type, k);
    struct stored_block stored;
    read_stored(type, row + number / each * group_size, number % each, &stored);
    for (int64_t at = 0; at < head_bytes(type) / (2 * PANEL); at++)
        memcpy(panel + group_at(type, k) + 2 * (at * PANEL + lane), stored.head + at, 2);
    for (int64_t at = 0; at < scale_count(type); at++)
        memcpy(block + size * (at * PANEL + lane), stored.scales + at * size, (size_t)size);
    put_numbers(type, stored.numbers, (uint32_t *)(block + scale_bytes(type)) + lane);
}

INLINE void pack_panel(enum weights type, const struct linear *layer, const unsigned char *stored, int64_t stored_row,
                       int64_t outputs, int64_t number, char *out) {
    const int64_t bytes = panel_bytes(type, layer->inputs);
    const int64_t group_size = stored_row / (layer->inputs / (is_k(type) ? GROUP_INPUTS : BLOCK));
    char *panel = out + number * bytes;
    memset(panel, 0, (size_t)bytes);
    for (int64_t lane = 0; lane < PANEL && number * PANEL + lane < outputs; lane++)
        for (int64_t block = 0; block < layer->inputs / BLOCK; block++)
            pack_block(type, stored + (number * PANEL + lane) * stored_row, group_size, block, panel, lane);
}

void outrider_pack(const struct linear *layer, const unsigned char *stored, int64_t stored_row, int64_t outputs, char *out) {
#pragma omp parallel for schedule(static)
    for (int64_t panel = 0; panel < layer->panels; panel++) switch (layer->type) {
#define PACK(TYPE) \
    case TYPE: pack_panel(TYPE, layer, stored, stored_row, outputs, panel, out); break;
            PACK(BFLOAT16) PACK(Q8_0) PACK(Q4_0) PACK(Q4_1) PACK(Q8_Z) PACK(Q4_Z) PACK(Q5_0) PACK(Q5_1) PACK(E4M3)
            PACK(IQ4_NL) PACK(MXFP4) PACK(NF4) PACK(FP4) PACK(E2M1) PACK(Q2_K) PACK(Q3_K) PACK(Q4_K) PACK(Q5_K) PACK(Q6_K) PACK(IQ4_XS)
            PACK(Q4_H)
        }
}
