/* Which trees that came from outside are sound. The reference is validate in speculation/tree.py. */
#ifndef OUTRIDER_TREES_H
#define OUTRIDER_TREES_H

#include <stdint.h>

/* A bit for each source: below the sign. */
enum { MALFORMED = -1, MOST_SOURCES = 63 };

/* Trees without probes and proposals, tree after tree. */
struct told_trees {
    int64_t count;
    const int64_t *counts; /* nodes of each tree */
    const int32_t *tokens, *parents, *sources;
    const double *scores;
};

/* For each tree the sources that its nodes name, a bit for each, or MALFORMED: a token outside the vocabulary, a parent that
 * does not come before its node, a score that is no number, too many nodes, or a source of too high a number. */
void trees_check(const struct told_trees *trees, int64_t vocab_size, int64_t max_nodes, int64_t *named);

#endif
