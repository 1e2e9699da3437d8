/* Asynchronous copies that are not of tensors, and their groups (PTX ISA: "Data Movement and Conversion Instructions: Asynchronous copy").
 *
 * A copy is checked when it is issued and queued; it completes at some random later time, or when something waits for it. Rows that it
 * writes are in flight until then; rows that a bulk store reads stay locked until its thread has waited for the read.
 */
#include "memory.h"

#include <stdlib.h>

/* A thread's copy that it waits for in groups. Lanes that issue one together share it while they commit and wait together. */
typedef struct Copy {
    struct Copy *next;
    Async *op;           /* in flight */
    uint32_t mask;       /* lanes */
    int bulk;            /* a bulk store, else cp.async */
    int committed, age;  /* groups that the lanes committed after its own */
    int unlocked;        /* bulk: its read has been waited for */
    int published;       /* cp.async: an mbarrier tells of it */
    int line;
    uint32_t epoch;      /* of its completion */
    uint32_t size;       /* bytes of a lane */
    uint32_t off[LANES];
    uint64_t from[LANES];
    uint8_t valid[LANES];
} Copy;

/* complete: epoch of the last bulk store that completed after its thread had waited for its read. */
struct CpState { Copy *copies, *spare; uint32_t complete; };

static Copy *new_copy(Warp *w)
{
    if (!w->cp)
        w->cp = emu_alloc(sizeof *w->cp);
    Copy *r = w->cp->spare;
    if (r)
        w->cp->spare = r->next;
    else
        r = emu_alloc(sizeof *r);
    memset(r, 0, offsetof(Copy, off));
    r->line = w->at->line;
    r->next = w->cp->copies;
    w->cp->copies = r;
    return r;
}

static void drop_copy(Warp *w, Copy *r)
{
    for (Copy **at = &w->cp->copies; *at; at = &(*at)->next)
        if (*at == r) {
            *at = r->next;
            break;
        }
    r->next = w->cp->spare;
    w->cp->spare = r;
}

void async_free(Cta *c)
{
    for (int i = 0; i < c->n_warps; i++) {
        struct CpState *cp = c->warp[i].cp;
        if (!cp)
            continue;
        for (int list = 0; list < 2; list++)
            for (Copy *r = list ? cp->spare : cp->copies, *next; r; r = next) {
                next = r->next;
                free(r);
            }
        free(cp);
        c->warp[i].cp = NULL;
    }
}

/* ---- cp.async ---------------------------------------------------------------------------------------------------------------------- */
static void copy_run(Async *op)
{
    Copy *r = (Copy *)op->v[0];
    uint8_t buffer[16];
    r->epoch = copy_epoch(op->cta->cluster);
    FOR_LANES(i, r->mask) {
        memset(buffer, 0, sizeof buffer);
        if (r->valid[i])
            memcpy(buffer, (const void *)r->from[i], r->valid[i]);
        async_write_end(op->cta, r->off[i], r->size, buffer, r->epoch);
    }
    r->op = NULL;
}

/* cp.async [dst], [src], size, src-size, ignore-src: operands dst, src, src-size or SINK, ignore-src or SINK.
 * imm: offsets of dst and src; size | wide << 8 | ignore-src is negated << 9. */
