/* Tensor copies in tile mode (PTX ISA: "Tensors", "cp.async.bulk.tensor", "cp.reduce.async.bulk.tensor", "tensormap.replace").
 *
 * A tensor map as shim.c writes it, in 32-bit words: 0-1 address; 2: bits 0-3 are 2, 4-6 rank - 1, 7-10 type, 11-12 interleave, 13-14
 * swizzle, 15 NaN fill, 16 tf32, 17-18 L2 promotion, 19-20 swizzle atomicity; 3-6 strides / 16, their high 4 bits in word 7; 8-12 sizes - 1;
 * 13: bits 3 i... element stride - 1 of dimension i, 24-31 box - 1 of dimension 0; 14: box - 1 of dimensions 1 to 4. The driver has the
 * same fields in the same places, but for bits 0-3 of word 2 and the atomicity, which it refuses for sm_90.
 */
#include "memory.h"

enum { MAP_WORDS = 16, MAP_BYTES = 128 };

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

static void decode(Warp *w, const uint8_t *raw, const char *what, Tile *t)
{
    static const uint8_t types[] = {T_U8, T_U16, T_U32, T_S32, T_U64, T_S64, T_F16, T_F32, T_F32_FTZ, T_F64, T_BF16};
    uint32_t x[MAP_WORDS];
    memcpy(x, raw, sizeof x);
    const uint32_t c = x[2], type = c >> 7 & 15;
    if ((c & 15) != 2 || type >= sizeof types)
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
    t->bytes = t->row * lines;
    static const uint8_t span[] = {0, 32, 64, 128};
    if (t->row % 16)
        fault(w, ERR_MEMORY, "%s: the box's innermost line has %u bytes, which is not a multiple of 16", what, t->row);
    if (t->swizzle && t->row > span[t->swizzle])
        fault(w, ERR_MEMORY, "%s: the box's innermost line has %u bytes, more than the swizzle's %u", what, t->row, span[t->swizzle]);
    if (t->swizzle && t->row < span[t->swizzle] && lines > 1)
        fault(w, ERR_UNSUPPORTED, "%s: the box's innermost line has %u bytes, fewer than the swizzle's %u", what, t->row, span[t->swizzle]);
}

/* Indices of the box along one dimension that lie inside the tensor: [*from, *to). */
static void clip(const Tile *t, int d, uint32_t *from, uint32_t *to)
{
    int64_t at = t->at[d], step = t->step[d], size = t->size[d];
    int64_t lo = at < 0 ? (-at + step - 1) / step : 0, hi = size > at ? (size - at + step - 1) / step : 0;
    if (hi > t->box[d])
        hi = t->box[d];
    if (lo > hi)
        lo = hi;
    *from = (uint32_t)lo;
    *to = (uint32_t)hi;
}

/* Calls `line` for every line of the box: its number, the address of its element 0, and its elements inside the tensor. */
#define EACH_LINE(t, line_number, address, from, to, body)                                                                              \
    do {                                                                                                                                \
        uint32_t from_[5], to_[5], k_[5] = {0}, line_number = 0, lines_ = (t)->bytes / (t)->row;                                        \
        for (int d_ = 0; d_ < (t)->rank; d_++)                                                                                          \
            clip(t, d_, &from_[d_], &to_[d_]);                                                                                          \
        for (; line_number < lines_; line_number++) {                                                                                   \
            uint64_t address = (t)->base + (int64_t)(t)->at[0] * (int64_t)(t)->element;                                                 \
            int in_ = 1;                                                                                                                \
            for (int d_ = 1; d_ < (t)->rank; d_++) {                                                                                    \
                in_ &= k_[d_] >= from_[d_] && k_[d_] < to_[d_];                                                                         \
                address += ((int64_t)(t)->at[d_] + (int64_t)k_[d_] * (t)->step[d_]) * (int64_t)(t)->stride[d_];                         \
            }                                                                                                                           \
            uint32_t from = in_ ? from_[0] : 0, to = in_ ? to_[0] : 0;                                                                  \
            body;                                                                                                                       \
            for (int d_ = 1; d_ < (t)->rank && ++k_[d_] == (t)->box[d_]; d_++)                                                          \
                k_[d_] = 0;                                                                                                             \
        }                                                                                                                               \
    } while (0)

