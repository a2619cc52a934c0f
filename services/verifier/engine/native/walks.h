/* How far the target's choices go down many trees. The reference is walk in speculation/acceptance.py, without its stop rule. */
#ifndef OUTRIDER_WALKS_H
#define OUTRIDER_WALKS_H

#include <stdint.h>

/* Trees without probes, tree after tree. */
struct walks {
    int64_t count;
    const int32_t *node_counts;
    const int32_t *held;    /* the root's token and the nodes', tree after tree */
    const int32_t *parents;
    const int32_t *choices; /* after the root and after each node, tree after tree */
    int32_t *path_counts;   /* gets how many nodes of each tree are accepted */
    int32_t *paths;         /* gets them, path behind path */
    int32_t *tokens;        /* gets those of each path and the choice after it, likewise */
};

void walks_take(const struct walks *walks);

#endif