static int cp_async(Warp *w, const Ins *ins, uint32_t m)
{
    const uint32_t size = ins->imm[2] & 0xff;
    uint64_t dst[LANES];
    Copy *r = new_copy(w);
    r->mask = m;
    r->size = size;
    lane_addresses(w, ins->arg[0], ins->imm[0], ins->imm[2] >> 8 & 1, dst);
    lane_addresses(w, ins->arg[1], ins->imm[1], 1, r->from);
    uint32_t ignore = 0;
    if (ins->arg[3] != SINK)
        ignore = *(const uint32_t *)operand(w, ins->arg[3]) ^ (ins->imm[2] >> 9 & 1 ? FULL : 0);
    FOR_LANES(i, m) {
        uint32_t valid = ins->arg[2] == SINK ? size : ((const uint32_t *)operand(w, ins->arg[2]))[i];
        if (valid > size)
            fault(w, ERR_MEMORY, "cp.async of %u bytes with a src-size of %u", size, valid);
        r->valid[i] = ignore >> i & 1 ? 0 : (uint8_t)valid;
        if (r->valid[i])
            global_check(w, r->from[i], r->valid[i], 1, "cp.async");
        if (r->from[i] & (size - 1) && r->valid[i])
            global_check(w, r->from[i], size, size, "cp.async");
        Cta *c;
        r->off[i] = shared_place(w, dst[i], size, size, 1, "cp.async", &c);
        if (r->valid[i] && races(w))
            race_access(w, r->from[i], r->valid[i], TOUCH_READ, 0, clock_epoch(w), "cp.async");
    }
    for (uint32_t rest = m; rest;) { /* neighbours at once */
        uint32_t first = __builtin_ctz(rest), end = first + 1;
        while (end < LANES && rest >> end & 1 && r->off[end] == r->off[first] + (end - first) * size)
            end++;
        async_write_begin(w, w->cta, r->off[first], (end - first) * size, "cp.async");
        rest = end < LANES ? rest & ~((1u << end) - 1) : 0;
    }
    r->op = async_new(w, Q_COPY, copy_run);
    r->op->v[0] = (uint64_t)r;
    async_issue(r->op);
    return NEXT;
}

/* Lanes outside m get a record of their own. */
static void split(Warp *w, Copy *r, uint32_t m)
{
    if (!(r->mask & ~m))
        return;
    if (r->op)
        async_complete(r->op);
    Copy *other = new_copy(w), *next = other->next;
    *other = *r;
    other->next = next;
    other->mask = r->mask & ~m;
    r->mask &= m;
}

/* ---- groups -------------------------------------------------------------------------------------------------------------------------- */
/* commit_group: imm[0] 1 for bulk groups. What the lanes have issued becomes a group, also if it is empty. */
static int commit_group(Warp *w, const Ins *ins, uint32_t m)
{
    for (Copy *r = w->cp ? w->cp->copies : NULL; r; r = r->next) {
        if (r->bulk != ins->imm[0] || !(r->mask & m))
            continue;
        split(w, r, m);
        if (r->committed)
            r->age++;
        r->committed = 1;
    }
    return NEXT;
}

static void read_store(Store *s, const Cta *c)
{
    if (!s->have)
        memcpy(s->data, c->shared.data + s->off, s->bytes);
    s->have = 1;
}

static void saw_copy(Warp *w, uint32_t epoch)
{
    uint32_t *seen = &w->vc[w->cta->cluster->n_clock - 1];
    if (*seen < EPOCH_CLOCK(epoch))
        *seen = EPOCH_CLOCK(epoch);
}

/* Its lanes have waited for a copy. Returns whether the record is done with. */
static int finish(Warp *w, Copy *r, int read)
{
    Cta *c = w->cta;
    if (r->bulk) {
        int locked = !r->unlocked;
        r->unlocked = 0; /* the record stays until this returns */
        if (r->op && read)
            read_store(r->op->data, c);
        else if (r->op)
            async_complete(r->op);
        if (locked)
            async_read_end(w, c, r->off[0], r->size);
        r->unlocked = 1;
        if (!read)
            saw_copy(w, r->epoch);
        return !r->op;
    }
    if (r->op)
        async_complete(r->op);
    const uint32_t now = clock_epoch(w);
    if (r->published) { /* others order themselves after the copy's own epoch */
        saw_copy(w, r->epoch);
        return 1;
    }
    /* cp.async writes through the generic proxy: from here on it is as if the waiting threads had written. */
    FOR_LANES(i, w->lanes ? r->mask : 0) lanes_mark(w, 1u << i, r->off[i], r->size, 1);
    FOR_LANES(i, r->mask) for (uint32_t at = r->off[i]; at < r->off[i] + r->size; at++)
        if (c->shared.writer[at] == r->epoch)
            c->shared.writer[at] = now;
    return 1;
}

