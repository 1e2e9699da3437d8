/* Order of accesses to global memory (PTX ISA: "Memory Consistency Model"): two weak accesses that overlap, one of them a write, or a weak and a
 * strong one, must be ordered: by the program, by barriers inside a cluster, by a release that an acquire has observed elsewhere.
 *
 * A page keeps cells of 16 bytes, split where smaller accesses come, with the last write and two of the reads since: of different clusters where
 * there are such, so that a write that races with reads of several CTAs always meets one. Inside a cluster the warps' vectors tell the order.
 * Between clusters it is what was acquired: an acquire (or a relaxed read and a fence) of a location that another cluster released logs that
 * cluster's vector at the reader's present clock; who has that clock in its vector has the log entry in its past.
 *
 * Clusters run on several threads: pages have locks, released locations one for all. An entry of the log belongs to its cluster's thread.
 */
#include "memory.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PAGE_LOG = 12, PAGE = 1 << PAGE_LOG, BUCKETS = 1 << 14, PLACES = 1 << 12 };

/* Who: the cluster's number + 1 above 32 bits, the epoch below them, and whether the access was strong. 0: nobody. */
#define STRONG ((uint64_t)1 << 63)
#define WHO(cluster, epoch) ((uint64_t)((cluster)->index + 1) << 32 | (epoch))
#define CLUSTER_OF(who) ((uint32_t)(((who) & ~STRONG) >> 32) - 1)

typedef struct { uint64_t writer, reader[2]; } Cell;

typedef struct Page {
    uint64_t key;
    struct Page *next;
    Cell *cell;
    int log;  /* of a cell's bytes */
    char lock;
} Page;

/* A cluster's vector as it was published. */
typedef struct Published { uint32_t cluster, n; struct Published *next; uint32_t vc[]; } Published;
typedef struct Location { uint64_t key; struct Location *next; Published *all; } Location;

struct Races {
    uint64_t serial;      /* of all that were ever made */
    Page *bucket[BUCKETS];
    pthread_mutex_t lock; /* of what follows */
    Location *place[PLACES];
    volatile int any;
};

/* What a warp of this cluster has acquired of another cluster. */
typedef struct Acquired {
    struct Acquired *next;
    int gid;
    uint32_t clock;   /* of that warp then; UINT32_MAX: its next fence acquires it */
    uint32_t cluster;
    uint32_t vc[];
} Acquired;

struct Races *race_new(void)
{
    static uint64_t made;
    struct Races *r = emu_alloc(sizeof *r);
    r->serial = __atomic_add_fetch(&made, 1, __ATOMIC_RELAXED);
    pthread_mutex_init(&r->lock, NULL);
    return r;
}

void race_free(struct Races *r)
{
    for (int i = 0; r && i < BUCKETS; i++)
        for (Page *p = r->bucket[i], *next; p; p = next) {
            next = p->next;
            free(p->cell);
            free(p);
        }
    for (int i = 0; r && i < PLACES; i++)
        for (Location *l = r->place[i], *next; l; l = next) {
            next = l->next;
            for (Published *p = l->all, *after; p; p = after) {
                after = p->next;
                free(p);
            }
            free(l);
        }
    if (r)
        pthread_mutex_destroy(&r->lock);
    free(r);
}

void race_forget(Cluster *c)
{
    for (Acquired *a = c->acquired, *next; a; a = next) {
        next = a->next;
        free(a);
    }
}

/* ---- order ---------------------------------------------------------------------------------------------------------------------- */
static int in_past(const Warp *w, const Acquired *a)
{
    return a->clock != UINT32_MAX && (a->gid == w->gid || w->vc[a->gid] >= a->clock);
}

/* Is what `who` did ordered before the warp's present? */
static int ordered(const Warp *w, uint64_t who)
{
    const Cluster *c = w->cta->cluster;
    const uint32_t epoch = (uint32_t)who, cluster = CLUSTER_OF(who);
    if (cluster == c->index)
        return EPOCH_WHO(epoch) == (uint32_t)w->gid + 1 || clock_has(w, epoch);
    for (const Acquired *a = c->acquired; a; a = a->next)
        if (a->cluster == cluster && a->vc[EPOCH_WHO(epoch) - 1] >= EPOCH_CLOCK(epoch) && in_past(w, a))
            return 1;
    return 0;
}

