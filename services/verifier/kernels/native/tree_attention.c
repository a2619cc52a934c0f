/* Tree attention over the key-value pool: float32, one layer, every core of the caller's OpenMP team.
 *
 * Why in C: between its matrix products, a pass over one token spends as long on dispatching small torch operations as on
 * reading the keys, and a pass over many requests copies their tiles together before each product (docs/log.md).
 *
 * Exactness: whatever a row's answer is summed up from is added strictly in the order of positions, by fused multiply-adds,
 * one element at a time. How rows are grouped into blocks, passes or threads changes no bit. A tree's nodes lie behind the
 * committed tokens in any order; a node's ancestors are brought into the order of their positions first. Where keys and
 * values are rounded, they are so when they are stored, one by one: all rows, their own among them, read what is stored.
 */
#include "rounding.h"
#include "tree_attention.h"

enum { TILE = 64, QUERIES = 4, LARGEST_HEAD = 512, LONGEST_PATH = 256 };

int omp_get_thread_num(void);

/* c[q][at..] += sum over k of a[q][k] * b[k][at..], in the order of k. Inlined with constant `count` and `vecs`. */
INLINE void multiply_some(int count, int vecs, const float *a, int64_t lda,
                                                                const float *const *b, int64_t depth, float *c,
                                                                int64_t ldc, int64_t at) {
    vec sum[QUERIES][2];
    for (int q = 0; q < count; q++)
        for (int v = 0; v < vecs; v++) sum[q][v] = load(c + q * ldc + at + v * LANES);
    for (int64_t k = 0; k < depth; k++)
        for (int q = 0; q < count; q++)
            for (int v = 0; v < vecs; v++) sum[q][v] = fma_of(spread(a[q * lda + k]), load(b[k] + at + v * LANES), sum[q][v]);
    for (int q = 0; q < count; q++)
        for (int v = 0; v < vecs; v++) keep(c + q * ldc + at + v * LANES, sum[q][v]);
}

/* The same for any count of rows and any width that is a multiple of LANES. */
static void multiply(int64_t count, const float *a, int64_t lda, const float *const *b, int64_t depth, float *c,
                     int64_t ldc, int64_t width) {
    for (int64_t q = 0; q < count; q += QUERIES, a += QUERIES * lda, c += QUERIES * ldc) {
        int64_t at = 0;
        for (; at + 2 * LANES <= width; at += 2 * LANES) switch (count - q) {
                case 1: multiply_some(1, 2, a, lda, b, depth, c, ldc, at); break;
                case 2: multiply_some(2, 2, a, lda, b, depth, c, ldc, at); break;
                case 3: multiply_some(3, 2, a, lda, b, depth, c, ldc, at); break;
                default: multiply_some(QUERIES, 2, a, lda, b, depth, c, ldc, at);
            }
        for (; at < width; at += LANES)
            for (int row = 0; row < QUERIES && row < count - q; row++)
                multiply_some(1, 1, a + row * lda, lda, b, depth, c + row * ldc, ldc, at);
    }
}

/* cap * tanh(score / cap). */
static void cap_scores(float cap, float *scores, int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; p += LANES) {
        /* Beyond it the tangent is 1. */
        const vec twice = -larger(load(scores + p) * (-2.0f / cap), spread(-80.0f));
        keep(scores + p, (spread(1.0f) - 2.0f / (exponential(twice) + 1.0f)) * cap);
    }
}

/* Scores of a row under one query head, by slot, become weights, by position; what it does not see gets 0. Returns their sum.
 * All run over [begin, end), multiples of TILE; the row sees [from, position]. */
