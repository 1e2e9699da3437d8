/* What tcgen05.mma computes. Products are exact in float; they are summed in order of k, then added to D. Block-scaled: the sum of every block is
 * scaled (exactly, in double) before it is added to the row's. */
#include <math.h>
#include <string.h>

#include "sparse.h"
#include "tensor_core.h"

enum { K_MOST = 128, K_STORED = 64, WIDE = MAX_N + 32 }; /* WIDE: columns of B with those that a column shift passes over */

static int enabled(const Mma *o, int cta, uint32_t lane) { return !(o->lanes_off[cta * 4 + lane / 32] >> lane % 32 & 1); }

/* ---- elements ------------------------------------------------------------------------------------------------------------------------------ */
static float narrow_value(uint32_t v, int exponent_bits, int bits, int bias)
{
    int exponent = v >> bits & ((1 << exponent_bits) - 1), fraction = v & ((1 << bits) - 1);
    float r = exponent ? ldexpf(1.0f + ldexpf(fraction, -bits), exponent - bias) : ldexpf(fraction, 1 - bias - bits);
    return v >> (exponent_bits + bits) & 1 ? -r : r;
}

static float narrow_table[6][256]; /* by the instruction descriptor's numbers: e4m3, e5m2, none, e2m3, e3m2, e2m1 */

__attribute__((constructor)) static void fill_narrow(void)
{
    for (uint32_t v = 0; v < 256; v++) {
        narrow_table[0][v] = (v & 0x7f) == 0x7f ? NAN : narrow_value(v, 4, 3, 7);
        narrow_table[1][v] = (v & 0x7c) != 0x7c ? narrow_value(v, 5, 2, 15) : v & 3 ? NAN : v & 0x80 ? -INFINITY : INFINITY;
        narrow_table[3][v] = narrow_value(v, 2, 3, 1);
        narrow_table[4][v] = narrow_value(v, 3, 2, 3);
        narrow_table[5][v] = narrow_value(v, 2, 1, 1);
    }
}

/* 16 narrow floats of mixed kinds. In shared memory they are packed and padding follows; in tensor memory each has 8 bits, 6-bit ones in the
 * lowest, 4-bit ones in the middle ("Packing formats of elements in Tensor and Shared memory"). */
static void convert_narrow(int format, int in_tensor, const uint8_t *u, float *out)
{
    const float *table = narrow_table[format];
    for (int i = 0; i < 16; i++) {
        uint32_t v = u[i];
        if (format == 5)
            v = in_tensor ? v >> 2 & 15 : u[i / 2] >> i % 2 * 4 & 15;
        else if (format >= 3)
            v = in_tensor ? v & 63 : (u[i * 6 / 8] | u[i * 6 / 8 + 1] << 8) >> i * 6 % 8 & 63;
        out[i] = table[v];
    }
}

/* The elements of a 16-byte chunk as floats (int8 as float: exact). */
static void convert(const Mma *o, int format, int in_tensor, const void *chunk, float *out)
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
    } else if (o->kind == KIND_I8) {
        for (int i = 0; i < 16; i++)
            out[i] = format ? ((const int8_t *)chunk)[i] : ((const uint8_t *)chunk)[i];
    } else if (o->per == 32) {
        for (int i = 0; i < 32; i++)
            out[i] = narrow_table[5][((const uint8_t *)chunk)[i / 2] >> i % 2 * 4 & 15];
    } else {
        convert_narrow(format, in_tensor, chunk, out);
    }
}

/* An operand of n rows (columns of B) of `per` chunks or, where it is contiguous along them (`mn`), of `depth` k: element k of row i at
 * out[i * by_i + k * by_k]. */
