/* See blend.h. Where memory is lacking, the tree is smaller. */
#include "blend.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

static const int32_t LENGTH_OF[LENGTHS] = {1, 2, 3, 4, 6, 9, 13}, COUNT_OF[COUNTS] = {1, 2, 4};
static const double SHARE_OF[SHARES] = {0.0, 0.2, 0.4, 0.7, 0.95};
static const double STEP = 0.5, SLOWEST = 0.01, LARGEST = 12.0;

enum { NAMED_WORDS = 4 };

/* An open path: a candidate below a node. `number`: of equally likely ones the first comes first. */
struct open {
    double probability;
    int32_t number, parent, token, recycled;
};

/* The last draft: nodes, root first, the candidates after each, and what was left open. */
struct draft {
    /* While a place is asked: a bit for each token that is named there, perhaps shared by several. */
    uint64_t named[NAMED_WORDS];
    struct drafted *nodes;
    struct candidate *candidates;
    struct open *heap;
    int32_t node_count, node_room, candidate_count, candidate_room, heap_count, heap_room;
};

static int reserve(void **array, int32_t *room, int32_t count, size_t size) {
    if (count < *room) return 1;
    void *grown = realloc(*array, (size_t)(*room ? 2 * *room : 32) * size);
    if (!grown) return 0;
    *array = grown, *room = *room ? 2 * *room : 32;
    return 1;
}

/* --- what both sources name ------------------------------------------------------------------------------------- */

static int32_t candidates_of(const struct draft *draft, int32_t node) {
    return node + 1 < draft->node_count ? draft->nodes[node + 1].candidates : draft->candidate_count;
}

/* Whether nobody can have named a token here before; from now on somebody has. */
static int first_named(struct draft *draft, int32_t token) {
    const uint32_t mixed = (uint32_t)token * 0x9E3779B1u, at = mixed >> 24;
    const uint64_t bit = (uint64_t)1 << (at & 63);
    uint64_t *word = draft->named + (at >> 6);
    const int first = !(*word & bit);
    *word |= bit;
    return first;
}

static void name(struct draft *draft, int32_t begin, int32_t token, int32_t kind) {
    for (int32_t at = first_named(draft, token) ? draft->candidate_count : begin; at < draft->candidate_count; at++)
        if (draft->candidates[at].token == token) {
            /* Each source names a token once. */
            if (draft->candidates[at].first < SUFFIX_KINDS && kind >= SUFFIX_KINDS && draft->candidates[at].second < 0)
                draft->candidates[at].second = kind;
            return;
        }
    if (reserve((void **)&draft->candidates, &draft->candidate_room, draft->candidate_count, sizeof(struct candidate)))
        draft->candidates[draft->candidate_count++] = (struct candidate){.token = token, .first = kind, .second = -1};
}

static int32_t suffix_kind(int whose, int32_t length, const struct follower *follower) {
    int32_t size = LENGTHS - 1, often = COUNTS - 1, share = SHARES - 1;
    while (LENGTH_OF[size] > length) size--;
    while (COUNT_OF[often] > follower->count) often--;
    while (SHARE_OF[share] > (double)follower->count / follower->total) share--;
    return ((whose * LENGTHS + size) * COUNTS + often) * SHARES + share;
}

/* SuffixSession.candidates: of the longest suffix that occurs, then of shorter ones. */
static void ask_suffix(struct draft *draft, int32_t begin, const struct wanted *wanted, const struct place *place) {
    struct automaton *automata[WHOSE] = {wanted->own, wanted->shared};
    const struct ending endings[WHOSE] = {place->own, place->shared};
    int32_t states[WHOSE] = {place->own.state, place->shared.state}, found = 0;
    struct follower followers[WHOSE][MOST_FOLLOWERS];
    int64_t known[WHOSE] = {-1, -1};
    int32_t length = place->own.size > place->shared.size ? place->own.size : place->shared.size;
    for (length = length < wanted->depth ? length : wanted->depth - 1; length > 0 && found < wanted->max_endings; length--)
        for (int whose = 0; whose < WHOSE; whose++) {
            if (length > endings[whose].size) continue;
            if (known[whose] < 0 || automaton_shorter(automata[whose], states[whose]) >= length) {
                states[whose] = automaton_shortened(automata[whose], states[whose], length);
                known[whose] = automaton_followers(automata[whose], states[whose], followers[whose]);
                for (int64_t at = 0; at < known[whose]; at++)
                    name(draft, begin, followers[whose][at].token, suffix_kind(whose, length, &followers[whose][at]));
            }
            found += known[whose] > 0;
        }
}

