/* The walk down the trees of a pass, and where answers end. The reference is walk in speculation/acceptance.py. */
#ifndef OUTRIDER_WALKS_H
#define OUTRIDER_WALKS_H

#include <stdint.h>

/* A choice where there is none; in trees, the token of a node that cannot be accepted: native/tree_walks.py. */
enum { NOT_CHOSEN = -1, PROBE = -2 };

/* How an answer goes on. UNKNOWN: nothing was chosen after a row that the choices before lead to. */
enum { GOES_ON = 0, STOPPED = 1, FULL = 2, UNKNOWN = 3 };

/* One request: the nodes of its tree, how many tokens its answer may still have, and those that end it. */
struct answer {
    int64_t nodes, left;
    const int32_t *stops;
    int64_t stop_count;
};

/* What its pass brings: how many nodes are accepted, how many tokens are committed, and how it goes on. */
struct walked {
    int32_t accepted, committed, end;
};

/* Walks down all trees, which lie one after the other. `parents`: -1 is the pending token, which each tree's choices
 * begin with. `path` gets each tree's accepted nodes, `committed` its tokens, at the places of its nodes and choices. */
void walks_follow(const struct answer *answers, int64_t count, const int32_t *tokens, const int32_t *parents,
                  const int32_t *choices, int32_t *path, int32_t *committed, struct walked *found);

#endif
