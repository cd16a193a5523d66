// One-pass summaries of many tensors, merged into the rows of an arena. Compiled at run time, once per element type:
// ELEMENT is 0 float32, 1 bfloat16, 2 float16, 3 float64, 4 float8_e4m3fn, 5 float8_e5m2.
//
// A launch covers a batch of tensors, which travels by value as the kernel's one argument: nothing is uploaded, so nothing
// can be overwritten while another stream still reads it. Tensors are cut into chunks of one size; one block reads one
// chunk, each element once. A tensor of one chunk is merged into its row at once; else the block writes a partial row,
// and whichever block of the tensor finishes last merges them all, always in the same order.
//
// The quick pass takes all elements for finite and adds up float32 distances to a nearby value (so nothing cancels), a few
// at a time; the few go into float64. A chunk is read again, carefully, only where that went wrong: an element was not
// finite, a square left the range of float32, or the nearby value was not near.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int LANES = 32;
constexpr int BINS = 64;
constexpr int ONE_BIN = 47;                 // the bin that starts at |x| = 1; bin k starts at 2**(k - ONE_BIN)
constexpr int SUMMARY_THREADS = 256;
constexpr int CHANGE_THREADS = 128;         // two histograms per block, and still under 48 KiB of shared memory
constexpr int SUMMARY_TENSORS = 168;        // what fits into the 4 KiB of arguments that every driver takes
constexpr int CHANGE_TENSORS = 112;
#ifndef SUMMARY_RESIDENT
#define SUMMARY_RESIDENT 4                  // blocks that one multiprocessor should hold at once
#endif
constexpr double CANCELLED = 15.0;          // a shift this many variances away costs too many digits

// ---------------------------------------------------------------------------------------------------------- elements

#if ELEMENT == 3
typedef double Real;
constexpr double SMALLEST_DISTANCE = 0x1p-450;  // below, squares lose digits
#else
typedef float Real;
constexpr double SMALLEST_DISTANCE = 0x1p-50;
#endif

#if ELEMENT == 0
typedef u32 Raw;
#elif ELEMENT == 1 || ELEMENT == 2
typedef u16 Raw;
#elif ELEMENT == 3
typedef u64 Raw;
#else
typedef u8 Raw;
#endif

constexpr int PER_VECTOR = 16 / sizeof(Raw);

__device__ __forceinline__ float half_bits(u32 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((u16)bits));
  return value;
}

__device__ __forceinline__ Real decode(Raw raw) {
#if ELEMENT == 0
  return __uint_as_float(raw);
#elif ELEMENT == 1
  return __uint_as_float((u32)raw << 16);
#elif ELEMENT == 2
  return half_bits(raw);
#elif ELEMENT == 3
  return __longlong_as_double((long long)raw);
#elif ELEMENT == 4
  // As float16 the same digits mean 2**-8 of the value, also where they are denormal; only NaN needs a word of its own.
  const u32 bits = ((raw & 0x80u) << 8) | ((raw & 0x7fu) << 7);
  return (raw & 0x7fu) == 0x7fu ? __uint_as_float(0x7fc00000u) : 256.0f * half_bits(bits);
#else
  return half_bits((u32)raw << 8);
#endif
}

// `index` is known at compile time wherever this is called, so no array is ever indexed at run time.
__device__ __forceinline__ Raw pick(const uint4& vector, int index) {
#if ELEMENT == 3
  return index == 0 ? ((u64)vector.y << 32 | vector.x) : ((u64)vector.w << 32 | vector.z);
#else
  const int bits = 8 * sizeof(Raw), place = index * bits;
  const u32 word = place < 32 ? vector.x : place < 64 ? vector.y : place < 96 ? vector.z : vector.w;
  return (Raw)(word >> (place % 32));
#endif
}

