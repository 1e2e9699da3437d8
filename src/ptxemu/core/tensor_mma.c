/* The tensor core's asynchronous operations: tcgen05.mma, .cp, .shift and .commit (PTX ISA: "TensorCore 5th Generation Matrix Multiply and
 * accumulate Operations", "Tensor Memory Data Movement Instructions", "Async Synchronization Operations").
 *
 * An operation is checked where it is issued, and until it completes its operands in shared memory are locked and its tensor memory counts
 * as being written or read. They complete in the order of their issue, which is more than the ISA promises for some pairs
 * ("Pipelined tcgen05 Instructions") but what CUTLASS's kernels rely on (tcgen05.cp after the MMAs that read the same columns).
 * Products are exact in float; they are summed in order of k, then added to D.
 */
#include "tensor.h"

#include <math.h>
#include <string.h>

enum { KIND_F16, KIND_TF32, KIND_F8F6F4, KIND_I8 };
enum { MAX_M = 128, MAX_N = 256, MAX_CHUNKS = 2 * MAX_N, ROWS = 1 << 14 }; /* of a CTA; ROWS: 16-byte rows that a descriptor can name */

/* ---- shared memory descriptors ("Shared Memory Descriptor", "Canonical Layouts") ------------------------------------------------- */
typedef struct {
    uint32_t start, lbo, sbo, base;
    uint32_t width;  /* bytes of a row of the swizzle atom; 16: no swizzle */
    uint32_t mask, shift; /* address bits from 7 on that are xored in, and where */
} Desc;

static Desc decode_desc(Warp *w, uint64_t bits, const char *what)
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
        fault(w, ERR_UNSUPPORTED, "%s: descriptor %#llx with an absolute leading-dimension address (sm_103 only)", what, (unsigned long long)bits);
    if (!mode[m].ok)
        fault(w, ERR_TENSOR, "%s: descriptor %#llx has swizzle mode %u; allowed: 0, 1, 2, 4, 6", what, (unsigned long long)bits, m);
    return (Desc){(bits & 0x3fff) << 4, (bits >> 16 & 0x3fff) << 4, (bits >> 32 & 0x3fff) << 4, bits >> 49 & 7, mode[m].width, mode[m].mask,
                  mode[m].shift};
}

static inline uint32_t swizzled(const Desc *d, uint32_t addr)
{
    return (addr ^ ((((addr >> 7) - d->base) & d->mask) << d->shift)) & 0x3ffff;
}

/* Addresses of the 16-byte chunks of `rows` rows of `per` chunks (one or two) along k: chunk j of row i at out[i * per + j]. */
static void chunks_k(const Desc *d, uint32_t rows, uint32_t per, uint32_t *out)
{
    uint32_t step = d->width == 16 ? d->lbo : 16;
    for (uint32_t i = 0; i < rows; i++)
        for (uint32_t j = 0; j < per; j++)
            out[i * per + j] = swizzled(d, d->start + i % 8 * d->width + i / 8 * d->sbo + j * step);
}

/* The same of an operand that is contiguous along m or n: chunk j of k at out[k * n + j], n chunks for each of `depth` k. */
static void chunks_mn(const Desc *d, uint32_t n, uint32_t depth, uint32_t *out)
{
    uint32_t per = d->width / 16, group = d->shift == 5 ? 4 : 8, in_atom = d->width == 16 ? d->sbo : d->lbo, along_k = d->width == 16 ? d->lbo : d->sbo;
    for (uint32_t k = 0; k < depth; k++)
        for (uint32_t j = 0; j < n; j++)
            out[k * n + j] = swizzled(d, d->start + j % per * 16 + j / per * in_atom + k % group * d->width + k / group * along_k);
}

/* ---- operations --------------------------------------------------------------------------------------------------------------- */
/* A contiguous part of an operand in shared memory. */
typedef struct { uint32_t off, bytes; } Span;

/* What an operation reads from one CTA's shared memory, and its tensor memory there. */
typedef struct {
    Cta *cta;
    uint32_t a[2 * MAX_M], b[MAX_CHUNKS]; /* offsets of 16-byte chunks */
    int n_spans, undefined;               /* undefined: some of what it reads is */
    Span span[3 * MAX_N];
    Area writes, reads; /* strips 0: none */
} Part;

