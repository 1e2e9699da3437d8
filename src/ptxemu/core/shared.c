/* Shared memory, its shadow, and the order of accesses to it (PTX ISA: "Memory Consistency Model", "Proxies").
 *
 * Every byte has a state and the epoch of its last write; every word has, for each warp of the cluster, the clock of its last generic
 * read. A generic access must be ordered after the last write, a write also after the reads. An access of the asynchronous proxy
 * (TMA, wgmma, tcgen05) to bytes written through the generic proxy must also have a fence.proxy.async between: one whose warp had the
 * write in its past, and which is in the past of the access.
 */
#include "memory.h"

#include <stdlib.h>
#include <string.h>

void shared_init(Cta *c, uint32_t bytes)
{
    Shared *s = &c->shared;
    size_t n = (bytes + 1023u) / 1024u * 1024u;
    s->size = bytes;
    s->data = emu_alloc(n);
    s->state = emu_alloc(n);
    s->writer = emu_alloc(n * sizeof *s->writer);
    s->reader = emu_alloc(n / 4 * (c->cluster->n_clock - 1) * sizeof *s->reader);
    s->locks = emu_alloc(n / 16 * sizeof *s->locks);
    lanes_init(c);
}

void shared_free(Cta *c)
{
    free(c->shared.data);
    free(c->shared.state);
    free(c->shared.writer);
    free(c->shared.reader);
    free(c->shared.locks);
    free(c->shared.queued);
    free(c->shared.strong);
    lanes_free(c);
}

uint32_t shared_offset(Warp *w, uint32_t addr, uint32_t bytes, uint32_t align, Cta **cta)
{
    uint32_t rank = addr >> CTA_SHIFT;
    Cta *c = w->cta;
    if (rank != (uint32_t)c->rank) {
        if (rank >= (uint32_t)c->cluster->n_ctas)
            fault(w, ERR_MEMORY, "shared address %#x names CTA %u of a cluster of %d", addr, rank, c->cluster->n_ctas);
        c = &c->cluster->cta[rank];
    }
    addr &= (1u << CTA_SHIFT) - 1;
    uint32_t off = addr - SHARED_BASE;
    if (addr < SHARED_BASE || off + (uint64_t)bytes > c->shared.size)
        fault(w, ERR_MEMORY, "shared access at offset %d (+%u) outside [0, %u)", (int)off, bytes, c->shared.size);
    if (align > 1 && off % align)
        fault(w, ERR_MEMORY, "misaligned %u-byte shared access at offset %u", align, off);
    *cta = c;
    return off;
}

void check_present(Warp *w, const Cta *c, const char *what)
{
    uint32_t live = 0;
    for (int i = 0; i < c->n_warps; i++)
        live |= c->warp[i].live;
    if (!live)
        fault(w, ERR_MEMORY, "%s: CTA %d of the cluster has left, and its shared memory with it (missing barrier.cluster before its end)",
              what, c->rank);
}

/* Nothing there may be in flight or an mbarrier. */
static _Noreturn void bad_read(Warp *w, Cta *c, uint32_t off, uint32_t bytes, const char *what)
{
    for (uint32_t i = off; i < off + bytes; i++)
        switch (c->shared.state[i]) {
        case ST_INFLIGHT:
            fault(w, ERR_RACE, "%s of shared offset %u while an asynchronous write to it is in flight (missing mbarrier wait)", what, i);
        case ST_MBAR:
            fault(w, ERR_MEMORY, "%s of shared offset %u, which holds a live mbarrier", what, i);
        }
    fault(w, ERR_EMU, "%s of shared offset %u", what, off);
}

int shared_defined(const Cta *c, uint32_t off, uint32_t bytes)
{
    const uint8_t *st = c->shared.state + off;
    uint64_t differ = 0;
    uint32_t i = 0;
    for (; i + 8 <= bytes; i += 8) {
        uint64_t eight;
        memcpy(&eight, st + i, 8);
        differ |= eight ^ 0x0101010101010101u * ST_VALID;
    }
    for (; i < bytes; i++)
        differ |= st[i] ^ ST_VALID;
    return !differ;
}

/* Returns 1 unless all is defined. */
static int check_readable(Warp *w, Cta *c, uint32_t off, uint32_t bytes, const char *what)
{
    if (shared_defined(c, off, bytes))
        return 0;
    uint8_t any = 0;
    for (uint32_t i = off; i < off + bytes; i++)
        any |= c->shared.state[i];
    if (any & (ST_MBAR | ST_INFLIGHT))
        bad_read(w, c, off, bytes, what);
    return 1;
}

