/* wgmma (PTX ISA: "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions").
 *
 * A warp that issues a wgmma.mma_async checks the shared memory that it reads (B, and its own 16 rows of A), and marks it and its registers.
 * The product is formed when the last of the four warps has issued it, which nobody can tell: its registers are out of bounds until a warp's
 * own wgmma.wait_group, which waits for the other warps to have issued. The operation is the warpgroup's: who is ordered after the wait of
 * any of its warps may write the memory that it read.
 */
#include "defined.h"
#include "dot.h"
#include "sparse.h"

#include <stdlib.h>

enum { RING = 256, MAX_N = 256, MAX_ROWS = 4 * MAX_N };

/* A wgmma.mma_async that a warp has issued and not waited for. */
typedef struct {
    const Ins *ins;
    uint64_t a, b;   /* descriptors; a: 0 where A is in registers */
    uint32_t group;
    uint32_t scale;  /* whether the accumulator's old value counts */
    int undefined;   /* some of what it reads from shared memory is */
    uint32_t meta[LANES]; /* of a sparse A: the warp's metadata when it issued it */
} WgOp;

/* A register that some wgmma uses. */
typedef struct {
    uint32_t group_d, group_a; /* the last group in which it is an accumulator, or holds A */
    uint32_t fence_d, fence_a; /* 1 + the fences that were executed before it was so */
    uint32_t written;          /* by another instruction since */
    uint32_t shape;
    const Ins *by_d, *by_a, *by_other; /* who did it */
} Held;

struct WgState {
    uint32_t fences, committed, done; /* groups are counted from 1 */
    uint32_t issued, finished;        /* operations: issued, and found complete by a wait */
    WgOp ring[RING];
    Held held[];                      /* of the registers from SR_END to Program.held_end */
};

typedef struct {
    int n, k, ta, tb, td, regs_a, negate, trans_a, trans_b, saturate, n_d;
    int sparse, selector, stored; /* SPARSE_*; stored: elements of a row of A */
    const int32_t *d, *a, *b, *scale, *meta;
} Shape;

/* wgmma.mma_async d, a, b, scale-d: operands are all registers of D, A's registers or descriptor, B's descriptor, the predicate, and for a
 * sparse A its metadata.
 * imm[0]: n, k << 16; imm[1]: types of a, b << 8, d << 16; imm[2] bits: 0 A in registers, 1 the product is negated, 2 A is M-major,
 * 3 B is N-major, 4 scale-d is negated, 5 satfinite, 6 and 7 SPARSE_*, 8 the sparsity selector. */
static Shape shape_of(const Ins *ins)
{
    Shape s = {.n = ins->imm[0] & 0xffff, .k = ins->imm[0] >> 16, .ta = ins->imm[1] & 255, .tb = ins->imm[1] >> 8 & 255, .td = ins->imm[1] >> 16,
               .regs_a = ins->imm[2] & 1, .negate = ins->imm[2] >> 1 & 1, .trans_a = ins->imm[2] >> 2 & 1, .trans_b = ins->imm[2] >> 3 & 1,
               .saturate = ins->imm[2] >> 5 & 1, .sparse = ins->imm[2] >> 6 & 3, .selector = ins->imm[2] >> 8 & 1};
    s.stored = s.sparse ? s.k / 2 : s.k;
    s.n_d = s.td == T_F16 ? s.n / 4 : s.n / 2;
    s.d = ins->arg;
    s.a = s.d + s.n_d;
    s.b = s.a + (s.regs_a ? 4 : 1);
    s.scale = s.b + 1;
    s.meta = s.scale + 1;
    return s;
}

static struct WgState *state(Warp *w)
{
    if (!w->wg) {
        size_t held = (w->cta->cluster->launch->program->held_end - SR_END) / (4 * LANES);
        w->wg = emu_alloc(sizeof *w->wg + held * sizeof *w->wg->held);
    }
    return w->wg;
}

