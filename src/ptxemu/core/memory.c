/* Loads and stores (PTX ISA: "Data Movement and Conversion Instructions": ld, ld.global.nc, ldu, st, st.async, st.bulk). */
#include "memory.h"

/* ---- shared memory ------------------------------------------------------------------------------------------------------------ */
/* The place of a shared address. own: the instruction says shared::cta, so it must be in the CTA itself. */
uint32_t shared_place(Warp *w, uint64_t addr, uint32_t bytes, uint32_t align, int own, const char *what, Cta **cta)
{
    if (addr >> 32 && (addr & WINDOW_MASK) != WINDOW_SHARED)
        fault(w, ERR_MEMORY, "%s: address %#llx is not in shared memory", what, (unsigned long long)addr);
    uint32_t off = shared_offset(w, (uint32_t)addr, bytes, align, cta);
    if (*cta == w->cta)
        return off;
    if (own)
        fault(w, ERR_MEMORY, "%s: a shared::cta access to the shared memory of CTA %d of the cluster (offset %u)", what, (*cta)->rank, off);
    check_present(w, *cta, what);
    return off;
}

typedef struct { Cta *cta; uint32_t off; } Place;

static inline void places(Warp *w, uint32_t m, const uint64_t *addr, uint32_t bytes, uint32_t align, int own, const char *what, Place *out)
{
    const Cta *c = w->cta;
    const uint64_t window = (addr[__builtin_ctz(m)] & WINDOW_MASK), base = window | (uint64_t)c->rank << CTA_SHIFT;
    if (window && window != WINDOW_SHARED)
        shared_place(w, addr[__builtin_ctz(m)], bytes, align, own, what, &out[0].cta);
    const uint64_t limit = c->shared.size - (bytes < c->shared.size ? bytes : c->shared.size);
    FOR_LANES(i, m) {
        uint64_t off = addr[i] - base - SHARED_BASE;
        if (off <= limit && !(off & (align - 1)) && bytes <= c->shared.size) {
            out[i].cta = w->cta;
            out[i].off = (uint32_t)off;
        } else {
            out[i].off = shared_place(w, addr[i], bytes, align, own, what, &out[i].cta);
        }
    }
}

/* Notes the bytes of [off, off + bytes) that are undefined as those of the lanes' data from `at` on. */
void unwritten_mark(Warp *w, Unwritten *u, const Cta *c, uint32_t off, uint32_t bytes, uint32_t at)
{
    if (!u->any)
        memset(u->bits, 0, sizeof u->bits);
    for (uint32_t i = 0; i < bytes; i++) {
        if (c->shared.state[off + i] == ST_VALID)
            continue;
        u->bits[at + i] = 0xff;
        if (!u->any)
            u->origin = (Origin){.line = w->at->line, .at = off + i};
        u->any = 1;
    }
}

/* Read `bytes` for every lane into out[lane * bytes]; lanes that follow each other in memory are read at once. */
void shared_gather(Warp *w, uint32_t m, const uint64_t *addr, uint32_t bytes, uint32_t align, int own, uint8_t *out, Unwritten *u)
{
    Place at[LANES];
    places(w, m, addr, bytes, align, own, "load", at);
    for (uint32_t rest = m; rest;) {
        uint32_t first = __builtin_ctz(rest), end = first + 1;
        while (end < LANES && rest >> end & 1 && at[end].cta == at[first].cta && at[end].off == at[first].off + (end - first) * bytes)
            end++;
        int undefined = shared_read(w, at[first].cta, at[first].off, (end - first) * bytes, out + first * bytes);
        if (undefined)
            unwritten_mark(w, u, at[first].cta, at[first].off, (end - first) * bytes, first * bytes);
        rest = end < LANES ? rest & ~((1u << end) - 1) : 0;
        while (rest && __builtin_ctz(rest) == (int)end && at[end].cta == at[end - 1].cta && at[end].off == at[end - 1].off) {
            memcpy(out + end * bytes, out + (end - 1) * bytes, bytes); /* lanes that read the same */
            if (undefined)
                memcpy(u->bits + end * bytes, u->bits + (end - 1) * bytes, bytes);
            rest &= rest - 1;
            end++;
        }
    }
}

