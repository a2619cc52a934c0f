/* The target's choices: penalties, temperature, top-k, top-p, min-p, noise and the greatest sum, row by row.
 *
 * Why in C: each of these is some 10 microseconds of work, and as many again for every array that is made on the way.
 *
 * Exactness: penalties and temperature are the very float operations of transformers' processors, in their order. Noise and
 * probabilities are not exact here, and need not be: the noise is good to 1e-5, and a token is chosen only if its lead over
 * the next is ten times that; sums of probabilities are good to a known error, and a token counts as inside or outside of the
 * nucleus only if it is so by more than that. Where that leaves a doubt, the answer is ASK, and the caller computes exactly.
 *
 * Nothing is sorted: whether a token is left by top-k or top-p depends on the tokens above it, so only those that win by
 * their noise are looked at.
 */
#include "choose.h"

/* Tokens whose noise is made at once. GROUP divides the lengths of the scratch. */
enum { GROUP = 2 * LANES, LENGTH_OF = 32, ASK = -1, FEW = 1024, FLOATS_SUMMED = 16 };

/* Noise lies between -3.14 and 22.88. Logits that are further than this below the greatest one never win. */
#define SPREAD_OF_NOISE 26.2f
/* Ten times the error of the noise. */
#define LEAD 1e-4f
/* Twice the difference between a double and what it is rounded to, relatively. */
#define ROUNDING 5e-16f
/* Twice the errors that candidates.py allows for. */
#define SUM_ERROR 6e-6
#define LANE_ERROR 0x1p-25
#define RATIO_ERROR 2e-5f
#define LEAST_MIN_P 1e-30f
/* How far below the greatest logit a nucleus may end: noise is made for the first of these that contains the whole nucleus. */
enum { LIMITS = 4 };
static const float NUCLEI[LIMITS] = {-2.5f, -4.5f, -7.0f, -10.0f};
/* What lies below the limit of min-p by less than this is looked at. */
#define NEAR_LIMIT 0.001f

#define INFINITE __builtin_inff()

/* Philox4x32-10, of LANES / 2 blocks of 4 words each: into[i] is the word of token 4 * block + i. */
INLINE void philox(uint64_t seed, uint64_t position, uint64_t block, uint32_t *into) {
    const uint64_t low = 0xffffffffu;
    uint64_t key0 = seed & low, key1 = seed >> 32;
    wide c0, c1 = {0}, c2 = c1 + (position & low), c3 = c1 + (position >> 32);
    for (int lane = 0; lane < LANES / 2; lane++) c0[lane] = block + (uint64_t)lane;
    const wide first = (wide){0} + 0xd2511f53u, second = (wide){0} + 0xcd9e8d57u;
#pragma GCC unroll 10
    for (int round = 0; round < 10; round++) {
        /* Upper halves need not be zero: products ignore them. */
        const wide p0 = product_of_halves(c0, first), p1 = product_of_halves(c2, second);
        c0 = (p1 >> 32) ^ c1 ^ key0;
        c2 = (p0 >> 32) ^ c3 ^ key1;
        c1 = p1;
        c3 = p0;
        key0 = (key0 + 0x9e3779b9u) & low;
        key1 = (key1 + 0xbb67ae85u) & low;
    }
    const wide even = (c0 & low) | (c1 << 32), odd = (c2 & low) | (c3 << 32);
    uint64_t pairs[LANES];
    for (int lane = 0; lane < LANES / 2; lane++) pairs[2 * lane] = even[lane], pairs[2 * lane + 1] = odd[lane];
    memcpy(into, pairs, sizeof pairs);
}

/* -log(-log((word + 0.5) / 2^32)). */
INLINE vec gumbel(uvec word) {
    /* Numbers near 1 are taken as their distance from it, which a float holds. */
    const ivec upper = (ivec)word >> 31;
    const vec distance = (to_floats(word ^ (uvec)upper) + 0.5f) * 0x1p-32f;
    const ivec near_1 = upper & (distance < spread(0.25f));
    vec exponent;
    const vec mantissa = split(either(upper, spread(1.0f) - distance, distance), &exponent);
    const vec z = either(near_1, spread(0.0f) - distance, mantissa - 1.0f);
    return -logarithm(-logarithm_near_1(z, either(near_1, spread(0.0f), exponent)));
}

INLINE float greatest(vec some) {
    float top = some[0];
    for (int lane = 1; lane < LANES; lane++) top = some[lane] > top ? some[lane] : top;
    return top;
}

INLINE int in_range(const int64_t *ids, int64_t count, int64_t vocabulary) {
    for (int64_t i = 0; i < count; i++)
        if (ids[i] < 0 || ids[i] >= vocabulary) return 0;
    return 1;
}

