/* Reductions of one node in one call each: barriers, the check of calls, and sums in shared memory.

   The kernel performs the protocol of shared_memory.py, in the same memory and with the same bits,
   so that ranks with the kernel and ranks without it work together.

   Memory of the node; the caller gives all addresses:
     cells       8 int64 per rank, one cache line, which only this rank writes: 0 and 1 hold the
                 numbers of its calls in turns 0 and 1, 4 counts its sums that are not finite.
     semaphores  one per rank and round of the barrier. Up to FEW ranks have one round, in which a
                 rank posts those of all others and waits for as many posts of its own; more ranks
                 have one post in each round: in round k rank r posts that of rank r + 2^k.
     sign        one int64: not zero after a call of the communicator has failed on a rank.
     buckets     one per rank. Rank r reads and writes slice r of all of them, after the barrier
                 that begins a call and before the barrier that ends it.
     words       one int64 per rank, each in its cache line. A rank that has written its slot stores
                 a word for a repeated operation: the number of earlier commits, shifted, and the
                 number of the operation. Rank 0 stores the number of commits in its own word once
                 all words are equal, or overwrites the words of others to abort; see fast_path.py.
     bells       semaphores on which ranks sleep that wait for words or control messages.
     slots       two per rank, used in turns. A rank writes its slot before the barrier that begins
                 a call. After it, ``direct`` reads the slots of all ranks; ``slices`` reads slice r
                 of all slots, writes slice r of the slot of rank 0, and reads the other slices
                 there after a second barrier. A slot is written again in the call after the next,
                 whose barrier all its readers have passed.

   Order of memory: a post is a release and a successful wait an acquire (POSIX), so that stores
   before a barrier are visible after it on all ranks. Between two barriers each byte has either
   one writer and no other reader, or readers only. The sign alone is relaxed: a rank that fails
   within a barrier writes the sign before its post. Words are stored with release and loaded with
   acquire: slots before a word are visible to rank 0, and before its commit to all ranks.

   A call that waits for long returns LATE; the caller looks for lost ranks, and continues the call
   with hpctrain_resume. The kernel allocates no memory, takes no lock and calls no Python. */

#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <semaphore.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__)
#define RELAX() __builtin_ia32_pause()
#define VECTORS __attribute__((target_clones("avx512f", "avx2", "default"))) /* chosen at load */
#elif defined(__aarch64__)
#define RELAX() __asm__ __volatile__("yield")
#else
#define RELAX() ((void)0)
#endif
#if !defined(VECTORS) || defined(HPCTRAIN_ONE_WIDTH)
#undef VECTORS
#define VECTORS
#endif
#ifndef DELAY
#define DELAY() /* a test compiles the kernel with random delays */
#endif

enum { DONE, LATE, DIFFERENT, FAILED };
enum { MOST_RANKS = 1024, MOST_ROUNDS = 10, FEW = 8, CELLS = 8, UNFINITE = 4 };
enum { ALIGN = 64, BLOCK = 2048 };
enum { FLOAT32, FLOAT64, FLOAT16, BFLOAT16, INT8, INT16, INT32, INT64, BOOL, NUM_DTYPES };
enum { BARRIER, BUCKET, DIRECT, SLICES };
enum { ENTER, COMPARE, LEAVE };
enum { OWN_BELL, ROOT_BELL, FIRST_CHILD_BELL, MOST_BELLS = 8 }; /* a rank has at most 4 children */
enum { NOTHING = 0, NUMBER_BITS = 20, NUM_POLLS = 20 };

typedef struct {
    /* What one rank knows of its node. */
    int32_t rank, size, num_rounds, num_posts; /* rounds of a barrier, and posts of a round */
    double spin_s, yield_s; /* phases of a wait, after which a call returns LATE */
    int64_t *cells;
    volatile int64_t *sign;
    sem_t *mine[MOST_ROUNDS], *next[MOST_ROUNDS];
    char *slots[MOST_RANKS];
    size_t slot_bytes;
    int64_t *words;
    sem_t *bells[MOST_BELLS];
    int32_t num_bells;
    /* The current call. */
    int32_t kind, at, round, is_posted, num_taken, turn, dtype, is_scaled, looks;
    int64_t call;
    double scale;
    char *values, *buckets[MOST_RANKS];
    size_t numel, begun; /* elements of the call, and of the chunks before the current one */
} Node;

