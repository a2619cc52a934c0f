/* A step of many sessions in one call: each learns what was committed and shown, and drafts. The reference is the class
   BlendSession in ../blend.py, whose sessions observe and draft one after the other. */
#include "blend.h"

#include <stdlib.h>
#include <string.h>

enum { NOT_DONE = -1, NO_MEMORY = -2 };

/* A session that takes steps without Python, as long as nobody else asks for it. native/blend.py fills it in, and later reads
   what has become of it. Without `last` it takes none; a source without addresses neither. */
struct session {
    struct draft *last;
    double *weights, *squares;
    struct automaton *own, *shared;
    struct table *table;
    struct text_end *end;
    /* How often the texts of the shared automaton have changed, and how often that was when it was looked at. */
    const int64_t *changes;
    int64_t known_changes;
    int32_t depth, max_endings;
    /* Its prefix. `room`: tokens that it may still take. */
    uint64_t hash;
    int32_t length, room;
    /* Where its text ends; the least probability that it drafted with; and its tokens since Python was told, all in order. */
    struct ending own_end, shared_end;
    double least;
    int32_t *taken;
    int32_t taken_count, taken_room;
};

/* What was reported, by columns: a report's part of each lies behind that of the report before. */
struct reports {
    const int32_t *committed, *committed_counts, *lengths, *accepted, *accepted_counts, *max_nodes;
    const int32_t *node_counts, *tokens, *parents, *top_counts, *top_ids;
    const uint64_t *hashes;
    const double *least;
};

/* The drafts, by columns. */
struct drafts {
    int32_t *tokens, *parents, *recycled;
    double *scores;
};

/* As speculation/prefix.py. */
static uint64_t hash_after(uint64_t hash, const int32_t *tokens, int64_t many) {
    for (int64_t at = 0; at < many; at++) {
        hash = (hash ^ (uint64_t)((int64_t)tokens[at] + 1)) * 0x100000001B3u;
        hash ^= hash >> 29;
    }
    return hash;
}

struct session *session_new(void) { return calloc(1, sizeof(struct session)); }

void session_free(struct session *session) { free(session->taken), free(session); }

/* Whether a session may take so many tokens, and has room to note them. */
static int may_take(struct session *session, int64_t many) {
    if (!session || !session->last || many > session->room || *session->changes != session->known_changes) return 0;
    if (session->taken_count + many <= session->taken_room) return 1;
    const int64_t room = 2 * (session->taken_room + many);
    int32_t *taken = realloc(session->taken, (size_t)room * sizeof(int32_t));
    if (!taken) return 0;
    session->taken = taken, session->taken_room = (int32_t)room;
    return 1;
}

/* Lets a session observe a step behind its prefix, and draft. Returns how many nodes it drafts, or why it does not. */
static int64_t stepped(struct session *session, const struct reports *reports, int64_t at, const struct pass *pass,
                       struct drafts drafts) {
    if (session->length + pass->many != reports->lengths[at]) return NOT_DONE;
    if (session->table && pass->top && !table_fits(pass)) return NOT_DONE;
    if (hash_after(session->hash, pass->committed, pass->many) != reports->hashes[at]) return NOT_DONE;
    blend_learn(session->last, pass->committed, pass->many, session->weights, session->squares);
    const int counted = !session->own || automaton_add(session->own, pass->committed, pass->many, &session->own_end);
    if (session->own)
        for (int64_t each = 0; each < pass->many; each++)
            session->shared_end = automaton_follow(session->shared, session->shared_end, pass->committed[each]);
    if (session->table && pass->top) table_watch(session->table, session->end, pass);
    else if (session->table) table_read(session->table, &session->end->context, pass->committed, pass->many);
    memcpy(session->taken + session->taken_count, pass->committed, (size_t)pass->many * sizeof(int32_t));
    session->taken_count += (int32_t)pass->many, session->room -= (int32_t)pass->many;
    session->length = reports->lengths[at], session->hash = reports->hashes[at], session->least = reports->least[at];
    if (!counted) return NO_MEMORY;
    const struct wanted wanted = {
        .own = session->own, .shared = session->shared, .table = session->table, .end = session->end,
        .weights = session->weights, .least = session->least, .max_nodes = reports->max_nodes[at],
        .depth = session->depth, .max_endings = session->max_endings,
        .own_end = session->own_end, .shared_end = session->shared_end,
    };
    return blend_draft(session->last, &wanted, drafts.tokens, drafts.parents, drafts.recycled, drafts.scores);
}

/* Says of each session whether it may take its report's tokens. */
void steps_ready(struct session *const *sessions, const int32_t *many, int64_t count, uint8_t *ready) {
    for (int64_t at = 0; at < count; at++) ready[at] = (uint8_t)may_take(sessions[at], many[at]);
}

/* Takes one report after the other; `drafts` has room for all nodes that are asked for. Where a report does not continue its
   session's prefix, or leaves its tree, nothing is done. `counts` gets how many nodes each session drafts, or why it does
   not. Returns how many nodes there are. */
int64_t steps_take(struct session *const *sessions, const struct reports *reports, int64_t count, int32_t *counts,
                   const struct drafts *drafts) {
    struct pass pass = {
        .committed = reports->committed, .accepted = reports->accepted, .tokens = reports->tokens, .parents = reports->parents,
        .ids = reports->top_ids,
    };
    int64_t made = 0;
    for (int64_t at = 0; at < count; at++) {
        pass.many = reports->committed_counts[at], pass.path = reports->accepted_counts[at];
        pass.nodes = reports->node_counts[at], pass.top = reports->top_counts[at];
        const struct drafts behind = {
            drafts->tokens + made, drafts->parents + made, drafts->recycled + made, drafts->scores + made,
        };
        int64_t nodes = NOT_DONE;
        if (may_take(sessions[at], pass.many)) nodes = stepped(sessions[at], reports, at, &pass, behind);
        counts[at] = (int32_t)nodes;
        if (nodes > 0) made += nodes;
        pass.committed += pass.many, pass.accepted += pass.path, pass.tokens += pass.nodes, pass.parents += pass.nodes;
        pass.ids += pass.top * (pass.nodes + 1);
    }
    return made;
}
