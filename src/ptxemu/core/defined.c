/* Which bits of a warp's registers derive from shared or tensor memory that was never written, or from results that a call did not give.
 *
 * Nothing is tracked until a warp reads such memory or calls for results. From then on every register has a shadow of its own layout, a bit set where the register's
 * bit is undefined, and every instruction passes it on by a rule that the lowering chose (lower_defined.py): moves, shifts, logic and selections
 * exactly, a lane of other arithmetic is undefined where any of its inputs is. A fault comes where an undefined bit decides something: in
 * addresses, conditions, sizes and descriptors, and where it would be stored to global memory.
 */
#include "defined.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct Undefined {
    uint8_t *bits;    /* as the registers lie */
    uint8_t *dirty;   /* per 32 bytes of registers, at a register's start: some bit may be set */
    Origin *origin;   /* the same: where its undefined bits come from */
    uint8_t *local;   /* of local memory, once something undefined was stored there */
    Origin *stored;   /* where that comes from: the last of a word's lanes */
    uint32_t *given;  /* by where a result lies in local memory: lanes that a call gave it to */
    Origin first;     /* the warp's first undefined read */
};

static struct Undefined *state(Warp *w)
{
    if (!w->undefined) {
        const size_t n = w->cta->cluster->launch->program->reg_bytes;
        struct Undefined *u = w->undefined = emu_alloc(sizeof *u);
        u->bits = emu_alloc(n);
        u->dirty = emu_alloc(n / 32 + 1);
        u->origin = emu_alloc((n / 32 + 1) * sizeof *u->origin);
    }
    return w->undefined;
}

void undefined_free(Warp *w)
{
    struct Undefined *u = w->undefined;
    if (!u)
        return;
    free(u->bits);
    free(u->dirty);
    free(u->origin);
    free(u->local);
    free(u->stored);
    free(u->given);
    free(u);
}

static inline int dirty(const struct Undefined *u, int32_t at) { return at >= 0 && u->dirty[at >> 5]; }

const uint8_t *undefined_bits(const Warp *w, int32_t at) { return w->undefined && dirty(w->undefined, at) ? w->undefined->bits + at : NULL; }

Origin undefined_origin(const Warp *w, int32_t at) { return w->undefined->origin[at >> 5]; }

void undefined_set(Warp *w, int32_t at, uint32_t size, uint32_t m, const void *bits, Origin origin)
{
    if (at < 0 || (!bits && !(w->undefined && dirty(w->undefined, at))))
        return;
    struct Undefined *u = state(w);
    if (bits && !u->first.line)
        u->first = origin;
    uint8_t *d = u->bits + at;
    uint8_t any = 0;
    if (!size) {
        uint32_t now, new = 0;
        memcpy(&now, d, 4);
        if (bits)
            memcpy(&new, bits, 4);
        now = (now & ~m) | (new & m);
        memcpy(d, &now, 4);
        any = now != 0;
    } else {
        for (uint32_t i = 0; i < LANES; i++) {
            if (m >> i & 1) {
                if (bits)
                    memcpy(d + i * size, (const uint8_t *)bits + i * size, size);
                else
                    memset(d + i * size, 0, size);
            }
        }
        for (uint32_t i = 0; i < LANES * size; i++)
            any |= d[i];
    }
    u->dirty[at >> 5] = any != 0;
    if (any && bits)
        u->origin[at >> 5] = origin;
}

_Noreturn void undefined_fault(Warp *w, const char *what, Origin o)
{
    if (o.kind == FROM_CALL)
        fault(w, ERR_MEMORY, "%s depends on a result that was not given (a lane outside the guard, or no st.param) by the call at PTX line %d", what, o.line);
    if (o.kind == FROM_TENSOR)
        fault(w, ERR_MEMORY, "%s depends on uninitialised tensor memory: lane %u, column %u, read at PTX line %d", what, o.at >> 16, o.at & 0xffff,
              o.line);
    fault(w, ERR_MEMORY, "%s depends on uninitialised shared memory at offset %u, read at PTX line %d", what, o.at, o.line);
}

