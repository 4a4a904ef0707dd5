/* Pixels to planes and back for color.h, 16 at a time: bytes are sorted by shuffles, and made words of. */
#ifndef RAYPIPE_COLOR_SIMD_H
#define RAYPIPE_COLOR_SIMD_H

#include "versions.h"

#ifdef HAS_AVX2
/* Where in 48 bytes of 16 pixels the bytes of a channel are, of each third of them; -1: not there. */
#define FROM_THIRD(third, c)                                                                                         \
    _mm_setr_epi8(BYTE(third, c, 0), BYTE(third, c, 1), BYTE(third, c, 2), BYTE(third, c, 3), BYTE(third, c, 4),     \
                  BYTE(third, c, 5), BYTE(third, c, 6), BYTE(third, c, 7), BYTE(third, c, 8), BYTE(third, c, 9),     \
                  BYTE(third, c, 10), BYTE(third, c, 11), BYTE(third, c, 12), BYTE(third, c, 13),                    \
                  BYTE(third, c, 14), BYTE(third, c, 15))
#define BYTE(third, c, pixel) ((3 * (pixel) + (c)) / 16 == (third) ? (3 * (pixel) + (c)) % 16 : -1)
/* The other way round: which pixel of a channel's 16 bytes is at a byte of a third. */
#define TO_THIRD(third, c)                                                                                           \
    _mm_setr_epi8(PIXEL(third, c, 0), PIXEL(third, c, 1), PIXEL(third, c, 2), PIXEL(third, c, 3), PIXEL(third, c, 4), \
                  PIXEL(third, c, 5), PIXEL(third, c, 6), PIXEL(third, c, 7), PIXEL(third, c, 8),                    \
                  PIXEL(third, c, 9), PIXEL(third, c, 10), PIXEL(third, c, 11), PIXEL(third, c, 12),                 \
                  PIXEL(third, c, 13), PIXEL(third, c, 14), PIXEL(third, c, 15))
#define PIXEL(third, c, byte) ((16 * (third) + (byte)) % 3 == (c) ? (16 * (third) + (byte)) / 3 : -1)

/* How many pixels are done. */
AVX2 static int unpack_avx2(const uint8_t *pixels, int num, int16_t *r, int16_t *g, int16_t *b)
{
    const __m128i order[3][3] = {{FROM_THIRD(0, 0), FROM_THIRD(1, 0), FROM_THIRD(2, 0)},
                                 {FROM_THIRD(0, 1), FROM_THIRD(1, 1), FROM_THIRD(2, 1)},
                                 {FROM_THIRD(0, 2), FROM_THIRD(1, 2), FROM_THIRD(2, 2)}};
    int16_t *const planes[3] = {r, g, b};
    int i = 0;
    for (; i + 16 <= num; i += 16) {
        const __m128i *from = (const __m128i *)(pixels + 3 * i);
        const __m128i first = _mm_loadu_si128(from), second = _mm_loadu_si128(from + 1), third = _mm_loadu_si128(from + 2);
        for (int c = 0; c < 3; c++) {
            const __m128i bytes = _mm_or_si128(
                _mm_or_si128(_mm_shuffle_epi8(first, order[c][0]), _mm_shuffle_epi8(second, order[c][1])),
                _mm_shuffle_epi8(third, order[c][2]));
            _mm256_storeu_si256((__m256i *)(planes[c] + i), _mm256_cvtepu8_epi16(bytes));
        }
    }
    return i;
}

AVX2 static int pack_avx2(const int16_t *r, const int16_t *g, const int16_t *b, int num, uint8_t *pixels)
{
    const __m128i order[3][3] = {{TO_THIRD(0, 0), TO_THIRD(0, 1), TO_THIRD(0, 2)},
                                 {TO_THIRD(1, 0), TO_THIRD(1, 1), TO_THIRD(1, 2)},
                                 {TO_THIRD(2, 0), TO_THIRD(2, 1), TO_THIRD(2, 2)}};
    const int16_t *const planes[3] = {r, g, b};
    int i = 0;
    for (; i + 16 <= num; i += 16) {
        __m128i bytes[3];
        for (int c = 0; c < 3; c++)
            bytes[c] = _mm_packus_epi16(_mm_loadu_si128((const __m128i *)(planes[c] + i)),
                                        _mm_loadu_si128((const __m128i *)(planes[c] + i + 8)));
        for (int third = 0; third < 3; third++)
            _mm_storeu_si128((__m128i *)(pixels + 3 * i) + third,
                             _mm_or_si128(_mm_or_si128(_mm_shuffle_epi8(bytes[0], order[third][0]),
                                                       _mm_shuffle_epi8(bytes[1], order[third][1])),
                                          _mm_shuffle_epi8(bytes[2], order[third][2])));
    }
    return i;
}
#endif
#endif
