/* For x86 processors since 2013. */
#include "summary.h"

#ifdef SONDE_X86_LEVELS
#ifdef __clang__
#include <immintrin.h>
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,bmi"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,bmi")
#endif

#include "lanes_avx2.h"

#define LEVEL avx2
#include "level.h"

#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
