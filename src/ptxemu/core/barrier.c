/* mbarrier objects, CTA barriers and cluster barriers (PTX ISA: "Parallel Synchronization and Communication Instructions").
 *
 * Arrivals release the arriving warp's clock, completed waits acquire what the phase's arrivals released. A wait that is not
 * satisfied leaves its fragment waiting; try_wait gives up where nothing else can happen, as the hardware does after its time limit.
 */
#include "core.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TX_LIMIT = (1 << 20) - 1 };

static uint32_t *new_clock(Cluster *c) { return emu_alloc(c->n_clock * sizeof(uint32_t)); }
static void clear_clock(Cluster *c, uint32_t *vc) { memset(vc, 0, c->n_clock * sizeof *vc); }

/* ---- mbarrier ---------------------------------------------------------------------------------------------------------------- */
static MBarrier *lookup(Cta *c, uint32_t off)
{
    for (MBarrier *b = c->mbar; b; b = b->next)
        if (b->addr == off)
            return b;
    return NULL;
}

MBarrier *mbar_find(Warp *w, Cta *c, uint32_t off)
{
    MBarrier *b = lookup(c, off);
    if (!b)
        fault(w, ERR_BARRIER, "no mbarrier is initialised at shared offset %u", off);
    return b;
}

/* An initialisation is visible to other warps past a barrier, or past fence.mbarrier_init and a relaxed cluster barrier; to the asynchronous proxy
 * only past a fence.mbarrier_init or fence.proxy.async, also of the warp that made it (PTX ISA: "membar, fence", "Async proxy"). */
MBarrier *mbar_use(Warp *w, Cta *c, uint32_t off, int async)
{
    MBarrier *b = mbar_find(w, c, off);
    const uint32_t who = EPOCH_WHO(b->init) - 1, clock = EPOCH_CLOCK(b->init);
    if (w->vc[who] < clock && !(w->inits && w->inits[who] >= clock))
        fault(w, ERR_RACE, "warp %d of CTA %d uses the mbarrier at shared offset %u of CTA %d, and is not ordered after its mbarrier.init by warp %d "
              "(missing barrier%s)", w->id, w->cta->rank, off, c->rank, b->by->id,
              c->cluster->n_ctas > 1 ? ", or fence.mbarrier_init before a relaxed barrier.cluster" : "");
    if (async && b->by->init_fence < clock && !proxy_fenced(w, b->init))
        fault(w, ERR_PROXY, "the asynchronous proxy uses the mbarrier at shared offset %u of CTA %d, initialised by warp %d with no fence.mbarrier_init "
              "or fence.proxy.async in between", off, c->rank, b->by->id);
    return b;
}

static void complete_if_due(Cluster *c, Warp *w, MBarrier *b)
{
    if (b->pending)
        return;
    if (b->tx < 0)
        fault(w, ERR_BARRIER, "more transaction bytes completed than expected on the mbarrier at shared offset %u (tx-count %lld)", b->addr,
              (long long)b->tx);
    if (b->tx)
        return;
    b->phase++;
    b->pending = b->count;
    /* A phase's waiters see what all arrivals so far released. */
    memcpy(b->done_vc, b->vc, c->n_clock * sizeof *b->vc);
    c->activity++;
}

void mbar_arrive(Warp *w, MBarrier *b, uint32_t n, int64_t tx, uint32_t drop, const uint32_t *vc)
{
    Cluster *c = w->cta->cluster;
    c->activity++;
    if (vc)
        clock_join(c, b->vc, vc);
    b->tx += tx;
    if (b->tx > TX_LIMIT)
        fault(w, ERR_BARRIER, "tx-count %lld of the mbarrier at shared offset %u is out of range", (long long)b->tx, b->addr);
    if (n > b->pending)
        fault(w, ERR_BARRIER, "%u arrivals at the mbarrier at shared offset %u: only %u of %u are still expected in phase %llu", n, b->addr,
              b->pending, b->count, (unsigned long long)b->phase);
    b->pending -= n;
    b->count -= drop;
    complete_if_due(c, w, b);
}

