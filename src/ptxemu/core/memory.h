/* What the instructions that access memory share: operand words, ranges of global memory, reductions, order over strong accesses. */
#pragma once
#include "defined.h"

#include <string.h>


/* imm[1] of loads, stores and atomics, as lower_memory.py packs it. */
enum {
    ACC_WIDE = 1 << 0,    /* a 64-bit address */
    ACC_STRONG = 1 << 1,  /* relaxed, volatile and stronger */
    ACC_ACQUIRE = 1 << 2,
    ACC_RELEASE = 1 << 3,
    ACC_OWN = 1 << 4,     /* shared::cta */
    ACC_SIGNED = 1 << 5,
};
#define ACC_ELEMENT(f) (1u << ((f) >> 8 & 7))   /* bytes of an element */
#define ACC_COUNT(f) ((uint32_t)(f) >> 12 & 15) /* elements of a lane */
#define ACC_REG(f) (1u << ((f) >> 16 & 7))      /* bytes of a register's lane */
#define ACC_SPACE(f) ((f) >> 20 & 7)
enum { SPACE_GENERIC, SPACE_GLOBAL, SPACE_SHARED, SPACE_LOCAL, SPACE_PARAM };

/* Read-modify-write operations and the types that they work on. */
enum { OP_ADD, OP_MIN, OP_MAX, OP_AND, OP_OR, OP_XOR, OP_INC, OP_DEC, OP_EXCH, OP_CAS };
enum { T_U8, T_U16, T_U32, T_S32, T_U64, T_S64, T_F16, T_F32, T_F32_FTZ, T_F64, T_BF16, T_F16X2, T_BF16X2, T_B128 };

/* The addresses of a warp's lanes: an operand of 32 or 64 bits, plus a constant. */
static inline void lane_addresses(Warp *w, int32_t arg, int64_t offset, int wide, uint64_t *out)
{
    if (wide) {
        const uint64_t *a = operand(w, arg);
        for (int i = 0; i < LANES; i++)
            out[i] = a[i] + (uint64_t)offset;
    } else {
        const uint32_t *a = operand(w, arg);
        for (int i = 0; i < LANES; i++)
            out[i] = (uint32_t)(a[i] + (uint32_t)offset);
    }
}

static inline uint64_t lane_address(Warp *w, int32_t arg, int64_t offset, int wide, uint32_t lane)
{
    if (wide)
        return ((const uint64_t *)operand(w, arg))[lane] + (uint64_t)offset;
    return ((const uint32_t *)operand(w, arg))[lane] + (uint32_t)offset;
}

enum { TOUCH_READ = 1, TOUCH_WRITE = 2, TOUCH_ASYNC = 4, TOUCH_SAME = 8 /* the write changes nothing */ };

/* global.c */
void global_check_lanes(Warp *w, uint32_t m, const uint64_t *addr, uint32_t bytes, uint32_t align, const char *what);
void global_check_span(Warp *w, uint64_t lo, uint64_t hi, const char *what); /* [lo, hi), in one range */
void global_check_param(Warp *w, uint64_t addr, uint32_t bytes, const char *what);

void global_name(const Launch *l, uint64_t addr, char *out, size_t n);

/* race.c: accesses of global memory, where races are looked for */
void race_access(Warp *w, uint64_t lo, uint64_t bytes, int touch, int strong, uint32_t epoch, const char *what); /* by this epoch */
void race_lanes(Warp *w, uint32_t m, const uint64_t *addr, uint32_t bytes, int touch, int strong, const char *what);
void race_release(Warp *w, uint64_t key, int release, int keep);
void race_acquire(Warp *w, uint64_t key, int acquire);
void race_fence(Warp *w);
static inline int races(const Warp *w) { return w->cta->cluster->launch->race != NULL; }

/* memory.c */
uint32_t shared_place(Warp *w, uint64_t addr, uint32_t bytes, uint32_t align, int own, const char *what, Cta **cta);
/* Bytes of memory that was never written, all ones in `undefined`, laid out as the data of all lanes: 32 bytes a lane at most. */
typedef struct { Origin origin; int any; uint8_t bits[LANES * 32]; } Unwritten;
void unwritten_mark(Warp *w, Unwritten *u, const Cta *c, uint32_t off, uint32_t bytes, uint32_t at);
void shared_gather(Warp *w, uint32_t m, const uint64_t *addr, uint32_t bytes, uint32_t align, int own, uint8_t *out, Unwritten *u);
/* undefined: NULL, or the shadow of `in`. */
void shared_scatter(Warp *w, uint32_t m, const uint64_t *addr, uint32_t bytes, uint32_t align, int own, const uint8_t *in, const uint8_t *undefined);

/* lanes.c, where a warp's `lanes` is not NULL */
void lanes_access(Warp *w, uint32_t m, const uint64_t *addr, uint32_t bytes, const uint8_t *in, int together);
void lanes_mark(Warp *w, uint32_t m, uint32_t off, uint32_t bytes, int write);

