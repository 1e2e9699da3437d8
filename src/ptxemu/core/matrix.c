/* Matrices of 8x8 16-bit elements, or of 16 rows or columns of 8 bits and fewer, between shared memory and a warp's registers, and addresses in a cluster
 * (PTX ISA: "Warp Level Matrix Instructions": ldmatrix, stmatrix, movmatrix; "Data Movement": mapa, getctarank). */
#include "memory.h"

/* Lane l holds row l / 4, columns 2 (l % 4) and the next; transposed: column l / 4 of these two rows. */
static uint32_t fragment(const uint16_t *matrix, uint32_t lane, int transposed)
{
    uint32_t a = lane / 4, b = lane % 4 * 2;
    return transposed ? matrix[b * 8 + a] | (uint32_t)matrix[(b + 1) * 8 + a] << 16 : matrix[a * 8 + b] | (uint32_t)matrix[a * 8 + b + 1] << 16;
}

static void set_fragment(uint16_t *matrix, uint32_t lane, int transposed, uint32_t value)
{
    uint32_t a = lane / 4, b = lane % 4 * 2;
    matrix[transposed ? b * 8 + a : a * 8 + b] = (uint16_t)value;
    matrix[transposed ? (b + 1) * 8 + a : a * 8 + b + 1] = (uint16_t)(value >> 16);
}

static uint32_t rows(int n) { return n == 4 ? FULL : (1u << 8 * n) - 1; } /* lanes whose addresses are rows' */

/* ldmatrix d..., [a]: operands a, d.... imm[1]: ACC_WIDE, ACC_OWN, the matrices as its count; imm[2]: transposed. */
static int ldmatrix(Warp *w, const Ins *ins, uint32_t m)
{
    (void)m;
    const int n = ACC_COUNT(ins->imm[1]), transposed = ins->imm[2];
    uint64_t addr[LANES];
    uint16_t matrix[4 * 64];
    lane_addresses(w, ins->arg[0], ins->imm[0], ins->imm[1] & ACC_WIDE, addr);
    Unwritten u;
    u.any = 0;
    shared_gather(w, rows(n), addr, 16, 16, (ins->imm[1] & ACC_OWN) != 0, (uint8_t *)matrix, &u);
    if (w->lanes)
        lanes_access(w, rows(n), addr, 16, NULL, 1);
    for (int j = 0; j < n; j++) {
        uint32_t *d = operand(w, ins->arg[1 + j]);
        for (uint32_t i = 0; i < LANES; i++)
            d[i] = fragment(matrix + 64 * j, i, transposed);
        uint32_t shadow[LANES];
        for (uint32_t i = 0; u.any && i < LANES; i++)
            shadow[i] = fragment((const uint16_t *)u.bits + 64 * j, i, transposed);
        if (u.any || w->undefined)
            undefined_set(w, ins->arg[1 + j], 4, FULL, u.any ? shadow : NULL, u.origin);
    }
    if (ins->flags & INS_QUEUED)
        queued_load(w, ins, rows(n), addr, 16);
    return NEXT;
}

static int stmatrix(Warp *w, const Ins *ins, uint32_t m)
{
    (void)m;
    const int n = ACC_COUNT(ins->imm[1]), transposed = ins->imm[2];
    uint64_t addr[LANES];
    uint16_t matrix[4 * 64];
    lane_addresses(w, ins->arg[0], ins->imm[0], ins->imm[1] & ACC_WIDE, addr);
    for (int j = 0; j < n; j++) {
        const uint32_t *s = operand(w, ins->arg[1 + j]);
        for (uint32_t i = 0; i < LANES; i++)
            set_fragment(matrix + 64 * j, i, transposed, s[i]);
    }
    uint16_t undefined[4 * 64] = {0};
    int any = 0;
    for (int j = 0; w->undefined && j < n; j++) {
        const uint32_t *s = (const uint32_t *)undefined_bits(w, ins->arg[1 + j]);
        for (uint32_t i = 0; s && i < LANES; i++)
            set_fragment(undefined + 64 * j, i, transposed, s[i]);
        any |= s != NULL;
    }
    if (w->lanes)
        lanes_access(w, rows(n), addr, 16, (const uint8_t *)matrix, 1);
    shared_scatter(w, rows(n), addr, 16, 16, (ins->imm[1] & ACC_OWN) != 0, (const uint8_t *)matrix, any ? (const uint8_t *)undefined : NULL);
    return NEXT;
}

