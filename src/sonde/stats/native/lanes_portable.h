/* 4 lanes of float32 in GNU C vectors, which every target has (SSE2, NEON). The same operations as in every lanes_*.h. */
#if defined(__SSE2__)
#include <emmintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define LANES 4
#define ACCUMULATORS 2

typedef float floats __attribute__((vector_size(16)));
typedef int32_t words __attribute__((vector_size(16)));
typedef uint8_t bytes __attribute__((vector_size(16)));
typedef uint16_t halves __attribute__((vector_size(8)));

static inline floats all_floats(float a) { return (floats){a, a, a, a}; }

static inline floats load_float32(const void *p, int64_t i)
{
    floats a;
    memcpy(&a, (const float *)p + i, sizeof a);
    return a;
}

static inline words load_words_of_16(const void *p, int64_t i)
{
    halves raw;
    memcpy(&raw, (const uint16_t *)p + i, sizeof raw);
    return __builtin_convertvector(raw, words);
}

static inline floats load_bfloat16(const void *p, int64_t i) { return (floats)(load_words_of_16(p, i) << 16); }

static inline floats load_float16(const void *p, int64_t i)
{
    words raw = load_words_of_16(p, i), magnitude = raw & 0x7fff;
    /* Multiplying by 2**112 moves the exponent's bias from 15 to 127 and normalises denormals on the way. */
    words scaled = (words)((floats)(magnitude << 13) * all_floats(0x1p112f));
    words nonfinite = (magnitude >= 0x7c00) & 0x7f800000;
    return (floats)(scaled | nonfinite | (raw & 0x8000) << 16);
}

static inline void store_floats(float *p, floats a) { memcpy(p, &a, sizeof a); }
static inline floats add(floats a, floats b) { return a + b; }
static inline floats subtract(floats a, floats b) { return a - b; }
static inline floats add_square(floats sum, floats a) { return sum + a * a; }
#if defined(__SSE2__)
static inline floats smaller(floats a, floats b) { return (floats)_mm_min_ps((__m128)a, (__m128)b); }
static inline floats larger(floats a, floats b) { return (floats)_mm_max_ps((__m128)a, (__m128)b); }
#elif defined(__ARM_NEON)
static inline floats smaller(floats a, floats b) { return (floats)vminq_f32((float32x4_t)a, (float32x4_t)b); }
static inline floats larger(floats a, floats b) { return (floats)vmaxq_f32((float32x4_t)a, (float32x4_t)b); }
#else
static inline floats choose(words where, floats a, floats b) { return (floats)(((words)a & where) | ((words)b & ~where)); }
static inline floats smaller(floats a, floats b) { return choose(a < b, a, b); }
static inline floats larger(floats a, floats b) { return choose(a > b, a, b); }
#endif
static inline words magnitude_bits(floats a) { return (words)a & 0x7fffffff; }
static inline floats as_floats(words a) { return (floats)a; }

static inline words no_words(void) { return (words){0}; }
static inline words count_at_least(words counts, words a, uint32_t limit) { return counts - (a >= (int32_t)limit); }

static inline bytes all_bytes(uint8_t a) { return a - (bytes){0}; }
static inline bytes load_bytes(const uint8_t *p)
{
    bytes a;
    memcpy(&a, p, sizeof a);
    return a;
}
static inline void store_bytes(uint8_t *p, bytes a) { memcpy(p, &a, sizeof a); }
static inline bytes no_bytes(void) { return (bytes){0}; }
static inline bytes count_equal(bytes counts, bytes a, uint8_t value) { return counts - (bytes)(a == all_bytes(value)); }
static inline uint32_t sum_of_bytes(bytes counts)
{
    uint32_t sum = 0;
    for (int i = 0; i < 16; i++)
        sum += counts[i];
    return sum;
}

#if defined(__aarch64__)
#define HAS_LOOK_UP 1
static inline bytes table_of_16(const uint8_t *p) { return load_bytes(p); }
/* The entries of a table at indices below 16. */
static inline bytes look_up(bytes table, bytes indices) { return (bytes)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)indices); }
static inline bytes add_bytes(bytes a, bytes b) { return a + b; }
static inline bytes low_nibbles(bytes a) { return a & 15; }
static inline bytes high_nibbles(bytes a) { return a >> 4; }
#endif

/* One bit for each byte that is at least 1 and at most `limit`. */
static inline uint64_t bytes_up_to(bytes a, uint8_t limit)
{
    bytes hits = (bytes)(a - 1 < all_bytes(limit));
    uint64_t halves_of_hits[2], mask = 0;
    memcpy(halves_of_hits, &hits, sizeof hits);
    if (halves_of_hits[0] | halves_of_hits[1])
        for (int i = 0; i < 16; i++)
            mask |= (uint64_t)(hits[i] & 1) << i;
    return mask;
}

/* Zero bytes for zero words, other bytes for others. Bytes of four vectors interleave, in an order that nobody minds. */
static inline bytes nonzero_bytes(const words a[4])
{
    return (bytes)(((a[0] != 0) & 0xff) | ((a[1] != 0) & 0xff00) | ((a[2] != 0) & 0xff0000) | (a[3] != 0) << 24);
}

static inline bytes exponent_bytes(const words a[4])
{
    return (bytes)(a[0] >> 23 | (a[1] >> 15 & 0xff00) | (a[2] >> 7 & 0xff0000) | (a[3] << 1 & (int32_t)0xff000000));
}
static inline bytes subtract_clamped(bytes a, uint8_t offset, uint8_t most)
{
    bytes above = (a - offset) & (bytes)(a > all_bytes(offset));
    bytes beyond = (bytes)(above > all_bytes(most));
    return (above & ~beyond) | (most & beyond);
}

typedef double doubles __attribute__((vector_size(16)));
typedef int64_t longs __attribute__((vector_size(16)));

static inline doubles choose_doubles(longs where, doubles a, doubles b)
{
    return (doubles)(((longs)a & where) | ((longs)b & ~where));
}
static inline doubles smaller_doubles(doubles a, doubles b) { return choose_doubles(a < b, a, b); }
static inline doubles larger_doubles(doubles a, doubles b) { return choose_doubles(a > b, a, b); }
