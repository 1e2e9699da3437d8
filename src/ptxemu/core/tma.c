/* Tensor copies (PTX ISA: "Tensors", "cp.async.bulk.tensor", "cp.reduce.async.bulk.tensor", "tensormap.replace").
 *
 * A tensor map as shim.c writes it, in 32-bit words: 0-1 address; 2: bits 0-3 are 2, 4-6 rank - 1, 7-10 type, 11-12 interleave, 13-14
 * swizzle, 15 NaN fill, 16 tf32, 17-18 L2 promotion, 19-20 swizzle atomicity; 3-6 strides / 16, their high 4 bits in word 7; 8-12 sizes - 1;
 * 13: bits 3 i... element stride - 1 of dimension i, 24-31 box - 1 of dimension 0; 14: box - 1 of dimensions 1 to 4. The driver has the
 * same fields in the same places, but for bits 0-3 of word 2 and the atomicity, which it refuses for sm_90.
 *
 * Maps of im2col have 3 in bits 0-3 of word 2, channels - 1 where the box of dimension 0 is, pixels - 1 in bits 0-9 of word 15, and in word
 * 14 the corners of the bounding box as signed numbers, the lower ones of W, H, D in its low half, the upper ones in its high half: of 16
 * bits each in 3 dimensions, of 8 in 4, of 5 in 5. So the CuTe DSL writes them. Maps of im2col::w and ::w::128 have 1 and 2 in bits 16-17 of
 * word 15 and the corners of W alone, of 16 bits; that layout is shim.c's own.
 */
#include "memory.h"

enum { MAP_WORDS = 16, MAP_BYTES = 128, TILED_MAP = 2, IM2COL_MAP = 3 };

/* ---- tensor maps --------------------------------------------------------------------------------------------------------------------- */
static const uint8_t *map_bytes(Warp *w, uint64_t addr, const char *what)
{
    if (addr & 63)
        fault(w, ERR_MEMORY, "%s: the tensor map's address %#llx is not a multiple of 64", what, (unsigned long long)addr);
    if ((addr & WINDOW_MASK) == WINDOW_PARAM) {
        global_check_param(w, addr, MAP_BYTES, what);
        return w->cta->cluster->launch->params + (addr & ~WINDOW_MASK);
    }
    if (addr & WINDOW_MASK)
        fault(w, ERR_MEMORY, "%s: the tensor map at %#llx is neither a parameter nor in global memory", what, (unsigned long long)addr);
    global_check(w, addr, MAP_BYTES, 64, what);
    return (const uint8_t *)addr;
}

/* What a map of im2col has beyond sizes and strides. */
static void corners(Warp *w, const uint32_t *x, const char *what, Tile *t)
{
    static const uint8_t width[] = {16, 8, 5};
    const int wide = x[15] >> 16 & 3, bits = t->rank < 3 || t->rank > 5 ? 16 : wide ? 16 : width[t->rank - 3];
    if (t->rank < 3 || wide == 3)
        fault(w, ERR_MEMORY, "%s: a tensor map of im2col of rank %d", what, t->rank);
    t->mode = wide == 2 ? MODE_W_128 : wide ? MODE_W : MODE_IM2COL;
    t->pixels = wide == 2 ? 128 : (x[15] & 1023) + 1;
    for (int d = 1; d < (wide ? 2 : t->rank - 1); d++) {
        t->lower[d] = (int32_t)(x[14] << (32 - bits * d)) >> (32 - bits);
        t->upper[d] = (int32_t)(x[14] >> 16 << (32 - bits * d)) >> (32 - bits);
        t->upper[d] += (int32_t)x[8 + d];
        if (t->lower[d] > t->upper[d])
            fault(w, ERR_MEMORY, "%s: the bounding box from %d to %d of dimension %d holds nothing", what, t->lower[d], t->upper[d], d);
    }
}

