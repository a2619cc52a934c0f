/* The blend of suffix decoding and token recycling in C. The references are BlendSession in ../merging/blend.py, Calibrator in
   ../merging/calibrator.py, and the methods `candidates` of both sources: the trees are the same, number for number.

   Kinds of candidates are numbers here, in the order of both sources' PRIOR; native/calibrator.py has their names. */
#pragma once
#include "automaton.h"
#include "contexts.h"

enum {
    /* Suffix decoding's: whose text, length, count, share, each a number below these. */
    WHOSE = 2, LENGTHS = 7, COUNTS = 3, SHARES = 5,
    SUFFIX_KINDS = WHOSE * LENGTHS * COUNTS * SHARES,
    /* Token recycling's: by order 3, 2, 1 and rank; what was seen, by order; a snapshot's, which only the reference asks; what
       was passed over, by age and rank. */
    ORDERS = LONGEST_CONTEXT,
    TOP = SUFFIX_KINDS, SEEN = TOP + ORDERS * MOST_IDS, SNAPSHOT = SEEN + ORDERS + 1, PASSED_OVER = SNAPSHOT + MOST_IDS,
    /* Agreements of one of each, without the last part of their names. */
    RECYCLING_STEMS = ORDERS + 2 + PASSED,
    AGREEMENTS = PASSED_OVER + PASSED * PASSED_RANKS,
    KINDS = AGREEMENTS + SUFFIX_KINDS / SHARES * RECYCLING_STEMS
};

/* What may follow a node; `second`: the kind under which the other source named it as well, or -1. */
struct candidate {
    int32_t token, first, second;
    double probability;
};

/* The end of a path as both sources see it; state -1: suffix decoding knows nothing of it. */
struct place {
    struct ending own, shared;
    struct context context;
};

/* A node: its parent's number, that of its first candidate, and the probability of its path. The root is node 0. */
struct drafted {
    int32_t parent, token, candidates;
    double probability;
    struct place place;
};

/* What is asked for; filled in by native/blend.py. */
struct wanted {
    /* NULL where a source takes no part. */
    struct automaton *own, *shared;
    const struct table *table;
    const struct text_end *end;
    const double *weights;
    double least;
    int32_t max_nodes, depth, max_endings;
    struct ending own_end, shared_end;
};

struct draft;

/* The likeliest tree: tokens, parents (-1: the root), whether recycling named the node, and probabilities of the nodes'
   paths. Returns how many nodes there are. */
int64_t blend_draft(struct draft *draft, const struct wanted *wanted, int32_t *tokens, int32_t *parents, int32_t *recycled,
                    double *scores);
/* Learns from the last draft that these tokens were committed, and forgets it. */
void blend_learn(struct draft *draft, const int32_t *committed, int64_t many, double *weights, double *squares);