/* ---- elements of 8 bits and fewer ------------------------------------------------------------------------------------------------------ */
enum { M16N16, M8N16 }; /* imm[2] of ldmatrix.b8 */

/* Element e of a row of 16 bytes with 16 elements of so many bits at its start (.b4x16_p64, .b6x16_p32), padded with zeros above. */
static uint32_t element_of(const uint8_t *row, uint32_t e, uint32_t bits)
{
    const uint32_t at = e * bits, two = row[at / 8] | (uint32_t)row[at / 8 + (at / 8 < 15)] << 8;
    return two >> at % 8 & ((1u << bits) - 1);
}

/* What lane l has in register r: four columns of a row, or four rows of a column where the matrix is transposed. */
static uint32_t fragment_b8(const uint8_t *matrix, uint32_t l, uint32_t r, int shape, uint32_t bits)
{
    uint32_t value = 0;
    for (uint32_t b = 0; b < 4; b++) {
        const uint32_t i = l / 4, j = 4 * (l % 4) + b;
        const uint32_t e = shape == M16N16 ? element_of(matrix + 16 * j, i + 8 * r, bits) : element_of(matrix + 16 * i, j, bits);
        value |= e << 8 * b;
    }
    return value;
}

/* ldmatrix.m16n16, .m8n16: operands a, d.... imm[1]: as of ldmatrix, its count is of registers; imm[2]: shape; imm[3]: bits of an element. */
static int ldmatrix_b8(Warp *w, const Ins *ins, uint32_t m)
{
    (void)m;
    const int n = ACC_COUNT(ins->imm[1]), shape = ins->imm[2], each = shape == M16N16 ? 2 : 1;
    const uint32_t bits = ins->imm[3];
    uint64_t addr[LANES];
    uint8_t matrix[LANES * 16];
    lane_addresses(w, ins->arg[0], ins->imm[0], ins->imm[1] & ACC_WIDE, addr);
    Unwritten u;
    u.any = 0;
    shared_gather(w, rows(n), addr, 16, 16, (ins->imm[1] & ACC_OWN) != 0, matrix, &u);
    if (w->lanes)
        lanes_access(w, rows(n), addr, 16, NULL, 1);
    for (int j = 0; j < n; j++) {
        const int first = j / each * each * 8 * 16; /* its matrix's rows */
        uint32_t *d = operand(w, ins->arg[1 + j]);
        for (uint32_t i = 0; i < LANES; i++)
            d[i] = fragment_b8(matrix + first, i, j % each, shape, bits);
        uint32_t shadow[LANES];
        for (uint32_t i = 0; u.any && i < LANES; i++)
            shadow[i] = fragment_b8(u.bits + first, i, j % each, shape, bits);
        if (u.any || w->undefined)
            undefined_set(w, ins->arg[1 + j], 4, FULL, u.any ? shadow : NULL, u.origin);
    }
    return NEXT;
}

/* Lane l's four elements of a matrix of 16x8, which lies transposed in 8 rows. */
static void set_fragment_b8(uint8_t *matrix, uint32_t l, uint32_t value)
{
    for (uint32_t b = 0; b < 4; b++)
        matrix[16 * (2 * (l % 4) + (b & 1)) + l / 4 + 8 * (b >> 1)] = (uint8_t)(value >> 8 * b);
}