static void decode(Warp *w, const uint8_t *raw, const char *what, Tile *t)
{
    static const uint8_t types[] = {T_U8, T_U16, T_U32, T_S32, T_U64, T_S64, T_F16, T_F32, T_F32_FTZ, T_F64, T_BF16};
    uint32_t x[MAP_WORDS];
    memcpy(x, raw, sizeof x);
    const uint32_t c = x[2], type = c >> 7 & 15, im2col = (c & 15) == IM2COL_MAP;
    if (((c & 15) != TILED_MAP && !im2col) || type >= sizeof types)
        fault(w, ERR_MEMORY, "%s: no tensor map is there (control word %#x)", what, c);
    if (c >> 11 & 3)
        fault(w, ERR_UNSUPPORTED, "%s: interleaved tensor map", what);
    t->rank = (c >> 4 & 7) + 1;
    t->type = types[type];
    t->swizzle = c >> 13 & 3;
    t->atom = c >> 19 & 3;
    t->nan_fill = c >> 15 & 1;
    t->base = x[0] | (uint64_t)x[1] << 32;
    t->element = type_bytes(t->type);
    if (t->rank > 5)
        fault(w, ERR_MEMORY, "%s: tensor map of rank %d", what, t->rank);
    if (t->atom > 1 || (t->atom && (t->swizzle != 3 || w->cta->cluster->launch->program->arch < 100)))
        fault(w, ERR_UNSUPPORTED, "%s: swizzle atomicity %d of a tensor map", what, t->atom);
    if (t->nan_fill && t->type < T_F16)
        fault(w, ERR_MEMORY, "%s: a tensor map of integers with NaN fill", what);
    if (im2col)
        corners(w, x, what, t);
    uint32_t lines = 1;
    for (int d = 0; d < t->rank; d++) {
        uint32_t box = d ? x[14] >> 8 * (d - 1) & 255 : x[13] >> 24;
        t->size[d] = x[8 + d] + 1;
        t->stride[d] = d ? 16 * (x[2 + d] | (uint64_t)(x[7] >> 4 * (d - 1) & 15) << 32) : t->element;
        t->step[d] = d ? (x[13] >> 3 * d & 7) + 1 : 1; /* no strides along dimension 0 without interleave */
        t->box[d] = (box + t->step[d]) / t->step[d];   /* ceil(box / step), box being one less */
        lines *= d ? t->box[d] : 1;
    }
    t->row = t->box[0] * t->element;
    t->lines = im2col ? t->pixels : lines;
    static const uint8_t span[] = {0, 32, 64, 128};
    if (t->row % 16)
        fault(w, ERR_MEMORY, "%s: the box's innermost line has %u bytes, which is not a multiple of 16", what, t->row);
    if (t->swizzle && t->row > span[t->swizzle])
        fault(w, ERR_MEMORY, "%s: the box's innermost line has %u bytes, more than the swizzle's %u", what, t->row, span[t->swizzle]);
    if (t->swizzle && t->row < span[t->swizzle] && t->lines > 1)
        fault(w, ERR_UNSUPPORTED, "%s: the box's innermost line has %u bytes, fewer than the swizzle's %u", what, t->row, span[t->swizzle]);
}

/* ---- cp.async.bulk.tensor --------------------------------------------------------------------------------------------------------------- */
enum { TENSOR_MAP_WIDE = 1, TENSOR_SHARED_WIDE = 2, TENSOR_BAR_WIDE = 4, TENSOR_PAIR = 8, TENSOR_OWN = 16 };

/* imm[2] of all these, above the flags: the MODE_*, and how many coordinates there are; behind them come offsets of the filter (im2col), or
 * wHalo and wOffset. */
#define TENSOR_MODE(f) ((int)((f) >> 8 & 7))
#define TENSOR_COORDINATES(f) ((int)((f) >> 12 & 7))

static const char *const mode_names[] = {"tile", "tile::gather4", "im2col", "im2col::w", "im2col::w::128"};