static void gather(const Mma *o, int format, int mn, const uint8_t *shared, const uint32_t *chunk, uint32_t n, uint32_t per, uint32_t depth, float *out,
                   uint32_t by_i, uint32_t by_k)
{
    float v[32];
    const uint32_t t = o->per;
    if (!mn) {
        for (uint32_t i = 0; i < n; i++)
            for (uint32_t j = 0; j < per; j++) {
                convert(o, format, 0, shared + chunk[per * i + j], v);
                for (uint32_t e = 0; e < t; e++)
                    out[i * by_i + (j * t + e) * by_k] = v[e];
            }
        return;
    }
    const uint32_t across = (n + t - 1) / t;
    for (uint32_t k = 0; k < depth; k++)
        for (uint32_t j = 0; j < across; j++) {
            convert(o, format, 0, shared + chunk[k * across + j], v);
            for (uint32_t e = 0; e < t && j * t + e < n; e++)
                out[(j * t + e) * by_i + k * by_k] = v[e];
        }
}

/* ---- scale factors ("Block Scaling", "Scale Factor A ID", "Scale Factor B ID") ----------------------------------------------------------------- */
/* Row i of A (or column of B) has its factors at lane i % 32 of every 32 lanes, in column i / 32, from byte `id` on. The copies in the four
 * (with two halves of B's columns: two) quarters of the lanes must be the same. */
typedef struct { const Tensor *t; uint32_t column, quarters; int id, blocks, e4m3; } Factors;

static const uint8_t *factor_bytes(const Factors *f, uint32_t quarter, uint32_t i)
{
    return (const uint8_t *)&f->t->data[quarter * 32 + i % 32][f->column + i / 32] + f->id;
}

static int factors_defined(const Factors *f, uint32_t quarter, uint32_t i)
{
    uint8_t all = 1;
    for (uint32_t q = 0; q < f->quarters; q++)
        all &= f->t->valid[(quarter / f->quarters * f->quarters + q) * 32 + i % 32][f->column + i / 32];
    return all;
}

static float factor(const Factors *f, uint32_t quarter, uint32_t i, int block)
{
    const uint8_t v = factor_bytes(f, quarter, i)[block];
    return f->e4m3 ? narrow_table[0][v & 0x7f] : v == 255 ? NAN : ldexpf(1.0f, v - 127);
}

static void check_copies(Warp *w, const Factors *f, uint32_t n, const char *what)
{
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t q = 0; q < 4; q++) {
            const uint32_t first = q / f->quarters * f->quarters;
            if (factors_defined(f, q, i) && memcmp(factor_bytes(f, q, i), factor_bytes(f, first, i), f->blocks))
                fault(w, ERR_TENSOR, "tcgen05.mma.block_scale: the scale factors of %s %u differ between tensor memory lanes %u and %u, column %u; they "
                      "must be in all 32-lane partitions", what, i, first * 32 + i % 32, q * 32 + i % 32, f->column + i / 32);
        }
}

static Factors factors_of(const Mma *o, const Part *p, int b)
{
    return (Factors){p->cta->tensor, b ? o->b_scales : o->a_scales, b ? 4 / splits(o) : 4, b ? o->b_scale_id : o->a_scale_id, o->blocks, o->scale_e4m3};
}

/* ---- metadata ("Sparse Matrices", "Sparsity selector") ------------------------------------------------------------------------------------------- */
/* The words that hold the metadata of D's row in this lane. Elements of 16 and 32 bits: a word has four chunks of two rows that are eight lanes
 * apart, those of the row's second half lie eight lanes on. Others: two words of the lane have 16 chunks. */
typedef struct { uint32_t lane[2], column[2]; int shift; } MetaPlace;

static MetaPlace meta_place(const Mma *o, uint32_t lane)
{
    const uint32_t column = (o->meta & 0xffff) + o->selector;
    if (o->kind > KIND_TF32)
        return (MetaPlace){{lane, lane}, {column, column + 1}, 0};
    const uint32_t first = lane - lane % 16 + lane % 8;
    return (MetaPlace){{first, first + 8}, {column, column}, lane % 16 / 8 * 16};
}

static uint64_t meta_of(const Mma *o, const Tensor *t, uint32_t lane)
{
    const MetaPlace at = meta_place(o, lane);
    const uint64_t low = t->data[at.lane[0]][at.column[0]], high = t->data[at.lane[1]][at.column[1]];
    return o->kind > KIND_TF32 ? low | high << 32 : (low >> at.shift & 0xffff) | (high >> at.shift & 0xffff) << 16;
}

