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

/* Constants of jidctint.c, in 1/8192. */
#define F_0_298 2446
#define F_0_390 3196
#define F_0_541 4433
#define F_0_765 6270
#define F_0_899 7373
#define F_1_175 9633
#define F_1_501 12299
#define F_1_847 15137
#define F_1_961 16069
#define F_2_053 16819
#define F_2_562 20995
#define F_3_072 25172

/* Factors are below 2^15, as 16-bit numbers of 32-bit lanes: exact, and half the work of a full multiplication. */
#define TIMES(x, factor) _mm256_madd_epi16(x, _mm256_set1_epi32((factor) & 0xFFFF))
#define ADD(x, y) _mm256_add_epi32(x, y)
#define SUB(x, y) _mm256_sub_epi32(x, y)

/* One dimension, of eight rows or columns at a time, with `shift` bits taken off. */
AVX2 static inline void inverse_dct_8(__m256i x[DCTSIZE], int shift)
{
    const __m256i half = _mm256_set1_epi32(1 << (shift - 1));
    const __m256i sum26 = TIMES(ADD(x[2], x[6]), F_0_541);
    const __m256i even2 = ADD(sum26, TIMES(x[6], -F_1_847)), even3 = ADD(sum26, TIMES(x[2], F_0_765));
    const __m256i even0 = ADD(_mm256_slli_epi32(ADD(x[0], x[4]), 13), half);
    const __m256i even1 = ADD(_mm256_slli_epi32(SUB(x[0], x[4]), 13), half);
    const __m256i a0 = ADD(even0, even3), a3 = SUB(even0, even3), a1 = ADD(even1, even2), a2 = SUB(even1, even2);

    const __m256i z3 = ADD(x[7], x[3]), z4 = ADD(x[5], x[1]), z5 = TIMES(ADD(z3, z4), F_1_175);
    const __m256i z1 = TIMES(ADD(x[7], x[1]), -F_0_899), z2 = TIMES(ADD(x[5], x[3]), -F_2_562);
    const __m256i w3 = ADD(TIMES(z3, -F_1_961), z5), w4 = ADD(TIMES(z4, -F_0_390), z5);
    const __m256i odd0 = ADD(TIMES(x[7], F_0_298), ADD(z1, w3)), odd1 = ADD(TIMES(x[5], F_2_053), ADD(z2, w4));
    const __m256i odd2 = ADD(TIMES(x[3], F_3_072), ADD(z2, w3)), odd3 = ADD(TIMES(x[1], F_1_501), ADD(z1, w4));

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

AVX2 static inline void transpose_8(__m256i x[DCTSIZE])
{
    __m256i pairs[DCTSIZE], fours[DCTSIZE];
    for (int i = 0; i < DCTSIZE; i += 2) {
        pairs[i] = _mm256_unpacklo_epi32(x[i], x[i + 1]);
        pairs[i + 1] = _mm256_unpackhi_epi32(x[i], x[i + 1]);
    }
    for (int i = 0; i < DCTSIZE; i += 4) {
        fours[i] = _mm256_unpacklo_epi64(pairs[i], pairs[i + 2]);
        fours[i + 1] = _mm256_unpackhi_epi64(pairs[i], pairs[i + 2]);
        fours[i + 2] = _mm256_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
        fours[i + 3] = _mm256_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        x[i] = _mm256_permute2x128_si256(fours[i], fours[i + 4], 0x20);
        x[i + 4] = _mm256_permute2x128_si256(fours[i], fours[i + 4], 0x31);
    }
}

/* The absolute values' bits, ones' complement, of what was in `seen` or is in x. */
AVX2 static inline __m256i seen_too(__m256i seen, const __m256i x[DCTSIZE])
{
    for (int i = 0; i < DCTSIZE; i++)
        seen = _mm256_or_si256(seen, _mm256_xor_si256(x[i], _mm256_srai_epi32(x[i], 31)));
    return seen;
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

/* The samples of a block, 8 x 8 bytes: jpeg_idct_islow. quants: in the order of coefficients. 0: refused. */
AVX2 static int inverse_dct(const int16_t *coefficients, const int16_t *quants, uint8_t *to, ptrdiff_t stride)
{
    const __m256i *all = (const __m256i *)coefficients;
    const __m256i but_first = _mm256_setr_epi16(0, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
    const __m256i others = _mm256_or_si256(_mm256_or_si256(_mm256_and_si256(all[0], but_first), all[1]),
                                           _mm256_or_si256(all[2], all[3]));
    if (_mm256_testz_si256(others, others))
        return flat_block(coefficients[0] * quants[0], to, stride);
    __m256i x[DCTSIZE];
    for (int i = 0; i < DCTSIZE; i++) {
        const __m256i row = _mm256_cvtepi16_epi32(_mm_load_si128((const __m128i *)(coefficients + i * DCTSIZE)));
        const __m256i steps = _mm256_cvtepi16_epi32(_mm_load_si128((const __m128i *)(quants + i * DCTSIZE)));
        x[i] = _mm256_madd_epi16(row, steps);
    }
    __m256i seen = seen_too(_mm256_setzero_si256(), x);
    inverse_dct_8(x, 11);
    seen = seen_too(seen, x);
    if (!_mm256_testz_si256(seen, _mm256_set1_epi32(~LARGEST_INPUT)))
        return 0;
    transpose_8(x);
    inverse_dct_8(x, 18);

    __m256i words[4], large = _mm256_setzero_si256();
    for (int i = 0; i < 4; i++) { /* columns 2i and 2i + 1, by lanes rows 0 to 3 and 4 to 7 */
        words[i] = _mm256_packs_epi32(x[2 * i], x[2 * i + 1]);
        large = _mm256_or_si256(large, _mm256_xor_si256(words[i], _mm256_srai_epi16(words[i], 15)));
        words[i] = _mm256_add_epi16(words[i], _mm256_set1_epi16(128));
    }
    if (!_mm256_testz_si256(large, _mm256_set1_epi16(~LARGEST_SAMPLE)))
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

/* Of 16 pixels, planes → 48 bytes. */
AVX2 static inline void store_rgb(__m128i r, __m128i g, __m128i b, uint8_t *to)
{
    const __m128i r0 = _mm_setr_epi8(0, -1, -1, 1, -1, -1, 2, -1, -1, 3, -1, -1, 4, -1, -1, 5);
    const __m128i g0 = _mm_setr_epi8(-1, 0, -1, -1, 1, -1, -1, 2, -1, -1, 3, -1, -1, 4, -1, -1);
    const __m128i b0 = _mm_setr_epi8(-1, -1, 0, -1, -1, 1, -1, -1, 2, -1, -1, 3, -1, -1, 4, -1);
    const __m128i r1 = _mm_setr_epi8(-1, -1, 6, -1, -1, 7, -1, -1, 8, -1, -1, 9, -1, -1, 10, -1);
    const __m128i g1 = _mm_setr_epi8(5, -1, -1, 6, -1, -1, 7, -1, -1, 8, -1, -1, 9, -1, -1, 10);
    const __m128i b1 = _mm_setr_epi8(-1, 5, -1, -1, 6, -1, -1, 7, -1, -1, 8, -1, -1, 9, -1, -1);
    const __m128i r2 = _mm_setr_epi8(-1, 11, -1, -1, 12, -1, -1, 13, -1, -1, 14, -1, -1, 15, -1, -1);
    const __m128i g2 = _mm_setr_epi8(-1, -1, 11, -1, -1, 12, -1, -1, 13, -1, -1, 14, -1, -1, 15, -1);
    const __m128i b2 = _mm_setr_epi8(10, -1, -1, 11, -1, -1, 12, -1, -1, 13, -1, -1, 14, -1, -1, 15);
#define JOINED(number) \
    _mm_or_si128(_mm_or_si128(_mm_shuffle_epi8(r, r##number), _mm_shuffle_epi8(g, g##number)), \
                 _mm_shuffle_epi8(b, b##number))
    _mm_storeu_si128((__m128i *)to, JOINED(0));
    _mm_storeu_si128((__m128i *)(to + 16), JOINED(1));
    _mm_storeu_si128((__m128i *)(to + 32), JOINED(2));
#undef JOINED
}

/* 16 pixels of YCbCr, jdcolor.c's: red = y + 1.402 cr, green = y - 0.34414 cb - 0.71414 cr, blue = y + 1.772 cb, in
 * 1/65536, each rounded. Factors of more than 1/2 are split, so that what is left fits in 16 bits. */
AVX2 static inline void convert_16(const uint8_t *luma, const uint8_t *cb, const uint8_t *cr, uint8_t *to)
{
    const __m256i middle = _mm256_set1_epi16(128), one = _mm256_set1_epi16(1);
    const __m256i y = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)luma));
    const __m256i u = _mm256_sub_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)cb)), middle);
    const __m256i v = _mm256_sub_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)cr)), middle);
    const __m256i u2 = _mm256_add_epi16(u, u), v2 = _mm256_add_epi16(v, v);
    const __m256i red = _mm256_add_epi16(
        v, _mm256_srai_epi16(_mm256_add_epi16(_mm256_mulhi_epi16(v2, _mm256_set1_epi16(26345)), one), 1));
    const __m256i blue = _mm256_add_epi16(
        u2, _mm256_srai_epi16(_mm256_add_epi16(_mm256_mulhi_epi16(u2, _mm256_set1_epi16(-14942)), one), 1));
    const __m256i factors = _mm256_set1_epi32((int)(18734u << 16 | (0xFFFFu & (unsigned)-22554)));
    const __m256i half = _mm256_set1_epi32(1 << 15);
    const __m256i low = _mm256_madd_epi16(_mm256_unpacklo_epi16(u, v), factors);
    const __m256i high = _mm256_madd_epi16(_mm256_unpackhi_epi16(u, v), factors);
    const __m256i green = _mm256_sub_epi16(
        _mm256_packs_epi32(_mm256_srai_epi32(_mm256_add_epi32(low, half), 16),
                           _mm256_srai_epi32(_mm256_add_epi32(high, half), 16)),
        v);
    /* By 64 bits: r's pixels 0 to 7, g's, r's 8 to 15, g's. */
    const __m256i rg = _mm256_packus_epi16(_mm256_add_epi16(y, red), _mm256_add_epi16(y, green));
    const __m256i bb = _mm256_packus_epi16(_mm256_add_epi16(y, blue), _mm256_add_epi16(y, blue));
    const __m256i r_g = _mm256_permute4x64_epi64(rg, 0xD8), b_b = _mm256_permute4x64_epi64(bb, 0xD8);
    store_rgb(_mm256_castsi256_si128(r_g), _mm256_extracti128_si256(r_g, 1), _mm256_castsi256_si128(b_b), to);
}

/* A row of RGB; of grays, where there is no chroma. Nothing is written behind its end. */
AVX2 static void convert_row(const uint8_t *luma, const uint8_t *cb, const uint8_t *cr, int width, uint8_t *to)
{
    uint8_t last[16 * CHANNELS];
    for (int x = 0; x < width; x += 16) {
        uint8_t *into = width - x < 16 ? last : to + x * CHANNELS;
        if (cb) {
            convert_16(luma + x, cb + x, cr + x, into);
        } else {
            const __m128i y = _mm_loadu_si128((const __m128i *)(luma + x));
            store_rgb(y, y, y, into);
        }
        if (into == last)
            memcpy(to + x * CHANNELS, last, (size_t)(width - x) * CHANNELS);
    }
}
#endif
#endif
