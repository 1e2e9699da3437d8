/* Textures and surfaces by handle (PTX ISA: "Texture Instructions", "Surface Instructions"; CUDA programming guide: "Texture Fetching").
 *
 * A handle is the address of a Texture that Python keeps (textures.py); an instruction's handle must be one of the launch's.
 */
#include "half.h"
#include "memory.h"

#include <math.h>

enum { KIND_UNSIGNED, KIND_SIGNED, KIND_FLOAT };
enum { ADDRESS_WRAP, ADDRESS_MIRROR, ADDRESS_CLAMP = 3, ADDRESS_BORDER }; /* as txq names them */

static const Texture *texture_of(Warp *w, uint64_t handle, int surface, const char *what)
{
    const Launch *l = w->cta->cluster->launch;
    for (int i = 0; i < l->n_texture; i++) {
        const Texture *t = l->texture[i];
        if ((uint64_t)t != handle)
            continue;
        if (t->surface != surface)
            fault(w, ERR_MEMORY, "%s: the handle is a %s's", what, surface ? "texture" : "surface");
        return t;
    }
    fault(w, ERR_MEMORY, "%s: %#llx is no handle of a texture or surface of the launch", what, (unsigned long long)handle);
}

/* imm[0] of all instructions: dimensions, 1 << 2 an array. */
static void check_geometry(Warp *w, const Texture *t, int geometry, const char *what)
{
    if (t->dims != (geometry & 3) || (t->layers != 0) != (geometry >> 2 & 1))
        fault(w, ERR_MEMORY, "%s of geometry %s%dd of one of %s%dd", what, geometry >> 2 & 1 ? "a" : "", geometry & 3, t->layers ? "a" : "", t->dims);
}

/* ---- texels ------------------------------------------------------------------------------------------------------------------------------ */
typedef struct { double f[4]; int64_t i[4]; } Texel;

static Texel texel_at(Warp *w, const Texture *t, uint64_t at, const char *what)
{
    Texel out = {{0}, {0}};
    const uint32_t bytes = t->channels * t->bytes;
    global_check(w, at, bytes, t->bytes, what);
    if (races(w))
        race_access(w, at, bytes, TOUCH_READ, 0, clock_epoch(w), what);
    for (uint32_t c = 0; c < t->channels; c++) {
        uint32_t raw = 0;
        memcpy(&raw, (const uint8_t *)at + c * t->bytes, t->bytes);
        if (t->kind == KIND_FLOAT) {
            float x;
            memcpy(&x, &raw, 4);
            out.f[c] = t->bytes == 2 ? f16_to_float((uint16_t)raw) : x;
            continue;
        }
        const int bits = 8 * (int)t->bytes;
        out.i[c] = t->kind == KIND_SIGNED ? (int32_t)(raw << (32 - bits)) >> (32 - bits) : (int64_t)raw;
        if (t->fractions) {
            out.f[c] = (double)out.i[c] / (double)((1u << (bits - (t->kind == KIND_SIGNED))) - 1);
            out.f[c] = out.f[c] < -1 ? -1 : out.f[c];
        }
    }
    return out;
}

/* An index along dimension d brought into the texture; -1: outside, where the border is. */
static int64_t addressed(const Texture *t, int d, int64_t i)
{
    const int64_t n = t->size[d];
    int64_t m;
    switch (t->address[d]) {
    case ADDRESS_WRAP: return (i % n + n) % n;
    case ADDRESS_MIRROR: m = (i % (2 * n) + 2 * n) % (2 * n); return m < n ? m : 2 * n - 1 - m;
    case ADDRESS_BORDER: return i < 0 || i >= n ? -1 : i;
    default: return i < 0 ? 0 : i >= n ? n - 1 : i;
    }
}

static Texel fetch(Warp *w, const Texture *t, const int64_t *index, uint32_t layer, const char *what)
{
    uint64_t at = t->base + layer * t->slice;
    for (int d = 0; d < t->dims; d++) {
        const int64_t i = addressed(t, d, index[d]);
        if (i < 0) {
            Texel out;
            for (int c = 0; c < 4; c++) {
                out.f[c] = (uint32_t)c < t->channels ? t->border[c] : 0;
                out.i[c] = (int64_t)out.f[c];
            }
            return out;
        }
        at += (uint64_t)i * (d == 0 ? t->channels * t->bytes : d == 1 ? t->pitch : t->slice);
    }
    return texel_at(w, t, at, what);
}

