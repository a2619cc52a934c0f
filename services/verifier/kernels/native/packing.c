/* Lays a stored matrix out in panels: see panels.h. */
#include "panels.h"

/* Of one output's block: what stands before its numbers, and its numbers. */
struct stored_block {
    /* Halves at the head of its group, and of the block itself; of E4M3 a float. */
    uint16_t head[2], halves[2];
    /* Of the K types. */
    uint8_t scales[2];
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

/* A block of another type: halves, the fifth bits, then numbers. */
INLINE void read_plain(enum weights type, const unsigned char *stored, struct stored_block *into) {
    const size_t halves = (size_t)scale_bytes(type) / PANEL;
    uint32_t fifth = 0;
    memcpy(into->halves, stored, halves);
    stored += halves;
    if (bits_of(type) == 5) memcpy(&fifth, stored, 4), stored += 4;
    for (int k = 0; k < BLOCK; k++)
        if (type == BFLOAT16)
            into->numbers[k] = stored[2 * k] | (uint32_t)stored[2 * k + 1] << 8;
        else if (type == Q8_0)
            /* From -128..127 to 0..255. */
            into->numbers[k] = stored[k] ^ 0x80u;
        else if (type == Q8_Z || type == E4M3)
            into->numbers[k] = stored[k];
        else
            /* The first half lies in the lower bits. */
            into->numbers[k] = (k < BLOCK / 2 ? stored[k] & 15u : stored[k - BLOCK / 2] >> 4) | (fifth >> k & 1) << 4;
}

/* Numbers to words that lie PANEL apart. */
INLINE void put_numbers(enum weights type, const uint32_t *numbers, uint32_t *words) {
    const int rest = is_widened(type) ? bits_of(type) - 4 : 0, bits = bits_of(type) - rest;
    for (int w = 0; w < bits; w++)
        for (int part = 0; part < 32 / bits; part++) {
            const uint32_t number = numbers[part * bits + w];
            words[w * PANEL] |= (rest ? number & 15 : number) << (bits * part);
        }
    for (int k = 0; rest && k < BLOCK; k++) {
        const int place = k % 8 * rest;
        words[(bits + place / 8) * PANEL] |= numbers[k] >> 4 << (k / 8 * 8 + place % 8);
    }
}

/* Block `number` of an output's row to its place in the panel, of which everything is 0. */
INLINE void pack_block(enum weights type, const unsigned char *row, int64_t group_size, int64_t number, char *panel,
                       int64_t lane) {
    const int64_t each = is_k(type) ? GROUP_INPUTS / BLOCK : 1, k = number * BLOCK;
    const unsigned char *group = row + number / each * group_size;
    char *block = panel + block_at(type, k);
    struct stored_block stored;
    if (type == Q4_K || type == Q5_K) read_with_minima(type, group, number % each, &stored);
    if (type == Q6_K) read_q6_k(group, number % each, &stored);
    if (!is_k(type)) read_plain(type, group, &stored);
    for (int64_t at = 0; at < head_bytes(type) / (2 * PANEL); at++)
        memcpy(panel + group_at(type, k) + 2 * (at * PANEL + lane), stored.head + at, 2);
    for (int64_t at = 0; is_k(type) && at < 2; at++) block[at * PANEL + lane] = (char)stored.scales[at];
    if (type == E4M3) memcpy(block + 4 * lane, stored.halves, 4);
    for (int64_t at = 0; !is_k(type) && type != E4M3 && at < scale_bytes(type) / (2 * PANEL); at++)
        memcpy(block + 2 * (at * PANEL + lane), stored.halves + at, 2);
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
            case BFLOAT16: pack_panel(BFLOAT16, layer, stored, stored_row, outputs, panel, out); break;
            case Q8_0: pack_panel(Q8_0, layer, stored, stored_row, outputs, panel, out); break;
            case Q4_0: pack_panel(Q4_0, layer, stored, stored_row, outputs, panel, out); break;
            case Q4_1: pack_panel(Q4_1, layer, stored, stored_row, outputs, panel, out); break;
            case Q8_Z: pack_panel(Q8_Z, layer, stored, stored_row, outputs, panel, out); break;
            case Q4_Z: pack_panel(Q4_Z, layer, stored, stored_row, outputs, panel, out); break;
            case Q5_0: pack_panel(Q5_0, layer, stored, stored_row, outputs, panel, out); break;
            case Q5_1: pack_panel(Q5_1, layer, stored, stored_row, outputs, panel, out); break;
            case E4M3: pack_panel(E4M3, layer, stored, stored_row, outputs, panel, out); break;
            case Q4_K: pack_panel(Q4_K, layer, stored, stored_row, outputs, panel, out); break;
            case Q5_K: pack_panel(Q5_K, layer, stored, stored_row, outputs, panel, out); break;
            case Q6_K: pack_panel(Q6_K, layer, stored, stored_row, outputs, panel, out); break;
        }
}