/* ---- operands in shared memory ---------------------------------------------------------------------------------------------------- */
/* The 16-byte rows of an operand that is rows `first` to `first + count` of a matrix of 32 bytes along k (64: `wide`, what a sparse A is
 * multiplied with), as offsets in shared memory. K-major: two or four rows of each matrix row. MN-major (16-bit elements): for every 8 matrix
 * rows, one of each k (PTX ISA: "Matrix-Descriptor Format", "Strides", "Canonical Layouts"). */
static int rows_of(Warp *w, uint64_t descriptor, int mn_major, int wide, int first, int count, uint32_t *out, const char *what)
{
    uint32_t start = (descriptor & 0x3fff) << 4, lead = (descriptor >> 16 & 0x3fff) << 4, stride = (descriptor >> 32 & 0x3fff) << 4;
    uint32_t base = descriptor >> 49 & 7, mode = descriptor >> 62, width = mode ? 256u >> mode : 16, bits = width / 16 - 1;
    uint32_t size = w->cta->shared.size;
    int n = 0, inner = (mn_major ? 16 : 2) << wide;
    if (descriptor & 0x3ff1c000c000c000u)
        fault(w, ERR_WGMMA, "%s: reserved bits of the matrix descriptor %#llx are set", what, (unsigned long long)descriptor);
    if (wide && !mn_major && width == 32)
        fault(w, ERR_UNSUPPORTED, "%s: the matrix descriptor %#llx has 32-byte swizzling, in whose rows 64 bytes along k have no canonical layout",
              what, (unsigned long long)descriptor);
    for (int i = mn_major ? first / 8 : first, end = mn_major ? (first + count) / 8 : first + count; i < end; i++)
        for (int j = 0; j < inner; j++) {
            uint32_t at = start;
            if (!mn_major)
                at += i % 8 * width + i / 8 * stride + j * (mode ? 16 : lead);
            else if (!mode)
                at += i * stride + j % 8 * 16 + j / 8 * lead;
            else
                at += (i & bits) * 16 + i / (bits + 1) * lead + j % 8 * width + j / 8 * stride;
            at ^= (((at >> 7) - base) & bits) << 4;
            if (at < SHARED_BASE || at - SHARED_BASE + 16 > size)
                fault(w, ERR_MEMORY, "%s: the matrix descriptor %#llx (start %#x, leading %u, stride %u, swizzle %u) reaches shared offset %d, "
                      "outside [0, %u)", what, (unsigned long long)descriptor, start, lead, stride, mode ? width : 0, (int)(at - SHARED_BASE), size);
            out[n++] = at - SHARED_BASE;
        }
    return n;
}

/* The same through a cache, since four warps begin, form and end each product. */
static const uint32_t *locate(Warp *w, uint64_t descriptor, int mn_major, int wide, int first, int count, int *n, const char *what)
{
    typedef struct { uint64_t descriptor; uint32_t key, size; int n; uint32_t row[MAX_ROWS]; } Rows;
    static _Thread_local Rows cache[64];
    uint32_t key = 1u << 31 | (uint32_t)mn_major << 30 | (uint32_t)wide << 29 | (uint32_t)first << 16 | (uint32_t)count, size = w->cta->shared.size;
    Rows *e = &cache[(descriptor * 0x9e3779b97f4a7c15u + key * 0x85ebca6bu) >> 58];
    if (e->descriptor != descriptor || e->key != key || e->size != size) {
        e->key = 0;
        e->n = rows_of(w, descriptor, mn_major, wide, first, count, e->row, what);
        e->descriptor = descriptor;
        e->key = key;
        e->size = size;
    }
    *n = e->n;
    return e->row;
}

static const char name_a[] = "wgmma read of operand A", name_b[] = "wgmma read of operand B";

/* The clock component of a warpgroup's wgmma: it counts the operations that a warp has waited for. */
static int component(const Warp *w)
{
    const Cta *c = w->cta;
    return c->cluster->n_warps + c->rank * (c->n_warps / 4) + w->id / 4;
}

