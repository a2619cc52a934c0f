/* See trees.h. */
#include "trees.h"

/* The sources of a tree's nodes, a bit for each, or MALFORMED. */
static int64_t named_by(const struct told_trees *trees, int64_t first, int64_t count, int64_t vocab_size) {
    int64_t named = 0;
    for (int64_t node = 0; node < count; node++) {
        const int64_t at = first + node;
        const int32_t token = trees->tokens[at], parent = trees->parents[at], source = trees->sources[at];
        if (token < 0 || token >= vocab_size || parent < -1 || parent >= node) return MALFORMED;
        if (source < 0 || source >= MOST_SOURCES || trees->scores[at] != trees->scores[at]) return MALFORMED;
        named |= (int64_t)1 << source;
    }
    return named;
}

void trees_check(const struct told_trees *trees, int64_t vocab_size, int64_t max_nodes, int64_t *named) {
    int64_t first = 0;
    for (int64_t tree = 0; tree < trees->count; tree++) {
        const int64_t count = trees->counts[tree];
        named[tree] = count > max_nodes ? MALFORMED : named_by(trees, first, count, vocab_size);
        first += count;
    }
}