/* stmatrix.m16n8.trans.b8: operands a, b...; imm as of stmatrix. */
static int stmatrix_b8(Warp *w, const Ins *ins, uint32_t m)
{
    (void)m;
    const int n = ACC_COUNT(ins->imm[1]);
    uint64_t addr[LANES];
    uint8_t matrix[4 * 128], undefined[4 * 128] = {0};
    int any = 0;
    lane_addresses(w, ins->arg[0], ins->imm[0], ins->imm[1] & ACC_WIDE, addr);
    for (int j = 0; j < n; j++) {
        const uint32_t *s = operand(w, ins->arg[1 + j]);
        const uint32_t *shadow = w->undefined ? (const uint32_t *)undefined_bits(w, ins->arg[1 + j]) : NULL;
        for (uint32_t i = 0; i < LANES; i++) {
            set_fragment_b8(matrix + 128 * j, i, s[i]);
            if (shadow)
                set_fragment_b8(undefined + 128 * j, i, shadow[i]);
        }
        any |= shadow != NULL;
    }
    if (w->lanes)
        lanes_access(w, rows(n), addr, 16, matrix, 1);
    shared_scatter(w, rows(n), addr, 16, 16, (ins->imm[1] & ACC_OWN) != 0, matrix, any ? undefined : NULL);
    return NEXT;
}

/* movmatrix d, a: the transpose of a matrix in registers. */
static int movmatrix(Warp *w, const Ins *ins, uint32_t m)
{
    (void)m;
    uint16_t matrix[64];
    const uint32_t *a = operand(w, ins->arg[1]);
    uint32_t *d = operand(w, ins->arg[0]);
    for (uint32_t i = 0; i < LANES; i++)
        set_fragment(matrix, i, 0, a[i]);
    const uint32_t *s = w->undefined ? (const uint32_t *)undefined_bits(w, ins->arg[1]) : NULL;
    uint16_t undefined[64];
    uint32_t shadow[LANES];
    for (uint32_t i = 0; s && i < LANES; i++)
        set_fragment(undefined, i, 0, s[i]);
    for (uint32_t i = 0; i < LANES; i++) {
        d[i] = fragment(matrix, i, 1);
        if (s)
            shadow[i] = fragment(undefined, i, 1);
    }
    if (w->undefined)
        undefined_set(w, ins->arg[0], 4, FULL, s ? shadow : NULL, s ? undefined_origin(w, ins->arg[1]) : (Origin){0});
    return NEXT;
}

/* mapa d, a, rank: operands d, a, rank. imm[0]: offset, imm[1]: 64 bits. A rank outside the cluster faults where the address is used. */
static int mapa(Warp *w, const Ins *ins, uint32_t m)
{
    const uint32_t *rank = operand(w, ins->arg[2]);
    const uint64_t clear = ~((uint64_t)0xff << CTA_SHIFT);
    FOR_LANES(i, m) {
        uint64_t a = lane_address(w, ins->arg[1], ins->imm[0], ins->imm[1], i);
        a = (a & clear) | (uint64_t)(rank[i] & 0xff) << CTA_SHIFT;
        if (ins->imm[1])
            ((uint64_t *)operand(w, ins->arg[0]))[i] = a;
        else
            ((uint32_t *)operand(w, ins->arg[0]))[i] = (uint32_t)a;
    }
    return NEXT;
}

static int getctarank(Warp *w, const Ins *ins, uint32_t m)
{
    uint32_t *d = operand(w, ins->arg[0]);
    FOR_LANES(i, m) d[i] = lane_address(w, ins->arg[1], ins->imm[0], ins->imm[1], i) >> CTA_SHIFT & 0xff;
    return NEXT;
}

static const Entry matrices[] = {
    {"ldmatrix", ldmatrix}, {"stmatrix", stmatrix}, {"ldmatrix.b8", ldmatrix_b8}, {"stmatrix.b8", stmatrix_b8}, {"movmatrix", movmatrix},
    {"mapa", mapa}, {"getctarank", getctarank},
};
REGISTER(matrices)
