/* One pass over a block of elements that are, or are not yet known to be, all finite. Needs a lanes_*.h before it. */

/* Elements per block: 16 KiB of float32, which stay in the first-level cache while a block is worked on. Less where vectors
 * are short, because each byte of a vector of counts counts up to 255 only. */
#define BLOCK (LANES < 8 ? 2048 : 4096)
/* Elements per turn of the loop: a block's size must be a multiple of it. The same for all levels, so that they pad alike. */
#define STRIDE 64
#define VECTORS 4 /* per turn of the inner loop: their exponents fill one vector of bytes */
/* Elements after which float32 sums are carried over into float64 ones. No lane adds up more than 64 of them, so no sum is
 * off by more than 64 roundings: 4e-6 of the summed magnitudes, whatever the data. */
#define SHORT_RUN (64 * LANES * ACCUMULATORS)

/* An exponent code is a bin number plus one; 0 stands for zeros and for whatever is smaller than the first bin's start. */
#define NUM_CODES (NUM_BINS + 1)
#define FLOAT32_CODE_OFFSET (127 - ONE_BIN - 1)
#define FLOAT64_CODE_OFFSET (1023 - ONE_BIN - 1)
#define FLOAT32_ONE 0x3f800000u

/* Sums over a block, of x - shift where the name says shifted. Of use only if all elements are finite. */
struct block {
    double shifted_sum, shifted_squares, abs_sum, min, max;
    int zeros, at_least_one;
};

typedef floats (*load_function)(const void *, int64_t);

struct float_sums {
    floats shifted[ACCUMULATORS], squares[ACCUMULATORS], magnitudes[ACCUMULATORS], min[ACCUMULATORS], max[ACCUMULATORS];
};

/* Carry short float32 sums over into float64 ones, lane by lane. */
static inline void carry(double *totals, const floats *sums)
{
    float lane[LANES];
    floats both = sums[0];
    for (int j = 1; j < ACCUMULATORS; j++)
        both = add(both, sums[j]);
    store_floats(lane, both);
    for (int i = 0; i < LANES; i++)
        totals[i] += lane[i];
}

static inline double sum_of_lanes(const double *totals)
{
    double half[LANES / 2], sum = 0;
    for (int i = 0; i < LANES / 2; i++)
        half[i] = totals[i] + totals[i + LANES / 2];
    for (int i = 0; i < LANES / 2; i++)
        sum += half[i];
    return sum;
}

static inline float smallest_lane(const floats *values)
{
    float lane[LANES], least;
    floats both = values[0];
    for (int j = 1; j < ACCUMULATORS; j++)
        both = smaller(both, values[j]);
    store_floats(lane, both);
    least = lane[0];
    for (int i = 1; i < LANES; i++)
        least = lane[i] < least ? lane[i] : least;
    return least;
}

static inline float largest_lane(const floats *values)
{
    float lane[LANES], most;
    floats both = values[0];
    for (int j = 1; j < ACCUMULATORS; j++)
        both = larger(both, values[j]);
    store_floats(lane, both);
    most = lane[0];
    for (int i = 1; i < LANES; i++)
        most = lane[i] > most ? lane[i] : most;
    return most;
}

/* `load`, `codes` == NULL and everything that follows from them are constants to the compiler in each use below. */
static inline __attribute__((always_inline)) void pass(const void *x, int size, float shift, load_function load,
                                                       struct block *out, uint8_t *codes)
{
    const floats origin = all_floats(shift), nothing = all_floats(0.0f);
    struct float_sums sums;
    double shifted_total[LANES] = {0}, squares_total[LANES] = {0}, magnitudes_total[LANES] = {0};
    bytes zeros = no_bytes();
    words ones = no_words();
    for (int j = 0; j < ACCUMULATORS; j++)
        sums.min[j] = sums.max[j] = load(x, 0);
    for (int start = 0; start < size; start += SHORT_RUN) {
        const int end = start + SHORT_RUN < size ? start + SHORT_RUN : size;
        for (int j = 0; j < ACCUMULATORS; j++)
            sums.shifted[j] = sums.squares[j] = sums.magnitudes[j] = nothing;
        for (int i = start; i < end; i += VECTORS * LANES) {
            words magnitudes[VECTORS];
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) {
                const int j = v % ACCUMULATORS;
                floats value = load(x, i + v * LANES);
                floats shifted = subtract(value, origin);
                magnitudes[v] = magnitude_bits(value);
                sums.shifted[j] = add(sums.shifted[j], shifted);
                sums.squares[j] = add_square(sums.squares[j], shifted);
                sums.magnitudes[j] = add(sums.magnitudes[j], as_floats(magnitudes[v]));
                sums.min[j] = smaller(value, sums.min[j]);
                sums.max[j] = larger(value, sums.max[j]);
                if (!codes)
                    ones = count_at_least(ones, magnitudes[v], FLOAT32_ONE);
            }
            zeros = count_equal(zeros, nonzero_bytes(magnitudes), 0);
            if (codes)
                store_bytes(codes + i, subtract_clamped(exponent_bytes(magnitudes), FLOAT32_CODE_OFFSET, NUM_BINS));
        }
        carry(shifted_total, sums.shifted);
        carry(squares_total, sums.squares);
        carry(magnitudes_total, sums.magnitudes);
    }
    out->shifted_sum = sum_of_lanes(shifted_total);
    out->shifted_squares = sum_of_lanes(squares_total);
    out->abs_sum = sum_of_lanes(magnitudes_total);
    out->min = smallest_lane(sums.min);
    out->max = largest_lane(sums.max);
    out->zeros = (int)sum_of_bytes(zeros);
    int32_t counts[LANES];
    memcpy(counts, &ones, sizeof counts);
    out->at_least_one = 0;
    for (int i = 0; i < LANES; i++)
        out->at_least_one += counts[i];
}

#define DEFINE_PASS(format)                                                                                       \
    static __attribute__((noinline)) void pass_##format(const void *x, int size, float shift, struct block *out)  \
    {                                                                                                             \
        pass(x, size, shift, load_##format, out, NULL);                                                           \
    }                                                                                                             \
    static __attribute__((noinline)) void pass_and_code_##format(const void *x, int size, float shift,            \
                                                                 struct block *out, uint8_t *codes)               \
    {                                                                                                             \
        pass(x, size, shift, load_##format, out, codes);                                                          \
    }
DEFINE_PASS(float32)
DEFINE_PASS(bfloat16)
DEFINE_PASS(float16)

/* Run the pass for a format of 32 bits or less; `codes` may be NULL. */
static inline void pass_over(const void *x, int size, enum format format, float shift, struct block *out, uint8_t *codes)
{
    if (format == FLOAT32)
        codes ? pass_and_code_float32(x, size, shift, out, codes) : pass_float32(x, size, shift, out);
    else if (format == BFLOAT16)
        codes ? pass_and_code_bfloat16(x, size, shift, out, codes) : pass_bfloat16(x, size, shift, out);
    else
        codes ? pass_and_code_float16(x, size, shift, out, codes) : pass_float16(x, size, shift, out);
}
