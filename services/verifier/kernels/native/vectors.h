/* Vectors of floats as the processor has them. The only place that knows instruction sets: lanes, registers, fused
 * multiply-adds. Everything is summed up in an order that no choice here changes, so all of them compute the same bits.
 */
#ifndef OUTRIDER_VECTORS_H
#define OUTRIDER_VECTORS_H
#include <stdint.h>
#include <string.h>

/* LANES: floats of a vector. The sums of ROWS rows over a whole panel of outputs fit into the registers, beside what is read.
 * Weights that are made floats on the way take more: DIRECT_ROWS rows, over DIRECT_VECS vectors at a time if there is more
 * than one row. */
#if defined(__AVX512F__)
#include <immintrin.h>
enum { LANES = 16, ROWS = 12, DIRECT_ROWS = 8, DIRECT_VECS = 2 };
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
enum { LANES = 8, ROWS = 3, DIRECT_ROWS = 4, DIRECT_VECS = 2 };
#elif defined(__aarch64__) && defined(__ARM_NEON)
#include <arm_neon.h>
enum { LANES = 4, ROWS = 3, DIRECT_ROWS = 4, DIRECT_VECS = 4 };
#else
#error "these kernels need AVX-512, AVX2 with FMA and F16C, or NEON"
#endif

/* Outputs of a layer that lie side by side, and what is summed up apart where a sum is taken over vectors. */
enum { PANEL = 32, PANEL_VECS = PANEL / LANES, COLUMNS = 16, COLUMN_VECS = COLUMNS / LANES };

typedef float vec __attribute__((vector_size(LANES * sizeof(float)), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(LANES * sizeof(int32_t)), aligned(4)));
typedef uint32_t uvec __attribute__((vector_size(LANES * sizeof(uint32_t)), aligned(4)));
/* Half as many numbers, of 64 bits. */
typedef uint64_t wide __attribute__((vector_size(LANES * sizeof(uint32_t)), aligned(8)));

#define INLINE static inline __attribute__((always_inline))

/* Reads `what` from memory at every use, as an operand. Where registers are few, the compiler would keep it in one, and spill
 * sums, which wait for each other then. */
#if defined(__AVX2__) && !defined(__AVX512F__)
#define FROM_MEMORY(what) __asm__("" : "+m"(what))
#else
#define FROM_MEMORY(what) (void)(what)
#endif

INLINE vec load(const float *from) { return *(const vec *)from; }
INLINE void keep(float *to, vec what) { *(vec *)to = what; }
INLINE vec spread(float one) { return (vec){0} + one; }

/* a * b + c, rounded once. */
INLINE vec fma_of(vec a, vec b, vec c) {
#if defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#endif
}

/* LANES numbers of 16 bits (IEEE half precision) as floats. */
INLINE vec load_halves(const uint16_t *from) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif defined(__AVX2__)
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
#else
    return (vec)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from)));
#endif
}

/* LANES numbers from 0 to 255. */
INLINE uvec load_bytes(const uint8_t *from) {
#if defined(__AVX512F__)
    return (uvec)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from));
#elif defined(__AVX2__)
    return (uvec)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)from));
#else
    uint32_t four;
    memcpy(&four, from, 4);
    return (uvec)vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four))));
#endif
}

/* For each byte of `which`, from 0 to 15, an entry of a table of 16 bytes. */
INLINE uvec looked_up(const uint8_t *table, uvec which) {
#if defined(__AVX512F__)
    return (uvec)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)table)), (__m512i)which);
#elif defined(__AVX2__)
    return (uvec)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table)), (__m256i)which);
#else
    return (uvec)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)which);
#endif
}

/* For each of `which`, of whose bits the lowest four count, an entry of a table of 16 floats. */
INLINE vec from_table(const float *table, uvec which) {
#if defined(__AVX512F__)
    return (vec)_mm512_permutexvar_ps((__m512i)which, _mm512_loadu_ps(table));
#elif defined(__AVX2__)
    /* Three bits say where in a half of the table, the fourth says in which. */
    const __m256i at = (__m256i)which;
    const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), at);
    const __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), at);
    return (vec)_mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(at, 28)));
#else
    const uint8x16x4_t bytes = {{
        vld1q_u8((const uint8_t *)table), vld1q_u8((const uint8_t *)(table + 4)),
        vld1q_u8((const uint8_t *)(table + 8)), vld1q_u8((const uint8_t *)(table + 12)),
    }};
    return (vec)vqtbl4q_u8(bytes, (uint8x16_t)((which & 15) * 0x04040404u + 0x03020100u));