/* RecyclingSession.candidates: successors of the longest known context, then of shorter ones. */
static void ask_recycling(struct draft *draft, int32_t begin, const struct wanted *wanted, const struct place *place, int end) {
    for (int32_t order = ORDERS; order > 0; order--) {
        const int32_t *ids;
        const int64_t count = table_top(wanted->table, &place->context, order, &ids);
        for (int32_t rank = 0; rank < count; rank++) name(draft, begin, ids[rank], TOP + (ORDERS - order) * MOST_IDS + rank);
    }
    for (int32_t order = ORDERS; order > 0; order--) {
        const int32_t token = table_seen(wanted->table, &place->context, order);
        if (token >= 0) name(draft, begin, token, SEEN + order);
    }
    /* Only at the end of the text, not further down a tree. */
    for (int ago = 0; end && ago < PASSED; ago++)
        for (int32_t rank = 0; rank < wanted->end->passed[ago]; rank++)
            name(draft, begin, wanted->end->passed_ids[ago][rank], PASSED_OVER + ago * PASSED_RANKS + rank);
}

/* Hands over what was named: token and kind of each candidate, kinds counted from `first`. Returns how many, at most `most`. */
static int64_t told(struct draft *asked, int32_t first, int32_t (*found)[2], int64_t most) {
    const int64_t count = asked->candidate_count < most ? asked->candidate_count : most;
    for (int64_t at = 0; at < count; at++)
        found[at][0] = asked->candidates[at].token, found[at][1] = asked->candidates[at].first - first;
    free(asked->candidates);
    return count;
}

/* What suffix decoding alone names at a place, for a blend with sources that have no compiled form. */
int64_t suffix_candidates(struct automaton *own, struct automaton *shared, int32_t depth, int32_t max_endings, int32_t state,
                          int32_t size, int32_t shared_state, int32_t shared_size, int32_t (*found)[2], int64_t most) {
    struct draft asked = {.candidate_count = 0};
    const struct wanted wanted = {.own = own, .shared = shared, .depth = depth, .max_endings = max_endings};
    ask_suffix(&asked, 0, &wanted, &(struct place){.own = {state, size}, .shared = {shared_state, shared_size}});
    return told(&asked, 0, found, most);
}

/* The same of token recycling, without what was passed over. */
int64_t recycling_candidates(const struct table *table, const struct context *context, int32_t (*found)[2], int64_t most) {
    struct draft asked = {.candidate_count = 0};
    const struct wanted wanted = {.table = table};
    ask_recycling(&asked, 0, &wanted, &(struct place){.context = *context}, 0);
    return told(&asked, SUFFIX_KINDS, found, most);
}

/* --- Calibrator -------------------------------------------------------------------------------------------------- */

static int32_t stem_of(int32_t kind) {
    if (kind < SEEN) return (kind - TOP) / MOST_IDS;
    if (kind < PASSED_OVER) return kind < SNAPSHOT ? ORDERS : ORDERS + 1;
    return ORDERS + 2 + (kind - PASSED_OVER) / PASSED_RANKS;
}

static int32_t agreement_of(const struct candidate *candidate) {
    return AGREEMENTS + candidate->first / SHARES * RECYCLING_STEMS + stem_of(candidate->second);
}

static void calibrate(struct candidate *candidates, int32_t count, const double *weights) {
    double whole = 1.0;
    for (int32_t at = 0; at < count; at++) {
        struct candidate *each = candidates + at;
        each->probability = exp(weights[each->first] + (each->second < 0 ? 0.0 : weights[agreement_of(each)]));
        whole += each->probability;
    }
    for (int32_t at = 0; at < count; at++) candidates[at].probability /= whole;
}

static void correct(double *weight, double *square, double error) {
    *square += error * error;
    *weight = fmin(LARGEST, fmax(-LARGEST, *weight + fmax(SLOWEST, STEP / sqrt(*square)) * error));
}

/* --- BlendSession ------------------------------------------------------------------------------------------------ */

static int before(const struct open *one, const struct open *other) {
    return one->probability != other->probability ? one->probability > other->probability : one->number < other->number;
}

static void push(struct draft *draft, struct open open) {
    if (!reserve((void **)&draft->heap, &draft->heap_room, draft->heap_count, sizeof(struct open))) return;
    int32_t at = draft->heap_count++;
    for (; at > 0 && before(&open, &draft->heap[(at - 1) / 2]); at = (at - 1) / 2) draft->heap[at] = draft->heap[(at - 1) / 2];
    draft->heap[at] = open;
}

static struct open pop(struct draft *draft) {
    const struct open top = draft->heap[0], moved = draft->heap[--draft->heap_count];
    int32_t at = 0;
    for (int32_t child; (child = 2 * at + 1) < draft->heap_count; at = child) {
        if (child + 1 < draft->heap_count && before(&draft->heap[child + 1], &draft->heap[child])) child++;
        if (!before(&draft->heap[child], &moved)) break;
        draft->heap[at] = draft->heap[child];
    }
    draft->heap[at] = moved;
    return top;
}