typedef struct {
    /* A sum that can be repeated. */
    int64_t call, numel; /* elements of a commit fit a slot */
    double scale;
    int32_t kind, dtype, is_scaled;
} Reduction;

/* --- sums ------------------------------------------------------------------------------------ */

static inline float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static inline float from_bfloat16(uint16_t half) { return float_of((uint32_t)half << 16); }

static inline uint16_t to_bfloat16(float value) {
    uint32_t bits = bits_of(value), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (uint16_t)rounded;
}

/* Shifted, a half is a float with an exponent that is 112 too small; subnormal halves become
   exact as the difference of two normal floats. */
static inline float from_float16(uint16_t half) {
    uint32_t shifted = (uint32_t)(half & 0x7fff) << 13, sign = (uint32_t)(half & 0x8000) << 16;
    uint32_t normal = shifted + (112u << 23);
    uint32_t subnormal = bits_of(float_of(shifted + (113u << 23)) - float_of(113u << 23));
    uint32_t large = shifted | 0x7f800000;
    uint32_t found = shifted < (1u << 23) ? subnormal : shifted >= (31u << 23) ? large : normal;
    return float_of(found | sign);
}

/* Round to nearest, ties to even. Below 2^-14 adding 0.5 rounds at the last bit of a half. */
static inline uint16_t to_float16(float value) {
    uint32_t bits = bits_of(value), all = bits & 0x7fffffff, sign = bits >> 16 & 0x8000;
    uint32_t normal = (all - (112u << 23) + 0xfff + (all >> 13 & 1)) >> 13;
    uint32_t subnormal = bits_of(float_of(all) + 0.5f) - bits_of(0.5f);
    uint32_t large = all > 0x7f800000 ? 0x7e00 : 0x7c00;
    uint32_t found = all < (113u << 23) ? subnormal : all >= (143u << 23) ? large : normal;
    return (uint16_t)(found | sign);
}

/* Adds ``num_in`` arrays in their order, multiplies by ``scale``, rounds once, and stores the
   result in ``num_out`` arrays, which may be among the first ones. Returns whether a result is
   not finite. */
typedef int Sum(const char *const *in, int num_in, char *const *out, int num_out, size_t numel,
                double scale, int is_scaled, int looks);

/* Values of the same index may share an address: loops have no other dependence. */
#if defined(__clang__)
#define EACH _Pragma("clang loop vectorize(assume_safety)") for (size_t i = 0; i < n; i++)
#else
#define EACH _Pragma("GCC ivdep") for (size_t i = 0; i < n; i++)
#endif

/* For values that are added as they are stored: blocks of the sum grow in the first output. */
#define SUM_OF(NAME, T, ADD, SCALED, IS_BAD)                                                   \
    VECTORS static int NAME(const char *const *in, int num_in, char *const *out, int num_out,  \
                            size_t numel, double scale, int is_scaled, int looks) {            \
        int is_bad = 0;                                                                        \
        (void)scale, (void)is_scaled;                                                          \
        for (size_t at = 0, n; at < numel; at += n) {                                          \
            n = numel - at < BLOCK ? numel - at : BLOCK;                                       \
            const T *first = (const T *)in[0] + at, *second;                                   \
            T block[BLOCK], *total = num_in > 2 ? block : (T *)out[0] + at;                    \
            if (num_in == 1) memmove(total, first, n * sizeof(T));                             \
            for (int r = 1; r < num_in; r++, first = total) {                                  \
                second = (const T *)in[r] + at;                                                \
                EACH total[i] = ADD(first[i], second[i]);                                      \
            }                                                                                  \
            SCALED(T)                                                                          \
            if (looks) EACH is_bad |= IS_BAD(total[i]);                                        \
            for (int o = 0; o < num_out; o++)                                                  \
                if ((T *)out[o] + at != total) memcpy((T *)out[o] + at, total, n * sizeof(T)); \
        }                                                                                      \
        return is_bad;                                                                         \
    }

