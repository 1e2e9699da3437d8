/* Ranges of global memory that a kernel may touch, and the kernel's parameters. */
#include "memory.h"

#include <stdio.h>

static int inside(const Range *r, uint64_t lo, uint64_t hi) { return lo >= r->lo && hi <= r->hi; }

/* The range that holds [lo, hi), or NULL. Neighbouring accesses mostly hit the same one. */
static const Range *find(const Launch *l, uint64_t lo, uint64_t hi)
{
    static _Thread_local int32_t last;
    if (last < l->n_range && inside(&l->range[last], lo, hi))
        return &l->range[last];
    int a = 0, b = l->n_range; /* the first range that starts after lo */
    while (a < b) {
        int mid = (a + b) / 2;
        if (l->range[mid].lo > lo)
            b = mid;
        else
            a = mid + 1;
    }
    /* Ranges may overlap, as views of one storage do: an earlier one can reach further. */
    for (int i = a - 1; i >= 0; i--)
        if (inside(&l->range[i], lo, hi)) {
            last = i;
            return &l->range[i];
        }
    return NULL;
}

static _Noreturn void out_of_range(Warp *w, const Range *r, uint64_t addr, uint64_t bytes, const char *what)
{
    fault(w, ERR_MEMORY, "%s of %llu bytes at global address %#llx is out of bounds: offset %lld of %s, which has %llu bytes", what,
          (unsigned long long)bytes, (unsigned long long)addr, (long long)(addr - r->lo), r->name, (unsigned long long)(r->hi - r->lo));
}

static _Noreturn void outside(Warp *w, uint64_t addr, uint64_t bytes, const char *what)
{
    const Launch *l = w->cta->cluster->launch;
    if (addr < 4096)
        fault(w, ERR_MEMORY, "%s of %llu bytes at global address %#llx: a null pointer", what, (unsigned long long)bytes,
              (unsigned long long)addr);
    const Range *near = NULL;
    uint64_t distance = UINT64_MAX;
    for (int i = 0; i < l->n_range; i++) {
        const Range *r = &l->range[i];
        uint64_t d = addr < r->lo ? r->lo - addr : addr >= r->hi ? addr - r->hi : 0;
        if (d < distance) {
            distance = d;
            near = r;
        }
    }
    if (near)
        out_of_range(w, near, addr, bytes, what);
    fault(w, ERR_MEMORY, "%s of %llu bytes at global address %#llx: the launch has no global memory", what, (unsigned long long)bytes,
          (unsigned long long)addr);
}

void global_name(const Launch *l, uint64_t addr, char *out, size_t n)
{
    const Range *r = find(l, addr, addr + 1);
    if (r)
        snprintf(out, n, "offset %lld of %s", (long long)(addr - r->lo), r->name);
    else
        snprintf(out, n, "global address %#llx", (unsigned long long)addr);
}

void global_check(Warp *w, uint64_t addr, uint32_t bytes, uint32_t align, const char *what)
{
    if (addr & (align - 1))
        fault(w, ERR_MEMORY, "misaligned %s at global address %#llx: %llu bytes past a multiple of %u", what, (unsigned long long)addr,
              (unsigned long long)(addr & (align - 1)), align);
    if (!find(w->cta->cluster->launch, addr, addr + bytes))
        outside(w, addr, bytes, what);
}

void global_check_lanes(Warp *w, uint32_t m, const uint64_t *addr, uint32_t bytes, uint32_t align, const char *what)
{
    uint64_t lo = UINT64_MAX, hi = 0, low_bits = 0;
    if (m == FULL) {
        for (int i = 0; i < LANES; i++) {
            lo = addr[i] < lo ? addr[i] : lo;
            hi = addr[i] > hi ? addr[i] : hi;
            low_bits |= addr[i];
        }
    } else {
        FOR_LANES(i, m) {
            lo = addr[i] < lo ? addr[i] : lo;
            hi = addr[i] > hi ? addr[i] : hi;
            low_bits |= addr[i];
        }
    }
    if (!(low_bits & (align - 1)) && find(w->cta->cluster->launch, lo, hi + bytes))
        return;
    FOR_LANES(i, m) global_check(w, addr[i], bytes, align, what);
}

void global_check_span(Warp *w, uint64_t lo, uint64_t hi, const char *what)
{
    const Launch *l = w->cta->cluster->launch;
    if (find(l, lo, hi))
        return;
    const Range *r = find(l, lo, lo + 1);
    if (r)
        out_of_range(w, r, hi - 1, hi - lo, what);
    outside(w, lo, hi - lo, what);
}

/* Bytes of the kernel's parameters, at an address in their window. */
void global_check_param(Warp *w, uint64_t addr, uint32_t bytes, const char *what)
{
    uint64_t off = addr & ~WINDOW_MASK, size = w->cta->cluster->launch->program->param_bytes;
    if (off + bytes > size)
        fault(w, ERR_MEMORY, "%s of %u bytes at offset %llu of the kernel's parameters, which have %llu bytes", what, bytes,
              (unsigned long long)off, (unsigned long long)size);
}