/* wait_group n: imm[0] 1 for bulk groups, imm[1] n, imm[2] 1 for .read, imm[3] 1 for cp.async.wait_all, which needs no commit. */
static int wait_group(Warp *w, const Ins *ins, uint32_t m)
{
    if (ins->imm[0] && !ins->imm[2] && w->cp)
        saw_copy(w, w->cp->complete);
    for (Copy *r = w->cp ? w->cp->copies : NULL, *next; r; r = next) {
        next = r->next;
        if (r->bulk != ins->imm[0] || !(r->mask & m) || (r->committed ? r->age < ins->imm[1] : !ins->imm[3]))
            continue;
        split(w, r, m);
        if (finish(w, r, ins->imm[2] != 0))
            drop_copy(w, r);
    }
    return NEXT;
}

/* ---- cp.async.mbarrier.arrive ---------------------------------------------------------------------------------------------------------- */
typedef struct { uint32_t mask; Cta *cta[LANES]; uint32_t off[LANES]; } Arrival;

static void arrival_run(Async *op)
{
    const Arrival *a = op->data;
    Warp *w = op->warp;
    uint32_t last = 0, copies = op->cta->cluster->n_clock - 1;
    for (Copy *r = w->cp ? w->cp->copies : NULL; r; r = r->next) {
        if (r->bulk || !r->published || !(r->mask & a->mask))
            continue;
        if (r->op)
            async_complete(r->op);
        if (EPOCH_CLOCK(r->epoch) > last)
            last = EPOCH_CLOCK(r->epoch);
    }
    if (w->vc[copies] > last)
        last = w->vc[copies]; /* copies that the thread has waited for meanwhile */
    FOR_LANES(i, a->mask) {
        MBarrier *b = mbar_find(w, a->cta[i], a->off[i]);
        if (b->vc[copies] < last)
            b->vc[copies] = last;
        mbar_arrive(w, b, 1, 0, 0, NULL);
    }
}

/* cp.async.mbarrier.arrive{.noinc} [a]: imm[0] offset, imm[1] wide, imm[2] noinc, imm[3] shared::cta. */
static int cp_arrive(Warp *w, const Ins *ins, uint32_t m)
{
    Arrival *a = emu_alloc(sizeof *a);
    a->mask = m;
    Async *op = async_new(w, Q_COPY, arrival_run);
    op->data = a;
    FOR_LANES(i, m) {
        uint64_t addr = lane_address(w, ins->arg[0], ins->imm[0], ins->imm[1], i);
        a->off[i] = shared_place(w, addr, 8, 8, 1, "cp.async.mbarrier.arrive", &a->cta[i]);
        MBarrier *b = mbar_use(w, a->cta[i], a->off[i], 0);
        if (!ins->imm[2])
            b->pending++;
    }
    for (Copy *r = w->cp ? w->cp->copies : NULL; r; r = r->next)
        if (!r->bulk && r->mask & m)
            r->published = 1;
    async_issue(op);
    return NEXT;
}

/* ---- copies to shared memory ------------------------------------------------------------------------------------------------------------ */
enum { STAGE = 1 << 18 };
static _Thread_local uint8_t stage[STAGE] __attribute__((aligned(64)));

static Cta *barrier_cta(const Load *load, Cluster *c, int rank)
{
    if (load->pair)
        return &c->cta[(rank & ~1) | (load->bar_rank & 1)];
    return &c->cta[load->bar_rank < 0 ? rank : load->bar_rank];
}