/* For halves, which are added in float and rounded once. */
#define SUM_OF_HALVES(NAME, FROM, TO, IS_BAD)                                                  \
    VECTORS static int NAME(const char *const *in, int num_in, char *const *out, int num_out,  \
                            size_t numel, double scale, int is_scaled, int looks) {            \
        float total[BLOCK];                                                                    \
        uint16_t rounded[BLOCK];                                                               \
        int is_bad = 0;                                                                        \
        for (size_t at = 0, n; at < numel; at += n) {                                          \
            n = numel - at < BLOCK ? numel - at : BLOCK;                                       \
            const uint16_t *first = (const uint16_t *)in[0] + at;                              \
            EACH total[i] = FROM(first[i]);                                                    \
            for (int r = 1; r < num_in; r++) {                                                 \
                const uint16_t *other = (const uint16_t *)in[r] + at;                          \
                EACH total[i] += FROM(other[i]);                                               \
            }                                                                                  \
            SCALE(float)                                                                       \
            EACH rounded[i] = TO(total[i]);                                                    \
            if (looks) EACH is_bad |= IS_BAD(rounded[i]);                                      \
            for (int o = 0; o < num_out; o++)                                                  \
                memcpy((uint16_t *)out[o] + at, rounded, n * 2);                               \
        }                                                                                      \
        return is_bad;                                                                         \
    }

#define PLUS(a, b) ((a) + (b))
#define OR(a, b) ((a) | (b))
#define NEVER(x) 0
#define UNSCALED(T)
#define SCALE(T)                                                                               \
    if (is_scaled) {                                                                           \
        T factor = (T)scale;                                                                   \
        EACH total[i] *= factor;                                                               \
    }
#define IS_BAD_32(x) ((bits_of(x) & 0x7f800000) == 0x7f800000)
#define IS_BAD_64(x) (!((x) - (x) == 0))
#define IS_BAD_16(x) (((x) & 0x7c00) == 0x7c00)
#define IS_BAD_B16(x) (((x) & 0x7f80) == 0x7f80)

SUM_OF(sum_float32, float, PLUS, SCALE, IS_BAD_32)
SUM_OF(sum_float64, double, PLUS, SCALE, IS_BAD_64)
SUM_OF_HALVES(sum_float16, from_float16, to_float16, IS_BAD_16)
SUM_OF_HALVES(sum_bfloat16, from_bfloat16, to_bfloat16, IS_BAD_B16)
SUM_OF(sum_int8, uint8_t, PLUS, UNSCALED, NEVER)
SUM_OF(sum_int16, uint16_t, PLUS, UNSCALED, NEVER)
SUM_OF(sum_int32, uint32_t, PLUS, UNSCALED, NEVER)
SUM_OF(sum_int64, uint64_t, PLUS, UNSCALED, NEVER)
SUM_OF(sum_bool, uint8_t, OR, UNSCALED, NEVER)

static Sum *const sums[NUM_DTYPES] = {sum_float32, sum_float64, sum_float16,
                                      sum_bfloat16, sum_int8, sum_int16,
                                      sum_int32, sum_int64, sum_bool};
static const size_t item_bytes[NUM_DTYPES] = {4, 8, 2, 2, 1, 2, 4, 8, 1};

/* Gives the first element and the number of elements of slice ``part`` of ``numel`` elements. */
static size_t slice_of(size_t numel, size_t num_parts, size_t part, size_t *length) {
    size_t units = (numel + ALIGN - 1) / ALIGN;
    size_t first = part * units / num_parts * ALIGN, last = (part + 1) * units / num_parts * ALIGN;
    first = first < numel ? first : numel;
    *length = (last < numel ? last : numel) - first;
    return first;
}

/* --- waits ----------------------------------------------------------------------------------- */

static double now_s(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}

/* Waits for a post. ``nap_s``: sleep for that long; 0: test once; negative: spin, then yield. */
static int wait_for(const Node *node, sem_t *semaphore, double nap_s) {
    DELAY();
    if (sem_trywait(semaphore) == 0) return 1;
    if (nap_s > 0) {
        struct timespec end;
        clock_gettime(CLOCK_REALTIME, &end);
        int64_t nanoseconds = end.tv_nsec + (int64_t)(nap_s * 1e9);
        end.tv_sec += nanoseconds / 1000000000;
        end.tv_nsec = nanoseconds % 1000000000;
        return sem_timedwait(semaphore, &end) == 0;
    }
    if (nap_s == 0) return 0;
    double begin = now_s(), yields_at = begin + node->spin_s, end = yields_at + node->yield_s;
    for (double now = begin; now < end; now = now_s()) {
        if (now < yields_at)
            for (int i = 0; i < 16; i++) RELAX();
        else
            sched_yield();
        if (sem_trywait(semaphore) == 0) return 1;
    }
    return 0;
}