/* ---- pages ---------------------------------------------------------------------------------------------------------------------- */
static Page *page_of(struct Races *r, uint64_t key, int log)
{
    Page **bucket = &r->bucket[(key * 0x9e3779b97f4a7c15u) >> 50];
    Page *first = __atomic_load_n(bucket, __ATOMIC_ACQUIRE), *made = NULL;
    for (;;) {
        for (Page *p = first; p; p = p->next)
            if (p->key == key) {
                if (made)
                    free(made->cell);
                free(made);
                return p;
            }
        if (!made) {
            made = emu_alloc(sizeof *made);
            made->key = key;
            made->log = log;
            made->cell = emu_alloc((PAGE >> log) * sizeof(Cell));
        }
        made->next = first;
        if (__atomic_compare_exchange_n(bucket, &first, made, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
            return made;
    }
}

/* Neighbouring accesses mostly lie in one page. */
static inline Page *last_page(struct Races *r, uint64_t key, int log)
{
    static _Thread_local struct { uint64_t serial, key; Page *page; } last;
    if (last.serial != r->serial || last.key != key) {
        last.page = page_of(r, key, log);
        last.key = key;
        last.serial = r->serial;
    }
    return last.page;
}

static void lock(Page *p)
{
    while (__atomic_test_and_set(&p->lock, __ATOMIC_ACQUIRE))
        ;
}

static void unlock(Page *p) { __atomic_clear(&p->lock, __ATOMIC_RELEASE); }

static void split(Page *p, int log)
{
    Cell *small = emu_alloc((PAGE >> log) * sizeof(Cell));
    for (int i = 0; i < PAGE >> log; i++)
        small[i] = p->cell[i >> (p->log - log)];
    free(p->cell);
    p->cell = small;
    p->log = log;
}

/* Names who it was for a report. */
static _Noreturn void race(Warp *w, uint64_t addr, const char *what, int write, uint64_t who, int other_writes)
{
    const Cluster *c = w->cta->cluster;
    const Launch *l = c->launch;
    const uint32_t cluster = CLUSTER_OF(who), gid = EPOCH_WHO((uint32_t)who) - 1, warps = w->cta->n_warps;
    const uint32_t nx = l->grid[0] / l->cluster[0], ny = l->grid[1] / l->cluster[1], rank = gid / warps;
    const int copy = gid >= (uint32_t)c->n_warps;
    uint32_t x[3] = {cluster % nx * l->cluster[0], cluster / nx % ny * l->cluster[1], cluster / (nx * ny) * l->cluster[2]};
    if (!copy) {
        x[0] += rank % l->cluster[0];
        x[1] += rank / l->cluster[0] % l->cluster[1];
        x[2] += rank / (l->cluster[0] * l->cluster[1]);
    }
    char by[64], place[160];
    if (copy)
        snprintf(by, sizeof by, "an asynchronous copy of CTA (%u, %u, %u)", x[0], x[1], x[2]);
    else
        snprintf(by, sizeof by, "warp %u of CTA (%u, %u, %u)", gid % warps, x[0], x[1], x[2]);
    global_name(l, addr, place, sizeof place);
    fault(w, ERR_RACE, "%s at %s by warp %d is not ordered after the %s by %s (missing %s): a %s there", what, place, w->id,
          other_writes ? "write" : "read", by,
          cluster != c->index ? "release and acquire between CTAs" : copy ? "wait for the copy" : "barrier", write ? "write" : "read");
}

/* A copy that writes once more what a copy of its own cluster wrote cannot be told from none: so do the lanes of a warp that issue one each, as in
 * CUTLASS's kernels. */
static int repeats(const Cluster *c, int touch, uint64_t who)
{
    return touch & TOUCH_SAME && CLUSTER_OF(who) == c->index && EPOCH_WHO((uint32_t)who) == (uint32_t)c->n_clock;
}

/* Check and note one access by `who`: TOUCH_READ, TOUCH_WRITE. */
void race_access(Warp *w, uint64_t lo, uint64_t bytes, int touch, int strong, uint32_t epoch, const char *what)
{
    struct Races *r = w->cta->cluster->launch->race;
    const uint64_t hi = lo + bytes, me = WHO(w->cta->cluster, epoch) | (strong ? STRONG : 0);
    const uint64_t odd = lo | bytes;
    const int log = !(odd & 15) ? 4 : !(odd & 3) ? 2 : !(odd & 1) ? 1 : 0, write = (touch & TOUCH_WRITE) != 0;
    while (lo < hi) {
        Page *p = last_page(r, lo >> PAGE_LOG, log);
        const uint64_t end = (lo | (PAGE - 1)) + 1 < hi ? (lo | (PAGE - 1)) + 1 : hi;
        uint64_t good = 0, bad = 0, seen = 0; /* judged last: writers, and readers that are in the past */
        int bad_write = 0;
        lock(p);
        if (p->log > log)
            split(p, log);
        Cell *c = p->cell + ((lo & (PAGE - 1)) >> p->log), *last = p->cell + ((end - 1) & (PAGE - 1)) / (1u << p->log);
        for (; c <= last; c++) {
            const uint64_t x = c->writer;
            if (x && x != good && x != me && !(strong && x & STRONG)) {
                if (!ordered(w, x) && !repeats(w->cta->cluster, touch, x)) {
                    bad = x;
                    bad_write = 1;
                    break;
                }
                good = x;
            }
            if (write) {
                for (int k = 0; k < 2; k++) {
                    const uint64_t y = c->reader[k];
                    if (!y || y == seen || (strong && y & STRONG))
                        continue;
                    if (!ordered(w, y)) {
                        bad = y;
                        break;
                    }
                    seen = y;
                }
                if (bad)
                    break;
                *c = (Cell){.writer = me};
            } else if (c->reader[0] != me && c->reader[1] != me) {
                const uint64_t y = c->reader[0];
                const int k = !y || y == seen || ordered(w, y) ? 0 : 1;
                seen = k ? seen : y;
                if (k && c->reader[1] && CLUSTER_OF(c->reader[0]) == CLUSTER_OF(me) && !ordered(w, c->reader[1]))
                    c->reader[0] = me; /* keep the other cluster's */
                else
                    c->reader[k] = me;
            }
        }
        const uint64_t at = ((uint64_t)p->key << PAGE_LOG) + ((uint64_t)(c - p->cell) << p->log);
        unlock(p);
        if (bad)
            race(w, at < lo ? lo : at, what, write, bad, bad_write);
        lo = end;
    }
}

/* A warp's access; lanes that follow each other in memory make one. */
void race_lanes(Warp *w, uint32_t m, const uint64_t *addr, uint32_t bytes, int touch, int strong, const char *what)
{
    const uint32_t epoch = clock_epoch(w);
    for (uint32_t rest = m; rest;) {
        const uint32_t first = __builtin_ctz(rest);
        uint32_t end = first + 1;
        while (end < LANES && rest >> end & 1 && addr[end] == addr[first] + (uint64_t)(end - first) * bytes)
            end++;
        race_access(w, addr[first], (uint64_t)(end - first) * bytes, touch, strong, epoch, what);
        rest = end < LANES ? rest & ~((1u << end) - 1) : 0;
        while (rest && __builtin_ctz(rest) == (int)end && addr[end] == addr[end - 1]) /* lanes of one address */
            rest &= rest - 1, end++;
    }
}

/* ---- releases and acquires between clusters ---------------------------------------------------------------------------------------- */
static Location *location(struct Races *r, uint64_t key, int create)
{
    Location **at = &r->place[(key * 0x9e3779b97f4a7c15u) >> 52];
    for (Location *l = *at; l; l = l->next)
        if (l->key == key)
            return l;
    if (!create)
        return NULL;
    Location *l = emu_alloc(sizeof *l);
    l->key = key;
    l->next = *at;
    r->any = 1;
    return *at = l;
}

static void publish(Location *l, uint32_t cluster, uint32_t n, const uint32_t *vc)
{
    Published *p = l->all;
    while (p && p->cluster != cluster)
        p = p->next;
    if (!p) {
        p = emu_alloc(sizeof *p + n * sizeof *p->vc);
        p->cluster = cluster;
        p->n = n;
        p->next = l->all;
        l->all = p;
    }
    for (uint32_t i = 0; i < n; i++)
        if (p->vc[i] < vc[i])
            p->vc[i] = vc[i];
}

/* A strong write of a location. keep: it continues the release sequences there. */
void race_release(Warp *w, uint64_t key, int release, int keep)
{
    Cluster *c = w->cta->cluster;
    struct Races *r = c->launch->race;
    const uint32_t *vc = release ? w->vc : w->fenced;
    if (!r || (!vc && !r->any))
        return;
    pthread_mutex_lock(&r->lock);
    Location *l = location(r, key, vc != NULL);
    for (Published *p = l && !keep ? l->all : NULL, *next; p; p = next) {
        next = p->next;
        free(p);
        l->all = next;
    }
    if (vc) {
        publish(l, c->index, c->n_clock, vc);
        for (const Acquired *a = c->acquired; a; a = a->next)
            if (a->clock != UINT32_MAX && (a->gid == w->gid ? a->clock <= vc[w->gid] : vc[a->gid] >= a->clock))
                publish(l, a->cluster, c->n_clock, a->vc);
    }
    pthread_mutex_unlock(&r->lock);
}

/* A strong read of a location. */
void race_acquire(Warp *w, uint64_t key, int acquire)
{
    Cluster *c = w->cta->cluster;
    struct Races *r = c->launch->race;
    if (!r || !r->any)
        return;
    pthread_mutex_lock(&r->lock);
    const Location *l = location(r, key, 0);
    for (const Published *p = l ? l->all : NULL; p; p = p->next) {
        int known = p->cluster == c->index;
        for (const Acquired *a = c->acquired; a && !known; a = a->next)
            known = a->cluster == p->cluster && (in_past(w, a) || (!acquire && a->gid == w->gid)) && !memcmp(a->vc, p->vc, p->n * sizeof *p->vc);
        if (known)
            continue;
        Acquired *a = emu_alloc(sizeof *a + c->n_clock * sizeof *a->vc);
        a->gid = w->gid;
        a->clock = acquire ? w->vc[w->gid] : UINT32_MAX;
        a->cluster = p->cluster;
        memcpy(a->vc, p->vc, p->n * sizeof *a->vc);
        a->next = c->acquired;
        c->acquired = a;
    }
    pthread_mutex_unlock(&r->lock);
}

/* A fence: what relaxed reads have seen is acquired. */
void race_fence(Warp *w)
{
    for (Acquired *a = w->cta->cluster->acquired; a; a = a->next)
        if (a->gid == w->gid && a->clock == UINT32_MAX)
            a->clock = w->vc[w->gid];
}