static void load_run(Async *op)
{
    const Load *l = op->data;
    Cluster *c = op->cta->cluster;
    const uint8_t *data = stage;
    if (l->source)
        data = l->source->shared.data + l->source_off;
    else if (l->tile)
        tile_fetch(&l->own_tile, l->off, stage);
    else
        memcpy(stage, (const void *)l->from, l->bytes);
    const uint32_t epoch = copy_epoch(c);
    if (races(op->warp) && l->tile)
        tile_access(op->warp, &l->own_tile, 0, NULL, 0, epoch, "tensor copy to shared memory");
    else if (races(op->warp) && !l->source)
        race_access(op->warp, l->from, l->bytes, TOUCH_READ, 0, epoch, "cp.async.bulk");
    FOR_LANES(rank, l->ranks) {
        Cta *t = &c->cta[rank];
        if (l->op < 0) {
            async_write_end(t, l->off, l->bytes, data, epoch);
            if (l->undefined)
                memcpy(t->shared.state + l->off, l->source->shared.state + l->source_off, l->bytes);
            continue;
        }
        const uint32_t n = type_bytes(l->type);
        for (uint32_t i = 0; i < l->bytes; i += n) {
            uint64_t old = 0, b = 0;
            memcpy(&old, t->shared.data + l->off + i, n);
            memcpy(&b, data + i, n);
            old = reduce(l->op, l->type, old, b, 0);
            memcpy(t->shared.data + l->off + i, &old, n);
        }
        shared_strong_end(t, l->off, l->bytes, epoch);
    }
    if (l->source)
        async_read_end(NULL, l->source, l->source_off, l->bytes);
    FOR_LANES(rank, l->ranks) mbar_complete_tx(c, op->warp, mbar_find(op->warp, barrier_cta(l, c, rank), l->bar_off), l->bytes, epoch);
}

/* Where a copy goes and which barrier counts it. ranks: 0, or the CTAs of a multicast. */
void load_barrier(Warp *w, Load *load, uint64_t dst, uint64_t bar, uint32_t align, int ranks, const char *what)
{
    Cta *t, *b;
    load->off = shared_place(w, dst, load->bytes, align, 0, what, &t);
    load->bar_off = shared_place(w, bar, 8, 8, 0, what, &b);
    load->bar_rank = b->rank;
    load->ranks = 1u << t->rank;
    if (load->pair && w->cta->cluster->n_ctas % 2)
        fault(w, ERR_BARRIER, "%s: cta_group::2 in a cluster of %d CTAs", what, w->cta->cluster->n_ctas);
    if (ranks) {
        if (ranks >> w->cta->cluster->n_ctas)
            fault(w, ERR_MEMORY, "%s: CTA mask %#x of a cluster of %d CTAs", what, ranks, w->cta->cluster->n_ctas);
        load->ranks = ranks;
        if (!load->pair)
            load->bar_rank = -1;
    } else if (load->pair ? (t->rank ^ b->rank) & ~1 : t != b) {
        fault(w, ERR_BARRIER, "%s: the mbarrier is in CTA %d of the cluster, the destination in CTA %d%s", what, b->rank, t->rank,
              load->pair ? ", which is not its pair" : "");
    }
}

void load_issue(Warp *w, Load *load, const char *what)
{
    Cluster *c = w->cta->cluster;
    Async *op = async_new(w, Q_COPY, load_run);
    Load *l = op->data = emu_alloc(sizeof *l);
    *l = *load;
    if (l->tile) {
        l->own_tile = *l->tile;
        l->tile = &l->own_tile;
    }
    FOR_LANES(rank, l->ranks) {
        Cta *t = &c->cta[rank];
        if (t != w->cta)
            shared_place(w, (uint64_t)rank << CTA_SHIFT | (SHARED_BASE + l->off), l->bytes, 1, 0, what, &t);
        mbar_use(w, barrier_cta(l, c, rank), l->bar_off, 1);
        queued_check(w, t, l->off, l->bytes, what);
        if (l->op < 0)
            async_write_begin(w, t, l->off, l->bytes, what);
        else
            shared_strong_begin(w, t, l->off, l->bytes, TOUCH_READ | TOUCH_WRITE | TOUCH_ASYNC, what);
    }
    if (l->source && l->op >= 0)
        shared_check_defined(w, l->source, l->source_off, l->bytes, what);
    if (l->source)
        l->undefined = async_read_begin(w, l->source, l->source_off, l->bytes, what);
    async_issue(op);
}