void shared_scatter(Warp *w, uint32_t m, const uint64_t *addr, uint32_t bytes, uint32_t align, int own, const uint8_t *in, const uint8_t *undefined)
{
    Place at[LANES];
    places(w, m, addr, bytes, align, own, "store", at);
    for (uint32_t rest = m; rest;) {
        uint32_t first = __builtin_ctz(rest), end = first + 1;
        while (end < LANES && rest >> end & 1 && at[end].cta == at[first].cta && at[end].off == at[first].off + (end - first) * bytes)
            end++;
        shared_write(w, at[first].cta, at[first].off, (end - first) * bytes, in + first * bytes);
        for (uint32_t i = 0; undefined && i < (end - first) * bytes; i++)
            if (undefined[first * bytes + i])
                at[first].cta->shared.state[at[first].off + i] = ST_NONE;
        rest = end < LANES ? rest & ~((1u << end) - 1) : 0;
    }
    w->cta->cluster->activity++;
}

/* ---- registers ------------------------------------------------------------------------------------------------------------------ */
#define EACH_LANE(body)                                                                                                                 \
    if (m == FULL) {                                                                                                                    \
        for (int i = 0; i < LANES; i++) {                                                                                               \
            body;                                                                                                                       \
        }                                                                                                                               \
    } else {                                                                                                                            \
        FOR_LANES(i, m) { body; }                                                                                                       \
    }

#define TO_REG(T, R) EACH_LANE(T v; memcpy(&v, from + i * stride, sizeof v); ((R *)to)[i] = (R)v)
#define TO_REGS(U, S, R)                                                                                                                \
    if (sign) {                                                                                                                         \
        TO_REG(S, R)                                                                                                                    \
    } else {                                                                                                                            \
        TO_REG(U, R)                                                                                                                    \
    }                                                                                                                                   \
    break

/* An element of every lane's record into a register, extended to its width. */
static void to_register(void *to, const uint8_t *from, uint32_t stride, uint32_t element, uint32_t reg, int sign, uint32_t m)
{
    switch (element << 8 | reg) {
    case 0x101: case 0x102: TO_REGS(uint8_t, int8_t, uint16_t);
    case 0x104: TO_REGS(uint8_t, int8_t, uint32_t);
    case 0x108: TO_REGS(uint8_t, int8_t, uint64_t);
    case 0x202: TO_REGS(uint16_t, int16_t, uint16_t);
    case 0x204: TO_REGS(uint16_t, int16_t, uint32_t);
    case 0x208: TO_REGS(uint16_t, int16_t, uint64_t);
    case 0x404: TO_REGS(uint32_t, int32_t, uint32_t);
    case 0x408: TO_REGS(uint32_t, int32_t, uint64_t);
    case 0x808: TO_REGS(uint64_t, int64_t, uint64_t);
    default: EACH_LANE(memcpy((uint8_t *)to + i * 16, from + i * stride, 16)); /* b128 */
    }
}

#define FROM_REG(T, R) EACH_LANE(T v = (T)((const R *)from)[i]; memcpy(to + i * stride, &v, sizeof v)) break

static void from_register(uint8_t *to, uint32_t stride, const void *from, uint32_t element, uint32_t reg, uint32_t m)
{
    switch (element << 8 | reg) {
    case 0x101: case 0x102: FROM_REG(uint8_t, uint16_t);
    case 0x104: FROM_REG(uint8_t, uint32_t);
    case 0x108: FROM_REG(uint8_t, uint64_t);
    case 0x202: FROM_REG(uint16_t, uint16_t);
    case 0x204: FROM_REG(uint16_t, uint32_t);
    case 0x208: FROM_REG(uint16_t, uint64_t);
    case 0x404: FROM_REG(uint32_t, uint32_t);
    case 0x408: FROM_REG(uint32_t, uint64_t);
    case 0x808: FROM_REG(uint64_t, uint64_t);
    default: EACH_LANE(memcpy(to + i * stride, (const uint8_t *)from + i * 16, 16)); /* b128 */
    }
}

