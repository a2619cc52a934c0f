/* Lays a pass out for the kernels of a GPU: rows, blocks, tables, and for trees the slots that each row sees.
 *
 * Why in C: a GPU waits for it before every pass, and Python takes 15 us for each request and 60 us for each tree.
 * What the numbers mean says pass_meta.py; how nodes are packed into groups says virtual_groups.py. Both are the reference.
 */
#include "pass_meta.h"

#include <string.h>

enum {
    TILE = 64, GROUP = 16, TILE_GROUPS = TILE / GROUP, SEGMENT = 8 * TILE, BLOCK_INTS = 4, REQUEST_INTS = 8, NO_TAIL = 1 << 30,
    MOST_NODES = 128, MOST_COPIES = MOST_NODES, MOST_GROUPS = 512, MOST_TILES = 4
};

/* A set of nodes. */
typedef unsigned __int128 bits;

/* One copy of a group of positions. `of` is what each node sees of it; `lost` are the nodes that see nothing here at all. */
struct copy {
    int64_t group, committed, first; /* first: rows of the chain see committed slots in this copy */
    bits nodes, lost;
};

/* A request's tree. */
struct tree {
    int64_t context, end, nodes; /* end: the first position behind the chain */
    int64_t position[MOST_NODES], by_depth[MOST_NODES];
    bits path[MOST_NODES];
    struct copy copies[MOST_GROUPS];
    int64_t count, first_tile, tiles, begins[MOST_TILES + 1]; /* begins: of each tile, its first copy */
};

/* Where numbers are written, one part behind the other. */
struct builder {
    int32_t *numbers;
    int64_t rows, room, end, blocks;
};

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
static bits bit(int64_t node) { return (bits)1 << node; }
static int64_t size_of(bits set) {
    return __builtin_popcountll((uint64_t)set) + __builtin_popcountll((uint64_t)(set >> 64));
}

/* Room for `count` numbers, all 0; returns where it begins, or -1. */
static int64_t take(struct builder *built, int64_t count) {
    const int64_t at = built->end;
    if (at + count > built->room) return -1;
    memset(built->numbers + at, 0, (size_t)count * sizeof(int32_t));
    built->end += count;
    return at;
}

/* The nodes with the greatest position first, of equals the earlier one. */
static void sort_by_depth(struct tree *tree) {
    for (int64_t node = 0; node < tree->nodes; node++) {
        int64_t at = node;
        for (; at > 0 && tree->position[tree->by_depth[at - 1]] < tree->position[node]; at--)
            tree->by_depth[at] = tree->by_depth[at - 1];
        tree->by_depth[at] = node;
    }
}

static int add_copy(struct tree *tree, struct copy made) {
    if (tree->count == MOST_GROUPS) return 0;
    tree->copies[tree->count++] = made;
    return 1;
}

/* The copies of one group: each holds the group's committed slots, then nodes. Returns 0 if they are too many. */
static int add_group(struct tree *tree, int64_t group) {
    const int64_t committed = least(most(0, tree->end - group * GROUP), GROUP), room = GROUP - committed;
    bits inside = 0, all = 0;
    for (int64_t node = 0; node < tree->nodes; node++) {
        all |= bit(node);
        if (tree->position[node] / GROUP == group) inside |= bit(node);
    }
    if (!committed && !inside) return 1;
    struct copy fresh = {.group = group, .committed = committed, .first = 1, .nodes = inside, .lost = 0};
    if (size_of(inside) <= room) return add_copy(tree, fresh);
    /* The deepest nodes first: what their ancestors see is a part of what they see. */
    const int64_t begin = tree->count;
    fresh.nodes = 0, fresh.lost = all;
    for (int64_t number = 0; number < tree->nodes; number++) {
        const int64_t node = tree->by_depth[number];
        const bits seen = tree->path[node] & inside;
        int64_t at = begin;
        while (at < tree->count && size_of(tree->copies[at].nodes | seen) > room) at++;
        if (at == tree->count) {
            fresh.first = at == begin;
            if (!add_copy(tree, fresh)) return 0;
        }
        tree->copies[at].nodes |= seen;
        tree->copies[at].lost &= ~bit(node);
    }
    return 1;
}

/* Positions, paths and copies of a tree. Returns 0 if it is too large. */
static int pack(struct tree *tree, const struct pass_entry *entry, const int32_t *parents) {
    tree->context = entry->context, tree->end = entry->context + entry->chain, tree->nodes = entry->nodes;
    int64_t last = tree->end;
    for (int64_t node = 0; node < tree->nodes; node++) {
        const int64_t parent = parents[node];
        tree->position[node] = parent < 0 ? tree->end : tree->position[parent] + 1;
        tree->path[node] = (parent < 0 ? 0 : tree->path[parent]) | bit(node);
        last = most(last, tree->position[node]);
    }
    sort_by_depth(tree);
    tree->first_tile = tree->end / TILE, tree->tiles = last / TILE - tree->first_tile + 1, tree->count = 0;
    for (int64_t tile = 0; tile < tree->tiles; tile++) {
        tree->begins[tile] = tree->count;
        for (int64_t group = 0; group < TILE_GROUPS; group++)
            if (!add_group(tree, (tree->first_tile + tile) * TILE_GROUPS + group)) return 0;
    }
    tree->begins[tree->tiles] = tree->count;
    return 1;
}

