/* The counted suffix automaton in C. The reference is the class Automaton in ../sources/suffix_automaton.py, which explains
   it; the functions here have its methods' names, and find and rank the same, number for number. */
#pragma once
#include <stdint.h>

enum { MOST_FOLLOWERS = 4 };

/* A suffix of a text: its state and its number of tokens. {0, 0} is the empty one. */
struct ending {
    int32_t state, size;
};

/* What followed a state: a token, how often, and how often anything did. */
struct follower {
    int32_t token, count, total;
};

struct automaton;

/* Counts every n-gram that ends in one of these tokens. Returns 0, and does nothing, where there is no memory. */
int64_t automaton_add(struct automaton *counted, const int32_t *tokens, int64_t many, struct ending *head);
struct ending automaton_follow(const struct automaton *counted, struct ending ending, int32_t token);
/* The state of the last `size` tokens of a state's n-grams. */
int32_t automaton_shortened(const struct automaton *counted, int32_t state, int32_t size);
/* Tokens of the longest suffix of a state's n-grams that is of another state; -1 of state 0. */
int32_t automaton_shorter(const struct automaton *counted, int32_t state);
/* The likeliest followers of a state, at most MOST_FOLLOWERS; returns how many. */
int64_t automaton_followers(struct automaton *counted, int32_t state, struct follower *found);
