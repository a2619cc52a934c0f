/* How the rows of a pass follow one another; mirrored by path_struct.py. A request's rows are a chain, then the nodes of a tree. */
#ifndef OUTRIDER_ROW_PATHS_H
#define OUTRIDER_ROW_PATHS_H
#include <stdint.h>

struct row_paths {
    int64_t rows, requests; /* of all rows, those of padding included */
    const int64_t *first;   /* [requests + 1] where a request begins in row and parent */
    const int64_t *chain;   /* [requests] how many of its rows are its chain */
    const int64_t *row;     /* numbers of the rows */
    const int64_t *parent;  /* of nodes: which node of the request they step from; below 0: the end of its chain */
    const int64_t *slot;    /* [requests] of its state, which the chain changes */
};
#endif
