/* Atomic operations and reductions (PTX ISA: "Parallel Synchronization and Communication Instructions": atom, red, red.async).
 *
 * On global memory they are atomic for the worker threads too; shared memory belongs to one worker.
 */
#include "memory.h"

#include <math.h>
#include <pthread.h>

/* ---- arithmetic ------------------------------------------------------------------------------------------------------------------- */
static float to_float(uint32_t bits) { float f; memcpy(&f, &bits, 4); return f; }
static uint32_t from_float(float f) { uint32_t b; memcpy(&b, &f, 4); return b; }
static float bf16_value(uint32_t h) { return to_float(h << 16); }
static float f16_value(uint32_t h) { _Float16 f; uint16_t b = (uint16_t)h; memcpy(&f, &b, 2); return (float)f; }

static uint32_t bf16_bits(float f)
{
    uint32_t b = from_float(f);
    if (f != f)
        return 0x7fff;
    return (b + 0x7fff + (b >> 16 & 1)) >> 16; /* to nearest even */
}

static uint32_t f16_bits(float f)
{
    if (f != f)
        return 0x7fff;
    _Float16 h = (_Float16)f;
    uint16_t b;
    memcpy(&b, &h, 2);
    return b;
}

static double choose(int op, double a, double b)
{
    switch (op) {
    case OP_MIN: return a != a ? b : b != b ? a : a < b || (a == b && signbit(a)) ? a : b; /* a NaN loses; -0 is below +0 */
    default: return a != a ? b : b != b ? a : a > b || (a == b && !signbit(a)) ? a : b;
    }
}

static float flush(float f) { return fpclassify(f) == FP_SUBNORMAL ? copysignf(0, f) : f; }

static uint64_t reduce_float(int op, int type, uint64_t old, uint64_t b)
{
    switch (type) {
    case T_F16: {
        float x = f16_value(old), y = f16_value(b);
        /* The sum of two halves, rounded to float and then to half, is the sum rounded to half: float has over twice its digits. */
        return op == OP_ADD ? f16_bits(x + y) : f16_bits((float)choose(op, x, y));
    }
    case T_BF16: {
        float x = bf16_value(old), y = bf16_value(b);
        return op == OP_ADD ? bf16_bits(x + y) : bf16_bits((float)choose(op, x, y));
    }
    case T_F32:
    case T_F32_FTZ: {
        float x = to_float(old), y = to_float(b), r;
        if (type == T_F32_FTZ)
            r = op == OP_ADD ? flush(flush(x) + flush(y)) : (float)choose(op, flush(x), flush(y));
        else
            r = op == OP_ADD ? x + y : (float)choose(op, x, y);
        return r != r ? 0x7fffffff : from_float(r);
    }
    default: {
        double x, y, r;
        uint64_t bits;
        memcpy(&x, &old, 8);
        memcpy(&y, &b, 8);
        r = op == OP_ADD ? x + y : choose(op, x, y);
        memcpy(&bits, &r, 8);
        return bits; /* double precision keeps NaNs' payloads */
    }
    }
}

uint32_t type_bytes(int type)
{
    static const uint8_t bytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 4, 8, 2, 4, 4, 16};
    return bytes[type];
}

uint64_t reduce(int op, int type, uint64_t old, uint64_t b, uint64_t c)
{
    const int is_signed = type == T_S32 || type == T_S64;
    int64_t x = type == T_S32 ? (int32_t)old : (int64_t)old, y = type == T_S32 ? (int32_t)b : (int64_t)b;
    switch (op) {
    case OP_EXCH: return b;
    case OP_CAS: return old == b ? c : old;
    case OP_AND: return old & b;
    case OP_OR: return old | b;
    case OP_XOR: return old ^ b;
    case OP_INC: return old >= b ? 0 : old + 1;
    case OP_DEC: return old == 0 || old > b ? b : old - 1;
    }
    if (type == T_F16X2 || type == T_BF16X2) {
        int half = type == T_F16X2 ? T_F16 : T_BF16;
        return reduce_float(op, half, old & 0xffff, b & 0xffff) | reduce_float(op, half, old >> 16, b >> 16) << 16;
    }
    if (type >= T_F16 && type <= T_BF16)
        return reduce_float(op, type, old, b);
    if (op == OP_ADD)
        return old + b;
    int less = is_signed ? x < y : old < b;
    return (op == OP_MIN) == less ? old : b;
}

