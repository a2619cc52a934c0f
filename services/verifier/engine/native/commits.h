/* What the tokens that a step commits change, for many requests in one call. The references are extend_hash in
 * speculation/prefix.py, follow_on in speculation/tree.py, and Repetition in ../deciding/repetition.py. */
#ifndef OUTRIDER_COMMITS_H
#define OUTRIDER_COMMITS_H

#include <stdint.h>

/* In ../deciding/repetition.py: so many tokens predict the next one; so many right predictions in a row count. */
enum { CONTEXT = 2, STREAK = 2 };
/* Bits of ``marks``. */
enum { REMAINS = 1, BEGINS = 2 };

/* What followed each pair of tokens the last time, over one text. */
struct repetition;

/* The tokens of all requests, request after request, and the nodes of each one's draft, without probes. */
struct commits {
    int64_t count;
    const int32_t *token_counts, *tokens;
    const int32_t *node_counts, *held, *parents;
    struct repetition *const *texts;
    uint64_t *hashes; /* of each prefix; then of the longer one */
    int32_t *right;   /* gets how many of its tokens each draft had right */
    uint8_t *marks;   /* gets REMAINS, if nodes remain below these, and BEGINS, if the text begins to repeat itself */
};

/* A text without tokens that remembers so many pairs; NULL: no memory. */
struct repetition *repetition_new(int64_t remembered);
void repetition_free(struct repetition *text);

/* Adds tokens. Returns whether the text begins to repeat itself with them. */
int64_t repetition_commit(struct repetition *text, const int32_t *tokens, int64_t count);

void commits_take(const struct commits *commits);

#endif
