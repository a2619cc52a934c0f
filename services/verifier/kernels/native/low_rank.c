/* Low-rank products beside those of linear layers, as adapters have them: out += up * (down * in), row by row.
 *
 * Exactness: a row's numbers depend on the row alone. The inputs are cut into PIECES by their number alone. A piece is summed
 * up strictly from its first term to its last, and so are the pieces, then the products with `up`, in every instruction set; the
 * whole is added to what the layer has made.
 *
 * One region for all rows and adapters of a pass, whose threads have equal parts of the multiplications: a single row takes as
 * long as its weights take to be read, which two cores do faster than one.
 */
#include "low_rank.h"

/* Multiplications that are worth waking other cores for. */
enum { ALONE = 32768 };

int omp_get_thread_num(void);
int omp_get_num_threads(void);

typedef uint16_t half_vec __attribute__((vector_size(LANES * sizeof(uint16_t)), aligned(2)));

/* LANES weights from number `at` on. A bfloat16 number is the upper half of the float that it is. */
INLINE vec weights_at(int halves, const void *weights, int64_t at) {
    if (!halves) return load((const float *)weights + at);
    const half_vec upper = *(const half_vec *)((const uint16_t *)weights + at);
    return (vec)(__builtin_convertvector(upper, uvec) << 16);
}

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

/* Input k times its weights, for COLUMNS of them from `at` on. */
INLINE void add_input(int halves, const struct low_rank *part, const float *in, int64_t k, int64_t at, vec *sums) {
    for (int v = 0; v < COLUMN_VECS; v++)
        sums[v] = fma_of(spread(in[k]), weights_at(halves, part->down, k * part->rank + at + v * LANES), sums[v]);
}

/* The sums of `count` pieces from `first` on, side by side since sums wait for their terms; inner: [PIECES, rank]. */
INLINE void shrink_by(int halves, int count, const struct low_rank *part, int64_t first, int64_t at, const float *in,
                      float *inner) {
    const int64_t inputs = part->inputs, length = (inputs + PIECES - 1) / PIECES;
    /* The last piece may be shorter. */
    const int64_t together = least(length, most(0, inputs - (first + count - 1) * length));
    vec sums[PIECES][COLUMN_VECS] = {{{0}}};
    for (int64_t k = first * length; k < first * length + together; k++)
        for (int piece = 0; piece < count; piece++) add_input(halves, part, in, k + piece * length, at, sums[piece]);
    for (int piece = 0; piece < count; piece++) {
        const int64_t begin = (first + piece) * length;
        for (int64_t k = begin + together; k < least(inputs, begin + length); k++)
            add_input(halves, part, in, k, at, sums[piece]);
        for (int v = 0; v < COLUMN_VECS; v++) keep(inner + (first + piece) * part->rank + at + v * LANES, sums[piece][v]);
    }
}

/* Those of COLUMNS numbers, from `at` on: a piece of them, or all. */
static void shrink(const struct low_rank *part, int64_t piece, int64_t at, const float *in, float *inner) {
    if (part->halves)
        shrink_by(1, 1, part, piece, at, in, inner);
    else
        shrink_by(0, 1, part, piece, at, in, inner);
}

static void shrink_all(const struct low_rank *part, int64_t at, const float *in, float *inner) {
    if (part->halves)
        shrink_by(1, PIECES, part, 0, at, in, inner);
    else
        shrink_by(0, PIECES, part, 0, at, in, inner);
}

/* out += up * inner, for the outputs from `at`, whole COLUMNS, to before `end`. */
INLINE void expand_by(int halves, const struct low_rank *part, int64_t at, int64_t end, const float *inner, float *out) {
    for (; at < end; at += COLUMNS) {
        _Alignas(64) float made[COLUMNS];
        vec sums[COLUMN_VECS] = {0};
        for (int64_t r = 0, from = at * part->rank; r < part->rank; r++, from += COLUMNS)
            for (int v = 0; v < COLUMN_VECS; v++)
                sums[v] = fma_of(spread(inner[r]), weights_at(halves, part->up, from + v * LANES), sums[v]);
        if (at + COLUMNS <= end) {
            for (int v = 0; v < COLUMN_VECS; v++) keep(out + at + v * LANES, load(out + at + v * LANES) + sums[v]);
            continue;
        }
        for (int v = 0; v < COLUMN_VECS; v++) keep(made + v * LANES, sums[v]);
        for (int64_t lane = 0; lane < end - at; lane++) out[at + lane] += made[lane];
    }
}