/* ---- copies to global memory -------------------------------------------------------------------------------------------------------------- */
static void store_run(Async *op)
{
    Store *s = op->data;
    Warp *w = op->warp;
    Copy *r = (Copy *)op->v[0];
    read_store(s, op->cta);
    r->epoch = copy_epoch(op->cta->cluster);
    if (races(w) && s->tiled)
        tile_access(w, &s->tile, s->off, s->data, s->op >= 0, r->epoch, "tensor copy to global memory");
    else if (races(w))
        race_access(w, s->to, s->bytes, TOUCH_WRITE | (memcmp(s->data, (const void *)s->to, s->bytes) ? 0 : TOUCH_SAME), s->op >= 0,
                    r->epoch, "cp.async.bulk to global memory");
    if (s->tiled) {
        tile_put(&s->tile, s->off, s->data, s->op);
    } else if (s->op < 0) {
        memcpy((void *)s->to, s->data, s->bytes);
    } else {
        const uint32_t n = type_bytes(s->type);
        for (uint32_t i = 0; i < s->bytes; i += n) {
            uint64_t b = 0;
            memcpy(&b, s->data + i, n);
            global_reduce((void *)(s->to + i), s->op, s->type, b, 0);
        }
    }
    r->op = NULL;
    if (r->unlocked) {
        if (w->cp->complete < r->epoch)
            w->cp->complete = r->epoch;
        drop_copy(w, r);
    }
}

/* A store of `bytes` at `off` of the CTA's shared memory by one lane; the caller fills it in and issues `op`. */
Store *store_new(Warp *w, uint32_t lane, uint32_t off, uint32_t bytes, const char *what, Async **op)
{
    const int undefined = async_read_begin(w, w->cta, off, bytes, what);
    Copy *r = new_copy(w);
    r->mask = 1u << lane;
    r->bulk = 1;
    r->off[0] = off;
    r->size = bytes;
    r->op = *op = async_new(w, Q_STORE, store_run);
    (*op)->v[0] = (uint64_t)r;
    Store *s = (*op)->data = emu_alloc(sizeof *s + bytes);
    s->off = off;
    s->bytes = bytes;
    s->op = -1;
    s->defined = !undefined;
    return s;
}

/* ---- cp.async.bulk, cp.reduce.async.bulk -------------------------------------------------------------------------------------------------- */
/* imm[0]: offsets of the first and the second address, 32 bits each; imm[1]: offset of the mbarrier and flags above 32 bits; imm[2]: operation
 * (-1: a copy) and type above 32 bits. */
enum { BULK_DST_WIDE = 1, BULK_SRC_WIDE = 2, BULK_BAR_WIDE = 4, BULK_FROM_SHARED = 8, BULK_TO_GLOBAL = 16 };

static void check_bulk(Warp *w, uint64_t dst, uint64_t src, uint32_t bytes, const char *what)
{
    if (bytes % 16)
        fault(w, ERR_MEMORY, "%s of %u bytes: the size must be a multiple of 16", what, bytes);
    if (dst % 16 || src % 16)
        fault(w, ERR_MEMORY, "misaligned %s: its %s %#llx must be a multiple of 16", what, dst % 16 ? "destination" : "source",
              (unsigned long long)(dst % 16 ? dst : src));
}

