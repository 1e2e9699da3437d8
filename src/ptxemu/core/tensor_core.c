/* What the tensor core's operations share: descriptors of shared memory, what they read and write, and that it is in flight. */
#include "tensor_core.h"

#include <string.h>

/* ---- shared memory descriptors ("Shared Memory Descriptor", "Canonical Layouts") ------------------------------------------------- */
Desc decode_desc(Warp *w, uint64_t bits, const char *what)
{
    static const struct { uint8_t ok, width, mask, shift; } mode[8] = {
        [0] = {1, 16, 0, 4}, [1] = {1, 128, 3, 5}, [2] = {1, 128, 7, 4}, [4] = {1, 64, 3, 4}, [6] = {1, 32, 1, 4},
    };
    uint32_t m = bits >> 61;
    if ((bits >> 46 & 7) != 1)
        fault(w, ERR_TENSOR, "%s: descriptor %#llx has %llu in bits 46 to 48; on sm_100 they are 1", what, (unsigned long long)bits,
              (unsigned long long)(bits >> 46 & 7));
    if (bits >> 53 & 0xff)
        fault(w, ERR_TENSOR, "%s: descriptor %#llx has reserved bits 53 to 60 set", what, (unsigned long long)bits);
    if (bits >> 52 & 1)
        fault(w, ERR_UNSUPPORTED, "%s: descriptor %#llx with an absolute leading-dimension address (sm_103a only)", what, (unsigned long long)bits);
    if (!mode[m].ok)
        fault(w, ERR_TENSOR, "%s: descriptor %#llx has swizzle mode %u; allowed: 0, 1, 2, 4, 6", what, (unsigned long long)bits, m);
    return (Desc){(bits & 0x3fff) << 4, (bits >> 16 & 0x3fff) << 4, (bits >> 32 & 0x3fff) << 4, bits >> 49 & 7, mode[m].width, mode[m].mask,
                  mode[m].shift};
}

static inline uint32_t swizzled(const Desc *d, uint32_t addr)
{
    return (addr ^ ((((addr >> 7) - d->base) & d->mask) << d->shift)) & 0x3ffff;
}

/* Addresses of the 16-byte chunks of `rows` rows of `per` chunks (one, two or four) along k: chunk j of row i at out[i * per + j]. */
void chunks_k(const Desc *d, uint32_t rows, uint32_t per, uint32_t *out)
{
    uint32_t step = d->width == 16 ? d->lbo : 16;
    for (uint32_t i = 0; i < rows; i++)
        for (uint32_t j = 0; j < per; j++)
            out[i * per + j] = swizzled(d, d->start + i % 8 * d->width + i / 8 * d->sbo + j * step);
}

/* The same of an operand that is contiguous along m or n: chunk j of k at out[k * n + j], n chunks for each of `depth` k. */
void chunks_mn(const Desc *d, uint32_t n, uint32_t depth, uint32_t *out)
{
    uint32_t per = d->width / 16, group = d->shift == 5 ? 4 : 8, in_atom = d->width == 16 ? d->sbo : d->lbo, along_k = d->width == 16 ? d->lbo : d->sbo;
    for (uint32_t k = 0; k < depth; k++)
        for (uint32_t j = 0; j < n; j++)
            out[k * n + j] = swizzled(d, d->start + j % per * 16 + j / per * in_atom + k % group * d->width + k / group * along_k);
}

/* ---- operations --------------------------------------------------------------------------------------------------------------- */
/* Offsets in shared memory of chunk addresses. */
void to_offsets(Warp *w, Cta *c, uint32_t *chunk, uint32_t n, const char *what)
{
    uint32_t size = c->shared.size;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t off = chunk[i] - SHARED_BASE;
        if (chunk[i] < SHARED_BASE || off + 16 > size)
            fault(w, ERR_MEMORY, "%s: the descriptor covers shared offset %d outside [0, %u)", what, (int)off, size);
        chunk[i] = off;
    }
}

/* Lock the chunks and note the issuer's reads of them: a later write is ordered after them by what the issuer commits. */
void lock_chunks(Warp *w, Part *p, const uint32_t *chunk, uint32_t n, const char *what)
{
    uint64_t used[ROWS / 64] = {0};
    uint32_t lo = ROWS, hi = 0;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t row = chunk[i] / 16;
        used[row / 64] |= (uint64_t)1 << row % 64;
        lo = row < lo ? row : lo;
        hi = row > hi ? row : hi;
    }
    int clocks = p->cta->cluster->n_clock - 1;
    uint32_t now = w->vc[w->gid];
    for (uint32_t row = lo; row <= hi;) {
        uint64_t rest = used[row / 64] >> row % 64;
        if (!rest) {
            row = (row / 64 + 1) * 64;
            continue;
        }
        row += __builtin_ctzll(rest);
        uint32_t first = row;
        while (row <= hi && used[row / 64] >> row % 64 & 1)
            row++;
        Span s = {first * 16, (row - first) * 16};
        p->undefined |= async_read_begin(w, p->cta, s.off, s.bytes, what);
        p->span[p->n_spans++] = s;
        uint32_t *r = p->cta->shared.reader + (size_t)(s.off / 4) * clocks + w->gid;
        for (uint32_t i = 0; i < s.bytes / 4; i++)
            r[(size_t)i * clocks] = now;
    }
}

void unlock(Part *p)
{
    for (int i = 0; i < p->n_spans; i++)
        async_read_end(NULL, p->cta, p->span[i].off, p->span[i].bytes);
}

/* Mark what a checked operation writes and reads in tensor memory as in flight. */
void begin_tensor(Warp *w, Part *p, int kind)
{
    Tensor *t = p->cta->tensor;
    uint32_t epoch = clock_epoch(w);
    FOR_STRIPS(s, p->writes.strips)
        for (uint32_t c = p->writes.column; c < p->writes.column + p->writes.n; c++) {
            t->writer[s][c] = epoch;
            t->kind[s][c] = kind;
            t->writing[s][c]++;
        }
    for (int i = 0; i < p->n_reads; i++)
        FOR_STRIPS(s, p->reads[i].strips)
            for (uint32_t c = p->reads[i].column; c < p->reads[i].column + p->reads[i].n; c++) {
                t->core_reader[s][c] = epoch;
                t->reading[s][c]++;
            }
}

void end_tensor(Part *p)
{
    Tensor *t = p->cta->tensor;
    FOR_STRIPS(s, p->writes.strips)
        for (uint32_t c = p->writes.column; c < p->writes.column + p->writes.n; c++)
            t->writing[s][c]--;
    for (int i = 0; i < p->n_reads; i++)
        FOR_STRIPS(s, p->reads[i].strips)
            for (uint32_t c = p->reads[i].column; c < p->reads[i].column + p->reads[i].n; c++)
                t->reading[s][c]--;
}

/* The CTAs of an operation, the even one first; the second is NULL for .cta_group::1. */
void ctas_of(Warp *w, int group, Cta *out[2], const char *what)
{
    tensor_group(w, group);
    out[0] = w->cta;
    out[1] = NULL;
    if (group == 2) {
        Cta *peer = tensor_peer(w, what);
        out[w->cta->rank & 1] = w->cta;
        out[~w->cta->rank & 1] = peer;
    }
}