/* Adds a node, whose candidates join the heap. */
static void unfold(struct draft *draft, const struct wanted *wanted, struct drafted node, int32_t *pushed) {
    if (!reserve((void **)&draft->nodes, &draft->node_room, draft->node_count, sizeof(struct drafted))) return;
    const int32_t number = draft->node_count++, begin = node.candidates = draft->candidate_count;
    draft->nodes[number] = node;
    memset(draft->named, 0, sizeof draft->named);
    /* Suffixes are looked up while these come. */
    if (wanted->table) table_fetch(wanted->table, &node.place.context);
    if (wanted->own && node.place.own.state >= 0) ask_suffix(draft, begin, wanted, &node.place);
    if (wanted->table) ask_recycling(draft, begin, wanted, &node.place, number == 0);
    calibrate(draft->candidates + begin, draft->candidate_count - begin, wanted->weights);
    for (int32_t at = begin; at < draft->candidate_count; at++) {
        const struct candidate *each = draft->candidates + at;
        const double probability = node.probability * each->probability;
        if (probability > wanted->least)
            push(draft, (struct open){probability, ++*pushed, number, each->token, each->first >= SUFFIX_KINDS});
    }
}

static struct place follow(const struct wanted *wanted, struct place place, int32_t token) {
    if (wanted->own && place.own.state >= 0) {
        place.own = automaton_follow(wanted->own, place.own, token);
        place.shared = automaton_follow(wanted->shared, place.shared, token);
        if (!place.own.size && !place.shared.size) place.own.state = -1;
    }
    place.context = context_after(place.context, token);
    return place;
}

struct draft *blend_new(void) { return calloc(1, sizeof(struct draft)); }

void blend_free(struct draft *draft) { free(draft->nodes), free(draft->candidates), free(draft->heap), free(draft); }

int64_t blend_draft(struct draft *draft, const struct wanted *wanted, int32_t *tokens, int32_t *parents, int32_t *recycled,
                    double *scores) {
    int32_t pushed = 0;
    draft->node_count = draft->candidate_count = draft->heap_count = 0;
    if (!wanted->max_nodes) return 0;
    struct place place = {.own = wanted->own_end, .shared = wanted->shared_end};
    if (wanted->table) place.context = wanted->end->context;
    unfold(draft, wanted, (struct drafted){.parent = -1, .probability = 1.0, .place = place}, &pushed);
    while (draft->heap_count && draft->node_count <= wanted->max_nodes) {
        const struct open best = pop(draft);
        const int32_t node = draft->node_count - 1;
        tokens[node] = best.token, parents[node] = best.parent - 1;
        recycled[node] = best.recycled, scores[node] = best.probability;
        const struct drafted made = {
            .parent = best.parent, .token = best.token, .probability = best.probability,
            .place = follow(wanted, draft->nodes[best.parent].place, best.token),
        };
        unfold(draft, wanted, made, &pushed);
        if (draft->node_count == node + 1) return node;
    }
    return draft->node_count ? draft->node_count - 1 : 0;
}

void blend_learn(struct draft *draft, const int32_t *committed, int64_t many, double *weights, double *squares) {
    int32_t node = 0;
    for (int64_t at = 0; at < many && node >= 0 && node < draft->node_count; at++) {
        const int32_t begin = draft->nodes[node].candidates, end = candidates_of(draft, node);
        calibrate(draft->candidates + begin, end - begin, weights);
        for (int32_t each = begin; each < end; each++) {
            const struct candidate *candidate = draft->candidates + each;
            const double error = (candidate->token == committed[at]) - candidate->probability;
            correct(weights + candidate->first, squares + candidate->first, error);
            if (candidate->second < 0) continue;
            const int32_t agreement = agreement_of(candidate);
            correct(weights + agreement, squares + agreement, error);
        }
        int32_t next = node + 1;
        while (next < draft->node_count && !(draft->nodes[next].parent == node && draft->nodes[next].token == committed[at])) next++;
        node = next < draft->node_count ? next : -1;
    }
    draft->node_count = draft->candidate_count = 0;
}

/* What may follow a node of the last draft, root 0: tokens and probabilities as candidates named them; returns how many. */
int64_t blend_candidates(struct draft *draft, int32_t node, const double *weights, const struct candidate **found) {
    if (node >= draft->node_count) return 0;
    const int32_t begin = draft->nodes[node].candidates, end = candidates_of(draft, node);
    calibrate(draft->candidates + begin, end - begin, weights);
    *found = draft->candidates + begin;
    return end - begin;
}
