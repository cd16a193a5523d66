/* Launching the kernel for one tensor, as stats/cuda/batches.py lays its arguments out. */
#include "outputs.h"

enum { SUMMARY_THREADS = 256, CHUNK_UNIT = 4096, SMALLEST_CHUNK = 4 * CHUNK_UNIT, AMPLE_CHUNK = 1 << 17 };

/* `Batch<1>` of summary.cu. */
struct single {
    uint64_t rows, bins, partials, tickets, chunk;
    uint32_t tensors, padding;
    uint64_t pointer, numel;
    uint32_t first, row;
};

static uint64_t chunk_for(uint64_t elements, uint64_t blocks)
{
    if (elements > blocks * AMPLE_CHUNK)
        blocks *= 2;
    const uint64_t unit = blocks * CHUNK_UNIT, chunk = (elements + unit - 1) / unit * CHUNK_UNIT;
    return chunk > SMALLEST_CHUNK ? chunk : SMALLEST_CHUNK;
}

int sonde_launch_single(const struct cuda_target *target, void *stream, const void *data, int64_t numel, int format, int64_t row,
                        int bins)
{
    void *function = target->functions[2 * format + bins];
    int capturing = 0;
    if (!function || !target->launch || !target->is_capturing || target->is_capturing(stream, &capturing) || capturing)
        return 0;
    const uint64_t chunk = chunk_for((uint64_t)numel, target->blocks);
    const uint64_t blocks = numel ? ((uint64_t)numel + chunk - 1) / chunk : 1;
    struct single argument = {target->rows, target->bins, target->partials, target->tickets, chunk, 1, 0, (uint64_t)(uintptr_t)data,
                              (uint64_t)numel, 0, (uint32_t)row};
    void *arguments[] = {&argument};
    return target->launch(function, (unsigned)blocks, 1, 1, SUMMARY_THREADS, 1, 1, 0, stream, arguments, 0) == 0;
}