__device__ __forceinline__ Real infinity() { return (Real)__int_as_float(0x7f800000); }
__device__ __forceinline__ float lesser(float a, float b) { return fminf(a, b); }
__device__ __forceinline__ double lesser(double a, double b) { return fmin(a, b); }
__device__ __forceinline__ float greater(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ double greater(double a, double b) { return fmax(a, b); }
__device__ __forceinline__ float magnitude_of(float x) { return fabsf(x); }
__device__ __forceinline__ double magnitude_of(double x) { return fabs(x); }

// Clamping the number instead of the bin makes the first and last bin open ended for free: abs is a modifier of max.
__device__ __forceinline__ int bin_of(float x) {
  return (int)(__float_as_uint(fminf(fmaxf(fabsf(x), 0x1p-47f), 0x1p16f)) >> 23) - (127 - ONE_BIN);
}
__device__ __forceinline__ int bin_of(double x) {
  return (__double2hiint(fmin(fmax(fabs(x), 0x1p-47), 0x1p16)) >> 20) - (1023 - ONE_BIN);
}

// -------------------------------------------------------------------------------------------------------------- rows

struct __align__(16) Row {
  double seen, count, nan, pos_inf, neg_inf, zero, ge_one, low, high, mean, m2, abs_sum;
  __device__ double finite() const { return count - nan - pos_inf - neg_inf; }
};
constexpr int ROW_WORDS = sizeof(Row) / sizeof(double);

__device__ void merge(Row& into, const Row& from) {
  const double left = into.finite(), right = from.finite();
  if (right > 0 && left > 0) {
    const double delta = from.mean - into.mean, weight = right / (left + right);
    into.m2 += from.m2 + delta * delta * left * weight;
    into.mean += delta * weight;
    into.low = fmin(into.low, from.low);
    into.high = fmax(into.high, from.high);
  } else if (right > 0) {
    into.m2 = from.m2;
    into.mean = from.mean;
    into.low = from.low;
    into.high = from.high;
  }
  into.seen += from.seen;
  into.count += from.count;
  into.nan += from.nan;
  into.pos_inf += from.pos_inf;
  into.neg_inf += from.neg_inf;
  into.zero += from.zero;
  into.ge_one += from.ge_one;
  into.abs_sum += from.abs_sum;
}

// Partial rows were written by other blocks of this launch: read past the first-level cache.
__device__ Row load_partial(const Row* from) {
  Row row;
  double2* to = reinterpret_cast<double2*>(&row);
#pragma unroll
  for (int i = 0; i < ROW_WORDS / 2; i++) to[i] = __ldcg(reinterpret_cast<const double2*>(from) + i);
  return row;
}

__device__ Row shuffled(const Row& row, int distance) {
  Row other;
  const double* from = reinterpret_cast<const double*>(&row);
  double* to = reinterpret_cast<double*>(&other);
#pragma unroll
  for (int i = 0; i < ROW_WORDS; i++) to[i] = __shfl_down_sync(~0u, from[i], distance);
  return other;
}

__device__ void deposit(Row* target, Row total) {
  total.seen = 1;
  Row row = *target;
  merge(row, total);
  *target = row;
}

// Merge `count` partial rows that lie `stride` apart; thread 0 gets the total. The order depends on nothing but `count`.
template <int THREADS>
__device__ Row collect(const Row* partials, u32 count, u32 stride) {
  __shared__ Row of_warp[THREADS / LANES];
  Row total = {};
  for (u32 i = threadIdx.x; i < count; i += THREADS) merge(total, load_partial(partials + (u64)i * stride));
  for (int distance = LANES / 2; distance; distance /= 2) {
    const Row other = shuffled(total, distance);
    if ((threadIdx.x & (LANES - 1)) < distance) merge(total, other);
  }
  __syncthreads();
  if (threadIdx.x % LANES == 0) of_warp[threadIdx.x / LANES] = total;
  __syncthreads();
  if (threadIdx.x == 0)
    for (int warp = 1; warp < THREADS / LANES; warp++) merge(total, of_warp[warp]);
  return total;
}

// ------------------------------------------------------------------------------------------------------------ tallies

struct Tally {
  double shift, sum, squares, magnitude;  // of finite elements; the first two by their distance to the shift
  Real low, high;
  u32 zero, ge_one, nan, pos_inf, neg_inf;

  __device__ void clear(double new_shift) {
    shift = new_shift;
    sum = squares = magnitude = 0;
    low = infinity();
    high = -infinity();
    zero = ge_one = nan = pos_inf = neg_inf = 0;
  }

  __device__ void merge(const Tally& other) {
    sum += other.sum;
    squares += other.squares;
    magnitude += other.magnitude;
    low = lesser(low, other.low);
    high = greater(high, other.high);
    zero += other.zero;
    ge_one += other.ge_one;
    nan += other.nan;
    pos_inf += other.pos_inf;
    neg_inf += other.neg_inf;
  }

  __device__ void merge_warp() {
    for (int distance = LANES / 2; distance; distance /= 2) {
      Tally other;
      other.sum = __shfl_xor_sync(~0u, sum, distance);
      other.squares = __shfl_xor_sync(~0u, squares, distance);
      other.magnitude = __shfl_xor_sync(~0u, magnitude, distance);
      other.low = __shfl_xor_sync(~0u, low, distance);
      other.high = __shfl_xor_sync(~0u, high, distance);
      other.zero = __shfl_xor_sync(~0u, zero, distance);
      other.ge_one = __shfl_xor_sync(~0u, ge_one, distance);
      other.nan = __shfl_xor_sync(~0u, nan, distance);
      other.pos_inf = __shfl_xor_sync(~0u, pos_inf, distance);
      other.neg_inf = __shfl_xor_sync(~0u, neg_inf, distance);
      merge(other);
    }
  }

  __device__ Row to_row(u32 count) const {
    Row row = {};
    row.count = count;
    row.nan = nan;
    row.pos_inf = pos_inf;
    row.neg_inf = neg_inf;
    const double finite = row.finite();
    if (finite > 0) {
      row.zero = zero;
      row.ge_one = ge_one;
      row.low = low;
      row.high = high;
      row.abs_sum = magnitude;
      const double rest = sum / finite;
      row.mean = low == high ? (double)low : shift + rest;
      row.m2 = low == high ? 0.0 : isinf(squares) ? squares : fmax(0.0, squares - sum * rest);
    }
    return row;
  }

  // Whether the quick pass, which took all elements for finite, can be trusted.
  __device__ bool doubtful(u32 count) const {
    if (!isfinite(magnitude) || !isfinite(squares) || !isfinite(sum)) return true;
    if (count == 0 || low == high) return false;
    const double farthest = fmax((double)high - shift, shift - (double)low), moved = sum * (sum / count);
    return farthest < SMALLEST_DISTANCE || moved > CANCELLED * (squares - moved);
  }
};

// A lane counts in a column of its own, 64 bytes from bin to bin: no atomics, and at most two lanes meet in a bank.
__device__ __forceinline__ void bump(u16* counters, Real x) { counters[bin_of(x) * LANES] += 1; }

// Adds elements, all taken for finite; zeros are counted in the first bin too, and taken out of it later.
template <bool HISTOGRAM>
struct Quick {
  Tally& tally;
  u16* const counters;
  const Real shift;
  Real sum = 0, squares = 0, magnitude = 0;  // of the few elements since the last fold

  __device__ Quick(Tally& tally, u16* counters) : tally(tally), counters(counters), shift((Real)tally.shift) {}

  __device__ __forceinline__ void add(Real x) {
    const Real distance = x - shift;
    sum += distance;
    squares += distance * distance;
    magnitude += magnitude_of(x);
    tally.low = lesser(tally.low, x);
    tally.high = greater(tally.high, x);
    tally.zero += x == 0;
    if (HISTOGRAM) bump(counters, x);
    else tally.ge_one += magnitude_of(x) >= 1;
  }

  __device__ __forceinline__ void fold() {
    tally.sum += sum;
    tally.squares += squares;
    tally.magnitude += magnitude;
    sum = squares = magnitude = 0;
  }
};

// Adds elements of any kind, in float64.
template <bool HISTOGRAM>
struct Careful {
  Tally& tally;
  u16* const counters;

  __device__ Careful(Tally& tally, u16* counters) : tally(tally), counters(counters) {}

  __device__ __forceinline__ void add(Real x) {
    if (!isfinite(x)) {
      tally.nan += x != x;
      tally.pos_inf += x > 0;
      tally.neg_inf += x < 0;
      return;
    }
    const double distance = (double)x - tally.shift;
    tally.sum += distance;
    tally.squares += distance * distance;
    tally.magnitude += magnitude_of(x);
    tally.low = lesser(tally.low, x);
    tally.high = greater(tally.high, x);
    tally.zero += x == 0;
    tally.ge_one += magnitude_of(x) >= 1;
    if (HISTOGRAM && x != 0) bump(counters, x);
  }

  __device__ __forceinline__ void fold() {}
};

template <class Adder>
__device__ __forceinline__ void add_vector(Adder& adder, const uint4& vector) {
#pragma unroll
  for (int i = 0; i < PER_VECTOR; i++) adder.add(decode(pick(vector, i)));
}

// ------------------------------------------------------------------------------------------------------------- chunks

// Where a chunk can be read 16 bytes at a time; elements before and after that are read one by one.
struct Span {
  u32 head, vectors, length;
  __device__ Span(u64 address, u32 length) : length(length) {
    head = min(length, (u32)((16 - (address & 15)) & 15) / (u32)sizeof(Raw));
    vectors = (length - head) / PER_VECTOR;
  }
  __device__ u32 tail() const { return head + vectors * PER_VECTOR; }
};

template <int THREADS, class Adder>
__device__ __forceinline__ void sweep(Adder& adder, const Raw* data, const Span& span) {
  const uint4* vectors = reinterpret_cast<const uint4*>(data + span.head);
  u32 i = threadIdx.x;
  for (; i + 3 * THREADS < span.vectors; i += 4 * THREADS) {  // four loads in flight per thread
    const uint4 a = __ldg(vectors + i), b = __ldg(vectors + i + THREADS);
    const uint4 c = __ldg(vectors + i + 2 * THREADS), d = __ldg(vectors + i + 3 * THREADS);
    add_vector(adder, a);
    add_vector(adder, b);
    add_vector(adder, c);
    add_vector(adder, d);
    adder.fold();
  }
  for (; i < span.vectors; i += THREADS) {
    add_vector(adder, __ldg(vectors + i));
    adder.fold();
  }
  if (threadIdx.x < span.head) adder.add(decode(data[threadIdx.x]));
  if (span.tail() + threadIdx.x < span.length) adder.add(decode(data[span.tail() + threadIdx.x]));
  adder.fold();
}

// Leave the tally of the whole block in `of_warp[0]`. Starts and ends with all threads together.
template <int THREADS>
__device__ void merge_block(Tally tally, Tally* of_warp) {
  tally.merge_warp();
  __syncthreads();
  if (threadIdx.x % LANES == 0) of_warp[threadIdx.x / LANES] = tally;
  __syncthreads();
  if (threadIdx.x == 0)
    for (int warp = 1; warp < THREADS / LANES; warp++) of_warp[0].merge(of_warp[warp]);
  __syncthreads();
}

// Mean of the finite elements among the first few: a value that most of the chunk is near to.
template <int THREADS>
__device__ double nearby_value(const Raw* data, const Span& span, double2* of_warp) {
  double sum = 0, count = 0;
  auto add = [&](Real x) {
    if (isfinite(x)) sum += x, count += 1;
  };
  if (threadIdx.x < span.vectors) {
    const uint4 vector = __ldg(reinterpret_cast<const uint4*>(data + span.head) + threadIdx.x);
#pragma unroll
    for (int i = 0; i < PER_VECTOR; i++) add(decode(pick(vector, i)));
  } else if (span.vectors == 0 && threadIdx.x < span.length) {
    add(decode(data[threadIdx.x]));
  }
  for (int distance = LANES / 2; distance; distance /= 2) {
    sum += __shfl_xor_sync(~0u, sum, distance);
    count += __shfl_xor_sync(~0u, count, distance);
  }
  if (threadIdx.x % LANES == 0) of_warp[threadIdx.x / LANES] = make_double2(sum, count);
  __syncthreads();
  sum = count = 0;
  for (int warp = 0; warp < THREADS / LANES; warp++) sum += of_warp[warp].x, count += of_warp[warp].y;
  const double mean = count > 0 ? (double)(Real)(sum / count) : 0.0;
  return isfinite(mean) ? mean : 0.0;
}

// Set a warp's own counters to zero.
__device__ void clear_counters(u16* of_warp) {
  uint4* words = reinterpret_cast<uint4*>(of_warp);
  for (int i = threadIdx.x % LANES; i < BINS * LANES * (int)sizeof(u16) / 16; i += LANES) words[i] = make_uint4(0, 0, 0, 0);
  __syncwarp();
}

// Add the block's counters to the row's bins, less `zeros` in the first; count elements of 1 and more in `ge_one`.
// Starts and ends with all threads together.
template <int THREADS>
__device__ void publish(const u16* counters, u64* bins, u32 zeros, u32* ge_one) {
  constexpr int SHARERS = THREADS / BINS, WORDS = LANES / 2 / SHARERS;
  const int bin = threadIdx.x / SHARERS, part = threadIdx.x % SHARERS;
  if (threadIdx.x == 0) *ge_one = 0;
  __syncthreads();
  u32 count = 0;
  for (int warp = 0; warp < THREADS / LANES; warp++) {
    const u32* pairs = reinterpret_cast<const u32*>(counters + (warp * BINS + bin) * LANES) + part * WORDS;
#pragma unroll
    for (int i = 0; i < WORDS; i++) count += (pairs[i] & 0xffffu) + (pairs[i] >> 16);
  }
  for (int distance = SHARERS / 2; distance; distance /= 2) count += __shfl_xor_sync(~0u, count, distance);
  if (part == 0) {
    if (bin == 0) count -= zeros;
    if (count) atomicAdd(bins + bin, (u64)count);
    if (count && bin >= ONE_BIN) atomicAdd(ge_one, count);
  }
  __syncthreads();
}

// ------------------------------------------------------------------------------------------------------------ batches

struct Target {
  Row* rows;
  u64* bins;
  Row* partials;
  u32* tickets;  // one per row, zero between launches
  u64 chunk;
  u32 tensors, unused;
};

struct Batch {
  Target target;
  u64 data[SUMMARY_TENSORS], numel[SUMMARY_TENSORS];
  u32 first[SUMMARY_TENSORS], row[SUMMARY_TENSORS];  // first: the tensor's first block
};

struct ChangeBatch {
  Target target;
  u64 data[CHANGE_TENSORS], shadow[CHANGE_TENSORS], numel[CHANGE_TENSORS];
  u32 first[CHANGE_TENSORS], row[CHANGE_TENSORS], change_row[CHANGE_TENSORS];
};

// What this block has to read.
struct Share {
  u32 tensor, first, blocks, length;
  u64 start;
};

template <class AnyBatch>
__device__ Share find_share(const AnyBatch& batch) {
  u32 low = 0, high = batch.target.tensors;
  while (high - low > 1) {
    const u32 middle = (low + high) / 2;
    if (batch.first[middle] <= blockIdx.x) low = middle;
    else high = middle;
  }
  Share share;
  share.tensor = low;
  share.first = batch.first[low];
  const u64 numel = batch.numel[low], chunk = batch.target.chunk;
  share.blocks = numel ? (u32)((numel + chunk - 1) / chunk) : 1;
  share.start = (u64)(blockIdx.x - share.first) * chunk;
  share.length = (u32)min(chunk, numel - share.start);
  return share;
}

// Say to all threads of the block whether all other blocks of the tensor have written their partial rows.
__device__ bool is_last(u32* ticket, u32 blocks) {
  __shared__ bool last;
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(ticket, 1u) == blocks - 1;
    if (last) *ticket = 0;
  }
  __syncthreads();
  __threadfence();
  return last;
}

