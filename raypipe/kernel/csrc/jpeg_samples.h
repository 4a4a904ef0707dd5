/* From the coefficients of a JPEG to its pixels, by AVX2, as libjpeg-turbo makes them to the bit: the inverse DCT of a
 * block, chroma's interpolation, and the conversion to RGB. jpeg_baseline.h says which images come here.
 *
 * libjpeg-turbo has three versions of its inverse DCT (jidctint.c, and those for x86 and for ARM) which agree as long
 * as nothing overflows 16 bits in the vector ones, or the range of a table in the plain one. That is watched for each
 * block: one that comes near is refused. No block of a picture does.
 */
#ifndef RAYPIPE_JPEG_SAMPLES_H
#define RAYPIPE_JPEG_SAMPLES_H

#include <jpeglib.h>

#include "versions.h"

#ifdef HAS_AVX2

#define LARGEST_INPUT 8191 /* of a pass of the inverse DCT; a picture's are below 5,000 */
#define LARGEST_SAMPLE 511 /* before it is clamped */

/* Where a coefficient is, by its place in natural order: rows 0 and 4, 1 and 5, 2 and 6, 3 and 7 in pairs, column by
 * column, as the inverse DCT multiplies them. */
#define PAIRED(place) ((place) / 8 % 4 * 16 + (place) % 8 * 2 + (place) / 32)

/* Two factors, in 1/8192, of each pair of 16-bit numbers; the sum of both products. */
#define TIMES(pairs, one, other) \
    _mm256_madd_epi16(pairs, _mm256_set1_epi32((int)((uint32_t)(other) << 16 | ((uint32_t)(one) & 0xFFFF))))
#define ADD(x, y) _mm256_add_epi32(x, y)
#define SUB(x, y) _mm256_sub_epi32(x, y)

/* One dimension of jidctint.c, of eight rows or columns at a time: of numbers 0 and 4, 1 and 5, 2 and 6, 3 and 7 in
 * pairs, with `bias` added and `shift` bits taken off. That file adds before it multiplies; here that is multiplied out,
 * and constants are sums of its own. Neither rounds in between, so the results are the same. */
AVX2 static inline void inverse_dct_8(const __m256i pairs[4], int bias, int shift, __m256i x[DCTSIZE])
{
    const __m256i half = _mm256_set1_epi32(bias + (1 << (shift - 1)));
    const __m256i even0 = ADD(TIMES(pairs[0], 8192, 8192), half), even3 = TIMES(pairs[2], 10703, 4433);
    const __m256i even1 = ADD(TIMES(pairs[0], 8192, -8192), half), even2 = TIMES(pairs[2], 4433, -10704);
    const __m256i a0 = ADD(even0, even3), a3 = SUB(even0, even3), a1 = ADD(even1, even2), a2 = SUB(even1, even2);
    const __m256i odd0 = ADD(TIMES(pairs[1], 2260, 9633), TIMES(pairs[3], -6436, -11363));
    const __m256i odd1 = ADD(TIMES(pairs[1], 6437, 2261), TIMES(pairs[3], -11362, 9633));
    const __m256i odd2 = ADD(TIMES(pairs[1], 9633, -11362), TIMES(pairs[3], -2259, -6436));
    const __m256i odd3 = ADD(TIMES(pairs[1], 11363, 6437), TIMES(pairs[3], 9633, 2260));

    const __m128i bits = _mm_cvtsi32_si128(shift);
    x[0] = _mm256_sra_epi32(ADD(a0, odd3), bits);
    x[7] = _mm256_sra_epi32(SUB(a0, odd3), bits);
    x[1] = _mm256_sra_epi32(ADD(a1, odd2), bits);
    x[6] = _mm256_sra_epi32(SUB(a1, odd2), bits);
    x[2] = _mm256_sra_epi32(ADD(a2, odd1), bits);
    x[5] = _mm256_sra_epi32(SUB(a2, odd1), bits);
    x[3] = _mm256_sra_epi32(ADD(a3, odd0), bits);
    x[4] = _mm256_sra_epi32(SUB(a3, odd0), bits);
}

