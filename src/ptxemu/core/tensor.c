/* Tensor memory: allocation, tcgen05.ld, tcgen05.st and their waits (PTX ISA: "Tensor Memory Allocation and Management Instructions",
 * "Tensor Memory and Register Load/Store Instructions", "Memory Consistency Model for 5th generation of TensorCore operations").
 *
 * tcgen05.ld and .st move their data at once, but count as unfinished until the warp's tcgen05.wait: no other access, not even of the same
 * warp, is ordered after them before. Using a register that a tcgen05.ld writes is legal without a wait and waits for that instruction
 * ("Register dependencies, same thread"), which says nothing of the order of memory accesses. Some kernels take it for the load's end all the
 * same: with the option loads_end_by_use it counts, with a note.
 *
 * tcgen05.fence acts as a fence of the generic proxy: it matters beside relaxed waits and flags ("Canonical synchronization patterns"). Waits
 * that acquire and barriers order tensor memory as they order all else, so a missing fence beside them is no fault. What the tensor core does
 * asynchronously is complete by tcgen05.commit and a wait alone.
 */
#include "tensor.h"

#include <math.h>
#include <string.h>

/* ---- rules that all instructions share --------------------------------------------------------------------------------------- */
Tensor *tensor_of(Warp *w, Cta *c)
{
    (void)w;
    if (!c->tensor)
        c->tensor = emu_alloc(sizeof *c->tensor);
    return c->tensor;
}

void tensor_group(Warp *w, int group)
{
    Tensor *t = tensor_of(w, w->cta);
    if (t->group && t->group != group)
        fault(w, ERR_TENSOR, ".cta_group::%d after .cta_group::%d: all tcgen05 instructions of a kernel must name the same", group, t->group);
    t->group = group;
}

Cta *tensor_peer(Warp *w, const char *what)
{
    Cluster *c = w->cta->cluster;
    int peer = w->cta->rank ^ 1;
    if (peer >= c->n_ctas)
        fault(w, ERR_TENSOR, "%s.cta_group::2 by CTA %d of a cluster of %d: it has no peer", what, w->cta->rank, c->n_ctas);
    Cta *p = &c->cta[peer];
    uint32_t live = 0;
    for (int i = 0; i < p->n_warps; i++)
        live |= p->warp[i].live;
    if (!live)
        fault(w, ERR_TENSOR, "%s.cta_group::2 after the peer CTA has exited", what);
    return p;
}

void tensor_single(Warp *w, uint32_t m, const char *what)
{
    int n = __builtin_popcount(m);
    if (n > 1)
        fault(w, ERR_TENSOR, "%s issued by %d threads of warp %d: every one of them would start the whole operation (missing elect.sync)", what,
              n, w->id);
}

void tensor_allocated(Warp *w, Cta *c, uint32_t column, uint32_t n, const char *what)
{
    Tensor *t = tensor_of(w, c);
    if (column + n > TM_COLUMNS)
        fault(w, ERR_TENSOR, "%s: tensor memory columns [%u, %u) outside [0, %d)", what, column, column + n, TM_COLUMNS);
    for (uint32_t u = column / TM_UNIT; u <= (column + n - 1) / TM_UNIT; u++)
        if (!t->owned[u])
            fault(w, ERR_TENSOR, "%s: tensor memory columns [%u, %u) are not allocated", what, column, column + n);
}

int tensor_defined(const Cta *c, uint32_t lane, uint32_t lanes, uint32_t column, uint32_t n)
{
    uint8_t all = 1;
    for (uint32_t l = lane; l < lane + lanes; l++)
        for (uint32_t i = column; i < column + n; i++)
            all &= c->tensor->valid[l][i];
    return all;
}

/* ---- order ------------------------------------------------------------------------------------------------------------------- */
static const char *writer_name(int kind) { return kind == BY_ST ? "tcgen05.st" : kind == BY_MMA ? "tcgen05.mma" : "tcgen05.cp or .shift"; }