void mbar_complete_tx(Cluster *c, Warp *w, MBarrier *b, int64_t bytes, uint32_t epoch)
{
    c->activity++;
    b->tx -= bytes;
    if (b->tx < -TX_LIMIT)
        fault(w, ERR_BARRIER, "tx-count %lld of the mbarrier at shared offset %u is out of range", (long long)b->tx, b->addr);
    if (epoch && b->vc[EPOCH_WHO(epoch) - 1] < EPOCH_CLOCK(epoch))
        b->vc[EPOCH_WHO(epoch) - 1] = EPOCH_CLOCK(epoch);
    complete_if_due(c, w, b);
}

/* The mbarrier that lane i's address operand names. imm[0]: offset; imm[1] bit 0: the address is generic (64 bits). */
static MBarrier *at(Warp *w, const Ins *ins, int arg, int lane, Cta **cta)
{
    uint32_t addr;
    if (ins->imm[1] & 1) {
        uint64_t a = ((uint64_t *)operand(w, ins->arg[arg]))[lane] + ins->imm[0];
        if ((a & WINDOW_MASK) != WINDOW_SHARED && a >> 32) /* a 64-bit register may hold an address in shared memory too */
            fault(w, ERR_MEMORY, "generic address %#llx of an mbarrier is not in shared memory", (unsigned long long)a);
        addr = (uint32_t)a;
    } else {
        addr = ((uint32_t *)operand(w, ins->arg[arg]))[lane] + (uint32_t)ins->imm[0];
    }
    uint32_t off = shared_offset(w, addr, 8, 8, cta);
    if (*cta != w->cta)
        check_present(w, *cta, "access to an mbarrier");
    return mbar_use(w, *cta, off, 0);
}


/* mbarrier.init [a], count */
static int mbar_init(Warp *w, const Ins *ins, uint32_t m)
{
    FOR_LANES(i, m) {
        uint32_t count = ((uint32_t *)operand(w, ins->arg[1]))[i], addr;
        addr = ins->imm[1] & 1 ? (uint32_t)(((uint64_t *)operand(w, ins->arg[0]))[i] + ins->imm[0])
                               : ((uint32_t *)operand(w, ins->arg[0]))[i] + (uint32_t)ins->imm[0];
        Cta *c;
        uint32_t off = shared_offset(w, addr, 8, 8, &c);
        if (count < 1 || count > TX_LIMIT)
            fault(w, ERR_BARRIER, "mbarrier.init at shared offset %u with count %u", off, count);
        MBarrier *b = lookup(c, off);
        if (!b) {
            b = emu_alloc(sizeof *b);
            b->vc = new_clock(c->cluster);
            b->done_vc = new_clock(c->cluster);
            b->next = c->mbar;
            c->mbar = b;
        }
        b->addr = off;
        b->count = b->pending = count;
        b->tx = 0;
        b->phase = 0;
        b->init = clock_epoch(w);
        b->by = w;
        clear_clock(c->cluster, b->vc);
        clear_clock(c->cluster, b->done_vc);
        memset(c->shared.state + off, ST_MBAR, 8);
        c->cluster->activity++;
    }
    return NEXT;
}

static int mbar_inval(Warp *w, const Ins *ins, uint32_t m)
{
    FOR_LANES(i, m) {
        Cta *c;
        MBarrier *b = at(w, ins, 0, i, &c);
        for (MBarrier **p = &c->mbar; *p; p = &(*p)->next)
            if (*p == b) {
                *p = b->next;
                break;
            }
        memset(c->shared.state + b->addr, ST_NONE, 8);
        memset(c->shared.writer + b->addr, 0, 8 * sizeof *c->shared.writer);
        free(b->vc);
        free(b->done_vc);
        free(b);
    }
    return NEXT;
}

/* mbarrier.arrive{_drop}{.expect_tx} state|_, [a], value: operands state, a, value (or SINK). imm[1]: 2 drop, 4 expect_tx, 8 a release at cluster scope,
 * before which ptxas puts a fence. */
