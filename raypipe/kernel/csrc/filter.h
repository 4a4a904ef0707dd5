/* BLUR and FILTER: weighted sums of a pixel's surroundings, by coefficients in Q14. docs/transforms.md defines them. */
#ifndef RAYPIPE_FILTER_H
#define RAYPIPE_FILTER_H

#include "geometry.h"
#include "image.h"
#include "versions.h"

#define MAX_RADIUS 32
#define MAX_FILTER 15
#define Q14 16384

/* A row with `radius` pixels more on each side, by the border's rule; fill is black. */
static void pad_row(const uint8_t *row, int width, int radius, int border, uint8_t *to)
{
    copy_row(to + radius * CHANNELS, row, width);
    for (int x = 0; x < 2 * radius; x++) {
        const int at = x < radius ? x : x + width;
        const int64_t source = border_at(at - radius, width, border);
        for (int c = 0; c < CHANNELS; c++)
            to[at * CHANNELS + c] = source < 0 ? 0 : row[source * CHANNELS + c];
    }
}

/* (sum of x * c + 32) >> 6, which is Q8: no more than 255 * 256. */
INLINE void blur_columns_body(const uint8_t *padded, const int32_t *coefficients, int radius, int num, uint16_t *to)
{
    enum { BLOCK_BYTES = 512 };
    int32_t block[BLOCK_BYTES], *restrict sums = block; /* a pointer, as in blend_base */
    for (int start = 0; start < num; start += BLOCK_BYTES) {
        const int count = num - start < BLOCK_BYTES ? num - start : BLOCK_BYTES;
        const uint8_t *middle = padded + start + radius * CHANNELS;
        for (int i = 0; i < count; i++)
            sums[i] = middle[i] * coefficients[0] + 32;
        for (int k = 1; k <= radius; k++) {
            const uint8_t *before = middle - k * CHANNELS, *behind = middle + k * CHANNELS;
            for (int i = 0; i < count; i++)
                sums[i] += (before[i] + behind[i]) * coefficients[k];
        }
        for (int i = 0; i < count; i++)
            to[start + i] = (uint16_t)(sums[i] >> 6);
    }
}
VERSIONS(blur_columns, (const uint8_t *padded, const int32_t *coefficients, int radius, int num, uint16_t *to),
         (padded, coefficients, radius, num, to))

/* (sum of h * c + 2^21) >> 22; rows[0] is the middle one, rows[2k - 1] and rows[2k] are k above and below it. */
INLINE void blur_rows_body(uint16_t *const *rows, const int32_t *coefficients, int radius, int num, uint8_t *to)
{
    enum { BLOCK_BYTES = 512 };
    int32_t block[BLOCK_BYTES], *restrict sums = block; /* a pointer, as in blend_base */
    for (int start = 0; start < num; start += BLOCK_BYTES) {
        const int count = num - start < BLOCK_BYTES ? num - start : BLOCK_BYTES;
        for (int i = 0; i < count; i++)
            sums[i] = rows[0][start + i] * coefficients[0] + (1 << 21);
        for (int k = 1; k <= radius; k++) {
            const uint16_t *above = rows[2 * k - 1] + start, *below = rows[2 * k] + start;
            for (int i = 0; i < count; i++)
                sums[i] += (above[i] + below[i]) * coefficients[k];
        }
        for (int i = 0; i < count; i++)
            to[start + i] = (uint8_t)(sums[i] >> 22);
    }
}
VERSIONS(blur_rows, (uint16_t * const *rows, const int32_t *coefficients, int radius, int num, uint8_t *to),
         (rows, coefficients, radius, num, to))