static float weigh(const struct layer *layer, int64_t head, float *scores, int64_t begin, int64_t from, int64_t position,
                   int64_t end, int64_t straight, const int64_t *path) {
    float moved[LONGEST_PATH];
    for (int64_t p = straight; p <= position; p++) moved[p - straight] = scores[path[p - straight]];
    for (int64_t p = straight; p <= position; p++) scores[p] = moved[p - straight];
    if (layer->softcap != 0) cap_scores(layer->softcap, scores, begin, end);
    if (layer->bias) {
        const float *bias = layer->bias + head * layer->bias_width;
        for (int64_t p = from; p <= position; p++) scores[p] += bias[layer->bias_by_distance ? position - p : p];
    }
    for (int64_t p = begin; p < from; p++) scores[p] = -__builtin_inff();
    for (int64_t p = position + 1; p < end; p++) scores[p] = -__builtin_inff();
    float top = layer->sinks ? layer->sinks[head] : scores[from];
    for (int64_t p = from; p <= position; p++) top = scores[p] > top ? scores[p] : top;
    vec sums[COLUMN_VECS] = {0};
    for (int64_t p = begin; p < end; p += COLUMNS)
        for (int v = 0; v < COLUMN_VECS; v++) {
            const vec weights = exponential(load(scores + p + v * LANES) - top);
            keep(scores + p + v * LANES, weights);
            sums[v] += weights;
        }
    const float sum = sum_of_columns(sums);
    return layer->sinks ? sum + exponential(spread(layer->sinks[head] - top))[0] : sum;
}

/* One of FP8's numbers as a byte. */
INLINE uint8_t byte_of(float number) {
    uint32_t bits;
    memcpy(&bits, &number, 4);
    const float size = __builtin_fabsf(number);
    /* Below 2^-6 they are multiples of 2^-9, else an exponent and three bits behind the first. */
    const uint32_t magnitude = size < 0x1p-6f ? (uint32_t)(size * 512.0f) : ((bits & 0x7fffffffu) >> 20) - (120u << 3);
    return (uint8_t)(magnitude | (bits >> 24 & 0x80u));
}

/* The numbers of LANES bytes. */
INLINE vec numbers_of(const uint8_t *bytes) {
    const uvec codes = load_bytes(bytes), magnitudes = codes & 0x7fu;
    const vec fine = to_floats(magnitudes) * 0x1p-9f, coarse = (vec)((magnitudes << 20) + (120u << 23));
    return (vec)((uvec)either((ivec)(magnitudes < 8u), fine, coarse) | (codes & 0x80u) << 24);
}

/* Rounds a row of a head, whole vectors, to bytes that lie `apart`. Returns its scale, which is no number if one of them is not
 * finite. The numbers that then stand for it are those of ``InputRounding``. */
static float round_to_bytes(const float *in, int64_t size, uint8_t *bytes, int64_t apart) {
    const float scale = not_zero(reach_of(size, in) / 448.0f);
    ivec usable = ~(ivec){0};
    for (int64_t at = 0; at < size; at += LANES) {
        const vec x = load(in + at), code = -larger(-larger(x / scale, spread(-448.0f)), spread(-448.0f));
        usable &= magnitude(x) < spread(__builtin_inff());
        const vec made = nearest_float(code);
        for (int lane = 0; lane < LANES; lane++) bytes[(at + lane) * apart] = byte_of(made[lane]);
    }
    return any(~usable) ? __builtin_nanf("") : scale;
}

static void store(const struct layout *pass, const struct layer *layer, int64_t row, int64_t head) {
    int64_t slot = pass->own_slot[row], size = layer->size, value_size = layer->value_size;
    int64_t tile = pass->tiles[pass->row_tiles[row] + slot / TILE] * layer->kv_heads + head, at = tile * TILE + slot % TILE;
    const float *key = layer->key + head * layer->key_head + row * layer->key_row;
    const float *value = layer->value + head * layer->value_head + row * layer->value_row;
    if (layer->key_scales) {
        layer->key_scales[at] = round_to_bytes(key, size, (uint8_t *)layer->keys + tile * size * TILE + slot % TILE, TILE);
        layer->value_scales[at] = round_to_bytes(value, value_size, (uint8_t *)layer->values + at * value_size, 1);
        return;
    }
    float *column = (float *)layer->keys + tile * size * TILE + slot % TILE;
    for (int64_t d = 0; d < size; d++) column[d * TILE] = key[d];
    memcpy((float *)layer->values + at * (value_size + 1), value, (size_t)value_size * sizeof(float));
}