/* Which of a copy's lanes a node sees: the committed ones, and those of its path. */
static uint16_t mask_of(const struct tree *tree, const struct copy *copy, int64_t node) {
    if (copy->lost & bit(node)) return 0;
    uint32_t mask = (1u << copy->committed) - 1;
    int64_t lane = copy->committed;
    for (int64_t other = 0; other < tree->nodes; other++)
        if (copy->nodes & bit(other)) {
            if (tree->path[node] & bit(other)) mask |= 1u << lane;
            lane++;
        }
    return (uint16_t)mask;
}

/* Which of a copy's lanes a row of the chain sees: the committed ones up to its own. */
static uint16_t mask_before(const struct copy *copy, int64_t position) {
    if (!copy->first) return 0;
    return (uint16_t)((1u << least(most(0, position + 1 - copy->group * GROUP), copy->committed)) - 1);
}

/* Slots and positions of a copy's lanes, in place `part` of a chunk: 64 slots, then 64 positions. */
static void write_lanes(const struct tree *tree, const struct copy *copy, const int32_t *blocks, int32_t *chunk, int64_t part) {
    int32_t *slots = chunk + part * GROUP, *positions = slots + TILE;
    int64_t lane = 0;
    for (; lane < copy->committed; lane++) {
        const int64_t slot = copy->group * GROUP + lane;
        slots[lane] = blocks[slot / TILE] * TILE + (int32_t)(slot % TILE);
        positions[lane] = (int32_t)slot;
    }
    for (int64_t node = 0; node < tree->nodes; node++)
        if (copy->nodes & bit(node)) {
            const int64_t slot = tree->end + node;
            slots[lane] = blocks[slot / TILE] * TILE + (int32_t)(slot % TILE);
            positions[lane++] = (int32_t)tree->position[node];
        }
}

/* The last five numbers of a request's record. Returns 0 if there is no room. */
static int write_tail(struct builder *built, const struct tree *tree, const struct pass_entry *entry, int32_t *record) {
    const int64_t rows = entry->chain + entry->nodes;
    int64_t begins[MOST_TILES + 1] = {0};
    for (int64_t tile = 0; tile < tree->tiles; tile++)
        begins[tile + 1] = begins[tile] + (tree->begins[tile + 1] - tree->begins[tile] + TILE_GROUPS - 1) / TILE_GROUPS;
    const int64_t chunks = begins[tree->tiles];
    const int64_t begins_at = take(built, tree->tiles + 1), slots_at = take(built, chunks * 2 * TILE);
    const int64_t words_at = take(built, rows * chunks * 2);
    if (begins_at < 0 || slots_at < 0 || words_at < 0) return 0;
    for (int64_t tile = 0; tile <= tree->tiles; tile++) built->numbers[begins_at + tile] = (int32_t)begins[tile];
    /* Lanes that nobody sees read the request's first slot, which holds numbers. */
    for (int64_t chunk = 0; chunk < chunks; chunk++)
        for (int64_t slot = 0; slot < TILE; slot++)
            built->numbers[slots_at + chunk * 2 * TILE + slot] = entry->blocks[0] * TILE;
    char *words = (char *)(built->numbers + words_at);
    for (int64_t tile = 0; tile < tree->tiles; tile++)
        for (int64_t at = tree->begins[tile]; at < tree->begins[tile + 1]; at++) {
            const struct copy *copy = tree->copies + at;
            const int64_t index = at - tree->begins[tile];
            const int64_t chunk = begins[tile] + index / TILE_GROUPS, part = index % TILE_GROUPS;
            write_lanes(tree, copy, entry->blocks, built->numbers + slots_at + chunk * 2 * TILE, part);
            for (int64_t row = 0; row < rows; row++) {
                const uint16_t mask =
                    row < entry->chain ? mask_before(copy, entry->context + row) : mask_of(tree, copy, row - entry->chain);
                memcpy(words + 2 * ((row * chunks + chunk) * TILE_GROUPS + part), &mask, 2);
            }
        }
    record[3] = (int32_t)tree->first_tile, record[4] = (int32_t)begins_at, record[5] = (int32_t)slots_at;
    record[6] = (int32_t)words_at, record[7] = (int32_t)(2 * chunks);
    return 1;
}

