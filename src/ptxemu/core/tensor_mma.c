/* tcgen05.mma, .mma.sp, .mma.ws and their block-scaled forms: what is issued (PTX ISA: "TensorCore 5th Generation Matrix Multiply and accumulate
 * Operations"). tensor_dot.c computes, tensor_copy.c has the copies and tcgen05.commit.
 *
 * An operation is checked where it is issued, and until it completes its operands in shared memory are locked and its tensor memory counts
 * as being written or read. They complete in the order of their issue, which is more than the ISA promises for some pairs
 * ("Pipelined tcgen05 Instructions") but what CUTLASS's kernels rely on (tcgen05.cp after the MMAs that read the same columns).
 */
#include <math.h>

#include "sparse.h"
#include "tensor_core.h"

static const char *const kind_name[] = {"f16", "tf32", "f8f6f4", "i8", "mxf8f6f4", "mxf4", "mxf4nvf4"};

static inline int scaled(const Mma *o) { return o->kind >= KIND_MXF8F6F4; }
static inline int four_bits(const Mma *o) { return o->kind >= KIND_MXF4; }

/* ---- the instruction descriptor ("Instruction descriptor") and the shape rules ("Matrix Shape") ---------------------------------------- */
static _Noreturn void wrong_idesc(Warp *w, const Mma *o, uint32_t bits)
{
    fault(w, ERR_TENSOR, "instruction descriptor %#x: types (A %d, B %d, D %d) or flags not allowed for kind::%s", bits, o->a_format, o->b_format,
          o->d_format, kind_name[o->kind]);
}

static void reserved(Warp *w, uint32_t bits, uint32_t mask, const char *what)
{
    if (bits & mask)
        fault(w, ERR_TENSOR, "instruction descriptor %#x has reserved bits set (%s)", bits, what);
}

static int narrow_float(int format) { return format <= 5 && format != 2; }

/* Of kinds without scale factors; bits 30 and 31 are the largest column shift of .ws. */
static void decode_plain(Warp *w, Mma *o, uint32_t bits)
{
    o->m = (bits >> 24 & 31) << 4;
    o->d_format = bits >> 4 & 3;
    o->b_format = bits >> 10 & 7;
    o->saturate = bits >> 3 & 1;
    o->selector = bits & 3;
    if (o->ws)
        reserved(w, bits, 1u << 6 | 1u << 23 | 1u << 29, "6, 23, 29");
    else
        reserved(w, bits, 1u << 6 | 1u << 23 | 7u << 29, "6, 23, 29 to 31");
    int ok = 1;
    switch (o->kind) {
    case KIND_F16:
        ok = o->a_format == o->b_format && o->a_format < 2 && (o->d_format == 1 || (o->d_format == 0 && o->a_format == 0));
        break;
    case KIND_TF32:
        ok = o->a_format == 2 && o->b_format == 2 && o->d_format == 1;
        break;
    case KIND_F8F6F4:
        ok = o->d_format < 2 && narrow_float(o->a_format) && narrow_float(o->b_format);
        break;
    default:
        ok = o->a_format < 2 && o->b_format < 2 && o->d_format == 2 && !(bits >> 13 & 3);
    }
    if (!ok || (o->saturate && o->kind != KIND_I8))
        wrong_idesc(w, o, bits);
    if (o->sparse && o->selector && o->kind >= KIND_F8F6F4)
        fault(w, ERR_TENSOR, "instruction descriptor %#x: the sparsity selector of kind::%s must be 0", bits, kind_name[o->kind]);
    if (o->sparse && o->selector > 1)
        fault(w, ERR_UNSUPPORTED, "instruction descriptor %#x: sparsity selector %d (PTX ISA: \"Sparsity selector\"; 0 and 1 are known here)", bits,
              o->selector);
}