static _Noreturn void unordered_write(Warp *w, Tensor *t, uint32_t strip, uint32_t column, const char *what)
{
    uint32_t e = t->writer[strip][column];
    int kind = t->kind[strip][column], who = EPOCH_WHO(e) - 1, warps = w->cta->n_warps;
    if (kind == BY_ST && EPOCH_CLOCK(e) == UNWAITED_CLOCK)
        fault(w, ERR_RACE, "%s by warp %d touches tensor memory lane %u, column %u, that a tcgen05.st by warp %d writes (missing "
              "tcgen05.wait::st)", what, w->id, strip * 16, column, who % warps);
    fault(w, ERR_RACE, "%s by warp %d of tensor memory lane %u, column %u, is not ordered after the %s that warp %d of CTA %d issued (missing %s)",
          what, w->id, strip * 16, column, writer_name(kind), who % warps, who / warps, kind == BY_ST ? "barrier" : "tcgen05.commit and mbarrier wait");
}

void tensor_after_writes(Warp *w, Cta *c, Area a, int core, const char *what)
{
    Tensor *t = tensor_of(w, c);
    uint32_t end = a.column + a.n;
    FOR_STRIPS(s, a.strips) {
        if (!core) {
            uint16_t busy = 0;
            for (uint32_t i = a.column; i < end; i++)
                busy |= t->writing[s][i];
            for (uint32_t i = a.column; busy && i < end; i++)
                if (t->writing[s][i])
                    fault(w, ERR_RACE, "%s by warp %d of tensor memory lane %u, column %u, that a %s in flight writes (missing tcgen05.commit and "
                          "mbarrier wait)", what, w->id, s * 16, i, writer_name(t->kind[s][i]));
        }
        uint32_t last = 0;
        for (uint32_t i = a.column; i < end; i++) {
            uint32_t e = t->writer[s][i];
            if (e == last)
                continue;
            last = e;
            if (!clock_has(w, e))
                unordered_write(w, t, s, i, what);
        }
    }
}

void tensor_after_reads(Warp *w, Cta *c, Area a, int core, const char *what)
{
    Tensor *t = tensor_of(w, c);
    uint32_t end = a.column + a.n;
    FOR_STRIPS(s, a.strips) {
        for (int k = 0; k < TM_READERS; k++) {
            int id = s / 2 + 4 * k, gid = c->rank * c->n_warps + id;
            if (id >= c->n_warps)
                break;
            uint32_t seen = gid == w->gid ? UNWAITED_READ - 1 : w->vc[gid], late = 0, used = 0;
            const uint32_t *r = t->reader[s][k];
            for (uint32_t i = a.column; i < end; i++) {
                uint32_t clock = r[i] == UNWAITED_READ ? r[i] : r[i] & ~USED_READ;
                late |= clock > seen;
                used |= r[i] & USED_READ;
            }
            if (used && !late && !w->cta->cluster->launch->loads_end_by_use)
                fault(w, ERR_RACE, "%s by warp %d of tensor memory lane %u that a tcgen05.ld by warp %d reads: only the use of its registers is "
                      "known to be over, which orders nothing else (missing tcgen05.wait::ld)", what, w->id, s * 16, id);
            if (used && !late)
                note(w->cta->cluster->launch, "%s after a tcgen05.ld that only the use of its registers has completed (no tcgen05.wait::ld)", what);
            for (uint32_t i = a.column; late && i < end; i++) {
                if (r[i] == UNWAITED_READ)
                    fault(w, ERR_RACE, "%s by warp %d of tensor memory lane %u, column %u, that a tcgen05.ld by warp %d still reads (missing "
                          "tcgen05.wait::ld)", what, w->id, s * 16, i, id);
                if ((r[i] & ~USED_READ) > seen)
                    fault(w, ERR_RACE, "%s by warp %d of tensor memory lane %u, column %u, is not ordered after the tcgen05.ld by warp %d (missing "
                          "barrier)", what, w->id, s * 16, i, id);
            }
        }
        uint32_t last = 0;
        for (uint32_t i = a.column; i < end; i++) {
            if (!core && t->reading[s][i])
                fault(w, ERR_RACE, "%s by warp %d of tensor memory lane %u, column %u, that a tcgen05.mma in flight reads as operand A, metadata or scale "
                      "factors (missing tcgen05.commit and mbarrier wait)", what, w->id, s * 16, i);
            uint32_t e = t->core_reader[s][i];
            if (e == last)
                continue;
            last = e;
            if (!clock_has(w, e))
                fault(w, ERR_RACE, "%s by warp %d of tensor memory lane %u, column %u, is not ordered after the tcgen05.mma that reads operand A, "
                      "metadata or scale factors there (missing tcgen05.commit and mbarrier wait)", what, w->id, s * 16, i);
        }
    }
}

