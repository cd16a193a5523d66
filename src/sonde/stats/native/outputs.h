/* What the entry points of the library and the fast way of outputs share. */
#ifndef SONDE_OUTPUTS_H
#define SONDE_OUTPUTS_H

#include "summary.h"

/* Where results go; laid out by Python. */
struct arena {
    double *rows;
    uint64_t *bins;
    int64_t capacity;
};

/* One tensor of a batch; laid out by Python as six integers. */
struct task {
    const void *values;
    void *shadow;
    int64_t length;
    int64_t kind; /* an enum format, plus WITH_CHANGE where shadow and change_row mean something */
    int64_t row, change_row;
};

enum { WITH_CHANGE = NUM_FORMATS };

int sonde_measure(const struct arena *arena, const struct task *tasks, int64_t count, int64_t options);
int sonde_measure_one(const struct arena *arena, const void *values, int64_t length, int64_t what);

/* Functions of the CUDA driver, by address: the driver is loaded by Python. */
typedef int launch_function(void *function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned shared, void *stream,
                            void **arguments, void **extra);
typedef int capturing_function(void *stream, int *status);

/* An arena on a CUDA device, and the kernels that write into it: for each format one without and one with bins. */
struct cuda_target {
    uint64_t rows, bins, partials, tickets;
    unsigned blocks;
    void *functions[2 * NUM_FORMATS];
    launch_function *launch;
    capturing_function *is_capturing;
};

/* Queue the summary of one tensor. Returns 0 where Python must do it. */
int sonde_launch_single(const struct cuda_target *target, void *stream, const void *data, int64_t numel, int format, int64_t row,
                        int bins);

#endif