static void decode_scaled(Warp *w, Mma *o, uint32_t bits)
{
    o->m = (bits >> 27 & 3) << 7;
    o->d_format = 1;
    o->a_scale_id = bits >> 29 & 3;
    o->b_scale_id = bits >> 4 & 3;
    o->scale_e4m3 = !(bits >> 23 & 1);
    if (!four_bits(o)) {
        o->b_format = bits >> 10 & 7;
        reserved(w, bits, 0x3u | 1u << 3 | 1u << 6 | 7u << 24 | 1u << 31, "0, 1, 3, 6, 24 to 26, 31");
        if (!narrow_float(o->a_format) || !narrow_float(o->b_format) || o->scale_e4m3)
            wrong_idesc(w, o, bits);
        return;
    }
    o->b_format = bits >> 10 & 3;
    reserved(w, bits, 0x3u | 1u << 3 | 1u << 6 | 1u << 12 | 7u << 24, "0, 1, 3, 6, 12, 24 to 26");
    if (bits >> 31)
        fault(w, ERR_UNSUPPORTED, "tcgen05.mma.kind::%s with K 96 (PTX ISA: \"Matrix Shape\": sm_103a only)", kind_name[o->kind]);
    if (o->a_format != 1 || o->b_format != 1 || o->a_mn || o->b_mn || (o->scale_e4m3 && (o->kind == KIND_MXF4 || o->blocks != 4)))
        wrong_idesc(w, o, bits);
    if ((o->a_scale_id | o->b_scale_id) & (o->blocks == 4 ? 3 : 1))
        fault(w, ERR_TENSOR, "instruction descriptor %#x: scale factor IDs %d of A, %d of B; with %d factors a row they are 0%s", bits, o->a_scale_id,
              o->b_scale_id, o->blocks, o->blocks == 4 ? "" : " or 2");
}

static void check_shape(Warp *w, const Mma *o)
{
    if (o->ws) {
        if ((o->m != 32 && o->m != 64 && o->m != 128) || (o->n != 64 && o->n != 128 && (o->n != 256 || o->sparse)))
            fault(w, ERR_TENSOR, "tcgen05.mma.ws.kind::%s with M %d, N %d is not a shape of it (M 32, 64 or 128; N 64, 128%s)", kind_name[o->kind], o->m,
                  o->n, o->sparse ? " with a sparse A" : " or 256");
        return;
    }
    int step = o->group == 2 ? 16 : 8;
    if (o->kind == KIND_I8)
        step = o->group == 2 ? 32 : o->n > 32 ? 16 : 8;
    if (o->per == 16 && o->b_mn)
        step = o->group == 2 ? 32 : 16;
    int m_ok = o->group == 2 ? (o->m == 128 && !(scaled(o) && o->sparse)) || o->m == 256 : (o->m == 64 && !scaled(o)) || o->m == 128;
    if (!m_ok || o->n < step || o->n > MAX_N || o->n % step)
        fault(w, ERR_TENSOR, "tcgen05.mma.kind::%s with M %d, N %d is not a shape of .cta_group::%d (M %s; N in steps of %d up to 256)", kind_name[o->kind],
              o->m, o->n, o->group, o->group == 2 ? scaled(o) && o->sparse ? "256" : "128 or 256" : scaled(o) ? "128" : "64 or 128", step);
}

static void decode_idesc(Warp *w, Mma *o, uint32_t bits)
{
    o->n = (bits >> 17 & 63) << 3;
    o->a_format = bits >> 7 & 7;
    o->negate = (bits >> 13 ^ bits >> 14) & 1;
    o->a_mn = bits >> 15 & 1;
    o->b_mn = bits >> 16 & 1;
    o->per = o->kind == KIND_F16 ? 8 : o->kind == KIND_TF32 ? 4 : four_bits(o) ? 32 : 16;
    if ((int)(bits >> 2 & 1) != (o->sparse != 0))
        fault(w, ERR_TENSOR, "instruction descriptor %#x asks for a %s", bits,
              o->sparse ? "dense A, in tcgen05.mma.sp" : "sparse A, which needs tcgen05.mma.sp");
    o->k_stored = 2 * o->per;
    o->k = o->sparse ? 2 * o->k_stored : o->k_stored;
    o->b_chunks = o->sparse ? 4 : 2;
    if (scaled(o))
        decode_scaled(w, o, bits);
    else
        decode_plain(w, o, bits);
    check_shape(w, o);
}