typedef struct {
    int kind, m, n, k, bytes;     /* m, n: of the whole MMA; bytes: of an element */
    int a_format, b_format, d_format;
    int a_mn, b_mn, a_tensor, negate, saturate, accumulate;
    float scale;
    uint32_t d, a_address;        /* tensor memory */
    uint32_t lanes_off[8];        /* disable-output-lane */
    int group;
    Part part[2];
} Mma;

/* Offsets in shared memory of chunk addresses. */
static void to_offsets(Warp *w, Cta *c, uint32_t *chunk, uint32_t n, const char *what)
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
static void lock_chunks(Warp *w, Part *p, const uint32_t *chunk, uint32_t n, const char *what)
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

static void unlock(Part *p)
{
    for (int i = 0; i < p->n_spans; i++)
        async_read_end(NULL, p->cta, p->span[i].off, p->span[i].bytes);
}

/* Mark what a checked operation writes and reads in tensor memory as in flight. */
static void begin_tensor(Warp *w, Part *p, int kind)
{
    Tensor *t = p->cta->tensor;
    uint32_t epoch = clock_epoch(w);
    FOR_STRIPS(s, p->writes.strips)
        for (uint32_t c = p->writes.column; c < p->writes.column + p->writes.n; c++) {
            t->writer[s][c] = epoch;
            t->kind[s][c] = kind;
            t->writing[s][c]++;
        }
    FOR_STRIPS(s, p->reads.strips)
        for (uint32_t c = p->reads.column; c < p->reads.column + p->reads.n; c++) {
            t->core_reader[s][c] = epoch;
            t->reading[s][c]++;
        }
}

static void end_tensor(Part *p)
{
    Tensor *t = p->cta->tensor;
    FOR_STRIPS(s, p->writes.strips)
        for (uint32_t c = p->writes.column; c < p->writes.column + p->writes.n; c++)
            t->writing[s][c]--;
    FOR_STRIPS(s, p->reads.strips)
        for (uint32_t c = p->reads.column; c < p->reads.column + p->reads.n; c++)
            t->reading[s][c]--;
}

/* The CTAs of an operation, the even one first; the second is NULL for .cta_group::1. */
static void ctas_of(Warp *w, int group, Cta *out[2], const char *what)
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

/* ---- tcgen05.mma: decoding ------------------------------------------------------------------------------------------------------- */
static const char *const kind_name[] = {"f16", "tf32", "f8f6f4", "i8"};

/* The instruction descriptor ("Instruction descriptor") and the shape rules ("Matrix Shape"). */
static void decode_idesc(Warp *w, Mma *o, uint32_t bits)
{
    o->m = (bits >> 24 & 31) << 4;
    o->n = (bits >> 17 & 63) << 3;
    o->d_format = bits >> 4 & 3;
    o->a_format = bits >> 7 & 7;
    o->b_format = bits >> 10 & 7;
    o->negate = (bits >> 13 ^ bits >> 14) & 1;
    o->a_mn = bits >> 15 & 1;
    o->b_mn = bits >> 16 & 1;
    o->saturate = bits >> 3 & 1;
    o->bytes = o->kind == KIND_F16 ? 2 : o->kind == KIND_TF32 ? 4 : 1;
    o->k = 32 / o->bytes;
    const char *name = kind_name[o->kind];
    if (bits >> 2 & 1)
        fault(w, ERR_TENSOR, "instruction descriptor %#x asks for a sparse A, which needs tcgen05.mma.sp", bits);
    if (bits >> 6 & 1 || bits >> 23 & 1 || bits >> 29 & 1 || bits >> 30)
        fault(w, ERR_TENSOR, "instruction descriptor %#x has reserved bits set (6, 23, 29 to 31)", bits);
    int ok = 1;
    switch (o->kind) {
    case KIND_F16:
        ok = o->a_format == o->b_format && o->a_format < 2 && (o->d_format == 1 || (o->d_format == 0 && o->a_format == 0));
        break;
    case KIND_TF32:
        ok = o->a_format == 2 && o->b_format == 2 && o->d_format == 1;
        break;
    case KIND_F8F6F4:
        ok = o->d_format < 2;
        if (o->a_format > 1 || o->b_format > 1)
            fault(w, ERR_UNSUPPORTED, "tcgen05.mma.kind::f8f6f4 with 4-bit or 6-bit elements (instruction descriptor %#x)", bits);
        break;
    default:
        ok = o->a_format < 2 && o->b_format < 2 && o->d_format == 2 && !(bits >> 13 & 3);
    }
    if (!ok || (o->saturate && o->kind != KIND_I8))
        fault(w, ERR_TENSOR, "instruction descriptor %#x: types (A %d, B %d, D %d) or flags not allowed for kind::%s", bits, o->a_format,
              o->b_format, o->d_format, name);
    int step = o->group == 2 ? 16 : 8;
    if (o->kind == KIND_I8)
        step = o->group == 2 ? 32 : o->n > 32 ? 16 : 8;
    if (o->bytes == 1 && o->b_mn)
        step = o->group == 2 ? 32 : 16;
    int m_ok = o->group == 2 ? o->m == 128 || o->m == 256 : o->m == 64 || o->m == 128;
    if (!m_ok || o->n < step || o->n > MAX_N || o->n % step)
        fault(w, ERR_TENSOR, "tcgen05.mma.kind::%s with M %d, N %d is not a shape of .cta_group::%d (M %s; N in steps of %d up to 256)", name, o->m,
              o->n, o->group, o->group == 2 ? "128 or 256" : "64 or 128", step);
}

