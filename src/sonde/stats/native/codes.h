/* Counting exponent codes. Needs passes.h before it. */

#define CODES_PER_SWEEP 8

/* Add to `counts` how often each code occurs, by table. Four tables, so that equal neighbours do not wait for each other. */
static void count_by_table(const uint8_t *codes, int size, uint32_t *counts)
{
    uint32_t table[4][NUM_CODES] = {{0}};
    for (int i = 0; i < size; i += 8) {
        uint64_t eight;
        memcpy(&eight, codes + i, sizeof eight);
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++)
            table[j % 4][eight >> 8 * j & 0xff]++;
    }
    for (int code = 0; code < NUM_CODES; code++)
        counts[code] += table[0][code] + table[1][code] + table[2][code] + table[3][code];
}

/* Count the codes base ... base + CODES_PER_SWEEP - 1 by comparison, a vector at a time. */
static __attribute__((noinline)) void sweep(const uint8_t *codes, int size, int base, uint32_t *counts)
{
    bytes found[CODES_PER_SWEEP];
    for (int k = 0; k < CODES_PER_SWEEP; k++)
        found[k] = no_bytes();
    for (int i = 0; i < size; i += (int)sizeof(bytes)) {
        bytes here = load_bytes(codes + i);
#pragma GCC unroll 8
        for (int k = 0; k < CODES_PER_SWEEP; k++)
            found[k] = count_equal(found[k], here, (uint8_t)(base + k));
    }
    for (int k = 0; k < CODES_PER_SWEEP; k++)
        counts[k] = sum_of_bytes(found[k]);
}

/* Count the few codes from 1 to `top` one by one. */
static void pick_out(const uint8_t *codes, int size, int top, uint32_t *counts)
{
    for (int i = 0; i < size; i += (int)sizeof(bytes))
        for (uint64_t hits = bytes_up_to(load_bytes(codes + i), (uint8_t)top); hits; hits &= hits - 1)
            counts[codes[i + __builtin_ctzll(hits)]]++;
}

/*
 * Add to `counts` how often each code from 1 on occurs; what is left over has code 0.
 *
 * Most tensors fill some ten neighbouring bins, so the codes are counted by comparison from the largest (`top`) downward,
 * and the last few stragglers one by one. Where that leaves too many, the distribution is wide and a table is cheaper.
 * Returns whether it was.
 */
static int count_codes(const uint8_t *codes, int size, int zeros, int top, uint32_t *counts)
{
    uint32_t found[NUM_CODES + CODES_PER_SWEEP] = {0};
    int left = size - zeros, uncounted = top;
    for (int sweeps = 0; uncounted > 0 && left > size / 64; sweeps++) {
        if (sweeps >= 2 && left > size / 8) {
            count_by_table(codes, size, counts);
            return 1;
        }
        int base = uncounted >= CODES_PER_SWEEP ? uncounted - CODES_PER_SWEEP + 1 : 1;
        sweep(codes, size, base, found + base);
        for (int code = base; code <= uncounted; code++)
            left -= (int)found[code];
        /* The sweep may have reached over codes that the one before it counted: it found the same again. */
        uncounted = base - 1;
    }
    for (int code = uncounted + 1; code <= top; code++)
        counts[code] += found[code];
    if (uncounted > 0 && left > 0)
        pick_out(codes, size, uncounted, counts);
    return 0;
}