static int mbar_arrive_op(Warp *w, const Ins *ins, uint32_t m)
{
    Cluster *c = w->cta->cluster;
    uint32_t vc[MAX_CLOCKS];
    memset(vc, 0, c->n_clock * sizeof *vc);
    if (ins->imm[1] & 8)
        queued_done(w);
    clock_release(w, vc);
    FOR_LANES(i, m) {
        Cta *t;
        MBarrier *b = at(w, ins, 1, i, &t);
        uint32_t value = ins->arg[2] == SINK ? 1 : ((uint32_t *)operand(w, ins->arg[2]))[i];
        int tx = (ins->imm[1] & 4) != 0;
        if (ins->arg[0] != SINK)
            ((uint64_t *)operand(w, ins->arg[0]))[i] = b->phase;
        uint32_t n = tx ? 1 : value;
        mbar_arrive(w, b, n, tx ? value : 0, ins->imm[1] & 2 ? n : 0, vc);
    }
    return NEXT;
}

/* mbarrier.expect_tx / complete_tx [a], bytes */
static int mbar_expect_tx(Warp *w, const Ins *ins, uint32_t m)
{
    FOR_LANES(i, m) {
        Cta *t;
        mbar_arrive(w, at(w, ins, 0, i, &t), 0, ((uint32_t *)operand(w, ins->arg[1]))[i], 0, NULL);
    }
    return NEXT;
}

static int mbar_complete_tx_op(Warp *w, const Ins *ins, uint32_t m)
{
    FOR_LANES(i, m) {
        Cta *t;
        mbar_complete_tx(w->cta->cluster, w, at(w, ins, 0, i, &t), ((uint32_t *)operand(w, ins->arg[1]))[i], 0);
    }
    return NEXT;
}

/* A try_wait may give up at any time (PTX ISA: "mbarrier.test_wait, mbarrier.try_wait"). In shuffled schedules some do while copies are in flight,
 * which shows code that takes the answer for granted; with nothing in flight they wait, so that a deadlock stays one. */
static int gives_up(Warp *w)
{
    Cluster *c = w->cta->cluster;
    return c->launch->shuffle && (c->queue[Q_COPY] || c->queue[Q_TENSOR]) && random_u64(c) % 2;
}

/* mbarrier.{try,test}_wait{.parity} p, [a], phase: operands p (or SINK), a, phase. imm[1]: 2 parity, 4 test_wait, 8 relaxed. */
static int mbar_wait(Warp *w, const Ins *ins, uint32_t m)
{
    Frag *f = &w->frag[w->cur];
    uint32_t done = 0;
    FOR_LANES(i, m) {
        Cta *t;
        MBarrier *b = at(w, ins, 1, i, &t);
        int ok;
        if (ins->imm[1] & 2)
            ok = (b->phase & 1) != (((uint32_t *)operand(w, ins->arg[2]))[i] & 1);
        else
            ok = b->phase > ((uint64_t *)operand(w, ins->arg[2]))[i];
        if (ok) {
            done |= 1u << i;
            if (!(ins->imm[1] & 8)) {
                clock_acquire(w, b->done_vc);
            } else { /* until a fence */
                if (!w->observed)
                    w->observed = new_clock(t->cluster);
                clock_join(t->cluster, w->observed, b->done_vc);
            }
        } else {
            f->what = b->addr;
        }
    }
    if (done != m && !(ins->imm[1] & 4) && !f->timeout && !gives_up(w)) {
        f->why = "the mbarrier at shared offset";
        return RETRY;
    }
    f->timeout = 0;
    if (ins->arg[0] != SINK) {
        uint32_t *p = operand(w, ins->arg[0]);
        *p = (*p & ~m) | done;
    }
    return ins->imm[1] & 4 && done != m ? YIELD : NEXT;
}

/* ---- CTA barriers ------------------------------------------------------------------------------------------------------------ */
/* bar.sync / bar.arrive / barrier.cta...: operands number, count (or SINK: all threads). imm[0]: 0 sync, 1 arrive, 2 red.
 * red: operands number, count, destination, predicate; imm[2]: 0 popc, 1 and, 2 or; imm[3]: the predicate is negated. */