/* ---- strong accesses ------------------------------------------------------------------------------------------------------------ */
static void strong_load(const uint8_t *from, uint8_t *to, uint32_t element)
{
    uint64_t v;
    switch (element) {
    case 1: v = __atomic_load_n(from, __ATOMIC_ACQUIRE); break;
    case 2: v = __atomic_load_n((const uint16_t *)from, __ATOMIC_ACQUIRE); break;
    case 4: v = __atomic_load_n((const uint32_t *)from, __ATOMIC_ACQUIRE); break;
    case 8: v = __atomic_load_n((const uint64_t *)from, __ATOMIC_ACQUIRE); break;
    default: memcpy(to, from, element); return;
    }
    memcpy(to, &v, element);
}

static void strong_store(uint8_t *to, const uint8_t *from, uint32_t element)
{
    uint64_t v = 0;
    memcpy(&v, from, element < 8 ? element : 8);
    switch (element) {
    case 1: __atomic_store_n(to, (uint8_t)v, __ATOMIC_RELEASE); break;
    case 2: __atomic_store_n((uint16_t *)to, (uint16_t)v, __ATOMIC_RELEASE); break;
    case 4: __atomic_store_n((uint32_t *)to, (uint32_t)v, __ATOMIC_RELEASE); break;
    case 8: __atomic_store_n((uint64_t *)to, v, __ATOMIC_RELEASE); break;
    default: memcpy(to, from, element);
    }
}

static void strong_gather(Warp *w, uint32_t m, const uint64_t *addr, int space, int64_t flags, uint8_t *out, Unwritten *u)
{
    const uint32_t element = ACC_ELEMENT(flags), bytes = element * ACC_COUNT(flags);
    FOR_LANES(i, m) {
        uint64_t key = addr[i] & ~(uint64_t)3;
        const uint8_t *from = (const uint8_t *)addr[i];
        if (space == SPACE_SHARED) {
            Cta *c;
            uint32_t off = shared_place(w, addr[i], bytes, bytes, (flags & ACC_OWN) != 0, "load", &c);
            shared_strong_begin(w, c, off, bytes, TOUCH_READ, "strong load");
            key = shared_key(c, off);
            from = c->shared.data + off;
            if (!shared_defined(c, off, bytes))
                unwritten_mark(w, u, c, off, bytes, i * bytes);
        }
        for (uint32_t j = 0; j < bytes; j += element)
            strong_load(from + j, out + i * bytes + j, element);
        sync_read(w, key, (flags & ACC_ACQUIRE) != 0);
    }
}

static void strong_scatter(Warp *w, uint32_t m, const uint64_t *addr, int space, int64_t flags, const uint8_t *in, const uint8_t *undefined)
{
    const uint32_t element = ACC_ELEMENT(flags), bytes = element * ACC_COUNT(flags);
    FOR_LANES(i, m) {
        uint64_t key = addr[i] & ~(uint64_t)3;
        uint8_t *to = (uint8_t *)addr[i];
        if (space == SPACE_SHARED) {
            Cta *c;
            uint32_t off = shared_place(w, addr[i], bytes, bytes, (flags & ACC_OWN) != 0, "store", &c);
            shared_strong_begin(w, c, off, bytes, TOUCH_WRITE, "strong store");
            shared_strong_end(c, off, bytes, clock_epoch(w));
            key = shared_key(c, off);
            to = c->shared.data + off;
            for (uint32_t j = 0; undefined && j < bytes; j++)
                if (undefined[i * bytes + j])
                    c->shared.state[off + j] = ST_NONE;
        }
        sync_write(w, key, (flags & ACC_RELEASE) != 0, 0);
        for (uint32_t j = 0; j < bytes; j += element)
            strong_store(to + j, in + i * bytes + j, element);
    }
    w->cta->cluster->activity++;
}

/* ---- ld, st ---------------------------------------------------------------------------------------------------------------------- */
/* What a generic address lies in (PTX ISA: "Generic Addressing"); lanes may differ. */
static int window(Warp *w, uint64_t addr)
{
    switch (addr & WINDOW_MASK) {
    case 0: return SPACE_GLOBAL;
    case WINDOW_SHARED: return SPACE_SHARED;
    case WINDOW_PARAM: return SPACE_PARAM;
    case WINDOW_LOCAL: return SPACE_LOCAL;
    }
    fault(w, ERR_MEMORY, "generic address %#llx lies in no window", (unsigned long long)addr);
}