/* radius, border, the coefficients of the middle and to each side of it: with both sides they add up to 1 */
static int blur(Image *image, const int64_t *params, Scratch *scratch)
{
    Image result;
    int32_t coefficients[MAX_RADIUS + 1];
    if (params[0] < 0 || params[0] > MAX_RADIUS || params[1] < BORDER_CONSTANT || params[1] > BORDER_REFLECT_101)
        return BAD_PARAMS;
    const int radius = (int)params[0], border = (int)params[1], num_rows = 2 * radius + 1;
    int64_t total = 0;
    for (int k = 0; k <= radius; k++) {
        if (params[2 + k] < 0 || params[2 + k] > Q14)
            return BAD_PARAMS;
        coefficients[k] = (int32_t)params[2 + k];
        total += coefficients[k] * (k ? 2 : 1);
    }
    if (total != Q14)
        return BAD_PARAMS;
    const int status = new_image(&result, image->height, image->width, scratch);
    if (status != DONE)
        return status;
    const size_t num = (size_t)image->width * CHANNELS, padded_bytes = (num + 2 * (size_t)radius * CHANNELS + 63) / 64 * 64;
    uint8_t *work = work_memory(scratch, padded_bytes + ((size_t)num_rows + 1) * num * sizeof(uint16_t));
    if (!work)
        return NO_MEMORY;
    /* Rows that are blurred across: that of place n at n % num_rows, as long as nothing else is there. */
    uint16_t *blurred = (uint16_t *)(work + padded_bytes), *rows[2 * MAX_RADIUS + 1];
    int64_t numbers[2 * MAX_RADIUS + 1];
    for (int i = 0; i < num_rows; i++)
        numbers[i] = INT64_MIN;
    uint16_t *black = blurred + (size_t)num_rows * num;
    memset(black, 0, num * sizeof *black);
    for (int y = 0; y < image->height; y++) {
        for (int i = 0; i < num_rows; i++) {
            const int k = (i + 1) / 2;
            const int64_t place = y + (i % 2 ? -k : k); /* not yet put inside, so that num_rows in a row differ */
            const int64_t source = border_at(place, image->height, border);
            if (source < 0) {
                rows[i] = black;
                continue;
            }
            const int at = (int)((place + num_rows) % num_rows);
            rows[i] = blurred + (size_t)at * num;
            if (numbers[at] != place) {
                pad_row(image->pixels + source * image->stride, image->width, radius, border, work);
                blur_columns(scratch->simd, work, coefficients, radius, (int)num, rows[i]);
                numbers[at] = place;
            }
        }
        blur_rows(scratch->simd, rows, coefficients, radius, (int)num, result.pixels + y * result.stride);
    }
    *image = result;
    return DONE;
}

typedef struct {
    int row, column; /* in the filter */
    int32_t coefficient;
} Tap;

INLINE void add_tap_body(const uint8_t *from, int32_t coefficient, int num, int32_t *sums)
{
    for (int i = 0; i < num; i++)
        sums[i] += from[i] * coefficient;
}
VERSIONS(add_tap, (const uint8_t *from, int32_t coefficient, int num, int32_t *sums), (from, coefficient, num, sums))

INLINE void round_sums_body(const int32_t *sums, int num, uint8_t *to)
{
    for (int i = 0; i < num; i++) {
        const int32_t value = (sums[i] + (1 << 13)) >> 14;
        to[i] = (uint8_t)(value < 0 ? 0 : value > 255 ? 255 : value);
    }
}
VERSIONS(round_sums, (const int32_t *sums, int num, uint8_t *to), (sums, num, to))

/* side, border, side * side coefficients, row by row */
static int filter(Image *image, const int64_t *params, Scratch *scratch)
{
    Image result;
    Tap taps[MAX_FILTER * MAX_FILTER];
    if (params[0] < 1 || params[0] > MAX_FILTER || params[0] % 2 == 0 || params[1] < BORDER_CONSTANT ||
        params[1] > BORDER_REFLECT_101)
        return BAD_PARAMS;
    const int side = (int)params[0], radius = side / 2, border = (int)params[1];
    int num_taps = 0;
    for (int i = 0; i < side * side; i++) {
        if (params[2 + i] < -Q14 || params[2 + i] > Q14)
            return BAD_PARAMS;
        if (params[2 + i])
            taps[num_taps++] = (Tap){i / side, i % side, (int32_t)params[2 + i]};
    }
    const int status = new_image(&result, image->height, image->width, scratch);
    if (status != DONE)
        return status;
    const size_t num = (size_t)image->width * CHANNELS, row_bytes = num + 2 * (size_t)radius * CHANNELS;
    const size_t padded_bytes = (row_bytes * ((size_t)image->height + 2 * (size_t)radius) + 63) / 64 * 64;
    uint8_t *padded = work_memory(scratch, padded_bytes + num * sizeof(int32_t));
    if (!padded)
        return NO_MEMORY;
    int32_t *sums = (int32_t *)(padded + padded_bytes);
    for (int y = 0; y < image->height + 2 * radius; y++) {
        const int64_t source = border_at(y - radius, image->height, border);
        if (source < 0)
            memset(padded + (size_t)y * row_bytes, 0, row_bytes);
        else
            pad_row(image->pixels + source * image->stride, image->width, radius, border, padded + (size_t)y * row_bytes);
    }
    for (int y = 0; y < image->height; y++) {
        memset(sums, 0, num * sizeof *sums);
        for (int i = 0; i < num_taps; i++)
            add_tap(scratch->simd, padded + (size_t)(y + taps[i].row) * row_bytes + taps[i].column * CHANNELS,
                    taps[i].coefficient, (int)num, sums);
        round_sums(scratch->simd, sums, (int)num, result.pixels + y * result.stride);
    }
    *image = result;
    return DONE;
}
#endif