/* operands dst, src, size, mbarrier or SINK, CTA mask or SINK */
static int cp_bulk(Warp *w, const Ins *ins, uint32_t m)
{
    const int flags = (int)(ins->imm[1] >> 32), op = (int32_t)ins->imm[2], type = (int)(ins->imm[2] >> 32);
    const char *what = op < 0 ? "cp.async.bulk" : "cp.reduce.async.bulk";
    FOR_LANES(i, m) {
        uint64_t dst = lane_address(w, ins->arg[0], (int32_t)ins->imm[0], flags & BULK_DST_WIDE, i);
        uint64_t src = lane_address(w, ins->arg[1], ins->imm[0] >> 32, flags & BULK_SRC_WIDE, i);
        uint32_t bytes = ((const uint32_t *)operand(w, ins->arg[2]))[i];
        check_bulk(w, dst, src, bytes, what);
        Cta *c = w->cta;
        if (flags & BULK_TO_GLOBAL) {
            if (!bytes)
                continue;
            global_check(w, dst, bytes, 16, what);
            Async *a;
            Store *s = store_new(w, i, shared_place(w, src, bytes, 16, 1, what, &c), bytes, what, &a);
            if (!s->defined)
                shared_check_defined(w, c, s->off, bytes, what);
            s->to = dst;
            s->op = op;
            s->type = type;
            async_issue(a);
            continue;
        }
        Load l = {.op = op, .type = type, .bytes = bytes};
        uint32_t ranks = 0;
        if (flags & BULK_FROM_SHARED) {
            l.source = c;
            l.source_off = shared_place(w, src, bytes, 16, 1, what, &c);
        } else {
            l.from = src;
            if (bytes)
                global_check(w, src, bytes, 16, what);
        }
        if (ins->arg[4] != SINK && !(ranks = ((const uint16_t *)operand(w, ins->arg[4]))[i]))
            fault(w, ERR_MEMORY, "%s: an empty CTA mask", what);
        uint64_t bar = lane_address(w, ins->arg[3], (int32_t)ins->imm[1], flags & BULK_BAR_WIDE, i);
        load_barrier(w, &l, dst, bar, 16, ranks, what);
        if (bytes)
            load_issue(w, &l, what);
    }
    return NEXT;
}

/* cp.async.bulk.prefetch.L2 [a], size: operands a, size. It changes nothing; imm[0]: offset. */
static int cp_prefetch(Warp *w, const Ins *ins, uint32_t m)
{
    FOR_LANES(i, m) {
        uint64_t src = lane_address(w, ins->arg[0], ins->imm[0], 1, i);
        uint32_t bytes = ((const uint32_t *)operand(w, ins->arg[1]))[i];
        check_bulk(w, 0, src, bytes, "cp.async.bulk.prefetch");
        if (bytes)
            global_check(w, src, bytes, 16, "cp.async.bulk.prefetch");
    }
    return NEXT;
}

/* ---- st.async, red.async -------------------------------------------------------------------------------------------------------------------- */
typedef struct { Cta *cta; uint32_t off, bytes, bar; int op, type; uint8_t data[16]; } Remote;

static void remote_run(Async *op)
{
    const Remote *r = op->data;
    Cluster *c = op->cta->cluster;
    const uint32_t epoch = copy_epoch(c);
    if (r->op < 0) {
        async_write_end(r->cta, r->off, r->bytes, r->data, epoch);
    } else {
        uint64_t old = 0, b = 0;
        memcpy(&old, r->cta->shared.data + r->off, r->bytes);
        memcpy(&b, r->data, r->bytes);
        old = reduce(r->op, r->type, old, b, 0);
        memcpy(r->cta->shared.data + r->off, &old, r->bytes);
        shared_strong_end(r->cta, r->off, r->bytes, epoch);
    }
    mbar_complete_tx(c, op->warp, mbar_find(op->warp, r->cta, r->bar), r->bytes, epoch);
}