/* ---- allocation -------------------------------------------------------------------------------------------------------------- */
static uint32_t uniform(Warp *w, const Ins *ins, int arg, uint32_t m, const char *what)
{
    const uint32_t *v = operand(w, ins->arg[arg]);
    uint32_t first = v[__builtin_ctz(m)], differ = 0;
    for (int i = 0; i < LANES; i++)
        differ |= m >> i & 1 ? v[i] ^ first : 0;
    if (differ)
        fault(w, ERR_TENSOR, "%s differs between the threads of warp %d", what, w->id);
    return first;
}

static void check_columns(Warp *w, uint32_t n, const char *what)
{
    if (n < 32 || n > TM_COLUMNS || n & (n - 1))
        fault(w, ERR_TENSOR, "%s of %u columns; allowed: 32, 64, 128, 256, 512", what, n);
}

/* The first free columns, of both CTAs of a pair where there are two; -1: none. */
static int find_free(const Tensor *a, const Tensor *b, uint32_t n)
{
    uint32_t units = n / TM_UNIT;
    for (uint32_t u = 0; u < TM_COLUMNS / TM_UNIT; u += units) {
        int used = 0;
        for (uint32_t i = u; i < u + units; i++)
            used |= a->owned[i] | (b ? b->owned[i] : 0);
        if (!used)
            return u * TM_UNIT;
    }
    return -1;
}

static void take(Tensor *t, uint32_t column, uint32_t n)
{
    t->allocated[column / TM_UNIT] = n;
    memset(t->owned + column / TM_UNIT, 1, n / TM_UNIT);
}

static void release(Tensor *t, uint32_t column, uint32_t n)
{
    t->allocated[column / TM_UNIT] = 0;
    memset(t->owned + column / TM_UNIT, 0, n / TM_UNIT);
    for (int l = 0; l < TM_LANES; l++)
        memset(&t->valid[l][column], 0, n);
    /* The next owner is ordered after all of this by its allocation. */
    for (int s = 0; s < TM_STRIPS; s++) {
        memset(&t->writer[s][column], 0, n * sizeof t->writer[s][0]);
        memset(&t->core_reader[s][column], 0, n * sizeof t->core_reader[s][0]);
        for (int k = 0; k < TM_READERS; k++)
            memset(&t->reader[s][k][column], 0, n * sizeof t->reader[s][k][0]);
    }
}

/* A step of a collective of a CTA pair: 0 until both CTAs have arrived and `ready` has done its work. */
static int pair_step(Warp *w, PairOp *op, uint32_t columns, uint32_t column, const char *what, int (*ready)(Cta *, Cta *, PairOp *))
{
    Frag *f = &w->frag[w->cur];
    Cluster *c = w->cta->cluster;
    if (!f->arrived) {
        tensor_peer(w, what);
        uint32_t bit = 1u << (w->cta->rank & 1);
        if (op->arrived & bit)
            fault(w, ERR_TENSOR, "%s.cta_group::2 by two warps of one CTA at once; one warp of each CTA of the pair takes part", what);
        if (op->arrived && (op->columns != columns || op->column != column))
            fault(w, ERR_TENSOR, "%s.cta_group::2: %u columns at %#x here, %u columns at %#x in the peer CTA", what, columns, column, op->columns,
                  op->column);
        op->arrived |= bit;
        op->columns = columns;
        op->column = column;
        f->arrived = 1;
        f->token = op->generation;
        c->activity++;
    }
    Cta *even = &c->cta[w->cta->rank & ~1];
    if (op->generation == f->token && op->arrived == 3 && ready(even, even + 1, op)) {
        op->arrived = 0;
        op->generation++;
        c->activity++;
    }
    if (op->generation == f->token) {
        f->why = op->arrived == 3 ? "free columns of tensor memory" : what[8] == 'a' ? "tcgen05.alloc in the peer CTA" : "tcgen05.dealloc in the peer CTA";
        f->what = 0;
        return 0;
    }
    f->arrived = 0;
    return 1;
}

