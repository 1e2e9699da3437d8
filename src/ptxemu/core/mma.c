/* mma.sync and mma.sp.sync (PTX ISA: "Warp Level Matrix Multiply-Accumulate Instructions", "Matrix Fragments for mma.m16n8k..."). */
#include "defined.h"
#include "dot.h"
#include "sparse.h"

#include <stdlib.h>

static void check_full(Warp *w, uint32_t m)
{
    if (m != FULL)
        fault(w, ERR_BARRIER, "mma.sync by lanes %#x only: all 32 lanes of the warp must execute it", m);
}

/* Where the stored elements of the rows of A belong: k / 2 of each row. */
static void places(Warp *w, const Ins *ins, int32_t meta, int k, int type, uint8_t *place)
{
    const int form = ins->imm[2] >> 1 & 3, ordered = ins->imm[2] >> 3 & 1, selector = ins->imm[2] >> 4, chunks = k / sparse_chunk(form);
    const int small = elements_per_row(type) > 8;
    const uint32_t *word = operand(w, meta);
    if (undefined_lanes(w, meta, 4, sparse_lanes(chunks, small, selector)))
        undefined_fault(w, "the metadata of a sparse matrix", undefined_origin(w, meta));
    for (int r = 0; r < 16; r++) {
        const uint64_t bits = sparse_of_row(word, r, chunks, small, selector);
        const int wrong = sparse_places(place + r * (k / 2), bits, k, form, ordered);
        if (wrong >= 0)
            fault(w, ERR_EMU, "mma.sp: the metadata %#x of row %d, elements %d to %d, means nothing%s", (unsigned)(bits >> 4 * wrong & 15), r,
                  wrong * sparse_chunk(form), (wrong + 1) * sparse_chunk(form) - 1, ordered ? " (.sp::ordered_metadata)" : "");
    }
}

/* sm_90 has no warp-level product of 8-bit floats: its assembler unpacks the first two bytes of every register of A and B into f16 and
 * multiplies those from zero, then the last two upon it, and adds C at the end. So elements 4 i, 4 i + 1 of a row come first. */
static void low_pairs_first(void *rows, int count, int n, size_t size)
{
    uint8_t from[MAX_K * sizeof(float)], *row = rows;
    for (; count--; row += n * size) {
        memcpy(from, row, n * size);
        for (int i = 0; i < n; i++)
            memcpy(row + (i / 4 * 2 + i % 2 + i % 4 / 2 * (n / 2)) * size, from + i * size, size);
    }
}

/* What comes of it: the sums plus C. */
static void add_last(float *acc, const float *c, int f16_result)
{
    for (int t = 0; t < LANES; t++) {
        const float sum = acc[t] + c[t];
        acc[t] = isnan(sum) ? float_of(0x7fffffffu) : f16_result ? f16_to_float(f16_of_float(sum)) : sum;
    }
}

/* mma.sync d, a, b, c {, metadata}: operands are all registers in this order. imm[0]: m, n << 8, k << 16; imm[1]: types of a, b << 8, d and
 * c << 16; imm[2]: satfinite, SPARSE_* << 1, ordered << 3, selector << 4. In a register of A or B, lanes 4 g to 4 g + 3 together hold 16
 * bytes of row (or column) g along k, in that of a sparse A of what is stored. */
