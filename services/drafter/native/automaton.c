/* See automaton.h. States and edges lie in arrays that grow; an edge is found by a hash of its state and token.

   Where memory for an edge is lacking, the edge is left out: what follows there is not drafted, and nothing else happens. */
#include "automaton.h"
#include <stdlib.h>
#include <string.h>

enum { BREAK = -1, NONE = 0, SEVERAL = -1, MANY = 16, UNKNOWN = -1 };

/* As the arrays of the reference. `edges`: its first edge, where there are several followers; `ranked`: the number of its
   ranking, 0: none. */
struct state {
    int32_t length, link, count, first, token, target, edges, ranked;
};

/* `next`: the next edge of the same state; `chain`: the next one of the same hash. -1: none. */
struct edge {
    int32_t state, token, target, next, chain;
};

/* The likeliest followers of a state that has many, once they have been asked for; total UNKNOWN: to be ranked anew. */
struct ranking {
    int32_t total, count, tokens[MOST_FOLLOWERS + 1];
};

struct automaton {
    int32_t depth, time;
    struct ending head, tail;
    struct state *states;
    struct edge *edges;
    struct ranking *rankings;
    int32_t *buckets;
    int32_t state_count, state_room, edge_count, edge_room, ranking_count, ranking_room, bucket_count;
};

static const struct ending NOWHERE = {0, 0};

static int32_t least(int32_t a, int32_t b) { return a < b ? a : b; }

/* Room for `more` entries behind `count`, at least doubled. Returns 0 where there is no memory. */
static int reserve(void **array, int32_t *room, int32_t count, int64_t more, size_t size) {
    if (count + more <= *room) return 1;
    const int64_t wanted = count + more > 2 * (int64_t)*room ? count + more : 2 * (int64_t)*room;
    void *grown = wanted > INT32_MAX ? NULL : realloc(*array, (size_t)wanted * size);
    if (!grown) return 0;
    *array = grown, *room = (int32_t)wanted;
    return 1;
}

static uint32_t bucket_of(const struct automaton *counted, int32_t state, int32_t token) {
    const uint64_t mixed = ((uint64_t)(uint32_t)state << 32 | (uint32_t)token) * 0x9E3779B97F4A7C15u;
    return (uint32_t)(mixed >> 32) & (uint32_t)(counted->bucket_count - 1);
}

/* Where the target of a token from a state is held; NULL if the token never followed. */
static int32_t *lead_of(const struct automaton *counted, int32_t state, int32_t token) {
    struct state *from = counted->states + state;
    if (from->target != SEVERAL) return from->target != NONE && from->token == token ? &from->target : NULL;
    for (int32_t at = counted->buckets[bucket_of(counted, state, token)]; at >= 0; at = counted->edges[at].chain)
        if (counted->edges[at].state == state && counted->edges[at].token == token) return &counted->edges[at].target;
    return NULL;
}

static int32_t follower_of(const struct automaton *counted, int32_t state, int32_t token) {
    const int32_t *lead = lead_of(counted, state, token);
    return lead ? *lead : NONE;
}

static int rehash(struct automaton *counted) {
    const int32_t count = 2 * counted->bucket_count;
    int32_t *grown = count > 0 ? realloc(counted->buckets, (size_t)count * sizeof(int32_t)) : NULL;
    if (!grown) return 0;
    memset(grown, -1, (size_t)count * sizeof(int32_t));
    counted->buckets = grown, counted->bucket_count = count;
    for (int32_t at = 0; at < counted->edge_count; at++) {
        int32_t *bucket = grown + bucket_of(counted, counted->edges[at].state, counted->edges[at].token);
        counted->edges[at].chain = *bucket, *bucket = at;
    }
    return 1;
}

static void add_edge(struct automaton *counted, int32_t state, int32_t token, int32_t target) {
    if (!reserve((void **)&counted->edges, &counted->edge_room, counted->edge_count, 1, sizeof(struct edge))) return;
    if (counted->edge_count >= counted->bucket_count && !rehash(counted)) return;
    int32_t *bucket = counted->buckets + bucket_of(counted, state, token), at = counted->edge_count++;
    counted->edges[at] = (struct edge){state, token, target, counted->states[state].edges, *bucket};
    *bucket = counted->states[state].edges = at;
}

static void lead(struct automaton *counted, int32_t state, int32_t token, int32_t target) {
    struct state *from = counted->states + state;
    int32_t *known = lead_of(counted, state, token);
    if (known) {
        *known = target;
    } else if (from->target == NONE) {
        from->token = token, from->target = target;
    } else {
        const int32_t only = from->target;
        if (only != SEVERAL) from->target = SEVERAL, add_edge(counted, state, from->token, only);
        add_edge(counted, state, token, target);
    }
}