/* Biases, penalties, barred tokens; 0 if an id is no token. */
static int penalise(const struct point *point, int64_t vocabulary, float *row) {
    const struct request *request = point->request;
    const int64_t bars = point->position < request->barred_until ? request->bars : 0;
    if (!in_range(request->biased, request->biases, vocabulary) || !in_range(request->barred, bars, vocabulary) ||
        !in_range(point->ids, point->known, vocabulary))
        return 0;
    for (int64_t i = 0; i < request->biases; i++) row[request->biased[i]] += request->bias[i];
    for (int64_t i = 0; i < point->known; i++) {
        float logit = row[point->ids[i]];
        if (request->repetition != 1.0f) logit = logit < 0.0f ? logit * request->repetition : logit / request->repetition;
        if (point->counts[i] > 0.0f) logit -= request->presence + request->frequency * point->counts[i];
        row[point->ids[i]] = logit;
    }
    for (int64_t i = 0; i < bars; i++) row[request->barred[i]] = -INFINITE;
    return 1;
}

/* Divide by the temperature. The greatest number; NaN if there is one. `length` is a multiple of LANES. */
static float scale(float *row, int64_t length, float temperature) {
    vec tops = spread(-INFINITE);
    ivec unordered = {0};
    for (int64_t i = 0; i < length; i += LANES) {
        vec some = load(row + i);
        if (temperature != 1.0f) keep(row + i, some = some / spread(temperature));
        tops = larger(some, tops);
        unordered |= some != some;
    }
    return any(unordered) ? __builtin_nanf("") : greatest(tops);
}

/* The first index of `top`, which is there. */
static int64_t index_of(const float *row, float top) {
    int64_t i = 0;
    while (!any(load(row + i) == spread(top))) i += LANES;
    while (row[i] != top) i++;
    return i;
}

/* The sum of exp(logit - top) over logits from `least` on; `within`: only over those at most NUCLEI[i] below the top. */
static double mass(const float *row, int64_t length, float top, float least, double within[LIMITS]) {
    double sum = 0;
    for (int limit = 0; limit < LIMITS; limit++) within[limit] = 0;
    for (int64_t i = 0; i < length;) {
        /* A float sums up few numbers, a double these sums. */
        vec sums = {0}, sums_within[LIMITS] = {0};
        for (const int64_t end = i + FLOATS_SUMMED * LANES < length ? i + FLOATS_SUMMED * LANES : length; i < end; i += LANES) {
            const vec some = load(row + i), below = some - top;
            const vec shares = (vec)((some >= spread(least)) & (ivec)exponential(below));
            sums += shares;
            if (!any(below >= spread(NUCLEI[LIMITS - 1]))) continue;
            for (int limit = 0; limit < LIMITS; limit++)
                sums_within[limit] += (vec)((below >= spread(NUCLEI[limit])) & (ivec)shares);
        }
        for (int lane = 0; lane < LANES; lane++) {
            sum += sums[lane];
            for (int limit = 0; limit < LIMITS; limit++) within[limit] += sums_within[limit][lane];
        }
    }
    return sum;
}

static int64_t count_from(const float *row, int64_t length, float least) {
    ivec counts = {0};
    for (int64_t i = 0; i < length; i += LANES) counts -= load(row + i) >= spread(least);
    int64_t count = 0;
    for (int lane = 0; lane < LANES; lane++) count += counts[lane];
    return count;
}

