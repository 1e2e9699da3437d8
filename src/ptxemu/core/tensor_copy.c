/* The tensor core's copies: tcgen05.cp and .shift, and tcgen05.commit (PTX ISA: "Tensor Memory Data Movement Instructions", "Async
 * Synchronization Operations"). They complete in the order of their issue: see tensor_mma.c.
 */
#include "tensor_core.h"

#include <string.h>

/* ---- tcgen05.cp ------------------------------------------------------------------------------------------------------------------ */
enum { CP_128X256B, CP_4X256B, CP_128X128B, CP_64X128B_02_13, CP_64X128B_01_23, CP_32X128B };

typedef struct {
    int shape, group, bits; /* bits: of an element that becomes 8 bits; 0: bytes are copied as they are */
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

/* 16 elements of 4 or 6 bits, with padding after them, become a byte each, as MMAs take them in tensor memory ("Optional Decompression"). */
static void decompress(const uint8_t *from, int bits, uint8_t *out)
{
    for (int i = 0; i < 16; i++)
        out[i] = bits == 4 ? (from[i / 2] >> i % 2 * 4 & 15) << 2 : (from[i * 6 / 8] | from[i * 6 / 8 + 1] << 8) >> i * 6 % 8 & 63;
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
                    const uint32_t size = o->bits ? o->bits / 2 : 4; /* bytes that become a cell */
                    if (o->bits)
                        decompress(p->cta->shared.data + from, o->bits, (uint8_t *)&p->cta->tensor->data[lane][to]);
                    else
                        memcpy(&p->cta->tensor->data[lane][to], p->cta->shared.data + from, 16);
                    for (int k4 = 0; k4 < 4; k4++)
                        p->cta->tensor->valid[lane][to + k4] = !p->undefined || shared_defined(p->cta, from + size * k4, size);
                }
        unlock(p);
        end_tensor(p);
    }
}

/* tcgen05.cp [taddr], s-desc: imm[0]: CP_* | cta_group << 8; imm[1]: bits of an element to decompress, or 0; imm[2]: offset of the address. Of a
 * pair, each CTA copies from its own shared memory. */
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
    o->bits = ins->imm[1];
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

static const Entry tensor_copy[] = {
    {"tcgen05.cp", cp}, {"tcgen05.shift", shift}, {"tcgen05.commit", commit},
};
REGISTER(tensor_copy)
