/* See contexts.h. Where memory for an entry is lacking, nothing is learnt. */
#include "contexts.h"
#include <stdlib.h>
#include <string.h>

/* `chain`: the next entry of the same hash, or the next free one; `older` and `newer` by when they were learnt. -1: none. */
struct entry {
    struct context key;
    int32_t chain, older, newer, count;
};

/* Entries by context, the one learnt longest ago is dropped first. `ids`: `width` of each entry. */
struct entries {
    struct entry *all;
    int32_t *ids, *buckets;
    int32_t width, most, count, room, bucket_count, oldest, newest, free;
};

struct table {
    struct entries top, seen;
};

/* The last `order` tokens of a context, or all of it. */
static struct context last(const struct context *context, int32_t order) {
    if (order > context->size) order = context->size;
    struct context key = {.size = order, .tokens = {-1, -1, -1}};
    memcpy(key.tokens, context->tokens + context->size - order, (size_t)order * sizeof(int32_t));
    return key;
}

static int32_t *bucket_of(const struct entries *entries, const struct context *key) {
    uint64_t mixed = (uint64_t)(uint32_t)key->tokens[0] << 32 | (uint32_t)key->tokens[1];
    mixed = (mixed * 0x9E3779B97F4A7C15u ^ (uint32_t)key->tokens[2]) * 0x9E3779B97F4A7C15u;
    return entries->buckets + ((uint32_t)(mixed >> 32) & (uint32_t)(entries->bucket_count - 1));
}

static int32_t find(const struct entries *entries, const struct context *key) {
    int32_t at = *bucket_of(entries, key);
    while (at >= 0 && memcmp(&entries->all[at].key, key, sizeof *key)) at = entries->all[at].chain;
    return at;
}

/* So many nodes' entries stay in the nearest cache. */
enum { MOST_FETCHED = 32 };

/* Fetches the entries of the last tokens of a context, of every order, into the caches: their buckets first, then they
   themselves. One after the other they would be waited for as long as all of them together. */
static void fetch(const struct entries *entries, const struct context *context) {
    const int32_t *buckets[LONGEST_CONTEXT];
    if (!entries->room) return;
    for (int32_t order = 1; order <= context->size; order++) {
        const struct context key = last(context, order);
        __builtin_prefetch(buckets[order - 1] = bucket_of(entries, &key));
    }
    for (int32_t order = 1; order <= context->size; order++) {
        const int32_t at = *buckets[order - 1];
        if (at < 0) continue;
        __builtin_prefetch(entries->all + at);
        __builtin_prefetch(entries->ids + (int64_t)at * entries->width);
    }
}

static void unlink_age(struct entries *entries, int32_t at) {
    const struct entry *entry = entries->all + at;
    *(entry->older < 0 ? &entries->oldest : &entries->all[entry->older].newer) = entry->newer;
    *(entry->newer < 0 ? &entries->newest : &entries->all[entry->newer].older) = entry->older;
}

static void make_newest(struct entries *entries, int32_t at) {
    entries->all[at].older = entries->newest, entries->all[at].newer = -1;
    *(entries->newest < 0 ? &entries->oldest : &entries->all[entries->newest].newer) = at;
    entries->newest = at;
}

static void drop_oldest(struct entries *entries) {
    const int32_t at = entries->oldest;
    int32_t *link = bucket_of(entries, &entries->all[at].key);
    while (*link != at) link = &entries->all[*link].chain;
    *link = entries->all[at].chain;
    unlink_age(entries, at);
    entries->all[at].chain = entries->free, entries->free = at;
    entries->count--;
}

