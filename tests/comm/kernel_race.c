/* Runs the kernel on threads that stand for the ranks of a node, with random delays at each step,
   so that a thread sanitizer sees each access to the memory of the node.

   Usage: kernel_race RANKS CALLS SEED. Prints the number of wrong values. */

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static _Thread_local unsigned seed;

static void delay(void) {
    int kind = rand_r(&seed) % 16;
    if (kind == 0) usleep(rand_r(&seed) % 300);
    if (kind < 6) sched_yield();
}

#define HPCTRAIN_ONE_WIDTH
#define DELAY() delay()
#include "../../hpctrain/comm/node/kernel.c"

enum { SLOT_BYTES = 1024, MOST_NUMEL = 700, COMMIT = 4, NUM_KINDS };

static int num_ranks, num_calls, first_seed;
static int64_t *cells, sign;
static int64_t *words;
static sem_t semaphores[MOST_RANKS][MOST_ROUNDS], bells[MOST_RANKS];
static char *slots[MOST_RANKS];
static uint32_t *buckets[MOST_RANKS];

static uint32_t value_of(int call, int rank, int element) {
    return (uint32_t)(call * 1000003 + rank * 7919 + element * 31);
}

static int finish(Node *node, int code) {
    while (code == LATE) code = hpctrain_resume(node, rand_r(&seed) % 2 * 1e-4);
    return code;
}

/* Commits a reduction; a rank that waits for long polls, as fast_path.py does. */
static int commit(Node *node, int64_t number, int turn, char *values, int numel) {
    Reduction what = {0, numel, 0, DIRECT, INT32, 0};
    int64_t word = number << NUMBER_BITS | (number % 7 + 1);
    int code = hpctrain_commit(node, &what, word, turn, values);
    if (code != LATE) return code;
    while ((code = outcome(node, word)) == LATE) delay();
    if (code == DONE) sum(node);
    return code;
}

static void *rank_main(void *argument) {
    int rank = (int)(intptr_t)argument, turn = 0;
    int64_t num_commits = 0, own_bells[] = {(intptr_t)&bells[rank], (intptr_t)&bells[0]};
    unsigned program = (unsigned)first_seed; /* the same on all ranks */
    int64_t addresses[2 + MOST_RANKS + 2 * MOST_ROUNDS], *next = addresses, num_wrong = 0;
    uint32_t values[MOST_NUMEL];
    Node *node = malloc(sizeof *node);
    seed = (unsigned)(first_seed * 100 + rank);
    *next++ = (intptr_t)cells, *next++ = (intptr_t)&sign;
    for (int r = 0; r < num_ranks; r++) *next++ = (intptr_t)slots[r];
    for (int k = 0; (1 << k) < num_ranks && (k == 0 || num_ranks > FEW); k++) {
        *next++ = (intptr_t)&semaphores[rank][k];
        *next++ = (intptr_t)&semaphores[(rank + (1 << k)) % num_ranks][k];
        for (int r = 2; r < num_ranks && num_ranks <= FEW; r++)
            *next++ = (intptr_t)&semaphores[(rank + r) % num_ranks][k];
    }
    hpctrain_prepare(node, rank, num_ranks, 1e-6, 1e-6, SLOT_BYTES, addresses);
    hpctrain_use_words(node, words, 2, own_bells);
    for (int call = 1; call <= num_calls; call++) {
        int kind = rand_r(&program) % NUM_KINDS, numel = rand_r(&program) % MOST_NUMEL, code;
        uint32_t *own = kind == BUCKET ? buckets[rank] : values;
        if (kind == BARRIER) {
            code = hpctrain_barrier(node);
        } else {
            for (int i = 0; i < numel; i++) own[i] = value_of(call, rank, i);
            if (kind == COMMIT) {
                numel = numel * 4 < SLOT_BYTES ? numel : SLOT_BYTES / 4;
                code = commit(node, num_commits++, turn, (char *)own, numel);
                turn = 1 - turn;
            } else {
                Reduction what = {call, numel, 0, kind, INT32, 0};
                int num_chunks = kind == BUCKET ? 1 : (numel * 4 + SLOT_BYTES - 1) / SLOT_BYTES;
                code = hpctrain_sum(node, &what, turn, 0,
                                    kind == BUCKET ? (void *)buckets : (void *)own);
                turn = (turn + (num_chunks ? num_chunks : 1)) % 2;
            }
        }
        num_wrong += finish(node, code) != DONE;
        for (int i = 0; kind != BARRIER && i < numel; i++) {
            uint32_t sum = 0;
            for (int r = 0; r < num_ranks; r++) sum += value_of(call, r, i);
            num_wrong += own[i] != sum;
        }
    }
    free(node);
    return (void *)(intptr_t)num_wrong;
}

int main(int argc, char **argv) {
    pthread_t threads[MOST_RANKS];
    int64_t num_wrong = 0;
    if (argc != 4) return 2;
    num_ranks = atoi(argv[1]), num_calls = atoi(argv[2]), first_seed = atoi(argv[3]);
    cells = calloc((size_t)num_ranks * CELLS, sizeof *cells);
    words = calloc((size_t)num_ranks * CELLS, sizeof *words);
    for (int r = 0; r < num_ranks; r++) {
        sem_init(&bells[r], 1, 0);
        slots[r] = calloc(2, SLOT_BYTES), buckets[r] = calloc(MOST_NUMEL, 4);
        for (int k = 0; k < MOST_ROUNDS; k++) sem_init(&semaphores[r][k], 1, 0);
    }
    for (int r = 0; r < num_ranks; r++)
        pthread_create(&threads[r], NULL, rank_main, (void *)(intptr_t)r);
    for (int r = 0; r < num_ranks; r++) {
        void *found;
        pthread_join(threads[r], &found);
        num_wrong += (intptr_t)found;
    }
    printf("%lld\n", (long long)num_wrong);
    return num_wrong != 0;
}
