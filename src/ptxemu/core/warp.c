/* What the lanes of a warp tell each other, and small control instructions (PTX ISA: "Parallel Synchronization and Communication
 * Instructions", "Miscellaneous Instructions"). */
#include "defined.h"

#include <math.h>
#include <string.h>


static void set_predicate(Warp *w, int32_t at, uint32_t m, uint32_t value)
{
    if (at == SINK)
        return;
    uint32_t *p = operand(w, at);
    *p = (*p & ~m) | (value & m);
}

/* The lanes of a member mask that have left are not waited for; others must be here. imm[3]: 1 where the mask is every lane. */
static void check_members(Warp *w, int32_t at, uint32_t m, const char *what)
{
    const uint32_t *mask = operand(w, at);
    FOR_LANES(i, m) {
        if (!(mask[i] >> i & 1))
            fault(w, ERR_BARRIER, "%s: lane %u is not in its own member mask %#x", what, i, mask[i]);
        uint32_t missing = mask[i] & w->live & ~m;
        if (missing)
            fault(w, ERR_BARRIER, "%s: lanes %#x of the member mask %#x do not take part", what, missing, mask[i]);
    }
}

/* elect.sync d|p, membermask: the lowest lane of the mask that is here. */
static int elect(Warp *w, const Ins *ins, uint32_t m)
{
    uint32_t leader = __builtin_ctz(m);
    if (ins->arg[0] != SINK) {
        uint32_t *d = operand(w, ins->arg[0]);
        FOR_LANES(i, m) d[i] = leader;
    }
    set_predicate(w, ins->arg[1], m, 1u << leader);
    return NEXT;
}

/* shfl.sync d|p, a, b, c, membermask. imm[0]: 0 up, 1 down, 2 bfly, 3 idx. */
static int shfl(Warp *w, const Ins *ins, uint32_t m)
{
    check_members(w, ins->arg[5], m, "shfl.sync");
    const uint32_t *a = operand(w, ins->arg[2]), *b = operand(w, ins->arg[3]), *c = operand(w, ins->arg[4]);
    uint32_t out[LANES], source[LANES] = {0}, valid = 0;
    FOR_LANES(i, m) {
        int lane = i, offset = b[i] & 31, clamp = c[i] & 31, segment = c[i] >> 8 & 31, from = 0, ok = 0;
        int limit = (lane & segment) | (clamp & ~segment);
        switch (ins->imm[0]) {
        case 0: from = lane - offset, ok = from >= limit; break;
        case 1: from = lane + offset, ok = from <= limit; break;
        case 2: from = lane ^ offset, ok = from <= limit; break;
        default: from = (lane & segment) | (offset & ~segment), ok = from <= limit;
        }
        if (!ok)
            from = lane;
        if (!(m >> from & 1))
            fault(w, ERR_BARRIER, "shfl.sync: lane %u reads lane %d, which does not take part", i, from);
        out[i] = a[from];
        source[i] = from;
        valid |= (uint32_t)ok << i;
    }
    if (ins->arg[0] != SINK) {
        uint32_t *d = operand(w, ins->arg[0]);
        FOR_LANES(i, m) d[i] = out[i];
        const uint32_t *undefined = w->undefined ? (const uint32_t *)undefined_bits(w, ins->arg[2]) : NULL;
        FOR_LANES(i, undefined ? m : 0) out[i] = undefined[source[i]];
        if (w->undefined)
            undefined_set(w, ins->arg[0], 4, m, undefined ? out : NULL,
                          undefined ? undefined_origin(w, ins->arg[2]) : (Origin){0});
    }
    if (w->undefined)
        undefined_set(w, ins->arg[1], 0, m, NULL, (Origin){0});
    set_predicate(w, ins->arg[1], m, valid);
    return NEXT;
}

