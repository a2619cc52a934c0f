/* Runs the kernels on made-up numbers and prints a hash of every result: the same lines on every instruction set. */
#include <stdio.h>
#include <stdlib.h>

#include "choose.h"
#include "convolved_rows.h"
#include "keyed_states.h"
#include "layer.c"
#include "vector_steps.h"

int outrider_check(void);
void outrider_pack(const struct linear *, const unsigned char *, int64_t, int64_t, char *);

enum { ROWS_AT_ONCE = 70, HIDDEN = 64, INTERMEDIATE = 128, HEADS = 4, KV_HEADS = 2, SIZE = 32, TILE_SLOTS = 64 };

static uint64_t state;

static float drawn(void) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return (float)((int32_t)(state >> 33) & 0xffff) / 32768.0f - 1.0f;
}

static float *many(int64_t count) {
    float *made = aligned_alloc(64, (size_t)(count * 4 + 63) / 64 * 64);
    for (int64_t i = 0; i < count; i++) made[i] = drawn();
    return made;
}

static uint64_t hash(const float *numbers, int64_t count) {
    const unsigned char *bytes = (const unsigned char *)numbers;
    uint64_t found = 1469598103934665603ull;
    for (int64_t i = 0; i < 4 * count; i++) found = (found ^ bytes[i]) * 1099511628211ull;
    return found;
}

/* Whether a type has blocks of 256 inputs. */
static int in_groups(int type) { return type >= 15 && type <= 20; }

/* Weights of a type, as a file has them, in panels; scales are of about 1/16. */
static const void *weights(int type, int64_t inputs, int64_t outputs, int64_t panels) {
    static const int64_t bytes_of_block[] = {128, 64, 34, 18, 20, 36, 20, 22, 24, 36, 18, 17, 20, 20, 24,
                                             84, 110, 144, 176, 210, 136, 24};
    /* Of the K types, where d stands, and how many bytes more a group of theirs has in a panel. */
    static const int64_t place_of_d[] = {80, 108, 0, 0, 208, 0}, more[] = {0, 4, 4, 4, 0, 2};
    if (type == 0) return many(panels * PANEL * inputs);
    const int64_t size = bytes_of_block[type], row = size * inputs / (in_groups(type) ? 256 : 32);
    unsigned char *stored = malloc((size_t)(outputs * row));
    for (int64_t i = 0; i < outputs * row; i++) stored[i] = (unsigned char)(drawn() * 127 + 128);
    for (unsigned char *block = stored; block < stored + outputs * row; block += size) {
        if (type == 1)
            for (int k = 0; k < 32; k++) block[2 * k + 1] = 0x3e;
        else if (type == 9)
            /* A float. */
            block[3] = 0x3d;
        else if (type >= 12 && type <= 14)
            block[3] = 0x3d, block[7] = type == 14 ? 0x3c : block[7];
        else if (type == 11)
            /* A power of two. */
            block[0] = 0x7c;
        else if (!in_groups(type))
            block[1] = 0x2c;
        else
            /* d, which scales stand before, of about 1/1024. */
            block[place_of_d[type - 15] + 1] = 0x14;
        if (type == 4 || type == 8) block[3] = 0xb0;
        /* A zero point of 4 to 8 in steps of 1/256. */
        if (type == 5 || type == 6) block[3] = 0x44 | (block[3] & 3);
        if (type == 21) block[3] = 0x2d, block[5] = 0x44 | (block[5] & 3), block[7] = 0x44 | (block[7] & 3);
        /* dmin. */
        if (type == 15 || type == 17 || type == 18) block[place_of_d[type - 15] + 3] = 0x18;
    }
    const struct linear layer = {0, 0, type, inputs, panels};
    char *packed = aligned_alloc(64, (size_t)(panels * PANEL * (row + (in_groups(type) ? more[type - 15] * inputs / 256 : 0))));
    outrider_pack(&layer, stored, row, outputs, packed);
    return packed;
}

