/* A step of many sessions in one call: each learns what was committed and shown, and drafts. The reference is the class
   BlendSession in ../blend.py, whose sessions observe and draft one after the other. */
#include "blend.h"

enum { NOT_DONE = -1, NO_MEMORY = -2 };

/* A session before the step; native/steps.py fills it in. Without `last` it takes no part; a source without addresses neither. */
struct session {
    struct draft *last;
    double *weights, *squares;
    struct automaton *own, *shared;
    struct table *table;
    struct text_end *end;
    int32_t depth, max_endings;
    struct ending shared_end;
    /* Its prefix. */
    int32_t length;
    uint64_t hash;
};

/* What was reported, by columns: a report's part of each lies behind that of the report before. */
struct reports {
    const int32_t *committed, *committed_counts, *lengths, *accepted, *accepted_counts, *max_nodes;
    const int32_t *node_counts, *tokens, *parents, *top_counts, *top_ids;
    const uint64_t *hashes;
    const double *least;
};

/* What came of it: how many nodes a session drafts, or why it does not; and where its text ends now. */
struct outcome {
    int32_t nodes;
    struct ending own_end, shared_end;
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

/* Lets a session observe a step behind its prefix, and draft. */
static struct outcome stepped(const struct session *session, const struct reports *reports, int64_t at, const struct pass *pass,
                              struct drafts drafts) {
    struct outcome outcome = {.nodes = NOT_DONE};
    if (session->length + pass->many != reports->lengths[at]) return outcome;
    if (session->table && pass->top && !table_fits(pass)) return outcome;
    if (hash_after(session->hash, pass->committed, pass->many) != reports->hashes[at]) return outcome;
    blend_learn(session->last, pass->committed, pass->many, session->weights, session->squares);
    const int counted = !session->own || automaton_add(session->own, pass->committed, pass->many, &outcome.own_end);
    outcome.shared_end = session->shared_end;
    if (session->own)
        for (int64_t each = 0; each < pass->many; each++)
            outcome.shared_end = automaton_follow(session->shared, outcome.shared_end, pass->committed[each]);
    if (session->table && pass->top) table_watch(session->table, session->end, pass);
    else if (session->table) table_read(session->table, &session->end->context, pass->committed, pass->many);
    const struct wanted wanted = {
        .own = session->own, .shared = session->shared, .table = session->table, .end = session->end,
        .weights = session->weights, .least = reports->least[at], .max_nodes = reports->max_nodes[at],
        .depth = session->depth, .max_endings = session->max_endings,
        .own_end = outcome.own_end, .shared_end = outcome.shared_end,
    };
    outcome.nodes = NO_MEMORY;
    if (counted)
        outcome.nodes = (int32_t)blend_draft(session->last, &wanted, drafts.tokens, drafts.parents, drafts.recycled, drafts.scores);
    return outcome;
}

/* Takes one report after the other; `drafts` has room for all nodes that are asked for. Where a report does not continue its
   session's prefix, or leaves its tree, nothing is done. Returns how many nodes there are. */
int64_t steps_take(const struct session *sessions, const struct reports *reports, int64_t count, struct outcome *outcomes,
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
        outcomes[at] = (struct outcome){.nodes = NOT_DONE};
        if (sessions[at].last) outcomes[at] = stepped(sessions + at, reports, at, &pass, behind);
        if (outcomes[at].nodes > 0) made += outcomes[at].nodes;
        pass.committed += pass.many, pass.accepted += pass.path, pass.tokens += pass.nodes, pass.parents += pass.nodes;
        pass.ids += pass.top * (pass.nodes + 1);
    }
    return made;
}