/* Passes the rest of a barrier; returns DONE, LATE or FAILED. */
static int pass(Node *node, double nap_s) {
    for (; node->round < node->num_rounds; node->round++, node->is_posted = 0) {
        DELAY();
        for (int i = 0; i < node->num_posts && !node->is_posted; i++)
            sem_post(node->next[node->round * node->num_posts + i]);
        node->is_posted = 1;
        for (; node->num_taken < node->num_posts; node->num_taken++)
            if (!wait_for(node, node->mine[node->round], nap_s)) return LATE;
        node->num_taken = 0;
    }
    node->round = 0;
    return *node->sign ? FAILED : DONE;
}

/* --- calls ----------------------------------------------------------------------------------- */

static size_t chunk_numel(const Node *node) {
    size_t left = node->numel - node->begun, most = node->slot_bytes / item_bytes[node->dtype];
    return left < most ? left : most;
}

static char *slot(const Node *node, int rank) {
    return node->slots[rank] + node->turn * node->slot_bytes;
}

static char *chunk(const Node *node) {
    return node->values + node->begun * item_bytes[node->dtype];
}

/* Copies the slices of the other ranks of a chunk. */
static void copy_others(const Node *node, char *to, const char *from) {
    size_t width = item_bytes[node->dtype], numel = chunk_numel(node), length;
    size_t begin = slice_of(numel, node->size, node->rank, &length) * width;
    size_t end = begin + length * width;
    memcpy(to, from, begin);
    memcpy(to + end, from + end, numel * width - end);
}

/* Writes what the other ranks read: the number of the call, and this rank's values. */
static void enter(Node *node) {
    DELAY();
    node->cells[node->rank * CELLS + node->turn] = node->call;
    char *own = slot(node, node->rank);
    if (node->kind == DIRECT) memcpy(own, chunk(node), chunk_numel(node) * item_bytes[node->dtype]);
    if (node->kind == SLICES) copy_others(node, own, chunk(node)); /* this rank sums the rest */
}

static int is_same_call(const Node *node) {
    for (int rank = 0; rank < node->size; rank++)
        if (node->cells[rank * CELLS + node->turn] != node->call) return 0;
    return 1;
}

/* Sums this rank's slice, or with DIRECT everything. */
static void sum(Node *node) {
    const char *in[MOST_RANKS];
    char *out[MOST_RANKS];
    size_t width = item_bytes[node->dtype], length, numel, first;
    int num_out = 0;
    DELAY();
    if (node->kind == BUCKET) {
        first = slice_of(node->numel, node->size, node->rank, &length);
        for (int rank = 0; rank < node->size; rank++)
            in[rank] = out[rank] = node->buckets[rank] + first * width;
        num_out = node->size;
    } else {
        numel = chunk_numel(node), first = 0, length = numel;
        if (node->kind == SLICES) first = slice_of(numel, node->size, node->rank, &length);
        for (int rank = 0; rank < node->size; rank++) in[rank] = slot(node, rank) + first * width;
        in[node->rank] = out[num_out++] = chunk(node) + first * width;
        if (node->kind == SLICES) out[num_out++] = slot(node, 0) + first * width;
    }
    if (sums[node->dtype](in, node->size, out, num_out, length, node->scale, node->is_scaled,
                          node->looks))
        node->cells[node->rank * CELLS + UNFINITE]++;
}

/* Continues a call until it is complete, or waits for long; ``nap_s`` as in wait_for. */
static int run(Node *node, double nap_s) {
    for (;;) {
        if (node->at == ENTER) {
            enter(node);
            node->at = COMPARE;
        }
        int code = pass(node, nap_s);
        if (code != DONE) return code;
        if (nap_s > 0) nap_s = -1;
        if (node->at == COMPARE) {
            if (!is_same_call(node)) return DIFFERENT;
            sum(node);
            node->at = LEAVE;
            if (node->kind != DIRECT) continue; /* the others wait for this rank's slice */
        }
        DELAY();
        if (node->kind == SLICES) copy_others(node, chunk(node), slot(node, 0));
        if (node->kind < DIRECT) return DONE;
        node->begun += chunk_numel(node);
        node->turn = 1 - node->turn;
        if (node->begun >= node->numel) return DONE;
        node->at = ENTER;
    }
}