static void linears(int type) {
    const int64_t inputs = in_groups(type) ? 512 : 320, outputs = 100, panels = 4;
    state = (uint64_t)type + 1;
    const struct linear layer = {weights(type, inputs, outputs, panels), 0, type, inputs, panels};
    float *in = many(ROWS_AT_ONCE * inputs), *out = many(ROWS_AT_ONCE * panels * PANEL);
    for (int64_t rows = 1; rows <= ROWS_AT_ONCE; rows += rows < 14 ? 1 : 28) {
        outrider_linear(&layer, rows, in, 0, out, panels * PANEL);
        printf("linear %d rows %d %016llx\n", type, (int)rows, (unsigned long long)hash(out, rows * panels * PANEL));
    }
    const struct linear three[] = {layer, layer, {weights(type, inputs, outputs, panels), 0, type, inputs, panels}};
    const int64_t chosen[] = {2, 0}, ends[] = {ROWS_AT_ONCE - 3, ROWS_AT_ONCE};
    outrider_linears(three, 2, chosen, ends, in, out, panels * PANEL);
    printf("linears %d %016llx\n", type, (unsigned long long)hash(out, ROWS_AT_ONCE * panels * PANEL));
}

static struct linear random_linear(int64_t inputs, int64_t outputs) {
    return (struct linear){many(inputs * outputs), 0, 0, inputs, outputs / PANEL};
}

static struct low_rank random_low_rank(int64_t inputs, int64_t outputs, int64_t at, int64_t begin) {
    enum { RANK = 2 * COLUMNS };
    return (struct low_rank){many(inputs * RANK), many(RANK * (outputs + COLUMNS)), 0.5f, 0, inputs, RANK, outputs, at, begin};
}

/* The upper halves of as many floats, which are bfloat16 numbers. */
static uint16_t *many_halves(int64_t count) {
    uint16_t *made = malloc((size_t)count * 2);
    for (int64_t i = 0; i < count; i++) {
        const float number = drawn();
        memcpy(made + i, (const char *)&number + 2, 2);
    }
    return made;
}