#define RETRY_LOOP(T)                                                                                                                   \
    {                                                                                                                                   \
        T old = __atomic_load_n((T *)at, __ATOMIC_SEQ_CST);                                                                             \
        while (!__atomic_compare_exchange_n((T *)at, &old, (T)reduce(op, type, old, b, c), 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))      \
            ;                                                                                                                           \
        return old;                                                                                                                     \
    }

uint64_t global_reduce(void *at, int op, int type, uint64_t b, uint64_t c)
{
    switch (type_bytes(type)) {
    case 1: RETRY_LOOP(uint8_t)
    case 2: RETRY_LOOP(uint16_t)
    case 4: RETRY_LOOP(uint32_t)
    default: RETRY_LOOP(uint64_t)
    }
}

/* ---- atom, red ---------------------------------------------------------------------------------------------------------------------- */
static uint64_t get(const void *p, uint32_t bytes)
{
    uint64_t v = 0;
    memcpy(&v, p, bytes);
    return v;
}

/* The register lane of an operand; elements of 16 bits lie in 16-bit registers. */
static uint64_t value(Warp *w, int32_t arg, uint32_t bytes, uint32_t lane)
{
    return arg == SINK ? 0 : get((const uint8_t *)operand(w, arg) + lane * bytes, bytes);
}

/* One lane's element. Returns whether memory changed. */
static int one(Warp *w, uint64_t addr, int64_t flags, int op, int type, uint64_t b, uint64_t c, uint64_t *old)
{
    const uint32_t bytes = type_bytes(type);
    const int acquire = (flags & ACC_ACQUIRE) != 0, release = (flags & ACC_RELEASE) != 0;
    int shared = ACC_SPACE(flags) == SPACE_SHARED;
    if (ACC_SPACE(flags) == SPACE_GENERIC) {
        if ((addr & WINDOW_MASK) && (addr & WINDOW_MASK) != WINDOW_SHARED)
            fault(w, ERR_MEMORY, "atomic at generic address %#llx, which is neither global nor shared", (unsigned long long)addr);
        shared = (addr & WINDOW_MASK) == WINDOW_SHARED;
    }
    if (!shared) {
        uint64_t key = addr & ~(uint64_t)3;
        /* Published before its value can be seen by another thread, acquired after it was. */
        sync_write(w, key, release, 1);
        /* Additions in global memory flush subnormals (PTX ISA: atom). */
        *old = global_reduce((void *)addr, op, type == T_F32 && op == OP_ADD ? T_F32_FTZ : type, b, c);
        sync_read(w, key, acquire);
        return reduce(op, type, *old, b, c) != *old;
    }
    Cta *t;
    uint32_t off = shared_place(w, addr, bytes, bytes, (flags & ACC_OWN) != 0, "atomic", &t);
    shared_strong_begin(w, t, off, bytes, TOUCH_READ | TOUCH_WRITE, "atomic");
    *old = get(t->shared.data + off, bytes);
    uint64_t now = reduce(op, type, *old, b, c);
    memcpy(t->shared.data + off, &now, bytes);
    shared_strong_end(t, off, bytes, clock_epoch(w));
    sync_read(w, shared_key(t, off), acquire);
    sync_write(w, shared_key(t, off), release, 1);
    return now != *old;
}