/* Floats in the order of their bits. */
INLINE int32_t ordered(float number) {
    int32_t bits;
    memcpy(&bits, &number, 4);
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

INLINE float number_of(int32_t bits) {
    float number;
    bits ^= (bits >> 31) & 0x7fffffff;
    memcpy(&number, &bits, 4);
    return number;
}

/* The k-th greatest number; `lowest` if fewer than k reach it. Halves an interval until it holds a single float. */
static float kth_greatest(const float *row, int64_t length, int64_t k, float lowest, float top, float *room) {
    if (count_from(row, length, lowest) < k) return lowest;
    int64_t low = ordered(lowest), high = (int64_t)ordered(top) + 1;
    while (high - low > 1) {
        const float between = number_of((int32_t)((low + high) >> 1));
        const int64_t count = count_from(row, length, between);
        if (count < k) {
            high = (low + high) >> 1;
            continue;
        }
        low = (low + high) >> 1;
        if (count > FEW || length <= FEW + LANES) continue;
        /* Few are left: from here on, only they are counted. */
        int64_t found = 0;
        for (int64_t i = 0; i < length; i += LANES)
            if (any(load(row + i) >= spread(between)))
                for (int64_t at = i; at < i + LANES; at++)
                    if (row[at] >= between) room[found++] = row[at];
        for (length = (found + LANES - 1) / LANES * LANES; found < length; found++) room[found] = -INFINITE;
        row = room;
    }
    return number_of((int32_t)low);
}

enum verdict { INSIDE, OUTSIDE, DOUBTFUL };

/* Probabilities of the tokens above a token, of its equals and its own. Differences from `top`, as a softmax computes them, may
 * be equal where logits are not. */
struct standing {
    double before, equal, own;
};

static struct standing standing_of(const float *row, int64_t length, float top, float logit) {
    const vec below = spread(logit - top);
    struct standing found = {0, 0, exponential(below)[0]};
    for (int64_t i = 0; i < length;) {
        vec greater = {0}, equal = {0};
        for (const int64_t end = i + FLOATS_SUMMED * LANES < length ? i + FLOATS_SUMMED * LANES : length; i < end; i += LANES) {
            const vec differences = load(row + i) - top;
            if (!any(differences >= below)) continue;
            const vec shares = exponential(differences);
            greater += (vec)((differences > below) & (ivec)shares);
            equal += (vec)((differences == below) & (ivec)shares);
        }
        for (int lane = 0; lane < LANES; lane++) found.before += greater[lane], found.equal += equal[lane];
    }
    return found;
}

/* A token is in the nucleus if the tokens above it have less probability than this, together. */
INLINE double inside(const struct request *request) { return 1.0 - (double)request->outside; }

/* By how much transformers' sums, and those made here, may be wrong at that place. */
INLINE double sum_error(const struct request *request, int64_t vocabulary) {
    return SUM_ERROR + request->outside * LANE_ERROR * (double)vocabulary;
}

/* Whether top-p and min-p leave a token that top-k has left. `total`: the mass that top-k leaves. */
static enum verdict judge(const struct request *request, const float *row, int64_t length, int64_t vocabulary, float top,
                          float logit, double total) {
    const struct standing found = standing_of(row, length, top, logit);
    if (request->outside > 0) {
        const double limit = inside(request), error = sum_error(request, vocabulary);
        const double before = found.before / total, last = (found.before + found.equal - found.own) / total;
        /* The greatest one always stays, unless it has equals. */
        if (before > 0 && before >= limit + error) return OUTSIDE;
        if (last > 0 && last >= limit - error) return DOUBTFUL;
    }
    if (request->min_p > 0 && logit < top) {
        const float ratio = (float)found.own, margin = RATIO_ERROR * request->min_p;
        if (ratio < request->min_p - margin) return OUTSIDE;
        if (ratio <= request->min_p + margin) return DOUBTFUL;
    }
    return INSIDE;
}

/* Logits of `row` from `least` on, relative to `top`, plus noise; -inf for all others. `block`: of the row's first token. */
static void add_noise(uint64_t seed, int64_t position, int64_t block, const float *row, int64_t length, float top, float least,
                      float *noisy) {
    for (int64_t i = 0; i < length; i += GROUP) {
        const vec first = load(row + i), second = load(row + i + LANES);
        const ivec some = first >= spread(least), others = second >= spread(least);
        vec sums = spread(-INFINITE), other_sums = sums;
        if (any(some | others)) {
            uint32_t words[GROUP];
            philox(seed, (uint64_t)position, (uint64_t)(block + i / 4), words);
            sums = either(some, first - top + gumbel(*(const uvec *)words), sums);
            other_sums = either(others, second - top + gumbel(*(const uvec *)(words + LANES)), other_sums);
        }
        keep(noisy + i, sums);
        keep(noisy + i + LANES, other_sums);
    }
}

INLINE float larger_of(float a, float b) { return a > b ? a : b; }

static int64_t sample(const struct point *point, float *row, int64_t length, int64_t vocabulary, float top, float *noisy) {
    const struct request *request = point->request;
    const int of_count = request->top_k > 0 && request->top_k < vocabulary;
    if (request->min_p > 0 && request->min_p < LEAST_MIN_P) return ASK;
    /* `noisy` is free until there is noise. */
    const float kth = of_count ? kth_greatest(row, length, request->top_k, top - SPREAD_OF_NOISE, top, noisy) : -INFINITE;
    float least = larger_of(kth, top - SPREAD_OF_NOISE);
    if (request->min_p > 0) least = larger_of(least, top + logarithm(spread(request->min_p))[0] - NEAR_LIMIT);
    double total = 1, within[LIMITS];
    if (request->outside > 0) {
        total = mass(row, length, top, kth, within);
        const double enough = total * (inside(request) + sum_error(request, vocabulary));
        int limit = 0;
        while (limit < LIMITS && within[limit] < enough) limit++;
        if (limit < LIMITS) least = larger_of(least, top + NUCLEI[limit] - NEAR_LIMIT);
    }
    add_noise(request->seed, point->position, 0, row, length, top, least, noisy);
    const float lead = LEAD + ROUNDING * (top < 0 ? -top : top);
    for (;;) {
        const float best = scale(noisy, length, 1.0f);
        if (!(best > -INFINITE)) return ASK;
        const int64_t winner = index_of(noisy, best);
        if (request->outside > 0 || request->min_p > 0) {
            const enum verdict verdict = judge(request, row, length, vocabulary, top, row[winner], total);
            if (verdict == DOUBTFUL) return ASK;
            if (verdict == OUTSIDE) {
                const vec limit = spread(row[winner]);
                for (int64_t i = 0; i < length; i += LANES)
                    keep(noisy + i, either(load(row + i) <= limit, spread(-INFINITE), load(noisy + i)));
                continue;
            }
        }
        return count_from(noisy, length, best - lead) == 1 ? winner : ASK;
    }
}

/* After a row of logits. */
static int64_t choose(const struct point *point, const float *logits, int64_t vocabulary, float *scratch) {
    const struct request *request = point->request;
    const int64_t length = (vocabulary + LENGTH_OF - 1) / LENGTH_OF * LENGTH_OF;
    memcpy(scratch, logits, (size_t)vocabulary * sizeof(float));
    for (int64_t i = vocabulary; i < length; i++) scratch[i] = -INFINITE;
    if (!penalise(point, vocabulary, scratch)) return ASK;
    const float top = scale(scratch, length, request->sampled ? request->temperature : 1.0f);
    if (!(top > -INFINITE && top < INFINITE)) return ASK;
    if (!request->sampled) return index_of(scratch, top);
    return sample(point, scratch, length, vocabulary, top, scratch + length);
}

int64_t outrider_choose_room(int64_t vocabulary) { return 2 * (vocabulary + LENGTH_OF); }

void outrider_choose(const struct point *points, int64_t count, const float *logits, int64_t vocabulary, int64_t stride,
                     int64_t threads, float *scratch, int64_t *choices) {
#pragma omp parallel for schedule(static) num_threads((int)threads) if (threads > 1)
    for (int64_t thread = 0; thread < threads; thread++)
        for (int64_t at = thread; at < count; at += threads)
            choices[at] = choose(points + at, logits + points[at].row * stride, vocabulary,
                                 scratch + thread * outrider_choose_room(vocabulary));
}

/* What a part of the vocabulary tells of a draw. Ids share noise in blocks of four, so what comes before `first` in its block
 * is there as well, and cannot be drawn. */
static void draw(const struct draw *draw, const float *logits, int64_t length, int64_t first, float *row, double *told) {
    const int64_t before = first & 3, padded = (before + length + LENGTH_OF - 1) / LENGTH_OF * LENGTH_OF;
    float *const noisy = row + padded;
    told[0] = told[1] = told[2] = -INFINITE;
    for (int64_t i = 0; i < before; i++) row[i] = -INFINITE;
    memcpy(row + before, logits, (size_t)length * sizeof(float));
    for (int64_t i = before + length; i < padded; i++) row[i] = -INFINITE;
    const float top = scale(row, padded, (float)draw->temperature);
    if (!(top > -INFINITE && top < INFINITE)) return;
    add_noise(draw->seed, draw->position, first >> 2, row, padded, top, top - SPREAD_OF_NOISE, noisy);
    const float best = scale(noisy, padded, 1.0f);
    const int64_t winner = index_of(noisy, best);
    noisy[winner] = -INFINITE;
    told[0] = (double)top + best;
    told[1] = (double)(first - before + winner);
    told[2] = (double)top + scale(noisy, padded, 1.0f);
}

int64_t outrider_draw_room(int64_t length) { return outrider_choose_room(length + 3); }

void outrider_draw(const struct draw *draws, int64_t count, const float *logits, int64_t length, int64_t stride, int64_t first,
                   int64_t threads, float *scratch, double *told) {
#pragma omp parallel for schedule(static) num_threads((int)threads) if (threads > 1)
    for (int64_t thread = 0; thread < threads; thread++)
        for (int64_t at = thread; at < count; at += threads)
            draw(draws + at, logits + draws[at].row * stride, length, first, scratch + thread * outrider_draw_room(length),
                 told + 3 * at);
}

void outrider_gumbel(const uint32_t *words, int64_t count, float *noise) {
    for (int64_t i = 0; i < count; i += LANES) keep(noise + i, gumbel(*(const uvec *)(words + i)));
}

void outrider_words(uint64_t seed, int64_t position, int64_t count, uint32_t *words) {
    for (int64_t i = 0; i < count; i += GROUP) philox(seed, (uint64_t)position, (uint64_t)i / 4, words + i);
}
