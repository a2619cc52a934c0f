/* Linear layers for few rows: float32, every core of the caller's OpenMP team.
 *
 * Why in C: over 1 to 16 rows a layer costs what reading its weights costs. Laid out in panels that are read once, from
 * the first byte to the last, they come at 26 GB/s where oneDNN's packed layers get 16 (docs/log.md).
 *
 * Exactness: every element is summed up by fused multiply-adds in the order of the inputs, however many rows there are.
 */
#include <stdint.h>

/* Vector registers that one panel's sums take: two for each row. */
#ifdef __AVX512F__
enum { ROWS = 12 };
#else
enum { ROWS = 3 };
#endif
enum { LANES = 16, PANEL = 2 * LANES, AHEAD = 1024 };

typedef float vec __attribute__((vector_size(LANES * sizeof(float)), aligned(4)));

/* out[r][0..PANEL) = bias + the sum over k of in[r][k] * panel[k]. Inlined with constant `count`. */
static inline __attribute__((always_inline)) void multiply(int count, const float *in, int64_t inputs, const float *panel,
                                                           const float *bias, float *out, int64_t outputs) {
    vec sum[ROWS][2];
    for (int r = 0; r < count; r++)
        for (int v = 0; v < 2; v++) sum[r][v] = *(const vec *)(bias + v * LANES);
    for (int64_t k = 0; k < inputs; k++, panel += PANEL) {
        __builtin_prefetch(panel + AHEAD);
        __builtin_prefetch(panel + AHEAD + LANES);
        for (int r = 0; r < count; r++)
            for (int v = 0; v < 2; v++) sum[r][v] += in[r * inputs + k] * *(const vec *)(panel + v * LANES);
    }
    for (int r = 0; r < count; r++)
        for (int v = 0; v < 2; v++) *(vec *)(out + r * outputs + v * LANES) = sum[r][v];
}

/* in [rows, inputs]; weights [panels, inputs, PANEL]; bias [panels * PANEL]; out [rows, panels * PANEL]. */
void outrider_linear(const float *in, const float *weights, const float *bias, float *out, int64_t rows, int64_t inputs,
                     int64_t panels) {
    const int64_t blocks = (rows + ROWS - 1) / ROWS, outputs = panels * PANEL;
#pragma omp parallel for schedule(static)
    for (int64_t p = 0; p < panels; p++)
        for (int64_t block = 0; block < blocks; block++) {
            const int64_t from = block * rows / blocks;
            const float *own_in = in + from * inputs, *panel = weights + p * inputs * PANEL, *own_bias = bias + p * PANEL;
            float *own_out = out + from * outputs + p * PANEL;
            switch ((block + 1) * rows / blocks - from) {
#define CASE(COUNT)                                                                     \
    case COUNT:                                                                         \
        multiply(COUNT, own_in, inputs, panel, own_bias, own_out, outputs);             \
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
