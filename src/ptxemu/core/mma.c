/* mma.sync (PTX ISA: "Warp Level Matrix Multiply-Accumulate Instructions", "Matrix Fragments for mma.m16n8k..."). */
#include "dot.h"

#include <stdlib.h>

static void check_full(Warp *w, uint32_t m)
{
    if (m != FULL)
        fault(w, ERR_BARRIER, "mma.sync by lanes %#x only: all 32 lanes of the warp must execute it", m);
}

/* mma.sync d, a, b, c: operands are all registers in this order. imm[0]: m, n << 8, k << 16; imm[1]: types of a, b << 8, d and c << 16;
 * imm[2]: satfinite. In a register of A or B, lanes 4 g to 4 g + 3 together hold 16 bytes of row (or column) g along k. */
static int mma_sync(Warp *w, const Ins *ins, uint32_t m)
{
    check_full(w, m);
    int rows = ins->imm[0] & 255, k = ins->imm[0] >> 16 & 255;
    int ta = ins->imm[1] & 255, tb = ins->imm[1] >> 8 & 255, td = ins->imm[1] >> 16 & 255;
    int per = 16 / element_bytes(ta), halves = rows / 8, groups = k / per;
    int n_d = td == T_F16 ? halves : 2 * halves;
    const int32_t *d = ins->arg, *a = d + n_d, *b = a + halves * groups, *c = b + groups;
    float ra[16 * MAX_K], cb[8 * MAX_K];
    Spread sa, sb[2];
    uint32_t out[4][LANES];
    int integer = ta >= T_S8;
    DotRule rule = integer ? (DotRule){0} : dot_rule(ta, td == T_F16, w->cta->cluster->launch->program->arch);
    int emin_b = integer || tb == ta ? rule.emin : dot_rule(tb, 0, 90).emin;
    for (int g = 0; g < 8; g++) {
        for (int r = 0; r < halves * groups; r++)
            elements_of_row(ra + (g + 8 * (r % halves)) * k + r / halves * per, (uint32_t *)operand(w, a[r]) + 4 * g, ta);
        for (int r = 0; r < groups; r++)
            elements_of_row(cb + g * k + r * per, (uint32_t *)operand(w, b[r]) + 4 * g, tb);
    }
    for (int j = 0; j < 2; j++)
        spread_b(&sb[j], cb, j, k, emin_b);
    for (int h = 0; h < halves; h++) {
        spread_a(&sa, ra, h, k, rule.emin);
        for (int j = 0; j < 2; j++) {
            if (td == T_S32) {
                memcpy(out[2 * h + j], operand(w, c[2 * h + j]), sizeof *out);
                dot_tile_int((int32_t *)out[2 * h + j], &sa, &sb[j], k, ins->imm[2]);
                continue;
            }
            const uint32_t *old = operand(w, td == T_F16 ? c[h] : c[2 * h + j]);
            float acc[LANES];
            for (int t = 0; t < LANES; t++)
                acc[t] = td == T_F16 ? f16_to_float(old[t] >> 16 * j & 0xffff) : float_of(old[t]);
            dot_tile(acc, &sa, &sb[j], k, rule);
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
