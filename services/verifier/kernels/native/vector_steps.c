/* States of some numbers for each channel: the gated linear recurrent unit, and RWKV's weighted mean.
 *
 * Channels are independent of each other. So a thread takes some of them through all rows of a request. Products are rounded
 * before they are added. No number depends on how rows are cut into passes, on threads, or on LANES.
 */
#include "vector_steps.h"

int omp_get_thread_num(void);

enum { CHANNELS = 256, HELD = 3 };

/* The largest exponent of a state that has seen no row; as in weighted_mean.py. */
static const float LEAST = -1e38f;

static void step_gated_channels(const struct gated_rows *all, int64_t request, int64_t first, int64_t count) {
    const struct row_paths *paths = &all->paths;
    const int64_t begin = paths->first[request], nodes = begin + paths->chain[request], stop = paths->first[request + 1];
    float *state = all->state + paths->slot[request] * all->width + first;
    const float *end = state;
    for (int64_t step = begin; step < stop; step++) {
        const int64_t row = paths->row[step], parent = step < nodes ? -1 : paths->parent[step];
        /* A row's output is its state. */
        const float *from = parent < 0 ? end : all->made + paths->row[nodes + parent] * all->width + first;
        const float *factor = all->factor + row * all->apart + first, *added = all->added + row * all->apart + first;
        float *made = all->made + row * all->width + first;
        for (int64_t at = 0; at < count; at += LANES) keep(made + at, load(from + at) * load(factor + at) + load(added + at));
        if (step < nodes) end = made;
    }
    memmove(state, end, count * sizeof(float));
}

struct mean {
    vec total, weight, largest;
};

/* The state with a value of this exponent. */
INLINE struct mean with(struct mean state, vec exponent, vec value) {
    const vec most = larger(state.largest, exponent);
    const vec before = exponential(state.largest - most), own = exponential(exponent - most);
    return (struct mean){before * state.total + own * value, before * state.weight + own, most};
}

/* One row. from and to: [HELD, CHANNELS], may be the same. */
INLINE void step_mean(const struct averaged_rows *all, int64_t row, int64_t first, int64_t count, const float *from, float *to) {
    for (int64_t at = 0; at < count; at += LANES) {
        struct mean state = {load(from + at), load(from + CHANNELS + at), load(from + 2 * CHANNELS + at)};
        /* A state without a row holds zeros; afterwards its weight is never below 1. */
        state.largest = either(state.weight == 0.0f, spread(LEAST), state.largest);
        const vec key = load(all->key + row * all->apart + first + at), value = load(all->value + row * all->apart + first + at);
        const struct mean read = with(state, key + load(all->bonus + first + at), value);
        keep(all->made + row * all->width + first + at, read.total / read.weight);
        state.largest = state.largest + load(all->decay + first + at);
        state = with(state, key, value);
        keep(to + at, state.total), keep(to + CHANNELS + at, state.weight), keep(to + 2 * CHANNELS + at, state.largest);
    }
}

static void step_mean_channels(const struct averaged_rows *all, int64_t request, int64_t first, int64_t count, float *scratch) {
    const struct row_paths *paths = &all->paths;
    const int64_t begin = paths->first[request], nodes = begin + paths->chain[request], stop = paths->first[request + 1];
    const int64_t room = HELD * CHANNELS, bytes = count * sizeof(float);
    float *state = all->state + paths->slot[request] * HELD * all->width + first;
    for (int held = 0; held < HELD; held++) memcpy(scratch + held * CHANNELS, state + held * all->width, bytes);
    for (int64_t step = begin; step < nodes; step++) step_mean(all, paths->row[step], first, count, scratch, scratch);
    for (int held = 0; held < HELD; held++) memcpy(state + held * all->width, scratch + held * CHANNELS, bytes);
    for (int64_t step = nodes; step < stop; step++) {
        const int64_t parent = paths->parent[step];
        const float *from = scratch + (parent < 0 ? 0 : 1 + parent) * room;
        step_mean(all, paths->row[step], first, count, from, scratch + (1 + step - nodes) * room);
    }
}

INLINE int64_t channels_from(int64_t first, int64_t width) { return width - first < CHANNELS ? width - first : CHANNELS; }

/* Channels before requests: threads get equal numbers of neighbours, and one request may have a prompt's rows, the others one. */
void outrider_step_gated(const struct gated_rows *all) {
#pragma omp parallel for collapse(2) num_threads((int)all->threads) if (all->threads > 1) schedule(static)
    for (int64_t first = 0; first < all->width; first += CHANNELS)
        for (int64_t request = 0; request < all->paths.requests; request++)
            step_gated_channels(all, request, first, channels_from(first, all->width));
}

void outrider_step_mean(const struct averaged_rows *all) {
#pragma omp parallel num_threads((int)all->threads) if (all->threads > 1)
    {
        float *scratch = all->scratch + omp_get_thread_num() * all->scratch_per_thread;
#pragma omp for collapse(2) schedule(static)
        for (int64_t first = 0; first < all->width; first += CHANNELS)
            for (int64_t request = 0; request < all->paths.requests; request++)
                step_mean_channels(all, request, first, channels_from(first, all->width), scratch);
    }
}