static void check_major(Warp *w, const Mma *o, const Desc *d, int mn, const char *what)
{
    if (mn && (o->kind == KIND_TF32) != (d->shift == 5))
        fault(w, ERR_TENSOR, "%s: a transposed operand of kind::%s must %s 128-byte swizzling with 32-byte atomicity", what, kind_name[o->kind],
              o->kind == KIND_TF32 ? "have" : "not have");
}

/* Both operands' chunks in one CTA's shared memory: its own rows of A and, of a pair, its half of B. */
static void operands(Warp *w, Mma *o, Part *p, uint64_t a_desc, uint64_t b_desc)
{
    static const char a_name[] = "tcgen05.mma operand A", b_name[] = "tcgen05.mma operand B";
    uint32_t rows = o->m / o->group, columns = o->n / o->group;
    if (!o->a_tensor) {
        Desc d = decode_desc(w, a_desc, a_name);
        check_major(w, o, &d, o->a_mn, a_name);
        if (o->a_mn)
            chunks_mn(&d, rows * o->bytes / 16, o->k, p->a);
        else
            chunks_k(&d, rows, 2, p->a);
        to_offsets(w, p->cta, p->a, 2 * rows, a_name);
        lock_chunks(w, p, p->a, 2 * rows, a_name);
    }
    Desc d = decode_desc(w, b_desc, b_name);
    check_major(w, o, &d, o->b_mn, b_name);
    if (o->b_mn && columns * o->bytes % 16)
        fault(w, ERR_TENSOR, "%s: a transposed B of %u columns a CTA is no whole number of 16-byte chunks", b_name, columns);
    if (o->b_mn)
        chunks_mn(&d, columns * o->bytes / 16, o->k, p->b);
    else
        chunks_k(&d, columns, 2, p->b);
    to_offsets(w, p->cta, p->b, 2 * columns, b_name);
    lock_chunks(w, p, p->b, 2 * columns, b_name);
}

static inline int layout_b(const Mma *o) { return o->group == 2 && o->m == 128; }

/* Lane of the first row, of operand `address`, by "Data Path Layout Organization". */
static uint32_t first_lane(Warp *w, const Mma *o, uint32_t address, const char *what)
{
    uint32_t lane = address >> 16;
    int half = o->group == 1 && o->m == 64; /* layout F */
    if (lane != 0 && !(half && lane == 16))
        fault(w, ERR_TENSOR, "%s at tensor memory lane %u; M %d with .cta_group::%d allows lane 0%s", what, lane, o->m, o->group, half ? " or 16" : "");
    return lane;
}

/* Lane of row r of a CTA's part of D (column half 0) or A. */
static inline uint32_t lane_of(const Mma *o, uint32_t lane, uint32_t r) { return o->group == 1 && o->m == 64 ? lane + r / 16 * 32 + r % 16 : r; }

static int enabled(const Mma *o, int cta, uint32_t lane) { return !(o->lanes_off[cta * 4 + lane / 32] >> lane % 32 & 1); }