static int mma_sync(Warp *w, const Ins *ins, uint32_t m)
{
    check_full(w, m);
    int rows = ins->imm[0] & 255, k = ins->imm[0] >> 16 & 255, sparse = ins->imm[2] >> 1 & 3, stored = sparse ? k / 2 : k;
    int ta = ins->imm[1] & 255, tb = ins->imm[1] >> 8 & 255, td = ins->imm[1] >> 16 & 255;
    int per = elements_per_row(ta), halves = rows / 8, groups_a = stored / per, groups = k / per;
    int n_d = td == T_F16 ? halves : 2 * halves;
    const int32_t *d = ins->arg, *a = d + n_d, *b = a + halves * groups_a, *c = b + groups;
    float ra[16 * MAX_STORED], cb[8 * MAX_K];
    uint8_t place[16 * MAX_STORED];
    Spread sa, sb[2];
    uint32_t out[4][LANES];
    int integer = ta >= T_S8, arch = w->cta->cluster->launch->program->arch, unpacked = (ta == T_E4M3 || ta == T_E5M2) && arch < 100;
    DotRule rule = integer ? (DotRule){0} : dot_rule(unpacked ? T_F16 : ta, td == T_F16, arch);
    int emin_b = integer || unpacked || tb == ta ? rule.emin : dot_rule(tb, 0, 90).emin;
    for (int g = 0; g < 8; g++) {
        for (int r = 0; r < halves * groups_a; r++)
            elements_of_row(ra + (g + 8 * (r % halves)) * stored + r / halves * per, (uint32_t *)operand(w, a[r]) + 4 * g, ta);
        for (int r = 0; r < groups; r++)
            elements_of_row(cb + g * k + r * per, (uint32_t *)operand(w, b[r]) + 4 * g, tb);
    }
    if (sparse)
        places(w, ins, c[n_d], k, ta, place);
    if (unpacked) {
        rule.block = stored / 2;
        low_pairs_first(ra, 16, stored, sizeof *ra);
        if (sparse)
            low_pairs_first(place, 16, stored, sizeof *place);
        else
            low_pairs_first(cb, 8, k, sizeof *cb);
    }
    for (int j = 0; j < 2 && !sparse; j++)
        spread_b(&sb[j], cb, j, k, emin_b);
    for (int h = 0; h < halves; h++) {
        spread_a(&sa, ra, h, stored, rule.emin);
        for (int j = 0; j < 2 && sparse; j++)
            spread_b_sparse(&sb[j], cb, j, k, place, h, stored, emin_b);
        for (int j = 0; j < 2; j++) {
            if (td == T_S32) {
                memcpy(out[2 * h + j], operand(w, c[2 * h + j]), sizeof *out);
                dot_tile_int((int32_t *)out[2 * h + j], &sa, &sb[j], stored, ins->imm[2] & 1);
                continue;
            }
            const uint32_t *old = operand(w, td == T_F16 ? c[h] : c[2 * h + j]);
            float given[LANES], zero[LANES] = {0}, *acc = unpacked ? zero : given;
            for (int t = 0; t < LANES; t++)
                given[t] = td == T_F16 ? f16_to_float(old[t] >> 16 * j & 0xffff) : float_of(old[t]);
            dot_tile(acc, &sa, &sb[j], stored, rule);
            if (unpacked)
                add_last(acc, given, td == T_F16);
            for (int t = 0; t < LANES; t++)
                if (td != T_F16)
                    out[2 * h + j][t] = bits_of(acc[t]);
                else
                    out[h][t] = (j ? out[h][t] : 0) | f16_of_float(acc[t]) << 16 * j;
        }
    }
    for (int i = 0; i < n_d; i++)
        memcpy(operand(w, d[i]), out[i], sizeof *out);
    return NEXT;
}

/* mma.sync of f64: a chain of fused multiply-adds along k. */
static int mma_sync_f64(Warp *w, const Ins *ins, uint32_t m)
{
    check_full(w, m);
    int rows = ins->imm[0] & 255, k = ins->imm[0] >> 16 & 255, halves = rows / 8, groups = k / 4;
    const int32_t *d = ins->arg, *a = d + 2 * halves, *b = a + halves * groups, *c = b + groups;
    double out[4][LANES];
    for (int i = 0; i < 2 * halves; i++) {
        const double *old = operand(w, c[i]);
        for (int t = 0; t < LANES; t++) {
            double sum = old[t];
            for (int x = 0; x < k; x++) {
                const double *left = operand(w, a[x / 4 * halves + i / 2]), *right = operand(w, b[x / 4]);
                sum = fma(left[t / 4 * 4 + x % 4], right[4 * (2 * (t % 4) + i % 2) + x % 4], sum);
            }
            out[i][t] = sum;
        }
    }
    for (int i = 0; i < 2 * halves; i++)
        memcpy(operand(w, d[i]), out[i], sizeof *out);
    return NEXT;
}

static const Entry mma[] = {{"mma.sync", mma_sync}, {"mma.sync.f64", mma_sync_f64}};
REGISTER(mma)
