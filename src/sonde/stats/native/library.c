/* The entry points that Python calls: choosing a level, cutting tensors into chunks, sharing them among threads.
 *
 * Chunks have a fixed size and are merged in order, so that results do not depend on the number of threads.
 */
#include <stdlib.h>

#include "outputs.h"

#define EXPORT __attribute__((visibility("default")))

#define CHUNK (1 << 16)  /* elements */
#define MOST_CHUNKS 256  /* in flight at a time: bounds the memory for their summaries */

struct chunk {
    const struct task *task;
    int64_t start, length;
    struct summary now, change;
};

enum { OPTION_HISTOGRAM = 1, OPTION_THREADS_SHIFT = 1 };
enum { DONE = 0, BAD_ROW = 1, NO_MEMORY = 2 };

typedef void parallel_function(void (*)(void *), void *, unsigned, unsigned);

static const struct level *level = &sonde_level_baseline;
static parallel_function *parallel;

/* ---- levels -------------------------------------------------------------------------------------------------- */

#ifdef SONDE_X86_LEVELS
#include <cpuid.h>

static int has_avx2(void)
{
    unsigned a, b, c, d;
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

static int has_avx512(void)
{
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

/* Use the named level if this processor has it, and return whether it has. */
EXPORT int sonde_use_level(const char *name)
{
    const struct level *found = strcmp(name, "baseline") == 0 ? &sonde_level_baseline : NULL;
#ifdef SONDE_X86_LEVELS
    if (strcmp(name, "avx2") == 0 && has_avx2())
        found = &sonde_level_avx2;
    if (strcmp(name, "avx512") == 0 && has_avx512())
        found = &sonde_level_avx512;
#endif
    if (found)
        level = found;
    return found != NULL;
}

EXPORT const char *sonde_level(void) { return level->name; }

/* Borrow an OpenMP runtime by the address of its GOMP_parallel: starting threads of our own would compete with torch's. */
EXPORT void sonde_use_openmp(void *gomp_parallel) { parallel = (parallel_function *)gomp_parallel; }

/* ---- work ---------------------------------------------------------------------------------------------------- */

static int has_change(const struct task *task) { return (task->kind & WITH_CHANGE) != 0; }
static enum format format_of(const struct task *task) { return (enum format)(task->kind & (NUM_FORMATS - 1)); }
static int64_t width_of(enum format format) { return format == FLOAT32 ? 4 : format == FLOAT64 ? 8 : 2; }

static void work_on(struct chunk *chunk, int want_bins)
{
    const struct task *task = chunk->task;
    const enum format format = format_of(task);
    const int64_t offset = chunk->start * width_of(format);
    const char *values = (const char *)task->values + offset;
    if (has_change(task))
        level->measure_change(values, (char *)task->shadow + offset, chunk->length, format, want_bins, &chunk->now,
                              &chunk->change);
    else
        level->measure(values, chunk->length, format, want_bins, &chunk->now);
}

static void merge_part(struct summary *part, int64_t row, const struct chunk *chunk, const struct arena *arena, int want_bins)
{
    part->column[SEEN] = chunk->start == 0;
    merge_summary(arena->rows + NUM_COLUMNS * row, want_bins ? arena->bins + NUM_BINS * row : NULL, part);
}

static void merge_chunk(struct chunk *chunk, const struct arena *arena, int want_bins)
{
    merge_part(&chunk->now, chunk->task->row, chunk, arena, want_bins);
    if (has_change(chunk->task))
        merge_part(&chunk->change, chunk->task->change_row, chunk, arena, want_bins);
}

/* Cut off the next chunk of a task. An empty tensor has one, empty chunk: it is seen. */
static int64_t cut(struct chunk *chunk, const struct task *task, int64_t start)
{
    chunk->task = task;
    chunk->start = start;
    chunk->length = task->length - start < CHUNK ? task->length - start : CHUNK;
    return start + chunk->length;
}

static void run_alone(const struct arena *arena, const struct task *task, int want_bins)
{
    struct chunk chunk;
    int64_t start = 0;
    do {
        start = cut(&chunk, task, start);
        work_on(&chunk, want_bins);
        merge_chunk(&chunk, arena, want_bins);
    } while (start < task->length);
}

struct wave {
    struct chunk *chunks;
    int count, next, want_bins;
};

static void take_chunks(void *data)
{
    struct wave *wave = data;
    for (;;) {
        int i = __atomic_fetch_add(&wave->next, 1, __ATOMIC_RELAXED);
        if (i >= wave->count)
            return;
        work_on(&wave->chunks[i], wave->want_bins);
    }
}

static void run_wave(struct wave *wave, const struct arena *arena, unsigned threads)
{
    wave->next = 0;
    if (wave->count > 1)
        parallel(take_chunks, wave, threads, 0);
    else
        take_chunks(wave);
    for (int i = 0; i < wave->count; i++)
        merge_chunk(&wave->chunks[i], arena, wave->want_bins);
    wave->count = 0;
}

static int run_together(const struct arena *arena, const struct task *tasks, int64_t count, int want_bins, unsigned threads)
{
    struct wave wave = {malloc(MOST_CHUNKS * sizeof(struct chunk)), 0, 0, want_bins};
    if (!wave.chunks)
        return NO_MEMORY;
    for (int64_t i = 0; i < count; i++) {
        int64_t start = 0;
        do {
            if (wave.count == MOST_CHUNKS)
                run_wave(&wave, arena, threads);
            start = cut(&wave.chunks[wave.count++], &tasks[i], start);
        } while (start < tasks[i].length);
    }
    run_wave(&wave, arena, threads);
    free(wave.chunks);
    return DONE;
}

static int row_is_good(const struct arena *arena, int64_t row) { return row >= 0 && row < arena->capacity; }

/* ---- entry points -------------------------------------------------------------------------------------------- */

/* Summarise a batch. `options`: a bit for the histogram, above it the number of threads. Nothing is done on an error. */
EXPORT int sonde_measure(const struct arena *arena, const struct task *tasks, int64_t count, int64_t options)
{
    const int want_bins = options & OPTION_HISTOGRAM;
    const unsigned threads = (unsigned)(options >> OPTION_THREADS_SHIFT);
    for (int64_t i = 0; i < count; i++)
        if (!row_is_good(arena, tasks[i].row) || (has_change(&tasks[i]) && !row_is_good(arena, tasks[i].change_row)))
            return BAD_ROW;
    if (threads > 1 && parallel)
        return run_together(arena, tasks, count, want_bins, threads);
    for (int64_t i = 0; i < count; i++)
        run_alone(arena, &tasks[i], want_bins);
    return DONE;
}

/* Summarise one tensor on this thread. `what` packs row, format and options into one argument: each costs 50 ns to pass. */
EXPORT int sonde_measure_one(const struct arena *arena, const void *values, int64_t length, int64_t what)
{
    struct task task = {values, NULL, length, what >> 1 & (NUM_FORMATS - 1), what >> 3, 0};
    if (!row_is_good(arena, task.row))
        return BAD_ROW;
    run_alone(arena, &task, what & OPTION_HISTOGRAM);
    return DONE;
}
