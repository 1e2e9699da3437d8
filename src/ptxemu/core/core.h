/* The emulator's core: an interpreter of lowered PTX, one warp instruction at a time, with everything that it judges.
 *
 * A launch is a set of clusters (a plain grid has clusters of one CTA). All warps of a cluster are scheduled together by one worker thread;
 * workers take clusters from a common counter. A worker whose clusters only spin starts a further one, so that CTAs may wait for each other.
 *
 * Order is tracked with vector clocks: one component per warp of the cluster and one that counts completed asynchronous copies. A release
 * (an arrival at a barrier) publishes a warp's vector and starts its next epoch; an acquire (a completed wait) joins what was published.
 * An access is ordered after another if the second's warp has the first's epoch in its vector, whatever order the emulator ran them in.
 */
#pragma once
#include <setjmp.h>
#include <stdint.h>
#include <stddef.h>

typedef struct Ins Ins;
typedef struct Warp Warp;
typedef struct Cta Cta;
typedef struct Cluster Cluster;
typedef struct Program Program;
typedef struct Launch Launch;
typedef struct Worker Worker;
typedef struct Async Async;

/* What tensor copies with NaN fill write outside of the tensor, whatever its type, and what fma.oob takes for such a value. */
#define OOB_NAN 0x7ff7u

#define LANES 32
#define FULL 0xffffffffu
#define MAX_WARPS 32     /* of a CTA */
#define MAX_CTAS 16      /* of a cluster */
#define MAX_CLOCKS (MAX_WARPS * MAX_CTAS * 5 / 4 + 1)

/* ---- addresses ----------------------------------------------------------------------------------------------------------- */
#define SHARED_BASE 1024u                 /* the system keeps the first KB of shared memory on sm_90 and later */
#define CTA_SHIFT 24                      /* a shared address has its CTA's rank in the cluster above this bit, also the CTA's own */
#define WINDOW_SHARED ((uint64_t)1 << 56) /* generic addresses; real pointers lie below 1 << 48 */
#define WINDOW_PARAM ((uint64_t)2 << 56)
#define WINDOW_LOCAL ((uint64_t)3 << 56)
#define WINDOW_MASK ((uint64_t)0xff << 56)

/* ---- errors -------------------------------------------------------------------------------------------------------------- */
enum { ERR_NONE, ERR_MEMORY, ERR_RACE, ERR_PROXY, ERR_BARRIER, ERR_DEADLOCK, ERR_WGMMA, ERR_TENSOR, ERR_UNSUPPORTED, ERR_EMU };

/* ---- instructions -------------------------------------------------------------------------------------------------------- */
/* What an instruction's function returns. */
enum {
    NEXT,  /* go on */
    RETRY, /* not ready: run the same instruction again when something has happened */
    YIELD, /* go on, after other warps had a turn */
    SPLIT, /* the function set warp->split: lanes that run this instruction again after the others went on */
};
typedef int (*Exec)(Warp *, const Ins *, uint32_t mask);

enum { CTL_PLAIN, CTL_BRANCH, CTL_EXIT };
/* Starts a basic block; needs every live lane of the warp at once; uses registers that some wgmma uses (see wgmma_touch). INS_QUEUED: a read that
 * may be queued at an arrival; INS_TOUCHES: uses registers that may hold what such a read loads, INS_RENAMES: only moves them (see queued.c). */
enum { INS_LEADER = 1, INS_ALIGNED = 2, INS_HELD = 4, INS_QUEUED = 8, INS_TOUCHES = 16, INS_RENAMES = 32 };

/* An operand is an offset: into the warp's registers if >= 0, else -offset - 1 into the program's constants. A value has 32 lanes:
 * uint16_t (64 bytes), uint32_t (128) or uint64_t (256). A predicate is one uint32_t, a bit a lane. -1 - SINK_OFFSET is the sink "_". */
struct Ins {
    Exec fn;
    int32_t guard;      /* predicate's offset, or NO_GUARD */
    uint8_t guard_not;
    uint8_t control;    /* CTL_* */
    uint8_t flags;      /* INS_* */
    uint8_t n;          /* operands */
    const int32_t *arg;
    int64_t imm[4];     /* what the family's lowering put there */
    int32_t target;     /* of a branch */
    int32_t rank;       /* running order of its basic block */
    int32_t line;       /* in the PTX text */
    int32_t n_written;  /* arg[n] and on: of the operands, registers of wgmma that it writes (INS_HELD) */
    int32_t rule;       /* RULE_*: how undefined bits pass through it */
    const uint8_t *form; /* of every operand: FORM_* */
};
#define NO_GUARD INT32_MIN
#define SINK (INT32_MIN + 1)

