/* A whole decoder layer of the Llama kind: norm, query-key-value, rotary positions, attention, output, norm, gate and up,
 * SiLU, down. One call does what would be some thirty small operations, each with its own dispatch, and as long as the
 * products themselves when there is but a row (docs/log.md).
 *
 * Exactness: a row's numbers depend on the row alone, in an order that no vector length changes.
 */
#include "linear.h"
#include "low_rank.h"
#include "rounding.h"
#include "tree_attention.h"

struct norm {
    const float *weight; /* or none: nothing to be done */
    float epsilon;
};

/* Products of one input, side by side: a single one, or as many as are stored in different forms. `at` is where, in rows of
 * `width`, the results begin that the model knows: query, key, value; or gate, up. */
struct parts {
    struct linear product[3];
    int64_t count, width, at[3];
};

/* The layer's products, by the input that they have. */
enum place { TO_QUERY_KEY_VALUE, TO_ATTENTION_OUT, TO_GATE_UP, TO_DOWN, PLACES };

/* Mirrored by layer_kernel.py. `rounding`: of what enters each place. */
struct decoder_layer {
    struct norm before_attention, before_mlp, of_query, of_key;
    struct parts query_key_value, gate_up;
    struct linear attention_out, down;
    int64_t hidden, intermediate, heads, kv_heads, size;
    struct rounding rounding[PLACES];
};

/* The adapted rows of a pass, each with what is added at all PLACES; other rows have the layer's own products alone. */
struct adapted {
    const struct span *span;
    int64_t count;
    float *inner; /* [rows of the pass, inner_row], as outrider_low_rank's */
    int64_t inner_row;
};

/* Of one pass: [rows, ...] each. */
struct room {
    const float *cosine, *sine; /* [rows, size] */
    float *normed, *query_key_value, *attended, *gate_up, *active;
    float *rounded; /* as wide as the widest input of a product, if one is rounded */
    float *ordered; /* likewise, if weights of one lie in another order */
};

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
    const int64_t heads = layer->heads + layer->kv_heads, size = layer->size, width = layer->query_key_value.width;
#pragma omp parallel for collapse(2) if (rows * width > ALONE)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t head = 0; head < heads; head++) {
            const struct norm *norm = head < layer->heads ? &layer->of_query : &layer->of_key;
            const int64_t at = head < layer->heads ? head * size : layer->query_key_value.at[1] + (head - layer->heads) * size;
            float *own = room->query_key_value + row * width + at;
            if (norm->weight) normalise(norm, size, own, own);
            rotate(size, room->cosine + row * size, room->sine + row * size, own);
        }
}

/* active = SiLU(gate) * up. */
static void activate(const struct decoder_layer *layer, int64_t rows, const struct room *room) {
    const int64_t size = layer->intermediate, width = layer->gate_up.width;
#pragma omp parallel for collapse(2) if (rows * size > ALONE)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t at = 0; at < size; at += LANES) {
            const float *gates = room->gate_up + row * width + at;
            const vec gate = load(gates), up = load(gates + layer->gate_up.at[1]);
            /* Beyond it the gate is shut anyway. */
            const vec least = larger(gate, spread(-87.0f));
            keep(room->active + row * size + at, gate / (exponential(-least) + 1.0f) * up);
        }
}

/* What enters the products of a place: `in`, [rows, size], or what it is rounded to. Adapters are given `in` itself. */
static const float *entering(const struct decoder_layer *layer, enum place place, const struct room *room, int64_t rows,
                             int64_t size, const float *in) {
    const struct rounding *how = &layer->rounding[place];
    if (how->to == UNROUNDED) return in;
#pragma omp parallel for if (rows * size > ALONE)
    for (int64_t row = 0; row < rows; row++) round_row(how, size, in + row * size, room->rounded + row * size);
    return room->rounded;
}

/* For tests: [rows, size], rounded. */
void outrider_round_rows(const struct rounding *how, int64_t rows, int64_t size, const float *in, float *out) {
    for (int64_t row = 0; row < rows; row++) round_row(how, size, in + row * size, out + row * size);
}