/* ---- the zero-column mask ("Zero-Column Mask Descriptor") --------------------------------------------------------------------------------- */
/* Runs of columns that B is used in and that count as zeros take turns in every sub-mask. As in the section's examples, the field "Skip Span"
 * counts the columns of zeros and "Use Span" those of B, which the table's text has the other way round. */
static void zero_columns(Warp *w, Mma *o, uint64_t bits, uint32_t idesc)
{
    static const uint8_t most[] = {0, 8, 16, 32};
    if (bits >> 36 & 7 || bits >> 62)
        fault(w, ERR_TENSOR, "zero-column mask descriptor %#llx has reserved bits set (36 to 38, 62, 63)", (unsigned long long)bits);
    o->shift = bits >> 56 & 63;
    if (o->shift > most[idesc >> 30] || o->shift > (o->m == 32 ? 16 : 32))
        fault(w, ERR_TENSOR, "zero-column mask descriptor %#llx shifts by %u columns; the instruction descriptor allows %u, M %d up to %d",
              (unsigned long long)bits, o->shift, most[idesc >> 30], o->m, o->m == 32 ? 16 : 32);
    if (!(bits >> 39 & 1))
        return;
    const uint32_t span[2] = {(bits >> 48 & 0xff) + 1, (bits >> 40 & 0xff) + 1}; /* of B, of zeros */
    const uint32_t parts = MAX_M / o->m, width = o->n / parts;
    for (uint32_t i = 0; i < parts; i++) {
        uint32_t zeros = bits >> (32 + i) & 1, skip = bits >> 8 * i & 0xff, left = span[zeros];
        for (uint32_t j = 0; j < skip + width; j++) {
            if (j >= skip && zeros)
                o->zero[(i * width + j - skip) / 64] |= (uint64_t)1 << (i * width + j - skip) % 64;
            if (!--left) {
                zeros ^= 1;
                left = span[zeros];
            }
        }
    }
}

/* ---- operands --------------------------------------------------------------------------------------------------------------------------- */
static void check_operand(Warp *w, const Mma *o, const Desc *d, int mn, uint32_t chunks, const char *what)
{
    if (mn && (o->kind == KIND_TF32) != (d->shift == 5))
        fault(w, ERR_TENSOR, "%s: a transposed operand of kind::%s must %s 128-byte swizzling with 32-byte atomicity", what, kind_name[o->kind],
              o->kind == KIND_TF32 ? "have" : "not have");
    if (!mn && chunks == 4 && d->width == 32)
        fault(w, ERR_UNSUPPORTED, "%s: 32-byte swizzling, in whose rows 64 bytes along k have no canonical layout", what);
}

/* Both operands' chunks in one CTA's shared memory: its own rows of A and, of a pair, its half of B. */
static void operands(Warp *w, Mma *o, Part *p, uint64_t a_desc, uint64_t b_desc)
{
    static const char a_name[] = "tcgen05.mma operand A", b_name[] = "tcgen05.mma operand B";
    const uint32_t rows = o->m / o->group, columns = o->n / o->group + o->shift, t = o->per;
    if (!o->a_tensor) {
        Desc d = decode_desc(w, a_desc, a_name);
        check_operand(w, o, &d, o->a_mn, 2, a_name);
        if (o->a_mn)
            chunks_mn(&d, rows / t, o->k_stored, p->a);
        else
            chunks_k(&d, rows, 2, p->a);
        to_offsets(w, p->cta, p->a, 2 * rows, a_name);
        lock_chunks(w, p, p->a, 2 * rows, a_name);
    }
    Desc d = decode_desc(w, b_desc, b_name);
    check_operand(w, o, &d, o->b_mn, o->b_chunks, b_name);
    if (o->b_mn && o->n / o->group % t)
        fault(w, ERR_TENSOR, "%s: a transposed B of %u columns a CTA is no whole number of 16-byte chunks", b_name, o->n / o->group);
    const uint32_t chunks = o->b_mn ? (columns + t - 1) / t * o->k : columns * o->b_chunks;
    if (o->b_mn)
        chunks_mn(&d, (columns + t - 1) / t, o->k, p->b);
    else
        chunks_k(&d, columns, o->b_chunks, p->b);
    to_offsets(w, p->cta, p->b, chunks, b_name);
    lock_chunks(w, p, p->b, chunks, b_name);
}