/* Check D and A in one CTA's tensor memory. */
static void tensor_operands(Warp *w, Mma *o, int which)
{
    Part *p = &o->part[which];
    static const char d_name[] = "tcgen05.mma", a_name[] = "tcgen05.mma operand A";
    uint32_t lane = first_lane(w, o, o->d, d_name), strips = o->group == 1 && o->m == 64 ? 0x55u << lane / 16 : 0xffu;
    p->writes = (Area){strips, o->d & 0xffff, layout_b(o) ? o->n / 2 : o->n};
    tensor_allocated(w, p->cta, p->writes.column, p->writes.n, d_name);
    if (o->a_tensor) {
        if (first_lane(w, o, o->a_address, a_name) != lane)
            fault(w, ERR_TENSOR, "tcgen05.mma: operand A at lane %u and D at lane %u of tensor memory must have the same lane", o->a_address >> 16, lane);
        p->reads = (Area){strips, o->a_address & 0xffff, 8};
        tensor_allocated(w, p->cta, p->reads.column, p->reads.n, a_name);
        tensor_after_writes(w, p->cta, p->reads, 1, a_name);
        FOR_STRIPS(s, strips)
            for (uint32_t c = p->reads.column; c < p->reads.column + 8; c++)
                if (p->cta->tensor->writing[s][c] && p->cta->tensor->kind[s][c] == BY_MMA)
                    fault(w, ERR_RACE, "tcgen05.mma reads operand A at tensor memory lane %u, column %u, that a tcgen05.mma in flight writes (missing "
                          "tcgen05.commit and mbarrier wait)", s * 16, c);
    }
    tensor_after_writes(w, p->cta, p->writes, 1, d_name);
    tensor_after_reads(w, p->cta, p->writes, 1, d_name);
}

typedef float Cell __attribute__((may_alias)); /* an f32 accumulator in its cell */

/* ---- tcgen05.mma: computing ------------------------------------------------------------------------------------------------------ */
static float f8_value(uint8_t v, int e5)
{
    int bits = e5 ? 2 : 3, exponent = v >> bits & (e5 ? 31 : 15), fraction = v & ((1 << bits) - 1), bias = e5 ? 15 : 7;
    float r;
    if (e5 && exponent == 31)
        r = fraction ? NAN : INFINITY;
    else if (!e5 && exponent == 15 && fraction == 7)
        r = NAN;
    else if (exponent)
        r = ldexpf(1.0f + ldexpf(fraction, -bits), exponent - bias);
    else
        r = ldexpf(fraction, 1 - bias - bits);
    return v & 0x80 ? -r : r;
}

static float f8_table[2][256];

__attribute__((constructor)) static void fill_f8(void)
{
    for (int e5 = 0; e5 < 2; e5++)
        for (int v = 0; v < 256; v++)
            f8_table[e5][v] = f8_value(v, e5);
}

/* The elements of a 16-byte chunk as floats (int8 as float: exact). */
static void convert(const Mma *o, int format, const void *chunk, float *out)
{
    if (o->kind == KIND_TF32) {
        const uint32_t *u = chunk;
        for (int i = 0; i < 4; i++) {
            uint32_t v = u[i] & 0xffffe000u;
            memcpy(&out[i], &v, 4);
        }
    } else if (o->kind == KIND_F16 && format == 1) {
        const uint16_t *u = chunk;
        for (int i = 0; i < 8; i++) {
            uint32_t v = (uint32_t)u[i] << 16;
            memcpy(&out[i], &v, 4);
        }
    } else if (o->kind == KIND_F16) {
        _Float16 h[8];
        memcpy(h, chunk, 16);
        for (int i = 0; i < 8; i++)
            out[i] = h[i];
    } else if (o->kind == KIND_F8F6F4) {
        for (int i = 0; i < 16; i++)
            out[i] = f8_table[format][((const uint8_t *)chunk)[i]];
    } else {
        for (int i = 0; i < 16; i++)
            out[i] = format ? ((const int8_t *)chunk)[i] : ((const uint8_t *)chunk)[i];
    }
}

enum { MAX_K = 32 };

/* An operand as rows of k (`by_k` 0: out[i * MAX_K + k]) or as columns (out[k * MAX_N + i]); `mn`: contiguous along i in memory. */
static void gather(const Mma *o, int format, int mn, const uint8_t *shared, const uint32_t *chunk, uint32_t n, float *out, uint32_t by_i, uint32_t by_k)
{
    float v[16];
    uint32_t t = 16 / o->bytes;
    if (!mn) {
        for (uint32_t i = 0; i < n; i++)
            for (uint32_t j = 0; j < 2; j++) {
                convert(o, format, shared + chunk[2 * i + j], v);
                for (uint32_t e = 0; e < t; e++)
                    out[i * by_i + (j * t + e) * by_k] = v[e];
            }
        return;
    }
    uint32_t per = n / t;
    for (uint32_t k = 0; k < (uint32_t)o->k; k++)
        for (uint32_t j = 0; j < per; j++) {
            convert(o, format, shared + chunk[k * per + j], v);
            for (uint32_t e = 0; e < t; e++)
                out[(j * t + e) * by_i + k * by_k] = v[e];
        }
}