template <bool HISTOGRAM>
__device__ __forceinline__ void summarise(const Batch& batch) {
  constexpr int THREADS = SUMMARY_THREADS, WARPS = THREADS / LANES;
  __shared__ __align__(16) u16 counters[HISTOGRAM ? WARPS * BINS * LANES : 8];
  __shared__ Tally of_warp[WARPS];
  __shared__ double2 samples[WARPS];
  __shared__ u32 ge_one;
  const Share share = find_share(batch);
  const u32 warp = threadIdx.x / LANES, row_index = batch.row[share.tensor];
  const Raw* data = reinterpret_cast<const Raw*>(batch.data[share.tensor]) + share.start;
  const Span span((u64)data, share.length);
  u16* warp_counters = counters + (HISTOGRAM ? warp * BINS * LANES : 0);
  u16* lane_counters = warp_counters + (HISTOGRAM ? threadIdx.x % LANES : 0);

  if (HISTOGRAM) clear_counters(warp_counters);
  Tally tally;
  tally.clear(nearby_value<THREADS>(data, span, samples));
  Quick<HISTOGRAM> quick(tally, lane_counters);
  sweep<THREADS>(quick, data, span);
  merge_block<THREADS>(tally, of_warp);
  const bool again = of_warp[0].doubtful(share.length);
  if (again) {
    if (HISTOGRAM) clear_counters(warp_counters);
    tally.clear(tally.shift);
    Careful<HISTOGRAM> careful(tally, lane_counters);
    sweep<THREADS>(careful, data, span);
    merge_block<THREADS>(tally, of_warp);
  }
  if (HISTOGRAM) publish<THREADS>(counters, batch.target.bins + (u64)row_index * BINS, again ? 0 : of_warp[0].zero, &ge_one);

  Row row;
  if (threadIdx.x == 0) {
    if (HISTOGRAM) of_warp[0].ge_one = ge_one;
    row = of_warp[0].to_row(share.length);
    if (share.blocks == 1) deposit(batch.target.rows + row_index, row);
    else batch.target.partials[blockIdx.x] = row;
  }
  if (share.blocks == 1 || !is_last(batch.target.tickets + row_index, share.blocks)) return;
  row = collect<THREADS>(batch.target.partials + share.first, share.blocks, 1);
  if (threadIdx.x == 0) deposit(batch.target.rows + row_index, row);
}

