/* Reads of shared memory that may still be queued when a copy overwrites what they read.
 *
 * An arrival at an mbarrier waits for no load: where the loads before it queue behind others, the copy that it lets go can be faster. So a generic
 * read counts as done for a later write of the asynchronous proxy once an instruction has used a register that it loaded, or past a fence, a
 * release that ptxas makes of one, or a bar.sync of its warp; what releases it until then does not order it. Other generic writes are not asked:
 * they take the same way as the reads.
 *
 * The lowering marks the reads that may be queued at an arrival (queued.py), and the instructions that touch registers which hold what they loaded.
 * Such a read is pending until it is done. The first release meanwhile notes it with the words that it read; it stays there with the clock at which
 * it was done.
 */
#include "memory.h"

#include <stdlib.h>

typedef struct {
    uint32_t serial;
    int32_t line;
    uint32_t holders;  /* registers that hold what it loaded */
    uint32_t late;     /* released: 1 + its place in the log */
    int n_runs;
    struct { Cta *cta; uint32_t off, bytes; } run[LANES];
} Pending;

typedef struct {
    uint32_t done;     /* its warp's clock then */
    int32_t read, release; /* PTX lines */
} Late;

struct Queued {
    Pending *pending;
    uint32_t n, room, serial;
    uint32_t *holder;  /* per 32 bytes of registers, at a register's start: serial of the read */
    Late *log;
    uint32_t n_log, log_room;
};

void queued_free(Warp *w)
{
    if (!w->queued)
        return;
    free(w->queued->pending);
    free(w->queued->holder);
    free(w->queued->log);
    free(w->queued);
}

/* Shared.queued: whether there is something in each block of words; then, for each word and warp of the cluster, 1 + the place of the warp's last
 * such read in its log. Most of it is never touched. */
enum { BLOCK = 256 };

static uint32_t *late_of(const Shared *s, uint32_t warps, uint32_t word) { return s->queued + s->size / 4 / BLOCK + 1 + (size_t)word * warps; }

static Pending *find(struct Queued *q, uint32_t serial)
{
    for (uint32_t i = 0; i < q->n; i++)
        if (q->pending[i].serial == serial)
            return &q->pending[i];
    return NULL;
}

static void done(Warp *w, Pending *p)
{
    struct Queued *q = w->queued;
    if (p->late)
        q->log[p->late - 1].done = w->vc[w->gid];
    *p = q->pending[--q->n];
}

void queued_done(Warp *w)
{
    while (w->queued && w->queued->n)
        done(w, w->queued->pending);
}

static void used(Warp *w, int32_t at)
{
    Pending *p = find(w->queued, w->queued->holder[at >> 5]);
    w->queued->holder[at >> 5] = 0;
    if (p)
        done(w, p);
}

/* A register is about to hold something else, which waits for the load where nothing holds what it brings. */
static void overwritten(Warp *w, int32_t at)
{
    Pending *p = find(w->queued, w->queued->holder[at >> 5]);
    w->queued->holder[at >> 5] = 0;
    if (p && !--p->holders)
        done(w, p);
}

void queued_touch(Warp *w, const Ins *ins)
{
    struct Queued *q = w->queued;
    uint32_t moved = 0;
    for (int k = 0; k < ins->n; k++) {
        const int32_t at = ins->arg[k];
        if (at < 0 || !q->holder[at >> 5] || (ins->form[k] & FORM_WRITTEN && !(ins->form[k] & FORM_READ)))
            continue;
        if (ins->flags & INS_RENAMES && (!moved || moved == q->holder[at >> 5]))
            moved = q->holder[at >> 5];
        else
            used(w, at);
    }
    Pending *p = moved ? find(q, moved) : NULL;
    if (p)
        p->holders++; /* the destination, also where it is what held it before */
    for (int k = 0; k < ins->n; k++) {
        const int32_t at = ins->arg[k];
        if (at < 0 || !(ins->form[k] & FORM_WRITTEN))
            continue;
        if (q->holder[at >> 5])
            overwritten(w, at);
        if (p)
            q->holder[at >> 5] = moved;
    }
}

