/* Which drafted nodes a step checks. The reference is MeasuredBudget in speculation/budget.py: the same bits come out. */
#ifndef OUTRIDER_NODES_H
#define OUTRIDER_NODES_H

#include <stdint.h>

/* Buckets of claimed probabilities; in nodes, what a claim counts as, and what a bucket remembers:
 * speculation/acceptance_rates.py. */
enum { BUCKETS = 16, STEPS_PER_HALF = 2 };
#define PRIOR 8.0
#define MEMORY 512.0

/* As speculation.costs.CostTable. */
struct cost_table {
    const int64_t *rows;
    const double *seconds;
    int64_t count;
    double speed, per_request, per_key, per_row_key;
};

/* As speculation.costs.Load. */
struct load {
    int64_t rows, requests, keys, row_keys;
};

/* The nodes of all trees, tree after tree. */
struct nodes {
    int64_t trees;
    const int64_t *counts;  /* nodes of each tree */
    const int32_t *parents; /* within the tree; -1: the last committed token */
    const int32_t *sources; /* -1: a probe */
    const double *claimed;  /* probability that its source claims for the path to it */
    double *accepted;       /* by source and bucket: accepted nodes, and all of them */
    double *seen;
};

/* Ranks nodes, the likeliest first. `order` gets the first `most` of them, numbered over all trees.
 * Returns how many of them are worth their rows beside `certain` tokens; -1: no memory.
 * `step`: without any node, prompts included; `decoding`: the same without prompts. */
int64_t nodes_rank(const struct nodes *nodes, const struct cost_table *costs, const struct load *step,
                   const struct load *decoding, int64_t certain, int64_t most, int32_t *order);

/* The probability that each node is accepted, as AcceptanceRates.probabilities of its tree. */
void nodes_probabilities(const struct nodes *nodes, double *probabilities);

/* Learns which of the verified nodes were accepted, 1 in `hits`: as AcceptanceRates.learn, tree after tree. */
void nodes_learn(const struct nodes *nodes, const uint8_t *hits);

#endif