/* A coordinate in texels; NaN counts as 0, and what is far outside stays outside. */
static double texels(const Texture *t, int d, float x)
{
    const float scaled = t->normalized ? x * (float)t->size[d] : x;
    return isnan(scaled) ? 0 : scaled > 1e9f ? 1e9 : scaled < -1e9f ? -1e9 : scaled;
}

/* Linear filtering: the texels around, weighted by fixed-point numbers of 8 bits after the point. */
static Texel filtered(Warp *w, const Texture *t, const double *x, uint32_t layer, const char *what)
{
    int64_t low[3], index[3];
    double part[3];
    Texel sum = {{0}, {0}};
    for (int d = 0; d < t->dims; d++) {
        low[d] = (int64_t)floor(x[d] - 0.5);
        part[d] = floor((x[d] - 0.5 - (double)low[d]) * 256 + 0.5) / 256;
    }
    for (int corner = 0; corner < 1 << t->dims; corner++) {
        double weight = 1;
        for (int d = 0; d < t->dims; d++) {
            index[d] = low[d] + (corner >> d & 1);
            weight *= corner >> d & 1 ? part[d] : 1 - part[d];
        }
        if (weight == 0)
            continue;
        const Texel one = fetch(w, t, index, layer, what);
        for (int c = 0; c < 4; c++)
            sum.f[c] += weight * one.f[c];
    }
    return sum;
}

/* ---- tex, tld4, txq ----------------------------------------------------------------------------------------------------------------------- */
/* imm[0] above the geometry: 1 << 3 there are offsets, 1 << 4 coordinates are floats, 8 and on: 1 + the channel of tld4. imm[1]: DATA_*. imm[2]:
 * destinations, the last of them a predicate or SINK. */
enum { DATA_U32, DATA_S32, DATA_F32, DATA_F16, DATA_F16X2 };

static void put_texel(Warp *w, const Ins *ins, uint32_t lane, const Texel *x, int data)
{
    for (int c = 0; c < 4; c++) {
        const float f = (float)x->f[c];
        if (data == DATA_F16X2) {
            if (c % 2 == 0 && ins->arg[c / 2] != SINK)
                ((uint32_t *)operand(w, ins->arg[c / 2]))[lane] = f16_of_float(f) | (uint32_t)f16_of_float((float)x->f[c + 1]) << 16;
        } else if (ins->arg[c] == SINK) {
            continue;
        } else if (data == DATA_F16) {
            ((uint16_t *)operand(w, ins->arg[c]))[lane] = (uint16_t)f16_of_float(f);
        } else if (data == DATA_F32) {
            ((float *)operand(w, ins->arg[c]))[lane] = f;
        } else {
            ((uint32_t *)operand(w, ins->arg[c]))[lane] = (uint32_t)x->i[c];
        }
    }
}

static int texture_fetch(Warp *w, const Ins *ins, uint32_t m)
{
    const int geometry = ins->imm[0] & 7, dims = geometry & 3, array = geometry >> 2, floats = ins->imm[0] >> 4 & 1, data = ins->imm[1];
    const int gather = (int)(ins->imm[0] >> 8), n = ins->imm[2];
    const char *what = gather ? "tld4" : "tex";
    const int32_t *coordinate = ins->arg + n + 1 + array, *shift = ins->imm[0] >> 3 & 1 ? coordinate + dims : NULL;
    FOR_LANES(i, m) {
        const Texture *t = texture_of(w, ((const uint64_t *)operand(w, ins->arg[n]))[i], 0, what);
        check_geometry(w, t, geometry, what);
        const int real = t->kind == KIND_FLOAT || t->fractions;
        if (real != (data >= DATA_F32))
            fault(w, ERR_MEMORY, "%s returns %s of a texture of %s", what, real ? "integers" : "floats", real ? "floats" : "integers");
        const uint32_t layer = array ? ((const uint32_t *)operand(w, coordinate[-1]))[i] : 0;
        if (array && layer >= t->layers)
            fault(w, ERR_MEMORY, "%s: layer %u of a texture of %u", what, layer, t->layers);
        double x[3];
        int64_t index[3];
        for (int d = 0; d < dims; d++) {
            const void *c = operand(w, coordinate[d]);
            const int by = shift ? ((const int32_t *)operand(w, shift[d]))[i] : 0;
            if (by < -8 || by > 7)
                fault(w, ERR_MEMORY, "%s: offset %d; allowed: -8 to 7", what, by);
            x[d] = (floats ? texels(t, d, ((const float *)c)[i]) : (double)((const int32_t *)c)[i]) + by;
            index[d] = (int64_t)floor(gather ? x[d] - 0.5 : x[d]);
        }
        Texel out;
        if (gather) { /* counter-clockwise from the lower left, lines counting downwards */
            for (int k = 0; k < 4; k++) {
                const int64_t at[2] = {index[0] + (k == 1 || k == 2), index[1] + (k < 2)};
                const Texel one = fetch(w, t, at, layer, what);
                out.f[k] = one.f[gather - 1];
                out.i[k] = one.i[gather - 1];
            }
        } else {
            out = floats && t->linear ? filtered(w, t, x, layer, what) : fetch(w, t, index, layer, what);
        }
        put_texel(w, ins, i, &out, data);
    }
    if (ins->arg[n - 1] != SINK)
        *(uint32_t *)operand(w, ins->arg[n - 1]) |= m; /* all is resident */
    return NEXT;
}

