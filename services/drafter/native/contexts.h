/* Token recycling's table in C. The reference is the class Table in ../sources/recycling_table.py. */
#pragma once
#include <stdint.h>

enum { LONGEST_CONTEXT = 3, MOST_IDS = 8, PASSED = 2, PASSED_RANKS = 6 };

/* The last tokens of a text or of a path behind it, latest last. */
struct context {
    int32_t size, tokens[LONGEST_CONTEXT];
};

/* The end of a text: its last tokens, and the likely ones that the last and the one before were chosen over: how many, which. */
struct text_end {
    struct context context;
    int32_t passed[PASSED], passed_ids[PASSED][PASSED_RANKS];
};

/* What a pass has shown behind a text: tokens that were committed then; nodes before all but the first; tokens and parents of
   all nodes; the likeliest ids after the root and each node, row behind row, as many as `counts` say, or `top` of each. */
struct pass {
    const int32_t *committed, *accepted, *tokens, *parents, *counts, *ids;
    int64_t many, path, nodes;
    int32_t top;
};

struct table;

struct context context_after(struct context context, int32_t token);
/* Whether the path stays in the tree. */
int table_fits(const struct pass *pass);
/* Notes what a pass that fits has shown, and moves the text's end behind what was committed. */
void table_watch(struct table *table, struct text_end *end, const struct pass *pass);
/* Notes that tokens followed a context, one after the other, and moves it behind them. */
void table_read(struct table *table, struct context *context, const int32_t *tokens, int64_t many);
/* Fetches into the caches what is known of the ends of a context. */
void table_fetch(const struct table *table, const struct context *context);
/* The tokens that were likeliest after the last `order` tokens of a context, in a pass; returns how many. */
int64_t table_top(const struct table *table, const struct context *context, int32_t order, const int32_t **ids);
/* The token that followed these in a text; -1: unknown. */
int32_t table_seen(const struct table *table, const struct context *context, int32_t order);
