/* Counting exponent codes. Needs passes.h before it. */

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

#ifdef HAS_LOOK_UP

#define WINDOW 16

/* Count, in counts[s], the codes equal to base + s; the first entry counts all smaller ones too, the last all larger.
 *
 * Each table marks two of the 16 codes, one in the low and one in the high half of a byte, so that one look-up and one
 * addition count both for a whole vector. Half a byte counts to 15 before it must be emptied.
 */
static __attribute__((noinline)) void count_window(const uint8_t *codes, int size, int base, uint32_t *counts)
{
    bytes table[WINDOW / 2], low[WINDOW / 2], high[WINDOW / 2];
    for (int k = 0; k < WINDOW / 2; k++) {
        uint8_t marks[WINDOW] = {0};
        marks[2 * k] = 1;
        marks[2 * k + 1] = 16;
        table[k] = table_of_16(marks);
        low[k] = high[k] = no_bytes();
    }
    const int run = 15 * (int)sizeof(bytes);
    for (int start = 0; start < size; start += run) {
        const int end = start + run < size ? start + run : size;
        bytes both[WINDOW / 2];
        for (int k = 0; k < WINDOW / 2; k++)
            both[k] = no_bytes();
        for (int i = start; i < end; i += (int)sizeof(bytes)) {
            bytes indices = subtract_clamped(load_bytes(codes + i), (uint8_t)base, WINDOW - 1);
#pragma GCC unroll 8
            for (int k = 0; k < WINDOW / 2; k++)
                both[k] = add_bytes(both[k], look_up(table[k], indices));
        }
        for (int k = 0; k < WINDOW / 2; k++) {
            low[k] = add_bytes(low[k], low_nibbles(both[k]));
            high[k] = add_bytes(high[k], high_nibbles(both[k]));
        }
    }
    for (int k = 0; k < WINDOW / 2; k++) {
        counts[2 * k] = sum_of_bytes(low[k]);
        counts[2 * k + 1] = sum_of_bytes(high[k]);
    }
}

/* Count the few codes from 1 to `top` one by one. */
static void pick_out(const uint8_t *codes, int size, int top, uint32_t *counts)
{
    for (int i = 0; i < size; i += (int)sizeof(bytes))
        for (uint64_t hits = bytes_up_to(load_bytes(codes + i), (uint8_t)top); hits; hits &= hits - 1)
            counts[codes[i + __builtin_ctzll(hits)]]++;
}

/*
 * Add to `counts` how often each code from 1 to the largest, `top`, occurs; what is left over has code 0.
 *
 * Most tensors fill some ten neighbouring bins, so the codes are counted in windows from the top down, and the last few
 * stragglers one by one. Where two windows leave many, the distribution is wide and a table is cheaper. Returns whether it was.
 */
static int count_codes(const uint8_t *codes, int size, int zeros, int top, uint32_t *counts)
{
    uint32_t found[NUM_CODES] = {0}, window[WINDOW];
    int left = size - zeros, uncounted = top;
    for (int windows = 0; uncounted > 0 && left > size / 64; windows++) {
        if (windows == 2 && left > size / 8) {
            count_by_table(codes, size, counts);
            return 1;
        }
        /* Nothing lies above the first window, so that its last entry counts a single code. */
        int reach = windows == 0 ? WINDOW - 1 : WINDOW - 2;
        int base = uncounted > reach ? uncounted - reach : 0;
        count_window(codes, size, base, window);
        for (int code = base + 1; code <= uncounted; code++)
            found[code] = window[code - base];
        left = (int)window[0] - zeros;
        uncounted = base;
    }
    for (int code = uncounted + 1; code <= top; code++)
        counts[code] += found[code];
    if (uncounted > 0 && left > 0)
        pick_out(codes, size, uncounted, counts);
    return 0;
}

#else

static int count_codes(const uint8_t *codes, int size, int zeros, int top, uint32_t *counts)
{
    (void)zeros, (void)top;
    count_by_table(codes, size, counts);
    return 1;
}

#endif