/* A warp's reads of the operands of the operation that it issues now; `first`: of the warpgroup. */
static void reads(Warp *w, WgOp *op, int first)
{
    Shape s = shape_of(op->ins);
    op->undefined = 0;
    for (int which = s.regs_a; which < 2; which++) {
        const char *what = which ? name_b : name_a;
        int n;
        const uint32_t *row = which ? locate(w, op->b, s.trans_b, s.sparse != 0, 0, s.n, &n, what)
                                    : locate(w, op->a, s.trans_a, 0, w->id % 4 * 16, 16, &n, what);
        op->undefined |= async_read_rows(w, w->cta, row, n, component(w), first || !which ? w->wg->issued + 1 : 0, what);
    }
}

/* An operand's matrix rows as k floats each. */
static void load(Warp *w, uint64_t descriptor, int mn_major, int wide, int count, int k, int type, float *out)
{
    const uint8_t *data = w->cta->shared.data;
    int n, per = elements_per_row(type);
    const uint32_t *row = locate(w, descriptor, mn_major, wide, 0, count, &n, "wgmma");
    if (!mn_major) {
        for (int i = 0; i < n; i++)
            elements_of_row(out + i * per, data + row[i], type);
        return;
    }
    for (int i = 0; i < n; i++) {
        float x[8] = {0};
        elements_of_row(x, data + row[i], type);
        for (int j = 0; j < 8; j++)
            out[(i / k * 8 + j) * k + i % k] = x[j];
    }
}

/* Where the stored elements of A's 64 rows belong. */
static void places(Warp *group, const Shape *s, uint8_t *place)
{
    const int chunks = s->k / sparse_chunk(s->sparse), small = elements_per_row(s->ta) > 8;
    for (int r = 0; r < 64; r++) {
        Warp *w = &group[r / 16];
        const uint64_t meta = sparse_of_row(w->wg->ring[(w->wg->issued - 1) % RING].meta, r % 16, chunks, small, s->selector);
        const int wrong = sparse_places(place + r * s->stored, meta, s->k, s->sparse, 0);
        if (wrong >= 0)
            fault(w, ERR_WGMMA, "wgmma.mma_async.sp: the metadata %#x of row %d, elements %d to %d, means nothing", (unsigned)(meta >> 4 * wrong & 15),
                  r, wrong * sparse_chunk(s->sparse), (wrong + 1) * sparse_chunk(s->sparse) - 1);
    }
}

/* ---- the product ---------------------------------------------------------------------------------------------------------------------- */
/* Form one register of a warp's accumulators; of two f16 in a register, that of column parity b. */
static void tile(Warp *w, int32_t at, int b, const Spread *sa, const Spread *sb, const Shape *s, int keep, DotRule rule)
{
    uint32_t *d = operand(w, at);
    float acc[LANES];
    switch (s->td) {
    case T_S32:
        if (!keep)
            memset(d, 0, LANES * sizeof *d);
        dot_tile_int((int32_t *)d, sa, sb, s->stored, s->saturate);
        return;
    case T_F32:
        if (keep)
            memcpy(acc, d, sizeof acc);
        else
            memset(acc, 0, sizeof acc);
        dot_tile(acc, sa, sb, s->stored, rule);
        memcpy(d, acc, sizeof acc);
        return;
    }
    for (int t = 0; t < LANES; t++)
        acc[t] = keep ? f16_to_float(d[t] >> 16 * b & 0xffff) : 0;
    dot_tile(acc, sa, sb, s->stored, rule);
    for (int t = 0; t < LANES; t++)
        d[t] = (d[t] & ~(0xffffu << 16 * b)) | f16_of_float(acc[t]) << 16 * b;
}