/* txq, suq d, [a]: operands d, a. imm[0]: QUERY_*; imm[1]: 1 of a surface. */
enum { QUERY_WIDTH, QUERY_HEIGHT, QUERY_DEPTH, QUERY_TYPE, QUERY_NORMALIZED, QUERY_LAYERS, QUERY_LEVELS, QUERY_SAMPLES, QUERY_FILTER,
       QUERY_ADDRESS_0, QUERY_ADDRESS_1, QUERY_ADDRESS_2, QUERY_LAYOUT };

static uint32_t answer(const Texture *t, int query)
{
    switch (query) {
    case QUERY_WIDTH: case QUERY_HEIGHT: case QUERY_DEPTH: return t->size[query - QUERY_WIDTH];
    case QUERY_TYPE: /* CU_AD_FORMAT_* */
        return t->kind == KIND_FLOAT ? 8u * t->bytes : (t->kind == KIND_SIGNED ? 8u : 1u) + (t->bytes == 1 ? 0 : t->bytes / 2);
    case QUERY_NORMALIZED: return (uint32_t)t->normalized;
    case QUERY_LAYERS: return t->layers;
    case QUERY_FILTER: return (uint32_t)t->linear;
    case QUERY_ADDRESS_0: case QUERY_ADDRESS_1: case QUERY_ADDRESS_2: return (uint32_t)t->address[query - QUERY_ADDRESS_0];
    }
    return 0; /* levels, samples, a linear layout: it has none */
}

static int query(Warp *w, const Ins *ins, uint32_t m)
{
    uint32_t *d = operand(w, ins->arg[0]);
    FOR_LANES(i, m) {
        const char *what = ins->imm[1] ? "suq" : "txq";
        d[i] = answer(texture_of(w, ((const uint64_t *)operand(w, ins->arg[1]))[i], (int)ins->imm[1], what), (int)ins->imm[0]);
    }
    return NEXT;
}

/* ---- suld, sust, sured ---------------------------------------------------------------------------------------------------------------------- */
enum { OUTSIDE_TRAP, OUTSIDE_CLAMP, OUTSIDE_ZERO };

/* The address of an access of so many bytes, or 0: it is outside and counts for nothing. coordinate[0] is a layer in arrays; the first of the
 * others counts bytes. */