extern "C" __global__ void __launch_bounds__(SUMMARY_THREADS, SUMMARY_RESIDENT) summary(const __grid_constant__ Batch batch) {
  summarise<false>(batch);
}
extern "C" __global__ void __launch_bounds__(SUMMARY_THREADS, SUMMARY_RESIDENT) summary_bins(const __grid_constant__ Batch batch) {
  summarise<true>(batch);
}

// ------------------------------------------------------------------------------------------------------------- change

// Adds tensor and shadow vectors. The shadow is overwritten as it is read, so there can be no second look: all careful.
template <int THREADS, class Adder>
__device__ __forceinline__ void sweep_change(Adder& now, Adder& change, const Raw* data, Raw* shadow, const Span& span) {
  const uint4* vectors = reinterpret_cast<const uint4*>(data + span.head);
  uint4* shadows = reinterpret_cast<uint4*>(shadow + span.head);
  auto both = [&](Raw raw, Raw old) {
    const Real x = decode(raw);
    now.add(x);
    change.add(x - decode(old));
  };
  auto vector = [&](const uint4& a, const uint4& b) {
#pragma unroll
    for (int i = 0; i < PER_VECTOR; i++) both(pick(a, i), pick(b, i));
  };
  u32 i = threadIdx.x;
  for (; i + THREADS < span.vectors; i += 2 * THREADS) {
    const uint4 a = __ldg(vectors + i), b = __ldg(vectors + i + THREADS);
    const uint4 old_a = shadows[i], old_b = shadows[i + THREADS];
    shadows[i] = a;
    shadows[i + THREADS] = b;
    vector(a, old_a);
    vector(b, old_b);
  }
  for (; i < span.vectors; i += THREADS) {
    const uint4 a = __ldg(vectors + i), old = shadows[i];
    shadows[i] = a;
    vector(a, old);
  }
  auto single = [&](u32 at) {
    const Raw raw = data[at], old = shadow[at];
    shadow[at] = raw;
    both(raw, old);
  };
  for (u32 at = threadIdx.x; at < span.head; at += THREADS) single(at);
  for (u32 at = span.tail() + threadIdx.x; at < span.length; at += THREADS) single(at);
}

