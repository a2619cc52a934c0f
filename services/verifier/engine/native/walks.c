#include "walks.h"

static int32_t end_with(const struct answer *answer, int32_t token, int64_t committed) {
    for (int64_t each = 0; each < answer->stop_count; each++)
        if (answer->stops[each] == token) return STOPPED;
    return committed >= answer->left ? FULL : GOES_ON;
}

/* The first child of `node` that holds `token`; -1: there is none. Children come after their parents. */
static int64_t child_with(int64_t nodes, const int32_t *tokens, const int32_t *parents, int64_t node, int32_t token) {
    for (int64_t child = node + 1; child < nodes; child++)
        if (parents[child] == node && tokens[child] == token) return child;
    return -1;
}

static struct walked walk(const struct answer *answer, const int32_t *tokens, const int32_t *parents, const int32_t *choices,
                          int32_t *path, int32_t *committed) {
    struct walked found = {0, 0, GOES_ON};
    int64_t node = -1;
    do {
        const int32_t token = choices[node + 1];
        if (token == NOT_CHOSEN) return (struct walked){0, 0, UNKNOWN};
        node = child_with(answer->nodes, tokens, parents, node, token);
        if (node >= 0) path[found.accepted++] = (int32_t)node;
        committed[found.committed++] = token;
        found.end = end_with(answer, token, found.committed);
    } while (node >= 0 && found.end == GOES_ON);
    return found;
}

void walks_follow(const struct answer *answers, int64_t count, const int32_t *tokens, const int32_t *parents,
                  const int32_t *choices, int32_t *path, int32_t *committed, struct walked *found) {
    for (int64_t at = 0; at < count; at++) {
        found[at] = walk(answers + at, tokens, parents, choices, path, committed);
        const int64_t nodes = answers[at].nodes;
        tokens += nodes, parents += nodes, path += nodes;
        choices += nodes + 1, committed += nodes + 1;
    }
}