/* Returns DONE if the operation of this word is committed, which rank 0 does here; DIFFERENT if it
   is aborted, or must be; LATE if a rank has not prepared it. */
static int outcome(const Node *node, int64_t word) {
    int64_t num_commits = word >> NUMBER_BITS, first = num_commits << NUMBER_BITS;
    int code = DONE;
    if (node->rank) {
        if (__atomic_load_n(node->words, __ATOMIC_ACQUIRE) != num_commits) return DONE;
        int64_t own = __atomic_load_n(node->words + node->rank * CELLS, __ATOMIC_RELAXED);
        return own == word ? LATE : DIFFERENT;
    }
    for (int rank = 1; rank < node->size; rank++) {
        int64_t found = __atomic_load_n(node->words + rank * CELLS, __ATOMIC_ACQUIRE);
        if (found == word) continue;
        if (found < 0 || (found >= first && found != NOTHING)) return DIFFERENT;
        code = LATE;
    }
    if (code == DONE) __atomic_store_n(node->words, num_commits + 1, __ATOMIC_RELEASE);
    return code;
}

/* --- crashes ---------------------------------------------------------------------------------

   faulthandler writes the stacks of a process that crashes to a file in memory, restores the
   handlers that were installed before its own, and raises the signal again. The handler below is
   one of them: it copies the lines of the file to stderr and to the log, with the rank, and raises
   the signal for the handlers before it. All its calls are safe in handlers of signals. */

enum { NUM_CRASHES = 5, MOST_CRASH_BYTES = 1 << 16, MOST_PREFIX_BYTES = 64, MOST_PATH_BYTES = 4096 };
static const int crashes[NUM_CRASHES] = {SIGSEGV, SIGFPE, SIGABRT, SIGBUS, SIGILL};
static struct sigaction before_crash[NUM_CRASHES];
static int crash_file = -1;
static char crash_prefix[MOST_PREFIX_BYTES], crash_log[MOST_PATH_BYTES];

static void write_all(int file, const char *text, size_t length) {
    while (length) {
        ssize_t done = write(file, text, length);
        if (done <= 0) return;
        text += done;
        length -= (size_t)done;
    }
}

static void report_crash(int signal) {
    static char in[MOST_CRASH_BYTES], out[2 * MOST_CRASH_BYTES];
    ssize_t num_bytes = pread(crash_file, in, sizeof in, 0);
    size_t length = 0, prefix_bytes = strlen(crash_prefix);
    for (ssize_t i = 0; i < num_bytes && length + prefix_bytes < sizeof out; i++) {
        if (i == 0 || in[i - 1] == '\n') {
            memcpy(out + length, crash_prefix, prefix_bytes);
            length += prefix_bytes;
        }
        out[length++] = in[i];
    }
    write_all(STDERR_FILENO, out, length);
    int log = length && *crash_log
        ? open(crash_log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644) : -1;
    if (log >= 0) {
        write_all(log, out, length);
        close(log);
    }
    if (!ftruncate(crash_file, 0)) lseek(crash_file, 0, SEEK_SET); /* another process may share it */
    for (int i = 0; i < NUM_CRASHES; i++)
        if (crashes[i] == signal) sigaction(signal, &before_crash[i], NULL);
    raise(signal);
}

/* Starts to report crashes that faulthandler writes to `file`; with a negative one, ends it. */
void hpctrain_report_crashes(int file, const char *prefix, const char *log) {
    struct sigaction action = {.sa_handler = report_crash, .sa_flags = SA_NODEFER | SA_ONSTACK};
    sigemptyset(&action.sa_mask);
    if (file >= 0) {
        snprintf(crash_prefix, sizeof crash_prefix, "%s", prefix);
        snprintf(crash_log, sizeof crash_log, "%s", log);
    }
    for (int i = 0; i < NUM_CRASHES; i++)
        sigaction(crashes[i], file >= 0 ? &action : &before_crash[i],
                  file >= 0 ? &before_crash[i] : NULL);
    crash_file = file;
}

/* --- interface: addresses are integers, and codes are results -------------------------------- */

#ifndef SOURCE_CHECKSUM
#define SOURCE_CHECKSUM 0
#endif
/* The caller refuses a kernel that was compiled from another source. */
uint32_t hpctrain_checksum(void) { return SOURCE_CHECKSUM; }

