/* The description of a pass for the kernels of a GPU; see pass_meta.c. */
#ifndef OUTRIDER_PASS_META_H
#define OUTRIDER_PASS_META_H
#include <stdint.h>

/* One request's rows: a chain after its context, then `nodes` nodes of a tree. blocks: the `owned` ones of the KV cache, by
 * position. */
struct pass_entry {
    const int32_t *blocks;
    int64_t owned, context, chain, nodes;
};

/* Writes what pass_meta.describe writes, and returns how many numbers that are; -1 where they are more than `room`, or a tree
 * has more than 128 nodes; -2 - i where entry i does not own blocks for its rows. Nothing of it may be used then.
 *
 * parents: of the nodes of all entries, one entry after the other; rows: with padding; split: whether
 * segments of a block are computed apart; numbers: [room].
 */
int64_t outrider_describe(const struct pass_entry *entries, int64_t count, const int32_t *parents, int64_t rows,
                          int64_t block_rows, int64_t split, int32_t padding_block, int32_t *numbers, int64_t room);
#endif