#endif
}

/* The 64-bit products of the lower halves. */
INLINE wide product_of_halves(wide a, wide b) {
#if defined(__AVX512F__)
    return (wide)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (wide)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#else
    return (wide)vmull_u32(vmovn_u64((uint64x2_t)a), vmovn_u64((uint64x2_t)b));
#endif
}

/* Whether a comparison holds in any lane. */
INLINE int any(ivec compared) {
#if defined(__AVX512F__)
    return _mm512_movepi32_mask((__m512i)compared) != 0;
#elif defined(__AVX2__)
    return _mm256_movemask_epi8((__m256i)compared) != 0;
#else
    return vmaxvq_u32((uint32x4_t)compared) != 0;
#endif
}

INLINE vec either(ivec compared, vec yes, vec no) { return (vec)((compared & (ivec)yes) | (~compared & (ivec)no)); }

INLINE vec to_floats(uvec numbers) { return __builtin_convertvector((ivec)numbers, vec); }

/* a > b ? a : b, which is b where they are not ordered. */
INLINE vec larger(vec a, vec b) {
#if defined(__AVX512F__)
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return either(a > b, a, b);
#endif
}

/* The columns of `sums`, one after the other. */
INLINE float sum_of_columns(const vec *sums) {
    float sum = 0;
    for (int v = 0; v < COLUMN_VECS; v++)
        for (int lane = 0; lane < LANES; lane++) sum += sums[v][lane];
    return sum;
}

/* e^x to about 1 unit in the last place (Cephes' polynomial), for x <= 88; 0 below -87. */
INLINE vec exponential(vec x) {
    const vec low = spread(-87.0f);
    const ivec small = x < low;
    x = (vec)((small & (ivec)low) | (~small & (ivec)x));
    /* To the nearest: conversion cuts towards zero. */
    const ivec negative = x < spread(0.0f);
    const vec half = (vec)((negative & (ivec)spread(-0.5f)) | (~negative & (ivec)spread(0.5f)));
    const ivec n = __builtin_convertvector(fma_of(x, spread(1.44269504088896341f), half), ivec);
    const vec whole = __builtin_convertvector(n, vec);
    vec r = fma_of(whole, spread(-0.693359375f), x);
    r = fma_of(whole, spread(2.12194440e-4f), r);
    vec y = spread(1.9875691500e-4f);
    y = fma_of(y, r, spread(1.3981999507e-3f));
    y = fma_of(y, r, spread(8.3334519073e-3f));
    y = fma_of(y, r, spread(4.1665795894e-2f));
    y = fma_of(y, r, spread(1.6666665459e-1f));
    y = fma_of(y, r, spread(5.0000001201e-1f));
    y = fma_of(y * r, r, r) + spread(1.0f);
    y = y * (vec)((n + 127) << 23);
    return (vec)(~small & (ivec)y);
}

/* log(1 + z) + exponent * log(2) to about 1 unit in the last place (Cephes' polynomial), for z from sqrt(1/2) - 1 to sqrt(2) - 1. */
INLINE vec logarithm_near_1(vec z, vec exponent) {
    const vec square = z * z;
    vec y = spread(7.0376836292e-2f);
    y = fma_of(y, z, spread(-1.1514610310e-1f));
    y = fma_of(y, z, spread(1.1676998740e-1f));
    y = fma_of(y, z, spread(-1.2420140846e-1f));
    y = fma_of(y, z, spread(1.4249322787e-1f));
    y = fma_of(y, z, spread(-1.6668057665e-1f));
    y = fma_of(y, z, spread(2.0000714765e-1f));
    y = fma_of(y, z, spread(-2.4999993993e-1f));
    y = fma_of(y, z, spread(3.3333331174e-1f)) * z * square;
    y = fma_of(exponent, spread(-2.12194440e-4f), y);
    y = fma_of(square, spread(-0.5f), y);
    return fma_of(exponent, spread(0.693359375f), z + y);
}

/* The mantissa of x, from sqrt(1/2) to sqrt(2), for positive x that are not subnormal. */
INLINE vec split(vec x, vec *exponent) {
    const ivec bits = (ivec)x, power = (bits - 0x3f3504f3) >> 23;
    *exponent = __builtin_convertvector(power, vec);
    return (vec)(bits - (power << 23));
}

INLINE vec logarithm(vec x) {
    vec exponent;
    const vec mantissa = split(x, &exponent);
    return logarithm_near_1(mantissa - 1.0f, exponent);
}
#endif
