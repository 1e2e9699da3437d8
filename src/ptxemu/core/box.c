/* Tiles of tensors, line by line: which elements of global memory they are, where they lie in shared memory (PTX ISA: "Tensors"). */
#include "memory.h"

/* ---- lines ---------------------------------------------------------------------------------------------------------------------------- */
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

Lines lines_of(const Tile *t)
{
    Lines l = {.n = UINT32_MAX};
    for (int d = 0; d < (t->mode == MODE_TILE ? t->rank : 1); d++)
        clip(t, d, &l.lo[d], &l.hi[d]);
    return l;
}

/* Coordinates of pixel p of a walk: along W, at the end of the bounding box on to the next line of it, and so on to the next image. The walk
 * of im2col::w goes from W to the next image at once. A dimension's step is its traversal stride. */
static void pixel(const Tile *t, uint32_t p, int64_t *c)
{
    const int last = t->rank - 1;
    uint64_t carry = p;
    for (int d = 1; d < last; d++) {
        c[d] = t->at[d];
        if (d == 1 || t->mode == MODE_IM2COL) {
            const uint64_t first = (uint64_t)(((int64_t)t->upper[d] - t->at[d]) / t->step[d] + 1);
            const uint64_t line = (uint64_t)(((int64_t)t->upper[d] - t->lower[d]) / t->step[d] + 1);
            const uint64_t past = carry - first;
            c[d] = carry < first ? t->at[d] + (int64_t)(carry * t->step[d]) : t->lower[d] + (int64_t)(past % line * t->step[d]);
            carry = carry < first ? 0 : 1 + past / line;
        }
        c[d] += t->offset[d];
    }
    c[last] = t->at[last] + (int64_t)carry;
}

/* A line of the modes that do not copy boxes. */
static void place(const Tile *t, Lines *l)
{
    int64_t c[5];
    if (t->mode == MODE_ROWS) {
        c[1] = t->row_at[l->n];
    } else {
        uint32_t p = l->n;
        if (t->mode == MODE_W_128 && p >= 128) /* halos lie behind all, one of each 32 pixels together */
            p = 32 * ((p - 128) % 4 + 1) + (p - 128) / 4;
        pixel(t, p, c);
    }
    int in = 1;
    l->address = t->base + (uint64_t)(t->at[0] * (int64_t)t->element);
    for (int d = 1; d < t->rank; d++) {
        in &= c[d] >= 0 && c[d] < (int64_t)t->size[d];
        l->address += (uint64_t)(c[d] * (int64_t)t->stride[d]);
    }
    l->from = in ? l->lo[0] : 0;
    l->to = in ? l->hi[0] : 0;
}

int lines_next(const Tile *t, Lines *l)
{
    if (++l->n == t->lines)
        return 0;
    if (t->mode != MODE_TILE) {
        place(t, l);
        return 1;
    }
    if (l->n)
        for (int d = 1; d < t->rank && ++l->k[d] == t->box[d]; d++)
            l->k[d] = 0;
    int in = 1;
    l->address = t->base + (uint64_t)(t->at[0] * (int64_t)t->element);
    for (int d = 1; d < t->rank; d++) {
        in &= l->k[d] >= l->lo[d] && l->k[d] < l->hi[d];
        l->address += (uint64_t)(((int64_t)t->at[d] + (int64_t)l->k[d] * t->step[d]) * (int64_t)t->stride[d]);
    }
    l->from = in ? l->lo[0] : 0;
    l->to = in ? l->hi[0] : 0;
    return 1;
}

void box_check(Warp *w, const Tile *t, const char *what)
{
    uint64_t lo = UINT64_MAX, hi = 0;
    if (t->mode != MODE_TILE) {
        EACH_LINE(t, l) {
            if (l.from == l.to)
                continue;
            const uint64_t first = l.address + l.from * t->element, end = l.address + l.to * t->element;
            if (t->mode == MODE_ROWS)
                global_check_span(w, first, end, what); /* rows may lie far apart */
            lo = first < lo ? first : lo;
            hi = end > hi ? end : hi;
        }
        if (lo < hi && t->mode != MODE_ROWS)
            global_check_span(w, lo, hi, what);
        return;
    }
    lo = t->base;
    hi = t->base + t->element;
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

/* ---- bytes ------------------------------------------------------------------------------------------------------------------------------ */
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
    EACH_LINE(t, l) {
        uint8_t *whole = t->swizzle ? line : out + l.n * t->row;
        if (l.to - l.from < t->box[0]) {
            if (t->nan_fill)
                for (uint32_t i = 0; i < t->row; i++)
                    whole[i] = fill[i % 2];
            else
                memset(whole, 0, t->row);
        }
        if (l.from < l.to)
            memcpy(whole + l.from * t->element, (const uint8_t *)l.address + l.from * t->element, (l.to - l.from) * t->element);
        for (uint32_t i = 0; t->swizzle && i < t->row; i += 16)
            memcpy(out + swizzled(t, off + l.n * t->row + i) - off, line + i, 16);
    }
}

void tile_check_defined(Warp *w, Cta *c, const Tile *t, uint32_t off, const char *what)
{
    EACH_LINE(t, l) {
        const uint32_t end = l.to * t->element;
        for (uint32_t i = l.from * t->element; i < end;) {
            const uint32_t next = i / 16 * 16 + 16 < end ? i / 16 * 16 + 16 : end;
            const uint32_t line = off + l.n * t->row + i / 16 * 16;
            shared_check_defined(w, c, (t->swizzle ? swizzled(t, line) : line) + i % 16, next - i, what);
            i = next;
        }
    }
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

void tile_access(Warp *w, const Tile *t, uint32_t off, const uint8_t *in, int strong, uint32_t epoch, const char *what)
{
    uint8_t line[256 * 8];
    EACH_LINE(t, l) {
        if (l.from == l.to)
            continue;
        const uint64_t lo = l.address + l.from * t->element, bytes = (l.to - l.from) * t->element;
        const int same = in && !memcmp(line_of(t, off, l.n, in, line) + l.from * t->element, (const void *)lo, bytes);
        race_access(w, lo, bytes, in ? TOUCH_WRITE | (same ? TOUCH_SAME : 0) : TOUCH_READ, strong, epoch, what);
    }
}

void tile_put(const Tile *t, uint32_t off, const uint8_t *in, int op)
{
    uint8_t line[256 * 8];
    EACH_LINE(t, l) {
        const uint8_t *whole = line_of(t, off, l.n, in, line);
        if (op < 0) {
            if (l.from < l.to)
                memcpy((uint8_t *)l.address + l.from * t->element, whole + l.from * t->element, (l.to - l.from) * t->element);
            continue;
        }
        for (uint32_t i = l.from; i < l.to; i++) {
            uint64_t b = 0;
            memcpy(&b, whole + i * t->element, t->element);
            global_reduce((void *)(l.address + i * t->element), op, t->type == T_F32 ? T_F32_FTZ : t->type, b, 0);
        }
    }
}