static void places_of(Warp *w, const Mma *o, const Tensor *t, uint32_t lane, uint8_t *place)
{
    const MetaPlace at = meta_place(o, lane);
    for (int i = 0; i < 2; i++)
        if (!t->valid[at.lane[i]][at.column[i]])
            fault(w, ERR_MEMORY, "the metadata of tcgen05.mma.sp at PTX line %d depends on uninitialised tensor memory at lane %u, column %u", o->line,
                  at.lane[i], at.column[i]);
    const uint64_t meta = meta_of(o, t, lane);
    const int wrong = sparse_places(place, meta, o->k, o->sparse, 0);
    if (wrong >= 0)
        fault(w, ERR_TENSOR, "tcgen05.mma.sp: the metadata %#x of the row at lane %u, elements %d to %d, means nothing", (unsigned)(meta >> 4 * wrong & 15),
              lane, wrong * sparse_chunk(o->sparse), (wrong + 1) * sparse_chunk(o->sparse) - 1);
}

/* ---- D ------------------------------------------------------------------------------------------------------------------------------------------- */
typedef float Cell __attribute__((may_alias)); /* an f32 accumulator in its cell */

/* D's elements of one row into its cells. */
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

/* Rows (columns of B) of an operand in shared memory that hold something undefined. */
static void undefined_rows(const Mma *o, int format, int mn, const Cta *c, const uint32_t *chunk, uint32_t n, uint32_t per, uint32_t depth, uint8_t *out)
{
    const uint32_t t = o->per, bytes = data_bytes(o, format), bits = bytes * 8 / t, across = (n + t - 1) / t;
    for (uint32_t i = 0; !mn && i < per * n; i++)
        out[i / per] |= !shared_defined(c, chunk[i], bytes);
    for (uint32_t i = 0; mn && i < depth * across; i++)
        for (uint32_t e = 0; e < t && i % across * t + e < n; e++) {
            const uint32_t first = e * bits / 8, last = (e * bits + bits - 1) / 8;
            out[i % across * t + e] |= !shared_defined(c, chunk[i] + first, last - first + 1);
        }
}

/* D's cells become defined, but for rows of A and columns of B (`undefined`) that are not, and cells that accumulate on what is not. */
static void define_part(const Mma *o, int which, const uint8_t *undefined)
{
    const Part *p = &o->part[which];
    Tensor *t = p->cta->tensor;
    const uint32_t rows = o->m / o->group, column = o->d & 0xffff, parts = splits(o), n = o->n / parts;
    const Factors fa = factors_of(o, p, 0), fb = factors_of(o, p, 1);
    uint8_t row[MAX_M] = {0};
    if (!o->a_tensor && p->undefined)
        undefined_rows(o, o->a_format, o->a_mn, p->cta, p->a, rows, 2, o->k_stored, row);
    for (uint32_t part = 0; part < parts; part++)
        for (uint32_t r = 0; r < rows; r++) {
            const uint32_t lane = lane_of(o, r, part);
            if (!enabled(o, which, lane))
                continue;
            uint8_t *valid = &t->valid[lane][column];
            const int lost = row[r] || (o->a_tensor && !tensor_defined(p->cta, lane, 1, o->a_address & 0xffff, 8))
                             || (o->blocks && !factors_defined(&fa, lane / 32, r));
            if (lost || !o->accumulate)
                memset(valid, !lost, n);
            for (uint32_t j = 0; undefined && j < n; j++)
                valid[j] &= !undefined[part * n + j];
            for (uint32_t j = 0; o->blocks && j < n; j++)
                valid[j] &= factors_defined(&fb, lane / 32, j);
        }
}

/* One row's sums over what is stored of A, at `place` along k (NULL: all of it). */
static void row_sums(const Mma *o, const float *restrict row, const uint8_t *restrict place, const float *restrict b, uint32_t n, float *restrict sum)
{
    for (int i = 0; i < o->k_stored; i++) {
        const float x = row[i], *column = b + (place ? place[i] : i) * WIDE;
        for (uint32_t j = 0; j < n; j++)
            sum[j] += x * column[j];
    }
}