/* atom d..., [a], b..., c: operands a, d..., b..., c (cas) with SINK for what is not there. imm[2]: operation, imm[3]: type. */
static int atom(Warp *w, const Ins *ins, uint32_t m)
{
    const int64_t flags = ins->imm[1];
    const uint32_t n = ACC_COUNT(flags), bytes = type_bytes(ins->imm[3]);
    uint64_t addr[LANES];
    uint32_t global = 0;
    lane_addresses(w, ins->arg[0], ins->imm[0], flags & ACC_WIDE, addr);
    if (ACC_SPACE(flags) == SPACE_GLOBAL) {
        global_check_lanes(w, m, addr, bytes * n, bytes * n, "atomic");
        global = m;
    } else if (ACC_SPACE(flags) == SPACE_GENERIC) {
        FOR_LANES(i, m)
            if (!(addr[i] & WINDOW_MASK)) {
                global_check(w, addr[i], bytes * n, bytes * n, "atomic");
                global |= 1u << i;
            }
    }
    if (global && races(w))
        race_lanes(w, global, addr, bytes * n, TOUCH_READ | TOUCH_WRITE, 1, "atomic");
    int changed = 0;
    FOR_LANES(i, m) for (uint32_t j = 0; j < n; j++)
    {
        uint64_t old, b = value(w, ins->arg[1 + n + j], bytes, i);
        changed |= one(w, addr[i] + j * bytes, flags, ins->imm[2], ins->imm[3], b, value(w, ins->arg[1 + 2 * n], bytes, i), &old);
        if (ins->arg[1 + j] != SINK)
            memcpy((uint8_t *)operand(w, ins->arg[1 + j]) + i * bytes, &old, bytes);
    }
    if (ins->flags & INS_QUEUED)
        queued_load(w, ins, m, addr, bytes * n);
    /* An atomic that changes nothing may be what a loop waits on. */
    if (!changed)
        return YIELD;
    w->cta->cluster->activity++;
    return NEXT;
}

/* atom.exch/cas.b128: operands a, d, b, c. */
static int atom_b128(Warp *w, const Ins *ins, uint32_t m)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    const int64_t flags = ins->imm[1];
    int changed = 0;
    uint64_t addresses[LANES];
    lane_addresses(w, ins->arg[0], ins->imm[0], flags & ACC_WIDE, addresses);
    FOR_LANES(i, m) {
        const uint64_t addr = addresses[i];
        uint64_t key = addr & ~(uint64_t)3;
        const int space = ACC_SPACE(flags), shared = space == SPACE_SHARED || (addr & WINDOW_MASK) == WINDOW_SHARED;
        const uint8_t *b = (const uint8_t *)operand(w, ins->arg[2]) + 16 * i, *c = b;
        uint8_t *at = (uint8_t *)addr, old[16];
        Cta *t = NULL;
        uint32_t off = 0;
        if (shared) {
            off = shared_place(w, addr, 16, 16, (flags & ACC_OWN) != 0, "atomic", &t);
            shared_strong_begin(w, t, off, 16, TOUCH_READ | TOUCH_WRITE, "atomic");
            at = t->shared.data + off;
            key = shared_key(t, off);
        } else {
            global_check(w, addr, 16, 16, "atomic");
            if (races(w))
                race_access(w, addr, 16, TOUCH_READ | TOUCH_WRITE, 1, clock_epoch(w), "atomic");
            sync_write(w, key, (flags & ACC_RELEASE) != 0, 1);
        }
        pthread_mutex_lock(&lock);
        memcpy(old, at, 16);
        int write = 1;
        if (ins->imm[2] == OP_CAS) {
            write = !memcmp(old, b, 16);
            c = (const uint8_t *)operand(w, ins->arg[3]) + 16 * i;
        }
        if (write)
            memcpy(at, c, 16);
        pthread_mutex_unlock(&lock);
        changed |= write && memcmp(old, c, 16);
        if (shared)
            shared_strong_end(t, off, 16, clock_epoch(w));
        sync_read(w, key, (flags & ACC_ACQUIRE) != 0);
        if (shared)
            sync_write(w, key, (flags & ACC_RELEASE) != 0, 1);
        if (ins->arg[1] != SINK)
            memcpy((uint8_t *)operand(w, ins->arg[1]) + 16 * i, old, 16);
    }
    if (ins->flags & INS_QUEUED)
        queued_load(w, ins, m, addresses, 16);
    w->cta->cluster->activity += changed;
    return changed ? NEXT : YIELD;
}

static const Entry atomics[] = {{"atom", atom}, {"atom.b128", atom_b128}};
REGISTER(atomics)