/* vote.sync: operands destination, predicate, membermask. imm[0]: 0 all, 1 any, 2 uni, 3 ballot; imm[1]: the predicate is negated. */
static int vote(Warp *w, const Ins *ins, uint32_t m)
{
    check_members(w, ins->arg[2], m, "vote.sync");
    uint32_t p = *(uint32_t *)operand(w, ins->arg[1]);
    p = (ins->imm[1] ? ~p : p) & m;
    if (ins->imm[0] == 3) {
        uint32_t *d = operand(w, ins->arg[0]);
        FOR_LANES(i, m) d[i] = p;
        return NEXT;
    }
    int yes = ins->imm[0] == 0 ? p == m : ins->imm[0] == 1 ? p != 0 : p == m || p == 0;
    set_predicate(w, ins->arg[0], m, yes ? FULL : 0);
    return NEXT;
}

static int activemask(Warp *w, const Ins *ins, uint32_t m)
{
    uint32_t *d = operand(w, ins->arg[0]);
    FOR_LANES(i, m) d[i] = m;
    return NEXT;
}

/* match.any / match.all: operands destination, predicate (all; else SINK), value, membermask. imm[0]: 1 all; imm[1]: 64 bits. */
static int match(Warp *w, const Ins *ins, uint32_t m)
{
    check_members(w, ins->arg[3], m, "match.sync");
    uint64_t v[LANES];
    FOR_LANES(i, m) v[i] = ins->imm[1] ? ((uint64_t *)operand(w, ins->arg[2]))[i] : ((uint32_t *)operand(w, ins->arg[2]))[i];
    uint32_t same[LANES];
    FOR_LANES(i, m) {
        same[i] = 0;
        for (uint32_t j = 0; j < LANES; j++)
            if (m >> j & 1 && v[j] == v[i])
                same[i] |= 1u << j;
    }
    uint32_t *d = operand(w, ins->arg[0]);
    int all = same[__builtin_ctz(m)] == m;
    FOR_LANES(i, m) d[i] = ins->imm[0] ? (all ? m : 0) : same[i];
    set_predicate(w, ins->arg[1], m, all ? FULL : 0);
    return NEXT;
}

/* redux.sync d, a, membermask. imm[0]: 0 add, 1 min, 2 max, 3 and, 4 or, 5 xor; imm[1]: 0 u32, 1 s32, 2 f32; imm[2]: 1 abs, 2 NaN. */
static int redux(Warp *w, const Ins *ins, uint32_t m)
{
    check_members(w, ins->arg[2], m, "redux.sync");
    const uint32_t *a = operand(w, ins->arg[1]);
    uint32_t first = __builtin_ctz(m), r = a[first];
    int op = ins->imm[0], type = ins->imm[1];
    if (type == 2) {
        float x, v;
        memcpy(&x, &a[first], 4);
        x = ins->imm[2] & 1 ? fabsf(x) : x;
        FOR_LANES(i, m & ~(1u << first)) {
            memcpy(&v, &a[i], 4);
            v = ins->imm[2] & 1 ? fabsf(v) : v;
            if (ins->imm[2] & 2 && (isnan(x) || isnan(v)))
                x = NAN;
            else
                x = op == 1 ? fminf(x, v) : fmaxf(x, v);
        }
        memcpy(&r, &x, 4);
        if (isnan(x))
            r = 0x7fffffff;
    } else {
        FOR_LANES(i, m & ~(1u << first)) {
            uint32_t v = a[i];
            switch (op) {
            case 0: r += v; break;
            case 1: r = type ? ((int32_t)v < (int32_t)r ? v : r) : (v < r ? v : r); break;
            case 2: r = type ? ((int32_t)v > (int32_t)r ? v : r) : (v > r ? v : r); break;
            case 3: r &= v; break;
            case 4: r |= v; break;
            default: r ^= v;
            }
        }
    }
    uint32_t *d = operand(w, ins->arg[0]);
    FOR_LANES(i, m) d[i] = r;
    return NEXT;
}

/* ---- control --------------------------------------------------------------------------------------------------------------- */
static int nothing(Warp *w, const Ins *ins, uint32_t m) { return (void)w, (void)ins, (void)m, NEXT; }

static int yield(Warp *w, const Ins *ins, uint32_t m) { return (void)w, (void)ins, (void)m, YIELD; }

static int trap(Warp *w, const Ins *ins, uint32_t m)
{
    (void)ins;
    fault(w, ERR_EMU, "the kernel traps (lanes %#x)", m);
}

