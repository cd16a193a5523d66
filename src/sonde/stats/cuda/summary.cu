// One-pass summaries of many tensors, merged into the rows of an arena. Compiled at run time, once per element type:
// ELEMENT is 0 float32, 1 bfloat16, 2 float16, 3 float64, 4 float8_e4m3fn, 5 float8_e5m2.
//
// A launch covers a batch of tensors, which travels by value as the kernel's one argument: nothing is uploaded, so
// nothing can be overwritten while another stream still reads it. Tensors are cut into chunks of one size; one block
// reads one chunk, each element once. A tensor of one chunk is merged into its row at once; else the block writes a
// partial row, and whichever block of the tensor finishes last merges them all, always in the same order.
//
// The quick pass takes all elements for finite. Each warp adds up float32 distances to one of its elements (so that
// little cancels), a few at a time; the few go into float64. A chunk is read again, carefully, only where that went
// wrong: an element was not finite, a square left the range of float32, or too much cancelled all the same.
//
// Everything but the inner loops is kept small (loops stay loops, rare work is not inlined): a block that reads 50 KB
// of data must not wait for as much code.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int LANES = 32;
constexpr int BINS = 64;
constexpr int COLUMNS = 16;                 // counters of a bin in each warp
constexpr u32 BIN_BYTES = COLUMNS * sizeof(u32);
constexpr int ONE_BIN = 47;                 // the bin that starts at |x| = 1; bin k starts at 2**(k - ONE_BIN)
constexpr int SUMMARY_THREADS = 256;
constexpr int CHANGE_THREADS = 128;         // two histograms per block, and still under 48 KiB of shared memory
constexpr int CHANGE_RESIDENT = 6;
constexpr int SUMMARY_TENSORS = 168;        // what fits into the 4 KiB of arguments that every driver takes
constexpr int CHANGE_TENSORS = 112;
constexpr int SUMMARY_RESIDENT = 4;         // blocks that one multiprocessor should hold at once
constexpr double CANCELLED = 16.0;          // squares that exceed m2 by more have lost too many digits

// ---------------------------------------------------------------------------------------------------------- elements

#if ELEMENT == 3
typedef double Real;
constexpr double SMALLEST_DISTANCE = 0x1p-450;  // below, squares lose digits
constexpr double ORDINARY = 0x1p1000;           // above, sums of a few overflow
#else
typedef float Real;
constexpr double SMALLEST_DISTANCE = 0x1p-50;
constexpr float ORDINARY = 0x1p100f;
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

// Bytes from the counter of an imaginary bin at exponent field 0 to that of the bin of x. Clamping the number instead
// of the bin makes the first and last bin open ended for free: abs is a modifier of max.
__device__ __forceinline__ u32 bin_offset(float x) {
  return (__float_as_uint(fminf(fmaxf(fabsf(x), 0x1p-47f), 0x1p16f)) >> 23) * BIN_BYTES;
}
__device__ __forceinline__ u32 bin_offset(double x) {
  return (u32)(__double2hiint(fmin(fmax(fabs(x), 0x1p-47), 0x1p16)) >> 20) * BIN_BYTES;
}
constexpr u32 FIRST_BIN_OFFSET = ((sizeof(Real) == 8 ? 1023 : 127) - ONE_BIN) * BIN_BYTES;