/* D's elements [from, from + n) of one row into its cells. */
static void store_row(const Mma *o, uint32_t *cell, const float *sum, uint32_t n)
{
    if (o->kind == KIND_I8) {
        for (uint32_t j = 0; j < n; j++) {
            int64_t v = (int64_t)sum[j] + (o->accumulate ? (int32_t)cell[j] : 0);
            if (o->saturate)
                v = v > INT32_MAX ? INT32_MAX : v < INT32_MIN ? INT32_MIN : v;
            cell[j] = (uint32_t)v;
        }
        return;
    }
    const float sign = o->negate ? -1.0f : 1.0f;
    if (o->d_format == 1) {
        Cell *d = (Cell *)cell;
        if (o->accumulate && o->scale != 1.0f)
            for (uint32_t j = 0; j < n; j++)
                d[j] = sum[j] * sign + d[j] * o->scale;
        else if (o->accumulate)
            for (uint32_t j = 0; j < n; j++)
                d[j] = sum[j] * sign + d[j];
        else
            for (uint32_t j = 0; j < n; j++)
                d[j] = sum[j] * sign;
        return;
    }
    for (uint32_t j = 0; j < n; j++) { /* a half lies in the low 16 bits of its cell */
        uint16_t bits = (uint16_t)cell[j];
        _Float16 h;
        memcpy(&h, &bits, 2);
        h = (_Float16)(sum[j] * sign + (o->accumulate ? (float)h * o->scale : 0.0f));
        memcpy(&bits, &h, 2);
        cell[j] = bits;
    }
}

/* Whether 16 bytes of shared memory, or elements of 16 / t bytes in it, are undefined. */
static void undefined_elements(const Cta *c, uint32_t off, uint32_t t, uint8_t *out)
{
    for (uint32_t e = 0; e < t; e++)
        out[e] |= !shared_defined(c, off + e * (16 / t), 16 / t);
}

/* Rows of an operand in shared memory that hold something undefined. */
static void undefined_rows(const Mma *o, int mn, const Cta *c, const uint32_t *chunk, uint32_t n, uint8_t *out)
{
    const uint32_t t = 16 / o->bytes, per = n / t;
    for (uint32_t i = 0; !mn && i < 2 * n; i++)
        out[i / 2] |= !shared_defined(c, chunk[i], 16);
    for (uint32_t i = 0; mn && i < (uint32_t)o->k * per; i++)
        undefined_elements(c, chunk[i], t, out + i % per * t);
}

/* D's cells become defined, but for rows of A and columns of B (`undefined`) that are not, and cells that accumulate on what is not. */
static void define_part(const Mma *o, int which, const uint8_t *undefined)
{
    const Part *p = &o->part[which];
    Tensor *t = p->cta->tensor;
    const uint32_t rows = o->m / o->group, column = o->d & 0xffff, halves = layout_b(o) ? 2 : 1, n = o->n / halves;
    uint8_t row[MAX_M] = {0};
    if (!o->a_tensor && p->undefined)
        undefined_rows(o, o->a_mn, p->cta, p->a, rows, row);
    for (uint32_t half = 0; half < halves; half++)
        for (uint32_t r = 0; r < rows; r++) {
            const uint32_t lane = lane_of(o, o->d >> 16, r) + half * 64;
            if (!enabled(o, which, lane))
                continue;
            uint8_t *valid = &t->valid[lane][column];
            const int lost = row[r] || (o->a_tensor && !tensor_defined(p->cta, lane, 1, o->a_address & 0xffff, 8));
            if (lost || !o->accumulate)
                memset(valid, !lost, n);
            for (uint32_t j = 0; undefined && j < n; j++)
                valid[j] &= !undefined[half * n + j];
        }
}