void shared_check_defined(Warp *w, Cta *c, uint32_t off, uint32_t bytes, const char *what)
{
    if (check_readable(w, c, off, bytes, what))
        for (uint32_t i = off; i < off + bytes; i++)
            if (c->shared.state[i] == ST_NONE)
                fault(w, ERR_MEMORY, "%s of uninitialised shared memory at offset %u (%u bytes)", what, i, off + bytes - i);
}

static inline int same16(const uint32_t *e, uint32_t value)
{
    uint32_t differ = 0;
    for (int i = 0; i < 16; i++)
        differ |= e[i] ^ value;
    return !differ;
}

/* The last write of every byte must be ordered before the warp's present. */
static void check_after_writes(Warp *w, Cta *c, uint32_t off, uint32_t bytes, const char *what)
{
    const uint32_t *e = c->shared.writer + off;
    uint32_t last = 0; /* neighbours mostly share an epoch */
    for (uint32_t i = 0; i < bytes;) {
        if (i + 16 <= bytes && same16(e + i, last)) {
            i += 16;
            continue;
        }
        if (e[i] == last) {
            i++;
            continue;
        }
        last = e[i];
        if (clock_has(w, last))
            continue;
        int who = EPOCH_WHO(last) - 1;
        if (who == c->cluster->n_clock - 1)
            fault(w, ERR_RACE, "%s of shared offset %u by warp %d is not ordered after the asynchronous copy to it (missing mbarrier wait)",
                  what, off + i, w->id);
        fault(w, ERR_RACE, "%s of shared offset %u by warp %d is not ordered after the write by warp %d (missing barrier)", what, off + i,
              w->id, who % c->n_warps);
    }
}

/* No other warp's generic read of these words may be unordered with the warp's present. */
static void check_after_reads(Warp *w, Cta *c, uint32_t off, uint32_t bytes, const char *what)
{
    typedef uint32_t Eight __attribute__((vector_size(32), aligned(4), may_alias));
    const int n = c->cluster->n_clock - 1;
    const uint32_t *vc = w->vc;
    Eight eight = {0};
    uint32_t late = 0;
    for (uint32_t word = off / 4; word <= (off + bytes - 1) / 4; word++) {
        const uint32_t *r = c->shared.reader + (size_t)word * n;
        int i = 0;
        for (; i + 8 <= n; i += 8)
            eight |= (Eight)(*(const Eight *)(r + i) > *(const Eight *)(vc + i));
        for (; i < n; i++)
            late |= r[i] > vc[i];
    }
    for (int i = 0; i < 8; i++)
        late |= eight[i];
    for (uint32_t word = off / 4; late && word <= (off + bytes - 1) / 4; word++) {
        const uint32_t *r = c->shared.reader + (size_t)word * n;
        for (int i = 0; i < n; i++)
            if (r[i] > w->vc[i] && i != w->gid && i >= c->cluster->n_warps)
                fault(w, ERR_RACE, "%s of shared offset %u by warp %d is not ordered after the wgmma that reads it, of warps %d to %d (missing "
                      "wgmma.wait_group, or barrier after it)", what, word * 4, w->id, (i - c->cluster->n_warps) % (c->n_warps / 4) * 4,
                      (i - c->cluster->n_warps) % (c->n_warps / 4) * 4 + 3);
            else if (r[i] > w->vc[i] && i != w->gid)
                fault(w, ERR_RACE, "%s of shared offset %u by warp %d is not ordered after the read by warp %d (missing barrier)", what,
                      word * 4, w->id, i % c->n_warps);
    }
}

static void mark_read(Warp *w, Cta *c, uint32_t off, uint32_t bytes)
{
    int n = c->cluster->n_clock - 1;
    uint32_t now = w->vc[w->gid];
    for (uint32_t word = off / 4; word <= (off + bytes - 1) / 4; word++)
        c->shared.reader[(size_t)word * n + w->gid] = now;
}

static void check_unlocked(Warp *w, Cta *c, uint32_t off, uint32_t bytes, const char *what)
{
    for (uint32_t row = off / 16; row <= (off + bytes - 1) / 16; row++)
        if (c->shared.locks[row])
            fault(w, ERR_RACE, "%s of shared offset %u while an asynchronous read of it is in flight", what, row * 16);
}

static void check_writable(Warp *w, Cta *c, uint32_t off, uint32_t bytes, const char *what)
{
    check_unlocked(w, c, off, bytes, what);
    uint8_t any = 0;
    for (uint32_t i = off; i < off + bytes; i++)
        any |= c->shared.state[i];
    for (uint32_t i = off; any & (ST_MBAR | ST_INFLIGHT) && i < off + bytes; i++) {
        if (c->shared.state[i] == ST_MBAR)
            fault(w, ERR_MEMORY, "%s of shared offset %u, which holds a live mbarrier", what, i);
        if (c->shared.state[i] == ST_INFLIGHT)
            fault(w, ERR_RACE, "%s of shared offset %u while an asynchronous write to it is in flight", what, i);
    }
}