/* Checks a walk's start, and takes what an instruction says of the filter. info: offsets, or wHalo and wOffset; NULL: .im2col_no_offs. */
static void walk_of(Warp *w, const int32_t *info, uint32_t lane, const char *what, Tile *t)
{
    const int wide = t->mode != MODE_IM2COL;
    for (int d = 1; d < (wide ? 2 : t->rank - 1); d++)
        if (t->at[d] > t->upper[d] || (t->at[d] < t->lower[d] && !wide))
            fault(w, ERR_MEMORY, "%s: coordinate %d of dimension %d is outside of the bounding box from %d to %d", what, t->at[d], d, t->lower[d],
                  t->upper[d]);
    if (!info)
        return;
    if (wide) {
        const uint32_t halo = ((const uint16_t *)operand(w, info[0]))[lane];
        t->offset[1] = ((const uint16_t *)operand(w, info[1]))[lane];
        if (!t->swizzle)
            fault(w, ERR_MEMORY, "%s: a tensor map of %s without swizzle", what, mode_names[t->mode]);
        t->lines += t->mode == MODE_W_128 ? 4 * halo : halo;
        return;
    }
    static const uint8_t width[] = {16, 8, 5};
    for (int d = 1; d < t->rank - 1; d++) {
        t->offset[d] = ((const uint16_t *)operand(w, info[d - 1]))[lane];
        if (t->offset[d] >> width[t->rank - 3])
            fault(w, ERR_MEMORY, "%s: offset %d of dimension %d; in %d dimensions they are less than %d", what, t->offset[d], d, t->rank,
                  1 << width[t->rank - 3]);
    }
}

/* first: the first coordinate's operand; info: whether offsets follow. */
static void tile_of(Warp *w, const Ins *ins, uint32_t lane, int first, int info, const char *what, Tile *t)
{
    const int mode = TENSOR_MODE(ins->imm[2]), n = TENSOR_COORDINATES(ins->imm[2]), rank = mode == MODE_ROWS ? 2 : n;
    uint64_t map = lane_address(w, ins->arg[0], ins->imm[0] >> 32, 1, lane);
    memset(t, 0, sizeof *t);
    decode(w, map_bytes(w, map, what), what, t);
    if (t->rank != rank)
        fault(w, ERR_MEMORY, "%s of %d dimensions with a tensor map of rank %d", what, rank, t->rank);
    if (t->mode != (mode == MODE_ROWS ? MODE_TILE : mode))
        fault(w, ERR_MEMORY, "%s in mode %s with a tensor map of mode %s", what, mode_names[mode], mode_names[t->mode]);
    for (int d = 0; d < n; d++) {
        const int32_t c = ((const int32_t *)operand(w, ins->arg[first + d]))[lane];
        if (mode == MODE_ROWS && d)
            t->row_at[d - 1] = c;
        else
            t->at[d] = c;
    }
    /* An H200 ends the kernel with an illegal instruction there. */
    if (mode <= MODE_ROWS && t->at[0] * (int64_t)t->element % 16)
        fault(w, ERR_MEMORY, "%s: coordinate %d of dimension 0, %lld bytes from the tensor's start, not a multiple of 16", what, t->at[0],
              (long long)t->at[0] * t->element);
    if (mode == MODE_ROWS) {
        if (t->box[1] != 1)
            fault(w, ERR_MEMORY, "%s: a box of %u rows; for four rows it must have one", what, t->box[1]);
        t->mode = mode;
        t->lines = 4;
    } else if (mode != MODE_TILE) {
        walk_of(w, info ? ins->arg + first + n : NULL, lane, what, t);
    }
    t->bytes = t->row * t->lines;
    box_check(w, t, what);
}

/* Load: operands map, dst, mbarrier, CTA mask or SINK, coordinates, offsets. imm[0]: offset of dst, of the map above 32 bits; imm[1]: offset
 * of the mbarrier; imm[2]: flags. */
static int tensor_load(Warp *w, const Ins *ins, uint32_t m)
{
    static const char what[] = "tensor copy to shared memory";
    const int flags = ins->imm[2];
    Tile t;
    FOR_LANES(i, m) {
        tile_of(w, ins, i, 4, 1, what, &t);
        Load l = {.tile = &t, .op = -1, .bytes = t.bytes, .pair = (flags & TENSOR_PAIR) != 0};
        uint32_t ranks = 0;
        if (ins->arg[3] != SINK && !(ranks = ((const uint16_t *)operand(w, ins->arg[3]))[i]))
            fault(w, ERR_MEMORY, "%s: an empty CTA mask", what);
        uint64_t dst = lane_address(w, ins->arg[1], (int32_t)ins->imm[0], flags & TENSOR_SHARED_WIDE, i);
        uint64_t bar = lane_address(w, ins->arg[2], ins->imm[1], flags & TENSOR_BAR_WIDE, i);
        load_barrier(w, &l, dst, bar, 128, ranks, what);
        if (flags & TENSOR_OWN && l.ranks != 1u << w->cta->rank)
            fault(w, ERR_MEMORY, "%s: a shared::cta destination in CTA %d", what, __builtin_ctz(l.ranks));
        load_issue(w, &l, what);
    }
    return NEXT;
}