/* Twice the room, and as many buckets. Returns 0 where there is no memory. */
static int grow(struct entries *entries) {
    const int32_t room = entries->room ? 2 * entries->room : 64;
    struct entry *all = realloc(entries->all, (size_t)room * sizeof(struct entry));
    if (all) entries->all = all;
    int32_t *ids = realloc(entries->ids, (size_t)room * (size_t)entries->width * sizeof(int32_t));
    if (ids) entries->ids = ids;
    int32_t *buckets = realloc(entries->buckets, (size_t)room * sizeof(int32_t));
    if (buckets) entries->buckets = buckets;
    if (!all || !ids || !buckets) return 0;
    memset(buckets, -1, (size_t)room * sizeof(int32_t));
    /* It grows when all entries are used, so none is free but the new ones. */
    entries->bucket_count = room;
    for (int32_t at = 0; at < entries->room; at++) {
        int32_t *bucket = bucket_of(entries, &all[at].key);
        all[at].chain = *bucket, *bucket = at;
    }
    for (int32_t at = entries->room; at < room; at++) all[at].chain = at + 1 < room ? at + 1 : -1;
    entries->free = entries->room, entries->room = room;
    return 1;
}

/* The entry of a key, which is now the one learnt last; it is made if there is none. -1 where there is no memory. */
static int32_t newest_of(struct entries *entries, const struct context *key) {
    int32_t at = entries->room ? find(entries, key) : -1;
    if (at >= 0) {
        unlink_age(entries, at);
    } else {
        if (entries->free < 0 && !grow(entries)) return -1;
        at = entries->free, entries->free = entries->all[at].chain;
        int32_t *bucket = bucket_of(entries, key);
        entries->all[at] = (struct entry){.key = *key, .chain = *bucket};
        *bucket = at;
        entries->count++;
    }
    make_newest(entries, at);
    return at;
}

/* Notes ids after the last `order` tokens of a context. */
static void note(struct entries *entries, const struct context *context, int32_t order, const int32_t *ids, int32_t count) {
    const struct context key = last(context, order);
    const int32_t at = newest_of(entries, &key);
    if (at < 0) return;
    entries->all[at].count = count < entries->width ? count : entries->width;
    memcpy(entries->ids + (int64_t)at * entries->width, ids, (size_t)entries->all[at].count * sizeof(int32_t));
}

struct table *table_new(int64_t most) {
    struct table *made = calloc(1, sizeof(struct table));
    if (!made) return NULL;
    made->top = made->seen = (struct entries){.width = MOST_IDS, .most = (int32_t)most, .oldest = -1, .newest = -1, .free = -1};
    made->seen.width = 1;
    return made;
}

static void clear(struct entries *entries) { free(entries->all), free(entries->ids), free(entries->buckets); }

void table_free(struct table *table) { clear(&table->top), clear(&table->seen), free(table); }

struct context context_after(struct context context, int32_t token) {
    if (context.size == LONGEST_CONTEXT) memmove(context.tokens, context.tokens + 1, (LONGEST_CONTEXT - 1) * sizeof(int32_t));
    else context.size++;
    context.tokens[context.size - 1] = token;
    return context;
}

/* The context of a node, -1 being the root. */
static struct context context_of(const struct context *root, const int32_t *tokens, const int32_t *parents, int64_t node) {
    int32_t path[LONGEST_CONTEXT], size = 0;
    while (node >= 0 && size < LONGEST_CONTEXT) {
        path[size++] = tokens[node];
        /* A parent comes first; who says otherwise shall not lead anywhere else. */
        node = parents[node] < node ? parents[node] : -1;
    }
    struct context context = *root;
    while (size) context = context_after(context, path[--size]);
    return context;
}

/* How many ids a pass has shown in a row. */
static int32_t shown(const struct pass *pass, int64_t row) { return pass->counts ? pass->counts[row] : pass->top; }

/* The ids of a row. */
static const int32_t *ids_of(const struct pass *pass, int64_t row) {
    if (!pass->counts) return pass->ids + row * pass->top;
    const int32_t *ids = pass->ids;
    for (int64_t before = 0; before < row; before++) ids += pass->counts[before];
    return ids;
}

/* Notes the likeliest ids after the root and each node. Deeper nodes first: if two paths end in the same context, the one
   nearer to the text is kept. */