/* Rows 0 and 4, 1 and 5, 2 and 6, 3 and 7 one behind the other, by 4 columns → columns in pairs, as above. */
AVX2 static inline void pair_columns(const __m256i rows[4], __m256i pairs[4])
{
    const __m256i low01 = _mm256_unpacklo_epi16(rows[0], rows[1]), high01 = _mm256_unpackhi_epi16(rows[0], rows[1]);
    const __m256i low23 = _mm256_unpacklo_epi16(rows[2], rows[3]), high23 = _mm256_unpackhi_epi16(rows[2], rows[3]);
    /* Of rows 0 to 3 and of 4 to 7, by lanes columns 0, 1 and 4, 5; or 2, 3 and 6, 7. */
    const __m256i top[2] = {_mm256_unpacklo_epi32(low01, low23), _mm256_unpackhi_epi32(low01, low23)};
    const __m256i bottom[2] = {_mm256_unpacklo_epi32(high01, high23), _mm256_unpackhi_epi32(high01, high23)};
    for (int i = 0; i < 2; i++) {
        const __m256i left = _mm256_permute2x128_si256(top[i], bottom[i], 0x20);
        const __m256i right = _mm256_permute2x128_si256(top[i], bottom[i], 0x31);
        pairs[2 * i] = _mm256_unpacklo_epi16(left, right);
        pairs[2 * i + 1] = _mm256_unpackhi_epi16(left, right);
    }
}

/* Whether all 16-bit numbers, with `add` added, are in 0 to range - 1, a power of two. */
AVX2 static inline int are_within(const __m256i x[4], int add, int range)
{
    const __m256i up = _mm256_set1_epi16((short)add);
    const __m256i one = _mm256_or_si256(_mm256_add_epi16(x[0], up), _mm256_add_epi16(x[1], up));
    const __m256i other = _mm256_or_si256(_mm256_add_epi16(x[2], up), _mm256_add_epi16(x[3], up));
    return _mm256_testz_si256(_mm256_or_si256(one, other), _mm256_set1_epi16((short)-range));
}

static inline int descaled(int value, int bits) { return (value + (1 << (bits - 1))) >> bits; }

/* The samples of a block whose other coefficients are zero. 0: refused. */
AVX2 static inline int flat_block(int dc, uint8_t *to, ptrdiff_t stride)
{
    if (dc > LARGEST_INPUT / 4 || dc < -LARGEST_INPUT / 4)
        return 0;
    const __m128i samples = _mm_set1_epi8((char)clip(descaled(dc * 4, 5) + 128));
    for (int y = 0; y < DCTSIZE; y++)
        _mm_storel_epi64((__m128i *)(to + y * stride), samples);
    return 1;
}

/* What coefficients are multiplied by, and how large they may be; at places of PAIRED. */
typedef struct {
    int16_t steps[DCTSIZE2], limits[DCTSIZE2];
} Quants;

