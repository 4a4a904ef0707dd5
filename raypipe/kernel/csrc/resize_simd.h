/* The loops of resize_loops.h by SSSE3 and AVX2, chosen when they run, with the same results to the bit. */
#ifndef RAYPIPE_RESIZE_SIMD_H
#define RAYPIPE_RESIZE_SIMD_H

#include "resize_loops.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define HAS_X86_SIMD 1
#include <immintrin.h>

/* Bytes 0 to 7 and 8 to 15, two pixels each → words (r, r'), (g, g'), (b, b'), 0. */
#define SPREAD_LOW 0, -1, 3, -1, 1, -1, 4, -1, 2, -1, 5, -1, -1, -1, -1, -1
#define SPREAD_HIGH 8, -1, 11, -1, 9, -1, 12, -1, 10, -1, 13, -1, -1, -1, -1, -1
/* Words r, g, b, -, r, g, b, - → 6 together. */
#define JOIN 0, 1, 2, 3, 4, 5, 8, 9, 10, 11, 12, 13, -1, -1, -1, -1
/* Four pixels' r, g, b, r, g, b, … → their first two, and their last two, as SPREAD_LOW has two. */
#define SPREAD_FIRST SPREAD_LOW
#define SPREAD_LAST 6, -1, 9, -1, 7, -1, 10, -1, 8, -1, 11, -1, -1, -1, -1, -1

#define PIXELS_BYTES 8 /* that are loaded of two pixels */

static inline int coefficient_pair(const Taps *taps, int first)
{
    int pair;
    memcpy(&pair, taps->coefficients + first, sizeof pair);
    return pair;
}

/* Columns whose loads stay in the row: the first ones, since positions only grow. */
static int num_loadable(const Taps *columns, int width, int source, int before, int bytes)
{
    while (width > 0 && (columns[width - 1].at - before) * CHANNELS + bytes > source * CHANNELS)
        width--;
    return width;
}

__attribute__((target("ssse3"))) static int linear_columns_ssse3(
    const uint8_t *row, const Taps *columns, int num, int16_t *to)
{
    const __m128i spread = _mm_setr_epi8(SPREAD_LOW), join = _mm_setr_epi8(JOIN);
    int x = 0;
    for (; x + 2 <= num; x += 2) {
        const Taps *taps = columns + x;
        __m128i a = _mm_loadl_epi64((const __m128i *)(row + taps[0].at * CHANNELS));
        __m128i b = _mm_loadl_epi64((const __m128i *)(row + taps[1].at * CHANNELS));
        a = _mm_madd_epi16(_mm_shuffle_epi8(a, spread), _mm_set1_epi32(coefficient_pair(taps, 0)));
        b = _mm_madd_epi16(_mm_shuffle_epi8(b, spread), _mm_set1_epi32(coefficient_pair(taps + 1, 0)));
        const __m128i words = _mm_packs_epi32(_mm_srai_epi32(a, 4), _mm_srai_epi32(b, 4));
        _mm_storeu_si128((__m128i *)(to + x * CHANNELS), _mm_shuffle_epi8(words, join));
    }
    return x;
}

__attribute__((target("avx2"))) static inline __m128i two_pairs(const uint8_t *row, const Taps *taps)
{
    int64_t a, b;
    memcpy(&a, row + taps[0].at * CHANNELS, sizeof a);
    memcpy(&b, row + taps[1].at * CHANNELS, sizeof b);
    return _mm_insert_epi64(_mm_cvtsi64_si128(a), b, 1);
}

__attribute__((target("avx2"))) static inline __m256i two_coefficients(const Taps *taps)
{
    return _mm256_set_m128i(_mm_set1_epi32(coefficient_pair(taps + 2, 0)), _mm_set1_epi32(coefficient_pair(taps, 0)));
}

__attribute__((target("avx2"))) static int linear_columns_avx2(
    const uint8_t *row, const Taps *columns, int num, int16_t *to)
{
    const __m256i low = _mm256_setr_epi8(SPREAD_LOW, SPREAD_LOW), high = _mm256_setr_epi8(SPREAD_HIGH, SPREAD_HIGH);
    const __m256i join = _mm256_setr_epi8(JOIN, JOIN);
    int x = 0;
    for (; x + 4 <= num; x += 4) { /* lanes hold pixels 0 and 1, 2 and 3 */
        const Taps *taps = columns + x;
        const __m256i pixels = _mm256_set_m128i(two_pairs(row, taps + 2), two_pairs(row, taps));
        __m256i even = _mm256_madd_epi16(_mm256_shuffle_epi8(pixels, low), two_coefficients(taps));
        __m256i odd = _mm256_madd_epi16(_mm256_shuffle_epi8(pixels, high), two_coefficients(taps + 1));
        __m256i words = _mm256_packs_epi32(_mm256_srai_epi32(even, 4), _mm256_srai_epi32(odd, 4));
        words = _mm256_shuffle_epi8(words, join);
        _mm_storeu_si128((__m128i *)(to + x * CHANNELS), _mm256_castsi256_si128(words));
        _mm_storeu_si128((__m128i *)(to + x * CHANNELS + 6), _mm256_extracti128_si256(words, 1));
    }
    return x;
}

