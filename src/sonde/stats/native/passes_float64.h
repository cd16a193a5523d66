/* Passes that sum in float64: slower, and never in doubt. Needs passes.h before it. */

#define DOUBLE_LANES ((int)(sizeof(doubles) / sizeof(double)))

typedef float floats_to_widen __attribute__((vector_size(sizeof(doubles) / 2)));

struct double_sums {
    doubles shifted[2], squares[2], magnitudes[2];
};

static inline doubles load_doubles(const double *p)
{
    doubles a;
    memcpy(&a, p, sizeof a);
    return a;
}

static inline doubles load_widened(const float *p)
{
    floats_to_widen a;
    memcpy(&a, p, sizeof a);
    return __builtin_convertvector(a, doubles);
}

static inline doubles magnitude_of_doubles(doubles a) { return (doubles)((longs)a & INT64_MAX); }

static inline void add_doubles(struct double_sums *sums, int j, doubles value, doubles origin)
{
    doubles shifted = value - origin;
    sums->shifted[j] += shifted;
    sums->squares[j] += shifted * shifted;
    sums->magnitudes[j] += magnitude_of_doubles(value);
}

static inline double sum_of_doubles(const doubles *sums)
{
    doubles both = sums[0] + sums[1];
    double total = 0;
    for (int i = 0; i < DOUBLE_LANES; i++)
        total += both[i];
    return total;
}

static inline void store_sums(const struct double_sums *sums, struct block *out)
{
    out->shifted_sum = sum_of_doubles(sums->shifted);
    out->shifted_squares = sum_of_doubles(sums->squares);
    out->abs_sum = sum_of_doubles(sums->magnitudes);
}

/* Sum again what float32 sums cannot hold. Only the sums in `out` change. */
static __attribute__((noinline)) void sum_in_float64(const float *x, int size, float shift, struct block *out)
{
    const doubles origin = (double)shift - (doubles){0};
    struct double_sums sums;
    memset(&sums, 0, sizeof sums);
    for (int i = 0; i < size; i += 2 * DOUBLE_LANES) {
        add_doubles(&sums, 0, load_widened(x + i), origin);
        add_doubles(&sums, 1, load_widened(x + i + DOUBLE_LANES), origin);
    }
    store_sums(&sums, out);
}

static inline int code_of_double(double a)
{
    int64_t bits;
    memcpy(&bits, &a, sizeof bits);
    int code = (int)(bits >> 52 & 0x7ff) - FLOAT64_CODE_OFFSET;
    return code < 0 ? 0 : code > NUM_BINS ? NUM_BINS : code;
}

static void write_codes_of_doubles(const double *x, int size, uint8_t *codes)
{
    for (int i = 0; i < size; i++)
        codes[i] = (uint8_t)code_of_double(x[i]);
}

/* The whole pass, for float64 elements. `size` is a multiple of STRIDE; `codes` may be NULL. */
static __attribute__((noinline)) void pass_float64(const double *x, int size, double shift, struct block *out, uint8_t *codes)
{
    const doubles origin = shift - (doubles){0};
    struct double_sums sums;
    memset(&sums, 0, sizeof sums);
    doubles min = load_doubles(x), max = min;
    longs zeros = {0}, ones = {0};
    for (int i = 0; i < size; i += 2 * DOUBLE_LANES)
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
            doubles value = load_doubles(x + i + j * DOUBLE_LANES);
            add_doubles(&sums, j, value, origin);
            min = smaller_doubles(value, min);
            max = larger_doubles(value, max);
            zeros -= value == 0.0;
            ones -= magnitude_of_doubles(value) >= 1.0;
        }
    *out = (struct block){.min = min[0], .max = max[0]};
    store_sums(&sums, out);
    for (int i = 0; i < DOUBLE_LANES; i++) {
        out->min = min[i] < out->min ? min[i] : out->min;
        out->max = max[i] > out->max ? max[i] : out->max;
        out->zeros += (int)zeros[i];
        out->at_least_one += (int)ones[i];
    }
    if (codes)
        write_codes_of_doubles(x, size, codes);
}