/* Faults unless everything inside the tensor that the box touches is global memory of the kernel. */
static void check_global(Warp *w, const Tile *t, const char *what)
{
    uint64_t lo = t->base, hi = t->base + t->element;
    for (int d = 0; d < t->rank; d++) {
        uint32_t from, to;
        clip(t, d, &from, &to);
        if (from == to)
            return;
        lo += ((int64_t)t->at[d] + (int64_t)from * t->step[d]) * (int64_t)t->stride[d];
        hi += ((int64_t)t->at[d] + (int64_t)(to - 1) * t->step[d]) * (int64_t)t->stride[d];
    }
    global_check_span(w, lo, hi, what);
}

/* Swizzles exchange 16-byte (or 32-byte) chunks by exclusive or of address bits (PTX ISA: "Swizzling Modes"). */
static inline uint32_t swizzled(const Tile *t, uint32_t address)
{
    if (t->atom)
        return address ^ (address >> 2 & 0x60);
    return address ^ (address >> 3 & ((1u << t->swizzle) - 1) << 4);
}

void tile_fetch(const Tile *t, uint32_t off, uint8_t *out)
{
    static const uint8_t fill[2] = {OOB_NAN & 0xff, OOB_NAN >> 8};
    uint8_t line[256 * 8];
    EACH_LINE(t, n, address, from, to, {
        uint8_t *whole = t->swizzle ? line : out + n * t->row;
        if (to - from < t->box[0]) {
            if (t->nan_fill)
                for (uint32_t i = 0; i < t->row; i++)
                    whole[i] = fill[i % 2];
            else
                memset(whole, 0, t->row);
        }
        if (from < to)
            memcpy(whole + from * t->element, (const uint8_t *)address + from * t->element, (to - from) * t->element);
        for (uint32_t i = 0; t->swizzle && i < t->row; i += 16)
            memcpy(out + swizzled(t, off + n * t->row + i) - off, line + i, 16);
    });
}

/* What lies inside the tensor must be defined; the rest of the box goes nowhere. */
static void check_tile_defined(Warp *w, Cta *c, const Tile *t, uint32_t off, const char *what)
{
    EACH_LINE(t, n, address, from, to, {
        (void)address;
        const uint32_t end = to * t->element;
        for (uint32_t i = from * t->element; i < end;) {
            const uint32_t next = i / 16 * 16 + 16 < end ? i / 16 * 16 + 16 : end;
            const uint32_t line = off + n * t->row + i / 16 * 16;
            shared_check_defined(w, c, (t->swizzle ? swizzled(t, line) : line) + i % 16, next - i, what);
            i = next;
        }
    });
}

/* The bytes of line n of a tile that lies in shared memory at `off`, without its swizzle. */
static const uint8_t *line_of(const Tile *t, uint32_t off, uint32_t n, const uint8_t *in, uint8_t *line)
{
    if (!t->swizzle)
        return in + n * t->row;
    for (uint32_t i = 0; i < t->row; i += 16)
        memcpy(line + i, in + swizzled(t, off + n * t->row + i) - off, 16);
    return line;
}

/* in: NULL, or what a store is about to write. */
void tile_access(Warp *w, const Tile *t, uint32_t off, const uint8_t *in, int strong, uint32_t epoch, const char *what)
{
    uint8_t line[256 * 8];
    EACH_LINE(t, n, address, from, to, {
        const uint64_t lo = address + from * t->element;
        const uint64_t bytes = (to - from) * t->element;
        const int same = in && from < to && !memcmp(line_of(t, off, n, in, line) + from * t->element, (const void *)lo, bytes);
        if (from < to)
            race_access(w, lo, bytes, in ? TOUCH_WRITE | (same ? TOUCH_SAME : 0) : TOUCH_READ, strong, epoch, what);
    });
}

void tile_put(const Tile *t, uint32_t off, const uint8_t *in, int op)
{
    uint8_t line[256 * 8];
    EACH_LINE(t, n, address, from, to, {
        const uint8_t *whole = line_of(t, off, n, in, line);
        if (op < 0) {
            if (from < to)
                memcpy((uint8_t *)address + from * t->element, whole + from * t->element, (to - from) * t->element);
        } else {
            for (uint32_t i = from; i < to; i++) {
                uint64_t b = 0;
                memcpy(&b, whole + i * t->element, t->element);
                global_reduce((void *)(address + i * t->element), op, t->type == T_F32 ? T_F32_FTZ : t->type, b, 0);
            }
        }
    });
}