static void execute(Warp *group, const WgOp *op)
{
    static _Thread_local struct {
        float a[64 * MAX_STORED], b[MAX_N * MAX_K];
        uint8_t place[64 * MAX_STORED];
        Spread sa[4][2], sb;
    } x;
    Shape s = shape_of(op->ins);
    int integer = s.ta >= T_S8, arch = group->cta->cluster->launch->program->arch;
    DotRule rule = integer ? (DotRule){0} : dot_rule(s.ta, s.td == T_F16, arch);
    int emin_b = integer ? 0 : dot_rule(s.tb, 0, arch).emin;
    load(group, op->b, s.trans_b, s.sparse != 0, s.n, s.k, s.tb, x.b);
    if (!s.regs_a)
        load(group, op->a, s.trans_a, 0, 64, s.stored, s.ta, x.a);
    for (int i = 0; s.regs_a && i < 4; i++) /* see mma_sync */
        for (int r = 0; r < 4; r++)
            for (int g = 0; g < 8; g++)
                elements_of_row(x.a + (16 * i + 8 * (r & 1) + g) * s.stored + (r >> 1) * (s.stored / 2), (uint32_t *)operand(&group[i], s.a[r]) + 4 * g, s.ta);
    for (int i = 0; s.negate && i < 64 * s.stored; i++)
        x.a[i] = -x.a[i];
    if (s.sparse)
        places(group, &s, x.place);
    for (int i = 0; i < 4; i++)
        for (int h = 0; h < 2; h++)
            spread_a(&x.sa[i][h], x.a + 16 * i * s.stored, h, s.stored, rule.emin);
    for (int j = 0; j < s.n / 8; j++)
        for (int b = 0; b < 2; b++) {
            if (!s.sparse)
                spread_b(&x.sb, x.b + 8 * j * s.k, b, s.k, emin_b);
            for (int i = 0; i < 4; i++)
                for (int h = 0; h < 2; h++) {
                    if (s.sparse)
                        spread_b_sparse(&x.sb, x.b + 8 * j * s.k, b, s.k, x.place + 16 * i * s.stored, h, s.stored, emin_b);
                    tile(&group[i], s.td == T_F16 ? s.d[2 * j + h] : s.d[4 * j + 2 * h + b], b, &x.sa[i][h], &x.sb, &s, op->scale, rule);
                }
        }
}

/* Rows of an operand of k elements in shared memory that hold something undefined. */
static void undefined_rows(Warp *w, uint64_t descriptor, int mn_major, int wide, int count, int k, uint8_t *out)
{
    int n;
    const uint32_t *row = locate(w, descriptor, mn_major, wide, 0, count, &n, "wgmma");
    for (int i = 0; i < n; i++)
        for (int j = 0; j < 8; j++)
            out[mn_major ? i / k * 8 + j : i * count / n] |= !shared_defined(w->cta, row[i] + 2 * j, 2);
}

/* D after an operation: undefined where its row of A, its column of B or the old value that counts is. */
static void define(Warp *group, const WgOp *op)
{
    Shape s = shape_of(op->ins);
    uint8_t row[64] = {0}, column[MAX_N] = {0};
    Origin origin = {.line = op->ins->line};
    if (!s.regs_a)
        undefined_rows(group, op->a, s.trans_a, 0, 64, s.stored, row);
    undefined_rows(group, op->b, s.trans_b, s.sparse != 0, s.n, s.k, column);
    int n;
    const uint32_t *b = locate(group, op->b, s.trans_b, s.sparse != 0, 0, s.n, &n, "wgmma");
    origin.at = b[0];
    for (int i = n - 1; i >= 0; i--)
        if (!shared_defined(group->cta, b[i], 16))
            origin.at = b[i];
    for (int i = 0; i < 4; i++)
        for (int r = 0; s.regs_a && r < 4; r++) {
            const uint32_t *bits = (const uint32_t *)undefined_bits(&group[i], s.a[r]);
            for (int t = 0; bits && t < LANES; t++)
                row[16 * i + 8 * (r & 1) + t / 4] |= bits[t] != 0;
            if (bits)
                origin = undefined_origin(&group[i], s.a[r]);
        }
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < s.n_d; k++) {
            const int half = s.td == T_F16, h = half ? k & 1 : k >> 1 & 1, first = half ? k / 2 * 8 : k / 4 * 8 + (k & 1);
            const uint32_t *old = op->scale ? (const uint32_t *)undefined_bits(&group[i], s.d[k]) : NULL;
            uint32_t out[LANES], any = 0;
            for (int t = 0; t < LANES; t++) {
                const uint8_t left = row[16 * i + 8 * h + t / 4], *right = column + first + t % 4 * 2;
                const uint32_t now = old ? old[t] : 0;
                if (half)
                    out[t] = (left | right[0] || now & 0xffff ? 0xffffu : 0) | (left | right[1] || now >> 16 ? 0xffff0000u : 0);
                else
                    out[t] = left | right[0] || now ? ~0u : 0;
                any |= out[t];
            }
            undefined_set(&group[i], s.d[k], 4, FULL, any ? out : NULL, old ? undefined_origin(&group[i], s.d[k]) : origin);
        }
}