static void mma_part(const Mma *o, int which, const float *bt)
{
    const Part *p = &o->part[which];
    Tensor *t = p->cta->tensor;
    uint32_t rows = o->m / o->group, lane0 = o->d >> 16, column = o->d & 0xffff, halves = layout_b(o) ? 2 : 1, n = o->n / halves;
    float a[MAX_M * MAX_K], from_tensor[MAX_K];
    if (!o->a_tensor)
        gather(o, o->a_format, o->a_mn, p->cta->shared.data, p->a, rows, a, MAX_K, 1);
    for (uint32_t half = 0; half < halves; half++)
        for (uint32_t r = 0; r < rows; r++) {
            uint32_t lane = lane_of(o, lane0, r) + half * 64;
            if (!enabled(o, which, lane))
                continue;
            const float *row = a + r * MAX_K;
            if (o->a_tensor) {
                const uint8_t *words = (const uint8_t *)&t->data[lane][o->a_address & 0xffff];
                convert(o, o->a_format, words, from_tensor);
                convert(o, o->a_format, words + 16, from_tensor + o->k / 2);
                row = from_tensor;
            }
            float sum[MAX_N] = {0};
            for (int k = 0; k < o->k; k++) {
                const float x = row[k], *b = bt + k * MAX_N + half * n;
                for (uint32_t j = 0; j < n; j++)
                    sum[j] += x * b[j];
            }
            store_row(o, &t->data[lane][column], sum, n);
        }
}

static void mma_run(Async *op)
{
    Mma *o = op->data;
    float bt[MAX_K * MAX_N];
    uint32_t columns = o->n / o->group;
    for (int i = 0; i < o->group; i++)
        gather(o, o->b_format, o->b_mn, o->part[i].cta->shared.data, o->part[i].b, columns, bt + i * columns, 1, MAX_N);
    uint8_t undefined[MAX_N] = {0};
    for (int i = 0; i < o->group; i++)
        if (o->part[i].undefined)
            undefined_rows(o, o->b_mn, o->part[i].cta, o->part[i].b, columns, undefined + i * columns);
    for (int i = 0; i < o->group; i++) {
        define_part(o, i, o->part[0].undefined || (o->group == 2 && o->part[1].undefined) ? undefined : NULL);
        mma_part(o, i, bt);
    }
    for (int i = 0; i < o->group; i++) {
        unlock(&o->part[i]);
        end_tensor(&o->part[i]);
    }
}

/* tcgen05.mma: operands d, a, b, idesc, enable-input-d, disable-output-lane (4 or 8, or none).
 * imm[0]: kind | A in tensor memory << 4 | enable-input-d negated << 5 | cta_group << 8; imm[1]: scale-input-d; imm[2], imm[3]: offsets of d, a. */
static int mma(Warp *w, const Ins *ins, uint32_t m)
{
    tensor_single(w, m, "tcgen05.mma");
    uint32_t i = __builtin_ctz(m);
    Cta *cta[2];
    int group = ins->imm[0] >> 8 & 3;
    ctas_of(w, group, cta, "tcgen05.mma");
    Async *op = async_new(w, Q_TENSOR, mma_run);
    Mma *o = op->data = emu_alloc(sizeof *o);
    o->kind = ins->imm[0] & 15;
    o->group = group;
    o->a_tensor = ins->imm[0] >> 4 & 1;
    o->d = ((uint32_t *)operand(w, ins->arg[0]))[i] + (uint32_t)ins->imm[2];
    uint64_t a_desc = 0, b_desc = ((uint64_t *)operand(w, ins->arg[2]))[i];
    if (o->a_tensor)
        o->a_address = ((uint32_t *)operand(w, ins->arg[1]))[i] + (uint32_t)ins->imm[3];
    else
        a_desc = ((uint64_t *)operand(w, ins->arg[1]))[i];
    uint32_t use = *(uint32_t *)operand(w, ins->arg[4]) >> i & 1;
    o->accumulate = use ^ (ins->imm[0] >> 5 & 1);
    o->scale = ldexpf(1.0f, -(int)ins->imm[1]);
    for (int k = 5; k < ins->n; k++)
        o->lanes_off[k - 5] = ((uint32_t *)operand(w, ins->arg[k]))[i];
    decode_idesc(w, o, ((uint32_t *)operand(w, ins->arg[3]))[i]);
    if (o->a_tensor && o->a_mn)
        fault(w, ERR_TENSOR, "tcgen05.mma: operand A in tensor memory cannot be transposed");
    for (int k = 0; k < group; k++) {
        o->part[k].cta = cta[k];
        tensor_operands(w, o, k);
        operands(w, o, &o->part[k], a_desc, b_desc);
    }
    for (int k = 0; k < group; k++)
        begin_tensor(w, &o->part[k], BY_MMA);
    async_issue(op);
    return NEXT;
}

/* ---- tcgen05.cp ------------------------------------------------------------------------------------------------------------------ */
enum { CP_128X256B, CP_4X256B, CP_128X128B, CP_64X128B_02_13, CP_64X128B_01_23, CP_32X128B };

