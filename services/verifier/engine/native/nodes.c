#include "nodes.h"

#include <math.h>
#include <stdlib.h>

struct ranked {
    double probability;
    int32_t node;
};

static int bucket_of(double claimed) {
    if (claimed <= 0) return BUCKETS - 1;
    int bucket = (int)(-log2(claimed) * STEPS_PER_HALF);
    return bucket < BUCKETS - 1 ? bucket : BUCKETS - 1;
}

/* What a score claims. */
static double claim_of(double score) { return score < 0 ? 0.0 : score > 1 ? 1.0 : score; }

void nodes_probabilities(const struct nodes *nodes, double *probabilities) {
    int64_t first = 0;
    for (int64_t tree = 0; tree < nodes->trees; tree++) {
        for (int64_t node = first; node < first + nodes->counts[tree]; node++) {
            double probability = claim_of(nodes->claimed[node]);
            if (nodes->sources[node] >= 0) {
                int at = nodes->sources[node] * BUCKETS + bucket_of(probability);
                probability = (nodes->accepted[at] + PRIOR * probability) / (nodes->seen[at] + PRIOR);
            }
            /* No node may be chosen before its parent. */
            int32_t parent = nodes->parents[node];
            if (parent >= 0 && probabilities[first + parent] < probability) probability = probabilities[first + parent];
            probabilities[node] = probability;
        }
        first += nodes->counts[tree];
    }
}

void nodes_learn(const struct nodes *nodes, const uint8_t *hits) {
    int64_t count = 0;
    for (int64_t tree = 0; tree < nodes->trees; tree++) count += nodes->counts[tree];
    for (int64_t node = 0; node < count; node++) {
        if (nodes->sources[node] < 0) continue;
        int at = nodes->sources[node] * BUCKETS + bucket_of(claim_of(nodes->claimed[node]));
        nodes->accepted[at] += hits[node];
        nodes->seen[at] += 1.0;
        if (nodes->seen[at] <= MEMORY) continue;
        double share = MEMORY / nodes->seen[at];
        nodes->accepted[at] *= share;
        nodes->seen[at] *= share;
    }
}

static int likelier(const void *one, const void *other) {
    const struct ranked *a = one, *b = other;
    if (a->probability != b->probability) return a->probability > b->probability ? -1 : 1;
    /* Of equals the earlier: parents come before their children. */
    return a->node < b->node ? -1 : 1;
}

/* Seconds of a pass of one request without keys: between measured points and beyond them on a line. */
static double of_rows(const struct cost_table *costs, int64_t rows) {
    const int64_t *known = costs->rows;
    const double *seconds = costs->seconds;
    if (costs->count == 1 || rows <= known[0]) return seconds[0];
    int64_t right = 1;
    while (right < costs->count - 1 && known[right] < rows) right++;
    double slope = (seconds[right] - seconds[right - 1]) / (double)(known[right] - known[right - 1]);
    return seconds[right - 1] + (slope > 0 ? slope : 0.0) * (double)(rows - known[right - 1]);
}

/* Seconds of a load with `more` rows, spread evenly over its requests. */
static double seconds_of(const struct cost_table *costs, const struct load *load, int64_t more) {
    int64_t row_keys = load->row_keys + more * load->keys / (load->requests > 1 ? load->requests : 1);
    double requests = costs->per_request * (double)(load->requests > 1 ? load->requests - 1 : 0);
    double whole = of_rows(costs, load->rows + more) + requests;
    whole = whole + costs->per_key * (double)load->keys;
    return costs->speed * (whole + costs->per_row_key * (double)row_keys);
}

/* The most tokens per second that a step without prompts could yield: what a second is worth. */
static double best_rate(const struct ranked *ranked, int64_t count, const struct cost_table *costs,
                        const struct load *decoding, int64_t certain) {
    double expected = (double)certain, best = expected / seconds_of(costs, decoding, 0);
    for (int64_t taken = 1; taken <= count; taken++) {
        expected += ranked[taken - 1].probability;
        double rate = expected / seconds_of(costs, decoding, taken);
        if (rate > best) best = rate;
    }
    return best;
}

int64_t nodes_rank(const struct nodes *nodes, const struct cost_table *costs, const struct load *step,
                   const struct load *decoding, int64_t certain, int64_t most, int32_t *order) {
    int64_t count = 0;
    for (int64_t tree = 0; tree < nodes->trees; tree++) count += nodes->counts[tree];
    double *probabilities = malloc((size_t)(count + 1) * sizeof *probabilities);
    struct ranked *ranked = malloc((size_t)(count + 1) * sizeof *ranked);
    if (!probabilities || !ranked) {
        free(probabilities);
        free(ranked);
        return -1;
    }
    nodes_probabilities(nodes, probabilities);
    for (int64_t node = 0; node < count; node++) ranked[node] = (struct ranked){probabilities[node], (int32_t)node};
    qsort(ranked, (size_t)count, sizeof *ranked, likelier);
    double worth = best_rate(ranked, count, costs, decoding, certain);
    double gain = 0, best = 0, before = seconds_of(costs, step, 0);
    int64_t chosen = 0;
    for (int64_t taken = 1; taken <= count && taken <= most; taken++) {
        double after = seconds_of(costs, step, taken);
        gain = gain + ranked[taken - 1].probability - worth * (after - before);
        before = after;
        if (gain > best) {
            best = gain;
            chosen = taken;
        }
        order[taken - 1] = ranked[taken - 1].node;
    }
    free(probabilities);
    free(ranked);
    return chosen;
}