// Pairs of 16-bit elements in one register, on devices that compute with such pairs.
#if (ELEMENT == 1 || ELEMENT == 2) && __CUDA_ARCH__ >= 900
#define PAIRED 1
#define PAIR_FUNCTION(name, instruction)                                        \
  __device__ __forceinline__ u32 name(u32 a, u32 b) {                           \
    u32 result;                                                                 \
    asm(instruction " %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));            \
    return result;                                                              \
  }
PAIR_FUNCTION(pair_min_bits, "min.u16x2")
PAIR_FUNCTION(pair_max_bits, "max.u16x2")
#if ELEMENT == 1
PAIR_FUNCTION(pair_min, "min.bf16x2")
PAIR_FUNCTION(pair_max, "max.bf16x2")
constexpr u32 PAIR_INFINITY = 0x7f807f80u;
#else
PAIR_FUNCTION(pair_min, "min.f16x2")
PAIR_FUNCTION(pair_max, "max.f16x2")
constexpr u32 PAIR_INFINITY = 0x7c007c00u;
#endif
constexpr u32 PAIR_SIGNS = 0x80008000u;
#else
#define PAIRED 0
#endif

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

__device__ void deposit(Row* target, Row total) {
  total.seen = 1;
  Row row = *target;
  merge(row, total);
  *target = row;
}

// Merge `count` partial rows that lie `stride` apart; thread 0 gets the total. The order depends on `count` alone. All
// means are close to that of one of the rows, so with that as shift plain sums in float64 lose nothing: rows add up
// word by word, with the sum of distances in the place of the mean and that of squares in the place of m2.
template <int THREADS>
__device__ __noinline__ Row collect(const Row* partials, u32 count, u32 stride) {
  constexpr int WARPS = THREADS / LANES;
  __shared__ Row of_warp[WARPS];
  Row shift = load_partial(partials);
  if (shift.finite() == 0) shift = load_partial(partials + (u64)(count - 1) * stride);
  Row total = {};
  total.low = infinity();
  total.high = -infinity();
  auto add = [&](const Row& row) {
    total.count += row.count;
    total.nan += row.nan;
    total.pos_inf += row.pos_inf;
    total.neg_inf += row.neg_inf;
    total.zero += row.zero;
    total.ge_one += row.ge_one;
    total.low = fmin(total.low, row.low);
    total.high = fmax(total.high, row.high);
    total.mean += row.mean;
    total.m2 += row.m2;
    total.abs_sum += row.abs_sum;
  };
#pragma unroll 1
  for (u32 i = threadIdx.x; i < count; i += THREADS) {
    Row row = load_partial(partials + (u64)i * stride);
    const double finite = row.finite(), distance = row.mean - shift.mean;
    row.m2 += finite * distance * distance;
    row.mean = finite * distance;
    if (finite == 0) row.m2 = row.mean = 0, row.low = infinity(), row.high = -infinity();
    add(row);
  }
  const auto merge_lanes = [&](int width) {
#pragma unroll 1
    for (int distance = width / 2; distance; distance /= 2) {
      Row other;
      const double* from = reinterpret_cast<const double*>(&total);
      double* to = reinterpret_cast<double*>(&other);
#pragma unroll
      for (int i = 0; i < ROW_WORDS; i++) to[i] = __shfl_down_sync(~0u, from[i], distance);
      add(other);
    }
  };
  merge_lanes(LANES);
  __syncthreads();  // an earlier call may still be reading
  if (threadIdx.x % LANES == 0) of_warp[threadIdx.x / LANES] = total;
  __syncthreads();
  if (threadIdx.x >= LANES) return total;
  total = of_warp[threadIdx.x % WARPS];
  merge_lanes(WARPS);
  const double finite = total.finite(), rest = total.mean / fmax(finite, 1.0);
  const bool constant = total.low == total.high;
  total.m2 = finite == 0 || constant ? 0.0 : isinf(total.m2) ? total.m2 : fmax(0.0, total.m2 - total.mean * rest);
  total.mean = finite == 0 ? 0.0 : constant ? total.low : shift.mean + rest;
  if (finite == 0) total.low = total.high = 0;
  return total;
}

// ------------------------------------------------------------------------------------------------------------ tallies

// What one thread has seen.
struct Tally {
  Real shift = 0;  // an element; sum and squares are of distances to it
  double sum = 0, squares = 0, magnitude = 0;
  Real low = infinity(), high = -infinity();
  u32 finite = 0, zero = 0, ge_one = 0, nan = 0, pos_inf = 0, neg_inf = 0;
};

// What several threads have seen.
struct Part {
  double mean, m2, squares, magnitude;
  Real low, high;
  u32 finite, zero, ge_one, nan, pos_inf, neg_inf;

  __device__ Part() {}
  __device__ explicit Part(const Tally& tally)
      : squares(tally.squares), magnitude(tally.magnitude), low(tally.low), high(tally.high), finite(tally.finite),
        zero(tally.zero), ge_one(tally.ge_one), nan(tally.nan), pos_inf(tally.pos_inf), neg_inf(tally.neg_inf) {
    const double rest = finite ? tally.sum / finite : 0.0;
    mean = tally.shift + rest;
    m2 = isinf(squares) ? squares : squares - tally.sum * rest;
  }

  __device__ void merge(const Part& other) {
    if (other.finite) {
      const double delta = other.mean - mean, weight = (double)other.finite / (finite + other.finite);
      // Weight 1 means that there is nothing on this side: no mean to be distant from.
      m2 = finite ? m2 + other.m2 + delta * delta * finite * weight : other.m2;
      mean = finite ? mean + delta * weight : other.mean;
    }
    squares += other.squares;
    magnitude += other.magnitude;
    low = lesser(low, other.low);
    high = greater(high, other.high);
    finite += other.finite;
    zero += other.zero;
    ge_one += other.ge_one;
    nan += other.nan;
    pos_inf += other.pos_inf;
    neg_inf += other.neg_inf;
  }

  // Merge the parts of lanes that lie `width` / 2, ..., 1 apart; lane 0 has them all then.
  __device__ void merge_lanes(int width) {
#pragma unroll 1
    for (int distance = width / 2; distance; distance /= 2) {
      Part other;
      other.mean = __shfl_down_sync(~0u, mean, distance);
      other.m2 = __shfl_down_sync(~0u, m2, distance);
      other.squares = __shfl_down_sync(~0u, squares, distance);
      other.magnitude = __shfl_down_sync(~0u, magnitude, distance);
      other.low = __shfl_down_sync(~0u, low, distance);
      other.high = __shfl_down_sync(~0u, high, distance);
      other.finite = __shfl_down_sync(~0u, finite, distance);
      other.zero = __shfl_down_sync(~0u, zero, distance);
      other.ge_one = __shfl_down_sync(~0u, ge_one, distance);
      other.nan = __shfl_down_sync(~0u, nan, distance);
      other.pos_inf = __shfl_down_sync(~0u, pos_inf, distance);
      other.neg_inf = __shfl_down_sync(~0u, neg_inf, distance);
      merge(other);
    }
  }

  __device__ Row to_row(u32 count) const {
    Row row = {};
    row.count = count;
    row.nan = nan;
    row.pos_inf = pos_inf;
    row.neg_inf = neg_inf;
    if (finite) {
      row.zero = zero;
      row.ge_one = ge_one;
      row.low = low;
      row.high = high;
      row.mean = low == high ? (double)low : mean;
      row.m2 = low == high ? 0.0 : fmax(0.0, m2);
      row.abs_sum = magnitude;
    }
    return row;
  }

  // Whether the quick pass, which took all elements for finite, cannot be trusted.
  __device__ bool doubtful() const {
    if (!isfinite(magnitude) || !isfinite(squares) || !isfinite(mean)) return true;
    return finite && low != high && ((double)high - (double)low < SMALLEST_DISTANCE || squares > CANCELLED * m2);
  }
};

__device__ __forceinline__ u32 warp_total(u32 value) {
#if __CUDA_ARCH__ >= 800
  return __reduce_add_sync(~0u, value);
#else
  for (int distance = LANES / 2; distance; distance /= 2) value += __shfl_xor_sync(~0u, value, distance);
  return value;
#endif
}

// The part of a warp whose lanes share one shift and took all elements for finite: their tallies simply add up.
template <bool HISTOGRAM>
__device__ Part quick_part(Tally tally) {
#pragma unroll 1
  for (int distance = LANES / 2; distance; distance /= 2) {
    tally.sum += __shfl_xor_sync(~0u, tally.sum, distance);
    tally.squares += __shfl_xor_sync(~0u, tally.squares, distance);
    tally.magnitude += __shfl_xor_sync(~0u, tally.magnitude, distance);
    tally.low = lesser(tally.low, __shfl_xor_sync(~0u, tally.low, distance));
    tally.high = greater(tally.high, __shfl_xor_sync(~0u, tally.high, distance));
  }
  tally.finite = warp_total(tally.finite);
  tally.zero = warp_total(tally.zero);
  if (!HISTOGRAM) tally.ge_one = warp_total(tally.ge_one);
  return Part(tally);
}

// The part of a warp whose lanes differ in what they saw and what they took for shift.
__device__ Part careful_part(const Tally& tally) {
  Part part(tally);
  part.merge_lanes(LANES);
  return part;
}

// Counters are 32 bits wide, BIN_BYTES from bin to bin; two lanes share a column. Adding without asking for the result
// costs less here than reading and writing. Addresses are those of shared memory, less FIRST_BIN_OFFSET.
__device__ __forceinline__ void bump(u32 address) { asm volatile("red.shared.add.u32 [%0], 1;" ::"r"(address)); }

// Adds elements, all taken for finite; zeros are counted in the first bin too, and taken out of it later.
template <bool HISTOGRAM>
struct Quick {
  Tally& tally;
  const u32 counters;
  Real sum = 0, squares = 0, magnitude = 0;  // of the few elements since the last `close`
#if PAIRED
  u32 nonzero = 0, low = PAIR_INFINITY, high = PAIR_INFINITY | PAIR_SIGNS;
#endif

  __device__ Quick(Tally& tally, u32 counters) : tally(tally), counters(counters) {}

  __device__ __forceinline__ void add_moments(Real x) {
    const Real distance = x - tally.shift;
    sum += distance;
    squares += distance * distance;
    magnitude += magnitude_of(x);
    if (!HISTOGRAM) tally.ge_one += magnitude_of(x) >= 1;
  }

  __device__ __forceinline__ void add(Real x) {
    add_moments(x);
    tally.low = lesser(tally.low, x);
    tally.high = greater(tally.high, x);
    tally.zero += x == 0;
    if (HISTOGRAM) bump(counters + bin_offset(x));
  }

#if PAIRED
  __device__ __forceinline__ void add_pair(u32 pair) {
    const Real first = decode((Raw)pair), second = decode((Raw)(pair >> 16));
    add_moments(first);
    add_moments(second);
    low = pair_min(low, pair);
    high = pair_max(high, pair);
    const u32 sizes = pair & ~PAIR_SIGNS;
    nonzero += pair_min_bits(sizes, 0x00010001u);  // two 16-bit counts, emptied long before they overflow
    if (!HISTOGRAM) return;
#if ELEMENT == 1
    // The exponent field is that of float32, and lies so that the bin's offset is half of what stands in the register.
    const u32 clamped = pair_min_bits(pair_max_bits(sizes, 0x28002800u), 0x47804780u);
    bump(counters + ((clamped >> 1) & 0x3fc0u));
    bump(counters + ((clamped >> 17) & 0x3fc0u));
#else
    bump(counters + bin_offset(first));
    bump(counters + bin_offset(second));
#endif
  }

  __device__ __forceinline__ void add_vector(const uint4& vector) {
    add_pair(vector.x);
    add_pair(vector.y);
    add_pair(vector.z);
    add_pair(vector.w);
  }
#else
  __device__ __forceinline__ void add_vector(const uint4& vector) {
#pragma unroll
    for (int i = 0; i < PER_VECTOR; i++) add(decode(pick(vector, i)));
  }
#endif

  // After a few elements: `vectors` of them, and `singles`.
  __device__ __forceinline__ void close(u32 vectors, u32 singles) {
    tally.sum += sum;
    tally.squares += squares;
    tally.magnitude += magnitude;
    tally.finite += vectors * PER_VECTOR + singles;
    sum = squares = magnitude = 0;
#if PAIRED
    tally.zero += vectors * PER_VECTOR - (nonzero & 0xffffu) - (nonzero >> 16);
    nonzero = 0;
#endif
  }

  __device__ __forceinline__ void finish() {
#if PAIRED
    tally.low = lesser(tally.low, lesser(decode((Raw)low), decode((Raw)(low >> 16))));
    tally.high = greater(tally.high, greater(decode((Raw)high), decode((Raw)(high >> 16))));
#endif
  }
};

// Adds elements of any kind; squares in float64. Zeros are counted in the first bin too, as above.
template <bool HISTOGRAM>
struct Careful {
  Tally& tally;
  const u32 counters;

  __device__ Careful(Tally& tally, u32 counters) : tally(tally), counters(counters) {}

  __device__ __forceinline__ void add(Real x) {
    if (isfinite(x)) {
      const double distance = (double)x - (double)tally.shift;
      tally.sum += distance;
      tally.squares += distance * distance;
      tally.magnitude += magnitude_of(x);
      add_place(x);
    } else {
      tally.nan += x != x;
      tally.pos_inf += x > 0;
      tally.neg_inf += x < 0;
    }
  }

  __device__ __forceinline__ void add_place(Real x) {
    tally.low = lesser(tally.low, x);
    tally.high = greater(tally.high, x);
    tally.zero += x == 0;
    if (HISTOGRAM) bump(counters + bin_offset(x));
    else tally.ge_one += magnitude_of(x) >= 1;
  }

  // Add the elements that `get` returns for 0, 1, ...
  template <class Get>
  __device__ __forceinline__ void add_few(Get get) {
    Real magnitude = 0;
#pragma unroll
    for (int i = 0; i < PER_VECTOR; i++) magnitude += magnitude_of(get(i));
    if (magnitude < ORDINARY) {  // neither NaN nor infinite nor huge is among them
      Real sum = 0;
#pragma unroll
      for (int i = 0; i < PER_VECTOR; i++) {
        const Real distance = get(i) - tally.shift;
        sum += distance;
        tally.squares += (double)distance * (double)distance;
        add_place(get(i));
      }
      tally.sum += sum;
      tally.magnitude += magnitude;
    } else {
#pragma unroll 1
      for (int i = 0; i < PER_VECTOR; i++) add(get(i));
    }
  }

  __device__ __forceinline__ void add_vector(const uint4& vector) {
    add_few([&](int i) { return decode(pick(vector, i)); });
  }

  __device__ __forceinline__ void close(u32 vectors, u32 singles) { tally.finite += vectors * PER_VECTOR + singles; }
  __device__ __forceinline__ void finish() { tally.finite -= tally.nan + tally.pos_inf + tally.neg_inf; }
};

// The middle one of the ordinary candidates among the lanes, or 0: a shift for all of them. Not the first, which may be
// far from all others: distances to it would lose their digits.
__device__ Real common_shift(Real candidate) {
  const bool usable = magnitude_of(candidate) < ORDINARY;
  const u32 those = __ballot_sync(~0u, usable), lane = threadIdx.x % LANES;
  if (!those) return Real(0);
  u32 rank = 0;
#pragma unroll 1
  for (u32 i = 0; i < LANES; i++) {
    const Real other = __shfl_sync(~0u, candidate, i);
    rank += (those >> i & 1) && (other < candidate || (other == candidate && i < lane));
  }
  const u32 middle = __ballot_sync(~0u, usable && rank == __popc(those) / 2);
  return __shfl_sync(~0u, candidate, __ffs(middle) - 1);
}

// ------------------------------------------------------------------------------------------------------------- chunks

// Where a chunk can be read 16 bytes at a time; elements before and after that are read one by one.
struct Span {
  u32 head, vectors, length;
  __device__ Span(u64 address, u32 length) : length(length) {
    head = min(length, (u32)((16 - (address & 15)) & 15) / (u32)sizeof(Raw));
    vectors = (length - head) / PER_VECTOR;
  }
  __device__ u32 singles() const { return length - vectors * PER_VECTOR; }
  __device__ u32 single_at(u32 index) const { return index < head ? index : index + vectors * PER_VECTOR; }
  // The first element that this thread itself reads, if it reads any.
  __device__ bool own(u32& at) const {
    at = threadIdx.x < vectors ? head + threadIdx.x * PER_VECTOR : single_at(threadIdx.x);
    return threadIdx.x < vectors || threadIdx.x < singles();
  }
};

template <int THREADS, class Adder>
__device__ __forceinline__ void sweep(Adder& adder, const Raw* data, const Span& span) {
  const uint4* vector = reinterpret_cast<const uint4*>(data + span.head);
  const uint4* const end = vector + span.vectors;
  vector += threadIdx.x;
  for (; vector + 3 * THREADS < end; vector += 4 * THREADS) {  // four loads in flight per thread
    const uint4 a = __ldg(vector), b = __ldg(vector + THREADS);
    const uint4 c = __ldg(vector + 2 * THREADS), d = __ldg(vector + 3 * THREADS);
    adder.add_vector(a);
    adder.add_vector(b);
    adder.add_vector(c);
    adder.add_vector(d);
    adder.close(4, 0);
  }
#pragma unroll 1
  for (; vector < end; vector += THREADS) {
    adder.add_vector(__ldg(vector));
    adder.close(1, 0);
  }
#pragma unroll 1
  for (u32 i = threadIdx.x; i < span.singles(); i += THREADS) {
    adder.add(decode(data[span.single_at(i)]));
    adder.close(0, 1);
  }
  adder.finish();
}

// Leave the part of the whole block in `of_warp[0]`. Starts and ends with all threads together.
template <int THREADS>
__device__ void merge_block(Part part, Part* of_warp) {
  constexpr int WARPS = THREADS / LANES;
  __syncthreads();
  if (threadIdx.x % LANES == 0) of_warp[threadIdx.x / LANES] = part;
  __syncthreads();
  if (threadIdx.x < LANES) {
    part = of_warp[threadIdx.x % WARPS];
    __syncwarp();
    part.merge_lanes(WARPS);
    if (threadIdx.x == 0) of_warp[0] = part;
  }
  __syncthreads();
}

// An element of the chunk for a warp to take as shift: one of those it reads first. Not always the same place in a row
// of a matrix, whose first column may be unlike all others.
__device__ Real shift_for_warp(const Raw* data, const Span& span) {
  const u32 warp = threadIdx.x / LANES, lane = (11 * warp + 3) % LANES;
  const u32 at = span.head + (warp * LANES + lane) * PER_VECTOR;
  return span.length ? decode(data[min(at, span.length - 1)]) : Real(0);
}

// Set a warp's own counters to zero.
__device__ void clear_counters(u32* of_warp) {
  uint4* words = reinterpret_cast<uint4*>(of_warp);
  for (int i = threadIdx.x % LANES; i < BINS * (int)BIN_BYTES / 16; i += LANES) words[i] = make_uint4(0, 0, 0, 0);
  __syncwarp();
}

// Return what a lane must add to a bin's offset to get the address of its counter.
__device__ u32 lane_address(const u32* of_warp) {
  return (u32)__cvta_generic_to_shared(of_warp + threadIdx.x % COLUMNS) - FIRST_BIN_OFFSET;
}

// Add the block's counters to the row's bins, less `zeros` in the first; count elements of 1 and more in `ge_one`.
// Starts and ends with all threads together.
template <int THREADS>
__device__ void publish(const u32* counters, u64* bins, u32 zeros, u32* ge_one) {
  constexpr int SHARERS = THREADS / BINS, VECTORS = COLUMNS / 4 / SHARERS;
  const int bin = threadIdx.x / SHARERS, part = threadIdx.x % SHARERS;
  if (threadIdx.x == 0) *ge_one = 0;
  __syncthreads();
  u32 count = 0;
#pragma unroll 1
  for (int warp = 0; warp < THREADS / LANES; warp++) {
    const uint4* row = reinterpret_cast<const uint4*>(counters + (warp * BINS + bin) * COLUMNS) + part * VECTORS;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) count += row[i].x + row[i].y + row[i].z + row[i].w;
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

template <int TENSORS>
struct Batch {
  Target target;
  u64 data[TENSORS], numel[TENSORS];
  u32 first[TENSORS], row[TENSORS];  // first: the tensor's first block
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

// Read a chunk once more, carefully.
template <bool HISTOGRAM>
__device__ __noinline__ void summarise_again(const Raw* data, Span span, u32* warp_counters, Part* of_warp) {
  if (HISTOGRAM) clear_counters(warp_counters);
  u32 at;
  Tally tally;
  tally.shift = common_shift(span.own(at) ? decode(data[at]) : infinity());
  Careful<HISTOGRAM> careful(tally, lane_address(warp_counters));
  sweep<SUMMARY_THREADS>(careful, data, span);
  merge_block<SUMMARY_THREADS>(careful_part(tally), of_warp);
}

template <bool HISTOGRAM, int TENSORS>
__device__ __forceinline__ void summarise(const Batch<TENSORS>& batch) {
  constexpr int THREADS = SUMMARY_THREADS, WARPS = THREADS / LANES, COUNTERS = BINS * COLUMNS;
  __shared__ __align__(16) u32 counters[HISTOGRAM ? WARPS * COUNTERS : 4];
  __shared__ Part of_warp[WARPS];
  __shared__ u32 ge_one;
  const Share share = find_share(batch);
  const u32 row_index = batch.row[share.tensor];
  const Raw* data = reinterpret_cast<const Raw*>(batch.data[share.tensor]) + share.start;
  const Span span((u64)data, share.length);
  u32* warp_counters = counters + (HISTOGRAM ? threadIdx.x / LANES * COUNTERS : 0);

  if (HISTOGRAM) clear_counters(warp_counters);
  Tally tally;
  tally.shift = shift_for_warp(data, span);
  Quick<HISTOGRAM> quick(tally, lane_address(warp_counters));
  sweep<THREADS>(quick, data, span);
  merge_block<THREADS>(quick_part<HISTOGRAM>(tally), of_warp);
  // Uniform: all threads look at the same part.
  if (of_warp[0].doubtful()) summarise_again<HISTOGRAM>(data, span, warp_counters, of_warp);
  if (HISTOGRAM) publish<THREADS>(counters, batch.target.bins + (u64)row_index * BINS, of_warp[0].zero, &ge_one);

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

#define SUMMARY_KERNEL(name, histogram, tensors)                                                        \
  extern "C" __global__ void __launch_bounds__(SUMMARY_THREADS, SUMMARY_RESIDENT)                       \
  name(const __grid_constant__ Batch<tensors> batch) {                                                  \
    summarise<histogram, tensors>(batch);                                                               \
  }
SUMMARY_KERNEL(summary, false, SUMMARY_TENSORS)
SUMMARY_KERNEL(summary_bins, true, SUMMARY_TENSORS)
SUMMARY_KERNEL(single, false, 1)  // its argument is 72 bytes instead of 4 KiB, which shows in a hook
SUMMARY_KERNEL(single_bins, true, 1)

// ------------------------------------------------------------------------------------------------------------- change

// Adds tensor and shadow vectors. The shadow is overwritten as it is read, so there can be no second look: all careful.
template <int THREADS, class Adder>
__device__ __forceinline__ void sweep_change(
    Adder& now, Adder& change, const Raw* data, Raw* shadow, const Span& span) {
  const uint4* vectors = reinterpret_cast<const uint4*>(data + span.head);
  uint4* shadows = reinterpret_cast<uint4*>(shadow + span.head);
  auto add_both = [&](const uint4& a, const uint4& b) {
    now.add_vector(a);
    change.add_few([&](int i) { return decode(pick(a, i)) - decode(pick(b, i)); });
    now.close(1, 0);
    change.close(1, 0);
  };
  u32 i = threadIdx.x;
  for (; i + THREADS < span.vectors; i += 2 * THREADS) {
    const uint4 a = __ldg(vectors + i), b = __ldg(vectors + i + THREADS);
    const uint4 old_a = shadows[i], old_b = shadows[i + THREADS];
    shadows[i] = a;
    shadows[i + THREADS] = b;
    add_both(a, old_a);
    add_both(b, old_b);
  }
  if (i < span.vectors) {
    const uint4 a = __ldg(vectors + i), old = shadows[i];
    shadows[i] = a;
    add_both(a, old);
  }
#pragma unroll 1
  for (u32 k = threadIdx.x; k < span.singles(); k += THREADS) {
    const u32 at = span.single_at(k);
    const Raw raw = data[at], old = shadow[at];
    shadow[at] = raw;
    now.add(decode(raw));
    change.add(decode(raw) - decode(old));
    now.close(0, 1);
    change.close(0, 1);
  }
  now.finish();
  change.finish();
}

template <bool HISTOGRAM>
__device__ __forceinline__ void summarise_change(const ChangeBatch& batch) {
  constexpr int THREADS = CHANGE_THREADS, WARPS = THREADS / LANES, COUNTERS = WARPS * BINS * COLUMNS;
  __shared__ __align__(16) u32 counters[HISTOGRAM ? 2 * COUNTERS : 4];
  __shared__ Part of_warp[2][WARPS];
  __shared__ u32 ge_one;
  const Share share = find_share(batch);
  const u32 row_index[2] = {batch.row[share.tensor], batch.change_row[share.tensor]};
  const Raw* data = reinterpret_cast<const Raw*>(batch.data[share.tensor]) + share.start;
  Raw* shadow = reinterpret_cast<Raw*>(batch.shadow[share.tensor]) + share.start;
  Span span((u64)data, share.length);
  // Vectors only where both lie alike; else all elements belong to the head.
  if (((u64)data ^ (u64)shadow) & 15) span.head = share.length, span.vectors = 0;
  u32* warp_counters = counters + (HISTOGRAM ? threadIdx.x / LANES * BINS * COLUMNS : 0);
  const u32 address = lane_address(warp_counters);
  if (HISTOGRAM) {
    clear_counters(warp_counters);
    clear_counters(warp_counters + COUNTERS);
  }

  u32 at;
  const bool any = span.own(at);
  Tally now, change;
  now.shift = common_shift(any ? decode(data[at]) : infinity());
  change.shift = common_shift(any ? decode(data[at]) - decode(shadow[at]) : infinity());
  Careful<HISTOGRAM> add_now(now, address), add_change(change, address + COUNTERS * (u32)sizeof(u32));
  sweep_change<THREADS>(add_now, add_change, data, shadow, span);
  merge_block<THREADS>(careful_part(now), of_warp[0]);
  merge_block<THREADS>(careful_part(change), of_warp[1]);
#pragma unroll 1
  for (int which = 0; which < 2; which++) {
    if (HISTOGRAM) {
      u64* bins = batch.target.bins + (u64)row_index[which] * BINS;
      publish<THREADS>(counters + which * COUNTERS, bins, of_warp[which][0].zero, &ge_one);
    }
    if (threadIdx.x == 0) {
      if (HISTOGRAM) of_warp[which][0].ge_one = ge_one;
      const Row row = of_warp[which][0].to_row(share.length);
      if (share.blocks == 1) deposit(batch.target.rows + row_index[which], row);
      else batch.target.partials[2 * blockIdx.x + which] = row;
    }
  }
  if (share.blocks == 1 || !is_last(batch.target.tickets + row_index[0], share.blocks)) return;
#pragma unroll 1
  for (int which = 0; which < 2; which++) {
    const Row row = collect<THREADS>(batch.target.partials + 2 * share.first + which, share.blocks, 2);
    if (threadIdx.x == 0) deposit(batch.target.rows + row_index[which], row);
  }
}

#define CHANGE_KERNEL(name, histogram)                                                                  \
  extern "C" __global__ void __launch_bounds__(CHANGE_THREADS, CHANGE_RESIDENT)                         \
  name(const __grid_constant__ ChangeBatch batch) {                                                     \
    summarise_change<histogram>(batch);                                                                 \
  }
CHANGE_KERNEL(change, false)
CHANGE_KERNEL(change_bins, true)