struct Program {
    Ins *ins;
    int32_t n_ins;
    const uint8_t *constants;            /* a copy for each rank in a cluster, as addresses of shared variables hold it */
    uint64_t constant_stride;            /* bytes of a copy; 0: one serves all */
    int32_t reg_bytes;                   /* register file of a warp; the special registers come first, see SR_* */
    uint32_t static_shared, dynamic_base, local_bytes, param_bytes;
    int32_t arch;                        /* 90, 100, 103 */
    int32_t held_end;                    /* registers from SR_END to here are accumulators and operands A of wgmma */
    int32_t max_registers, min_ctas;     /* .maxnreg and .minnctapersm, 0: not given */
};

/* Special registers: offsets of 32-lane uint32_t (or uint64_t) values that a warp finds filled in. */
enum {
    SR_TID_X = 0, SR_TID_Y = 128, SR_TID_Z = 256, SR_NTID_X = 384, SR_NTID_Y = 512, SR_NTID_Z = 640,
    SR_CTAID_X = 768, SR_CTAID_Y = 896, SR_CTAID_Z = 1024, SR_NCTAID_X = 1152, SR_NCTAID_Y = 1280, SR_NCTAID_Z = 1408,
    SR_LANEID = 1536, SR_WARPID = 1664, SR_NWARPID = 1792, SR_LANEMASK_EQ = 1920, SR_LANEMASK_LT = 2048, SR_LANEMASK_LE = 2176,
    SR_LANEMASK_GT = 2304, SR_LANEMASK_GE = 2432, SR_SMID = 2560, SR_NSMID = 2688, SR_GRIDID = 2816,
    SR_CLUSTERID_X = 2944, SR_CLUSTERID_Y = 3072, SR_CLUSTERID_Z = 3200, SR_NCLUSTERID_X = 3328, SR_NCLUSTERID_Y = 3456,
    SR_NCLUSTERID_Z = 3584, SR_CLUSTER_CTAID_X = 3712, SR_CLUSTER_CTAID_Y = 3840, SR_CLUSTER_CTAID_Z = 3968,
    SR_CLUSTER_NCTAID_X = 4096, SR_CLUSTER_NCTAID_Y = 4224, SR_CLUSTER_NCTAID_Z = 4352, SR_CLUSTER_CTARANK = 4480,
    SR_CLUSTER_NCTARANK = 4608, SR_IS_EXPLICIT_CLUSTER = 4736, SR_DYNAMIC_SMEM = 4864, SR_TOTAL_SMEM = 4992, SR_WARP_SZ = 5120,
    SR_CLOCK = 5248, SR_CLOCK_HI = 5376, SR_CLOCK64 = 5504, SR_GLOBALTIMER = 5760, SR_END = 6016
};

/* ---- execution state ----------------------------------------------------------------------------------------------------- */
/* Lanes of a warp at one place. */
typedef struct {
    int32_t pc;
    uint32_t mask;
    uint8_t waiting;     /* its instruction returned RETRY */
    uint8_t timeout;     /* a waiting try_wait shall give up this time */
    uint8_t arrived;     /* it has arrived at the barrier that it retries */
    uint64_t token;      /* what it waits for there (a barrier's generation) */
    const char *why;     /* what kind of thing it waits for; for reports */
    int32_t what;        /* its address or number, -1 for none */
} Frag;

struct Warp {
    Cta *cta;
    int id, gid;         /* in its CTA, in its cluster */
    uint8_t *reg;
    const uint8_t *constants;
    uint32_t live;       /* lanes that exist and have not left */
    Frag frag[LANES];
    int n_frag, cur;     /* cur: the fragment that runs */
    uint32_t split;      /* see SPLIT */
    uint32_t max_registers; /* a thread, as setmaxnreg left it */
    uint32_t resized;    /* setmaxnreg executed */
    const Ins *resize;   /* the last of them */
    uint64_t cluster_phase; /* of barrier.cluster that it arrived for */
    uint32_t init_fence; /* its clock at its last fence.mbarrier_init: what it initialised until then is published by relaxed cluster barriers */
    uint32_t *inits;     /* such clocks of other warps that it has seen; NULL: none */
    const Ins *at;       /* the instruction that runs, for reports */
    uint32_t *vc;        /* its vector clock: cluster->n_clock components */
    struct WgState *wg;  /* wgmma: see wgmma.c */
    struct CpState *cp;  /* cp.async and bulk groups: see async.c */
    uint32_t *fenced;    /* its vector at its last fence, and ... */
    struct Lanes *lanes; /* order between its lanes: see lanes.c; NULL: not looked for */
    uint32_t *observed;  /* what relaxed reads saw since then: see sync.c; NULL: none */
    struct Queued *queued; /* its reads of shared memory that may be queued: see queued.c; NULL: none was */
    struct Undefined *undefined; /* bits of its registers that were never written: see defined.c; NULL: none were read */
    uint64_t retired;    /* instructions executed */
};