/* ---- cp.async.bulk.tensor --------------------------------------------------------------------------------------------------------------- */
enum { TENSOR_MAP_WIDE = 1, TENSOR_SHARED_WIDE = 2, TENSOR_BAR_WIDE = 4, TENSOR_PAIR = 8, TENSOR_OWN = 16 };

static void tile_of(Warp *w, const Ins *ins, uint32_t lane, int rank, const int32_t *coordinate, const char *what, Tile *t)
{
    uint64_t map = lane_address(w, ins->arg[0], ins->imm[0] >> 32, 1, lane);
    decode(w, map_bytes(w, map, what), what, t);
    if (t->rank != rank)
        fault(w, ERR_MEMORY, "%s of %d dimensions with a tensor map of rank %d", what, rank, t->rank);
    for (int d = 0; d < rank; d++)
        t->at[d] = ((const int32_t *)operand(w, coordinate[d]))[lane];
    /* An H200 ends the kernel with an illegal instruction there. */
    if (t->at[0] * (int64_t)t->element % 16)
        fault(w, ERR_MEMORY, "%s: coordinate %d of dimension 0, %lld bytes from the tensor's start, not a multiple of 16", what, t->at[0],
              (long long)t->at[0] * t->element);
    check_global(w, t, what);
}

/* Load: operands map, dst, mbarrier, CTA mask or SINK, coordinates. imm[0]: offset of dst, of the map above 32 bits; imm[1]: offset of the
 * mbarrier; imm[2]: flags. */
static int tensor_load(Warp *w, const Ins *ins, uint32_t m)
{
    static const char what[] = "tensor copy to shared memory";
    const int flags = ins->imm[2];
    Tile t;
    FOR_LANES(i, m) {
        tile_of(w, ins, i, ins->n - 4, ins->arg + 4, what, &t);
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

/* Store or reduction: operands map, src, coordinates. imm[0]: offset of src, of the map above 32 bits; imm[1]: operation or -1; imm[2]: flags. */
static int tensor_store(Warp *w, const Ins *ins, uint32_t m)
{
    const char *what = ins->imm[1] < 0 ? "tensor copy to global memory" : "tensor reduction to global memory";
    Tile t;
    FOR_LANES(i, m) {
        Async *op;
        Cta *c;
        tile_of(w, ins, i, ins->n - 2, ins->arg + 2, what, &t);
        for (int d = 0; d < t.rank; d++)
            if (t.at[d] < 0)
                fault(w, ERR_MEMORY, "%s: coordinate %d of dimension %d; a box may begin below zero in loads only", what, t.at[d], d);
        check_reduction(w, &t, ins->imm[1], what);
        uint64_t src = lane_address(w, ins->arg[1], (int32_t)ins->imm[0], ins->imm[2] & TENSOR_SHARED_WIDE, i);
        uint32_t off = shared_place(w, src, t.bytes, 128, 1, what, &c);
        Store *s = store_new(w, i, off, t.bytes, what, &op);
        if (!s->defined)
            check_tile_defined(w, c, &t, off, what);
        s->tiled = 1;
        s->tile = t;
        s->op = ins->imm[1];
        async_issue(op);
    }
    return NEXT;
}

/* Prefetch into the L2 cache: operands map, coordinates. It changes nothing. */
static int tensor_prefetch(Warp *w, const Ins *ins, uint32_t m)
{
    Tile t;
    FOR_LANES(i, m) tile_of(w, ins, i, ins->n - 1, ins->arg + 1, "tensor prefetch", &t);
    return NEXT;
}

/* ---- tensormap.replace ------------------------------------------------------------------------------------------------------------------- */
enum { FIELD_ADDRESS, FIELD_RANK, FIELD_BOX, FIELD_SIZE, FIELD_STRIDE, FIELD_STEP, FIELD_TYPE, FIELD_INTERLEAVE, FIELD_SWIZZLE, FIELD_FILL,
       FIELD_ATOM };

static void replace(uint32_t *x, int field, int d, uint64_t value)
{
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
            replace(x, flags & 0xff, flags >> 8 & 0xff, value);
            shared_write(w, c, off, MAP_BYTES, x);
        } else {
            global_check(w, addr, MAP_BYTES, 64, "tensormap.replace");
            memcpy(x, (const void *)addr, MAP_BYTES);
            replace(x, flags & 0xff, flags >> 8 & 0xff, value);
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
