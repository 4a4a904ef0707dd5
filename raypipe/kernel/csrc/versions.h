/* One body, compiled for what every processor of this kind has, and for AVX2. The caller says which of them runs.
 *
 *     INLINE void scale_body(int16_t *x, int num) { … }
 *     VERSIONS(scale, (int16_t * x, int num), (x, num))
 *
 * makes scale(simd, x, num). Both give the same bytes, since all arithmetic is in integers.
 */
#ifndef RAYPIPE_VERSIONS_H
#define RAYPIPE_VERSIONS_H

#include "image.h"

#define INLINE static inline __attribute__((always_inline))

#define FIRST_AND(first, ...) (first, __VA_ARGS__)
#define UNWRAPPED(...) __VA_ARGS__

#if defined(__x86_64__)
#include <immintrin.h>
#define HAS_AVX2
#define AVX2 __attribute__((target("avx2,bmi2")))

#define VERSIONS(name, parameters, arguments)                                                                        \
    static void name##_plain parameters { name##_body arguments; }                                                   \
    AVX2 static void name##_avx2 parameters { name##_body arguments; }                                               \
    static inline void name(int simd, UNWRAPPED parameters)                                                          \
    {                                                                                                                \
        if (simd == SIMD_AVX2)                                                                                       \
            name##_avx2 arguments;                                                                                   \
        else                                                                                                         \
            name##_plain arguments;                                                                                  \
    }
#else
#define VERSIONS(name, parameters, arguments)                                                                        \
    static inline void name(int simd, UNWRAPPED parameters)                                                          \
    {                                                                                                                \
        (void)simd;                                                                                                  \
        name##_body arguments;                                                                                       \
    }
#endif
#endif