size_t undefined_report(const Warp *w, char *out, size_t n)
{
    if (!w->undefined || !w->undefined->first.line)
        return 0;
    const Origin o = w->undefined->first;
    if (o.kind == FROM_CALL)
        return snprintf(out, n, " (after a use of a result that was not given by the call at PTX line %d)", o.line);
    if (o.kind == FROM_TENSOR)
        return snprintf(out, n, " (after a read of uninitialised tensor memory, lane %u, column %u, at PTX line %d)", o.at >> 16, o.at & 0xffff, o.line);
    return snprintf(out, n, " (after a read of uninitialised shared memory at offset %u at PTX line %d)", o.at, o.line);
}

int undefined_lanes(const Warp *w, int32_t at, uint32_t size, uint32_t m)
{
    const uint8_t *b = undefined_bits(w, at);
    if (!b)
        return 0;
    if (!size) {
        uint32_t p;
        memcpy(&p, b, 4);
        return (p & m) != 0;
    }
    uint8_t any = 0;
    FOR_LANES(i, m) for (uint32_t k = 0; k < size; k++) any |= b[i * size + k];
    return any != 0;
}

void undefined_guard(Warp *w, const Ins *ins, uint32_t mask)
{
    if (!undefined_lanes(w, ins->guard, 0, mask))
        return;
    w->at = ins;
    undefined_fault(w, ins->control == CTL_BRANCH ? "a branch" : "the guard of an instruction", undefined_origin(w, ins->guard));
}

/* ---- local memory ------------------------------------------------------------------------------------------------------------- */
/* The shadow of this place of a lane's local memory, or NULL: all of it is defined. */
uint8_t *undefined_local(Warp *w, uint32_t lane, uint64_t off, int create)
{
    const size_t size = w->cta->cluster->launch->program->local_bytes;
    if (!w->undefined || (!w->undefined->local && !create))
        return NULL;
    if (!w->undefined->local) {
        w->undefined->local = emu_alloc(LANES * size);
        w->undefined->stored = emu_alloc((size / 4 + 1) * sizeof(Origin));
        w->undefined->given = emu_alloc(size * sizeof(uint32_t));
    }
    return w->undefined->local + lane * size + off;
}

Origin *undefined_local_origin(Warp *w, uint64_t off) { return &w->undefined->stored[off / 4]; }

void undefined_results(Warp *w, uint32_t m, uint32_t inside, int again, uint32_t off, uint32_t bytes, int32_t line)
{
    state(w);
    undefined_local(w, 0, off, 1);
    uint32_t *given = &w->undefined->given[off], kept = again ? *given & m & ~inside : 0;
    *given = (*given & ~m) | inside | kept;
    FOR_LANES(i, m & ~kept) memset(undefined_local(w, i, off, 1), 0xff, bytes);
    for (uint32_t at = off; at < off + bytes; at++)
        *undefined_local_origin(w, at) = (Origin){.line = line, .at = off, .kind = FROM_CALL};
}

/* ---- rules -------------------------------------------------------------------------------------------------------------------- */
/* The shadow and the value of a lane of up to 64 bits; of a predicate: 0 or 1. */
static inline uint64_t shadow(const struct Undefined *u, int32_t at, uint32_t size, uint32_t i)
{
    uint64_t v = 0;
    if (!dirty(u, at))
        return 0;
    if (size)
        memcpy(&v, u->bits + at + i * size, size);
    else
        v = u->bits[at + i / 8] >> i % 8 & 1;
    return v;
}

static inline uint64_t value(Warp *w, int32_t at, uint32_t size, uint32_t i)
{
    uint64_t v = 0;
    const uint8_t *p = operand(w, at);
    if (size)
        memcpy(&v, p + i * size, size);
    else
        v = p[i / 8] >> i % 8 & 1;
    return v;
}

typedef struct { Warp *w; const struct Undefined *u; const Ins *ins; uint32_t size; } Rule; /* size: of the destination */

static inline uint32_t size_of(const Rule *r, int k) { return r->ins->form[k] & FORM_SIZE; }
static inline uint64_t from(const Rule *r, int k, uint32_t i) { return shadow(r->u, r->ins->arg[k], size_of(r, k), i); }
static inline uint64_t is(const Rule *r, int k, uint32_t i) { return value(r->w, r->ins->arg[k], size_of(r, k), i); }