/* SSE2, which every x86-64 has. */
static int linear_rows_sse2(const int16_t *above, const int16_t *below, int a, int b, int num, uint8_t *to)
{
    const __m128i first = _mm_set1_epi16((short)a), second = _mm_set1_epi16((short)b), half = _mm_set1_epi16(2);
    int i = 0;
    for (; i + 16 <= num; i += 16) {
        __m128i words[2];
        for (int k = 0; k < 2; k++) {
            const __m128i x = _mm_mulhi_epi16(_mm_loadu_si128((const __m128i *)(above + i) + k), first);
            const __m128i y = _mm_mulhi_epi16(_mm_loadu_si128((const __m128i *)(below + i) + k), second);
            words[k] = _mm_srai_epi16(_mm_add_epi16(_mm_add_epi16(x, y), half), 2);
        }
        _mm_storeu_si128((__m128i *)(to + i), _mm_packus_epi16(words[0], words[1]));
    }
    return i;
}

__attribute__((target("avx2"))) static int linear_rows_avx2(
    const int16_t *above, const int16_t *below, int a, int b, int num, uint8_t *to)
{
    const __m256i first = _mm256_set1_epi16((short)a), second = _mm256_set1_epi16((short)b);
    const __m256i half = _mm256_set1_epi16(2);
    int i = 0;
    for (; i + 32 <= num; i += 32) {
        __m256i words[2];
        for (int k = 0; k < 2; k++) {
            const __m256i x = _mm256_mulhi_epi16(_mm256_loadu_si256((const __m256i *)(above + i) + k), first);
            const __m256i y = _mm256_mulhi_epi16(_mm256_loadu_si256((const __m256i *)(below + i) + k), second);
            words[k] = _mm256_srai_epi16(_mm256_add_epi16(_mm256_add_epi16(x, y), half), 2);
        }
        const __m256i bytes = _mm256_packus_epi16(words[0], words[1]);
        _mm256_storeu_si256((__m256i *)(to + i), _mm256_permute4x64_epi64(bytes, 0xD8));
    }
    return i;
}

/* Two pixels at a time, of 4 taps each. */
__attribute__((target("ssse3"))) static int cubic_columns_ssse3(
    const uint8_t *row, const Taps *columns, int first, int num, int16_t *to)
{
    const __m128i spread_first = _mm_setr_epi8(SPREAD_FIRST), spread_last = _mm_setr_epi8(SPREAD_LAST);
    const __m128i join = _mm_setr_epi8(JOIN), half = _mm_set1_epi32(16);
    int x = first;
    for (; x + 2 <= num; x += 2) {
        __m128i sums[2];
        for (int k = 0; k < 2; k++) {
            const Taps *taps = columns + x + k;
            const __m128i pixels = _mm_loadu_si128((const __m128i *)(row + (taps->at - 1) * CHANNELS));
            const __m128i a = _mm_madd_epi16(
                _mm_shuffle_epi8(pixels, spread_first), _mm_set1_epi32(coefficient_pair(taps, 0)));
            const __m128i b = _mm_madd_epi16(
                _mm_shuffle_epi8(pixels, spread_last), _mm_set1_epi32(coefficient_pair(taps, 2)));
            sums[k] = _mm_srai_epi32(_mm_add_epi32(_mm_add_epi32(a, b), half), 5);
        }
        _mm_storeu_si128((__m128i *)(to + x * CHANNELS), _mm_shuffle_epi8(_mm_packs_epi32(sums[0], sums[1]), join));
    }
    return x;
}

static int cubic_rows_sse2(const int16_t *const *rows, const int16_t *coefficients, int num, uint8_t *to)
{
    Taps taps;
    memcpy(taps.coefficients, coefficients, sizeof taps.coefficients);
    const __m128i first = _mm_set1_epi32(coefficient_pair(&taps, 0));
    const __m128i last = _mm_set1_epi32(coefficient_pair(&taps, 2)), half = _mm_set1_epi32(1 << 16);
    int i = 0;
    for (; i + 8 <= num; i += 8) {
        __m128i r[4];
        for (int k = 0; k < 4; k++)
            r[k] = _mm_loadu_si128((const __m128i *)(rows[k] + i));
        __m128i low = _mm_add_epi32(_mm_madd_epi16(_mm_unpacklo_epi16(r[0], r[1]), first),
                                    _mm_madd_epi16(_mm_unpacklo_epi16(r[2], r[3]), last));
        __m128i high = _mm_add_epi32(_mm_madd_epi16(_mm_unpackhi_epi16(r[0], r[1]), first),
                                     _mm_madd_epi16(_mm_unpackhi_epi16(r[2], r[3]), last));
        low = _mm_srai_epi32(_mm_add_epi32(low, half), 17);
        high = _mm_srai_epi32(_mm_add_epi32(high, half), 17);
        const __m128i words = _mm_packs_epi32(low, high);
        _mm_storel_epi64((__m128i *)(to + i), _mm_packus_epi16(words, words));
    }
    return i;
}