static int ready_alloc(Cta *even, Cta *odd, PairOp *op)
{
    if (!even->tensor || !odd->tensor)
        return 0;
    int column = find_free(even->tensor, odd->tensor, op->columns);
    if (column < 0)
        return 0;
    take(even->tensor, column, op->columns);
    take(odd->tensor, column, op->columns);
    op->result = column;
    return 1;
}

static int ready_dealloc(Cta *even, Cta *odd, PairOp *op)
{
    release(even->tensor, op->column, op->columns);
    release(odd->tensor, op->column, op->columns);
    return 1;
}

static PairOp *pair_op(Warp *w, int dealloc)
{
    Tensor *even = tensor_of(w, &w->cta->cluster->cta[w->cta->rank & ~1]);
    return dealloc ? &even->pair_dealloc : &even->pair_alloc;
}

/* tcgen05.alloc [dst], nCols. imm[0]: offset; imm[1] bit 0: the address is generic; imm[2]: cta_group. */
static int alloc(Warp *w, const Ins *ins, uint32_t m)
{
    Tensor *t = tensor_of(w, w->cta);
    Frag *f = &w->frag[w->cur];
    uint32_t n = uniform(w, ins, 1, m, "the number of columns of tcgen05.alloc"), lane = __builtin_ctz(m), addr;
    check_columns(w, n, "tcgen05.alloc");
    tensor_group(w, ins->imm[2]);
    if (t->relinquished)
        fault(w, ERR_TENSOR, "tcgen05.alloc after tcgen05.relinquish_alloc_permit");
    if (!f->arrived && t->last_columns && n > t->last_columns)
        fault(w, ERR_TENSOR, "tcgen05.alloc of %u columns after one of %u: the number must not grow from one allocation of a CTA to the next", n,
              t->last_columns);
    if (ins->imm[1] & 1) {
        uint64_t a = ((uint64_t *)operand(w, ins->arg[0]))[lane] + ins->imm[0];
        if ((a & WINDOW_MASK) != WINDOW_SHARED)
            fault(w, ERR_MEMORY, "generic address %#llx of tcgen05.alloc is not in shared memory", (unsigned long long)a);
        addr = (uint32_t)a;
    } else {
        addr = ((uint32_t *)operand(w, ins->arg[0]))[lane] + (uint32_t)ins->imm[0];
    }
    Cta *c;
    uint32_t off = shared_offset(w, addr, 4, 4, &c), column;
    if (c != w->cta)
        fault(w, ERR_MEMORY, "tcgen05.alloc writes its address to the shared memory of its own CTA only");
    if (ins->imm[2] == 2) {
        PairOp *op = pair_op(w, 0);
        if (!pair_step(w, op, n, 0, "tcgen05.alloc", ready_alloc))
            return RETRY;
        column = op->result;
    } else {
        int found = find_free(t, NULL, n);
        if (found < 0) {
            f->why = "free columns of tensor memory, of them";
            f->what = n;
            return RETRY;
        }
        column = found;
        take(t, column, n);
    }
    t->last_columns = n;
    shared_write(w, c, off, 4, &column);
    w->cta->cluster->activity++;
    return NEXT;
}

/* tcgen05.dealloc taddr, nCols. imm[2]: cta_group. */
static int dealloc(Warp *w, const Ins *ins, uint32_t m)
{
    Tensor *t = tensor_of(w, w->cta);
    Frag *f = &w->frag[w->cur];
    uint32_t column = uniform(w, ins, 0, m, "the address of tcgen05.dealloc");
    uint32_t n = uniform(w, ins, 1, m, "the number of columns of tcgen05.dealloc");
    if (!f->arrived) {
        check_columns(w, n, "tcgen05.dealloc");
        tensor_group(w, ins->imm[2]);
        if (column >= TM_COLUMNS || column % TM_UNIT || t->allocated[column / TM_UNIT] != n)
            fault(w, ERR_TENSOR, "tcgen05.dealloc of %u columns at %#x: there is no such allocation", n, column);
        Area all = {(1u << TM_STRIPS) - 1, column, n};
        tensor_after_writes(w, w->cta, all, 0, "tcgen05.dealloc");
        tensor_after_reads(w, w->cta, all, 0, "tcgen05.dealloc");
    }
    if (ins->imm[2] == 2) {
        if (!pair_step(w, pair_op(w, 1), n, column, "tcgen05.dealloc", ready_dealloc))
            return RETRY;
        return NEXT;
    }
    release(t, column, n);
    w->cta->cluster->activity++;
    return NEXT;
}