/* The samples of a block, 8 x 8 bytes: jpeg_idct_islow. Coefficients are at places of PAIRED. 0: refused. */
AVX2 static int inverse_dct(const int16_t *coefficients, const Quants *quants, uint8_t *to, ptrdiff_t stride)
{
    const __m256i *all = (const __m256i *)coefficients;
    const __m256i_u *steps = (const __m256i_u *)quants->steps, *limits = (const __m256i_u *)quants->limits;
    const __m256i but_first = _mm256_setr_epi16(0, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
    const __m256i others = _mm256_or_si256(_mm256_or_si256(_mm256_and_si256(all[0], but_first), all[1]),
                                           _mm256_or_si256(all[2], all[3]));
    if (_mm256_testz_si256(others, others))
        return flat_block(coefficients[0] * quants->steps[0], to, stride);
    __m256i pairs[4], rows[4], x[DCTSIZE], beyond = _mm256_setzero_si256();
    for (int i = 0; i < 4; i++) {
        beyond = _mm256_or_si256(beyond, _mm256_subs_epu16(_mm256_abs_epi16(all[i]), limits[i]));
        pairs[i] = _mm256_mullo_epi16(all[i], steps[i]);
    }
    if (!_mm256_testz_si256(beyond, beyond))
        return 0;
    inverse_dct_8(pairs, 0, 11, x);
    for (int i = 0; i < 4; i++)
        rows[i] = _mm256_packs_epi32(x[i], x[i + 4]);
    if (!are_within(rows, LARGEST_INPUT + 1, 2 * (LARGEST_INPUT + 1)))
        return 0;
    pair_columns(rows, pairs);
    inverse_dct_8(pairs, 128 << 18, 18, x);

    __m256i words[4];
    for (int i = 0; i < 4; i++) /* columns 2i and 2i + 1, by lanes rows 0 to 3 and 4 to 7 */
        words[i] = _mm256_packs_epi32(x[2 * i], x[2 * i + 1]);
    if (!are_within(words, LARGEST_SAMPLE + 1 - 128, 2 * (LARGEST_SAMPLE + 1)))
        return 0;
    const __m256i by_rows = _mm256_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15, 0, 4, 8, 12, 1, 5, 9,
                                             13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m256i left = _mm256_shuffle_epi8(_mm256_packus_epi16(words[0], words[1]), by_rows);
    const __m256i right = _mm256_shuffle_epi8(_mm256_packus_epi16(words[2], words[3]), by_rows);
    const __m256i rows01 = _mm256_unpacklo_epi32(left, right), rows23 = _mm256_unpackhi_epi32(left, right);
    const __m128i top01 = _mm256_castsi256_si128(rows01), top23 = _mm256_castsi256_si128(rows23);
    const __m128i bottom01 = _mm256_extracti128_si256(rows01, 1), bottom23 = _mm256_extracti128_si256(rows23, 1);
    _mm_storel_epi64((__m128i *)to, top01);
    _mm_storeh_pd((double *)(to + stride), _mm_castsi128_pd(top01));
    _mm_storel_epi64((__m128i *)(to + 2 * stride), top23);
    _mm_storeh_pd((double *)(to + 3 * stride), _mm_castsi128_pd(top23));
    _mm_storel_epi64((__m128i *)(to + 4 * stride), bottom01);
    _mm_storeh_pd((double *)(to + 5 * stride), _mm_castsi128_pd(bottom01));
    _mm_storel_epi64((__m128i *)(to + 6 * stride), bottom23);
    _mm_storeh_pd((double *)(to + 7 * stride), _mm_castsi128_pd(bottom23));
    return 1;
}

/* Two output samples for each of `num` sums: h2v2_fancy_upsample, whose sums are 3 * near + far, or with near alone
 * h2v1_fancy_upsample. sums[-1] and sums[num] are there. */
AVX2 static void widen(const int16_t *sums, int num, int left_half, int right_half, int bits, uint8_t *to)
{
    const __m256i left_bias = _mm256_set1_epi16((short)left_half), right_bias = _mm256_set1_epi16((short)right_half);
    const __m128i shift = _mm_cvtsi32_si128(bits);
    for (int i = 0; i < num; i += 16) { /* writes behind the end: buffers have room */
        const __m256i at = _mm256_loadu_si256((const __m256i *)(sums + i));
        const __m256i before = _mm256_loadu_si256((const __m256i *)(sums + i - 1));
        const __m256i after = _mm256_loadu_si256((const __m256i *)(sums + i + 1));
        const __m256i thrice = _mm256_add_epi16(at, _mm256_add_epi16(at, at));
        const __m256i left = _mm256_srl_epi16(_mm256_add_epi16(_mm256_add_epi16(thrice, before), left_bias), shift);
        const __m256i right = _mm256_srl_epi16(_mm256_add_epi16(_mm256_add_epi16(thrice, after), right_bias), shift);
        _mm256_storeu_si256((__m256i *)(to + 2 * i), _mm256_or_si256(left, _mm256_slli_epi16(right, 8)));
    }
}

/* near * 3 + far, or near alone where there is no far; with the first and the last once more beside them. */
AVX2 static void add_rows(const uint8_t *near, const uint8_t *far, int num, int16_t *sums)
{
    for (int i = 0; i < num; i += 16) {
        __m256i sum = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(near + i)));
        if (far)
            sum = _mm256_add_epi16(_mm256_add_epi16(sum, _mm256_add_epi16(sum, sum)),
                                   _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(far + i))));
        _mm256_storeu_si256((__m256i *)(sums + i), sum);
    }
}

/* Bytes that may be read and written behind a row of samples, or of sums. */
#define ROW_SLACK 64

