/* The statistics themselves, written once and compiled for several instruction sets.
 *
 * A file that includes this has chosen the target, included a lanes_*.h and defined LEVEL, the name of the result.
 *
 * Elements are taken in blocks. A fast pass assumes that all are finite and sums differences to a shift near the mean, so
 * that nothing cancels; its own results tell when the assumption was wrong. Then the block is copied with the non-finite
 * elements replaced by the shift, whose differences are exactly zero, and passed over again. Padding to a whole number of
 * vectors works the same way.
 */
#include <math.h>

#include "summary.h"

#include "passes.h"

#include "passes_float64.h"

#include "codes.h"

/* Blocks that are counted by table without trying comparisons first, once one has shown a wide distribution. */
#define TABLE_BLOCKS 15
/* Sums of float32 squares outside these limits are too near to overflow or underflow to be trusted. */
#define LARGEST_SUM 1e37
#define SMALLEST_SQUARES 1e-28

struct work {
    struct summary *out;
    double finite;
    int want_bins, table_blocks;
    uint32_t code_counts[NUM_CODES];
    _Alignas(64) uint8_t codes[BLOCK];
    union {
        _Alignas(64) float floats[BLOCK];
        double doubles[BLOCK / 2];
    } copy;
};

/* A block as the passes saw it: `kept` elements, and `filled` more that equal the shift and must be discounted. */
struct view {
    int kept, filled;
    double shift;
};

static inline int padded(int length) { return (length + STRIDE - 1) / STRIDE * STRIDE; }

static inline void add_bins(struct work *work, const struct block *block, const struct view *view)
{
    int size = view->kept + view->filled;
    double largest = -block->min > block->max ? -block->min : block->max;
    if (size < 4 * STRIDE || work->table_blocks > 0) {
        count_by_table(work->codes, size, work->code_counts);
        work->table_blocks -= work->table_blocks > 0;
    } else if (count_codes(work->codes, size, block->zeros, code_of_double(largest), work->code_counts)) {
        work->table_blocks = TABLE_BLOCKS;
    }
    work->code_counts[code_of_double(view->shift)] -= (uint32_t)view->filled;
}

/* Take over the results of a pass, less what the filled-in elements contributed. */
static inline void add_block(struct work *work, const struct block *block, const struct view *view)
{
    double *out = work->out->column, n = view->kept, filled = view->filled, shift = view->shift;
    double mean = shift + block->shifted_sum / n;
    double m2 = block->shifted_squares - block->shifted_sum * (block->shifted_sum / n);
    double abs_sum = block->abs_sum - filled * fabs(shift);
    if (isinf(block->shifted_squares)) /* float64 elements beyond 1e154: as large as that, less anything */
        m2 = block->shifted_squares;
    if (block->min == block->max)
        mean = block->min, m2 = 0, abs_sum = n * fabs(block->min);
    merge_moments(out, work->finite, n, block->min, block->max, mean, m2 > 0 ? m2 : 0);
    work->finite += n;
    out[ABS_SUM] += abs_sum;
    out[ZERO] += block->zeros - (shift == 0 ? filled : 0);
    if (work->want_bins)
        add_bins(work, block, view);
    else
        out[GE_ONE] += block->at_least_one - (fabs(shift) >= 1 ? filled : 0);
}

/* What the codes counted in all blocks say about bins; zeros and finite elements are known by now. */
static void finish_bins(struct work *work)
{
    struct summary *out = work->out;
    uint64_t coded = 0;
    for (int bin = 0; bin < NUM_BINS; bin++) {
        out->bins[bin] = work->code_counts[bin + 1];
        coded += out->bins[bin];
        if (bin >= ONE_BIN)
            out->column[GE_ONE] += (double)out->bins[bin];
    }
    out->bins[0] += (uint64_t)(work->finite - out->column[ZERO]) - coded;
}

static inline float element(const void *x, int i, enum format format)
{
    if (format == FLOAT32)
        return ((const float *)x)[i];
    uint16_t raw[LANES] = {((const uint16_t *)x)[i]};
    float lane[LANES];
    store_floats(lane, format == BFLOAT16 ? load_bfloat16(raw, 0) : load_float16(raw, 0));
    return lane[0];
}

/* Copy a block into float32. Values that are in float32 already may lie in the copy itself. */
static void widen(float *copy, const void *x, int length, enum format format)
{
    int i = 0;
    if (format == FLOAT32) {
        memmove(copy, x, sizeof(float) * (size_t)length);
        return;
    }
    for (; i + LANES <= length; i += LANES)
        store_floats(copy + i, format == BFLOAT16 ? load_bfloat16(x, i) : load_float16(x, i));
    for (; i < length; i++)
        copy[i] = element(x, i, format);
}