static void table_learn(struct table *table, const struct context *root, const struct pass *pass) {
    const int64_t fetched = pass->nodes < MOST_FETCHED ? pass->nodes : MOST_FETCHED;
    for (int64_t node = fetched - 1; node >= -1; node--) {
        const struct context context = context_of(root, pass->tokens, pass->parents, node);
        fetch(&table->top, &context);
    }
    const int32_t *ids = ids_of(pass, pass->nodes + 1);
    for (int64_t node = pass->nodes - 1; node >= -1; node--) {
        const struct context context = context_of(root, pass->tokens, pass->parents, node);
        const int32_t count = shown(pass, node + 1);
        ids -= count;
        for (int32_t order = context.size; order > 0; order--) note(&table->top, &context, order, ids, count);
        while (table->top.count > table->top.most) drop_oldest(&table->top);
    }
}

void table_read(struct table *table, struct context *context, const int32_t *tokens, int64_t many) {
    for (int64_t at = 0; at < many; at++) {
        for (int32_t order = context->size; order > 0; order--) {
            note(&table->seen, context, order, tokens + at, 1);
            if (table->seen.count > table->seen.most) drop_oldest(&table->seen);
        }
        *context = context_after(*context, tokens[at]);
    }
}

/* Notes what was passed over at a position, of `count` likely ids. */
static void pass_over(struct text_end *end, int32_t token, const int32_t *ids, int32_t count) {
    end->passed[1] = end->passed[0];
    memcpy(end->passed_ids[1], end->passed_ids[0], sizeof end->passed_ids[0]);
    int32_t many = 0;
    for (int32_t at = 0; at < count && many < PASSED_RANKS; at++)
        if (ids[at] != token) end->passed_ids[0][many++] = ids[at];
    end->passed[0] = many;
}

int table_fits(const struct pass *pass) {
    for (int64_t at = 0; at < pass->path; at++)
        if (pass->accepted[at] < 0 || pass->accepted[at] >= pass->nodes) return 0;
    return 1;
}

void table_watch(struct table *table, struct text_end *end, const struct pass *pass) {
    table_learn(table, &end->context, pass);
    const int64_t chosen = pass->many < pass->path + 1 ? pass->many : pass->path + 1;
    for (int64_t at = chosen > PASSED ? chosen - PASSED : 0; at < chosen; at++) {
        const int32_t row = at ? pass->accepted[at - 1] + 1 : 0;
        pass_over(end, pass->committed[at], ids_of(pass, row), shown(pass, row));
    }
    table_read(table, &end->context, pass->committed, pass->many);
}

/* The same of one array. `told`: tokens that were committed, as many as `many`; the path; tokens and parents of all nodes; how
   many ids there are in each of `rows`, the root's first; the ids. Returns 0, and does nothing, where the path leaves the tree. */
int32_t table_observe(struct table *table, struct text_end *end, const int32_t *told, int64_t many, int64_t path, int64_t nodes,
                      int64_t rows) {
    const int32_t *accepted = told + many, *tokens = accepted + path, *parents = tokens + nodes, *counts = parents + nodes;
    const struct pass pass = {
        .committed = told, .accepted = accepted, .tokens = tokens, .parents = parents, .counts = counts,
        .ids = counts + rows, .many = many, .path = path, .nodes = nodes,
    };
    if (!table_fits(&pass)) return 0;
    table_watch(table, end, &pass);
    return 1;
}

void table_fetch(const struct table *table, const struct context *context) {
    fetch(&table->top, context), fetch(&table->seen, context);
}

int64_t table_top(const struct table *table, const struct context *context, int32_t order, const int32_t **ids) {
    if (!context->size || !table->top.room) return 0;
    const struct context key = last(context, order);
    const int32_t at = find(&table->top, &key);
    if (at < 0) return 0;
    *ids = table->top.ids + (int64_t)at * table->top.width;
    return table->top.all[at].count;
}

int32_t table_seen(const struct table *table, const struct context *context, int32_t order) {
    if (!context->size || !table->seen.room) return -1;
    const struct context key = last(context, order);
    const int32_t at = find(&table->seen, &key);
    return at < 0 ? -1 : table->seen.ids[(int64_t)at * table->seen.width];
}