/* Of 32 pixels, planes → 96 bytes. */
AVX2 static inline void store_rgb(__m256i r, __m256i g, __m256i b, uint8_t *to)
{
#define EACH_HALF(...) _mm256_broadcastsi128_si256(_mm_setr_epi8(__VA_ARGS__))
    const __m256i r0 = EACH_HALF(0, -1, -1, 1, -1, -1, 2, -1, -1, 3, -1, -1, 4, -1, -1, 5);
    const __m256i g0 = EACH_HALF(-1, 0, -1, -1, 1, -1, -1, 2, -1, -1, 3, -1, -1, 4, -1, -1);
    const __m256i b0 = EACH_HALF(-1, -1, 0, -1, -1, 1, -1, -1, 2, -1, -1, 3, -1, -1, 4, -1);
    const __m256i r1 = EACH_HALF(-1, -1, 6, -1, -1, 7, -1, -1, 8, -1, -1, 9, -1, -1, 10, -1);
    const __m256i g1 = EACH_HALF(5, -1, -1, 6, -1, -1, 7, -1, -1, 8, -1, -1, 9, -1, -1, 10);
    const __m256i b1 = EACH_HALF(-1, 5, -1, -1, 6, -1, -1, 7, -1, -1, 8, -1, -1, 9, -1, -1);
    const __m256i r2 = EACH_HALF(-1, 11, -1, -1, 12, -1, -1, 13, -1, -1, 14, -1, -1, 15, -1, -1);
    const __m256i g2 = EACH_HALF(-1, -1, 11, -1, -1, 12, -1, -1, 13, -1, -1, 14, -1, -1, 15, -1);
    const __m256i b2 = EACH_HALF(10, -1, -1, 11, -1, -1, 12, -1, -1, 13, -1, -1, 14, -1, -1, 15);
#undef EACH_HALF
#define JOINED(number) \
    _mm256_or_si256(_mm256_or_si256(_mm256_shuffle_epi8(r, r##number), _mm256_shuffle_epi8(g, g##number)), \
                    _mm256_shuffle_epi8(b, b##number))
    /* Thirds of the first 16 pixels in the lower halves, of the others in the upper ones. */
    const __m256i first = JOINED(0), second = JOINED(1), third = JOINED(2);
#undef JOINED
    __m256i *out = (__m256i *)to;
    _mm256_storeu_si256(out, _mm256_permute2x128_si256(first, second, 0x20));
    _mm256_storeu_si256(out + 1, _mm256_blend_epi32(third, first, 0xF0));
    _mm256_storeu_si256(out + 2, _mm256_permute2x128_si256(second, third, 0x31));
}

/* What 16 pixels have beside y, in jdcolor.c: red = y + 1.402 cr, green = y - 0.34414 cb - 0.71414 cr, blue = y +
 * 1.772 cb, in 1/65536, each rounded. Factors of more than 1/2 are split, so that what is left fits in 16 bits. */
AVX2 static inline void colors_of(const uint8_t *cb, const uint8_t *cr, __m256i *red, __m256i *green, __m256i *blue)
{
    const __m256i middle = _mm256_set1_epi16(128), one = _mm256_set1_epi16(1);
    const __m256i u = _mm256_sub_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)cb)), middle);
    const __m256i v = _mm256_sub_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)cr)), middle);
    const __m256i u2 = _mm256_add_epi16(u, u), v2 = _mm256_add_epi16(v, v);
    *red = _mm256_add_epi16(
        v, _mm256_srai_epi16(_mm256_add_epi16(_mm256_mulhi_epi16(v2, _mm256_set1_epi16(26345)), one), 1));
    *blue = _mm256_add_epi16(
        u2, _mm256_srai_epi16(_mm256_add_epi16(_mm256_mulhi_epi16(u2, _mm256_set1_epi16(-14942)), one), 1));
    const __m256i factors = _mm256_set1_epi32((int)(18734u << 16 | (0xFFFFu & (unsigned)-22554)));
    const __m256i half = _mm256_set1_epi32(1 << 15);
    const __m256i low = _mm256_madd_epi16(_mm256_unpacklo_epi16(u, v), factors);
    const __m256i high = _mm256_madd_epi16(_mm256_unpackhi_epi16(u, v), factors);
    *green = _mm256_sub_epi16(
        _mm256_packs_epi32(_mm256_srai_epi32(_mm256_add_epi32(low, half), 16),
                           _mm256_srai_epi32(_mm256_add_epi32(high, half), 16)),
        v);
}

/* 32 bytes of y and of what is added to it, in the order of pixels. */
AVX2 static inline __m256i sums_of(__m256i y0, __m256i y1, __m256i add0, __m256i add1)
{
    const __m256i sums = _mm256_packus_epi16(_mm256_add_epi16(y0, add0), _mm256_add_epi16(y1, add1));
    return _mm256_permute4x64_epi64(sums, 0xD8);
}

/* 32 pixels of YCbCr. */
AVX2 static inline void convert_32(const uint8_t *luma, const uint8_t *cb, const uint8_t *cr, uint8_t *to)
{
    const __m256i y0 = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)luma));
    const __m256i y1 = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(luma + 16)));
    __m256i red0, green0, blue0, red1, green1, blue1;
    colors_of(cb, cr, &red0, &green0, &blue0);
    colors_of(cb + 16, cr + 16, &red1, &green1, &blue1);
    store_rgb(sums_of(y0, y1, red0, red1), sums_of(y0, y1, green0, green1), sums_of(y0, y1, blue0, blue1), to);
}

/* A row of RGB; of grays, where there is no chroma. Nothing is written behind its end. */
AVX2 static void convert_row(const uint8_t *luma, const uint8_t *cb, const uint8_t *cr, int width, uint8_t *to)
{
    uint8_t last[32 * CHANNELS];
    for (int x = 0; x < width; x += 32) {
        uint8_t *into = width - x < 32 ? last : to + x * CHANNELS;
        if (cb) {
            convert_32(luma + x, cb + x, cr + x, into);
        } else {
            const __m256i y = _mm256_loadu_si256((const __m256i *)(luma + x));
            store_rgb(y, y, y, into);
        }
        if (into == last)
            copy_row(to + x * CHANNELS, last, width - x);
    }
}
#endif
#endif