static int32_t new_state(struct automaton *counted, int32_t length) {
    counted->states[counted->state_count] = (struct state){.length = length, .token = BREAK, .edges = -1};
    return counted->state_count++;
}

static int32_t split(struct automaton *counted, int32_t state, int32_t token, int32_t old, int32_t size) {
    const int32_t made = new_state(counted, size);
    struct state *copy = counted->states + made, *whole = counted->states + old;
    copy->link = whole->link, copy->count = whole->count, copy->first = whole->first;
    copy->token = whole->token, copy->target = whole->target;
    if (whole->target == SEVERAL)
        for (int32_t at = whole->edges; at >= 0; at = counted->edges[at].next)
            add_edge(counted, made, counted->edges[at].token, counted->edges[at].target);
    whole->link = made;
    for (int32_t *known; (known = lead_of(counted, state, token)) && *known == old; state = counted->states[state].link)
        *known = made;
    return made;
}

static int32_t extended(struct automaton *counted, int32_t state, int32_t size, int32_t token) {
    int32_t found = follower_of(counted, state, token);
    if (found)
        return counted->states[found].length == size + 1 ? found : split(counted, state, token, found, size + 1);
    const int32_t made = new_state(counted, size + 1);
    for (;;) {
        lead(counted, state, token, made);
        if (!state) return made;
        state = counted->states[state].link;
        found = follower_of(counted, state, token);
        if (found) {
            const int32_t longest = counted->states[state].length + 1;
            const int exact = counted->states[found].length == longest;
            const int32_t link = exact ? found : split(counted, state, token, found, longest);
            counted->states[made].link = link;
            return made;
        }
    }
}

/* Whether a state is likelier than another: it occurred more often, or as often and earlier. */
static int likelier(const struct automaton *counted, int32_t a, int32_t b) {
    const struct state *one = counted->states + a, *other = counted->states + b;
    return one->count != other->count ? one->count > other->count : one->first < other->first;
}

/* Puts a token where it belongs among those of a ranking, which drops its last one if they are too many. */
static void rank_token(const struct automaton *counted, int32_t state, struct ranking *ranking, int32_t token) {
    int32_t at = 0;
    while (at < ranking->count && ranking->tokens[at] != token) at++;
    if (at == ranking->count) ranking->count++;
    const int32_t target = follower_of(counted, state, token);
    for (; at > 0 && likelier(counted, target, follower_of(counted, state, ranking->tokens[at - 1])); at--)
        ranking->tokens[at] = ranking->tokens[at - 1];
    ranking->tokens[at] = token;
    ranking->count = least(ranking->count, MOST_FOLLOWERS);
}

/* Updates the rankings after `token` has followed a state once more, and with it all its suffixes. */
static void rank(struct automaton *counted, int32_t state, int32_t token) {
    for (; state; state = counted->states[state].link) {
        struct ranking *ranking = counted->rankings + counted->states[state].ranked;
        if (!counted->states[state].ranked || ranking->total == UNKNOWN) continue;
        ranking->total++;
        rank_token(counted, state, ranking, token);
    }
}

/* All followers of a state that has several, ranked; returns how many there are, uncounted ones included. */
static int32_t rank_all(const struct automaton *counted, int32_t state, struct ranking *ranking) {
    int32_t all = 0;
    ranking->total = ranking->count = 0;
    for (int32_t at = counted->states[state].edges; at >= 0; at = counted->edges[at].next, all++) {
        const int32_t often = counted->states[counted->edges[at].target].count;
        ranking->total += often;
        if (often) rank_token(counted, state, ranking, counted->edges[at].token);
    }
    return all;
}

struct automaton *automaton_new(int32_t depth) {
    struct automaton *made = calloc(1, sizeof(struct automaton));
    if (!made) return NULL;
    made->depth = depth, made->bucket_count = 64;
    made->buckets = malloc((size_t)made->bucket_count * sizeof(int32_t));
    /* State 0 is the empty n-gram, and ranking 0 is none. */
    if (!made->buckets || !reserve((void **)&made->states, &made->state_room, 0, 64, sizeof(struct state)) ||
        !reserve((void **)&made->rankings, &made->ranking_room, 0, 1, sizeof(struct ranking))) {
        free(made->buckets), free(made->states), free(made);
        return NULL;
    }
    memset(made->buckets, -1, (size_t)made->bucket_count * sizeof(int32_t));
    made->states[new_state(made, 0)].target = SEVERAL;
    made->ranking_count = 1;
    return made;
}