/* A shift for the first block, before there is a mean: that of its first elements, which lies between min and max. */
static float first_shift(const void *x, int length, enum format format)
{
    double sum = 0;
    int n = length < 8 ? length : 8;
    for (int i = 0; i < n; i++)
        sum += element(x, i, format);
    float mean = (float)(sum / n);
    return isfinite(mean) ? mean : 0.0f;
}

/* Replace what is not finite by `fill` and count it. */
#define DEFINE_REPLACE(type)                                                                           \
    static int replace_nonfinite_##type(type *x, int length, type fill, double *out)                   \
    {                                                                                                  \
        int nan = 0, positive = 0, negative = 0;                                                       \
        for (int i = 0; i < length; i++) {                                                             \
            type value = x[i];                                                                         \
            nan += value != value;                                                                     \
            positive += value == (type)INFINITY;                                                       \
            negative += value == -(type)INFINITY;                                                      \
            x[i] = value - value == 0 ? value : fill;                                                  \
        }                                                                                              \
        out[NOT_A_NUMBER] += nan, out[POS_INF] += positive, out[NEG_INF] += negative;                  \
        return nan + positive + negative;                                                              \
    }                                                                                                  \
    /* The first finite element, or 0 if there is none. */                                             \
    static type first_finite_##type(const type *x, int length)                                         \
    {                                                                                                  \
        for (int i = 0; i < length; i++)                                                               \
            if (x[i] - x[i] == 0)                                                                      \
                return x[i];                                                                           \
        return 0;                                                                                      \
    }
DEFINE_REPLACE(float)
DEFINE_REPLACE(double)

#define DEFINE_PAD(type)                                              \
    static inline void pad_##type(type *x, int length, type fill)     \
    {                                                                 \
        for (int i = length; i < padded(length); i++)                 \
            x[i] = fill;                                              \
    }
DEFINE_PAD(float)
DEFINE_PAD(double)

static inline int in_range(const struct block *block)
{
    return block->shifted_squares < LARGEST_SUM && block->abs_sum < LARGEST_SUM; /* false for NaN */
}

/* Return whether the float32 sums of a finite block cannot be trusted. */
static inline int needs_float64(const struct work *work, const struct block *block, const struct view *view)
{
    if (!in_range(block))
        return 1;
    if (block->shifted_squares < SMALLEST_SQUARES && block->min != block->max)
        return 1;
    /* The running mean is never a bad shift: wherever it is far off, that distance dominates m2. A guess can be. */
    if (work->finite > 0)
        return 0;
    double cancelled = block->shifted_sum * (block->shifted_sum / view->kept);
    return cancelled > 0.875 * block->shifted_squares || 2 * view->filled * fabs(view->shift) > block->abs_sum;
}

static void finish_float_block(struct work *work, const void *x, enum format format, struct block *block, struct view *view)
{
    int size = view->kept + view->filled;
    if (needs_float64(work, block, view)) {
        if (format != FLOAT32)
            widen(work->copy.floats, x, size, format);
        sum_in_float64(format == FLOAT32 ? x : work->copy.floats, size, (float)view->shift, block);
    }
    add_block(work, block, view);
}

/* A block in which some element is not finite, or seems so because sums of finite ones overflowed. */
static __attribute__((noinline)) void add_odd_block(struct work *work, const void *x, int length, enum format format)
{
    float *copy = work->copy.floats;
    widen(copy, x, length, format);
    float shift = work->finite > 0 ? (float)work->out->column[MEAN] : first_finite_float(copy, length);
    int nonfinite = replace_nonfinite_float(copy, length, shift, work->out->column);
    if (nonfinite == length)
        return;
    pad_float(copy, length, shift);
    struct block block;
    struct view view = {length - nonfinite, padded(length) - length + nonfinite, shift};
    pass_over(copy, padded(length), FLOAT32, shift, &block, work->want_bins ? work->codes : NULL);
    finish_float_block(work, copy, FLOAT32, &block, &view);
}

static void add_float_block(struct work *work, const void *x, int length, enum format format)
{
    float shift = work->finite > 0 ? (float)work->out->column[MEAN] : first_shift(x, length, format);
    struct block block;
    struct view view = {length, padded(length) - length, shift};
    if (view.filled) {
        widen(work->copy.floats, x, length, format);
        pad_float(work->copy.floats, length, shift);
        x = work->copy.floats, format = FLOAT32;
    }
    pass_over(x, padded(length), format, shift, &block, work->want_bins ? work->codes : NULL);
    if (in_range(&block))
        finish_float_block(work, x, format, &block, &view);
    else
        add_odd_block(work, x, length, format);
}

