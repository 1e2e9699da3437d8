/* Order between the lanes of one warp over shared memory, where it is asked for (Launch.warp_races).
 *
 * Lanes that run together are not in step for it: what one writes another may read only past a bar.warp.sync of both, or past something that
 * the reader's warp acquires (a barrier, an mbarrier, an acquire), as the PTX ISA's memory model has it. Each warp counts such events; a lane
 * knows up to which of them it has seen each other lane's accesses.
 */
#include "memory.h"

#include <stdlib.h>

typedef struct Lanes { uint32_t tick, seen[LANES][LANES]; } Lanes;

/* Who accessed a place last, and when. */
typedef struct Touched { uint32_t tick, mask; const Warp *warp; } Touched;

void lanes_init(Cta *c)
{
    if (!c->cluster->launch->warp_races)
        return;
    const size_t n = (c->shared.size + 1023u) / 1024u * 1024u;
    c->shared.lane_writer = emu_alloc(n * sizeof(Touched));
    c->shared.lane_reader = emu_alloc(n / 4 * sizeof(Touched));
    for (int i = 0; i < c->n_warps; i++) {
        c->warp[i].lanes = emu_alloc(sizeof(Lanes));
        c->warp[i].lanes->tick = 1;
    }
}

void lanes_free(Cta *c)
{
    free(c->shared.lane_writer);
    free(c->shared.lane_reader);
    for (int i = 0; i < c->n_warps; i++)
        free(c->warp[i].lanes);
}

/* The lanes `into` are ordered after all that the lanes `from` did or know. */
void lanes_join(Warp *w, uint32_t into, uint32_t from)
{
    Lanes *l = w->lanes;
    uint32_t known[LANES] = {0};
    FOR_LANES(m, from) {
        for (int k = 0; k < LANES; k++)
            known[k] = l->seen[m][k] > known[k] ? l->seen[m][k] : known[k];
        known[m] = l->tick;
    }
    FOR_LANES(i, into) for (int k = 0; k < LANES; k++) l->seen[i][k] = known[k] > l->seen[i][k] ? known[k] : l->seen[i][k];
    l->tick++;
}

/* A lane of t that accessed its place with no order before one of the lanes m; -1: none. */
static int unordered(const Warp *w, const Touched *t, uint32_t m)
{
    if (t->warp != w)
        return -1;
    FOR_LANES(a, t->mask) FOR_LANES(b, m)
        if (a != b && w->lanes->seen[b][a] < t->tick)
            return (int)a;
    return -1;
}

static void check(Warp *w, const Touched *t, uint32_t m, uint32_t off, const char *what, const char *before)
{
    const int lane = unordered(w, t, m);
    if (lane >= 0)
        fault(w, ERR_RACE, "%s of shared offset %u by lane %d is not ordered after the %s by lane %d of the same warp (missing bar.warp.sync)", what,
              off, __builtin_ctz(m & ~(1u << lane) ? m & ~(1u << lane) : m), before, lane);
}

/* m accesses the bytes at `off` of its own CTA. in: what is written, NULL for a read. */
static void check_place(Warp *w, uint32_t m, uint32_t off, uint32_t bytes, const uint8_t *in)
{
    const Shared *s = &w->cta->shared;
    const char *what = in ? "write" : "read";
    for (uint32_t i = 0; i < bytes; i++)
        if (!in || s->data[off + i] != in[i]) /* writing what is there already changes nothing */
            check(w, &s->lane_writer[off + i], m, off + i, what, "write");
    for (uint32_t word = off / 4; in && word <= (off + bytes - 1) / 4; word++)
        if (memcmp(s->data + off, in, bytes))
            check(w, &s->lane_reader[word], m, word * 4, what, "read");
}

/* Lanes of one store that write different values to a byte: which of them stays is open. A write by all lanes together counts as one. */
static void check_each_other(Warp *w, uint32_t m, const uint32_t *off, uint32_t bytes, const uint8_t *in)
{
    FOR_LANES(a, m) FOR_LANES(b, m & ~((2u << a) - 1)) {
        const uint32_t from = off[a] > off[b] ? off[a] : off[b], to = (off[a] < off[b] ? off[a] : off[b]) + bytes;
        for (uint32_t at = from; at < to; at++)
            if (in[a * bytes + at - off[a]] != in[b * bytes + at - off[b]])
                fault(w, ERR_RACE, "lanes %d and %d write different values to shared offset %u at once: either may stay", (int)a, (int)b, at);
    }
}

void lanes_mark(Warp *w, uint32_t m, uint32_t off, uint32_t bytes, int write)
{
    const Shared *s = &w->cta->shared;
    const uint32_t tick = w->lanes->tick;
    for (uint32_t i = off; write && i < off + bytes; i++)
        s->lane_writer[i] = (Touched){tick, m, w};
    for (uint32_t word = off / 4; !write && word <= (off + bytes - 1) / 4; word++) {
        Touched *t = &s->lane_reader[word];
        if (t->warp == w && t->tick == tick)
            t->mask |= m;
        else
            *t = (Touched){tick, m, w};
    }
}

/* An access by the lanes m, `bytes` each; `together`: every live lane of the warp takes part in each. Called before a write, of `in`. */
void lanes_access(Warp *w, uint32_t m, const uint64_t *addr, uint32_t bytes, const uint8_t *in, int together)
{
    uint32_t off[LANES], own = 0;
    FOR_LANES(i, m) {
        Cta *c;
        off[i] = shared_place(w, addr[i], bytes, 1, 0, in ? "store" : "load", &c);
        own |= (uint32_t)(c == w->cta) << i;
    }
    if (in)
        check_each_other(w, own, off, bytes, in);
    FOR_LANES(i, own) check_place(w, together ? w->live : 1u << i, off[i], bytes, in ? in + i * bytes : NULL);
    FOR_LANES(i, own) lanes_mark(w, together ? w->live : 1u << i, off[i], bytes, in != NULL);
}
