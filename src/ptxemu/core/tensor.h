/* Tensor memory and what tensor.c and tensor_mma.c share (PTX ISA: "TensorCore 5th Generation Family Instructions").
 *
 * 128 lanes by 512 columns of 32 bits a CTA. Cells know whether they were written; order is kept for "strips" of 16 lanes and one column,
 * the finest grain at which two different operations of a correct kernel meet (data path layouts A, B, D and F use whole strips, and a warp's
 * tcgen05.ld and .st touch one or both strips of its own 32 lanes).
 */
#pragma once
#include "defined.h"

enum { TM_LANES = 128, TM_COLUMNS = 512, TM_STRIPS = 8, TM_UNIT = 32, TM_READERS = 8 };
enum { BY_ST, BY_MMA, BY_COPY }; /* who wrote last: tcgen05.st; tcgen05.mma; tcgen05.cp and .shift */

#define UNWAITED_READ UINT32_MAX /* clock of a tcgen05.ld that is not complete: later than everything */
#define USED_READ 0x80000000u    /* added to the clock of one that is complete by the use of its registers alone */
#define UNWAITED_CLOCK 0x3fffffu /* the same of a tcgen05.st, in its epoch */

/* A collective of the two CTAs of a pair: the even CTA keeps it. */
typedef struct {
    uint32_t arrived; /* bit per CTA of the pair */
    uint32_t columns, column; /* what the first of them asked for */
    uint32_t result;
    uint64_t generation;
} PairOp;

typedef struct { uint16_t lo, hi; } Columns; /* none: lo == hi */

/* A tcgen05.ld that is not complete: its instruction, the strips and columns that it read. */
typedef struct { uint32_t number; uint16_t strips, column, n; } Load;
enum { TM_LOADS = 32 };

typedef struct Tensor {
    int group;               /* the .cta_group that the CTA's first tcgen05 instruction named */
    int relinquished;
    uint32_t last_columns;   /* of its last allocation */
    uint16_t allocated[TM_COLUMNS / TM_UNIT]; /* columns of the allocation that starts there */
    uint8_t owned[TM_COLUMNS / TM_UNIT];
    PairOp pair_alloc, pair_dealloc;
    Load load[MAX_WARPS][TM_LOADS];           /* of each warp, the oldest first */
    int n_loads[MAX_WARPS];
    Columns st[MAX_WARPS];                    /* columns that unwaited tcgen05.st of a warp touched */
    uint32_t data[TM_LANES][TM_COLUMNS];
    uint8_t valid[TM_LANES][TM_COLUMNS];
    uint16_t writing[TM_STRIPS][TM_COLUMNS];  /* operations of the tensor core in flight that write there */
    uint16_t reading[TM_STRIPS][TM_COLUMNS];  /* MMAs in flight that read operand A there */
    uint32_t writer[TM_STRIPS][TM_COLUMNS];   /* epoch of the last write, of its issue */
    uint32_t core_reader[TM_STRIPS][TM_COLUMNS];          /* epoch of the last MMA that reads operand A there, of its issue */
    uint8_t kind[TM_STRIPS][TM_COLUMNS];                  /* BY_* of the last write */
    uint32_t reader[TM_STRIPS][TM_READERS][TM_COLUMNS];   /* clock of the last tcgen05.ld by each warp that may read there */
} Tensor;

/* A rectangle of tensor memory: strips in a bit mask. */
typedef struct { uint32_t strips, column, n; } Area;

Tensor *tensor_of(Warp *w, Cta *c);
void tensor_group(Warp *w, int group);        /* all tcgen05 instructions of a kernel name the same .cta_group */
Cta *tensor_peer(Warp *w, const char *what);  /* the other CTA of the pair, active */
void tensor_single(Warp *w, uint32_t m, const char *what);
void tensor_allocated(Warp *w, Cta *c, uint32_t column, uint32_t n, const char *what);
int tensor_defined(const Cta *c, uint32_t lane, uint32_t lanes, uint32_t column, uint32_t n); /* were all cells written, with defined values? */

/* Checks of an access that the warp issues now; `core`: by the tensor core, whose operations run in the order of their issue. */
void tensor_after_writes(Warp *w, Cta *c, Area a, int core, const char *what);
void tensor_after_reads(Warp *w, Cta *c, Area a, int core, const char *what);

#define FOR_STRIPS(s, strips) for (uint32_t rest_ = (strips), s; rest_ && (s = __builtin_ctz(rest_), 1); rest_ &= rest_ - 1)