static int bar(Warp *w, const Ins *ins, uint32_t m)
{
    Frag *f = &w->frag[w->cur];
    Cta *c = w->cta;
    const uint32_t *number = operand(w, ins->arg[0]);
    uint32_t first = __builtin_ctz(m), id = number[first];
    if (id > 15)
        fault(w, ERR_BARRIER, "barrier number %u", id);
    NamedBarrier *b = &c->named[id];
    if (f->arrived) {
        if (b->generation == f->token)
            return RETRY;
        f->arrived = 0;
        clock_acquire(w, b->done_vc);
        return NEXT;
    }
    uint32_t differ = 0;
    FOR_LANES(i, m) differ |= (number[i] != id) << i;
    if (differ)
        fault(w, ERR_BARRIER, "lanes of one warp name different barriers (%u and %u)", id, number[__builtin_ctz(differ)]);
    uint32_t need = ins->arg[1] == SINK ? (uint32_t)c->n_warps * LANES : ((uint32_t *)operand(w, ins->arg[1]))[first];
    if (need % LANES || !need)
        fault(w, ERR_BARRIER, "barrier %u: thread count %u is not a multiple of the warp size", id, need);
    if (b->got && b->need != need)
        fault(w, ERR_BARRIER, "barrier %u: thread count %u differs from %u, given by the warps that wait (mask %#x)", id, need, b->need,
              b->warps);
    if (b->warps >> w->id & 1)
        fault(w, ERR_BARRIER, "barrier %u: warp %d arrives twice in one phase", id, w->id);
    if (!b->vc) {
        b->vc = new_clock(c->cluster);
        b->done_vc = new_clock(c->cluster);
    }
    c->cluster->activity++;
    b->need = need;
    b->got += LANES;
    b->warps |= 1u << w->id;
    if (ins->imm[0] != 1)
        queued_done(w); /* PTX ISA: accesses before it are performed relative to its threads */
    clock_release(w, b->vc);
    if (b->got > need)
        fault(w, ERR_BARRIER, "barrier %u: %u threads arrived, %u expected (warps %#x)", id, b->got, need, b->warps);
    f->token = b->generation;
    if (b->got == need) {
        memcpy(b->done_vc, b->vc, c->cluster->n_clock * sizeof *b->vc);
        clear_clock(c->cluster, b->vc);
        b->done_votes = b->votes;
        memset(&b->votes, 0, sizeof b->votes);
        b->got = 0;
        b->warps = 0;
        b->generation++;
    }
    if (ins->imm[0] == 1)
        return NEXT;
    if (b->generation != f->token) {
        clock_acquire(w, b->done_vc);
        return NEXT;
    }
    f->arrived = 1;
    f->why = "barrier";
    f->what = id;
    return RETRY;
}

/* bar.red: a bar.sync whose barrier also counts the lanes that voted for and against. */
static int bar_red(Warp *w, const Ins *ins, uint32_t m)
{
    const uint32_t id = ((uint32_t *)operand(w, ins->arg[0]))[__builtin_ctz(m)] & 15;
    NamedBarrier *b = &w->cta->named[id];
    if (!w->frag[w->cur].arrived) {
        uint32_t p = *(uint32_t *)operand(w, ins->arg[3]) ^ (ins->imm[3] ? FULL : 0);
        b->votes.trues += __builtin_popcount(p & m);
        b->votes.falses += __builtin_popcount(~p & m);
    }
    int r = bar(w, ins, m);
    if (r != NEXT)
        return r;
    uint32_t *d = operand(w, ins->arg[2]);
    if (ins->imm[2] == 0) {
        FOR_LANES(i, m) d[i] = b->done_votes.trues;
    } else {
        int yes = ins->imm[2] == 1 ? !b->done_votes.falses : b->done_votes.trues != 0;
        *d = (*d & ~m) | (yes ? m : 0);
    }
    return NEXT;
}

/* ---- barrier.cluster --------------------------------------------------------------------------------------------------------- */
/* imm[0]: 0 arrive, 1 wait; imm[1]: relaxed. The phase that a warp has arrived for is `cluster_phase` of the warp. */
static int cluster_arrive(Warp *w, const Ins *ins, uint32_t m)
{
    (void)m;
    Cluster *c = w->cta->cluster;
    if (w->cluster_phase > c->barrier.phase)
        fault(w, ERR_BARRIER, "barrier.cluster.arrive twice without a wait");
    w->cluster_phase = c->barrier.phase + 1;
    c->activity++;
    if (!ins->imm[1]) {
        queued_done(w); /* ptxas puts a fence before it */
        clock_release(w, c->barrier.vc);
    } else if (w->fenced) { /* a fence makes a release of it */
        clock_join(c, c->barrier.vc, w->fenced);
    }
    if (w->init_fence)
        c->barrier.inits[w->gid] = w->init_fence;
    if (++c->barrier.got == (uint32_t)c->n_warps) {
        memcpy(c->barrier.done_inits, c->barrier.inits, c->n_clock * sizeof *c->barrier.inits);
        c->barrier.got = 0;
        c->barrier.phase++;
        memcpy(c->barrier.done_vc, c->barrier.vc, c->n_clock * sizeof *c->barrier.vc);
    }
    return NEXT;
}