static int relinquish(Warp *w, const Ins *ins, uint32_t m)
{
    (void)m;
    tensor_group(w, ins->imm[2]);
    tensor_of(w, w->cta)->relinquished = 1;
    return NEXT;
}

/* ---- ld, st ------------------------------------------------------------------------------------------------------------------ */
enum { S32X32B, S16X64B, S16X128B, S16X256B, S16X32BX2 };
static const int registers_per[] = {1, 1, 2, 4, 1}; /* of a shape, for .x1 */

/* The cell of register r in thread t, as (lane, 32-bit word) relative to the address ("Data Movement Shape"). */
static inline void place(int shape, uint32_t half, uint32_t t, uint32_t r, uint32_t *lane, uint32_t *word)
{
    switch (shape) {
    case S32X32B:
        *lane = t;
        *word = r;
        break;
    case S16X64B:
        *lane = t / 4 + 8 * (t & 1);
        *word = 2 * r + (t >> 1 & 1);
        break;
    case S16X128B:
        *lane = t / 4 + 8 * (r & 1);
        *word = 4 * (r >> 1) + t % 4;
        break;
    case S16X256B:
        *lane = t / 4 + 8 * (r >> 1 & 1);
        *word = 8 * (r >> 2) + 2 * (t % 4) + (r & 1);
        break;
    default: /* the halves of a warp access two places */
        *lane = t % 16;
        *word = r + (t / 16) * half;
    }
}

typedef struct {
    int shape, packed, red; /* red: RED_* | RED_TYPE_* and so on */
    uint32_t n, half;    /* registers; half's split in columns */
    uint32_t lane, column, width; /* columns from `column` on */
    uint32_t strips;
} Access;

/* imm[0]: shape | registers << 8 | packed << 16 | RED_* << 17; imm[1]: immHalfSplitoff; imm[2]: offset of the address. */
static Access access_of(Warp *w, const Ins *ins, uint32_t m, const char *what)
{
    Access a = {.shape = ins->imm[0] & 0xff, .n = ins->imm[0] >> 8 & 0xff, .packed = ins->imm[0] >> 16 & 1, .red = ins->imm[0] >> 17, .half = ins->imm[1]};
    if (m != FULL)
        fault(w, ERR_TENSOR, "%s by %d threads of warp %d: all 32 must execute it", what, __builtin_popcount(m), w->id);
    uint32_t addr = uniform(w, ins, 0, m, "the tensor memory address") + (uint32_t)ins->imm[2];
    a.lane = addr >> 16;
    a.column = addr & 0xffff;
    uint32_t own = w->id % 4 * 32, lanes = a.shape == S32X32B ? 32 : 16;
    if (a.lane < own || a.lane + lanes > own + 32)
        fault(w, ERR_TENSOR, "%s by warp %d of lanes [%u, %u): it may touch lanes [%u, %u) only (warp %% 4)", what, w->id, a.lane, a.lane + lanes, own,
              own + 32);
    if (a.lane % 16)
        fault(w, ERR_TENSOR, "%s: lane %u of the address is not a multiple of 16", what, a.lane);
    a.strips = (lanes == 32 ? 3u : 1u) << a.lane / 16;
    uint32_t words = a.shape == S16X32BX2 ? a.n : a.n / registers_per[a.shape] * (a.shape == S16X256B ? 8 : a.shape == S16X128B ? 4 : a.shape == S16X64B ? 2 : 1);
    a.width = words << a.packed;
    return a;
}

/* The one or two column ranges of an access. */
static int ranges_of(const Access *a, Area out[2])
{
    out[0] = (Area){a->strips, a->column, a->width};
    if (a->shape != S16X32BX2)
        return 1;
    out[1] = (Area){a->strips, a->column + a->half, a->width};
    return 2;
}