static uint64_t any_of(const Rule *r, uint32_t i)
{
    uint64_t any = 0;
    for (int k = 0; k < r->ins->n; k++)
        if (!(r->ins->form[k] & FORM_WRITTEN) || r->ins->form[k] & FORM_READ)
            any |= from(r, k, i);
    return any;
}

/* Elements of `width` bits that do not mix. */
static uint64_t by_element(const Rule *r, uint32_t i, uint32_t width)
{
    const uint64_t any = any_of(r, i), element = width == 64 ? ~(uint64_t)0 : ((uint64_t)1 << width) - 1;
    uint64_t d = 0;
    for (uint32_t at = 0; at < 64; at += width)
        d |= any >> at & element ? element << at : 0;
    return d;
}

static uint64_t sign_extended(uint64_t x, uint32_t size) { return (uint64_t)((int64_t)(x << (64 - 8 * size)) >> (64 - 8 * size)); }

/* What of lop3's result changes with some choice of the undefined bits. */
static uint64_t lop3(const Rule *r, uint32_t i)
{
    uint32_t x[3], u[3], first = 0, differ = 0;
    for (int k = 0; k < 3; k++) {
        x[k] = (uint32_t)is(r, 1 + k, i);
        u[k] = (uint32_t)from(r, 1 + k, i);
    }
    for (int choice = 0; choice < 8; choice++) {
        uint32_t out = 0, y[3];
        for (int k = 0; k < 3; k++)
            y[k] = choice >> k & 1 ? x[k] ^ u[k] : x[k];
        for (int row = 0; row < 8; row++)
            if (r->ins->imm[0] >> row & 1)
                out |= (row & 4 ? y[0] : ~y[0]) & (row & 2 ? y[1] : ~y[1]) & (row & 1 ? y[2] : ~y[2]);
        if (!choice)
            first = out;
        differ |= out ^ first;
    }
    return differ;
}

static uint64_t prmt(const Rule *r, uint32_t i)
{
    if (from(r, 3, i))
        return ~(uint64_t)0;
    const uint64_t both = from(r, 1, i) | from(r, 2, i) << 32, selectors = is(r, 3, i);
    uint32_t d = 0;
    for (int k = 0; k < 4; k++) {
        const uint32_t s = (uint32_t)(selectors >> 4 * k), byte = both >> 8 * (s & 7) & 0xff;
        d |= (s & 8 ? (byte & 0x80 ? 0xff : 0) : byte) << 8 * k;
    }
    return d;
}

static uint64_t shift(const Rule *r, uint32_t i)
{
    const uint32_t bits = 8 * r->size, by = (uint32_t)is(r, 2, i);
    const uint64_t a = from(r, 1, i);
    if (from(r, 2, i))
        return ~(uint64_t)0;
    switch (r->ins->rule) {
    case RULE_SHL: return by >= bits ? 0 : a << by;
    case RULE_SHR: return by >= bits ? 0 : a >> by;
    default: return (uint64_t)((int64_t)sign_extended(a, r->size) >> (by < bits ? by : bits - 1));
    }
}

/* One lane of the destination. */
static uint64_t lane(const Rule *r, uint32_t i)
{
    const Ins *ins = r->ins;
    switch (ins->rule) {
    case RULE_MOVE: return from(r, 1, i);
    case RULE_EXTEND: return sign_extended(from(r, 1, i), size_of(r, 1));
    case RULE_BITS: return any_of(r, i);
    case RULE_AND: return (from(r, 1, i) | from(r, 2, i)) & (from(r, 1, i) | is(r, 1, i)) & (from(r, 2, i) | is(r, 2, i));
    case RULE_OR: return (from(r, 1, i) | from(r, 2, i)) & (from(r, 1, i) | ~is(r, 1, i)) & (from(r, 2, i) | ~is(r, 2, i));
    case RULE_SHL:
    case RULE_SHR:
    case RULE_SHR_SIGNED: return shift(r, i);
    case RULE_HALVES: return by_element(r, i, 16);
    case RULE_WORDS: return by_element(r, i, 32);
    case RULE_PAIR: return (from(r, 1, i) ? 0xffff0000u : 0) | (from(r, 2, i) ? 0xffffu : 0);
    case RULE_SELECT: return is(r, 3, i) ? from(r, 1, i) : from(r, 2, i);
    case RULE_LOP3: return lop3(r, i);
    case RULE_PRMT: return prmt(r, i);
    case RULE_PART: return from(r, 1, i) >> ins->imm[0];
    case RULE_PACK: {
        uint64_t d = 0;
        for (int k = 1; k < ins->n; k++)
            d |= (from(r, k, i) & (((uint64_t)1 << 8 * r->size / (ins->n - 1)) - 1)) << (k - 1) * 8 * r->size / (ins->n - 1);
        return d;
    }
    default: return any_of(r, i) ? ~(uint64_t)0 : 0;
    }
}