/* A lane of tensor memory that an operand may start at, by "Data Path Layout Organization". */
static uint32_t first_lane(Warp *w, const Mma *o, uint32_t address, const char *what)
{
    uint32_t lane = address >> 16;
    if (lane != 0 && !(half_lanes(o) && lane == 16))
        fault(w, ERR_TENSOR, "%s at tensor memory lane %u; M %d with .cta_group::%d allows lane 0%s", what, lane, o->m, o->group,
              half_lanes(o) ? " or 16" : "");
    return lane;
}

/* An operand that is read in tensor memory. */
static void reads(Warp *w, Part *p, uint32_t strips, uint32_t column, uint32_t n, const char *what)
{
    Area a = {strips, column, n};
    tensor_allocated(w, p->cta, column, n, what);
    tensor_after_writes(w, p->cta, a, 1, what);
    FOR_STRIPS(s, strips)
        for (uint32_t c = column; c < column + n; c++)
            if (p->cta->tensor->writing[s][c] && p->cta->tensor->kind[s][c] == BY_MMA)
                fault(w, ERR_RACE, "tcgen05.mma reads %s at tensor memory lane %u, column %u, that a tcgen05.mma in flight writes (missing "
                      "tcgen05.commit and mbarrier wait)", what + sizeof "tcgen05.mma", s * 16, c);
    p->reads[p->n_reads++] = a;
}

/* Check D and what else lies in one CTA's tensor memory. */
static void tensor_operands(Warp *w, Mma *o, int which)
{
    static const char d_name[] = "tcgen05.mma", a_name[] = "tcgen05.mma operand A", meta_name[] = "tcgen05.mma metadata";
    static const char scale_name[] = "tcgen05.mma scale factors";
    Part *p = &o->part[which];
    const uint32_t lane = first_lane(w, o, o->d, d_name), strips = half_lanes(o) ? 0x55u << lane / 16 : 0xffu, parts = splits(o);
    p->writes = (Area){strips, o->d & 0xffff, o->n / parts};
    tensor_allocated(w, p->cta, p->writes.column, p->writes.n, d_name);
    if (o->a_tensor) {
        if (first_lane(w, o, o->a_address, a_name) != lane)
            fault(w, ERR_TENSOR, "tcgen05.mma: operand A at lane %u and D at lane %u of tensor memory must have the same lane", o->a_address >> 16, lane);
        reads(w, p, strips, o->a_address & 0xffff, 8, a_name);
    }
    if (o->sparse) {
        if (first_lane(w, o, o->meta, meta_name) != lane)
            fault(w, ERR_TENSOR, "tcgen05.mma.sp: metadata at lane %u and D at lane %u of tensor memory must have the same lane", o->meta >> 16, lane);
        if (o->meta & 1)
            fault(w, ERR_TENSOR, "tcgen05.mma.sp: metadata at tensor memory column %u; it starts at an even one", o->meta & 0xffff);
        const int wide = o->kind <= KIND_TF32;
        reads(w, p, strips, (o->meta & 0xffff) + o->selector, wide ? 1 : 2, meta_name);
    }
    if (o->blocks) {
        if ((o->a_scales | o->b_scales) >> 16)
            fault(w, ERR_TENSOR, "tcgen05.mma.block_scale: scale factors at lanes %u (A) and %u (B) of tensor memory; they start at lane 0",
                  o->a_scales >> 16, o->b_scales >> 16);
        reads(w, p, 0xff, o->a_scales, (o->m / o->group + 31) / 32, scale_name);
        reads(w, p, 0xff, o->b_scales, (o->n / parts + 31) / 32, scale_name);
    }
    tensor_after_writes(w, p->cta, p->writes, 1, d_name);
    tensor_after_reads(w, p->cta, p->writes, 1, d_name);
    for (int i = 0; i < p->n_reads; i++)
        if (p->reads[i].strips & strips && p->reads[i].column < p->writes.column + p->writes.n
            && p->writes.column < p->reads[i].column + p->reads[i].n)
            fault(w, ERR_TENSOR, "tcgen05.mma: D and an operand overlap in tensor memory, columns %u and %u", p->writes.column, p->reads[i].column);
}

