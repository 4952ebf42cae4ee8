/* Stands in for libnccl where there is no accelerator: the same functions, for memory of the host.

   Ranks of one machine sum through a file that all of them map. As in a communicator of NCCL that
   is not blocking, a call begins what a thread carries out, and that waits for all ranks without
   an end, unless it is aborted: then it ends with any values. Values of 16 bits are added in 16.

   What a test sets in the environment goes wrong: NCCL_STAND_IN=init on the rank that has it,
   =sum in a sum, =later behind it. */

#define _GNU_SOURCE
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID = 4, REMOTE_ERROR = 6, IN_PROGRESS = 7 };
enum { MOST_RANKS = 8, CHUNK = 1 << 16, VERSION = 22809 };

typedef struct { char path[128]; } Id;

typedef struct {
    size_t size;
    unsigned magic, version;
    int blocking, cga, min_ctas, max_ctas;
    const char *net;
    int split;
} Config;

typedef struct {
    atomic_int joined, waiting, generation;
    char slots[MOST_RANKS][CHUNK];
} Shared;

typedef struct {
    int rank, size, type;
    Shared *shared;
    atomic_int state, is_aborted;
    pthread_t thread;
    int has_thread;
    char *values;
    size_t count;
} Comm;

static int fails(const char *what) {
    const char *set = getenv("NCCL_STAND_IN");
    return set && !strcmp(set, what);
}

int ncclGetVersion(int *version) {
    *version = VERSION;
    return SUCCESS;
}

const char *ncclGetErrorString(int code) {
    return code == REMOTE_ERROR ? "remote process exited" : code == INVALID ? "invalid" : "system";
}

const char *ncclGetLastError(void *comm) {
    (void)comm;
    return "told by the stand-in";
}

int ncclGetUniqueId(Id *id) {
    memset(id, 0, sizeof *id);
    strcpy(id->path, "/dev/shm/nccl-stand-in-XXXXXX");
    int file = mkstemp(id->path);
    int failed = file < 0 || ftruncate(file, sizeof(Shared));
    close(file);
    return failed ? SYSTEM_ERROR : SUCCESS;
}

int ncclCommInitRankConfig(Comm **made, int size, Id id, int rank, Config *config) {
    if (config->size != sizeof *config || config->magic != 0xcafebeef || config->version != 21800
        || config->blocking || config->cga != INT_MIN || config->min_ctas != INT_MIN
        || config->max_ctas != INT_MIN || config->net || config->split != INT_MIN
        || size > MOST_RANKS)
        return INVALID;
    if (fails("init")) return SYSTEM_ERROR;
    int file = open(id.path, O_RDWR);
    if (file < 0) return SYSTEM_ERROR;
    Comm *comm = calloc(1, sizeof *comm);
    comm->rank = rank;
    comm->size = size;
    comm->shared = mmap(0, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (atomic_fetch_add(&comm->shared->joined, 1) + 1 == size) unlink(id.path);
    *made = comm;
    return IN_PROGRESS;
}

int ncclCommGetAsyncError(Comm *comm, int *code) {
    *code = atomic_load(&comm->shared->joined) < comm->size ? IN_PROGRESS : comm->state;
    if (fails("later")) *code = REMOTE_ERROR;
    return SUCCESS;
}

static int meet(Comm *comm) { /* 0 where it was aborted */
    Shared *shared = comm->shared;
    int generation = shared->generation;
    if (atomic_fetch_add(&shared->waiting, 1) + 1 == comm->size) {
        shared->waiting = 0;
        atomic_fetch_add(&shared->generation, 1);
    }
    while (shared->generation == generation && !comm->is_aborted) usleep(20);
    return !comm->is_aborted;
}

static float of_bf16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

static uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (value != value) return (bits >> 16) | 64;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

#define SUM(TYPE, ADDED)                                                                      \
    for (size_t i = 0; i < count; i++) {                                                      \
        TYPE total = ((TYPE *)shared->slots[0])[i];                                           \
        for (int rank = 1; rank < comm->size; rank++) {                                       \
            TYPE other = ((TYPE *)shared->slots[rank])[i];                                    \
            total = ADDED;                                                                    \
        }                                                                                     \
        ((TYPE *)out)[i] = total;                                                             \
    }

static void sum(Comm *comm, char *out, size_t count) {
    Shared *shared = comm->shared;
    if (comm->type == 6) SUM(_Float16, total + other)
    if (comm->type == 7) SUM(float, total + other)
    if (comm->type == 8) SUM(double, total + other)
    if (comm->type == 9) SUM(uint16_t, to_bf16(of_bf16(total) + of_bf16(other)))
}

static void *work(void *given) {
    Comm *comm = given;
    size_t width = comm->type == 7 ? 4 : comm->type == 8 ? 8 : 2, most = CHUNK / width;
    for (size_t first = 0; first < comm->count && !comm->is_aborted; first += most) {
        size_t count = comm->count - first < most ? comm->count - first : most;
        char *values = comm->values + first * width;
        memcpy(comm->shared->slots[comm->rank], values, count * width);
        memset(values, 0x55, count * width);
        if (meet(comm)) sum(comm, values, count);
        meet(comm);
    }
    comm->state = fails("sum") ? REMOTE_ERROR : SUCCESS;
    return 0;
}

static void end(Comm *comm) {
    if (comm->has_thread) pthread_join(comm->thread, 0);
    comm->has_thread = 0;
}

int ncclAllReduce(void *from, void *to, size_t count, int type, int op, Comm *comm, void *stream) {
    if (from != to || op || stream || type < 6 || type > 9) return INVALID;
    end(comm);
    comm->values = to;
    comm->count = count;
    comm->type = type;
    comm->state = IN_PROGRESS;
    comm->has_thread = !pthread_create(&comm->thread, 0, work, comm);
    return comm->has_thread ? IN_PROGRESS : SYSTEM_ERROR;
}

int ncclCommFinalize(Comm *comm) {
    end(comm);
    return SUCCESS;
}

int ncclCommDestroy(Comm *comm) {
    end(comm);
    munmap(comm->shared, sizeof(Shared));
    free(comm);
    return SUCCESS;
}

int ncclCommAbort(Comm *comm) {
    comm->is_aborted = 1;
    return ncclCommDestroy(comm);
}
