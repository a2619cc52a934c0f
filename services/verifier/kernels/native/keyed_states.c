/* Selective scans, linear attention and delta rules, row by row.
 *
 * The numbers of a value are independent of each other. So a thread takes a panel of them, under one head, through all rows of
 * a request: what the state holds of them stays in the nearest cache. A sum over keys is four sums, of every fourth key, so
 * that additions need not wait for each other. No number depends on how rows are cut into passes, on threads, or on LANES.
 */
#include "keyed_states.h"

int omp_get_thread_num(void);

enum { APART = 4 };
enum decays { BY_ONE, BY_KEY, BY_NUMBER };

struct numbers {
    const float *key, *query, *factor, *decay;
    vec value[PANEL_VECS], time[PANEL_VECS];
    int64_t keys, values;
};

INLINE vec decayed(const struct numbers *row, const enum decays by, vec state, int64_t key, int v) {
    if (by == BY_NUMBER) return state * exponential(row->time[v] * load(row->decay + key * row->values + v * LANES));
    return state * row->factor[by == BY_KEY ? key : 0];
}

INLINE vec sum_of_parts(vec (*sums)[PANEL_VECS], int v) { return (sums[0][v] + sums[1][v]) + (sums[2][v] + sums[3][v]); }

/* One row over `vecs` vectors of a head's values. from and to: [keys, PANEL], may be the same. */
INLINE void step_as(const struct keyed_rows *all, const int vecs, const enum decays by, int64_t at, int64_t head,
                    int64_t column, const float *from, float *to) {
    const int64_t heads = all->heads, values = all->values, keys = all->keys, of_head = head * all->paths.rows + at;
    const int64_t of_key_head = head / (heads / all->key_heads) * all->paths.rows + at;
    struct numbers row = {.key = all->key + of_key_head * keys, .query = all->query + of_key_head * keys};
    row.keys = keys, row.values = values;
    if (by == BY_NUMBER) row.decay = all->decay + head * keys * values + column;
    else row.factor = all->factor + of_head * (by == BY_KEY ? keys : 1);
#pragma GCC unroll 8
    for (int v = 0; v < vecs; v++) {
        row.value[v] = load(all->value + of_head * values + column + v * LANES);
        if (by == BY_NUMBER) row.time[v] = load(all->time + of_head * values + column + v * LANES);
    }
    if (all->part) {
        vec held[APART][PANEL_VECS] = {0};
        for (int64_t key = 0; key < keys; key += APART)
#pragma GCC unroll 4
            for (int apart = 0; apart < APART; apart++)
#pragma GCC unroll 8
                for (int v = 0; v < vecs; v++) {
                    const vec state = decayed(&row, by, load(from + (key + apart) * PANEL + v * LANES), key + apart, v);
                    held[apart][v] = fma_of(state, spread(row.key[key + apart]), held[apart][v]);
                }
        for (int v = 0; v < vecs; v++) row.value[v] = (row.value[v] - sum_of_parts(held, v)) * all->part[of_head];
    }
    vec read[APART][PANEL_VECS] = {0};
    for (int64_t key = 0; key < keys; key += APART)
#pragma GCC unroll 4
        for (int apart = 0; apart < APART; apart++)
#pragma GCC unroll 8
            for (int v = 0; v < vecs; v++) {
                const int64_t place = (key + apart) * PANEL + v * LANES;
                const vec before = decayed(&row, by, load(from + place), key + apart, v);
                const vec state = fma_of(spread(row.key[key + apart]), row.value[v], before);
                keep(to + place, state);
                read[apart][v] = fma_of(state, spread(row.query[key + apart]), read[apart][v]);
            }
    for (int v = 0; v < vecs; v++) keep(all->made + of_head * values + column + v * LANES, sum_of_parts(read, v));
}

INLINE void step(const struct keyed_rows *all, const int vecs, int64_t at, int64_t head, int64_t column, const float *from,
                 float *to) {
    if (!all->factor) step_as(all, vecs, BY_NUMBER, at, head, column, from, to);
    else if (all->per_key) step_as(all, vecs, BY_KEY, at, head, column, from, to);
    else step_as(all, vecs, BY_ONE, at, head, column, from, to);
}

/* All rows of a request. scratch: [1 + nodes, keys, PANEL]. */
INLINE void step_panel(const struct keyed_rows *all, const int vecs, int64_t request, int64_t head, int64_t column,
                       float *scratch) {
    const int64_t keys = all->keys, values = all->values, room = keys * PANEL, bytes = vecs * LANES * sizeof(float);
    const struct row_paths *paths = &all->paths;
    const int64_t first = paths->first[request], nodes = first + paths->chain[request], end = paths->first[request + 1];
    float *state = all->state + (paths->slot[request] * all->heads + head) * keys * values + column;
    for (int64_t key = 0; key < keys; key++) memcpy(scratch + key * PANEL, state + key * values, bytes);
    for (int64_t at = first; at < nodes; at++) step(all, vecs, paths->row[at], head, column, scratch, scratch);
    for (int64_t key = 0; key < keys; key++) memcpy(state + key * values, scratch + key * PANEL, bytes);
    for (int64_t at = nodes; at < end; at++) {
        const int64_t parent = paths->parent[at];
        const float *from = scratch + (parent < 0 ? 0 : 1 + parent) * room;
        step(all, vecs, paths->row[at], head, column, from, scratch + (1 + at - nodes) * room);
    }
}

/* Panels before requests: threads get equal numbers of neighbours, and one request may have a prompt's rows, the others one. */
void outrider_step_keyed(const struct keyed_rows *all) {
    const int64_t panels = (all->values + PANEL - 1) / PANEL;
#pragma omp parallel num_threads((int)all->threads) if (all->threads > 1)
    {
        float *scratch = all->scratch + omp_get_thread_num() * all->scratch_per_thread;
#pragma omp for collapse(2) schedule(static)
        for (int64_t panel = 0; panel < all->heads * panels; panel++)
            for (int64_t request = 0; request < all->paths.requests; request++) {
                const int64_t head = panel / panels, column = panel % panels * PANEL;
                if (column + PANEL <= all->values) step_panel(all, PANEL_VECS, request, head, column, scratch);
                else step_panel(all, COLUMN_VECS, request, head, column, scratch);
            }
    }
}