void automaton_free(struct automaton *counted) {
    free(counted->states), free(counted->edges), free(counted->rankings), free(counted->buckets), free(counted);
}

int64_t automaton_add(struct automaton *counted, const int32_t *tokens, int64_t many, struct ending *head) {
    if (!reserve((void **)&counted->states, &counted->state_room, counted->state_count, 2 * many, sizeof(struct state))) return 0;
    int32_t state = counted->head.state, size = counted->head.size;
    for (int64_t at = 0; at < many; at++) {
        if (tokens[at] == BREAK) {
            state = size = 0;
            continue;
        }
        if (size == counted->depth) {
            size--;
            const int32_t link = counted->states[state].link;
            if (counted->states[link].length == size) state = link;
        }
        const int32_t before = state;
        state = extended(counted, state, size++, tokens[at]);
        counted->time++;
        for (int32_t each = state; each; each = counted->states[each].link)
            if (!counted->states[each].count++) counted->states[each].first = counted->time;
        if (counted->ranking_count > 1) rank(counted, automaton_shortened(counted, before, size - 1), tokens[at]);
    }
    counted->head = *head = (struct ending){state, size};
    return 1;
}

/* Uncounts the oldest tokens that are still counted, which must be these. */
void automaton_remove(struct automaton *counted, const int32_t *tokens, int64_t many) {
    int32_t state = counted->tail.state, size = counted->tail.size;
    for (int64_t at = 0; at < many; at++) {
        if (tokens[at] == BREAK) {
            state = size = 0;
            continue;
        }
        size = least(size, counted->depth - 1);
        const int32_t before = automaton_shortened(counted, state, size);
        size++;
        state = automaton_shortened(counted, follower_of(counted, before, tokens[at]), size);
        for (int32_t each = state; each; each = counted->states[each].link) counted->states[each].count--;
        for (int32_t each = before; each; each = counted->states[each].link)
            counted->rankings[counted->states[each].ranked].total = UNKNOWN;
    }
    counted->tail = (struct ending){state, size};
}

struct ending automaton_follow(const struct automaton *counted, struct ending ending, int32_t token) {
    int32_t state = ending.state, size = ending.size;
    for (;;) {
        const int32_t target = follower_of(counted, state, token);
        if (target && counted->states[target].count) return (struct ending){target, least(size + 1, counted->depth)};
        if (!state) return NOWHERE;
        state = counted->states[state].link;
        size = counted->states[state].length;
    }
}

/* The longest suffix of a suffix that occurs followed by tokens: its state in the upper half, its size in the lower. */
int64_t automaton_find(const struct automaton *counted, int32_t state, int32_t size, const int32_t *tokens, int64_t many) {
    struct ending ending = {state, size};
    for (int64_t at = 0; at < many; at++) ending = automaton_follow(counted, ending, tokens[at]);
    return (int64_t)ending.state << 32 | ending.size;
}

int32_t automaton_shortened(const struct automaton *counted, int32_t state, int32_t size) {
    while (state && counted->states[counted->states[state].link].length >= size) state = counted->states[state].link;
    return state;
}

int32_t automaton_shorter(const struct automaton *counted, int32_t state) {
    return state ? counted->states[counted->states[state].link].length : -1;
}

int32_t automaton_states(const struct automaton *counted) { return counted->state_count; }

int32_t automaton_count(const struct automaton *counted, int32_t state) { return counted->states[state].count; }

int64_t automaton_followers(struct automaton *counted, int32_t state, struct follower *found) {
    struct state *from = counted->states + state;
    if (from->target != SEVERAL) {
        const int32_t often = counted->states[from->target].count;
        *found = (struct follower){from->token, often, often};
        return often != 0;
    }
    struct ranking fresh, *ranking = counted->rankings + from->ranked;
    if (!from->ranked || ranking->total == UNKNOWN) {
        const int many = rank_all(counted, state, &fresh) > MANY;
        if (many && !from->ranked &&
            reserve((void **)&counted->rankings, &counted->ranking_room, counted->ranking_count, 1, sizeof(struct ranking)))
            from->ranked = counted->ranking_count++;
        if (from->ranked) counted->rankings[from->ranked] = fresh;
        ranking = &fresh;
    }
    for (int32_t at = 0; at < ranking->count; at++) {
        const int32_t target = follower_of(counted, state, ranking->tokens[at]);
        found[at] = (struct follower){ranking->tokens[at], counted->states[target].count, ranking->total};
    }
    return ranking->count;
}