/* Width in bytes of the vectors that this processor runs. */
int hpctrain_vector_bytes(void) {
#if defined(__x86_64__) && !defined(HPCTRAIN_ONE_WIDTH)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f")) return 64;
    if (__builtin_cpu_supports("avx2")) return 32;
#endif
    return 16;
}

size_t hpctrain_node_bytes(void) { return sizeof(Node); }

/* ``addresses``: cells, sign, then the slots of all ranks, then per round the semaphore that this
   rank waits for and those that it posts. */
int hpctrain_prepare(Node *node, int rank, int size, double spin_s, double yield_s,
                     size_t slot_bytes, const int64_t *addresses) {
    memset(node, 0, sizeof *node);
    if (size > MOST_RANKS) return FAILED;
    node->rank = rank, node->size = size;
    node->spin_s = spin_s, node->yield_s = yield_s, node->slot_bytes = slot_bytes;
    node->cells = (int64_t *)*addresses++;
    node->sign = (int64_t *)*addresses++;
    for (int r = 0; r < size; r++) node->slots[r] = (char *)*addresses++;
    node->num_posts = size <= FEW ? size - 1 : 1;
    for (int reach = 1; reach < size; reach = size <= FEW ? size : 2 * reach, node->num_rounds++) {
        node->mine[node->num_rounds] = (sem_t *)*addresses++;
        for (int i = 0; i < node->num_posts; i++)
            node->next[node->num_rounds * node->num_posts + i] = (sem_t *)*addresses++;
    }
    return DONE;
}

int hpctrain_barrier(Node *node) {
    node->kind = BARRIER, node->at = LEAVE;
    return run(node, -1);
}

/* ``memory``: the buckets of all ranks, or the values of this rank. */
static void set(Node *node, const Reduction *what, int turn, int looks, void *memory) {
    node->kind = what->kind, node->at = ENTER, node->turn = turn, node->looks = looks;
    node->call = what->call, node->dtype = what->dtype;
    node->numel = (size_t)what->numel, node->begun = 0;
    node->scale = what->scale, node->is_scaled = what->is_scaled;
    if (what->kind == BUCKET)
        memcpy(node->buckets, memory, node->size * sizeof *node->buckets);
    else
        node->values = memory;
}

/* Replaces buckets, or values, by their sum over the ranks; ``looks``: counts a sum that is not
   finite. */
int hpctrain_sum(Node *node, const Reduction *what, int turn, int looks, void *memory) {
    set(node, what, turn, looks, memory);
    return run(node, -1);
}

/* ``bells``: those of this rank, of rank 0, and of the children of this rank. */
void hpctrain_use_words(Node *node, int64_t *words, int num_bells, const int64_t *bells) {
    node->words = words, node->num_bells = num_bells;
    for (int i = 0; i < num_bells; i++) node->bells[i] = (sem_t *)bells[i];
}

/* Prepares a repeated reduction, and replaces the values by their sum if it is committed. Returns
   LATE if it remains prepared, DIFFERENT if it is aborted. */
int hpctrain_commit(Node *node, const Reduction *what, int64_t word, int turn, void *values) {
    double yields_at = 0, now;
    int code;
    set(node, what, turn, 0, values);
    DELAY();
    memcpy(slot(node, node->rank), values, node->numel * item_bytes[node->dtype]);
    if (node->rank) {
        __atomic_store_n(node->words + node->rank * CELLS, word, __ATOMIC_RELEASE);
        sem_post(node->bells[ROOT_BELL]);
    }
    for (int polls = 0; (code = outcome(node, word)) == LATE; polls++) {
        DELAY();
        RELAX();
        if (polls < NUM_POLLS) continue;
        now = now_s();
        if (yields_at == 0) yields_at = now + node->spin_s;
        if (now >= yields_at + node->yield_s) return LATE;
        if (now >= yields_at) sched_yield();
    }
    if (code != DONE) return code;
    for (int i = FIRST_CHILD_BELL; i < node->num_bells; i++) sem_post(node->bells[i]);
    while (sem_trywait(node->bells[OWN_BELL]) == 0) continue;
    sum(node);
    return DONE;
}

/* Continues the call that returned LATE, after a sleep of at most ``nap_s`` for its next post. */
int hpctrain_resume(Node *node, double nap_s) { return run(node, nap_s); }
