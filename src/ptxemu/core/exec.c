/* Running a launch: workers, clusters, warps and their fragments, asynchronous operations, clocks, faults. */
#include "core.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- memory, names, random numbers ---------------------------------------------------------------------------------------- */
void *emu_alloc(size_t n)
{
    void *p = calloc(1, n ? n : 1);
    if (!p) {
        fprintf(stderr, "ptxemu: out of memory\n");
        abort();
    }
    return p;
}

static Entry *entries;
static size_t n_entries;

void register_entries(const Entry *e, size_t n)
{
    entries = realloc(entries, (n_entries + n) * sizeof *entries);
    memcpy(entries + n_entries, e, n * sizeof *e);
    n_entries += n;
}

static int by_name(const void *a, const void *b) { return strcmp(((const Entry *)a)->name, ((const Entry *)b)->name); }

/* Address of the function for a lowered instruction, 0 if there is none. */
uintptr_t emu_lookup(const char *name)
{
    static int sorted;
    if (!sorted) {
        qsort(entries, n_entries, sizeof *entries, by_name);
        sorted = 1;
    }
    Entry key = {name, 0};
    Entry *found = bsearch(&key, entries, n_entries, sizeof *entries, by_name);
    return found ? (uintptr_t)found->fn : 0;
}

size_t emu_count(void) { return n_entries; }
const char *emu_name(size_t i) { return i < n_entries ? entries[i].name : 0; }
size_t emu_sizeof(int what)
{
    static const size_t sizes[] = {sizeof(Ins), sizeof(Program), sizeof(Launch), sizeof(Range), sizeof(Texture)};
    return sizes[what];
}