/* Results of 128 bits, or parts of them. */
static void bytes_128(const Rule *r, uint8_t *out)
{
    const Ins *ins = r->ins;
    memset(out, 0, 16 * LANES);
    if (ins->rule == RULE_PART_128) {
        for (int i = 0; i < LANES; i++)
            memcpy(out + i * ins->imm[1], r->u->bits + ins->arg[1] + 16 * i + ins->imm[0], ins->imm[1]);
        return;
    }
    const uint32_t bytes = 16 / (ins->n - 1);
    for (int k = 1; k < ins->n; k++)
        for (uint32_t i = 0; i < LANES; i++) {
            uint64_t v = from(r, k, i);
            memcpy(out + 16 * i + (k - 1) * bytes, &v, bytes);
        }
}

static uint32_t mask_of(const Rule *r, int k)
{
    uint32_t p = 0;
    if (dirty(r->u, r->ins->arg[k]))
        memcpy(&p, r->u->bits + r->ins->arg[k], 4);
    return p;
}

/* Undefined lanes of a and b, or of a or b: a defined operand may decide the result alone. */
static uint32_t joined(int64_t op, uint32_t a, uint32_t ua, uint32_t b, uint32_t ub)
{
    switch (op) {
    case 0: return ua;
    case 1: return (ua | ub) & (ua | a) & (ub | b);
    case 2: return (ua | ub) & (ua | ~a) & (ub | ~b);
    default: return ua | ub;
    }
}

/* Predicates as results: all lanes at once. */
static uint32_t predicate(const Rule *r)
{
    const Ins *ins = r->ins;
    uint32_t t = 0;
    if (ins->rule == RULE_PREDICATE) {
        uint32_t a = *(uint32_t *)operand(r->w, ins->arg[1]) ^ (uint32_t)ins->imm[1], b = *(uint32_t *)operand(r->w, ins->arg[2]) ^ (uint32_t)ins->imm[2];
        return joined(ins->imm[0], a, mask_of(r, 1), b, mask_of(r, 2));
    }
    if (ins->rule != RULE_COMPARE) {
        for (uint32_t i = 0; i < LANES; i++)
            t |= (uint32_t)(any_of(r, i) != 0) << i;
        return t;
    }
    for (uint32_t i = 0; i < LANES; i++)
        t |= (uint32_t)((from(r, 1, i) | from(r, 2, i)) != 0) << i;
    if (ins->n == 3 || !ins->imm[1])
        return t;
    /* The comparison's own value is not known here where the other predicate is undefined: either value counts then. */
    uint32_t c = *(uint32_t *)operand(r->w, ins->arg[4]) ^ (uint32_t)ins->imm[2], uc = mask_of(r, 4);
    return joined(ins->imm[1], ins->imm[1] == 2 ? 0 : FULL, t, c, uc);
}