/* ---- registers in flight ---------------------------------------------------------------------------------------------------------------- */
static Held *held(Warp *w, int32_t at)
{
    return at >= SR_END && at < w->cta->cluster->launch->program->held_end ? &w->wg->held[(at - SR_END) / (4 * LANES)] : NULL;
}

/* Another instruction than wgmma.mma_async is about to use registers that wgmma uses. */
void wgmma_touch(Warp *w, const Ins *ins)
{
    struct WgState *g = w->wg;
    for (int i = 0; i < ins->n; i++) {
        Held *h = held(w, ins->arg[i]);
        if (!h)
            continue;
        if (h->group_d > g->done)
            fault(w, ERR_WGMMA, "an accumulator is used while a wgmma is in flight on it (missing wgmma.wait_group): the wgmma at PTX line %d",
                  h->by_d->line);
        if (h->group_a > g->done)
            fault(w, ERR_WGMMA, "a register of operand A is used while a wgmma reads it (missing wgmma.wait_group): the wgmma at PTX line %d",
                  h->by_a->line);
    }
    for (int i = ins->n; i < ins->n + ins->n_written; i++) {
        Held *h = held(w, ins->arg[i]);
        h->written = 1;
        h->by_other = ins;
    }
}

/* A register that another instruction wrote since the last wgmma on it: a fence must have come since that wgmma. The PTX ISA asks for one after
 * the write, and after reads too; compilers do not keep to that (nothing ties a fence to registers, so that they move arithmetic over it, and
 * CUTLASS reads accumulators with no fence after it), and ptxas orders such instructions itself. */
static void check_written(Warp *w, Held *h, const char *what)
{
    uint32_t now = w->wg->fences + 1;
    if (h->written && (h->fence_d == now || h->fence_a == now))
        fault(w, ERR_WGMMA, "%s was written after a wgmma on it and there is no wgmma.fence before the next: the write at PTX line %d", what,
              h->by_other->line);
    h->written = 0;
}

/* What the section on wgmma.fence asks for. Several wgmma may read one register, or accumulate in it where they have one shape. */
static void mark_registers(Warp *w, const Ins *ins, const Shape *s)
{
    struct WgState *g = w->wg;
    uint32_t now = g->fences + 1, group = g->committed + 1, shape = ins->imm[0];
    for (int i = 0; i < (s->regs_a ? 4 : 0); i++) {
        Held *h = held(w, s->a[i]);
        if (!h)
            continue;
        check_written(w, h, "a register of operand A");
        if (h->group_d > g->done)
            fault(w, ERR_WGMMA, "operand A is the accumulator of a wgmma in flight (missing wgmma.wait_group): the wgmma at PTX line %d",
                  h->by_d->line);
        if (h->fence_d == now)
            fault(w, ERR_WGMMA, "operand A is the accumulator of a wgmma with no wgmma.fence in between: the wgmma at PTX line %d", h->by_d->line);
        h->group_a = group;
        h->fence_a = now;
        h->by_a = ins;
    }
    for (int i = 0; i < s->n_d; i++) {
        Held *h = held(w, s->d[i]);
        if (!h)
            continue;
        check_written(w, h, "an accumulator");
        if (h->group_a > g->done)
            fault(w, ERR_WGMMA, "an accumulator is operand A of a wgmma in flight (missing wgmma.wait_group): the wgmma at PTX line %d",
                  h->by_a->line);
        if (h->fence_a == now)
            fault(w, ERR_WGMMA, "an accumulator is operand A of a wgmma with no wgmma.fence in between: the wgmma at PTX line %d", h->by_a->line);
        if (h->fence_d == now && h->shape != shape)
            fault(w, ERR_WGMMA, "an accumulator is that of a wgmma of another shape with no wgmma.fence in between: the wgmma at PTX line %d",
                  h->by_d->line);
        h->group_d = group;
        h->fence_d = now;
        h->shape = shape;
        h->by_d = ins;
    }
}