void queued_load(Warp *w, const Ins *ins, uint32_t m, const uint64_t *addr, uint32_t bytes)
{
    const Program *program = w->cta->cluster->launch->program;
    if (!w->cta->cluster->launch->queued_reads)
        return;
    if (!w->queued) {
        w->queued = emu_alloc(sizeof *w->queued);
        w->queued->holder = emu_alloc((program->reg_bytes / 32 + 1) * sizeof *w->queued->holder);
    }
    struct Queued *q = w->queued;
    if (q->n == q->room) {
        q->room = q->room ? 2 * q->room : 16;
        q->pending = realloc(q->pending, q->room * sizeof *q->pending);
    }
    Pending *p = &q->pending[q->n];
    p->serial = ++q->serial;
    p->line = ins->line;
    p->holders = p->late = 0;
    p->n_runs = 0;
    FOR_LANES(i, m) {
        Cta *c;
        if (addr[i] >> 32 && (addr[i] & WINDOW_MASK) != WINDOW_SHARED)
            continue; /* of a generic load: in another space */
        if (!(addr[i] & WINDOW_MASK) && ACC_SPACE(ins->imm[1]) == SPACE_GENERIC)
            continue;
        const uint32_t off = shared_offset(w, (uint32_t)addr[i], bytes, 1, &c);
        const int last = p->n_runs - 1;
        if (last >= 0 && p->run[last].cta == c && off - p->run[last].off <= p->run[last].bytes) { /* next to it, or what it has */
            if (off + bytes > p->run[last].off + p->run[last].bytes)
                p->run[last].bytes = off + bytes - p->run[last].off;
            continue;
        }
        p->run[p->n_runs].cta = c;
        p->run[p->n_runs].off = off;
        p->run[p->n_runs++].bytes = bytes;
    }
    for (int k = 0; k < ins->n && p->n_runs; k++)
        if (ins->form[k] & FORM_WRITTEN && ins->arg[k] >= 0) {
            q->holder[ins->arg[k] >> 5] = p->serial;
            p->holders++;
        }
    q->n += p->holders > 0;
}

static void note_late(Warp *w, Pending *p)
{
    struct Queued *q = w->queued;
    if (q->n_log == q->log_room) {
        q->log_room = q->log_room ? 2 * q->log_room : 64;
        q->log = realloc(q->log, q->log_room * sizeof *q->log);
    }
    q->log[q->n_log] = (Late){.done = UINT32_MAX, .read = p->line, .release = w->at->line};
    p->late = ++q->n_log;
    const uint32_t warps = w->cta->cluster->n_warps;
    for (int r = 0; r < p->n_runs; r++) {
        Shared *s = &p->run[r].cta->shared;
        if (!s->queued)
            s->queued = emu_alloc((s->size / 4 / BLOCK + 1 + (s->size + 3u) / 4 * warps) * sizeof *s->queued);
        for (uint32_t word = p->run[r].off / 4; word <= (p->run[r].off + p->run[r].bytes - 1) / 4; word++) {
            s->queued[word / BLOCK] = 1;
            late_of(s, warps, word)[w->gid] = p->late;
        }
    }
}

void queued_release(Warp *w)
{
    struct Queued *q = w->queued;
    for (uint32_t i = 0; i < q->n; i++)
        if (!q->pending[i].late)
            note_late(w, &q->pending[i]);
}

static const Warp *warp_of(const Cluster *c, uint32_t gid) { return &c->cta[gid / c->cta->n_warps].warp[gid % c->cta->n_warps]; }

/* Those of the warp itself, which nothing has released. */
static void check_own(Warp *w, Cta *c, uint32_t off, uint32_t bytes, const char *what)
{
    const struct Queued *q = w->queued;
    for (uint32_t i = 0; i < q->n; i++)
        for (int r = 0; r < q->pending[i].n_runs; r++) {
            const uint32_t from = q->pending[i].run[r].off, to = from + q->pending[i].run[r].bytes;
            if (!q->pending[i].late && q->pending[i].run[r].cta == c && from < off + bytes && off < to)
                fault(w, ERR_RACE, "%s to shared offset %u by warp %d, which read it at PTX line %d: a read that may still be queued, as its value is "
                      "not used before the copy (missing fence.proxy.async)", what, from < off ? off : from, w->id, q->pending[i].line);
        }
}

void queued_check(Warp *w, Cta *c, uint32_t off, uint32_t bytes, const char *what)
{
    if (w->queued)
        check_own(w, c, off, bytes, what);
    if (!c->shared.queued)
        return;
    const uint32_t warps = c->cluster->n_warps;
    const uint32_t first = off / 4, last = (off + bytes - 1) / 4;
    for (uint32_t word = first; word <= last; word++) {
        if (!c->shared.queued[word / BLOCK]) {
            word |= BLOCK - 1;
            continue;
        }
        uint32_t *late = late_of(&c->shared, warps, word);
        for (uint32_t i = 0; i < warps; i++) {
            if (!late[i])
                continue;
            const Warp *by = warp_of(c->cluster, i);
            const Late *l = &by->queued->log[late[i] - 1];
            if (l->done > w->vc[i])
                fault(w, ERR_RACE, "%s to shared offset %u by warp %d overwrites what warp %d of CTA %d read at PTX line %d: a read that may still be "
                      "queued, as its value is not used before the arrival at PTX line %d (missing fence.proxy.async before the arrival)", what,
                      word * 4, w->id, by->id, by->cta->rank, l->read, l->release);
            late[i] = 0; /* what overwrites the copy is ordered after the copy */
        }
        if (word % BLOCK == BLOCK - 1 && word - first >= BLOCK - 1)
            c->shared.queued[word / BLOCK] = 0;
    }
}
