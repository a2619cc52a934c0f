/* What a choice needs to know, and how choices are made; see choose.c. */
#ifndef OUTRIDER_CHOOSE_H
#define OUTRIDER_CHOOSE_H
#include "vectors.h"

/* Of a request; mirrored by choice_structs.py. */
struct request {
    const int64_t *biased, *barred; /* token ids, distinct */
    const float *bias;
    int64_t biases, bars, barred_until, sampled;
    uint64_t seed;
    int64_t top_k; /* 0: all */
    float temperature, presence, frequency, repetition;
    float outside; /* 1 - top_p, 0 if all probability is inside */
    float min_p;
};

/* Of a row; filled in by choice_kernel.py. */
struct point {
    const struct request *request;
    const int64_t *ids;  /* distinct tokens of prompt, answer and path */
    const float *counts; /* how often each occurs in answer and path */
    int64_t known, row, position;
};

/* The token after every point, or -1 where the caller must find it in another way.
 *
 * logits: [rows, vocabulary], a row every `stride` floats; scratch: [threads, outrider_choose_room(vocabulary)] floats.
 */
void outrider_choose(const struct point *points, int64_t count, const float *logits, int64_t vocabulary, int64_t stride,
                     int64_t threads, float *scratch, int64_t *choices);
int64_t outrider_choose_room(int64_t vocabulary);
/* Of a row; mirrored by draw_kernel.py. */
struct draw {
    uint64_t seed;
    int64_t row, position;
    double temperature;
};

/* For each draw three numbers: the greatest sum of logit and noise, its id, and the greatest sum of the
 * other ids; -inf where the greatest logit is not finite.
 *
 * logits: [rows, length], a row every `stride` floats, of the ids from `first` on; scratch: [threads, outrider_draw_room(length)].
 */
void outrider_draw(const struct draw *draws, int64_t count, const float *logits, int64_t length, int64_t stride, int64_t first,
                   int64_t threads, float *scratch, double *told);
int64_t outrider_draw_room(int64_t length);
/* The noise that is made of random words, `count` of them, a multiple of 32; its error is below 1e-5. */
void outrider_gumbel(const uint32_t *words, int64_t count, float *noise);
/* The random words of the first `count` tokens, a multiple of 32. */
void outrider_words(uint64_t seed, int64_t position, int64_t count, uint32_t *words);
#endif