static uint8_t *local_place(Warp *w, uint32_t lane, uint64_t addr, uint32_t bytes, const char *what)
{
    const uint64_t off = addr & 0xffffffffu, size = w->cta->cluster->launch->program->local_bytes;
    if (off + bytes > size)
        fault(w, ERR_MEMORY, "%s of %u bytes at offset %llu of local memory, which has %llu", what, bytes, (unsigned long long)off,
              (unsigned long long)size);
    if (off & (bytes - 1))
        fault(w, ERR_MEMORY, "misaligned %s of %u bytes at offset %llu of local memory", what, bytes, (unsigned long long)off);
    return w->cta->local + ((size_t)w->id * LANES + lane) * size + off;
}

static void local_shadow(Warp *w, uint32_t lane, uint64_t addr, uint32_t bytes, Unwritten *u)
{
    const uint64_t off = addr & 0xffffffffu;
    const uint8_t *shadow = undefined_local(w, lane, off, 0);
    for (uint32_t j = 0; shadow && j < bytes; j++) {
        if (!shadow[j])
            continue;
        if (!u->any) {
            memset(u->bits, 0, sizeof u->bits);
            u->origin = *undefined_local_origin(w, off + j);
        }
        u->any = 1;
        u->bits[lane * bytes + j] = shadow[j];
    }
}

#define COPY_LANES(n, to, from)                                                                                                         \
    case n:                                                                                                                             \
        EACH_LANE(memcpy(to, from, n))                                                                                                  \
        break

static void gather(Warp *w, uint32_t m, const uint64_t *addr, int space, int64_t flags, uint8_t *out, Unwritten *u)
{
    const uint32_t bytes = ACC_ELEMENT(flags) * ACC_COUNT(flags);
    switch (space) {
    case SPACE_SHARED:
        if (flags & ACC_STRONG)
            strong_gather(w, m, addr, space, flags, out, u);
        else
            shared_gather(w, m, addr, bytes, bytes, (flags & ACC_OWN) != 0, out, u);
        if (w->lanes && !(flags & ACC_STRONG))
            lanes_access(w, m, addr, bytes, NULL, 0);
        return;
    case SPACE_GLOBAL:
        global_check_lanes(w, m, addr, bytes, bytes, "load");
        if (races(w))
            race_lanes(w, m, addr, bytes, TOUCH_READ, (flags & ACC_STRONG) != 0, "load");
        if (flags & ACC_STRONG) {
            strong_gather(w, m, addr, space, flags, out, u);
            return;
        }
        switch (bytes) {
            COPY_LANES(1, out + i, (const void *)addr[i]);
            COPY_LANES(2, out + i * 2, (const void *)addr[i]);
            COPY_LANES(4, out + i * 4, (const void *)addr[i]);
            COPY_LANES(8, out + i * 8, (const void *)addr[i]);
            COPY_LANES(16, out + i * 16, (const void *)addr[i]);
            COPY_LANES(32, out + i * 32, (const void *)addr[i]);
        }
        return;
    case SPACE_LOCAL:
        FOR_LANES(i, m) {
            memcpy(out + i * bytes, local_place(w, i, addr[i], bytes, "load"), bytes);
            local_shadow(w, i, addr[i], bytes, u);
        }
        return;
    case SPACE_PARAM:
        FOR_LANES(i, m) {
            global_check_param(w, addr[i], bytes, "load");
            memcpy(out + i * bytes, w->cta->cluster->launch->params + (addr[i] & ~WINDOW_MASK), bytes);
        }
        return;
    }
    uint32_t in[SPACE_PARAM + 1] = {0};
    FOR_LANES(i, m) in[window(w, addr[i])] |= 1u << i;
    for (int s = SPACE_GLOBAL; s <= SPACE_PARAM; s++)
        if (in[s])
            gather(w, in[s], addr, s, flags & ~ACC_OWN, out, u);
}

