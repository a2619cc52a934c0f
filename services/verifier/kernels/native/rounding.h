/* Numbers that enter a product, rounded to eight or four bits: code = round(x / scale + zero), number = (code - zero) * scale.
 * The same bits as of ``InputRounding`` in services/model_files/weights/rounded_inputs.py.
 */
#ifndef OUTRIDER_ROUNDING_H
#define OUTRIDER_ROUNDING_H
#include "vectors.h"

/* TO_WHOLE: from -128 to 127. TO_FLOATS: FP8, e4m3. TO_FOUR_BITS: floats, e2m1. */
enum codes { UNROUNDED, TO_WHOLE, TO_FLOATS, TO_FOUR_BITS };

/* Mirrored by rounding_struct.py. */
struct rounding {
    int64_t to;         /* an enum codes */
    int64_t size;       /* neighbouring numbers of a row that share a scale, whole vectors; or none: all of them */
    int64_t asymmetric; /* whether there is a zero point */
    float scale;        /* a stored one; or 0: what follows from the numbers */
    float zero;         /* beside a stored scale */
    float global_scale; /* what scales are times before they become FP8 themselves; or 0: they do not */
    int64_t power;      /* of scales that are powers of two: the greatest one that is a code, as an exponent; or 0 */
};

/* What a part of a row is rounded with. */
struct grid {
    float scale, zero;
};

INLINE vec magnitude(vec x) { return (vec)((uvec)x & 0x7fffffffu); }

/* The nearest whole number, the even one of two; of at most 2^22. */
INLINE vec nearest_whole(vec x) { return (x + 12582912.0f) - 12582912.0f; }

/* The nearest of FP8's numbers, of at most 448: three bits behind the first; below 2^-6, multiples of 2^-9. */
INLINE vec nearest_float(vec x) {
    const uvec bits = (uvec)magnitude(x), coarse = (bits + 0x7ffffu + ((bits >> 20) & 1u)) & 0xfff00000u;
    const vec fine = ((vec)bits + 16384.0f) - 16384.0f;
    const vec made = either((vec)bits < spread(0x1p-6f), fine, (vec)coarse);
    return (vec)((uvec)made | ((uvec)x & 0x80000000u));
}

/* The nearest float of four bits, of at most 6: one bit behind the first; below 1, multiples of a half. */
INLINE vec nearest_of_four_bits(vec x) {
    const uvec bits = (uvec)magnitude(x), coarse = (bits + 0x1fffffu + ((bits >> 22) & 1u)) & 0xffc00000u;
    const vec fine = ((vec)bits + 4194304.0f) - 4194304.0f;
    const vec made = either((vec)bits < spread(1.0f), fine, (vec)coarse);
    return (vec)((uvec)made | ((uvec)x & 0x80000000u));
}

/* A scale that is FP8 once it is times the global one; 1/8 of that for zeros alone. */
INLINE float rounded_scale(float global_scale, float scale) {
    const float place = scale * global_scale;
    const float code = nearest_float(spread(place < 448.0f ? place : 448.0f))[0];
    return (code == 0 ? 0.125f : code) / global_scale;
}

/* Of zeros alone; any other will do. */
INLINE float not_zero(float scale) { return scale == 0 ? 0x1p-23f : scale; }

/* The greatest magnitude. */
INLINE float reach_of(int64_t size, const float *in) {
    vec most = {0};
    for (int64_t at = 0; at < size; at += LANES) most = larger(magnitude(load(in + at)), most);
    float reach = 0;
    for (int lane = 0; lane < LANES; lane++) reach = most[lane] > reach ? most[lane] : reach;
    return reach;
}

/* A power of two, by which `reach` becomes 2^power or less than twice that: more where it would be 1.75 times. */
INLINE float power_of_two(float reach, int32_t power) {
    int32_t bits;
    memcpy(&bits, &reach, 4);
    const int32_t exponent = ((bits + (1 << 21)) >> 23) - power, made = exponent > 0 ? exponent << 23 : 1 << 22;
    float scale;
    memcpy(&scale, &made, 4);
    return scale;
}

INLINE float scale_of(const struct rounding *how, float half, int64_t size, const float *in) {
    const float reach = reach_of(size, in);
    if (how->power) return power_of_two(reach, (int32_t)how->power);
    return how->global_scale ? rounded_scale(how->global_scale, reach / half) : not_zero(reach / half);
}

/* With a zero point. Zero is always among the numbers that have a code. */
INLINE struct grid grid_of(float low, float high, int64_t size, const float *in) {
    vec above = {0}, below = {0};
    for (int64_t at = 0; at < size; at += LANES) {
        const vec x = load(in + at);
        above = larger(x, above), below = larger(-x, below);
    }
    float most = 0, least = 0;
    for (int lane = 0; lane < LANES; lane++) {
        most = above[lane] > most ? above[lane] : most;
        least = below[lane] > -least ? -below[lane] : least;
    }
    const float scale = (most - least) / (high - low), place = low - least / scale;
    /* A row of zeros has no scale, and needs no zero point. */
    const float zero = place != place ? 0 : place < low ? low : place > high ? high : place;
    return (struct grid){not_zero(scale), (zero + 12582912.0f) - 12582912.0f};
}

/* Of `size` numbers with one scale, whole vectors. */
static void round_part(const struct rounding *how, int64_t size, const float *in, float *out) {
    const int whole = how->to == TO_WHOLE, four = how->to == TO_FOUR_BITS;
    const float low = whole ? -128.0f : four ? -6.0f : -448.0f, high = whole ? 127.0f : -low;
    struct grid grid = {how->scale, how->zero};
    if (!how->scale)
        grid = how->asymmetric ? grid_of(low, high, size, in) : (struct grid){scale_of(how, (high - low) / 2, size, in), 0};
    for (int64_t at = 0; at < size; at += LANES) {
        const vec x = load(in + at), place = x / grid.scale + grid.zero;
        const vec code = -larger(-larger(place, spread(low)), spread(-high));
        const vec nearest = whole ? nearest_whole(code) : four ? nearest_of_four_bits(code) : nearest_float(code);
        const vec made = (nearest - grid.zero) * grid.scale;
        /* What is no number stays none. */
        keep(out + at, either(x == x, made, x));
    }
}

static void round_row(const struct rounding *how, int64_t size, const float *in, float *out) {
    const int64_t part = how->size ? how->size : size;
    for (int64_t at = 0; at < size; at += part) round_part(how, part, in + at, out + at);
}

#endif