/* tcgen05.mma: operands d, a, b, idesc, enable-input-d, metadata, scale factors of A, of B, zero-column mask (or SINK each), then
 * disable-output-lane (4 or 8, or none). imm[0]: kind | A in tensor memory << 4 | enable-input-d negated << 5 | .ws << 6 | scale factors a row << 7
 * | cta_group << 10 | SPARSE_* << 12 | scale-input-d << 16 | offset of B's scale factors << 32; imm[1], imm[2]: offsets of d, a << 32; of the
 * metadata, A's scale factors << 32. */
static int mma(Warp *w, const Ins *ins, uint32_t m)
{
    tensor_single(w, m, "tcgen05.mma");
    const uint32_t i = __builtin_ctz(m), flags = (uint32_t)ins->imm[0];
    Cta *cta[2];
    const int group = flags >> 10 & 3;
    ctas_of(w, group, cta, "tcgen05.mma");
    Async *op = async_new(w, Q_TENSOR, mma_run);
    Mma *o = op->data = emu_alloc(offsetof(Mma, part) + group * sizeof(Part));
    o->kind = flags & 15;
    o->group = group;
    o->line = ins->line;
    o->a_tensor = flags >> 4 & 1;
    o->ws = flags >> 6 & 1;
    o->blocks = flags >> 7 & 7;
    o->sparse = flags >> 12 & 3;
    o->d = ((uint32_t *)operand(w, ins->arg[0]))[i] + (uint32_t)ins->imm[1];
    uint64_t a_desc = 0, b_desc = ((uint64_t *)operand(w, ins->arg[2]))[i];
    if (o->a_tensor)
        o->a_address = ((uint32_t *)operand(w, ins->arg[1]))[i] + (uint32_t)(ins->imm[1] >> 32);
    else
        a_desc = ((uint64_t *)operand(w, ins->arg[1]))[i];
    const uint32_t idesc = ((uint32_t *)operand(w, ins->arg[3]))[i], use = *(uint32_t *)operand(w, ins->arg[4]) >> i & 1;
    o->accumulate = use ^ (flags >> 5 & 1);
    o->scale = ldexpf(1.0f, -(int)(flags >> 16 & 15));
    if (o->sparse)
        o->meta = ((uint32_t *)operand(w, ins->arg[5]))[i] + (uint32_t)ins->imm[2];
    if (o->blocks) { /* the highest two bits of such an address may hold the scale factors' ID */
        o->a_scales = (((uint32_t *)operand(w, ins->arg[6]))[i] + (uint32_t)(ins->imm[2] >> 32)) & 0x3fffffff;
        o->b_scales = (((uint32_t *)operand(w, ins->arg[7]))[i] + (uint32_t)(ins->imm[0] >> 32)) & 0x3fffffff;
    }
    for (int k = 9; k < ins->n; k++)
        o->lanes_off[k - 9] = ((uint32_t *)operand(w, ins->arg[k]))[i];
    decode_idesc(w, o, idesc);
    if (ins->arg[8] != SINK)
        zero_columns(w, o, ((uint64_t *)operand(w, ins->arg[8]))[i], idesc);
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

static const Entry tensor_mma[] = {{"tcgen05.mma", mma}};
REGISTER(tensor_mma)