static uint64_t surface_place(Warp *w, const Ins *ins, uint64_t handle, const int32_t *coordinate, uint32_t lane, uint32_t bytes, const char *what)
{
    const int geometry = ins->imm[0] & 7, dims = geometry & 3, array = geometry >> 2, outside = ins->imm[0] >> 4 & 3;
    const Texture *t = texture_of(w, handle, 1, what);
    check_geometry(w, t, geometry, what);
    uint64_t at = t->base;
    for (int d = -array; d < dims; d++) {
        int64_t c = ((const int32_t *)operand(w, coordinate[d + array]))[lane], last = (d < 0 ? t->layers : t->size[d]) - 1;
        if (d < 0)
            c = (uint32_t)c;
        if (d == 0) {
            last = (int64_t)t->size[0] * t->channels * t->bytes - bytes;
            if (c % bytes)
                fault(w, ERR_MEMORY, "misaligned %s of %u bytes at byte %lld of a line", what, bytes, (long long)c);
        }
        if (c < 0 || c > last) {
            if (outside == OUTSIDE_TRAP)
                fault(w, ERR_MEMORY, "%s outside of the surface: %s %lld; the last is %lld", what,
                      d < 0 ? "layer" : d == 0 ? "byte" : d == 1 ? "line" : "depth", (long long)c, (long long)last);
            if (outside == OUTSIDE_ZERO || last < 0)
                return 0;
            c = c < 0 ? 0 : last / (d ? 1 : bytes) * (d ? 1 : bytes);
        }
        at += (uint64_t)c * (d == 0 ? 1 : d == 1 ? t->pitch : t->slice);
    }
    global_check(w, at, bytes, 1, what);
    return at;
}

/* suld d..., [a, b]: operands d..., a, b...; sust [a, b], c...: operands a, c..., b.... imm[0]: geometry, OUTSIDE_* << 4; imm[1]: bytes of an
 * element, of a register above 8 bits; imm[2]: elements. */
static int suld(Warp *w, const Ins *ins, uint32_t m)
{
    const uint32_t size = ins->imm[1] & 255, reg = ins->imm[1] >> 8, n = ins->imm[2];
    FOR_LANES(i, m) {
        uint8_t data[16] = {0};
        const uint64_t handle = ((const uint64_t *)operand(w, ins->arg[n]))[i];
        const uint64_t at = surface_place(w, ins, handle, ins->arg + n + 1, i, size * n, "suld");
        if (at) {
            if (races(w))
                race_access(w, at, size * n, TOUCH_READ, 0, clock_epoch(w), "suld");
            memcpy(data, (const void *)at, size * n);
        }
        for (uint32_t j = 0; j < n; j++) {
            uint64_t value = 0;
            memcpy(&value, data + j * size, size);
            if (ins->arg[j] != SINK)
                memcpy((uint8_t *)operand(w, ins->arg[j]) + i * reg, &value, reg);
        }
    }
    return NEXT;
}

static int sust(Warp *w, const Ins *ins, uint32_t m)
{
    const uint32_t size = ins->imm[1] & 255, reg = ins->imm[1] >> 8, n = ins->imm[2];
    FOR_LANES(i, m) {
        uint8_t data[16];
        for (uint32_t j = 0; j < n; j++)
            memcpy(data + j * size, (const uint8_t *)operand(w, ins->arg[1 + j]) + i * reg, size);
        const uint64_t handle = ((const uint64_t *)operand(w, ins->arg[0]))[i];
        const uint64_t at = surface_place(w, ins, handle, ins->arg + 1 + n, i, size * n, "sust");
        if (!at)
            continue;
        if (races(w)) {
            const int same = !memcmp((const void *)at, data, size * n);
            race_access(w, at, size * n, TOUCH_WRITE | (same ? TOUCH_SAME : 0), 0, clock_epoch(w), "sust");
        }
        memcpy((void *)at, data, size * n);
    }
    w->cta->cluster->activity++;
    return NEXT;
}

/* sured [a, b], c: operands a, c, b.... imm[0] as above; imm[1]: operation; imm[2]: type. */
static int sured(Warp *w, const Ins *ins, uint32_t m)
{
    const uint32_t size = type_bytes((int)ins->imm[2]);
    FOR_LANES(i, m) {
        const uint64_t handle = ((const uint64_t *)operand(w, ins->arg[0]))[i];
        const uint64_t at = surface_place(w, ins, handle, ins->arg + 2, i, size, "sured");
        if (!at)
            continue;
        if (races(w))
            race_access(w, at, size, TOUCH_READ | TOUCH_WRITE, 1, clock_epoch(w), "sured");
        uint64_t b = 0;
        memcpy(&b, (const uint8_t *)operand(w, ins->arg[1]) + i * size, size);
        global_reduce((void *)at, (int)ins->imm[1], (int)ins->imm[2], b, 0);
    }
    w->cta->cluster->activity++;
    return NEXT;
}

static const Entry textures[] = {{"tex", texture_fetch}, {"txq", query}, {"suld", suld}, {"sust", sust}, {"sured", sured}};
REGISTER(textures)