static void widen(Columns *c, const Area *a)
{
    if (c->lo == c->hi) {
        c->lo = a->column;
        c->hi = a->column + a->n;
        return;
    }
    if (a->column < c->lo)
        c->lo = a->column;
    if (a->column + a->n > c->hi)
        c->hi = a->column + a->n;
}

/* The warp's loads [from, from + n) are complete at its present clock: what it publishes from here on covers them. by_use: USED_READ or 0. */
static void complete_loads(Warp *w, Tensor *t, int from, int n, uint32_t by_use)
{
    Load *loads = t->load[w->id];
    uint32_t now = w->vc[w->gid] | by_use, keep = by_use ? ~0u : ~USED_READ;
    for (int k = from; k < from + n; k++)
        FOR_STRIPS(s, loads[k].strips) {
            uint32_t *r = t->reader[s][w->id / 4] + loads[k].column;
            for (uint32_t i = 0; i < loads[k].n; i++)
                r[i] = r[i] == UNWAITED_READ ? now : r[i] & keep;
        }
}

static void drop_loads(Warp *w, Tensor *t, int n)
{
    Load *loads = t->load[w->id];
    t->n_loads[w->id] -= n;
    memmove(loads, loads + n, t->n_loads[w->id] * sizeof *loads);
}

/* The cell that holds (the low half of) a register's lane. */
static uint8_t *valid_of(Tensor *t, const Access *a, uint32_t i, uint32_t k, uint32_t *at)
{
    uint32_t lane, word;
    place(a->shape, a->packed ? 0 : a->half, i, k, &lane, &word);
    uint32_t c = a->packed ? a->column + 2 * word + (a->shape == S16X32BX2 ? i / 16 * a->half : 0) : a->column + word;
    *at = (a->lane + lane) << 16 | c;
    return &t->valid[a->lane + lane][c];
}

/* What a tcgen05.ld has read is undefined where its cells are. */
static void load_undefined(Warp *w, const Ins *ins, const Access *a, int undefined)
{
    for (uint32_t k = 0; k < a->n; k++) {
        uint32_t bits[LANES] = {0}, at;
        Origin origin = {.line = ins->line, .kind = FROM_TENSOR};
        for (uint32_t i = 0; undefined && i < LANES; i++) {
            const uint8_t *valid = valid_of(w->cta->tensor, a, i, k, &at);
            bits[i] = a->packed ? (valid[0] ? 0 : 0xffffu) | (valid[1] ? 0 : 0xffff0000u) : valid[0] ? 0 : ~0u;
            if (bits[i] && !origin.at)
                origin.at = at;
        }
        undefined_set(w, ins->arg[1 + k], 4, FULL, undefined ? bits : NULL, origin);
    }
}

/* tcgen05.ld.red: the least or greatest of a lane's columns. */
enum { RED_MIN = 1, RED_MAX = 2, RED_SIGNED = 4, RED_FLOAT = 8, RED_ABS = 16, RED_NAN = 32 };

static uint32_t pick(int red, uint32_t a, uint32_t b)
{
    int less;
    if (red & RED_FLOAT) {
        float x, y;
        memcpy(&x, &a, 4);
        memcpy(&y, &b, 4);
        if (isnan(x) || isnan(y))
            return red & RED_NAN ? 0x7fffffffu : isnan(x) ? b : a;
        less = x < y || (x == y && signbit(x) && !signbit(y));
    } else {
        less = red & RED_SIGNED ? (int32_t)a < (int32_t)b : a < b;
    }
    return (red & RED_MIN) == less ? a : b;
}

static void reduce(Warp *w, const Ins *ins, const Access *a, int undefined)
{
    uint32_t *out = operand(w, ins->arg[1 + a->n]), bits[LANES] = {0}, at;
    Origin origin = {.line = ins->line, .kind = FROM_TENSOR};
    for (uint32_t i = 0; i < LANES; i++)
        for (uint32_t k = 0; k < a->n; k++) {
            uint32_t v = w->cta->tensor->data[a->lane + i][a->column + k];
            if (a->red & RED_ABS)
                v &= 0x7fffffffu;
            out[i] = k ? pick(a->red, out[i], v) : v;
            if (undefined && !*valid_of(w->cta->tensor, a, i, k, &at)) {
                bits[i] = ~0u;
                origin.at = at;
            }
        }
    undefined_set(w, ins->arg[1 + a->n], 4, FULL, undefined ? bits : NULL, origin);
}

