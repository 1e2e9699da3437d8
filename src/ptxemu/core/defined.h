/* Undefined bits of registers: see defined.c. */
#pragma once
#include "core.h"

/* How an instruction passes undefined bits from its sources to its destinations; numbered as in lower_defined.py. */
enum {
    RULE_ANY,         /* a lane is undefined where any source's is */
    RULE_CLEAR,       /* results are defined */
    RULE_OWN,         /* the instruction's function sees to it */
    RULE_MOVE, RULE_EXTEND, RULE_BITS, RULE_AND, RULE_OR, RULE_SHL, RULE_SHR, RULE_SHR_SIGNED,
    RULE_HALVES, RULE_WORDS, /* elements of 16 and of 32 bits do not mix */
    RULE_PAIR,        /* two sources become the high and the low half */
    RULE_SELECT, RULE_LOP3, RULE_PRMT, RULE_PART, RULE_PACK, RULE_PART_128, RULE_PACK_128, RULE_COMPARE, RULE_PREDICATE,
    RULE_WARP,        /* any lane's bit makes all results undefined */
    RULE_MMA,
};

/* What Ins.form says of an operand. */
enum {
    FORM_SIZE = 31,     /* bytes of a lane; 0: a predicate */
    FORM_READ = 32,     /* of an operand that is written: it is read, too */
    FORM_NEEDED = 64,   /* a source whose active lanes must be defined */
    FORM_WRITTEN = 128,
};

/* Where undefined bits come from: the PTX line of the read (or call), and the offset in shared memory, or lane << 16 | column of tensor memory. */
enum { FROM_SHARED, FROM_TENSOR, FROM_CALL };
typedef struct { int32_t line; uint32_t at; uint8_t kind; } Origin;

const uint8_t *undefined_bits(const Warp *w, int32_t at); /* a register's shadow, or NULL: all is defined */
Origin undefined_origin(const Warp *w, int32_t at);
int undefined_lanes(const Warp *w, int32_t at, uint32_t size, uint32_t m); /* has any of these lanes an undefined bit? */
/* The shadow of the lanes m of a register of `size` bytes a lane becomes `bits` (as registers lie; NULL: defined). */
void undefined_set(Warp *w, int32_t at, uint32_t size, uint32_t m, const void *bits, Origin origin);
uint8_t *undefined_local(Warp *w, uint32_t lane, uint64_t off, int create);
Origin *undefined_local_origin(Warp *w, uint64_t off);
/* Of the lanes m those `inside` call a function, which has not yet given the result that these bytes of local memory hold. The others have
 * none either, but where an earlier call gave it to them since it was declared, which is where `again` is 0. */
void undefined_results(Warp *w, uint32_t m, uint32_t inside, int again, uint32_t off, uint32_t bytes, int32_t line);
_Noreturn void undefined_fault(Warp *w, const char *what, Origin o);
