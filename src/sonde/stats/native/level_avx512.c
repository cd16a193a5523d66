/* For x86 processors with AVX-512: most servers since 2017, AMD's since 2022. */
#include "summary.h"

#ifdef SONDE_X86_LEVELS
#ifdef __clang__
#include <immintrin.h>
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi")
#endif

#include "lanes_avx512.h"

#define LEVEL avx512
#include "level.h"

#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
