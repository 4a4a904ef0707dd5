/* The CRC-32 of zlib, PNG and gzip, at the speed of memory where the processor multiplies without carry. */
#ifndef RAYPIPE_CRC32_H
#define RAYPIPE_CRC32_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define HAS_CRC_FOLDING 1
#endif

#define CRC_POLYNOMIAL 0xEDB88320u /* reflected */

static uint32_t crc_table[8][256];

/* Once, before the first checksum. */
static void make_crc_tables(void)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? CRC_POLYNOMIAL : 0);
        crc_table[0][byte] = crc;
    }
    for (int i = 1; i < 8; i++)
        for (int byte = 0; byte < 256; byte++)
            crc_table[i][byte] = crc_table[i - 1][byte] >> 8 ^ crc_table[0][crc_table[i - 1][byte] & 255];
}

/* `crc` is the state, which starts with all bits set and is inverted at the end. */
static uint32_t crc_by_tables(uint32_t crc, const uint8_t *data, size_t size)
{
    for (; size >= 8; data += 8, size -= 8) {
        crc ^= data[0] | (uint32_t)data[1] << 8 | (uint32_t)data[2] << 16 | (uint32_t)data[3] << 24;
        crc = crc_table[7][crc & 255] ^ crc_table[6][crc >> 8 & 255] ^ crc_table[5][crc >> 16 & 255] ^
              crc_table[4][crc >> 24] ^ crc_table[3][data[4]] ^ crc_table[2][data[5]] ^ crc_table[1][data[6]] ^
              crc_table[0][data[7]];
    }
    for (; size; data++, size--)
        crc = crc >> 8 ^ crc_table[0][(crc ^ *data) & 255];
    return crc;
}

#ifdef HAS_CRC_FOLDING
/* x^n modulo the polynomial, reflected, for a fold over 512 and over 128 bits: "Fast CRC Computation for Generic
 * Polynomials Using PCLMULQDQ Instruction", Intel 2009. */
#define FOLD_512 0x01c6e41596, 0x0154442bd4
#define FOLD_128 0x00ccaa009e, 0x01751997d0

__attribute__((target("pclmul,sse4.1"))) static inline __m128i fold(__m128i value, __m128i by, __m128i next)
{
    return _mm_xor_si128(
        next, _mm_xor_si128(_mm_clmulepi64_si128(value, by, 0x00), _mm_clmulepi64_si128(value, by, 0x11)));
}

/* Of at least 64 bytes. Folded to 16 bytes that have the checksum of all of them. */
__attribute__((target("pclmul,sse4.1"))) static uint32_t crc_by_folding(uint32_t crc, const uint8_t *data, size_t size)
{
    const __m128i by_512 = _mm_set_epi64x(FOLD_512), by_128 = _mm_set_epi64x(FOLD_128);
    const __m128i *blocks = (const __m128i *)data;
    __m128i lane[4];
    for (int i = 0; i < 4; i++)
        lane[i] = _mm_loadu_si128(blocks++);
    lane[0] = _mm_xor_si128(lane[0], _mm_cvtsi32_si128((int)crc));
    for (size -= 64; size >= 64; size -= 64)
        for (int i = 0; i < 4; i++)
            lane[i] = fold(lane[i], by_512, _mm_loadu_si128(blocks++));
    for (int i = 1; i < 4; i++)
        lane[0] = fold(lane[0], by_128, lane[i]);
    for (; size >= 16; size -= 16)
        lane[0] = fold(lane[0], by_128, _mm_loadu_si128(blocks++));
    uint8_t rest[16];
    _mm_storeu_si128((__m128i *)rest, lane[0]);
    return crc_by_tables(crc_by_tables(0, rest, 16), (const uint8_t *)blocks, size);
}
#endif

/* The state behind more bytes. */
static uint32_t crc_of(uint32_t crc, const uint8_t *data, size_t size)
{
#ifdef HAS_CRC_FOLDING
    if (size >= 64 && __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1"))
        return crc_by_folding(crc, data, size);
#endif
    return crc_by_tables(crc, data, size);
}
#endif
