/* 16 lanes of float32 in AVX-512 (F, BW, DQ, VL). The same operations as in every lanes_*.h. */
#include <immintrin.h>

#define LANES 16
#define ACCUMULATORS 4

typedef __m512 floats;
typedef __m512i words;
typedef __m512i bytes;

static inline floats load_float32(const void *p, int64_t i) { return _mm512_loadu_ps((const float *)p + i); }

static inline floats load_bfloat16(const void *p, int64_t i)
{
    __m256i raw = _mm256_loadu_si256((const __m256i *)((const uint16_t *)p + i));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
}

static inline floats load_float16(const void *p, int64_t i)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)((const uint16_t *)p + i)));
}

static inline void store_floats(float *p, floats a) { _mm512_storeu_ps(p, a); }
static inline floats all_floats(float a) { return _mm512_set1_ps(a); }
static inline floats add(floats a, floats b) { return _mm512_add_ps(a, b); }
static inline floats subtract(floats a, floats b) { return _mm512_sub_ps(a, b); }
static inline floats add_square(floats sum, floats a) { return _mm512_fmadd_ps(a, a, sum); }
static inline floats smaller(floats a, floats b) { return _mm512_min_ps(a, b); }
static inline floats larger(floats a, floats b) { return _mm512_max_ps(a, b); }
static inline words magnitude_bits(floats a)
{
    return _mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32(0x7fffffff));
}
static inline floats as_floats(words a) { return _mm512_castsi512_ps(a); }

static inline words no_words(void) { return _mm512_setzero_si512(); }
static inline words count_at_least(words counts, words a, uint32_t limit)
{
    __mmask16 hits = _mm512_cmpge_epi32_mask(a, _mm512_set1_epi32((int)limit));
    return _mm512_mask_sub_epi32(counts, hits, counts, _mm512_set1_epi32(-1));
}

static inline bytes load_bytes(const uint8_t *p) { return _mm512_load_si512((const void *)p); }
static inline void store_bytes(uint8_t *p, bytes a) { _mm512_store_si512((void *)p, a); }
static inline bytes no_bytes(void) { return _mm512_setzero_si512(); }
static inline bytes count_equal(bytes counts, bytes a, uint8_t value)
{
    __mmask64 hits = _mm512_cmpeq_epi8_mask(a, _mm512_set1_epi8((char)value));
    return _mm512_mask_sub_epi8(counts, hits, counts, _mm512_set1_epi8(-1));
}
static inline uint32_t sum_of_bytes(bytes counts)
{
    return (uint32_t)_mm512_reduce_add_epi64(_mm512_sad_epu8(counts, _mm512_setzero_si512()));
}

#define HAS_LOOK_UP 1
static inline bytes table_of_16(const uint8_t *p) { return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)p)); }
/* The entries of a table at indices below 16. */
static inline bytes look_up(bytes table, bytes indices) { return _mm512_shuffle_epi8(table, indices); }
static inline bytes add_bytes(bytes a, bytes b) { return _mm512_add_epi8(a, b); }
static inline bytes low_nibbles(bytes a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
static inline bytes high_nibbles(bytes a) { return low_nibbles(_mm512_srli_epi16(a, 4)); }

/* One bit for each byte that is at least 1 and at most `limit`. */
static inline uint64_t bytes_up_to(bytes a, uint8_t limit)
{
    return _mm512_cmplt_epu8_mask(_mm512_sub_epi8(a, _mm512_set1_epi8(1)), _mm512_set1_epi8((char)limit));
}

/* Zero bytes for zero words, other bytes for others. Lanes end up in another order, which nobody minds. */
static inline bytes nonzero_bytes(const words a[4])
{
    return _mm512_packs_epi16(_mm512_packs_epi32(a[0], a[1]), _mm512_packs_epi32(a[2], a[3]));
}

static inline bytes exponent_bytes(const words a[4])
{
    return _mm512_packus_epi16(_mm512_packus_epi32(_mm512_srli_epi32(a[0], 23), _mm512_srli_epi32(a[1], 23)),
                               _mm512_packus_epi32(_mm512_srli_epi32(a[2], 23), _mm512_srli_epi32(a[3], 23)));
}
static inline bytes subtract_clamped(bytes a, uint8_t offset, uint8_t most)
{
    return _mm512_min_epu8(_mm512_subs_epu8(a, _mm512_set1_epi8((char)offset)), _mm512_set1_epi8((char)most));
}

typedef double doubles __attribute__((vector_size(64)));
typedef int64_t longs __attribute__((vector_size(64)));

static inline doubles smaller_doubles(doubles a, doubles b) { return (doubles)_mm512_min_pd((__m512d)a, (__m512d)b); }
static inline doubles larger_doubles(doubles a, doubles b) { return (doubles)_mm512_max_pd((__m512d)a, (__m512d)b); }