__device__ double finite_or_zero(Real x) { return isfinite(x) ? (double)x : 0.0; }

template <bool HISTOGRAM>
__device__ __forceinline__ void summarise_change(const ChangeBatch& batch) {
  constexpr int THREADS = CHANGE_THREADS, WARPS = THREADS / LANES, COUNTERS = WARPS * BINS * LANES;
  __shared__ __align__(16) u16 counters[HISTOGRAM ? 2 * COUNTERS : 8];
  __shared__ Tally of_warp[2][WARPS];
  __shared__ u32 ge_one;
  const Share share = find_share(batch);
  const u32 row_index[2] = {batch.row[share.tensor], batch.change_row[share.tensor]};
  const Raw* data = reinterpret_cast<const Raw*>(batch.data[share.tensor]) + share.start;
  Raw* shadow = reinterpret_cast<Raw*>(batch.shadow[share.tensor]) + share.start;
  Span span((u64)data, share.length);
  // Vectors only where both lie alike; else all elements belong to the head.
  if (((u64)data ^ (u64)shadow) & 15) span.head = share.length, span.vectors = 0;
  u16* lane_counters = counters;
  if (HISTOGRAM) {
    u16* warp_counters = counters + threadIdx.x / LANES * BINS * LANES;
    clear_counters(warp_counters);
    clear_counters(warp_counters + COUNTERS);
    lane_counters = warp_counters + threadIdx.x % LANES;
  }

  // Any element of the chunk will do as shift: the chunk's variance then bounds how much can cancel in float64.
  Tally now, change;
  const Real start = share.length ? decode(data[0]) : Real(0);
  now.clear(finite_or_zero(start));
  change.clear(share.length ? finite_or_zero(start - decode(shadow[0])) : 0.0);
  __syncthreads();  // all have read the first shadow before anyone overwrites it
  Careful<HISTOGRAM> add_now(now, lane_counters), add_change(change, lane_counters + (HISTOGRAM ? COUNTERS : 0));
  sweep_change<THREADS>(add_now, add_change, data, shadow, span);
  merge_block<THREADS>(now, of_warp[0]);
  merge_block<THREADS>(change, of_warp[1]);
  for (int which = 0; which < 2; which++) {
    if (HISTOGRAM) publish<THREADS>(counters + which * COUNTERS, batch.target.bins + (u64)row_index[which] * BINS, 0, &ge_one);
    if (threadIdx.x == 0) {
      const Row row = of_warp[which][0].to_row(share.length);
      if (share.blocks == 1) deposit(batch.target.rows + row_index[which], row);
      else batch.target.partials[2 * blockIdx.x + which] = row;
    }
  }
  if (share.blocks == 1 || !is_last(batch.target.tickets + row_index[0], share.blocks)) return;
  for (int which = 0; which < 2; which++) {
    const Row row = collect<THREADS>(batch.target.partials + 2 * share.first + which, share.blocks, 2);
    if (threadIdx.x == 0) deposit(batch.target.rows + row_index[which], row);
  }
}

extern "C" __global__ void __launch_bounds__(CHANGE_THREADS) change(const __grid_constant__ ChangeBatch batch) {
  summarise_change<false>(batch);
}
extern "C" __global__ void __launch_bounds__(CHANGE_THREADS) change_bins(const __grid_constant__ ChangeBatch batch) {
  summarise_change<true>(batch);
}