static void scatter(Warp *w, uint32_t m, const uint64_t *addr, int space, int64_t flags, const uint8_t *in, const uint8_t *undefined, Origin origin)
{
    const uint32_t bytes = ACC_ELEMENT(flags) * ACC_COUNT(flags);
    switch (space) {
    case SPACE_SHARED:
        if (w->lanes && !(flags & ACC_STRONG))
            lanes_access(w, m, addr, bytes, in, 0);
        if (flags & ACC_STRONG)
            strong_scatter(w, m, addr, space, flags, in, undefined);
        else
            shared_scatter(w, m, addr, bytes, bytes, (flags & ACC_OWN) != 0, in, undefined);
        return;
    case SPACE_GLOBAL:
        global_check_lanes(w, m, addr, bytes, bytes, "store");
        if (undefined)
            FOR_LANES(i, m) for (uint32_t j = 0; j < bytes; j++)
                if (undefined[i * bytes + j])
                    undefined_fault(w, "a value stored to global memory", origin);
        if (races(w))
            race_lanes(w, m, addr, bytes, TOUCH_WRITE, (flags & ACC_STRONG) != 0, "store");
        w->cta->cluster->activity++;
        if (flags & ACC_STRONG) {
            strong_scatter(w, m, addr, space, flags, in, undefined);
            return;
        }
        switch (bytes) {
            COPY_LANES(1, (void *)addr[i], in + i);
            COPY_LANES(2, (void *)addr[i], in + i * 2);
            COPY_LANES(4, (void *)addr[i], in + i * 4);
            COPY_LANES(8, (void *)addr[i], in + i * 8);
            COPY_LANES(16, (void *)addr[i], in + i * 16);
            COPY_LANES(32, (void *)addr[i], in + i * 32);
        }
        return;
    case SPACE_LOCAL:
        FOR_LANES(i, m) {
            memcpy(local_place(w, i, addr[i], bytes, "store"), in + i * bytes, bytes);
            uint8_t *shadow = undefined_local(w, i, addr[i] & 0xffffffffu, undefined != NULL);
            if (shadow && undefined)
                memcpy(shadow, undefined + i * bytes, bytes);
            else if (shadow)
                memset(shadow, 0, bytes);
            for (uint32_t j = 0; undefined && j < bytes; j++)
                if (undefined[i * bytes + j])
                    *undefined_local_origin(w, (addr[i] & 0xffffffffu) + j) = origin;
        }
        return;
    case SPACE_PARAM:
        fault(w, ERR_MEMORY, "store to the kernel's parameters (generic address %#llx)", (unsigned long long)addr[__builtin_ctz(m)]);
    }
    uint32_t to[SPACE_PARAM + 1] = {0};
    FOR_LANES(i, m) to[window(w, addr[i])] |= 1u << i;
    for (int s = SPACE_GLOBAL; s <= SPACE_PARAM; s++)
        if (to[s])
            scatter(w, to[s], addr, s, flags & ~ACC_OWN, in, undefined, origin);
}

/* ld d..., [a]: operands a, d... A strong load lets the other warps have a turn: it may be what a loop waits on. */
static int ld(Warp *w, const Ins *ins, uint32_t m)
{
    const int64_t flags = ins->imm[1];
    const uint32_t element = ACC_ELEMENT(flags), n = ACC_COUNT(flags);
    uint64_t addr[LANES];
    uint8_t buffer[LANES * 32];
    Unwritten u;
    u.any = 0;
    lane_addresses(w, ins->arg[0], ins->imm[0], flags & ACC_WIDE, addr);
    gather(w, m, addr, ACC_SPACE(flags), flags, buffer, &u);
    for (uint32_t j = 0; j < n; j++)
        if (ins->arg[1 + j] != SINK)
            to_register(operand(w, ins->arg[1 + j]), buffer + j * element, element * n, element, ACC_REG(flags),
                        (flags & ACC_SIGNED) != 0, m);
    for (uint32_t j = 0; (u.any || w->undefined) && j < n; j++) {
        uint8_t shadow[LANES * 16];
        if (u.any)
            to_register(shadow, u.bits + j * element, element * n, element, ACC_REG(flags), (flags & ACC_SIGNED) != 0, m);
        undefined_set(w, ins->arg[1 + j], ACC_REG(flags), m, u.any ? shadow : NULL, u.origin);
    }
    if (ins->flags & INS_QUEUED)
        queued_load(w, ins, m, addr, element * n);
    return flags & ACC_STRONG ? YIELD : NEXT;
}