/* ---- shared memory and its shadow (shared.c) ------------------------------------------------------------------------------- */
enum { ST_NONE = 0, ST_VALID = 1, ST_INFLIGHT = 2, ST_MBAR = 4 };
typedef struct {
    uint32_t size;       /* bytes that the kernel may use */
    uint8_t *data;
    uint8_t *state;      /* per byte: ST_* */
    uint32_t *writer;    /* per byte: epoch (EPOCH) of the last write; 0: none */
    uint32_t *reader;    /* per 4-byte word and clock component but copies': a warp's clock at its last read, a warpgroup's last wgmma */
    uint32_t *queued;    /* see queued.c; NULL: none is noted */
    uint16_t *locks;     /* per 16 bytes: asynchronous reads in flight */
    uint8_t *strong;     /* per byte: the last write was a strong one; NULL: none was */
    struct Touched *lane_writer, *lane_reader; /* per byte, per word: see lanes.c; NULL: not looked for */
} Shared;

/* A write's epoch: who (1 + warp in the cluster; ASYNC_WHO for copies) and that clock component's value then. */
#define EPOCH(who, clock) ((uint32_t)(who) << 22 | (uint32_t)(clock))
#define EPOCH_WHO(e) ((e) >> 22)
#define EPOCH_CLOCK(e) ((e) & 0x3fffffu)

typedef struct MBarrier {
    uint32_t addr, count, pending;
    int64_t tx;
    uint64_t phase;
    uint32_t *vc, *done_vc;
    uint32_t init;       /* epoch of its initialisation */
    const Warp *by;
    struct MBarrier *next;
} MBarrier;

typedef struct {
    uint32_t need, got;
    uint64_t generation;
    uint32_t *vc, *done_vc;
    uint32_t warps;          /* bit per warp that is in it, for reports */
    struct { uint32_t trues, falses; } votes, done_votes; /* of bar.red: lanes, in this phase and the last */
} NamedBarrier;

struct Cta {
    Cluster *cluster;
    int rank;                /* in the cluster */
    uint32_t id[3];
    int n_warps, n_threads;
    Warp *warp;
    Shared shared;
    MBarrier *mbar;          /* live mbarrier objects */
    NamedBarrier named[16];
    uint8_t *local;          /* local memory of all threads */
    struct Tensor *tensor;   /* tensor memory: see tensor.c */
    uint32_t registers;      /* in the pool of setmaxnreg */
};

/* A fence.proxy.async of one warp: its vector then. The fence is at clock vc[warp]. */
typedef struct { uint32_t *vc; } Fence;
typedef struct { Fence *at; int n, room; } FenceLog;

/* An operation that was issued and completes later. */
enum { Q_COPY, Q_TENSOR, Q_STORE };
struct Async {
    int kind;                /* Q_*: any order, in order, any order within committed groups */
    void (*run)(Async *);    /* completes it; errors are charged to `warp` at `ins` */
    Warp *warp;
    const Ins *ins;
    Cta *cta;                /* whose shared memory it concerns */
    Async *next;
    uint64_t v[24];          /* the family's own */
    void *data;
};

struct Cluster {
    Launch *launch;
    Worker *worker;
    int n_ctas;
    Cta *cta;
    int n_warps;             /* of all its CTAs */
    int n_clock;             /* components of clocks: n_warps, one for the wgmma of each warpgroup, one for copies */
    FenceLog *fence;         /* per warp of the cluster */
    uint32_t copies;         /* completed asynchronous copies: the last clock component's source */
    Async *queue[3];         /* operations in flight, by kind; oldest first */
    struct Places *places;   /* locations that were released: see sync.c */
    uint32_t index;          /* of the launch's clusters */
    struct Acquired *acquired; /* what it knows of other clusters: see race.c */
    uint64_t activity;       /* counts everything that another warp may wait for */
    uint64_t rng;
    int keep, kept;          /* shuffled: turns for which a warp is kept back so that others get ahead of it, and which (none: past the last) */
    struct { uint64_t phase; uint32_t got, need; uint32_t *vc, *done_vc, *inits, *done_inits; } barrier; /* barrier.cluster */
    int done;
    Cluster *next;           /* of the clusters that a worker holds */
};