/* Where the keys of a tile of a head lie: [size], a line of TILE numbers each. `widened`: room for them. */
static void key_lines(const struct layer *layer, int64_t tile, float *widened, const float **lines) {
    const int64_t numbers = layer->size * TILE;
    const float *keys = layer->key_scales ? widened : (const float *)layer->keys + tile * numbers;
    for (int64_t d = 0; d < layer->size; d++) lines[d] = keys + d * TILE;
    if (!layer->key_scales) return;
    const uint8_t *bytes = (const uint8_t *)layer->keys + tile * numbers;
    const float *scales = layer->key_scales + tile * TILE;
    for (int64_t at = 0; at < numbers; at += LANES) keep(widened + at, numbers_of(bytes + at) * load(scales + at % TILE));
}

/* The value at a place, tile * TILE + slot, as floats. `widened`: room for it. */
static const float *value_line(const struct layer *layer, int64_t place, float *widened) {
    const int64_t size = layer->value_size;
    if (!layer->value_scales) return (const float *)layer->values + place * (size + 1);
    const uint8_t *bytes = (const uint8_t *)layer->values + place * size;
    const vec scale = spread(layer->value_scales[place]);
    for (int64_t at = 0; at < size; at += LANES) keep(widened + at, numbers_of(bytes + at) * scale);
    return widened;
}

/* First position that a row sees. */
static int64_t first_seen(const struct layer *layer, int64_t position) {
    int64_t first = layer->chunk ? position - position % layer->chunk : 0;
    if (layer->window && position - layer->window >= first) first = position - layer->window + 1;
    return first;
}

/* A block's share of the scratch memory, all of it by query: a row under one head. */
struct block {
    int64_t first, count, share, queries, begin, end; /* rows; tiles that any of them sees or owns a slot in */
    const int64_t *tiles;
    float *scores, *query, *sums, *totals;
    float *widened, *moved; /* of a tile whose keys or values are rounded, and of values elsewhere */
};

static struct block open_block(const struct layout *pass, const struct layer *layer, int64_t number, int64_t head,
                               float *scratch) {
    struct block block = {.first = pass->block_rows[number], .begin = INT64_MAX, .scores = scratch};
    block.count = pass->block_rows[number + 1] - block.first;
    block.share = layer->heads / layer->kv_heads;
    block.queries = block.count * block.share;
    block.tiles = pass->tiles + pass->row_tiles[block.first];
    block.query = block.scores + block.queries * pass->slots;
    block.sums = block.query + block.queries * layer->size;
    block.totals = block.sums + block.queries * layer->value_size;
    block.widened = block.totals + block.queries;
    block.moved = block.widened + TILE * (layer->size > layer->value_size ? layer->size : layer->value_size);
    memset(block.sums, 0, (size_t)(block.queries * layer->value_size) * sizeof(float));
    for (int64_t r = 0; r < block.count; r++) {
        int64_t row = block.first + r, begin = first_seen(layer, pass->position[row]) / TILE;
        int64_t end = pass->own_slot[row] / TILE + 1;
        if (begin < block.begin) block.begin = begin;
        if (end > block.end) block.end = end;
        for (int64_t h = 0; h < block.share; h++) {
            const float *own = layer->query + (head * block.share + h) * layer->query_head + row * layer->query_row;
            float *scaled = block.query + (r * block.share + h) * layer->size;
            for (int64_t d = 0; d < layer->size; d++) scaled[d] = own[d] * layer->scale;
        }
    }
    return block;
}