typedef struct {
    int shape, group;
    uint32_t rows, per, lane, column;
    Part part[2];
} Copy;

/* Lane that row i goes to in copy number k; -1: no such copy. */
static int copy_lane(const Copy *o, uint32_t i, uint32_t k)
{
    switch (o->shape) {
    case CP_4X256B: /* one lane of each warp's 32 */
        return k ? -1 : (int)(o->lane + 32 * i);
    case CP_64X128B_02_13:
        return k > 1 ? -1 : (int)(i + 64 * k);
    case CP_64X128B_01_23:
        return k > 1 ? -1 : (int)(i % 32 + i / 32 * 64 + 32 * k);
    case CP_32X128B:
        return k > 3 ? -1 : (int)(i + 32 * k);
    default:
        return k ? -1 : (int)i;
    }
}

static void cp_run(Async *op)
{
    Copy *o = op->data;
    for (int c = 0; c < o->group; c++) {
        Part *p = &o->part[c];
        for (uint32_t i = 0; i < o->rows; i++)
            for (int k = 0, lane; (lane = copy_lane(o, i, k)) >= 0; k++)
                for (uint32_t j = 0; j < o->per; j++) {
                    const uint32_t from = p->a[i * o->per + j], to = o->column + 4 * j;
                    memcpy(&p->cta->tensor->data[lane][to], p->cta->shared.data + from, 16);
                    for (int k4 = 0; k4 < 4; k4++)
                        p->cta->tensor->valid[lane][to + k4] = !p->undefined || shared_defined(p->cta, from + 4 * k4, 4);
                }
        unlock(p);
        end_tensor(p);
    }
}

/* tcgen05.cp [taddr], s-desc: imm[0]: CP_* | cta_group << 8; imm[2]: offset of the address. Of a pair, each CTA copies from its own shared memory. */
static int cp(Warp *w, const Ins *ins, uint32_t m)
{
    static const uint8_t rows[] = {128, 4, 128, 64, 64, 32};
    static const char what[] = "tcgen05.cp";
    tensor_single(w, m, what);
    uint32_t i = __builtin_ctz(m), address = ((uint32_t *)operand(w, ins->arg[0]))[i] + (uint32_t)ins->imm[2];
    uint64_t bits = ((uint64_t *)operand(w, ins->arg[1]))[i];
    Cta *cta[2];
    ctas_of(w, ins->imm[0] >> 8, cta, what);
    Async *op = async_new(w, Q_TENSOR, cp_run);
    Copy *o = op->data = emu_alloc(sizeof *o);
    o->group = ins->imm[0] >> 8;
    o->shape = ins->imm[0] & 0xff;
    o->rows = rows[o->shape];
    o->per = o->shape <= CP_4X256B ? 2 : 1;
    o->lane = address >> 16;
    o->column = address & 0xffff;
    if (o->lane > (o->shape == CP_4X256B ? 31u : 0u))
        fault(w, ERR_TENSOR, "tcgen05.cp to tensor memory lane %u; this shape allows %s", o->lane, o->shape == CP_4X256B ? "lanes 0 to 31" : "lane 0");
    Desc d = decode_desc(w, bits, what);
    for (int c = 0; c < o->group; c++) {
        Part *p = &o->part[c];
        p->cta = cta[c];
        p->writes = (Area){o->shape == CP_4X256B ? 0x55u << o->lane / 16 : 0xffu, o->column, 4 * o->per};
        tensor_allocated(w, p->cta, o->column, 4 * o->per, what);
        tensor_after_writes(w, p->cta, p->writes, 1, what);
        tensor_after_reads(w, p->cta, p->writes, 1, what);
        chunks_k(&d, o->rows, o->per, p->a);
        to_offsets(w, p->cta, p->a, o->rows * o->per, what);
        lock_chunks(w, p, p->a, o->rows * o->per, what);
    }
    for (int c = 0; c < o->group; c++)
        begin_tensor(w, &o->part[c], BY_COPY);
    async_issue(op);
    return NEXT;
}

/* ---- tcgen05.shift ----------------------------------------------------------------------------------------------------------------- */
static void shift_run(Async *op)
{
    Copy *o = op->data;
    for (int c = 0; c < o->group; c++) {
        Tensor *t = o->part[c].cta->tensor;
        for (uint32_t l = o->lane; l < o->lane + 31; l++) {
            memcpy(&t->data[l][o->column], &t->data[l + 1][o->column], 32);
            memcpy(&t->valid[l][o->column], &t->valid[l + 1][o->column], 8);
        }
        end_tensor(&o->part[c]);
    }
}