static void layers(void) {
    enum { JOINT = (HEADS + 2 * KV_HEADS) * SIZE, SLOTS = 2 * TILE_SLOTS, PER_THREAD = 24 * (SLOTS + 2 * SIZE + 1) };
    static int64_t tiles[] = {1, 0}, zeros[ROWS_AT_ONCE], numbers[ROWS_AT_ONCE], ends[ROWS_AT_ONCE], blocks[ROWS_AT_ONCE + 1];
    int64_t count = 0;
    state = 99;
    for (int64_t row = 0; row < ROWS_AT_ONCE; row++) numbers[row] = row, ends[row] = ROWS_AT_ONCE;
    for (int64_t row = 0; row < ROWS_AT_ONCE; row += 12) blocks[count++] = row;
    blocks[count] = ROWS_AT_ONCE;
    const struct decoder_layer layer = {
        .before_attention = {many(HIDDEN), 1e-5f},
        .before_mlp = {many(HIDDEN), 1e-5f},
        .query_key_value = {{random_linear(HIDDEN, JOINT)}, 1, JOINT, {0, HEADS * SIZE, (HEADS + KV_HEADS) * SIZE}},
        .gate_up = {{random_linear(HIDDEN, 2 * INTERMEDIATE)}, 1, 2 * INTERMEDIATE, {0, INTERMEDIATE, 0}},
        .attention_out = random_linear(HEADS * SIZE, HIDDEN),
        .down = random_linear(INTERMEDIATE, HIDDEN),
        .hidden = HIDDEN, .intermediate = INTERMEDIATE, .heads = HEADS, .kv_heads = KV_HEADS, .size = SIZE,
    };
    const struct layout pass = {
        .rows = ROWS_AT_ONCE, .blocks = count,
        .slots = SLOTS, .scratch_per_thread = PER_THREAD, .threads = 2, .tiles = tiles, .row_tiles = zeros,
        .own_slot = numbers, .position = numbers, .straight = ends, .path = zeros, .row_path = zeros, .block_rows = blocks,
        .scratch = many(2 * PER_THREAD),
    };
    const struct layer attention = {
        .keys = many(2 * KV_HEADS * SIZE * TILE_SLOTS), .values = many(2 * KV_HEADS * TILE_SLOTS * (SIZE + 1)), .scale = 0.17f,
        .heads = HEADS, .kv_heads = KV_HEADS, .size = SIZE, .value_size = SIZE,
    };
    const struct room room = {
        many(ROWS_AT_ONCE * SIZE), many(ROWS_AT_ONCE * SIZE), many(ROWS_AT_ONCE * HIDDEN), many(ROWS_AT_ONCE * JOINT),
        many(ROWS_AT_ONCE * HEADS * SIZE), many(ROWS_AT_ONCE * 2 * INTERMEDIATE), many(ROWS_AT_ONCE * INTERMEDIATE),
    };
    float *in = many(ROWS_AT_ONCE * HIDDEN), *out = many(ROWS_AT_ONCE * HIDDEN);
    outrider_layer(&layer, &pass, &attention, &room, 0, ROWS_AT_ONCE, in, out);
    printf("layer %016llx\n", (unsigned long long)hash(out, ROWS_AT_ONCE * HIDDEN));
    enum { RANK = 2 * COLUMNS, INNER = PIECES * RANK, WIDE = 3 * INNER };
    const struct low_ranks one[PLACES] = {
        [TO_QUERY_KEY_VALUE] = {{random_low_rank(HIDDEN, HEADS * SIZE, 0, 0),
                                 random_low_rank(HIDDEN, KV_HEADS * SIZE, HEADS * SIZE, INNER),
                                 random_low_rank(HIDDEN, KV_HEADS * SIZE - 3, (HEADS + KV_HEADS) * SIZE, 2 * INNER)}, 3},
        [TO_ATTENTION_OUT] = {{random_low_rank(HEADS * SIZE, HIDDEN, 0, 0)}, 1},
        [TO_GATE_UP] = {{random_low_rank(HIDDEN, INTERMEDIATE, 0, 0)}, 1},
        [TO_DOWN] = {{random_low_rank(INTERMEDIATE, HIDDEN, 0, 0)}, 1},
    };
    struct low_rank in_halves = random_low_rank(HIDDEN, INTERMEDIATE, INTERMEDIATE, 0);
    in_halves.halves = 1;
    in_halves.down = many_halves(HIDDEN * RANK), in_halves.up = many_halves(RANK * INTERMEDIATE);
    const struct low_ranks other[PLACES] = {[TO_GATE_UP] = {{in_halves}, 1}};
    const struct span spans[] = {{one, 0, 3}, {other, 3, 1}, {one, 20, 50}};
    const struct adapted adapted = {spans, 3, many(ROWS_AT_ONCE * WIDE), WIDE};
    outrider_layer(&layer, &pass, &attention, &room, &adapted, ROWS_AT_ONCE, in, out);
    printf("adapted rows %016llx\n", (unsigned long long)hash(out, ROWS_AT_ONCE * HIDDEN));
}

static void choices(void) {
    enum { VOCABULARY = 5003, POINTS = 12, WORDS = 4096 };
    static const struct request requests[] = {
        {.sampled = 1, .temperature = 1.0f, .repetition = 1.0f, .seed = 5},
        {.sampled = 1, .temperature = 0.8f, .repetition = 1.0f, .outside = 0.1f, .seed = 1ull << 63},
        {.sampled = 1, .temperature = 0.8f, .repetition = 1.1f, .presence = 0.2f, .top_k = 40, .outside = 0.05f, .seed = 7},
        {.sampled = 1, .temperature = 1.3f, .repetition = 1.0f, .top_k = 300, .min_p = 0.02f, .seed = 11},
        {.temperature = 0.0f, .repetition = 1.3f, .frequency = 0.5f},
    };
    static const int64_t ids[] = {3, 999, 5002};
    static const float counts[] = {0, 1, 4};
    struct point points[POINTS];
    int64_t chosen[POINTS];
    uint32_t words[WORDS];
    state = 77;
    float *logits = many(POINTS * VOCABULARY), *scratch = many(outrider_choose_room(VOCABULARY)), *noise = many(WORDS);
    for (int64_t i = 0; i < POINTS * VOCABULARY; i++) logits[i] *= logits[i] * logits[i] * 12.0f;
    for (int which = 0; which < 5; which++) {
        for (int64_t row = 0; row < POINTS; row++)
            points[row] = (struct point){requests + which, ids, counts, which == 2 || which == 4 ? 3 : 0, row, 100 + row};
        outrider_choose(points, POINTS, logits, VOCABULARY, VOCABULARY, 1, scratch, chosen);
        printf("choices %d", which);
        for (int row = 0; row < POINTS; row++) printf(" %d", (int)chosen[row]);
        printf("\n");
    }
    outrider_words(99, 1ll << 33, WORDS, words);
    outrider_gumbel(words, WORDS, noise);
    printf("noise %016llx\n", (unsigned long long)hash(noise, WORDS));
}

