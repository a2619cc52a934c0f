/* See contexts.h. Where memory for an entry is lacking, nothing is learnt. */
#include "contexts.h"
#include <stdlib.h>
#include <string.h>

/* `older` and `newer` by when they were learnt, or the next free one in `newer`. -1: none. */
struct entry {
    struct context key;
    int32_t older, newer, count;
};

/* Where an entry is found: by its hash, at the place that this names or behind it without a gap. `at` -1: there is none. */
struct slot {
    uint32_t hash;
    int32_t at;
};

/* Entries by context, the one learnt longest ago is dropped first. `ids`: `width` of each entry. Two slots for each entry that
   there is room for: who looks for what is not there reads no entry. */
struct entries {
    struct entry *all;
    int32_t *ids;
    struct slot *slots;
    int32_t width, most, count, room, oldest, newest, free;
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

static uint32_t hash_of(const struct context *key) {
    uint64_t mixed = (uint64_t)(uint32_t)key->tokens[0] << 32 | (uint32_t)key->tokens[1];
    mixed = (mixed * 0x9E3779B97F4A7C15u ^ (uint32_t)key->tokens[2]) * 0x9E3779B97F4A7C15u;
    return (uint32_t)(mixed >> 32);
}

static uint32_t last_slot(const struct entries *entries) { return 2 * (uint32_t)entries->room - 1; }

/* The slot of a key, or the free one where it would be. */
static struct slot *slot_of(const struct entries *entries, const struct context *key) {
    const uint32_t hash = hash_of(key), mask = last_slot(entries);
    struct slot *slots = entries->slots;
    uint32_t place = hash & mask;
    while (slots[place].at >= 0 &&
           (slots[place].hash != hash || memcmp(&entries->all[slots[place].at].key, key, sizeof *key)))
        place = (place + 1) & mask;
    return slots + place;
}

/* So many contexts' entries stay in the nearest cache. */
enum { MOST_FETCHED = 32 };

/* A slot that will be looked at, and the hash that is looked for there. */
struct sought {
    const struct slot *slot;
    uint32_t hash;
};

/* Fetches the slots of the last tokens of contexts, of every order, into the caches; returns how many. */
static int64_t seek(const struct entries *entries, const struct context *contexts, int64_t count, struct sought *sought) {
    int64_t many = 0;
    for (int64_t each = 0; each < count && entries->room; each++)
        for (int32_t order = 1; order <= contexts[each].size; order++, many++) {
            const struct context key = last(contexts + each, order);
            const uint32_t hash = hash_of(&key);
            sought[many] = (struct sought){entries->slots + (hash & last_slot(entries)), hash};
            __builtin_prefetch(sought[many].slot);
        }
    return many;
}

/* Fetches the entries, too. One after the other they would be waited for as long as all of them together. */
static void fetch(const struct entries *entries, const struct sought *sought, int64_t many) {
    for (const struct sought *each = sought; each < sought + many; each++) {
        const int32_t at = each->slot->at;
        if (at < 0 || each->slot->hash != each->hash) continue;
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

/* Frees a slot, and moves those behind it up, so that there is no gap before any. */
static void free_slot(struct entries *entries, struct slot *slot) {
    const uint32_t mask = last_slot(entries);
    struct slot *slots = entries->slots;
    uint32_t gap = (uint32_t)(slot - slots);
    for (uint32_t place = (gap + 1) & mask; slots[place].at >= 0; place = (place + 1) & mask) {
        if (((place - slots[place].hash) & mask) < ((place - gap) & mask)) continue;
        slots[gap] = slots[place];
        gap = place;
    }
    slots[gap].at = -1;
}

static void drop_oldest(struct entries *entries) {
    const int32_t at = entries->oldest;
    free_slot(entries, slot_of(entries, &entries->all[at].key));
    unlink_age(entries, at);
    entries->all[at].newer = entries->free, entries->free = at;
    entries->count--;
}

/* Twice the room. Returns 0 where there is no memory. */
static int grow(struct entries *entries) {
    const int32_t used = entries->room, room = used ? 2 * used : 64;
    struct entry *all = realloc(entries->all, (size_t)room * sizeof(struct entry));
    if (all) entries->all = all;
    int32_t *ids = realloc(entries->ids, (size_t)room * (size_t)entries->width * sizeof(int32_t));
    if (ids) entries->ids = ids;
    struct slot *slots = realloc(entries->slots, 2 * (size_t)room * sizeof(struct slot));
    if (slots) entries->slots = slots;
    if (!all || !ids || !slots) return 0;
    memset(slots, -1, 2 * (size_t)room * sizeof(struct slot));
    /* It grows when all entries are used, so none is free but the new ones. */
    entries->room = room;
    for (int32_t at = 0; at < used; at++) *slot_of(entries, &all[at].key) = (struct slot){hash_of(&all[at].key), at};
    for (int32_t at = used; at < room; at++) all[at].newer = at + 1 < room ? at + 1 : -1;
    entries->free = used;
    return 1;
}

/* The entry of a key, which is now the one learnt last; it is made if there is none. -1 where there is no memory. */
static int32_t newest_of(struct entries *entries, const struct context *key) {
    struct slot *slot = entries->room ? slot_of(entries, key) : NULL;
    if (slot && slot->at >= 0) {
        unlink_age(entries, slot->at);
    } else {
        if (entries->free < 0) {
            if (!grow(entries)) return -1;
            slot = slot_of(entries, key);
        }
        const int32_t at = entries->free;
        entries->free = entries->all[at].newer;
        entries->all[at] = (struct entry){.key = *key};
        *slot = (struct slot){hash_of(key), at};
        entries->count++;
    }
    make_newest(entries, slot->at);
    return slot->at;
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

static void clear(struct entries *entries) { free(entries->all), free(entries->ids), free(entries->slots); }

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
    struct context contexts[MOST_FETCHED];
    struct sought sought[MOST_FETCHED * LONGEST_CONTEXT];
    const int32_t *ids = ids_of(pass, pass->nodes + 1);
    for (int64_t end = pass->nodes + 1; end > 0; end -= MOST_FETCHED) {
        const int64_t begin = end > MOST_FETCHED ? end - MOST_FETCHED : 0;
        for (int64_t row = begin; row < end; row++)
            contexts[row - begin] = context_of(root, pass->tokens, pass->parents, row - 1);
        fetch(&table->top, sought, seek(&table->top, contexts, end - begin, sought));
        for (int64_t row = end - 1; row >= begin; row--) {
            const struct context *context = contexts + (row - begin);
            const int32_t count = shown(pass, row);
            ids -= count;
            for (int32_t order = context->size; order > 0; order--) note(&table->top, context, order, ids, count);
            while (table->top.count > table->top.most) drop_oldest(&table->top);
        }
    }
}

void table_read(struct table *table, struct context *context, const int32_t *tokens, int64_t many) {
    struct context contexts[MOST_FETCHED];
    struct sought sought[MOST_FETCHED * LONGEST_CONTEXT];
    for (int64_t begin = 0; begin < many; begin += MOST_FETCHED) {
        const int64_t count = many - begin < MOST_FETCHED ? many - begin : MOST_FETCHED;
        for (int64_t at = 0; at < count; at++) {
            contexts[at] = *context;
            *context = context_after(*context, tokens[begin + at]);
        }
        fetch(&table->seen, sought, seek(&table->seen, contexts, count, sought));
        for (int64_t at = 0; at < count; at++)
            for (int32_t order = contexts[at].size; order > 0; order--) {
                note(&table->seen, contexts + at, order, tokens + begin + at, 1);
                if (table->seen.count > table->seen.most) drop_oldest(&table->seen);
            }
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
    struct sought top[LONGEST_CONTEXT], seen[LONGEST_CONTEXT];
    const int64_t of_top = seek(&table->top, context, 1, top), of_seen = seek(&table->seen, context, 1, seen);
    fetch(&table->top, top, of_top), fetch(&table->seen, seen, of_seen);
}

int64_t table_top(const struct table *table, const struct context *context, int32_t order, const int32_t **ids) {
    if (!context->size || !table->top.room) return 0;
    const struct context key = last(context, order);
    const int32_t at = slot_of(&table->top, &key)->at;
    if (at < 0) return 0;
    *ids = table->top.ids + (int64_t)at * table->top.width;
    return table->top.all[at].count;
}

int32_t table_seen(const struct table *table, const struct context *context, int32_t order) {
    if (!context->size || !table->seen.room) return -1;
    const struct context key = last(context, order);
    const int32_t at = slot_of(&table->seen, &key)->at;
    return at < 0 ? -1 : table->seen.ids[(int64_t)at * table->seen.width];
}
