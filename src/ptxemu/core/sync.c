/* Order over strong accesses: releases and acquires of locations, and fences (PTX ISA: "Memory Consistency Model").
 *
 * Every location that a release has written holds a clock. A release stores the warp's vector there, a relaxed write the vector of the
 * warp's last fence; an acquire joins it, and a relaxed read joins it at the warp's next fence. What is never released is never held.
 */
#include "memory.h"

#include <stdlib.h>

typedef struct Place {
    uint64_t key;
    struct Place *next;
    uint32_t vc[];
} Place;

enum { BUCKETS = 1024, MOST = 1 << 16 }; /* past so many locations one clock serves all others: no order is lost then, only found too often */

struct Places {
    Place *bucket[BUCKETS];
    uint32_t n;
};

uint64_t shared_key(const Cta *c, uint32_t off) { return WINDOW_SHARED | (uint64_t)c->rank << CTA_SHIFT | (off & ~3u); }

static Place *find(Cluster *c, uint64_t key, int create)
{
    if (!c->places) {
        if (!create)
            return NULL;
        c->places = emu_alloc(sizeof *c->places);
    }
    for (int again = 0;; again++) {
        Place **at = &c->places->bucket[(key * 0x9e3779b97f4a7c15u) >> 54];
        for (Place *p = *at; p; p = p->next)
            if (p->key == key)
                return p;
        if (c->places->n >= MOST && !again) {
            key = 0;
            continue;
        }
        if (!create)
            return NULL;
        Place *p = emu_alloc(sizeof *p + c->n_clock * sizeof(uint32_t));
        p->key = key;
        p->next = *at;
        *at = p;
        c->places->n++;
        return p;
    }
}

void sync_free(Cluster *c)
{
    for (int i = 0; c->places && i < BUCKETS; i++)
        for (Place *p = c->places->bucket[i], *next; p; p = next) {
            next = p->next;
            free(p);
        }
    free(c->places);
}

static uint32_t *new_clock(const Warp *w) { return emu_alloc(w->cta->cluster->n_clock * sizeof(uint32_t)); }

void sync_read(Warp *w, uint64_t key, int acquire)
{
    if (!(key & WINDOW_MASK))
        race_acquire(w, key, acquire);
    Place *p = find(w->cta->cluster, key, 0);
    if (!p)
        return;
    if (acquire) {
        clock_acquire(w, p->vc);
        return;
    }
    if (!w->observed)
        w->observed = new_clock(w);
    clock_join(w->cta->cluster, w->observed, p->vc);
}

void sync_write(Warp *w, uint64_t key, int release, int keep)
{
    if (!(key & WINDOW_MASK))
        race_release(w, key, release, keep);
    Cluster *c = w->cta->cluster;
    if (release) /* ptxas puts a fence before it */
        queued_done(w);
    Place *p = find(c, key, release || w->fenced);
    if (!p)
        return;
    if (!keep && p->key)
        memset(p->vc, 0, c->n_clock * sizeof *p->vc);
    if (w->fenced)
        clock_join(c, p->vc, w->fenced);
    if (release)
        clock_release(w, p->vc);
}

/* fence, membar: what relaxed reads saw is acquired, what relaxed writes publish from here on is all that came before. */
void memory_fence(Warp *w)
{
    race_fence(w);
    queued_done(w);
    if (w->observed) {
        clock_acquire(w, w->observed);
        memset(w->observed, 0, w->cta->cluster->n_clock * sizeof *w->observed);
    }
    if (!w->fenced)
        w->fenced = new_clock(w);
    clock_release(w, w->fenced);
}