static int assertion(Warp *w, const Ins *ins, uint32_t m)
{
    (void)ins;
    fault(w, ERR_EMU, "an assertion of the kernel fails (lanes %#x)", m);
}

static int no_printf(Warp *w, const Ins *ins, uint32_t m)
{
    (void)m;
    note(w->cta->cluster->launch, "printf at PTX line %d: its output is not shown", ins->line);
    return NEXT;
}

/* call: operand: the call's guard; imm[0]: where in local memory the result lies, imm[1]: its bytes, imm[2]: the guard is negated,
 * imm[3]: it is a call, not where the result is declared. */
static int call_results(Warp *w, const Ins *ins, uint32_t m)
{
    const uint32_t p = *(uint32_t *)operand(w, ins->arg[0]);
    undefined_results(w, m, (ins->imm[2] ? ~p : p) & m, ins->imm[3] != 0, (uint32_t)ins->imm[0], (uint32_t)ins->imm[1], ins->line);
    return NEXT;
}

static int fence_proxy_async(Warp *w, const Ins *ins, uint32_t m)
{
    (void)ins, (void)m;
    proxy_fence(w);
    return NEXT;
}

/* bar.warp.sync membermask: the lanes meet. */
static int warp_sync(Warp *w, const Ins *ins, uint32_t m)
{
    check_members(w, ins->arg[0], m, "bar.warp.sync");
    if (w->lanes)
        lanes_join(w, m, m);
    return NEXT;
}

/* setmaxnreg: imm[0] registers, imm[1] 1 increase. A decrease gives to the CTA's pool, an increase waits until it has enough (PTX ISA:
 * "setmaxnreg"). All warps of a warpgroup execute the same, and meet before the next. */
static int setmaxnreg(Warp *w, const Ins *ins, uint32_t m)
{
    (void)m;
    Cta *c = w->cta;
    Frag *f = &w->frag[w->cur];
    const uint32_t want = ins->imm[0], have = w->max_registers;
    for (int i = w->id & ~3; !f->arrived && i < (w->id & ~3) + 4 && i < c->n_warps; i++) {
        const Warp *v = &c->warp[i];
        if (v->resized < w->resized && v->live)
            fault(w, ERR_BARRIER, "setmaxnreg: warp %d of the warpgroup has not executed the one before, at PTX line %d (its warps must meet in between)",
                  i, w->resize->line);
        if (v != w && v->resized == w->resized + 1 && v->resize->imm[0] != want)
            fault(w, ERR_BARRIER, "setmaxnreg to %u registers: warp %d of the warpgroup asks for %u, at PTX line %d", want, i,
                  (uint32_t)v->resize->imm[0], v->resize->line);
    }
    if (ins->imm[1] ? want < have : want > have)
        fault(w, ERR_BARRIER, "setmaxnreg.%s to %u registers a thread by a warp that has %u", ins->imm[1] ? "inc" : "dec", want, have);
    if (!f->arrived) {
        w->resized++;
        w->resize = ins;
    }
    if (ins->imm[1] && c->registers < (want - have) * LANES) {
        f->arrived = 1;
        f->why = "the CTA's pool of registers to have so many for it:";
        f->what = (want - have) * LANES;
        return RETRY;
    }
    f->arrived = 0;
    c->registers += (have - want) * LANES;
    w->max_registers = want;
    c->cluster->activity++;
    return NEXT;
}

/* fence / membar: orders the warp's accesses; what it publishes with a later relaxed store is its vector now. */
static int fence(Warp *w, const Ins *ins, uint32_t m)
{
    (void)ins, (void)m;
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    memory_fence(w);
    return NEXT;
}

static const Entry warp_instructions[] = {
    {"elect", elect}, {"shfl", shfl}, {"vote", vote}, {"activemask", activemask}, {"match", match}, {"redux", redux},
    {"nothing", nothing}, {"yield", yield}, {"trap", trap}, {"assertion", assertion}, {"printf", no_printf},
    {"call.results", call_results},
    {"fence.proxy.async", fence_proxy_async}, {"bar.warp", warp_sync},
    {"setmaxnreg", setmaxnreg}, {"fence", fence},
};
REGISTER(warp_instructions)