/* D of mma.sync: a row of A, a column of B or an element of C that is undefined makes what it contributes to so. */
static void mma(const Rule *r, uint32_t m)
{
    const Ins *ins = r->ins;
    const int n_d = ins->imm[3] & 0xff, n_a = ins->imm[3] >> 8 & 0xff, n_b = ins->imm[3] >> 16 & 0xff, rows = ins->imm[0] & 255;
    const int wide = size_of(r, 0) == 8, halves = rows / 8, per = n_d / halves; /* registers of D for 8 rows */
    uint8_t row[16] = {0}, column[8] = {0};
    Origin origin = {0};
    for (int k = n_d; k < 2 * n_d + n_a + n_b; k++) /* a sparse A's metadata comes after and decides nothing here */
        if (dirty(r->u, ins->arg[k]))
            origin = r->u->origin[ins->arg[k] >> 5];
    for (int k = 0; k < n_a + n_b; k++)
        for (uint32_t i = 0; i < LANES; i++)
            if (from(r, n_d + k, i))
                *(k < n_a ? &row[k % halves * 8 + i / 4] : &column[i / 4]) = 1;
    uint8_t out[4][8 * LANES];
    for (int k = 0; k < n_d; k++) /* before any of D is written: C may be D */
        for (uint32_t i = 0; i < LANES; i++) {
            uint64_t d = from(r, n_d + n_a + n_b + k, i), left = row[k / per * 8 + i / 4];
            if (per == 1) /* two columns of 16 bits */
                for (int b = 0; b < 2; b++)
                    d |= left | column[i % 4 * 2 + b] || d >> 16 * b & 0xffff ? (uint64_t)0xffff << 16 * b : 0;
            else
                d = d || left || column[i % 4 * 2 + k % 2] ? ~(uint64_t)0 : 0;
            memcpy(out[k] + i * (wide ? 8 : 4), &d, wide ? 8 : 4);
        }
    for (int k = 0; k < n_d; k++)
        undefined_set(r->w, ins->arg[k], wide ? 8 : 4, m, out[k], origin);
}

void undefined_step(Warp *w, const Ins *ins, uint32_t m)
{
    const struct Undefined *u = w->undefined;
    int source = -1, any = 0;
    for (int k = 0; k < ins->n; k++) {
        if (!dirty(u, ins->arg[k]))
            continue;
        any = 1;
        const uint32_t form = ins->form[k], size = form & FORM_SIZE;
        if (form & FORM_WRITTEN && !(form & FORM_READ))
            continue;
        if (form & FORM_NEEDED && undefined_lanes(w, ins->arg[k], size, m))
            undefined_fault(w, size ? "an operand that must be defined (an address, a size, a count, a descriptor)" : "a condition",
                            u->origin[ins->arg[k] >> 5]);
        source = k;
    }
    if (!any || ins->rule == RULE_OWN)
        return;
    Rule r = {w, u, ins, 0};
    if (source >= 0 && ins->rule == RULE_MMA) {
        mma(&r, m);
        return;
    }
    /* All results before the first is written: a destination may be a source. */
    uint8_t out[2][16 * LANES];
    int written[4], n = 0;
    for (int k = 0; k < ins->n && n < 4; k++)
        if (ins->form[k] & FORM_WRITTEN && ins->arg[k] >= 0)
            written[n++] = k;
    const int computed = source >= 0 && ins->rule != RULE_CLEAR;
    for (int j = 0; j < n && j < 2 && computed; j++) {
        r.size = size_of(&r, written[j]);
        if (!r.size) {
            uint32_t p = predicate(&r);
            memcpy(out[j], &p, 4);
        } else if (ins->rule == RULE_PART_128 || ins->rule == RULE_PACK_128) {
            bytes_128(&r, out[j]);
        } else {
            for (uint32_t i = 0; i < LANES; i++) {
                uint64_t d = ins->rule == RULE_WARP ? (undefined_lanes(w, ins->arg[source], size_of(&r, source), m) ? ~(uint64_t)0 : 0) : lane(&r, i);
                memcpy(out[j] + i * r.size, &d, r.size);
            }
        }
        if (!r.size && ins->rule == RULE_WARP && undefined_lanes(w, ins->arg[source], size_of(&r, source), m))
            memset(out[j], 0xff, 4);
    }
    Origin origin = source >= 0 ? u->origin[ins->arg[source] >> 5] : (Origin){0};
    for (int k = 0, j = 0; k < ins->n; k++)
        if (ins->form[k] & FORM_WRITTEN && ins->arg[k] >= 0) {
            undefined_set(w, ins->arg[k], size_of(&r, k), m, computed && j < 2 ? out[j] : NULL, origin);
            j++;
        }
}
