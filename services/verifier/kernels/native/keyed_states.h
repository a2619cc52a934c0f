/* Rows that step states which hold values by their keys; see keyed_states.c. */
#ifndef OUTRIDER_KEYED_STATES_H
#define OUTRIDER_KEYED_STATES_H
#include "vectors.h"

/* What the rows of a pass are given; mirrored by step_kernel.py. A request's rows are a chain, then the nodes of a tree. */
struct keyed_rows {
    int64_t rows, requests, heads, key_heads, keys, values, scratch_per_thread, threads;
    int64_t per_key;        /* whether factor has a number for each key, rather than one */
    const int64_t *first;   /* [requests + 1] where a request begins in row and parent */
    const int64_t *chain;   /* [requests] how many of its rows are its chain */
    const int64_t *row;     /* numbers of the rows */
    const int64_t *parent;  /* of nodes: which node of the request they step from; below 0: the end of its chain */
    const int64_t *slot;    /* [requests] of its state, which the chain changes */
    const float *key;       /* [key heads, rows, keys] */
    const float *query;     /* [key heads, rows, keys] */
    const float *value;     /* [heads, rows, values] */
    const float *factor;    /* [heads, rows, 1 or keys] the state decays by it first, or none: by e^(time * decay) */
    const float *time;      /* [heads, rows, values], or none */
    const float *decay;     /* [heads, keys, values], or none */
    const float *part;      /* [heads, rows] how much is written of what the state lacks of the value, or none: the value is */
    float *state;           /* [slots, heads, keys, values] */
    float *made;            /* [heads, rows, values] */
    float *scratch;         /* [threads, scratch_per_thread] */
};

/* Step all rows. keys is a multiple of 4, values of COLUMNS. */
void outrider_step_keyed(const struct keyed_rows *all);
#endif