/* Ranges of global memory that the kernel may touch. */
typedef struct { uint64_t lo, hi; const char *name; } Range;

/* A texture or surface; its handle is its address (see texture.c). */
typedef struct Texture {
    uint64_t base, pitch, slice; /* bytes from line to line, and from layer, or depth, to the next */
    uint32_t size[3], layers;    /* texels along each dimension that it has; 0: no array */
    uint32_t channels, bytes;    /* of a texel; bytes of each */
    int32_t kind, dims, surface, linear, normalized, fractions; /* fractions: integers are read as parts of their largest */
    int32_t address[3];
    float border[4];
} Texture;

struct Launch {
    const Program *program;
    uint32_t grid[3], block[3], cluster[3];
    uint32_t dynamic_shared;
    const uint8_t *params;
    const Range *range;
    int32_t n_range;
    int32_t n_texture;
    const Texture *const *texture;
    uint64_t seed;
    int32_t eager;            /* complete asynchronous operations when they are issued */
    int32_t shuffle;          /* visit warps in random order */
    int32_t workers;
    int32_t quantum;          /* instructions a warp runs before the next has its turn */
    uint64_t limit;           /* instructions without anything happening before a cluster counts as stuck */
    int32_t races;            /* look for races in global memory */
    int32_t loads_end_by_use; /* a tcgen05.ld is complete where its registers are used */
    int32_t warp_races;       /* look for races between lanes of a warp in shared memory */
    int32_t queued_reads;     /* look for reads that may be queued when a copy overwrites what they read */
    /* results */
    volatile int32_t error;   /* ERR_* of the first fault */
    int32_t error_line;       /* PTX line, or 0 */
    uint32_t error_cta[3];
    int32_t error_warp;
    char message[4096];
    char notes[4096];         /* lines about things that are no fault */
    uint64_t instructions;
    uint32_t next_cluster;    /* counter */
    volatile uint64_t progress; /* counts slices of clusters in which something happened */
    struct Races *race;       /* see race.c; NULL: they are not looked for */
};

struct Worker {
    Launch *launch;
    jmp_buf jump;
    Warp *warp;               /* that runs, or whose operation completes */
    const Ins *ins;
};

/* ---- services ------------------------------------------------------------------------------------------------------------ */
/* exec.c */
_Noreturn void fault(Warp *w, int kind, const char *format, ...) __attribute__((format(printf, 3, 4)));
void note(Launch *l, const char *format, ...) __attribute__((format(printf, 2, 3)));
Async *async_new(Warp *w, int kind, void (*run)(Async *)); /* by the instruction that runs now */
void async_issue(Async *op);                     /* queue it, or run it at once where the launch is eager */
void async_complete(Async *op);                  /* take it off its queue and run it now */
uint64_t random_u64(Cluster *c);
void *emu_alloc(size_t n);                       /* zeroed; never NULL */

/* clocks: exec.c */
void clock_join(Cluster *c, uint32_t *into, const uint32_t *from);
void clock_release(Warp *w, uint32_t *into);     /* join the warp's vector into `into`, start its next epoch */
void clock_acquire(Warp *w, const uint32_t *from);
static inline int clock_has(const Warp *w, uint32_t epoch) /* is the write of this epoch ordered before the warp's present? */
{
    uint32_t who = EPOCH_WHO(epoch);
    return who == 0 || w->vc[who - 1] >= EPOCH_CLOCK(epoch);
}
uint32_t clock_epoch(const Warp *w);             /* the warp's present epoch */
uint32_t copy_epoch(Cluster *c);                 /* a new epoch of an asynchronous copy */