/* The cells that a tcgen05.st has written are undefined where its registers are. */
static void store_undefined(Warp *w, const Ins *ins, const Access *a)
{
    for (uint32_t k = 0; k < a->n; k++) {
        const uint32_t *bits = (const uint32_t *)undefined_bits(w, ins->arg[1 + k]);
        uint32_t at;
        for (uint32_t i = 0; bits && i < LANES; i++) {
            uint8_t *valid = valid_of(w->cta->tensor, a, i, k, &at);
            if (a->packed ? bits[i] & 0xffff : bits[i])
                valid[0] = 0;
            if (a->packed && bits[i] >> 16)
                valid[1] = 0;
        }
    }
}

/* tcgen05.ld: operands address, registers, for .red its result (.32x32b). imm[3]: its number. */
static int ld(Warp *w, const Ins *ins, uint32_t m)
{
    Access a = access_of(w, ins, m, "tcgen05.ld");
    Tensor *t = tensor_of(w, w->cta);
    Area r[2];
    int n = ranges_of(&a, r), undefined = 0;
    for (int i = 0; i < n; i++) {
        tensor_allocated(w, w->cta, r[i].column, r[i].n, "tcgen05.ld");
        tensor_after_writes(w, w->cta, r[i], 0, "tcgen05.ld");
        undefined |= !tensor_defined(w->cta, a.lane, a.shape == S32X32B ? 32 : 16, r[i].column, r[i].n);
        FOR_STRIPS(s, r[i].strips)
            for (uint32_t c = r[i].column; c < r[i].column + r[i].n; c++)
                t->reader[s][w->id / 4][c] = UNWAITED_READ;
        if (t->n_loads[w->id] == TM_LOADS) { /* the oldest must be complete long since */
            complete_loads(w, t, 0, 1, 0);
            drop_loads(w, t, 1);
        }
        t->load[w->id][t->n_loads[w->id]++] = (Load){ins->imm[3], r[i].strips, r[i].column, r[i].n};
    }
    for (uint32_t k = 0; k < a.n; k++) {
        if (ins->arg[1 + k] == SINK)
            continue;
        uint32_t *out = operand(w, ins->arg[1 + k]);
        if (a.shape == S32X32B && !a.packed) {
            const uint32_t *from = &t->data[a.lane][a.column + k];
            for (int i = 0; i < LANES; i++)
                out[i] = from[i * TM_COLUMNS];
            continue;
        }
        for (uint32_t i = 0; i < LANES; i++) {
            uint32_t lane, word;
            place(a.shape, a.packed ? 0 : a.half, i, k, &lane, &word);
            const uint32_t *row = t->data[a.lane + lane];
            if (!a.packed) {
                out[i] = row[a.column + word];
            } else {
                uint32_t c = a.column + 2 * word + (a.shape == S16X32BX2 ? i / 16 * a.half : 0);
                out[i] = (row[c] & 0xffff) | row[c + 1] << 16;
            }
        }
    }
    if (undefined || w->undefined)
        load_undefined(w, ins, &a, undefined);
    if (a.red)
        reduce(w, ins, &a, undefined);
    return NEXT;
}