/* The panels of COLUMNS outputs from `first` to before `end`, of what the pieces have made. */
static void expand(const struct low_rank *part, int64_t first, int64_t end, const float *pieces, float *out) {
    float inner[part->rank];
    for (int64_t r = 0; r < part->rank; r += LANES) {
        vec sum = load(pieces + r);
        for (int piece = 1; piece < PIECES; piece++) sum += load(pieces + piece * part->rank + r);
        keep(inner + r, sum * spread(part->scale));
    }
    if (part->halves)
        expand_by(1, part, first * COLUMNS, least(end * COLUMNS, part->outputs), inner, out);
    else
        expand_by(0, part, first * COLUMNS, least(end * COLUMNS, part->outputs), inner, out);
}

/* What is asked; see outrider_low_rank. */
struct asked {
    const struct span *spans;
    int64_t count, place;
    const float *in;
    float *inner, *out;
    int64_t inner_row, out_row;
};

/* Equal pieces of work: COLUMNS inner numbers of a row, or a piece of them, and panels of outputs, which take as long as the rank
 * is. */
INLINE int64_t shrinking(const struct low_rank *part, int whole) { return part->rank / COLUMNS * (whole ? 1 : PIECES); }
INLINE int64_t panels(const struct low_rank *part) { return (part->outputs + COLUMNS - 1) / COLUMNS; }
INLINE int64_t expanding(const struct low_rank *part) { return part->rank / COLUMNS * panels(part); }

/* The work from `from` to before `to`, in the order of spans, rows and parts. */
static void shrink_share(const struct asked *asked, int whole, int64_t from, int64_t to) {
    for (int64_t number = 0; number < asked->count; number++) {
        const struct span *span = asked->spans + number;
        const struct low_ranks *by = span->by + asked->place;
        for (int64_t row = span->first; row < span->first + span->rows; row++)
            for (const struct low_rank *part = by->part; part < by->part + by->count; part++) {
                const int64_t work = shrinking(part, whole);
                const float *in = asked->in + row * part->inputs;
                float *inner = asked->inner + row * asked->inner_row + part->begin;
                for (int64_t unit = most(from, 0); unit < least(to, work); unit++)
                    if (whole)
                        shrink_all(part, unit * COLUMNS, in, inner);
                    else
                        shrink(part, unit % PIECES, unit / PIECES * COLUMNS, in, inner);
                from -= work, to -= work;
            }
    }
}

static void expand_share(const struct asked *asked, int64_t from, int64_t to) {
    for (int64_t number = 0; number < asked->count; number++) {
        const struct span *span = asked->spans + number;
        const struct low_ranks *by = span->by + asked->place;
        for (int64_t row = span->first; row < span->first + span->rows; row++)
            for (const struct low_rank *part = by->part; part < by->part + by->count; part++) {
                const int64_t each = part->rank / COLUMNS, work = expanding(part);
                /* A panel is its thread's in whose share it begins. */
                const int64_t first = (most(from, 0) + each - 1) / each, end = (most(least(to, work), 0) + each - 1) / each;
                if (first < end)
                    expand(part, first, end, asked->inner + row * asked->inner_row + part->begin,
                           asked->out + row * asked->out_row + part->at);
                from -= work, to -= work;
            }
    }
}

void outrider_low_rank(const struct span *spans, int64_t count, int64_t place, const float *in, float *inner, int64_t inner_row,
                       float *out, int64_t out_row) {
    const struct asked asked = {spans, count, place, in, inner, out, inner_row, out_row};
    int64_t columns = 0, outputs = 0, inputs = 0;
    for (int64_t number = 0; number < count; number++) {
        const struct low_ranks *by = spans[number].by + place;
        for (const struct low_rank *part = by->part; part < by->part + by->count; part++) {
            columns += spans[number].rows * shrinking(part, 1);
            outputs += spans[number].rows * expanding(part);
            inputs = part->inputs;
        }
    }
#pragma omp parallel if ((columns * inputs + outputs * COLUMNS) * COLUMNS > ALONE)
    {
        const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
        const int whole = columns >= 4 * threads;
        const int64_t units = columns * (whole ? 1 : PIECES);
        shrink_share(&asked, whole, thread * units / threads, (thread + 1) * units / threads);
#pragma omp barrier
        expand_share(&asked, thread * outputs / threads, (thread + 1) * outputs / threads);
    }
}
