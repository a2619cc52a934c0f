/* Linear layers for few rows: float32, weights in float32 or int8, every core of the caller's OpenMP team.
 *
 * Why in C: over 1 to 16 rows a layer costs what reading its weights costs. Laid out in panels that are read once, from
 * the first byte to the last, they come at 26 GB/s where oneDNN's packed layers get 16 (docs/log.md).
 *
 * Exactness: every element is summed up by fused multiply-adds in the order of the inputs, however many rows there are.
 */
#include <stdint.h>
#ifdef __AVX512F__
/* Compilers take the portable conversion from int8 to float apart, lane by lane. */
#include <immintrin.h>
#endif

/* Vector registers that one panel's sums take: two for each row. */
#ifdef __AVX512F__
enum { ROWS = 12 };
#else
enum { ROWS = 3 };
#endif
enum { LANES = 16, PANEL = 2 * LANES, AHEAD = 32 };

typedef float vec __attribute__((vector_size(LANES * sizeof(float)), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(LANES * sizeof(int32_t)), aligned(4)));
typedef int8_t bytes __attribute__((vector_size(LANES), aligned(1)));

enum weights { FLOAT32 = sizeof(float), INT8 = sizeof(int8_t) };

static inline __attribute__((always_inline)) vec weights_at(enum weights type, const char *panel, int64_t number) {
    if (type == FLOAT32) return *(const vec *)(panel + number * FLOAT32);
#ifdef __AVX512F__
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i_u *)(panel + number))));
#else
    return __builtin_convertvector(__builtin_convertvector(*(const bytes *)(panel + number), ivec), vec);
#endif
}

/* What all blocks of a layer share; see outrider_linear. */
struct linear {
    const float *in;
    const char *weights;
    const float *scale, *bias;
    float *out;
    int64_t rows, inputs, panels;
};

/* `count` rows from `row` on, times a panel. Inlined with constant `type` and `count`. */
static inline __attribute__((always_inline)) void multiply(enum weights type, int count, const struct linear *layer,
                                                           int64_t row, int64_t number) {
    const int64_t inputs = layer->inputs, outputs = layer->panels * PANEL;
    const float *in = layer->in + row * inputs, *scale = layer->scale + number * PANEL, *bias = layer->bias + number * PANEL;
    const char *panel = layer->weights + number * inputs * PANEL * type;
    float *out = layer->out + row * outputs + number * PANEL;
    vec sum[ROWS][2];
    for (int r = 0; r < count; r++)
        for (int v = 0; v < 2; v++) sum[r][v] = (vec){0};
    for (int64_t k = 0; k < inputs; k++) {
        __builtin_prefetch(panel + (k + AHEAD) * PANEL * type);
        if (type == FLOAT32) __builtin_prefetch(panel + (k + AHEAD) * PANEL * type + 64);
        const vec left = weights_at(type, panel, k * PANEL), right = weights_at(type, panel, k * PANEL + LANES);
        for (int r = 0; r < count; r++) {
            sum[r][0] += in[r * inputs + k] * left;
            sum[r][1] += in[r * inputs + k] * right;
        }
    }
    for (int r = 0; r < count; r++)
        for (int v = 0; v < 2; v++) {
            vec product = sum[r][v];
            if (type == INT8) product *= *(const vec *)(scale + v * LANES);
            *(vec *)(out + r * outputs + v * LANES) = product + *(const vec *)(bias + v * LANES);
        }
}

static inline __attribute__((always_inline)) void multiply_panel(enum weights type, const struct linear *layer,
                                                                 int64_t number) {
    const int64_t blocks = (layer->rows + ROWS - 1) / ROWS;
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t row = block * layer->rows / blocks;
        switch ((block + 1) * layer->rows / blocks - row) {
#define CASE(COUNT)                                    \
    case COUNT:                                        \
        multiply(type, COUNT, layer, row, number);     \
        break
            CASE(1);
            CASE(2);
            CASE(3);
#ifdef __AVX512F__
            CASE(4);
            CASE(5);
            CASE(6);
            CASE(7);
            CASE(8);
            CASE(9);
            CASE(10);
            CASE(11);
            CASE(12);
#endif
        }
    }
}

/* out = in * weights * scale + bias: in [rows, inputs]; weights [panels, inputs, PANEL]; scale (of int8 weights) and bias
 * [panels * PANEL]; out [rows, panels * PANEL]. */
void outrider_linear(const struct linear *layer, int64_t type) {
#pragma omp parallel for schedule(static)
    for (int64_t number = 0; number < layer->panels; number++) {
        if (type == FLOAT32)
            multiply_panel(FLOAT32, layer, number);
        else
            multiply_panel(INT8, layer, number);
    }
}
