/* See commits.h. */
#include "commits.h"

#include <stdlib.h>

enum { FIRST_ROOM = 64 };
/* Tokens are not negative. */
enum { NOTHING = -1 };

/* Two tokens, the earlier one in the upper half, and the one that followed them; NOTHING: no pair is here. */
struct pair {
    uint64_t tokens;
    int32_t follower;
};

struct repetition {
    int64_t remembered;
    struct pair *pairs; /* each is at its place, or behind it without a gap */
    int64_t room;       /* places: a power of two, at least twice the number of pairs */
    uint64_t *order;    /* a ring of room / 2: the pairs in the order in which they came */
    int64_t known, oldest;
    uint64_t last; /* the last two tokens */
    int64_t read, streak;
};

static int64_t place_of(uint64_t tokens, int64_t room) {
    uint64_t mixed = tokens * 0x9E3779B97F4A7C15u;
    return (int64_t)((mixed ^ mixed >> 32) & (uint64_t)(room - 1));
}

/* Where a pair is, or where it would be. */
static struct pair *found(struct pair *pairs, int64_t room, uint64_t tokens) {
    int64_t at = place_of(tokens, room);
    while (pairs[at].follower != NOTHING && pairs[at].tokens != tokens) at = (at + 1) & (room - 1);
    return &pairs[at];
}

/* Doubles the room; returns 0, and does nothing, where there is no memory. */
static int grown(struct repetition *text) {
    int64_t room = text->room ? 2 * text->room : FIRST_ROOM;
    struct pair *pairs = malloc((size_t)room * sizeof *pairs);
    uint64_t *order = malloc((size_t)(room / 2) * sizeof *order);
    if (!pairs || !order) {
        free(pairs);
        free(order);
        return 0;
    }
    for (int64_t at = 0; at < room; at++) pairs[at].follower = NOTHING;
    for (int64_t at = 0; at < text->known; at++) {
        uint64_t tokens = text->order[(text->oldest + at) & (text->room / 2 - 1)];
        order[at] = tokens;
        *found(pairs, room, tokens) = *found(text->pairs, text->room, tokens);
    }
    free(text->pairs);
    free(text->order);
    text->pairs = pairs;
    text->order = order;
    text->room = room;
    text->oldest = 0;
    return 1;
}

/* Takes the oldest pair out, and moves those behind it up, so that there is no gap before any. */
static void forget_oldest(struct repetition *text) {
    int64_t mask = text->room - 1;
    struct pair *pairs = text->pairs;
    int64_t gap = found(pairs, text->room, text->order[text->oldest]) - pairs;
    for (int64_t at = (gap + 1) & mask; pairs[at].follower != NOTHING; at = (at + 1) & mask) {
        int64_t place = place_of(pairs[at].tokens, text->room);
        if (((at - place) & mask) < ((at - gap) & mask)) continue;
        pairs[gap] = pairs[at];
        gap = at;
    }
    pairs[gap].follower = NOTHING;
    text->oldest = (text->oldest + 1) & (text->room / 2 - 1);
    text->known--;
}

/* Notes what followed the last two tokens. */
static void remember(struct repetition *text, struct pair *pair, int32_t token) {
    if (pair->follower != NOTHING) {
        pair->follower = token;
        return;
    }
    if (text->known == text->remembered) forget_oldest(text);
    if (2 * text->known == text->room && !grown(text)) forget_oldest(text);
    text->order[(text->oldest + text->known++) & (text->room / 2 - 1)] = text->last;
    *found(text->pairs, text->room, text->last) = (struct pair){text->last, token};
}

struct repetition *repetition_new(int64_t remembered) {
    struct repetition *text = calloc(1, sizeof *text);
    if (!text) return NULL;
    text->remembered = remembered;
    if (grown(text)) return text;
    free(text);
    return NULL;
}

void repetition_free(struct repetition *text) {
    free(text->pairs);
    free(text->order);
    free(text);
}

int64_t repetition_commit(struct repetition *text, const int32_t *tokens, int64_t count) {
    int64_t before = text->streak;
    for (int64_t at = 0; at < count; at++) {
        struct pair *pair = found(text->pairs, text->room, text->last);
        text->streak = pair->follower == tokens[at] ? text->streak + 1 : 0;
        if (text->read >= CONTEXT) remember(text, pair, tokens[at]);
        text->read++;
        text->last = text->last << 32 | (uint32_t)tokens[at];
        if (text->streak < before) before = text->streak;
    }
    return before < STREAK && STREAK <= text->streak;
}

static uint64_t extended(uint64_t hash, const int32_t *tokens, int64_t count) {
    for (int64_t at = 0; at < count; at++) {
        hash = (hash ^ ((uint64_t)tokens[at] + 1)) * 0x100000001B3u;
        hash ^= hash >> 29;
    }
    return hash;
}

/* How many of the tokens lie on a path from the root, and whether nodes remain below the last of them. */
static int64_t followed(const int32_t *held, const int32_t *parents, int64_t nodes, const int32_t *tokens, int64_t count,
                        int *remains) {
    int64_t node = -1, right = 0;
    for (; right < count; right++) {
        int64_t child = node + 1;
        while (child < nodes && (parents[child] != node || held[child] != tokens[right])) child++;
        if (child == nodes) break;
        node = child;
    }
    *remains = 0;
    if (right < count) return right;
    for (int64_t child = node + 1; child < nodes; child++) *remains |= parents[child] == node;
    return right;
}

void commits_take(const struct commits *commits) {
    const int32_t *tokens = commits->tokens, *held = commits->held, *parents = commits->parents;
    for (int64_t at = 0; at < commits->count; at++) {
        int64_t count = commits->token_counts[at], nodes = commits->node_counts[at];
        int remains = 0;
        commits->right[at] = (int32_t)followed(held, parents, nodes, tokens, count, &remains);
        commits->hashes[at] = extended(commits->hashes[at], tokens, count);
        int begins = (int)repetition_commit(commits->texts[at], tokens, count);
        commits->marks[at] = (uint8_t)((remains ? REMAINS : 0) | (begins ? BEGINS : 0));
        tokens += count;
        held += nodes;
        parents += nodes;
    }
}