/* tcgen05.shift.down [taddr]: 31 rows of 256 bits take the next row's place, the last row of the warp's 32 lanes stays (it is then renewed by
 * tcgen05.cp.4x256b). imm[0]: cta_group << 8; imm[2]: offset of the address. */
static int shift(Warp *w, const Ins *ins, uint32_t m)
{
    static const char what[] = "tcgen05.shift";
    tensor_single(w, m, what);
    uint32_t address = ((uint32_t *)operand(w, ins->arg[0]))[__builtin_ctz(m)] + (uint32_t)ins->imm[2];
    Cta *cta[2];
    ctas_of(w, ins->imm[0] >> 8, cta, what);
    Async *op = async_new(w, Q_TENSOR, shift_run);
    Copy *o = op->data = emu_alloc(sizeof *o);
    o->group = ins->imm[0] >> 8;
    o->lane = address >> 16;
    o->column = address & 0xffff;
    if (o->lane % 32 || o->lane > 96)
        fault(w, ERR_TENSOR, "tcgen05.shift at tensor memory lane %u; it must be a multiple of 32", o->lane);
    for (int c = 0; c < o->group; c++) {
        Part *p = &o->part[c];
        p->cta = cta[c];
        p->writes = (Area){3u << o->lane / 16, o->column, 8};
        tensor_allocated(w, p->cta, o->column, 8, what);
        tensor_after_writes(w, p->cta, p->writes, 1, what);
        tensor_after_reads(w, p->cta, p->writes, 1, what);
    }
    for (int c = 0; c < o->group; c++)
        begin_tensor(w, &o->part[c], BY_COPY);
    async_issue(op);
    return NEXT;
}

/* ---- tcgen05.commit ---------------------------------------------------------------------------------------------------------------- */
/* v[0]: bit per CTA of the cluster; v[1]: offset of the mbarrier; data: the issuer's clock. */
static void commit_run(Async *op)
{
    Cluster *c = op->cta->cluster;
    for (int r = 0; r < c->n_ctas; r++)
        if (op->v[0] >> r & 1)
            mbar_arrive(op->warp, mbar_find(op->warp, &c->cta[r], op->v[1]), 1, 0, 0, op->data);
}

/* tcgen05.commit [mbar] {, ctaMask}: operands mbar, mask (or SINK). imm[0]: offset; imm[1] bit 0: generic address; imm[2]: cta_group. */
static int commit(Warp *w, const Ins *ins, uint32_t m)
{
    tensor_single(w, m, "tcgen05.commit");
    tensor_group(w, ins->imm[2]);
    Cluster *c = w->cta->cluster;
    uint32_t i = __builtin_ctz(m), addr;
    if (ins->imm[1] & 1) {
        uint64_t a = ((uint64_t *)operand(w, ins->arg[0]))[i] + ins->imm[0];
        if ((a & WINDOW_MASK) != WINDOW_SHARED)
            fault(w, ERR_MEMORY, "generic address %#llx of tcgen05.commit's mbarrier is not in shared memory", (unsigned long long)a);
        addr = (uint32_t)a;
    } else {
        addr = ((uint32_t *)operand(w, ins->arg[0]))[i] + (uint32_t)ins->imm[0];
    }
    Async *op = async_new(w, Q_TENSOR, commit_run);
    Cta *at;
    op->v[1] = shared_offset(w, addr, 8, 8, &at);
    op->v[0] = (uint64_t)1 << at->rank;
    if (ins->arg[1] != SINK) {
        op->v[0] = ((uint16_t *)operand(w, ins->arg[1]))[i];
        if (!op->v[0] || op->v[0] >> c->n_ctas)
            fault(w, ERR_TENSOR, "tcgen05.commit.multicast::cluster with CTA mask %#llx in a cluster of %d", (unsigned long long)op->v[0], c->n_ctas);
    }
    for (int r = 0; r < c->n_ctas; r++)
        if (op->v[0] >> r & 1)
            mbar_use(w, &c->cta[r], op->v[1], 1);
    op->data = emu_alloc(c->n_clock * sizeof(uint32_t));
    clock_release(w, op->data);
    async_issue(op);
    return NEXT;
}

static const Entry tensor_core[] = {
    {"tcgen05.mma", mma}, {"tcgen05.cp", cp}, {"tcgen05.shift", shift}, {"tcgen05.commit", commit},
};
REGISTER(tensor_core)