static void add_double_block(struct work *work, const double *x, int length)
{
    double *copy = work->copy.doubles;
    double shift = work->finite > 0 ? work->out->column[MEAN] : first_finite_double(x, length);
    struct block block;
    struct view view = {length, padded(length) - length, shift};
    uint8_t *codes = work->want_bins ? work->codes : NULL;
    if (view.filled) {
        memmove(copy, x, sizeof(double) * (size_t)length);
        pad_double(copy, length, shift);
        x = copy;
    }
    pass_float64(x, padded(length), shift, &block, codes);
    if (!isfinite(block.abs_sum)) {
        memmove(copy, x, sizeof(double) * (size_t)length);
        int nonfinite = replace_nonfinite_double(copy, length, shift, work->out->column);
        if (nonfinite == length)
            return;
        pad_double(copy, length, shift);
        view.kept -= nonfinite, view.filled += nonfinite;
        pass_float64(copy, padded(length), shift, &block, codes);
    }
    add_block(work, &block, &view);
}

static inline void start(struct work *work, struct summary *out, int64_t length, int want_bins)
{
    memset(out, 0, sizeof *out);
    out->column[COUNT] = (double)length;
    work->out = out;
    work->finite = 0;
    work->want_bins = want_bins;
    work->table_blocks = 0;
    memset(work->code_counts, 0, sizeof work->code_counts);
}

static inline void finish(struct work *work)
{
    if (work->want_bins)
        finish_bins(work);
}

static inline int block_length(int64_t left, int most) { return left < most ? (int)left : most; }

static void measure(const void *values, int64_t length, enum format format, int want_bins, struct summary *out)
{
    struct work work;
    start(&work, out, length, want_bins);
    if (format == FLOAT64) {
        for (int64_t i = 0; i < length; i += BLOCK / 2)
            add_double_block(&work, (const double *)values + i, block_length(length - i, BLOCK / 2));
    } else {
        const size_t width = format == FLOAT32 ? 4 : 2;
        for (int64_t i = 0; i < length; i += BLOCK)
            add_float_block(&work, (const char *)values + width * (size_t)i, block_length(length - i, BLOCK), format);
    }
    finish(&work);
}

static void subtract_block(float *difference, const void *x, const void *y, int length, enum format format)
{
    int i = 0;
    for (; i + LANES <= length; i += LANES) {
        floats a, b;
        if (format == FLOAT32)
            a = load_float32(x, i), b = load_float32(y, i);
        else if (format == BFLOAT16)
            a = load_bfloat16(x, i), b = load_bfloat16(y, i);
        else
            a = load_float16(x, i), b = load_float16(y, i);
        store_floats(difference + i, subtract(a, b));
    }
    for (; i < length; i++)
        difference[i] = element(x, i, format) - element(y, i, format);
}

static void measure_float_change(struct work *now, struct work *change, const void *values, void *shadow, int64_t length,
                                 enum format format)
{
    _Alignas(64) float difference[BLOCK];
    const size_t width = format == FLOAT32 ? 4 : 2;
    for (int64_t i = 0; i < length; i += BLOCK) {
        int size = block_length(length - i, BLOCK);
        const char *x = (const char *)values + width * (size_t)i;
        char *y = (char *)shadow + width * (size_t)i;
        subtract_block(difference, x, y, size, format);
        memcpy(y, x, width * (size_t)size);
        add_float_block(change, difference, size, FLOAT32);
        add_float_block(now, x, size, format);
    }
}

static void measure_double_change(struct work *now, struct work *change, const double *values, double *shadow, int64_t length)
{
    _Alignas(64) double difference[BLOCK / 2];
    for (int64_t i = 0; i < length; i += BLOCK / 2) {
        int size = block_length(length - i, BLOCK / 2);
        for (int j = 0; j < size; j++)
            difference[j] = values[i + j] - shadow[i + j];
        memcpy(shadow + i, values + i, sizeof(double) * (size_t)size);
        add_double_block(change, difference, size);
        add_double_block(now, values + i, size);
    }
}

static void measure_change(const void *values, void *shadow, int64_t length, enum format format, int want_bins,
                           struct summary *out, struct summary *out_change)
{
    struct work now, change;
    start(&now, out, length, want_bins);
    start(&change, out_change, length, want_bins);
    if (format == FLOAT64)
        measure_double_change(&now, &change, values, shadow, length);
    else
        measure_float_change(&now, &change, values, shadow, length, format);
    finish(&now);
    finish(&change);
}

#define TEXT_OF(name) #name
#define NAME_OF(name) TEXT_OF(name)
#define JOIN(a, b) a##b
#define SYMBOL_OF(name) JOIN(sonde_level_, name)
const struct level SYMBOL_OF(LEVEL) = {NAME_OF(LEVEL), measure, measure_change};