/* One lane's. */
static void remote_issue(Warp *w, const Remote *from, uint64_t addr, uint64_t bar, const char *what)
{
    Remote *r = emu_alloc(sizeof *r);
    Cta *b;
    *r = *from;
    Async *op = async_new(w, Q_COPY, remote_run);
    op->data = r;
    r->off = shared_place(w, addr, r->bytes, r->bytes, 0, what, &r->cta);
    r->bar = shared_place(w, bar, 8, 8, 0, what, &b);
    if (b != r->cta)
        fault(w, ERR_BARRIER, "%s: the mbarrier is in CTA %d of the cluster, the destination in CTA %d", what, b->rank, r->cta->rank);
    mbar_use(w, b, r->bar, 0);
    queued_check(w, r->cta, r->off, r->bytes, what);
    if (r->op < 0)
        async_write_begin(w, r->cta, r->off, r->bytes, what);
    else
        shared_strong_begin(w, r->cta, r->off, r->bytes, TOUCH_READ | TOUCH_WRITE, what);
    async_issue(op);
}

/* st.async [a], b..., [mbar]: operands a, mbar, b...; imm: offset of a, flags, offset of mbar, wide. */
static int st_async(Warp *w, const Ins *ins, uint32_t m)
{
    const int64_t flags = ins->imm[1];
    const uint32_t n = ACC_COUNT(flags), element = ACC_ELEMENT(flags);
    FOR_LANES(i, m) {
        Remote r = {.op = -1, .bytes = n * element};
        for (uint32_t j = 0; j < n; j++)
            memcpy(r.data + j * element, (const uint8_t *)operand(w, ins->arg[2 + j]) + i * element, element);
        remote_issue(w, &r, lane_address(w, ins->arg[0], ins->imm[0], flags & ACC_WIDE, i),
                     lane_address(w, ins->arg[1], ins->imm[2], ins->imm[3], i), "st.async");
    }
    return NEXT;
}

/* red.async [a], b, [mbar]: operands a, mbar, b; imm: both offsets, flags (bit 1: the mbarrier's address is wide), operation, type. */
static int red_async(Warp *w, const Ins *ins, uint32_t m)
{
    FOR_LANES(i, m) {
        Remote r = {.op = ins->imm[2], .type = ins->imm[3], .bytes = type_bytes(ins->imm[3])};
        memcpy(r.data, (const uint8_t *)operand(w, ins->arg[2]) + i * r.bytes, r.bytes);
        remote_issue(w, &r, lane_address(w, ins->arg[0], (int32_t)ins->imm[0], ins->imm[1] & 1, i),
                     lane_address(w, ins->arg[1], ins->imm[0] >> 32, ins->imm[1] & 2, i), "red.async");
    }
    return NEXT;
}

/* ---- a CTA's end ----------------------------------------------------------------------------------------------------------------------------- */
void async_finish(Cta *c)
{
    Launch *l = c->cluster->launch;
    for (const Async *o = c->cluster->queue[Q_COPY]; o; o = o->next)
        if (o->cta == c)
            note(l, "the kernel ends while the asynchronous copy of PTX line %d is in flight: nothing waits for it", o->ins->line);
    for (int i = 0; i < c->n_warps; i++) {
        Warp *w = &c->warp[i];
        for (Copy *r = w->cp ? w->cp->copies : NULL, *next; r; r = next) {
            next = r->next;
            if (!r->bulk && !r->published)
                note(l, "the kernel ends without waiting for the cp.async of PTX line %d", r->line);
            else if (r->bulk && !r->committed)
                note(l, "the kernel ends without committing the bulk copy to global memory of PTX line %d", r->line);
            else if (r->bulk && !r->unlocked)
                note(l, "the kernel ends without waiting for the bulk copy to global memory of PTX line %d to read its source", r->line);
            if (finish(w, r, 0))
                drop_copy(w, r);
        }
    }
}

static const Entry copies[] = {
    {"cp.async", cp_async}, {"group.commit", commit_group}, {"group.wait", wait_group}, {"cp.async.arrive", cp_arrive},
    {"cp.bulk", cp_bulk}, {"cp.bulk.prefetch", cp_prefetch}, {"st.async", st_async}, {"red.async", red_async},
};
REGISTER(copies)
