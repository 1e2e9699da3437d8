/* The tensor core's asynchronous operations: what tensor_core.c, tensor_mma.c, tensor_dot.c and tensor_copy.c share. */
#pragma once
#include "tensor.h"

enum { MAX_M = 128, MAX_N = 256, MAX_CHUNKS = 4 * MAX_N, ROWS = 1 << 14 }; /* of a CTA; ROWS: 16-byte rows that a descriptor can name */

/* A decoded descriptor of shared memory. */
typedef struct {
    uint32_t start, lbo, sbo, base;
    uint32_t width;  /* bytes of a row of the swizzle atom; 16: no swizzle */
    uint32_t mask, shift; /* address bits from 7 on that are xored in, and where */
} Desc;

/* A contiguous part of an operand in shared memory. */
typedef struct { uint32_t off, bytes; } Span;

/* What an operation reads from one CTA's shared memory, and its tensor memory there. */
enum { READS = 4 };
typedef struct {
    Cta *cta;
    uint32_t a[2 * MAX_M], b[MAX_CHUNKS]; /* offsets of 16-byte chunks */
    int n_spans, n_reads, undefined;      /* undefined: some of what it reads in shared memory is */
    Span span[2 * MAX_M + MAX_CHUNKS];
    Area writes, reads[READS];            /* reads: operand A, metadata, scale factors */
} Part;

Desc decode_desc(Warp *w, uint64_t bits, const char *what);
void chunks_k(const Desc *d, uint32_t rows, uint32_t per, uint32_t *out);
void chunks_mn(const Desc *d, uint32_t n, uint32_t depth, uint32_t *out);
void to_offsets(Warp *w, Cta *c, uint32_t *chunk, uint32_t n, const char *what);
void lock_chunks(Warp *w, Part *p, const uint32_t *chunk, uint32_t n, const char *what);
void unlock(Part *p);
void begin_tensor(Warp *w, Part *p, int kind);
void end_tensor(Part *p);
void ctas_of(Warp *w, int group, Cta *out[2], const char *what);

/* ---- tcgen05.mma ----------------------------------------------------------------------------------------------------------------- */
/* lower_tensor.py has the same numbers. */
enum { KIND_F16, KIND_TF32, KIND_F8F6F4, KIND_I8, KIND_MXF8F6F4, KIND_MXF4, KIND_MXF4NVF4 };

typedef struct {
    int kind, m, n, k;            /* of the whole MMA */
    int per, k_stored, b_chunks;  /* elements of a 16-byte chunk; of a row of A as stored; chunks of a row of B */
    int ws, sparse, selector;     /* sparse: SPARSE_* */
    int a_format, b_format, d_format;
    int a_mn, b_mn, a_tensor, negate, saturate, accumulate;
    int blocks, a_scale_id, b_scale_id, scale_e4m3; /* scale factors of a row; 0: not block-scaled */
    float scale;
    uint32_t d, a_address, meta, a_scales, b_scales; /* tensor memory */
    uint32_t lanes_off[8];        /* disable-output-lane */
    uint64_t zero[MAX_N / 64];    /* columns of B that count as zeros */
    uint32_t shift;               /* columns of B that are passed over */
    int group, line;
    Part part[2];
} Mma;

void mma_run(Async *op);

/* "Data Path Layout Organization": layouts F and C use half of the lanes, B and E halves of the columns, G quarters. */
static inline int half_lanes(const Mma *o) { return !o->ws && (o->group == 1 ? o->m == 64 : o->m == 128 && o->sparse); }
static inline uint32_t splits(const Mma *o) { return o->ws ? MAX_M / o->m : o->group == 2 && o->m == 128 && !o->sparse ? 2 : 1; }
/* Lane of row r of a CTA's part of D, of its column split `split`. */
static inline uint32_t lane_of(const Mma *o, uint32_t r, uint32_t split)
{
    uint32_t lane = o->d >> 16;
    return half_lanes(o) ? lane + r / 16 * 32 + r % 16 : r + split * (MAX_M / splits(o));
}

/* Bytes of a 16-byte chunk that hold elements: 4-bit and 6-bit floats of mixed kinds are followed by padding. */
static inline uint32_t data_bytes(const Mma *o, int format)
{
    const int mixed = o->kind == KIND_F8F6F4 || o->kind == KIND_MXF8F6F4;
    return !mixed || format < 2 ? 16 : format == 5 ? 8 : 12;
}
