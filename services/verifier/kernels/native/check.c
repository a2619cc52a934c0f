/* Whether this processor can run what the compiler has made of vectors.h: called in a process of its own, which may die. */
#include "vectors.h"

/* 1 if small sums come out right. */
int outrider_check(void) {
    volatile float given[COLUMNS];
    volatile uint16_t halves[COLUMNS];
    float floats[COLUMNS];
    uint16_t stored[COLUMNS];
    int right = 1;
    for (int i = 0; i < COLUMNS; i++) given[i] = (float)i, halves[i] = 0x4200; /* 3 */
    for (int i = 0; i < COLUMNS; i++) floats[i] = given[i], stored[i] = halves[i];
    for (int at = 0; at < COLUMNS; at += LANES) {
        const vec made = fma_of(load(floats + at), load_halves(stored + at), exponential(load(floats + at) * 0.0f));
        const vec numbers = to_floats((uvec)__builtin_convertvector(load(floats + at), ivec) << 1);
        for (int lane = 0; lane < LANES; lane++)
            right &= made[lane] == 3.0f * (float)(at + lane) + 1.0f && numbers[lane] == 2.0f * (float)(at + lane);
    }
    return right;
}