/* tcgen05.st: operands address, registers. */
static int st(Warp *w, const Ins *ins, uint32_t m)
{
    Access a = access_of(w, ins, m, "tcgen05.st");
    Tensor *t = tensor_of(w, w->cta);
    Area r[2];
    int n = ranges_of(&a, r);
    uint32_t epoch = EPOCH(w->gid + 1, UNWAITED_CLOCK), lanes = a.shape == S32X32B ? 32 : 16;
    for (int i = 0; i < n; i++) {
        tensor_allocated(w, w->cta, r[i].column, r[i].n, "tcgen05.st");
        tensor_after_writes(w, w->cta, r[i], 0, "tcgen05.st");
        tensor_after_reads(w, w->cta, r[i], 0, "tcgen05.st");
    }
    for (int i = 0; i < n; i++) {
        for (uint32_t l = a.lane; l < a.lane + lanes; l++)
            memset(&t->valid[l][r[i].column], 1, r[i].n);
        FOR_STRIPS(s, r[i].strips) {
            for (uint32_t c = r[i].column; c < r[i].column + r[i].n; c++)
                t->writer[s][c] = epoch;
            memset(&t->kind[s][r[i].column], BY_ST, r[i].n);
        }
        widen(&t->st[w->id], &r[i]);
    }
    for (uint32_t k = 0; k < a.n; k++) {
        const uint32_t *in = operand(w, ins->arg[1 + k]);
        if (a.shape == S32X32B && !a.packed) {
            uint32_t *to = &t->data[a.lane][a.column + k];
            for (int i = 0; i < LANES; i++)
                to[i * TM_COLUMNS] = in[i];
            continue;
        }
        for (uint32_t i = 0; i < LANES; i++) {
            uint32_t lane, word;
            place(a.shape, a.packed ? 0 : a.half, i, k, &lane, &word);
            uint32_t *row = t->data[a.lane + lane];
            if (!a.packed) {
                row[a.column + word] = in[i];
            } else {
                uint32_t c = a.column + 2 * word + (a.shape == S16X32BX2 ? i / 16 * a.half : 0);
                row[c] = in[i] & 0xffff;
                row[c + 1] = in[i] >> 16;
            }
        }
    }
    if (w->undefined)
        store_undefined(w, ins, &a);
    return NEXT;
}

static int wait_ld(Warp *w, const Ins *ins, uint32_t m)
{
    (void)ins;
    (void)m;
    Tensor *t = tensor_of(w, w->cta);
    complete_loads(w, t, 0, t->n_loads[w->id], 0);
    drop_loads(w, t, t->n_loads[w->id]);
    return NEXT;
}

/* Before the first use of registers that the tcgen05.ld of number imm[0] writes. */
static int used(Warp *w, const Ins *ins, uint32_t m)
{
    (void)m;
    Tensor *t = tensor_of(w, w->cta);
    for (int i = 0; i < t->n_loads[w->id]; i++)
        if (t->load[w->id][i].number == ins->imm[0])
            complete_loads(w, t, i, 1, USED_READ);
    return NEXT;
}

static int wait_st(Warp *w, const Ins *ins, uint32_t m)
{
    (void)ins;
    (void)m;
    Tensor *t = tensor_of(w, w->cta);
    Columns *c = &t->st[w->id];
    uint32_t now = clock_epoch(w), mine = EPOCH(w->gid + 1, UNWAITED_CLOCK);
    for (uint32_t s = w->id % 4 * 2; s < w->id % 4 * 2u + 2; s++)
        for (uint32_t i = c->lo; i < c->hi; i++)
            t->writer[s][i] = t->writer[s][i] == mine ? now : t->writer[s][i];
    c->lo = c->hi = 0;
    return NEXT;
}

static int fence(Warp *w, const Ins *ins, uint32_t m)
{
    (void)ins;
    (void)m;
    memory_fence(w);
    return NEXT;
}

/* ---- a CTA's end --------------------------------------------------------------------------------------------------------------- */
void tensor_finish(Cta *c)
{
    if (!c->tensor)
        return;
    for (int u = 0; u < TM_COLUMNS / TM_UNIT; u++)
        if (c->tensor->allocated[u])
            fault(&c->warp[0], ERR_TENSOR, "the kernel ends with tensor memory columns [%d, %d) allocated (missing tcgen05.dealloc)", u * TM_UNIT,
                  u * TM_UNIT + c->tensor->allocated[u]);
}

static const Entry tensor[] = {
    {"tcgen05.alloc", alloc}, {"tcgen05.dealloc", dealloc}, {"tcgen05.relinquish", relinquish}, {"tcgen05.ld", ld},
    {"tcgen05.st", st}, {"tcgen05.wait_ld", wait_ld}, {"tcgen05.wait_st", wait_st},
    {"tcgen05.used", used}, {"tcgen05.fence", fence},
};
REGISTER(tensor)