__attribute__((target("avx2"))) static int cubic_rows_avx2(
    const int16_t *const *rows, const int16_t *coefficients, int num, uint8_t *to)
{
    Taps taps;
    memcpy(taps.coefficients, coefficients, sizeof taps.coefficients);
    const __m256i first = _mm256_set1_epi32(coefficient_pair(&taps, 0));
    const __m256i last = _mm256_set1_epi32(coefficient_pair(&taps, 2)), half = _mm256_set1_epi32(1 << 16);
    int i = 0;
    for (; i + 16 <= num; i += 16) {
        __m256i r[4];
        for (int k = 0; k < 4; k++)
            r[k] = _mm256_loadu_si256((const __m256i *)(rows[k] + i));
        __m256i low = _mm256_add_epi32(_mm256_madd_epi16(_mm256_unpacklo_epi16(r[0], r[1]), first),
                                       _mm256_madd_epi16(_mm256_unpacklo_epi16(r[2], r[3]), last));
        __m256i high = _mm256_add_epi32(_mm256_madd_epi16(_mm256_unpackhi_epi16(r[0], r[1]), first),
                                        _mm256_madd_epi16(_mm256_unpackhi_epi16(r[2], r[3]), last));
        low = _mm256_srai_epi32(_mm256_add_epi32(low, half), 17);
        high = _mm256_srai_epi32(_mm256_add_epi32(high, half), 17);
        const __m256i words = _mm256_packs_epi32(low, high); /* in order within each half */
        const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packus_epi16(words, words), 0x08);
        _mm_storeu_si128((__m128i *)(to + i), _mm256_castsi256_si128(bytes));
    }
    return i;
}
#endif

static void columns_by_linear(
    const uint8_t *row, int source, const Taps *columns, int width, int16_t *to, int simd)
{
    int x = 0;
#ifdef HAS_X86_SIMD
    const int num = simd >= SIMD_SSSE3 ? num_loadable(columns, width, source, 0, PIXELS_BYTES) : 0;
    if (simd >= SIMD_AVX2)
        x = linear_columns_avx2(row, columns, num, to);
    else if (simd >= SIMD_SSSE3)
        x = linear_columns_ssse3(row, columns, num, to);
#endif
    (void)simd;
    linear_columns(row, source > 1 ? CHANNELS : 0, columns, x, width, to);
}

static void rows_by_linear(const int16_t *const *rows, const int16_t *coefficients, int num, uint8_t *to, int simd)
{
    const int a = coefficients[0], b = coefficients[1];
    int i = 0;
#ifdef HAS_X86_SIMD
    if (simd >= SIMD_AVX2)
        i = linear_rows_avx2(rows[0], rows[1], a, b, num, to);
    else if (simd >= SIMD_SSSE3)
        i = linear_rows_sse2(rows[0], rows[1], a, b, num, to);
#endif
    (void)simd;
    linear_rows(rows[0], rows[1], a, b, i, num, to);
}

static void columns_by_cubic(
    const uint8_t *row, int source, const Taps *columns, int width, int16_t *to, int simd)
{
    int first = 0, x = 0;
#ifdef HAS_X86_SIMD
    if (simd >= SIMD_SSSE3) {
        const int num = num_loadable(columns, width, source, 1, (int)sizeof(__m128i));
        while (first < num && columns[first].at < 1)
            first++;
        x = cubic_columns_ssse3(row, columns, first, num, to);
    }
#endif
    (void)simd;
    cubic_columns(row, source, columns, 0, first, to);
    cubic_columns(row, source, columns, x, width, to);
}

static void rows_by_cubic(const int16_t *const *rows, const int16_t *coefficients, int num, uint8_t *to, int simd)
{
    int i = 0;
#ifdef HAS_X86_SIMD
    if (simd >= SIMD_AVX2)
        i = cubic_rows_avx2(rows, coefficients, num, to);
    else if (simd >= SIMD_SSSE3)
        i = cubic_rows_sse2(rows, coefficients, num, to);
#endif
    (void)simd;
    cubic_rows(rows, coefficients, i, num, to);
}
#endif