/* Where a tile's values lie for a row, by position. Returns 1 if any lies elsewhere than at its position's slot.
 * straight_lines: where they lie by slot. */
static int value_lines(const struct layout *pass, const struct layer *layer, const struct block *block, int64_t row,
                       int64_t head, int64_t tile, const float *const *straight_lines, const float **lines) {
    int64_t position = pass->position[row], straight = pass->straight[row], begin = tile * TILE, end = begin + TILE;
    const int64_t *path = pass->path + pass->row_path[row];
    memcpy(lines, straight_lines, TILE * sizeof *lines);
    if (position < straight || end <= straight) return 0;
    for (int64_t p = straight > begin ? straight : begin; p < end && p <= position; p++) {
        int64_t slot = path[p - straight], at = block->tiles[slot / TILE] * layer->kv_heads + head;
        lines[p - begin] = value_line(layer, at * TILE + slot % TILE, block->moved + (p - begin) * layer->value_size);
    }
    return 1;
}

/* A block's rows under the query heads that share the key-value head `head`. */
static void attend_block(const struct layout *pass, const struct layer *layer, int64_t number, int64_t head, float *scratch) {
    const struct block block = open_block(pass, layer, number, head, scratch);
    const int64_t size = layer->size, width = layer->value_size, slots = pass->slots, share = block.share;
    const float *lines[LARGEST_HEAD];
    for (int64_t tile = block.begin; tile < block.end; tile++) {
        float *scores = block.scores + tile * TILE;
        key_lines(layer, block.tiles[tile] * layer->kv_heads + head, block.widened, lines);
        for (int64_t q = 0; q < block.queries; q++) memset(scores + q * slots, 0, TILE * sizeof(float));
        multiply(block.queries, block.query, size, lines, size, scores, slots, TILE);
    }
    for (int64_t q = 0; q < block.queries; q++) {
        int64_t row = block.first + q / share, position = pass->position[row];
        block.totals[q] = weigh(layer, head * share + q % share, block.scores + q * slots, block.begin * TILE,
                                first_seen(layer, position), position, block.end * TILE, pass->straight[row],
                                pass->path + pass->row_path[row]);
    }
    for (int64_t tile = block.begin; tile < block.end; tile++) {
        const float *straight[TILE];
        for (int64_t p = 0; p < TILE; p++)
            straight[p] = value_line(layer, (block.tiles[tile] * layer->kv_heads + head) * TILE + p, block.widened + p * width);
        /* Rows whose values lie straight share a product. */
        for (int64_t r = 0, rows; r < block.count; r += rows) {
            const float *others[TILE];
            int moved = value_lines(pass, layer, &block, block.first + r, head, tile, straight, lines);
            for (rows = 1; !moved && r + rows < block.count; rows++)
                if (value_lines(pass, layer, &block, block.first + r + rows, head, tile, straight, others)) break;
            multiply(rows * share, block.scores + r * share * slots + tile * TILE, slots, lines, TILE,
                     block.sums + r * share * width, width, width);
        }
    }
    for (int64_t q = 0; q < block.queries; q++) {
        float *out = layer->out + ((block.first + q / share) * layer->heads + head * share + q % share) * width;
        for (int64_t d = 0; d < width; d++) out[d] = block.sums[q * width + d] / block.totals[q];
    }
}

void outrider_attend(const struct layout *pass, const struct layer *layer) {
#pragma omp parallel num_threads((int)pass->threads)
    {
#pragma omp for collapse(2)
        for (int64_t row = 0; row < pass->rows; row++)
            for (int64_t head = 0; head < layer->kv_heads; head++) store(pass, layer, row, head);
        float *scratch = pass->scratch + omp_get_thread_num() * pass->scratch_per_thread;
#pragma omp for collapse(2) schedule(dynamic)
        for (int64_t block = 0; block < pass->blocks; block++)
            for (int64_t head = 0; head < layer->kv_heads; head++) attend_block(pass, layer, block, head, scratch);
    }
}