/* Appends a request's record, and puts its rows into blocks; positions: of its rows. Returns 0 if there is no room. */
static int write_record(struct builder *built, const int32_t *record, const int32_t *positions, int64_t block_rows) {
    const int64_t at = take(built, REQUEST_INTS);
    if (at < 0) return 0;
    memcpy(built->numbers + at, record, REQUEST_INTS * sizeof(int32_t));
    for (int64_t first = 0; first < record[1]; first += block_rows) {
        const int64_t size = least(block_rows, record[1] - first);
        int32_t *block = built->numbers + 3 * built->rows + BLOCK_INTS * built->blocks++;
        block[0] = (int32_t)at, block[1] = (int32_t)first, block[2] = (int32_t)size, block[3] = positions[first];
        for (int64_t row = first + 1; row < first + size; row++) block[3] = (int32_t)most(block[3], positions[row]);
    }
    return 1;
}

/* One request, whose rows begin at `first`. Returns 0 if there is no room. */
static int write_entry(struct builder *built, const struct pass_entry *entry, const int32_t *parents, int64_t first,
                       int64_t block_rows) {
    struct tree tree;
    const int64_t rows = entry->chain + entry->nodes, used = (entry->context + rows - 1) / TILE + 1;
    int32_t *positions = built->numbers + first, *slots = built->numbers + built->rows + first;
    if (entry->nodes && !pack(&tree, entry, parents)) return 0;
    for (int64_t row = 0; row < rows; row++) {
        const int64_t slot = entry->context + row;
        positions[row] = (int32_t)(row < entry->chain ? slot : tree.position[row - entry->chain]);
        slots[row] = entry->blocks[slot / TILE] * TILE + (int32_t)(slot % TILE);
    }
    const int64_t table = take(built, used);
    if (table < 0) return 0;
    memcpy(built->numbers + table, entry->blocks, (size_t)used * sizeof(int32_t));
    int32_t record[REQUEST_INTS] = {(int32_t)first, (int32_t)rows, (int32_t)table, NO_TAIL, 0, 0, 0, 0};
    if (entry->nodes && !write_tail(built, &tree, entry, record)) return 0;
    return write_record(built, record, positions, block_rows);
}

/* Padding rows are a request of their own, all at position 0, whose key each of them overwrites. */
static int write_padding(struct builder *built, int64_t first, int64_t block_rows, int32_t padding_block) {
    for (int64_t row = first; row < built->rows; row++) built->numbers[built->rows + row] = padding_block * TILE;
    const int64_t table = take(built, 1);
    if (table < 0) return 0;
    built->numbers[table] = padding_block;
    const int32_t record[REQUEST_INTS] = {(int32_t)first, (int32_t)(built->rows - first), (int32_t)table, NO_TAIL, 0, 0, 0, 0};
    return write_record(built, record, built->numbers + first, block_rows);
}

/* Where the sums of rows' segments begin, and what the work is: segments of blocks if `split`, else blocks. All rows and
 * blocks are there. Returns 0 if there is no room. */
static int write_work(struct builder *built, int64_t split) {
    const int32_t *positions = built->numbers;
    int32_t *sums = built->numbers + 2 * built->rows, *blocks = sums + built->rows, *work = blocks + BLOCK_INTS * built->rows;
    int64_t before = 0, count = 0;
    for (int64_t row = 0; row < built->rows; row++) {
        sums[row] = (int32_t)before;
        before += positions[row] / SEGMENT + 1;
    }
    work[0] = (int32_t)built->blocks;
    if (!split) return 1;
    for (int64_t block = 0; block < built->blocks; block++) count += blocks[BLOCK_INTS * block + 3] / SEGMENT + 1;
    const int64_t at = take(built, 2 * count);
    if (at < 0) return 0;
    int32_t *part = built->numbers + at;
    for (int64_t block = 0; block < built->blocks; block++)
        for (int64_t segment = 0; segment <= blocks[BLOCK_INTS * block + 3] / SEGMENT; segment++, part += 2)
            part[0] = (int32_t)block, part[1] = (int32_t)segment;
    work[0] = (int32_t)count, work[1] = (int32_t)at;
    return 1;
}

int64_t outrider_describe(const struct pass_entry *entries, int64_t count, const int32_t *parents, int64_t rows,
                          int64_t block_rows, int64_t split, int32_t padding_block, int32_t *numbers, int64_t room) {
    struct builder built = {.numbers = numbers, .rows = rows, .room = room, .end = 0, .blocks = 0};
    if (take(&built, (3 + BLOCK_INTS) * rows + 2) < 0) return -1;
    int64_t first = 0;
    for (int64_t at = 0; at < count; at++) {
        const struct pass_entry *entry = entries + at;
        if (entry->context + entry->chain + entry->nodes > entry->owned * TILE) return -2 - at;
        if (entry->nodes > MOST_NODES || first + entry->chain + entry->nodes > rows) return -1;
        if (!write_entry(&built, entry, parents, first, block_rows)) return -1;
        parents += entry->nodes;
        first += entry->chain + entry->nodes;
    }
    if (first < rows && !write_padding(&built, first, block_rows, padding_block)) return -1;
    if (!write_work(&built, split)) return -1;
    return built.end;
}