/* atomic.c */
uint64_t reduce(int op, int type, uint64_t old, uint64_t b, uint64_t c); /* the new value */
uint64_t global_reduce(void *at, int op, int type, uint64_t b, uint64_t c); /* atomically; returns the old value */
uint32_t type_bytes(int type);

/* queued.c: a read of `bytes` by every lane of the mask, marked INS_QUEUED */
void queued_load(Warp *w, const Ins *ins, uint32_t m, const uint64_t *addr, uint32_t bytes);

/* sync.c */
uint64_t shared_key(const Cta *c, uint32_t off);
void sync_read(Warp *w, uint64_t key, int acquire);
void sync_write(Warp *w, uint64_t key, int release, int keep); /* keep: a read-modify-write, which does not end a release sequence */

/* shared.c, for strong accesses and for reductions by the asynchronous proxy */
void shared_strong_begin(Warp *w, Cta *c, uint32_t off, uint32_t bytes, int touch, const char *what);
void shared_strong_end(Cta *c, uint32_t off, uint32_t bytes, uint32_t epoch);

/* ---- asynchronous copies ------------------------------------------------------------------------------------------------------- */
/* How a copy walks through a tensor: a box; four rows (tile::gather4, tile::scatter4); pixels of convolutions (im2col), of one line of images
 * (im2col::w), 128 of them with halos of every 32 (im2col::w::128). Numbered as in lower_async.py. */
enum { MODE_TILE, MODE_ROWS, MODE_IM2COL, MODE_W, MODE_W_128 };

/* A tensor map and a tile of it (PTX ISA: "Tensors", "Tensor-map"). */
typedef struct {
    uint64_t base, stride[5]; /* bytes */
    uint32_t size[5], box[5], step[5];
    int rank, type, swizzle, atom, nan_fill, mode;
    uint32_t element, row, lines, bytes; /* bytes of an element, of the tile's innermost line; lines; bytes of the tile */
    int32_t at[5];
    int32_t row_at[4];                 /* MODE_ROWS */
    int32_t lower[5], upper[5];        /* im2col: corners of the bounding box, by dimension; where walks begin and end */
    int32_t offset[5];                 /* im2col: of the filter's element */
    uint32_t pixels;
} Tile;

/* The lines of a tile one after another: number, address of element 0, and the elements inside the tensor. */
typedef struct { uint32_t n, from, to, k[5], lo[5], hi[5]; uint64_t address; } Lines;

/* box.c */
Lines lines_of(const Tile *t);
int lines_next(const Tile *t, Lines *l);
#define EACH_LINE(t, l) for (Lines l = lines_of(t); lines_next(t, &l);)
void box_check(Warp *w, const Tile *t, const char *what); /* faults unless all that lies inside the tensor is global memory of the kernel */
void tile_fetch(const Tile *t, uint32_t off, uint8_t *out);              /* as it lies in shared memory at `off` */
void tile_put(const Tile *t, uint32_t off, const uint8_t *in, int op);   /* op -1: store */
/* Faults where something inside the tensor that a store at `off` would write is undefined. */
void tile_check_defined(Warp *w, Cta *c, const Tile *t, uint32_t off, const char *what);
/* See race_access. in: NULL, or what a store is about to write. */
void tile_access(Warp *w, const Tile *t, uint32_t off, const uint8_t *in, int strong, uint32_t epoch, const char *what);

/* A copy to shared memory that mbarriers count, from global memory (linear or a tile) or from shared memory. */
typedef struct {
    uint64_t from;       /* global address */
    const Tile *tile;    /* or a tile of this: then `own_tile` */
    Cta *source;         /* or shared memory */
    uint32_t source_off;
    int undefined;       /* some of the source is */
    int op, type;        /* a reduction, or op -1 */
    uint32_t off, bytes;
    uint32_t ranks;      /* CTAs that receive it: a bit a rank */
    uint32_t bar_off;
    int bar_rank;        /* -1: every receiver's own; else that CTA's */
    int pair;            /* cta_group::2: the barrier of the receiver's pair with bar_rank's parity */
    Tile own_tile;
} Load;

/* A copy from shared to global memory that its thread waits for in groups. */
typedef struct {
    uint64_t to;
    int tiled, op, type;
    int have;            /* the bytes have been read from shared memory */
    int defined;         /* all of them are */
    uint32_t off, bytes;
    Tile tile;
    uint8_t data[];
} Store;

/* async.c */
void load_issue(Warp *w, Load *load, const char *what); /* checks it and queues it; `load` is copied */
Store *store_new(Warp *w, uint32_t lane, uint32_t off, uint32_t bytes, const char *what, Async **op);
void load_barrier(Warp *w, Load *load, uint64_t dst, uint64_t bar, uint32_t align, int ranks, const char *what);