static int cluster_wait(Warp *w, const Ins *ins, uint32_t m)
{
    (void)ins;
    (void)m;
    Cluster *c = w->cta->cluster;
    Frag *f = &w->frag[w->cur];
    if (!w->cluster_phase)
        fault(w, ERR_BARRIER, "barrier.cluster.wait without an arrive");
    if (c->barrier.phase < w->cluster_phase) {
        f->why = "barrier.cluster";
        f->what = -1;
        return RETRY;
    }
    clock_acquire(w, c->barrier.done_vc);
    if (!w->inits)
        w->inits = new_clock(c);
    clock_join(c, w->inits, c->barrier.done_inits);
    return NEXT;
}

/* fence.mbarrier_init: concerns what the warp has initialised before, and nothing else. */
static int fence_init(Warp *w, const Ins *ins, uint32_t m)
{
    (void)ins, (void)m;
    w->init_fence = w->vc[w->gid]++;
    return NEXT;
}

/* ---- reports ----------------------------------------------------------------------------------------------------------------- */
void barrier_report(Cta *c, char *out, size_t n)
{
    size_t used = 0;
    out[0] = 0;
    for (MBarrier *b = c->mbar; b && used + 160 < n; b = b->next)
        if (b->pending != b->count || b->tx)
            used += snprintf(out + used, n - used, "\n    CTA %d mbarrier at shared offset %u: phase %llu, %u of %u arrivals missing, tx-count %lld",
                             c->rank, b->addr, (unsigned long long)b->phase, b->pending, b->count, (long long)b->tx);
    int resizes = 0;
    for (int i = 0; i < c->n_warps; i++)
        for (int j = 0; j < c->warp[i].n_frag; j++)
            resizes |= c->warp[i].frag[j].waiting && c->warp[i].frag[j].why && strstr(c->warp[i].frag[j].why, "pool of registers");
    if (resizes && used + 160 < n)
        used += snprintf(out + used, n - used, "\n    CTA %d has %u registers in its pool", c->rank, c->registers);
    for (int i = 0; i < 16 && used + 160 < n; i++)
        if (c->named[i].got)
            used += snprintf(out + used, n - used, "\n    CTA %d barrier %d: %u of %u threads (warps %#x)", c->rank, i, c->named[i].got,
                             c->named[i].need, c->named[i].warps);
}

void barrier_finish(Cta *c)
{
    for (int i = 0; i < 16; i++)
        if (c->named[i].got)
            fault(&c->warp[0], ERR_BARRIER, "the kernel ends with barrier %d incomplete: %u of %u threads", i, c->named[i].got, c->named[i].need);
    for (int i = 0; i < c->n_warps; i++)
        for (int j = i & ~3; j < i; j++)
            if (c->warp[i].resized != c->warp[j].resized)
                fault(&c->warp[i], ERR_BARRIER, "the kernel ends, and warps %d and %d of one warpgroup have executed %u and %u setmaxnreg", j, i,
                      c->warp[j].resized, c->warp[i].resized);
    for (MBarrier *b = c->mbar; b; b = b->next)
        if (b->tx)
            note(c->cluster->launch, "the kernel ends with %lld transaction bytes outstanding on the mbarrier at shared offset %u",
                 (long long)b->tx, b->addr);
}

static const Entry barriers[] = {
    {"mbarrier.init", mbar_init}, {"mbarrier.inval", mbar_inval}, {"mbarrier.arrive", mbar_arrive_op},
    {"mbarrier.expect_tx", mbar_expect_tx}, {"mbarrier.complete_tx", mbar_complete_tx_op}, {"mbarrier.wait", mbar_wait},
    {"bar", bar}, {"bar.red", bar_red}, {"barrier.cluster.arrive", cluster_arrive}, {"barrier.cluster.wait", cluster_wait},
    {"fence.mbarrier_init", fence_init},
};
REGISTER(barriers)