/* out = in times a product, + add: see outrider_linear. */
static void multiply_by(const struct linear *product, const struct room *room, int64_t rows, const float *in, const float *add,
                        float *out, int64_t out_row) {
    const int64_t first = 0;
    if (product->order) outrider_in_order(product, 1, &first, &rows, in, room->ordered), in = room->ordered;
    outrider_linear(product, rows, in, add, out, out_row);
}

static void multiply_parts(const struct parts *parts, const struct room *room, int64_t rows, const float *in, float *out) {
    for (int64_t part = 0, at = 0; part < parts->count; at += parts->product[part++].panels * PANEL)
        multiply_by(&parts->product[part], room, rows, in, 0, out + at, parts->width);
}

/* Add what adapters make of `in` at a place to their own rows of `out`, of `out_row` columns. `adapted` may be none. */
static void adapt(const struct adapted *adapted, enum place place, const float *in, float *out, int64_t out_row) {
    if (adapted) outrider_low_rank(adapted->span, adapted->count, place, in, adapted->inner, adapted->inner_row, out, out_row);
}

/* For ranks, which have a shard of the products of these places: as `adapt`, of the columns that are a rank's own. */
void outrider_layer_adapt(const struct adapted *adapted, int64_t place, const float *in, float *out, int64_t out_row) {
    adapt(adapted, (enum place)place, in, out, out_row);
}

/* Up to what the heads make, room->attended. in: [rows, hidden]; `attention` lacks what this layer makes itself: query, key,
 * value, their strides and out. */
void outrider_layer_attend(const struct decoder_layer *layer, const struct layout *pass, const struct layer *attention,
                           const struct room *room, const struct adapted *adapted, int64_t rows, const float *in) {
    const struct parts *parts = &layer->query_key_value;
    const int64_t size = layer->size;
    struct layer attending = *attention;
    normalise_rows(&layer->before_attention, rows, layer->hidden, in, room->normed);
    multiply_parts(parts, room, rows, entering(layer, TO_QUERY_KEY_VALUE, room, rows, layer->hidden, room->normed),
                   room->query_key_value);
    adapt(adapted, TO_QUERY_KEY_VALUE, room->normed, room->query_key_value, parts->width);
    place_heads(layer, rows, room);
    attending.query = room->query_key_value;
    attending.key = attending.query + parts->at[1];
    attending.value = attending.query + parts->at[2];
    attending.query_head = attending.key_head = attending.value_head = size;
    attending.query_row = attending.key_row = attending.value_row = parts->width;
    attending.out = room->attended;
    outrider_attend(pass, &attending);
}

/* From what attention has added to, [rows, hidden], to what the gate lets through, room->active. */
void outrider_layer_gate(const struct decoder_layer *layer, const struct room *room, const struct adapted *adapted,
                         int64_t rows, const float *in) {
    normalise_rows(&layer->before_mlp, rows, layer->hidden, in, room->normed);
    multiply_parts(&layer->gate_up, room, rows, entering(layer, TO_GATE_UP, room, rows, layer->hidden, room->normed),
                   room->gate_up);
    adapt(adapted, TO_GATE_UP, room->normed, room->gate_up, layer->gate_up.width);
    activate(layer, rows, room);
}

/* All of it. in and out: [rows, hidden]. */
void outrider_layer(const struct decoder_layer *layer, const struct layout *pass, const struct layer *attention,
                    const struct room *room, const struct adapted *adapted, int64_t rows, const float *in, float *out) {
    const int64_t hidden = layer->hidden;
    outrider_layer_attend(layer, pass, attention, room, adapted, rows, in);
    const float *attended = entering(layer, TO_ATTENTION_OUT, room, rows, layer->heads * layer->size, room->attended);
    multiply_by(&layer->attention_out, room, rows, attended, in, out, hidden);
    adapt(adapted, TO_ATTENTION_OUT, room->attended, out, hidden);
    outrider_layer_gate(layer, room, adapted, rows, out);
    const float *active = entering(layer, TO_DOWN, room, rows, layer->intermediate, room->active);
    multiply_by(&layer->down, room, rows, active, out, out, hidden);
    adapt(adapted, TO_DOWN, room->active, out, hidden);
}