/* Reductions of tensors that hardware does not have end a kernel there with an illegal instruction. */
static void check_reduction(Warp *w, const Tile *t, int op, const char *what)
{
    if ((op == OP_ADD && t->type == T_S64) || ((op == OP_MIN || op == OP_MAX) && (t->type == T_F32 || t->type == T_F64)))
        fault(w, ERR_UNSUPPORTED, "%s: no .%s of a tensor of %s", what, op == OP_ADD ? "add" : op == OP_MIN ? "min" : "max",
              t->type == T_S64 ? "s64" : t->type == T_F32 ? "f32" : "f64");
}

/* Stores begin inside the tensor, and so does the bounding box. */
static void check_target(Warp *w, const Tile *t, const char *what)
{
    for (int d = 0; d < t->rank; d++)
        if (t->at[d] < 0)
            fault(w, ERR_MEMORY, "%s: coordinate %d of dimension %d; a box may begin below zero in loads only", what, t->at[d], d);
    for (int i = 0; t->mode == MODE_ROWS && i < 4; i++)
        if (t->row_at[i] < 0)
            fault(w, ERR_MEMORY, "%s: row %d; a row may lie below zero in loads only", what, t->row_at[i]);
    for (int d = 1; t->mode == MODE_IM2COL && d < t->rank - 1; d++)
        if (t->lower[d] < 0 || t->upper[d] >= (int64_t)t->size[d])
            fault(w, ERR_MEMORY, "%s: the bounding box from %d to %d of dimension %d leaves the tensor, which has %u there", what, t->lower[d],
                  t->upper[d], d, t->size[d]);
}

/* Store or reduction: operands map, src, coordinates. imm[0]: offset of src, of the map above 32 bits; imm[1]: operation or -1; imm[2]: flags. */
static int tensor_store(Warp *w, const Ins *ins, uint32_t m)
{
    const char *what = ins->imm[1] < 0 ? "tensor copy to global memory" : "tensor reduction to global memory";
    Tile t;
    FOR_LANES(i, m) {
        Async *op;
        Cta *c;
        tile_of(w, ins, i, 2, 0, what, &t);
        check_target(w, &t, what);
        check_reduction(w, &t, ins->imm[1], what);
        uint64_t src = lane_address(w, ins->arg[1], (int32_t)ins->imm[0], ins->imm[2] & TENSOR_SHARED_WIDE, i);
        uint32_t off = shared_place(w, src, t.bytes, 128, 1, what, &c);
        Store *s = store_new(w, i, off, t.bytes, what, &op);
        if (!s->defined)
            tile_check_defined(w, c, &t, off, what);
        s->tiled = 1;
        s->tile = t;
        s->op = ins->imm[1];
        async_issue(op);
    }
    return NEXT;
}

/* Prefetch into the L2 cache: operands map, coordinates, offsets. It changes nothing. */
static int tensor_prefetch(Warp *w, const Ins *ins, uint32_t m)
{
    Tile t;
    FOR_LANES(i, m) tile_of(w, ins, i, 1, 1, "tensor prefetch", &t);
    return NEXT;
}

/* ---- tensormap.replace ------------------------------------------------------------------------------------------------------------------- */
enum { FIELD_ADDRESS, FIELD_RANK, FIELD_BOX, FIELD_SIZE, FIELD_STRIDE, FIELD_STEP, FIELD_TYPE, FIELD_INTERLEAVE, FIELD_SWIZZLE, FIELD_FILL,
       FIELD_ATOM };