uint64_t random_u64(Cluster *c)
{
    uint64_t z = c->rng += 0x9e3779b97f4a7c15u; /* splitmix64 */
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* ---- faults and notes ------------------------------------------------------------------------------------------------------ */
static pthread_mutex_t report = PTHREAD_MUTEX_INITIALIZER;

_Noreturn void fault(Warp *w, int kind, const char *format, ...)
{
    Cluster *cl = w->cta->cluster;
    Launch *l = cl->launch;
    pthread_mutex_lock(&report);
    if (!l->error) {
        va_list a;
        va_start(a, format);
        vsnprintf(l->message, sizeof l->message, format, a);
        va_end(a);
        l->error_line = w->at ? w->at->line : 0;
        memcpy(l->error_cta, w->cta->id, sizeof l->error_cta);
        l->error_warp = w->id;
        l->error = kind;
    }
    pthread_mutex_unlock(&report);
    longjmp(cl->worker->jump, 1);
}

void note(Launch *l, const char *format, ...)
{
    char line[256];
    va_list a;
    va_start(a, format);
    vsnprintf(line, sizeof line - 1, format, a);
    va_end(a);
    strcat(line, "\n");
    pthread_mutex_lock(&report);
    size_t used = strlen(l->notes);
    if (!strstr(l->notes, line) && used + strlen(line) < sizeof l->notes)
        strcpy(l->notes + used, line);
    pthread_mutex_unlock(&report);
}

/* ---- clocks ---------------------------------------------------------------------------------------------------------------- */
void clock_join(Cluster *c, uint32_t *into, const uint32_t *from)
{
    for (int i = 0; i < c->n_clock; i++)
        if (into[i] < from[i])
            into[i] = from[i];
}

void clock_release(Warp *w, uint32_t *into)
{
    if (w->queued)
        queued_release(w);
    clock_join(w->cta->cluster, into, w->vc);
    if (++w->vc[w->gid] > 0x3ffff0u)
        fault(w, ERR_EMU, "a warp released more often than the emulator counts");
}

void clock_acquire(Warp *w, const uint32_t *from)
{
    clock_join(w->cta->cluster, w->vc, from);
    if (w->lanes) /* whatever lane released it */
        lanes_join(w, w->frag[w->cur].mask, FULL);
}

uint32_t clock_epoch(const Warp *w) { return EPOCH(w->gid + 1, w->vc[w->gid]); }
uint32_t copy_epoch(Cluster *c) { return EPOCH(c->n_clock, ++c->copies); }

/* ---- asynchronous operations ----------------------------------------------------------------------------------------------- */
Async *async_new(Warp *w, int kind, void (*run)(Async *))
{
    Async *op = emu_alloc(sizeof *op);
    op->kind = kind;
    op->run = run;
    op->warp = w;
    op->ins = w->at;
    op->cta = w->cta;
    return op;
}

static void run_async(Async *op)
{
    Cluster *c = op->cta->cluster;
    const Ins *at = op->warp->at;
    op->warp->at = op->ins; /* a fault belongs to the instruction that issued it */
    op->run(op);
    op->warp->at = at;
    c->activity++;
    free(op->data);
    free(op);
}

void async_issue(Async *op)
{
    Cluster *c = op->cta->cluster;
    if (c->launch->eager && op->kind != Q_STORE) {
        run_async(op);
        return;
    }
    Async **at = &c->queue[op->kind];
    while (*at)
        at = &(*at)->next;
    *at = op;
}

void async_complete(Async *op)
{
    Async **at = &op->cta->cluster->queue[op->kind];
    while (*at && *at != op)
        at = &(*at)->next;
    if (*at)
        *at = op->next;
    run_async(op);
}

/* Complete one operation, chosen at random among what the hardware might complete next. */
static int advance(Cluster *c)
{
    int kinds[3], n = 0;
    for (int k = 0; k < 3; k++)
        if (c->queue[k])
            kinds[n++] = k;
    if (!n)
        return 0;
    int kind = kinds[random_u64(c) % n];
    Async *op = c->queue[kind];
    if (kind != Q_TENSOR) {
        int length = 0;
        for (Async *o = op; o; o = o->next)
            length++;
        for (uint64_t skip = random_u64(c) % length; skip; skip--)
            op = op->next;
    }
    async_complete(op);
    return 1;
}

/* ---- a warp ---------------------------------------------------------------------------------------------------------------- */
static Frag *add_frag(Warp *w, int32_t pc, uint32_t mask)
{
    Frag *f = &w->frag[w->n_frag++];
    memset(f, 0, sizeof *f);
    f->pc = pc;
    f->mask = mask;
    return f;
}

static void drop_frag(Warp *w, int i) { w->frag[i] = w->frag[--w->n_frag]; }

/* The fragment that runs next: of those that can, the first in the program's running order, so that parted lanes meet again. */
static int pick(Warp *w, const Program *p)
{
    int best = -1;
    for (int i = 0; i < w->n_frag; i++)
        if (!w->frag[i].waiting && (best < 0 || p->ins[w->frag[i].pc].rank < p->ins[w->frag[best].pc].rank))
            best = i;
    return best;
}

/* Join all fragments that stand where fragment i stands; returns its index then. */
static int merge(Warp *w, int i)
{
    for (int j = 0; j < w->n_frag; j++) {
        Frag *a = &w->frag[i], *b = &w->frag[j];
        if (j == i || a->pc != b->pc || a->arrived || b->arrived || a->timeout || b->timeout)
            continue;
        a->mask |= b->mask;
        int last = w->n_frag - 1;
        drop_frag(w, j);
        if (i == last)
            i = j;
        j = -1;
    }
    return i;
}

/* Run fragment i until it blocks, parts, meets an earlier one or has used up the quantum; returns what is left of that. */
static int run_frag(Warp *w, int i, int quantum)
{
    const Program *p = w->cta->cluster->launch->program;
    int32_t pc = w->frag[i].pc;
    uint32_t mask = w->frag[i].mask;
    while (quantum-- > 0) {
        const Ins *ins = &p->ins[pc];
        if (w->n_frag > 1 && ins->flags & (INS_LEADER | INS_ALIGNED)) {
            w->frag[i].pc = pc;
            i = merge(w, i);
            mask = w->frag[i].mask;
            if (pick(w, p) != i)
                return quantum;
        }
        uint32_t m = mask;
        if (ins->guard != NO_GUARD) {
            if (w->undefined)
                undefined_guard(w, ins, mask);
            uint32_t g = *(uint32_t *)operand(w, ins->guard);
            m &= ins->guard_not ? ~g : g;
        }
        w->retired++;
        if (!m) {
            pc++;
            continue;
        }
        w->at = ins;
        if (ins->control == CTL_BRANCH) {
            if (m == mask) {
                pc = ins->target;
                continue;
            }
            w->frag[i].pc = pc + 1;
            w->frag[i].mask = mask & ~m;
            add_frag(w, ins->target, m);
            return quantum;
        }
        if (ins->control == CTL_EXIT) {
            w->live &= ~m;
            w->cta->cluster->activity++;
            if (m == mask) {
                drop_frag(w, i);
                return quantum;
            }
            w->frag[i].mask = mask &= ~m;
            pc++;
            continue;
        }
        w->cur = i;
        if (ins->flags & INS_ALIGNED && m != w->live) {
            w->frag[i].pc = pc;
            w->frag[i].waiting = 1;
            w->frag[i].why = "the other lanes of its warp";
            w->frag[i].what = -1;
            return quantum;
        }
        if (ins->flags & INS_HELD && w->wg)
            wgmma_touch(w, ins);
        if (ins->flags & INS_TOUCHES && w->queued)
            queued_touch(w, ins);
        if (w->undefined)
            undefined_step(w, ins, m);
        switch (ins->fn(w, ins, m)) {
        case NEXT:
            pc++;
            break;
        case RETRY:
            w->frag[i].pc = pc;
            w->frag[i].waiting = 1;
            w->retired--;
            return quantum;
        case YIELD:
            w->frag[i].pc = pc + 1;
            return 0;
        default: /* SPLIT */
            w->frag[i].pc = pc + 1;
            w->frag[i].mask = mask & ~w->split;
            add_frag(w, pc, w->split);
            return quantum;
        }
    }
    w->frag[i].pc = pc;
    return 0;
}

static void run_warp(Warp *w, int quantum)
{
    const Program *p = w->cta->cluster->launch->program;
    for (int i = 0; i < w->n_frag; i++)
        w->frag[i].waiting = 0;
    while (quantum > 0) {
        int i = pick(w, p);
        if (i < 0)
            return;
        quantum = run_frag(w, i, quantum);
    }
}

/* ---- a cluster ------------------------------------------------------------------------------------------------------------- */
static void fill(Warp *w, int at, uint32_t value)
{
    uint32_t *r = (uint32_t *)(w->reg + at);
    for (int i = 0; i < LANES; i++)
        r[i] = value;
}

static void special_registers(Warp *w)
{
    Cta *c = w->cta;
    const Launch *l = c->cluster->launch;
    uint32_t *x = (uint32_t *)(w->reg + SR_TID_X), *y = (uint32_t *)(w->reg + SR_TID_Y), *z = (uint32_t *)(w->reg + SR_TID_Z);
    for (uint32_t i = 0; i < LANES; i++) {
        uint32_t t = w->id * LANES + i;
        x[i] = t % l->block[0];
        y[i] = t / l->block[0] % l->block[1];
        z[i] = t / (l->block[0] * l->block[1]);
        ((uint32_t *)(w->reg + SR_LANEID))[i] = i;
        ((uint32_t *)(w->reg + SR_LANEMASK_EQ))[i] = 1u << i;
        ((uint32_t *)(w->reg + SR_LANEMASK_LT))[i] = (1u << i) - 1;
        ((uint32_t *)(w->reg + SR_LANEMASK_LE))[i] = (2u << i) - 1;
        ((uint32_t *)(w->reg + SR_LANEMASK_GT))[i] = ~((2u << i) - 1);
        ((uint32_t *)(w->reg + SR_LANEMASK_GE))[i] = ~((1u << i) - 1);
    }
    for (int d = 0; d < 3; d++) {
        fill(w, SR_NTID_X + 128 * d, l->block[d]);
        fill(w, SR_CTAID_X + 128 * d, c->id[d]);
        fill(w, SR_NCTAID_X + 128 * d, l->grid[d]);
        fill(w, SR_CLUSTERID_X + 128 * d, c->id[d] / l->cluster[d]);
        fill(w, SR_NCLUSTERID_X + 128 * d, l->grid[d] / l->cluster[d]);
        fill(w, SR_CLUSTER_CTAID_X + 128 * d, c->id[d] % l->cluster[d]);
        fill(w, SR_CLUSTER_NCTAID_X + 128 * d, l->cluster[d]);
    }
    fill(w, SR_WARPID, w->id);
    fill(w, SR_NWARPID, c->n_warps);
    fill(w, SR_SMID, (c->id[0] + l->grid[0] * (c->id[1] + l->grid[1] * c->id[2])) % 132);
    fill(w, SR_NSMID, 132);
    fill(w, SR_CLUSTER_CTARANK, c->rank);
    fill(w, SR_CLUSTER_NCTARANK, c->cluster->n_ctas);
    fill(w, SR_IS_EXPLICIT_CLUSTER, c->cluster->n_ctas > 1);
    fill(w, SR_DYNAMIC_SMEM, l->dynamic_shared);
    fill(w, SR_TOTAL_SMEM, c->shared.size);
    fill(w, SR_WARP_SZ, LANES);
}

/* Registers of a thread that a kernel is launched with: what it names, else the most that lets so many CTAs run on an SM, as ptxas chooses where
 * there is a setmaxnreg. */
static uint32_t registers_at_launch(const Program *p, int threads)
{
    if (p->max_registers)
        return (p->max_registers + 7) / 8 * 8;
    const uint32_t most = 65536u / (p->min_ctas > 1 ? p->min_ctas : 1) / ((threads + LANES - 1) / LANES * LANES) / 8 * 8;
    return most > 256 ? 256 : most;
}

static void start_cta(Cluster *cl, int rank, const uint32_t origin[3])
{
    Launch *l = cl->launch;
    const Program *p = l->program;
    Cta *c = &cl->cta[rank];
    c->cluster = cl;
    c->rank = rank;
    c->id[0] = origin[0] + rank % l->cluster[0];
    c->id[1] = origin[1] + rank / l->cluster[0] % l->cluster[1];
    c->id[2] = origin[2] + rank / (l->cluster[0] * l->cluster[1]);
    c->n_threads = l->block[0] * l->block[1] * l->block[2];
    c->n_warps = (c->n_threads + LANES - 1) / LANES;
    c->warp = emu_alloc(c->n_warps * sizeof(Warp));
    c->local = emu_alloc((size_t)c->n_warps * LANES * p->local_bytes);
    for (int i = 0; i < c->n_warps; i++) {
        Warp *w = &c->warp[i];
        w->cta = c;
        w->id = i;
        w->gid = rank * c->n_warps + i;
        w->reg = emu_alloc(p->reg_bytes);
        w->constants = p->constants + rank * p->constant_stride;
        w->max_registers = registers_at_launch(p, c->n_threads);
        w->vc = emu_alloc(cl->n_clock * sizeof(uint32_t));
        w->vc[w->gid] = 1;
        int lanes = c->n_threads - i * LANES;
        w->live = lanes >= LANES ? FULL : (1u << lanes) - 1;
        special_registers(w);
        add_frag(w, 0, w->live);
    }
    uint32_t bytes = l->dynamic_shared ? p->dynamic_base + l->dynamic_shared : p->static_shared;
    shared_init(c, bytes < 16 ? 16 : bytes);
}

static Cluster *start_cluster(Worker *k, uint32_t index)
{
    Launch *l = k->launch;
    Cluster *c = emu_alloc(sizeof *c);
    c->launch = l;
    c->worker = k;
    c->index = index;
    c->n_ctas = l->cluster[0] * l->cluster[1] * l->cluster[2];
    int warps = (l->block[0] * l->block[1] * l->block[2] + LANES - 1) / LANES * c->n_ctas;
    c->n_warps = warps;
    c->n_clock = warps + (l->program->held_end > SR_END ? warps / c->n_ctas / 4 * c->n_ctas : 0) + 1;
    c->fence = emu_alloc(warps * sizeof *c->fence);
    c->barrier.vc = emu_alloc(c->n_clock * sizeof(uint32_t));
    c->barrier.done_vc = emu_alloc(c->n_clock * sizeof(uint32_t));
    c->barrier.inits = emu_alloc(c->n_clock * sizeof(uint32_t));
    c->barrier.done_inits = emu_alloc(c->n_clock * sizeof(uint32_t));
    c->rng = l->seed * 0x2545f4914f6cdd1du + index;
    c->cta = emu_alloc(c->n_ctas * sizeof(Cta));
    uint32_t n[3], origin[3];
    for (int d = 0; d < 3; d++)
        n[d] = l->grid[d] / l->cluster[d];
    origin[0] = index % n[0] * l->cluster[0];
    origin[1] = index / n[0] % n[1] * l->cluster[1];
    origin[2] = index / (n[0] * n[1]) * l->cluster[2];
    for (int r = 0; r < c->n_ctas; r++)
        start_cta(c, r, origin);
    return c;
}

static void free_cluster(Cluster *c)
{
    for (int k = 0; k < 3; k++)
        for (Async *o = c->queue[k], *next; o; o = next) {
            next = o->next;
            free(o->data);
            free(o);
        }
    for (int r = 0; r < c->n_ctas; r++) {
        Cta *t = &c->cta[r];
        async_free(t);
        for (int i = 0; i < t->n_warps; i++) {
            free(t->warp[i].reg);
            free(t->warp[i].vc);
            free(t->warp[i].wg);
            free(t->warp[i].fenced);
            free(t->warp[i].observed);
            free(t->warp[i].inits);
            undefined_free(&t->warp[i]);
            queued_free(&t->warp[i]);
        }
        for (MBarrier *b = t->mbar, *next; b; b = next) {
            next = b->next;
            free(b->vc);
            free(b->done_vc);
            free(b);
        }
        for (int i = 0; i < 16; i++) {
            free(t->named[i].vc);
            free(t->named[i].done_vc);
        }
        free(t->warp);
        free(t->local);
        free(t->tensor);
        shared_free(t);
    }
    for (int i = 0; i < c->n_warps; i++) {
        for (int j = 0; j < c->fence[i].n; j++)
            free(c->fence[i].at[j].vc);
        free(c->fence[i].at);
    }
    free(c->fence);
    sync_free(c);
    race_forget(c);
    free(c->barrier.vc);
    free(c->barrier.done_vc);
    free(c->barrier.inits);
    free(c->barrier.done_inits);
    free(c->cta);
    free(c);
}

/* Everything that waits, and on what: the text of a deadlock. */
static void deadlock(Cluster *c, const char *how)
{
    static _Thread_local char text[3800];
    size_t used = 0;
    Warp *first = NULL;
    for (int r = 0; r < c->n_ctas; r++) {
        Cta *t = &c->cta[r];
        for (int i = 0; i < t->n_warps && used < sizeof text - 400; i++)
            for (int j = 0; j < t->warp[i].n_frag && used < sizeof text - 400; j++) {
                Frag *f = &t->warp[i].frag[j];
                const Ins *ins = &c->launch->program->ins[f->pc];
                if (!first)
                    first = &t->warp[i];
                used += snprintf(text + used, sizeof text - used, "\n    CTA %d warp %d", r, i);
                if (f->mask != t->warp[i].live)
                    used += snprintf(text + used, sizeof text - used, " lanes %#x", f->mask);
                used += snprintf(text + used, sizeof text - used, ": %s%s", f->waiting ? "waits for " : "runs",
                                 f->waiting && f->why ? f->why : "");
                if (f->waiting && f->what >= 0)
                    used += snprintf(text + used, sizeof text - used, " %d", f->what);
                used += snprintf(text + used, sizeof text - used, " at PTX line %d", ins->line);
                used += undefined_report(&t->warp[i], text + used, sizeof text - used);
            }
        if (used < sizeof text - 400) {
            barrier_report(t, text + used, sizeof text - used - 1);
            used += strlen(text + used);
        }
    }
    first->at = NULL;
    fault(first, ERR_DEADLOCK, "%s%s", how, text);
}

static uint64_t retired(Cluster *c)
{
    uint64_t n = 0;
    for (int r = 0; r < c->n_ctas; r++)
        for (int i = 0; i < c->cta[r].n_warps; i++)
            n += c->cta[r].warp[i].retired;
    return n;
}

/* One turn of every warp. Returns how many fragments are left, and in `running` how many of them wait for nothing. */
static int turn(Cluster *c, int timeout, int *running)
{
    int left = 0, per = c->cta[0].n_warps, total = c->n_ctas * per;
    int start = c->launch->shuffle ? random_u64(c) % total : 0;
    *running = 0;
    if (c->launch->shuffle && !c->keep) {
        c->keep = 1 + random_u64(c) % 64;
        c->kept = random_u64(c) % (2 * total);
    }
    c->keep -= c->keep > 0;
    for (int i = 0; i < total; i++) {
        int at = (start + i) % total;
        Warp *w = &c->cta[at / per].warp[at % per];
        if (c->keep && at == c->kept) {
            left += w->n_frag;
            continue;
        }
        for (int j = 0; timeout && j < w->n_frag; j++)
            w->frag[j].timeout = w->frag[j].waiting;
        int quantum = c->launch->quantum;
        if (c->launch->shuffle)
            quantum = 1 + random_u64(c) % quantum;
        run_warp(w, quantum);
        for (int j = 0; j < w->n_frag; j++) {
            w->frag[j].timeout = 0;
            *running += !w->frag[j].waiting;
        }
        left += w->n_frag;
    }
    return left;
}

static void finish_cluster(Cluster *c)
{
    for (int r = 0; r < c->n_ctas; r++) {
        c->cta[r].warp[0].at = NULL;
        async_finish(&c->cta[r]);
    }
    while (advance(c))
        ;
    for (int r = 0; r < c->n_ctas; r++) {
        wgmma_finish(&c->cta[r]);
        tensor_finish(&c->cta[r]);
        barrier_finish(&c->cta[r]);
    }
    c->done = 1;
}

enum { QUIET = 4096, SPIN = 1 << 18 }; /* instructions without anything happening: until copies complete, until it is spinning */

/* Run a cluster until it is done or only spins (on global memory, which another CTA may write). */
static void run_cluster(Cluster *c)
{
    int idle = 0, running;
    uint64_t quiet = retired(c);
    while (!c->launch->error) {
        uint64_t activity = c->activity;
        if (!turn(c, idle > 0, &running)) {
            finish_cluster(c);
            return;
        }
        uint64_t now = retired(c);
        if (c->activity != activity) {
            idle = 0;
            quiet = now;
        } else if (running && now - quiet < QUIET) {
            continue;
        } else if (advance(c)) {
            idle = 0;
            quiet = now;
        } else if (c->keep) {
            c->keep = 0;
        } else if (running) {
            if (now - quiet > SPIN)
                return;
        } else if (++idle > 6) {
            /* Waits time out, as they may on hardware; a cluster that then only waits again is stuck for good. */
            deadlock(c, "deadlock:");
        }
    }
}

/* ---- workers --------------------------------------------------------------------------------------------------------------- */
static uint32_t clusters(const Launch *l)
{
    uint32_t n = 1;
    for (int d = 0; d < 3; d++)
        n *= l->grid[d] / l->cluster[d];
    return n;
}

static void *work(void *arg)
{
    Worker *k = arg;
    Launch *l = k->launch;
    const uint32_t total = clusters(l);
    Cluster *volatile held = NULL; /* started and not done, the newest first */
    volatile uint64_t instructions = 0, seen = 0, spun = 0;
    if (!setjmp(k->jump)) {
        for (int more = 1; !l->error && (more || held);) {
            /* A further cluster where none is held or those that are only spin. */
            uint32_t index = more ? __atomic_fetch_add(&l->next_cluster, 1, __ATOMIC_RELAXED) : total;
            more = index < total;
            if (more) {
                Cluster *c = start_cluster(k, index);
                c->next = held;
                held = c;
            }
            for (Cluster *volatile *at = &held; *at && !l->error;) {
                Cluster *c = *at;
                uint64_t activity = c->activity, before = retired(c);
                run_cluster(c);
                if (c->activity != activity)
                    __atomic_fetch_add(&l->progress, 1, __ATOMIC_RELAXED);
                spun += retired(c) - before;
                if (c->done) {
                    instructions += retired(c);
                    *at = c->next;
                    free_cluster(c);
                } else {
                    at = (Cluster *volatile *)&c->next;
                }
            }
            if (l->progress != seen || more) {
                seen = l->progress;
                spun = 0;
            } else if (held && spun > l->limit) {
                deadlock(held, "no progress: every warp that runs waits for memory that nothing writes:");
            }
        }
    }
    for (Cluster *c = held, *next; c; c = next) {
        next = c->next;
        free_cluster(c);
    }
    __atomic_fetch_add(&l->instructions, instructions, __ATOMIC_RELAXED);
    return NULL;
}

/* Run a launch to its end or its first fault; returns its error. */
int emu_launch(Launch *l)
{
    uint32_t total = clusters(l);
    int n = l->workers < 1 ? 1 : l->workers > 64 ? 64 : l->workers;
    if ((uint32_t)n > total)
        n = total;
    l->workers = n;
    l->race = l->races ? race_new() : NULL;
    Worker *k = emu_alloc(n * sizeof *k);
    pthread_t *thread = emu_alloc(n * sizeof *thread);
    for (int i = 0; i < n; i++) {
        k[i].launch = l;
        if (i)
            pthread_create(&thread[i], NULL, work, &k[i]);
    }
    work(&k[0]);
    for (int i = 1; i < n; i++)
        pthread_join(thread[i], NULL);
    free(k);
    free(thread);
    race_free(l->race);
    l->race = NULL;
    return l->error;
}
