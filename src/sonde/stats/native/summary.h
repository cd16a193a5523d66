/* What one stretch of elements amounts to, and how two stretches merge. Mirrors sonde/schema.py. */
#ifndef SONDE_SUMMARY_H
#define SONDE_SUMMARY_H

#include <stdint.h>
#include <string.h>

#define NUM_BINS 64
#define ONE_BIN 47 /* the bin that starts at |x| = 1 */

enum column { SEEN, COUNT, NOT_A_NUMBER, POS_INF, NEG_INF, ZERO, GE_ONE, MIN, MAX, MEAN, M2, ABS_SUM, NUM_COLUMNS };

enum format { FLOAT32, BFLOAT16, FLOAT16, FLOAT64, NUM_FORMATS };

/* A row of the schema, with its histogram. All zero is the empty summary. */
struct summary {
    double column[NUM_COLUMNS];
    uint64_t bins[NUM_BINS];
};

static inline double finite_count(const double *row)
{
    return row[COUNT] - row[NOT_A_NUMBER] - row[POS_INF] - row[NEG_INF];
}

/* Merge the moments of `n` > 0 finite elements into those of `before` elements: Chan, Golub and LeVeque's update. */
static inline void merge_moments(double *row, double before, double n, double min, double max, double mean, double m2)
{
    if (before == 0) {
        row[MIN] = min, row[MAX] = max, row[MEAN] = mean, row[M2] = m2;
        return;
    }
    double delta = mean - row[MEAN], weight = n / (before + n);
    row[MIN] = min < row[MIN] ? min : row[MIN];
    row[MAX] = max > row[MAX] ? max : row[MAX];
    row[MEAN] += delta * weight;
    row[M2] += m2 + delta * delta * before * weight;
}

/* Merge `part` into a row of an arena; `bins` is NULL when no histogram is wanted. */
static inline void merge_summary(double *row, uint64_t *bins, const struct summary *part)
{
    double before = finite_count(row), n = finite_count(part->column);
    if (n > 0)
        merge_moments(row, before, n, part->column[MIN], part->column[MAX], part->column[MEAN], part->column[M2]);
    for (int i = SEEN; i <= GE_ONE; i++)
        row[i] += part->column[i];
    row[ABS_SUM] += part->column[ABS_SUM];
    if (bins)
        for (int i = 0; i < NUM_BINS; i++)
            bins[i] += part->bins[i];
}

/* The same code, compiled for one instruction set. Each call summarises one stretch into an empty summary. */
struct level {
    const char *name;
    void (*measure)(const void *values, int64_t length, enum format, int want_bins, struct summary *out);
    /* Also summarises values - shadow, and leaves shadow equal to values. */
    void (*measure_change)(const void *values, void *shadow, int64_t length, enum format, int want_bins,
                           struct summary *out, struct summary *change);
};

extern const struct level sonde_level_baseline;
#if defined(__x86_64__) && defined(__GNUC__)
#define SONDE_X86_LEVELS 1
extern const struct level sonde_level_avx2;
extern const struct level sonde_level_avx512;
#endif

#endif