int shared_read(Warp *w, Cta *c, uint32_t off, uint32_t bytes, void *out)
{
    int undefined = check_readable(w, c, off, bytes, "read");
    check_after_writes(w, c, off, bytes, "read");
    mark_read(w, c, off, bytes);
    memcpy(out, c->shared.data + off, bytes);
    return undefined;
}

void shared_write(Warp *w, Cta *c, uint32_t off, uint32_t bytes, const void *in)
{
    check_writable(w, c, off, bytes, "write");
    check_after_writes(w, c, off, bytes, "overwrite");
    check_after_reads(w, c, off, bytes, "write");
    uint32_t now = clock_epoch(w);
    memcpy(c->shared.data + off, in, bytes);
    memset(c->shared.state + off, ST_VALID, bytes);
    if (c->shared.strong)
        memset(c->shared.strong + off, 0, bytes);
    for (uint32_t i = 0; i < bytes; i++)
        c->shared.writer[off + i] = now;
}


/* ---- proxy fences ---------------------------------------------------------------------------------------------------------- */
void proxy_fence(Warp *w)
{
    Cluster *c = w->cta->cluster;
    queued_done(w);
    FenceLog *log = &c->fence[w->gid];
    if (log->n == log->room) {
        log->room = log->room ? 2 * log->room : 16;
        log->at = realloc(log->at, log->room * sizeof *log->at);
    }
    uint32_t *vc = emu_alloc(c->n_clock * sizeof *vc);
    memcpy(vc, w->vc, c->n_clock * sizeof *vc);
    log->at[log->n++].vc = vc;
    w->vc[w->gid]++; /* what the warp writes from here on is not covered */
}

/* Is there a fence after the write of this epoch and before the warp's present? `loose`: a fence after the write, ordered or not. */
static int fenced(Warp *w, uint32_t epoch, int *loose)
{
    Cluster *c = w->cta->cluster;
    uint32_t who = EPOCH_WHO(epoch) - 1, clock = EPOCH_CLOCK(epoch);
    for (int x = 0; x < c->n_warps; x++) {
        const FenceLog *log = &c->fence[x];
        int lo = 0, hi = log->n; /* the first fence of warp x that has the write in its past */
        while (lo < hi) {
            int mid = (lo + hi) / 2;
            if (log->at[mid].vc[who] >= clock)
                hi = mid;
            else
                lo = mid + 1;
        }
        if (lo == log->n)
            continue;
        *loose = x;
        if (x == w->gid || w->vc[x] > log->at[lo].vc[x])
            return 1;
    }
    return 0;
}

int proxy_fenced(Warp *w, uint32_t epoch)
{
    int loose;
    return fenced(w, epoch, &loose);
}

static void check_fenced(Warp *w, Cta *c, uint32_t off, uint32_t bytes, const char *what)
{
    const uint32_t *e = c->shared.writer + off;
    uint32_t last = 0, copies = c->cluster->n_clock;
    for (uint32_t i = 0; i < bytes; i++) {
        if (e[i] == last || !e[i])
            continue;
        last = e[i];
        int loose = -1;
        if (EPOCH_WHO(last) == copies || fenced(w, last, &loose))
            continue;
        int who = (EPOCH_WHO(last) - 1) % c->n_warps;
        if (loose < 0)
            fault(w, ERR_PROXY, "%s by warp %d of shared offset %u, written by warp %d through the generic proxy, with no fence.proxy.async "
                  "in between", what, w->id, off + i, who);
        fault(w, ERR_PROXY, "%s by warp %d of shared offset %u, written by warp %d through the generic proxy: the fence.proxy.async by warp "
              "%d is not ordered before it", what, w->id, off + i, who, loose % c->n_warps);
    }
}

/* ---- strong accesses ---------------------------------------------------------------------------------------------------------- */
/* Strong accesses (relaxed, acquire, release, atomics) do not race with each other, but they do with weak ones. The caller reads or writes the
 * bytes. touch: TOUCH_*; TOUCH_ASYNC: a reduction by the asynchronous proxy, which also needs a fence after generic writes. */
void shared_strong_begin(Warp *w, Cta *c, uint32_t off, uint32_t bytes, int touch, const char *what)
{
    if (touch & TOUCH_READ && touch & TOUCH_WRITE)
        shared_check_defined(w, c, off, bytes, what);
    else if (touch & TOUCH_READ)
        check_readable(w, c, off, bytes, what);
    if (touch & TOUCH_WRITE)
        check_writable(w, c, off, bytes, what);
    for (uint32_t i = off; i < off + bytes; i++)
        if (!c->shared.strong || !c->shared.strong[i]) {
            check_after_writes(w, c, i, 1, what);
            if (touch & TOUCH_ASYNC)
                check_fenced(w, c, i, 1, what);
        }
    if (touch & TOUCH_WRITE)
        check_after_reads(w, c, off, bytes, what);
}

