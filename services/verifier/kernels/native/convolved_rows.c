/* Short causal convolutions, one filter per channel.
 *
 * Channels are independent of each other. So a thread takes some of them through all rows, and through all states afterwards,
 * from which rows read until then. A row's products are rounded and added one after the other, from the oldest input on, to
 * zero; the bias comes last.
 */
#include "convolved_rows.h"

enum { CHANNELS = 256, MOST_TAPS = 8 };

/* The channels from `first` on of an input, by its number. */
INLINE const float *input(const struct convolved_rows *all, int64_t number, int64_t first) {
    const int64_t before = all->taps - 1, held = before * all->requests;
    if (number >= held) return all->given + (number - held) * all->apart + first;
    return all->state + (all->slot[number / before] * before + number % before) * all->channels + first;
}

/* One row over `count` channels. taps: [taps, CHANNELS]. */
INLINE void convolve(const int64_t count_taps, const float *const *inputs, const float *taps, const float *bias, int64_t count,
                     float *made) {
    for (int64_t at = 0; at < count; at += LANES) {
        vec sum = {0};
#pragma GCC unroll 4
        for (int64_t tap = 0; tap < count_taps; tap++)
            sum = sum + load(inputs[tap] + at) * load(taps + tap * CHANNELS + at);
        if (bias) sum = sum + load(bias + at);
        keep(made + at, sum);
    }
}

static void convolve_channels(const struct convolved_rows *all, int64_t first, int64_t count) {
    const int64_t taps = all->taps, before = taps - 1;
    const float *inputs[MOST_TAPS];
    float weight[MOST_TAPS * CHANNELS];
    for (int64_t tap = 0; tap < taps; tap++)
        for (int64_t at = 0; at < count; at++) weight[tap * CHANNELS + at] = all->weight[(first + at) * taps + tap];
    const float *bias = all->bias ? all->bias + first : 0;
    for (int64_t row = all->accepted; row < all->rows; row++) {
        for (int64_t tap = 0; tap < before; tap++) inputs[tap] = input(all, all->window[row * before + tap], first);
        inputs[before] = all->given + row * all->apart + first;
        float *made = all->made + (row - all->accepted) * all->channels + first;
        if (taps == 4) convolve(4, inputs, weight, bias, count, made);
        else if (taps == 3) convolve(3, inputs, weight, bias, count, made);
        else convolve(taps, inputs, weight, bias, count, made);
    }
    for (int64_t request = 0; request < all->requests; request++) {
        const int64_t row = all->end[request];
        float *state = all->state + all->slot[request] * before * all->channels + first;
        for (int64_t at = 0; at < before; at++, state += all->channels) {
            /* Of what a state holds, it takes what lies behind. */
            const int last = at + 1 == before;
            const float *from = last ? all->given + row * all->apart + first : input(all, all->window[row * before + at + 1], first);
            memmove(state, from, count * sizeof(float));
        }
    }
}

void outrider_convolve(const struct convolved_rows *all) {
#pragma omp parallel for num_threads((int)all->threads) if (all->threads > 1) schedule(static)
    for (int64_t first = 0; first < all->channels; first += CHANNELS) {
        const int64_t left = all->channels - first;
        convolve_channels(all, first, left < CHANNELS ? left : CHANNELS);
    }
}