/* ---- instructions ------------------------------------------------------------------------------------------------------------------------ */
static uint64_t uniform(Warp *w, int32_t at, const char *what)
{
    const uint64_t *x = operand(w, at);
    for (int i = 1; i < LANES; i++)
        if (x[i] != x[0])
            fault(w, ERR_WGMMA, "%s differs between the lanes of a warp: %#llx and %#llx", what, (unsigned long long)x[0], (unsigned long long)x[i]);
    return x[0];
}

static void check_group(Warp *w, uint32_t m, const char *what)
{
    int first = w->id & ~3;
    if (first + 4 > w->cta->n_warps)
        fault(w, ERR_WGMMA, "%s by warp %d: its warpgroup would be warps %d to %d, and the CTA has %d warps", what, w->id, first, first + 3,
              w->cta->n_warps);
    if (m != FULL)
        fault(w, ERR_WGMMA, "%s by lanes %#x only: all lanes of the warpgroup must execute it", what, m);
}

/* Operations that all four warps of a group have issued. */
static uint32_t issued_by_all(const Warp *group)
{
    uint32_t least = UINT32_MAX;
    for (int i = 0; i < 4; i++) {
        uint32_t n = group[i].wg ? group[i].wg->issued : 0;
        least = n < least ? n : least;
    }
    return least;
}

static int mma_async(Warp *w, const Ins *ins, uint32_t m)
{
    Warp *group = &w->cta->warp[w->id & ~3];
    check_group(w, m, "wgmma.mma_async");
    struct WgState *g = state(w);
    Shape s = shape_of(ins);
    if (!g->fences)
        fault(w, ERR_WGMMA, "no wgmma.fence before the first wgmma.mma_async of warp %d", w->id);
    mark_registers(w, ins, &s);
    uint32_t p = *(uint32_t *)operand(w, *s.scale);
    if (p && p != FULL)
        fault(w, ERR_WGMMA, "scale-d differs between the lanes of a warp (%#x)", p);
    if (g->issued - g->finished == RING)
        fault(w, ERR_EMU, "more than %d wgmma.mma_async in flight", RING);
    WgOp *op = &g->ring[g->issued % RING];
    op->ins = ins;
    op->a = s.regs_a ? 0 : uniform(w, *s.a, "the descriptor of A");
    op->b = uniform(w, *s.b, "the descriptor of B");
    if (s.sparse) {
        const int chunks = s.k / sparse_chunk(s.sparse);
        if (undefined_lanes(w, *s.meta, 4, sparse_lanes(chunks, elements_per_row(s.ta) > 8, s.selector)))
            undefined_fault(w, "the metadata of a sparse matrix", undefined_origin(w, *s.meta));
        memcpy(op->meta, operand(w, *s.meta), sizeof op->meta);
    }
    op->group = g->committed + 1;
    op->scale = (p ? 1 : 0) != (ins->imm[2] >> 4 & 1);
    int first = 1;
    for (int i = 0; i < 4; i++) {
        const Warp *v = &group[i];
        if (v == w || !v->wg || v->wg->issued <= g->issued)
            continue;
        first = 0;
        const WgOp *other = &v->wg->ring[g->issued % RING];
        if (other->ins != ins)
            fault(w, ERR_WGMMA, "the warps of a warpgroup issue different wgmma.mma_async: warp %d the one at PTX line %d", v->id, other->ins->line);
        if (other->a != op->a || other->b != op->b || other->scale != op->scale)
            fault(w, ERR_WGMMA, "the warps of a warpgroup issue a wgmma.mma_async with different operands: warp %d has A %#llx, B %#llx, scale-d %u; "
                  "warp %d has A %#llx, B %#llx, scale-d %u", w->id, (unsigned long long)op->a, (unsigned long long)op->b, op->scale, v->id,
                  (unsigned long long)other->a, (unsigned long long)other->b, other->scale);
    }
    reads(w, op, first);
    if (++g->issued == issued_by_all(group)) {
        int undefined = 0;
        for (int i = 0; i < 4; i++)
            undefined |= group[i].wg->ring[(g->issued - 1) % RING].undefined || group[i].undefined;
        if (undefined)
            define(group, op);
        execute(group, op);
    }
    w->cta->cluster->activity++;
    return NEXT;
}

