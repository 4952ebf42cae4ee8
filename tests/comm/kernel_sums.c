/* Prints a checksum of the sums of random bits for each dtype, to compare processors.

   Usage: kernel_sums SEED. All NaN count as one value. */

#include <stdlib.h>

#include "../../hpctrain/comm/node/kernel.c"

enum { MOST_IN = 5, MOST_NUMEL = 3000 };

static uint64_t state;

static uint64_t random_bits(void) { /* xorshift64 */
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state;
}

static uint64_t value_at(int dtype, const char *from) {
    uint64_t value = 0;
    memcpy(&value, from, item_bytes[dtype]);
    int is_nan = dtype == FLOAT32    ? (value & 0x7fffffff) > 0x7f800000
                 : dtype == FLOAT64  ? (value & INT64_MAX) > 0x7ff0000000000000
                 : dtype == FLOAT16  ? (value & 0x7fff) > 0x7c00
                 : dtype == BFLOAT16 ? (value & 0x7fff) > 0x7f80
                                     : 0;
    return is_nan ? 1 : value;
}

int main(int argc, char **argv) {
    static char arrays[MOST_IN][8 * MOST_NUMEL];
    if (argc != 2) return 2;
    state = 0x9e3779b97f4a7c15 + (uint64_t)atoi(argv[1]);
    for (int dtype = 0; dtype < NUM_DTYPES; dtype++) {
        uint64_t checksum = 0xcbf29ce484222325; /* FNV-1a */
        for (int turn = 0; turn < 40; turn++) {
            int num_in = 1 + random_bits() % MOST_IN, is_scaled = random_bits() % 2;
            size_t numel = random_bits() % MOST_NUMEL;
            const char *in[MOST_IN];
            char *out[1] = {arrays[0]};
            for (int i = 0; i < num_in; i++) {
                uint64_t mask = dtype == BOOL ? 0x0101010101010101 : UINT64_MAX;
                for (size_t at = 0; at < sizeof arrays[i]; at += 8) {
                    uint64_t bits = random_bits() & mask;
                    memcpy(arrays[i] + at, &bits, 8);
                }
                in[i] = arrays[i];
            }
            int found = sums[dtype](in, num_in, out, 1, numel, 1.0 / 3, is_scaled, 1);
            checksum = (checksum ^ (uint64_t)(found != 0)) * 0x100000001b3;
            for (size_t i = 0; i < numel; i++)
                checksum = (checksum ^ value_at(dtype, out[0] + i * item_bytes[dtype]))
                           * 0x100000001b3;
        }
        printf("%d %016llx\n", dtype, (unsigned long long)checksum);
    }
    return 0;
}