static void store_undefined(Warp *w, const Ins *ins, uint32_t m, const uint64_t *addr, const uint8_t *data)
{
    const int64_t flags = ins->imm[1];
    const uint32_t element = ACC_ELEMENT(flags), n = ACC_COUNT(flags);
    uint8_t bits[LANES * 32] = {0};
    Origin origin = {0};
    int any = 0;
    for (uint32_t j = 0; j < n; j++) {
        const uint8_t *shadow = undefined_bits(w, ins->arg[1 + j]);
        if (!shadow)
            continue;
        from_register(bits + j * element, element * n, shadow, element, ACC_REG(flags), m);
        origin = undefined_origin(w, ins->arg[1 + j]);
        any = 1;
    }
    scatter(w, m, addr, ACC_SPACE(flags), flags, data, any ? bits : NULL, origin);
}

/* st [a], b...: operands a, b... */
static int st(Warp *w, const Ins *ins, uint32_t m)
{
    const int64_t flags = ins->imm[1];
    const uint32_t element = ACC_ELEMENT(flags), n = ACC_COUNT(flags);
    uint64_t addr[LANES];
    uint8_t buffer[LANES * 32];
    lane_addresses(w, ins->arg[0], ins->imm[0], flags & ACC_WIDE, addr);
    for (uint32_t j = 0; j < n; j++)
        from_register(buffer + j * element, element * n, operand(w, ins->arg[1 + j]), element, ACC_REG(flags), m);
    if (w->undefined) {
        store_undefined(w, ins, m, addr, buffer);
        return NEXT;
    }
    scatter(w, m, addr, ACC_SPACE(flags), flags, buffer, NULL, (Origin){0});
    return NEXT;
}

/* ld.param of one place for all lanes: imm[0] its offset. */
static int ld_param(Warp *w, const Ins *ins, uint32_t m)
{
    const int64_t flags = ins->imm[1];
    const uint32_t element = ACC_ELEMENT(flags), n = ACC_COUNT(flags);
    global_check_param(w, ins->imm[0], element * n, "load");
    const uint8_t *from = w->cta->cluster->launch->params + ins->imm[0];
    for (uint32_t j = 0; j < n; j++)
        if (ins->arg[j] != SINK)
            to_register(operand(w, ins->arg[j]), from + j * element, 0, element, ACC_REG(flags), (flags & ACC_SIGNED) != 0, m);
    return NEXT;
}

/* st.bulk [a], size, 0: operands a, size; imm as of st. */
static int st_bulk(Warp *w, const Ins *ins, uint32_t m)
{
    static const uint8_t zeros[4096];
    FOR_LANES(i, m) {
        uint64_t addr = lane_address(w, ins->arg[0], ins->imm[0], ins->imm[1] & ACC_WIDE, i);
        uint64_t size = ((const uint64_t *)operand(w, ins->arg[1]))[i];
        if (size % 8 || size >> 24)
            fault(w, ERR_MEMORY, "st.bulk of %llu bytes: the size must be a multiple of 8 below 16 MiB", (unsigned long long)size);
        Cta *c;
        uint32_t off = shared_place(w, addr, (uint32_t)size, 8, 1, "st.bulk", &c);
        for (uint32_t at = 0; at < size; at += sizeof zeros)
            shared_write(w, c, off + at, size - at < sizeof zeros ? (uint32_t)size - at : (uint32_t)sizeof zeros, zeros);
    }
    w->cta->cluster->activity++;
    return NEXT;
}

/* createpolicy d: a cache policy, which means nothing here. */
static int createpolicy(Warp *w, const Ins *ins, uint32_t m)
{
    uint64_t *d = operand(w, ins->arg[0]);
    FOR_LANES(i, m) d[i] = 0;
    return NEXT;
}

static const Entry memory[] = {{"ld", ld}, {"st", st}, {"ld.param", ld_param}, {"st.bulk", st_bulk}, {"createpolicy", createpolicy}};
REGISTER(memory)