static int wgmma_fence(Warp *w, const Ins *ins, uint32_t m)
{
    (void)ins;
    check_group(w, m, "wgmma.fence");
    state(w)->fences++;
    return NEXT;
}

static int commit_group(Warp *w, const Ins *ins, uint32_t m)
{
    (void)ins;
    check_group(w, m, "wgmma.commit_group");
    state(w)->committed++;
    return NEXT;
}

/* wgmma.wait_group imm[0] */
static int wait_group(Warp *w, const Ins *ins, uint32_t m)
{
    check_group(w, m, "wgmma.wait_group");
    Frag *f = &w->frag[w->cur];
    Warp *group = &w->cta->warp[w->id & ~3];
    struct WgState *g = state(w);
    uint32_t due = g->committed > ins->imm[0] ? g->committed - (uint32_t)ins->imm[0] : 0, need = g->finished, all = issued_by_all(group);
    while (need < g->issued && g->ring[need % RING].group <= due)
        need++;
    if (need > all) {
        for (int i = 0; i < 4; i++)
            if (!group[i].live && (!group[i].wg || group[i].wg->issued < need))
                fault(w, ERR_WGMMA, "wgmma.wait_group: warp %d of the warpgroup has ended without the wgmma.mma_async at PTX line %d", group[i].id,
                      g->ring[all % RING].ins->line);
        f->why = "the other warps of its warpgroup to issue the same wgmma.mma_async";
        f->what = 0;
        return RETRY;
    }
    g->finished = need;
    if (w->vc[component(w)] < need)
        w->vc[component(w)] = need;
    if (due > g->done)
        g->done = due;
    return NEXT;
}

void wgmma_finish(Cta *c)
{
    for (int i = 0; i < c->n_warps; i++) {
        Warp *w = &c->warp[i];
        struct WgState *g = w->wg;
        if (!g || g->finished == g->issued)
            continue;
        const WgOp *op = &g->ring[g->finished % RING];
        uint32_t all = issued_by_all(&c->warp[i & ~3]);
        if (g->issued > all)
            fault(w, ERR_WGMMA, "the kernel ends with a wgmma.mma_async that not all warps of the warpgroup issued: the one at PTX line %d of warp %d",
                  g->ring[all % RING].ins->line, i);
        note(c->cluster->launch, "the kernel ends with the wgmma.mma_async at PTX line %d %s", op->ins->line,
             op->group > g->committed ? "uncommitted" : "not waited for");
    }
}

static const Entry wgmma[] = {
    {"wgmma.mma_async", mma_async}, {"wgmma.fence", wgmma_fence}, {"wgmma.commit_group", commit_group}, {"wgmma.wait_group", wait_group},
};
REGISTER(wgmma)
