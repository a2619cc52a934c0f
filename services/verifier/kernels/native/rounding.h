/* Numbers that enter a product, rounded to eight bits by a scale of their row: code = round(x / scale), number = code * scale.
 * The same bits as of ``InputRounding`` in services/model_files/weights/rounded_inputs.py, for what has no zero point.
 */
#ifndef OUTRIDER_ROUNDING_H
#define OUTRIDER_ROUNDING_H
#include "vectors.h"

/* Mirrored by layer_kernel.py. TO_WHOLE: from -128 to 127. TO_FLOATS: FP8, e4m3. */
enum rounding { UNROUNDED, TO_WHOLE, TO_FLOATS };

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

/* Of `size` numbers, whole vectors. */
static void round_row(enum rounding how, int64_t size, const float *in, float *out) {
    const float low = how == TO_WHOLE ? -128.0f : -448.0f, high = how == TO_WHOLE ? 127.0f : 448.0f;
    vec most = {0};
    for (int64_t at = 0; at < size; at += LANES) most = larger(magnitude(load(in + at)), most);
    float reach = 0;
    for (int lane = 0; lane < LANES; lane++) reach = most[lane] > reach ? most[lane] : reach;
    float scale = reach / ((high - low) / 2);
    /* Of zeros alone; any other will do. */
    if (scale == 0) scale = 0x1p-23f;
    for (int64_t at = 0; at < size; at += LANES) {
        const vec x = load(in + at), code = -larger(-larger(x / scale, spread(low)), spread(-high));
        const vec made = (how == TO_WHOLE ? nearest_whole(code) : nearest_float(code)) * scale;
        /* What is no number stays none. */
        keep(out + at, either(x == x, made, x));
    }
}

#endif