/* A chain of three rows, and a tree of three nodes behind it. */
static void states(void) {
    enum { WIDTH = 304, ROWS_OF_ALL = 6, TAPS = 4, KEYS = 16, HEADS = 2, VALUES = 48 };
    static const int64_t first[] = {0, ROWS_OF_ALL}, chain[] = {3}, row[] = {0, 1, 2, 3, 4, 5}, parent[] = {-1, -1, -1, -1, 0, -1};
    static const int64_t slot[] = {0}, end[] = {2};
    static const int64_t window[] = {0, 1, 2, 1, 2, 3, 2, 3, 4, 3, 4, 5, 4, 5, 6, 3, 4, 5};
    const struct row_paths paths = {ROWS_OF_ALL, 1, first, chain, row, parent, slot};
    state = 55;
    float *made = many(ROWS_OF_ALL * WIDTH), *held = many(TAPS * WIDTH), *given = many(2 * ROWS_OF_ALL * WIDTH);
    const struct convolved_rows convolved = {
        .rows = ROWS_OF_ALL, .requests = 1, .channels = WIDTH, .taps = TAPS, .threads = 1, .apart = WIDTH, .slot = slot, .end = end,
        .window = window, .given = given, .weight = many(TAPS * WIDTH), .bias = many(WIDTH), .state = held, .made = made};
    outrider_convolve(&convolved);
    printf("convolved %016llx", (unsigned long long)hash(made, ROWS_OF_ALL * WIDTH));
    printf(" %016llx\n", (unsigned long long)hash(held, (TAPS - 1) * WIDTH));
    const struct gated_rows gated = {
        .paths = paths, .width = WIDTH, .threads = 1, .apart = 2 * WIDTH, .factor = given, .added = given + WIDTH, .state = held,
        .made = made};
    outrider_step_gated(&gated);
    printf("gated %016llx %016llx\n", (unsigned long long)hash(made, ROWS_OF_ALL * WIDTH), (unsigned long long)hash(held, WIDTH));
    memset(held, 0, 3 * WIDTH * sizeof(float));
    const struct averaged_rows averaged = {
        .paths = paths, .width = WIDTH, .threads = 1, .apart = 2 * WIDTH, .key = given, .value = given + WIDTH, .decay = many(WIDTH),
        .bonus = many(WIDTH), .state = held, .made = made, .scratch = many(4 * 3 * 256)};
    outrider_step_mean(&averaged);
    printf("mean %016llx", (unsigned long long)hash(made, ROWS_OF_ALL * WIDTH));
    printf(" %016llx\n", (unsigned long long)hash(held, 3 * WIDTH));
    const struct keyed_rows keyed = {
        .paths = paths, .heads = HEADS, .key_heads = 1, .keys = KEYS, .values = VALUES, .threads = 1, .per_key = 1,
        .key = many(ROWS_OF_ALL * KEYS), .query = many(ROWS_OF_ALL * KEYS), .value = many(HEADS * ROWS_OF_ALL * VALUES),
        .factor = many(HEADS * ROWS_OF_ALL * KEYS), .part = many(HEADS * ROWS_OF_ALL), .state = many(HEADS * KEYS * VALUES),
        .made = made, .scratch = many(4 * KEYS * PANEL)};
    outrider_step_keyed(&keyed);
    printf("keyed %016llx\n", (unsigned long long)hash(made, HEADS * ROWS_OF_ALL * VALUES));
}

int main(void) {
    printf("check %d\n", outrider_check());
    for (int type = 0; type < 22; type++) linears(type);
    layers();
    choices();
    states();
    return 0;
}
