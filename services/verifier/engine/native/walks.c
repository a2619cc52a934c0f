/* See walks.h. */
#include "walks.h"

/* The first child of a node that holds a token; the number of nodes: there is none. */
static int64_t child_with(const int32_t *held, const int32_t *parents, int64_t nodes, int64_t node, int32_t token) {
    int64_t child = node + 1;
    while (child < nodes && (parents[child] != node || held[child + 1] != token)) child++;
    return child;
}

void walks_take(const struct walks *walks) {
    const int32_t *held = walks->held, *parents = walks->parents, *choices = walks->choices;
    int32_t *paths = walks->paths, *tokens = walks->tokens;
    for (int64_t tree = 0; tree < walks->count; tree++) {
        const int64_t nodes = walks->node_counts[tree];
        int32_t *begin = paths;
        for (int64_t node = -1; node < nodes;) {
            *tokens++ = choices[node + 1];
            node = child_with(held, parents, nodes, node, choices[node + 1]);
            if (node < nodes) *paths++ = (int32_t)node;
        }
        walks->path_counts[tree] = (int32_t)(paths - begin);
        held += nodes + 1;
        parents += nodes;
        choices += nodes + 1;
    }
}
