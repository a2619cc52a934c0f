/* A whole decoder layer of the Llama kind: norm, query-key-value, rotary positions, attention, output, norm, gate and up,
 * SiLU, down. One call does what would be some thirty small operations, each with its own dispatch, and as long as the
 * products themselves when there is but a row (docs/log.md).
 *
 * Exactness: a row's numbers depend on the row alone, in an order that no vector length changes.
 */
#include "linear.h"
#include "tree_attention.h"

struct norm {
    const float *weight; /* or none: nothing to be done */
    float epsilon;
};

/* Mirrored by layer.py. */
struct decoder_layer {
    struct norm before_attention, before_mlp, of_query, of_key;
    struct linear query_key_value, attention_out, gate_up, down;
    int64_t hidden, intermediate, heads, kv_heads, size;
};

/* Of one pass: [rows, ...] each. */
struct room {
    const float *cosine, *sine; /* [rows, size] */
    float *normed, *query_key_value, *attended, *gate_up, *active;
};

/* Fewer numbers than this are not worth waking other cores for. */
enum { ALONE = 16384 };

/* out = weight * (in / root mean square), of `size` numbers. */
static void normalise(const struct norm *norm, int64_t size, const float *in, float *out) {
    vec squares[COLUMN_VECS] = {0};
    for (int64_t at = 0; at < size; at += COLUMNS)
        for (int v = 0; v < COLUMN_VECS; v++) {
            const vec x = load(in + at + v * LANES);
            squares[v] = fma_of(x, x, squares[v]);
        }
    const float scale = 1.0f / __builtin_sqrtf(sum_of_columns(squares) / (float)size + norm->epsilon);
    for (int64_t at = 0; at < size; at += LANES) keep(out + at, load(norm->weight + at) * (load(in + at) * scale));
}

static void normalise_rows(const struct norm *norm, int64_t rows, int64_t size, const float *in, float *out) {
#pragma omp parallel for if (rows * size > ALONE)
    for (int64_t row = 0; row < rows; row++) normalise(norm, size, in + row * size, out + row * size);
}

/* The rounding of transformers' own: two products, then their sum. */
static void rotate(int64_t size, const float *cosine, const float *sine, float *head) {
    const int64_t half = size / 2, whole = half % LANES ? 0 : half;
    for (int64_t d = whole; d < half; d++) {
        const float left = head[d], right = head[half + d];
        head[d] = left * cosine[d] - right * sine[d];
        head[half + d] = right * cosine[half + d] + left * sine[half + d];
    }
    for (int64_t d = 0; d < whole; d += LANES) {
        const vec left = load(head + d), right = load(head + half + d);
        keep(head + d, left * load(cosine + d) - right * load(sine + d));
        keep(head + half + d, right * load(cosine + half + d) + left * load(sine + half + d));
    }
}

static void place_heads(const struct decoder_layer *layer, int64_t rows, const struct room *room) {
    const int64_t heads = layer->heads + layer->kv_heads, size = layer->size, width = layer->query_key_value.panels * PANEL;
#pragma omp parallel for collapse(2) if (rows * width > ALONE)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t head = 0; head < heads; head++) {
            const struct norm *norm = head < layer->heads ? &layer->of_query : &layer->of_key;
            float *own = room->query_key_value + row * width + head * size;
            if (norm->weight) normalise(norm, size, own, own);
            rotate(size, room->cosine + row * size, room->sine + row * size, own);
        }
}

/* active = SiLU(gate) * up. */
static void activate(const struct decoder_layer *layer, int64_t rows, const struct room *room) {
    const int64_t size = layer->intermediate, width = layer->gate_up.panels * PANEL;
#pragma omp parallel for collapse(2) if (rows * size > ALONE)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t at = 0; at < size; at += LANES) {
            const vec gate = load(room->gate_up + row * width + at), up = load(room->gate_up + row * width + size + at);
            /* Beyond it the gate is shut anyway. */
            const vec least = larger(gate, spread(-87.0f));
            keep(room->active + row * size + at, gate / (exponential(-least) + 1.0f) * up);
        }
}

/* in and out: [rows, hidden]; `attention` lacks what this layer makes itself: query, key, value, their strides and out. */
void outrider_layer(const struct decoder_layer *layer, const struct layout *pass, const struct layer *attention,
                    const struct room *room, int64_t rows, const float *in, float *out) {
    const int64_t width = layer->query_key_value.panels * PANEL, size = layer->size;
    struct layer attending = *attention;
    normalise_rows(&layer->before_attention, rows, layer->hidden, in, room->normed);
    outrider_linear(&layer->query_key_value, rows, room->normed, 0, room->query_key_value);
    place_heads(layer, rows, room);
    attending.query = room->query_key_value;
    attending.key = attending.query + layer->heads * size;
    attending.value = attending.key + layer->kv_heads * size;
    attending.query_head = attending.key_head = attending.value_head = size;
    attending.query_row = attending.key_row = attending.value_row = width;
    attending.out = room->attended;
    outrider_attend(pass, &attending);
    outrider_linear(&layer->attention_out, rows, room->attended, in, out);
    normalise_rows(&layer->before_mlp, rows, layer->hidden, out, room->normed);
    outrider_linear(&layer->gate_up, rows, room->normed, 0, room->gate_up);
    activate(layer, rows, room);
    outrider_linear(&layer->down, rows, room->active, out, out);
}