static void row_sums_scaled(const Mma *o, const float *restrict row, const uint8_t *restrict place, const float *restrict b, uint32_t n,
                            const float *restrict a_scale, const float *restrict b_scale, float *restrict sum)
{
    const int each = o->k_stored / o->blocks;
    for (int block = 0; block < o->blocks; block++) {
        float part[MAX_N] = {0};
        for (int i = block * each; i < (block + 1) * each; i++) {
            const float x = row[i], *column = b + (place ? place[i] : i) * WIDE;
            for (uint32_t j = 0; j < n; j++)
                part[j] += x * column[j];
        }
        for (uint32_t j = 0; j < n; j++)
            sum[j] += (float)((double)part[j] * ((double)a_scale[block] * b_scale[block * MAX_N + j]));
    }
}

static void mma_part(Warp *w, const Mma *o, int which, const float *bt)
{
    const Part *p = &o->part[which];
    Tensor *t = p->cta->tensor;
    const uint32_t rows = o->m / o->group, column = o->d & 0xffff, parts = splits(o), n = o->n / parts;
    const Factors fa = factors_of(o, p, 0), fb = factors_of(o, p, 1);
    float a[MAX_M * K_STORED], from_tensor[K_STORED], a_scale[4], b_scale[4 * MAX_N];
    uint8_t place[K_STORED];
    if (!o->a_tensor)
        gather(o, o->a_format, o->a_mn, p->cta->shared.data, p->a, rows, 2, o->k_stored, a, K_STORED, 1);
    if (o->blocks) {
        check_copies(w, &fa, rows, "row");
        check_copies(w, &fb, n, "column");
    }
    for (uint32_t part = 0; part < parts; part++) {
        for (int block = 0; block < o->blocks; block++)
            for (uint32_t j = 0; j < n; j++)
                b_scale[block * MAX_N + j] = factor(&fb, part * fb.quarters, j, block);
        for (uint32_t r = 0; r < rows; r++) {
            const uint32_t lane = lane_of(o, r, part);
            if (!enabled(o, which, lane))
                continue;
            const float *row = a + r * K_STORED, *b = bt + o->shift + part * n;
            if (o->a_tensor) {
                const uint8_t *words = (const uint8_t *)&t->data[lane][o->a_address & 0xffff];
                convert(o, o->a_format, 1, words, from_tensor);
                convert(o, o->a_format, 1, words + 16, from_tensor + o->per);
                row = from_tensor;
            }
            if (o->sparse)
                places_of(w, o, t, lane, place);
            for (int block = 0; block < o->blocks; block++)
                a_scale[block] = factor(&fa, lane / 32, r, block);
            float sum[MAX_N] = {0};
            if (o->blocks)
                row_sums_scaled(o, row, o->sparse ? place : NULL, b, n, a_scale, b_scale, sum);
            else
                row_sums(o, row, o->sparse ? place : NULL, b, n, sum);
            store_row(o, &t->data[lane][column], sum, n);
        }
    }
}

void mma_run(Async *op)
{
    Mma *o = op->data;
    float bt[K_MOST * WIDE];
    uint8_t undefined[WIDE] = {0};
    const uint32_t columns = o->n / o->group;
    int any = 0;
    for (int i = 0; i < o->group; i++) {
        const Part *p = &o->part[i];
        gather(o, o->b_format, o->b_mn, p->cta->shared.data, p->b, columns + o->shift, o->b_chunks, o->k, bt + i * columns, 1, WIDE);
        if (p->undefined)
            undefined_rows(o, o->b_format, o->b_mn, p->cta, p->b, columns + o->shift, o->b_chunks, o->k, undefined + i * columns);
        any |= p->undefined;
    }
    for (int j = 0; j < o->n; j++)
        if (o->zero[j / 64] >> j % 64 & 1) {
            undefined[o->shift + j] = 0;
            for (int k = 0; k < o->k; k++)
                bt[k * WIDE + o->shift + j] = 0;
        }
    for (int i = 0; i < o->group; i++) {
        define_part(o, i, any ? undefined + o->shift : NULL);
        mma_part(op->warp, o, i, bt);
    }
    for (int i = 0; i < o->group; i++) {
        unlock(&o->part[i]);
        end_tensor(&o->part[i]);
    }
}
