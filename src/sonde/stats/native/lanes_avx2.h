/* 8 lanes of float32 in AVX2 with FMA and F16C. The same operations as in every lanes_*.h. */
#include <immintrin.h>

#define LANES 8
#define ACCUMULATORS 2 /* four sets would spill: AVX2 has 16 registers */

typedef __m256 floats;
typedef __m256i words;
typedef __m256i bytes;

static inline floats load_float32(const void *p, int64_t i) { return _mm256_loadu_ps((const float *)p + i); }

static inline floats load_bfloat16(const void *p, int64_t i)
{
    __m128i raw = _mm_loadu_si128((const __m128i *)((const uint16_t *)p + i));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
}

static inline floats load_float16(const void *p, int64_t i)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)((const uint16_t *)p + i)));
}

static inline void store_floats(float *p, floats a) { _mm256_storeu_ps(p, a); }
static inline floats all_floats(float a) { return _mm256_set1_ps(a); }
static inline floats add(floats a, floats b) { return _mm256_add_ps(a, b); }
static inline floats subtract(floats a, floats b) { return _mm256_sub_ps(a, b); }
static inline floats add_square(floats sum, floats a) { return _mm256_fmadd_ps(a, a, sum); }
static inline floats smaller(floats a, floats b) { return _mm256_min_ps(a, b); }
static inline floats larger(floats a, floats b) { return _mm256_max_ps(a, b); }
static inline words magnitude_bits(floats a)
{
    return _mm256_and_si256(_mm256_castps_si256(a), _mm256_set1_epi32(0x7fffffff));
}
static inline floats as_floats(words a) { return _mm256_castsi256_ps(a); }

static inline words no_words(void) { return _mm256_setzero_si256(); }
static inline words count_at_least(words counts, words a, uint32_t limit)
{
    return _mm256_sub_epi32(counts, _mm256_cmpgt_epi32(a, _mm256_set1_epi32((int)limit - 1)));
}

static inline bytes load_bytes(const uint8_t *p) { return _mm256_load_si256((const __m256i *)p); }
static inline void store_bytes(uint8_t *p, bytes a) { _mm256_store_si256((__m256i *)p, a); }
static inline bytes no_bytes(void) { return _mm256_setzero_si256(); }
static inline bytes count_equal(bytes counts, bytes a, uint8_t value)
{
    return _mm256_sub_epi8(counts, _mm256_cmpeq_epi8(a, _mm256_set1_epi8((char)value)));
}
static inline uint32_t sum_of_bytes(bytes counts)
{
    __m256i sums = _mm256_sad_epu8(counts, _mm256_setzero_si256());
    __m128i half = _mm_add_epi64(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    return (uint32_t)(_mm_cvtsi128_si64(half) + _mm_extract_epi64(half, 1));
}

#define HAS_LOOK_UP 1
static inline bytes table_of_16(const uint8_t *p) { return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p)); }
/* The entries of a table at indices below 16. */
static inline bytes look_up(bytes table, bytes indices) { return _mm256_shuffle_epi8(table, indices); }
static inline bytes add_bytes(bytes a, bytes b) { return _mm256_add_epi8(a, b); }
static inline bytes low_nibbles(bytes a) { return _mm256_and_si256(a, _mm256_set1_epi8(15)); }
static inline bytes high_nibbles(bytes a) { return low_nibbles(_mm256_srli_epi16(a, 4)); }

/* One bit for each byte that is at least 1 and at most `limit`. */
static inline uint64_t bytes_up_to(bytes a, uint8_t limit)
{
    __m256i from_one = _mm256_sub_epi8(a, _mm256_set1_epi8(1));
    __m256i most = _mm256_set1_epi8((char)(limit - 1));
    return (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_max_epu8(from_one, most), most));
}

/* Zero bytes for zero words, other bytes for others. Lanes end up in another order, which nobody minds. */
static inline bytes nonzero_bytes(const words a[4])
{
    return _mm256_packs_epi16(_mm256_packs_epi32(a[0], a[1]), _mm256_packs_epi32(a[2], a[3]));
}

static inline bytes exponent_bytes(const words a[4])
{
    return _mm256_packus_epi16(_mm256_packus_epi32(_mm256_srli_epi32(a[0], 23), _mm256_srli_epi32(a[1], 23)),
                               _mm256_packus_epi32(_mm256_srli_epi32(a[2], 23), _mm256_srli_epi32(a[3], 23)));
}
static inline bytes subtract_clamped(bytes a, uint8_t offset, uint8_t most)
{
    return _mm256_min_epu8(_mm256_subs_epu8(a, _mm256_set1_epi8((char)offset)), _mm256_set1_epi8((char)most));
}

typedef double doubles __attribute__((vector_size(32)));
typedef int64_t longs __attribute__((vector_size(32)));

static inline doubles smaller_doubles(doubles a, doubles b) { return (doubles)_mm256_min_pd((__m256d)a, (__m256d)b); }
static inline doubles larger_doubles(doubles a, doubles b) { return (doubles)_mm256_max_pd((__m256d)a, (__m256d)b); }