/* shared.c: every function faults where the access is not allowed; `off` is an offset from SHARED_BASE in the CTA's shared memory */
void shared_init(Cta *c, uint32_t bytes);
void shared_free(Cta *c);
uint32_t shared_offset(Warp *w, uint32_t addr, uint32_t bytes, uint32_t align, Cta **cta); /* of a shared (or cluster) address */
void check_present(Warp *w, const Cta *c, const char *what);                               /* has the other CTA of the cluster threads left? */
int shared_defined(const Cta *c, uint32_t off, uint32_t bytes);                            /* was all of it written, with defined values? */
void shared_check_defined(Warp *w, Cta *c, uint32_t off, uint32_t bytes, const char *what);
int shared_read(Warp *w, Cta *c, uint32_t off, uint32_t bytes, void *out);                 /* generic proxy, ordered; returns 1 unless all is defined */
void shared_write(Warp *w, Cta *c, uint32_t off, uint32_t bytes, const void *in);
int proxy_fenced(Warp *w, uint32_t epoch);                                                 /* is such a fence between that epoch and the present? */
void proxy_fence(Warp *w);                                                                 /* fence.proxy.async */
/* asynchronous proxy, in 16-byte rows: an offset list */
int async_read_begin(Warp *w, Cta *c, uint32_t off, uint32_t bytes, const char *what);     /* returns 1 unless all is defined */
void async_read_end(Warp *w, Cta *c, uint32_t off, uint32_t bytes);                        /* w: the warp that waited, or NULL */
int async_read_rows(Warp *w, Cta *c, const uint32_t *row, int n, int component, uint32_t clock, const char *what); /* wgmma's */
void async_write_begin(Warp *w, Cta *c, uint32_t off, uint32_t bytes, const char *what);
void async_write_end(Cta *c, uint32_t off, uint32_t bytes, const void *in, uint32_t epoch);

/* defined.c */
void undefined_guard(Warp *w, const Ins *ins, uint32_t mask); /* faults where the guard of a lane is undefined */
void undefined_step(Warp *w, const Ins *ins, uint32_t m);     /* what an instruction that is about to run does to definedness */
void undefined_free(Warp *w);
size_t undefined_report(const Warp *w, char *out, size_t n);  /* the warp's first read of what was never written, if there is one */

/* queued.c */
void queued_touch(Warp *w, const Ins *ins); /* what an instruction that is about to run does to registers that reads have loaded */
void queued_done(Warp *w);                  /* all reads of the warp are */
void queued_release(Warp *w);               /* w->queued is not NULL */
void queued_check(Warp *w, Cta *c, uint32_t off, uint32_t bytes, const char *what); /* before a write of the asynchronous proxy */
void queued_free(Warp *w);

/* race.c */
struct Races *race_new(void);
void race_free(struct Races *r);
void race_forget(Cluster *c);

/* lanes.c */
void lanes_init(Cta *c);
void lanes_free(Cta *c);
void lanes_join(Warp *w, uint32_t into, uint32_t from);

/* sync.c */
void memory_fence(Warp *w);
void sync_free(Cluster *c);

/* global.c */
void global_check(Warp *w, uint64_t addr, uint32_t bytes, uint32_t align, const char *what);

/* barrier.c */
MBarrier *mbar_find(Warp *w, Cta *c, uint32_t off);
MBarrier *mbar_use(Warp *w, Cta *c, uint32_t off, int async); /* and check that its initialisation is visible to the warp, or the async proxy */
void mbar_arrive(Warp *w, MBarrier *b, uint32_t n, int64_t tx, uint32_t drop, const uint32_t *vc);
void mbar_complete_tx(Cluster *c, Warp *w, MBarrier *b, int64_t bytes, uint32_t epoch);
void barrier_report(Cta *c, char *out, size_t n); /* barriers in mid-phase */
void barrier_finish(Cta *c);                      /* checks at a CTA's end */

/* families' state: created on first use, checked and freed at a CTA's end */
void async_finish(Cta *c);
void async_free(Cta *c);
void wgmma_finish(Cta *c);
void wgmma_touch(Warp *w, const Ins *ins);        /* checks an instruction's use of registers that wgmma uses */
void tensor_finish(Cta *c);

/* ---- operands ------------------------------------------------------------------------------------------------------------ */
static inline void *operand(Warp *w, int32_t off)
{
    return off >= 0 ? (void *)(w->reg + off) : (void *)(w->constants - (off + 1));
}

/* For every lane i of the mask m. */
#define FOR_LANES(i, m) for (uint32_t rest_ = (m), i; rest_ && (i = __builtin_ctz(rest_), 1); rest_ &= rest_ - 1)

/* ---- the table of functions by name ---------------------------------------------------------------------------------------- */
typedef struct { const char *name; Exec fn; } Entry;
#define REGISTER(table) \
    __attribute__((constructor)) static void register_##table(void) { register_entries(table, sizeof table / sizeof *table); }
void register_entries(const Entry *e, size_t n);