/* After a strong write. */
void shared_strong_end(Cta *c, uint32_t off, uint32_t bytes, uint32_t epoch)
{
    Shared *s = &c->shared;
    if (!s->strong)
        s->strong = emu_alloc((s->size + 1023u) / 1024u * 1024u);
    memset(s->state + off, ST_VALID, bytes);
    memset(s->strong + off, 1, bytes);
    for (uint32_t i = off; i < off + bytes; i++)
        s->writer[i] = epoch;
}

/* ---- asynchronous proxy ------------------------------------------------------------------------------------------------------ */
int async_read_begin(Warp *w, Cta *c, uint32_t off, uint32_t bytes, const char *what)
{
    const uint32_t *e = c->shared.writer + off;
    uint32_t differ = 0;
    for (uint32_t i = 0; i < bytes; i++)
        differ |= e[i] ^ e[0];
    const int undefined = check_readable(w, c, off, bytes, what);
    uint32_t judged = differ ? bytes : 1; /* bytes of one write share its verdict */
    check_after_writes(w, c, off, judged, what);
    check_fenced(w, c, off, judged, what);
    for (uint32_t row = off / 16; row <= (off + bytes - 1) / 16; row++)
        c->shared.locks[row]++;
    return undefined;
}

void async_read_end(Warp *w, Cta *c, uint32_t off, uint32_t bytes)
{
    for (uint32_t row = off / 16; row <= (off + bytes - 1) / 16; row++)
        c->shared.locks[row]--;
    if (w)
        mark_read(w, c, off, bytes);
}

/* A read of many rows of 16 bytes by a wgmma, which is complete for those who have `clock` in that component of their vectors; clock 0: another
 * warp has marked it. Returns 1 unless all is defined. Mostly a row was last written as a whole, in one of a few epochs: those that passed are
 * remembered. */
int async_read_rows(Warp *w, Cta *c, const uint32_t *row, int n, int component, uint32_t clock, const char *what)
{
    enum { KNOWN = 8 };
    typedef uint32_t Epochs __attribute__((vector_size(64), aligned(4), may_alias));
    Epochs mixed = {0};
    uint32_t known[KNOWN] = {0}, last = 0, any = 0;
    uint64_t state = 0;
    const int slots = c->cluster->n_clock - 1;
    int next = 0;
    for (int i = 0; i < n; i++) {
        uint64_t now[2];
        memcpy(now, c->shared.state + row[i], 16);
        state |= (now[0] ^ 0x0101010101010101u * ST_VALID) | (now[1] ^ 0x0101010101010101u * ST_VALID);
    }
    for (int i = 0; state && i < n; i++)
        check_readable(w, c, row[i], 16, what);
    for (int i = 0; i < n; i++) {
        const uint32_t *e = c->shared.writer + row[i];
        mixed |= *(const Epochs *)e ^ e[0];
        if (e[0] == last)
            continue;
        last = e[0];
        int found = 0;
        for (int j = 0; j < KNOWN; j++)
            found |= known[j] == last;
        if (!found) {
            check_after_writes(w, c, row[i], 16, what);
            check_fenced(w, c, row[i], 16, what);
            known[next++ % KNOWN] = last;
        }
    }
    for (int j = 0; j < 16; j++)
        any |= mixed[j];
    for (int i = 0; any && i < n; i++) {
        check_after_writes(w, c, row[i], 16, what);
        check_fenced(w, c, row[i], 16, what);
    }
    for (int i = 0; clock && i < n; i++)
        for (int j = 0; j < 4; j++)
            c->shared.reader[(size_t)(row[i] / 4 + j) * slots + component] = clock;
    return state != 0;
}

void async_write_begin(Warp *w, Cta *c, uint32_t off, uint32_t bytes, const char *what)
{
    check_writable(w, c, off, bytes, what);
    check_after_writes(w, c, off, bytes, what);
    check_after_reads(w, c, off, bytes, what);
    memset(c->shared.state + off, ST_INFLIGHT, bytes);
}

void async_write_end(Cta *c, uint32_t off, uint32_t bytes, const void *in, uint32_t epoch)
{
    memcpy(c->shared.data + off, in, bytes);
    memset(c->shared.state + off, ST_VALID, bytes);
    if (c->shared.strong)
        memset(c->shared.strong + off, 0, bytes);
    for (uint32_t i = 0; i < bytes; i++)
        c->shared.writer[off + i] = epoch;
    int n = c->cluster->n_clock - 1;
    memset(c->shared.reader + (size_t)(off / 4) * n, 0, (size_t)((bytes + 3) / 4) * n * sizeof *c->shared.reader);
}