static void replace(Warp *w, uint32_t *x, int field, int d, uint64_t value)
{
    if ((x[2] & 15) == IM2COL_MAP)
        fault(w, ERR_MEMORY, "tensormap.replace.tile of a tensor map of im2col");
#define PUT(word, shift, bits) x[word] = (x[word] & ~(((1u << (bits)) - 1) << (shift))) | ((uint32_t)(value) & ((1u << (bits)) - 1)) << (shift)
    switch (field) {
    case FIELD_ADDRESS: memcpy(x, &value, 8); return;
    case FIELD_RANK: PUT(2, 4, 3); return; /* the value is the rank - 1 */
    case FIELD_BOX:
        value--;
        if (d)
            PUT(14, 8 * (d - 1), 8);
        else
            PUT(13, 24, 8);
        return;
    case FIELD_SIZE: x[8 + d] = (uint32_t)value - 1; return;
    case FIELD_STRIDE:
        x[3 + d] = (uint32_t)(value >> 4);
        value >>= 36;
        PUT(7, 4 * d, 4);
        return;
    case FIELD_STEP: value--; PUT(13, 3 * d, 3); return;
    case FIELD_TYPE: { /* 11 and 12 are tf32 with and without subnormals */
        int tf32 = value >= 11;
        value = tf32 ? value - 4 : value;
        PUT(2, 7, 4);
        value = tf32;
        PUT(2, 16, 1);
        return;
    }
    case FIELD_INTERLEAVE: PUT(2, 11, 2); return;
    case FIELD_SWIZZLE: PUT(2, 13, 2); return;
    case FIELD_FILL: PUT(2, 15, 1); return;
    case FIELD_ATOM: PUT(2, 19, 2); return;
    }
#undef PUT
}

/* tensormap.replace [a], value: operands a, value (32 or 64 bits). imm[0]: offset; imm[1]: field, its index above 8 bits, 1 << 16 wide address,
 * 1 << 17 wide value, 1 << 18 shared; imm[2]: the value of fields that take immediates. */
static int tensormap_replace(Warp *w, const Ins *ins, uint32_t m)
{
    const int flags = ins->imm[1];
    FOR_LANES(i, m) {
        uint64_t addr = lane_address(w, ins->arg[0], ins->imm[0], flags >> 16 & 1, i), value = ins->imm[2];
        if (ins->arg[1] != SINK)
            value = flags >> 17 & 1 ? ((const uint64_t *)operand(w, ins->arg[1]))[i] : ((const uint32_t *)operand(w, ins->arg[1]))[i];
        uint32_t x[MAP_BYTES / 4];
        if (flags >> 18 & 1 || (addr & WINDOW_MASK) == WINDOW_SHARED) {
            Cta *c;
            uint32_t off = shared_place(w, addr, MAP_BYTES, 64, 1, "tensormap.replace", &c);
            shared_check_defined(w, c, off, MAP_BYTES, "tensormap.replace");
            shared_read(w, c, off, MAP_BYTES, x);
            replace(w, x, flags & 0xff, flags >> 8 & 0xff, value);
            shared_write(w, c, off, MAP_BYTES, x);
        } else {
            global_check(w, addr, MAP_BYTES, 64, "tensormap.replace");
            memcpy(x, (const void *)addr, MAP_BYTES);
            replace(w, x, flags & 0xff, flags >> 8 & 0xff, value);
            memcpy((void *)addr, x, MAP_BYTES);
        }
    }
    w->cta->cluster->activity++;
    return NEXT;
}

/* tensormap.cp_fenceproxy [dst], [src], 128: the warp copies a map from shared to global memory. operands dst, src; imm: offsets, wide src. */
static int cp_fenceproxy(Warp *w, const Ins *ins, uint32_t m)
{
    uint8_t map[MAP_BYTES];
    Cta *c;
    uint32_t lane = __builtin_ctz(m);
    uint64_t dst = lane_address(w, ins->arg[0], ins->imm[0], 1, lane);
    uint32_t off = shared_place(w, lane_address(w, ins->arg[1], ins->imm[1], ins->imm[2], lane), MAP_BYTES, 128, 1, "tensormap.cp_fenceproxy", &c);
    global_check(w, dst, MAP_BYTES, 128, "tensormap.cp_fenceproxy");
    shared_check_defined(w, c, off, MAP_BYTES, "tensormap.cp_fenceproxy");
    shared_read(w, c, off, MAP_BYTES, map);
    memcpy((void *)dst, map, MAP_BYTES);
    memory_fence(w);
    w->cta->cluster->activity++;
    return NEXT;
}

static const Entry tensors[] = {
    {"tensor.load", tensor_load}, {"tensor.store", tensor_store}, {"tensor.prefetch", tensor_prefetch},
    {"tensormap.replace", tensormap_replace}, {"tensormap.cp_fenceproxy", cp_fenceproxy},
};
REGISTER(tensors)
