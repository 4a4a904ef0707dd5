/* An image as it travels with transform.wire=yuv420; raypipe/kernel/yuv420.py has the definition, and the same bits.
 *
 *     luma      height x width
 *     chroma    half of each, rounded up: Cb and Cr in turns, of the sums of 2 x 2 pixels, where the last row and the
 *               last column of an odd side count twice
 */
#ifndef RAYPIPE_WIRE_H
#define RAYPIPE_WIRE_H

#include "color_simd.h"
#include "image.h"

/* BT.601 in Q15, by R, G, B. The weights of luma add up to one, those of chroma to nothing, so that no result needs
 * to be clipped. */
static const int16_t TO_Y[CHANNELS] = {9798, 19235, 3735};
static const int16_t TO_CB[CHANNELS] = {-5529, -10855, 16384};
static const int16_t TO_CR[CHANNELS] = {16384, -13720, -2664};
#define HALF_Y (1 << 14)
#define MIDDLE_C ((128 << 17) + (1 << 16) - 1) /* of sums of four; less one, or the largest would be 256 */

typedef int16_t *Rgb[CHANNELS];

static void fill_luma(Rgb row, int first, int num, uint8_t *luma)
{
    for (int x = first; x < num; x++)
        luma[x] = (uint8_t)((TO_Y[0] * row[0][x] + TO_Y[1] * row[1][x] + TO_Y[2] * row[2][x] + HALF_Y) >> 15);
}

static void fill_chroma(Rgb above, Rgb below, int first, int num, uint8_t *chroma)
{
    for (int x = first; x < num; x++) {
        int cb = MIDDLE_C, cr = MIDDLE_C;
        for (int c = 0; c < CHANNELS; c++) {
            const int sum = above[c][2 * x] + above[c][2 * x + 1] + below[c][2 * x] + below[c][2 * x + 1];
            cb += TO_CB[c] * sum;
            cr += TO_CR[c] * sum;
        }
        chroma[2 * x] = (uint8_t)(cb >> 17);
        chroma[2 * x + 1] = (uint8_t)(cr >> 17);
    }
}

#ifdef HAS_AVX2
AVX2 static inline __m256i load_words(const int16_t *words) { return _mm256_loadu_si256((const __m256i *)words); }

/* 16 pixels at a time; how many are done. */
AVX2 static int fill_luma_avx2(Rgb row, int num, uint8_t *luma)
{
    const __m256i rg = _mm256_set1_epi32((int)((uint32_t)TO_Y[1] << 16 | (uint16_t)TO_Y[0]));
    const __m256i b1 = _mm256_set1_epi32((int)((uint32_t)HALF_Y << 16 | (uint16_t)TO_Y[2])), one = _mm256_set1_epi16(1);
    int x = 0;
    for (; x + 16 <= num; x += 16) {
        const __m256i r = load_words(row[0] + x), g = load_words(row[1] + x), b = load_words(row[2] + x);
        const __m256i low = _mm256_add_epi32(_mm256_madd_epi16(_mm256_unpacklo_epi16(r, g), rg),
                                             _mm256_madd_epi16(_mm256_unpacklo_epi16(b, one), b1));
        const __m256i high = _mm256_add_epi32(_mm256_madd_epi16(_mm256_unpackhi_epi16(r, g), rg),
                                              _mm256_madd_epi16(_mm256_unpackhi_epi16(b, one), b1));
        const __m256i words = _mm256_packs_epi32(_mm256_srai_epi32(low, 15), _mm256_srai_epi32(high, 15));
        _mm_storeu_si128((__m128i *)(luma + x),
                         _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
    }
    return x;
}

/* 8 pairs at a time. */
AVX2 static int fill_chroma_avx2(Rgb above, Rgb below, int num, uint8_t *chroma)
{
    int x = 0;
    for (; x + 8 <= num; x += 8) {
        __m256i cb = _mm256_set1_epi32(MIDDLE_C), cr = cb;
        for (int c = 0; c < CHANNELS; c++) {
            const __m256i sum = _mm256_add_epi16(load_words(above[c] + 2 * x), load_words(below[c] + 2 * x));
            cb = _mm256_add_epi32(cb, _mm256_madd_epi16(sum, _mm256_set1_epi16(TO_CB[c])));
            cr = _mm256_add_epi32(cr, _mm256_madd_epi16(sum, _mm256_set1_epi16(TO_CR[c])));
        }
        const __m256i both = _mm256_or_si256(_mm256_srai_epi32(cb, 17),
                                             _mm256_slli_epi32(_mm256_srai_epi32(cr, 17), 8));
        _mm_storeu_si128((__m128i *)(chroma + 2 * x), _mm_packus_epi32(_mm256_castsi256_si128(both),
                                                                       _mm256_extracti128_si256(both, 1)));
    }
    return x;
}
#endif

/* A row's channels apart, with a column behind the last one of an odd number. */
static void take_row(const uint8_t *pixels, int width, Rgb row, int simd)
{
    int x = 0;
#ifdef HAS_AVX2
    if (simd == SIMD_AVX2)
        x = unpack_avx2(pixels, width, row[0], row[1], row[2]);
#endif
    (void)simd;
    for (; x < width; x++)
        for (int c = 0; c < CHANNELS; c++)
            row[c][x] = pixels[x * CHANNELS + c];
    for (int c = 0; c < CHANNELS; c++)
        row[c][width] = row[c][width - 1];
}

/* Fills both planes of an image. */
static int to_planes(const Image *image, uint8_t *luma, uint8_t *chroma, Scratch *scratch)
{
    const int width = image->width, num_pairs = (width + 1) / 2;
    const size_t room = (size_t)width + 1;
    int16_t *words = (int16_t *)work_memory(scratch, 2 * CHANNELS * room * sizeof(int16_t));
    if (!words)
        return NO_MEMORY;
    Rgb rows[2];
    for (int i = 0; i < 2 * CHANNELS; i++)
        rows[i / CHANNELS][i % CHANNELS] = words + (size_t)i * room;
    for (int y = 0; y < image->height; y += 2) {
        const int num_rows = image->height - y < 2 ? 1 : 2;
        for (int i = 0; i < num_rows; i++) {
            int done = 0;
            take_row(image->pixels + (y + i) * image->stride, width, rows[i], scratch->simd);
#ifdef HAS_AVX2
            if (scratch->simd == SIMD_AVX2)
                done = fill_luma_avx2(rows[i], width, luma + (size_t)(y + i) * (size_t)width);
#endif
            fill_luma(rows[i], done, width, luma + (size_t)(y + i) * (size_t)width);
        }
        uint8_t *of_rows = chroma + (size_t)(y / 2) * (size_t)num_pairs * 2;
        int done = 0;
#ifdef HAS_AVX2
        if (scratch->simd == SIMD_AVX2)
            done = fill_chroma_avx2(rows[0], rows[num_rows - 1], num_pairs, of_rows);
#endif
        fill_chroma(rows[0], rows[num_rows - 1], done, num_pairs, of_rows);
    }
    return DONE;
}
#endif
