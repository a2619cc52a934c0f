/* What attention over the key-value pool is told, and how it is called; see tree_attention.c. */
#ifndef OUTRIDER_TREE_ATTENTION_H
#define OUTRIDER_TREE_ATTENTION_H
#include "vectors.h"

/* What all layers of a pass share; mirrored by attention.py. Rows of one request are neighbours; a block is some of them. */
struct layout {
    int64_t rows, blocks, slots, scratch_per_thread, threads;
    const int64_t *tiles;       /* of all tiles of all requests, one request after the other: the KV block that holds it */
    const int64_t *row_tiles;   /* [rows] where the row's request begins in tiles */
    const int64_t *own_slot;    /* [rows] where the row's own key goes */
    const int64_t *position;    /* [rows] */
    const int64_t *straight;    /* [rows] below it, positions are slots */
    const int64_t *path;        /* slots of ancestors and selves at positions from straight on */
    const int64_t *row_path;    /* [rows] where the row begins in path */
    const int64_t *block_rows;  /* [blocks + 1] */
    float *scratch;             /* [threads, scratch_per_thread] */
};

/* One layer's tensors: query [heads, rows, size], key [kv heads, rows, size], value [kv heads, rows, value_size], by strides;
 * out [rows, heads, value_size]. */
struct layer {
    const float *query, *key, *value;
    int64_t query_head, query_row, key_head, key_row, value_head, value_row;
    void *keys;   /* [KV blocks, kv heads, size, TILE]: floats, or with scales FP8 (e4m3) */
    void *values; /* [KV blocks, kv heads, TILE, value_size + 1] floats, or [..., TILE, value_size] of FP8 */
    float *key_scales, *value_scales; /* [KV blocks, kv heads, TILE], or none */
    float *out;
    const float *sinks; /* [heads], or none: scores of a key without a value */
    const float *bias;  /* [heads, bias_width], or none: added to scores, by the key's position or the distance to it */
    int64_t bias_width, bias_by_distance;
    int64_t heads, kv_heads, size, value_size;
    int64_t window, chunk; /* 0: none */
    float scale, softcap;  /* softcap 0: none */
};

/* Store the rows' keys and values, then let every row attend. */
void outrider_attend(const struct layout *pass, const struct layer *layer);
#endif
