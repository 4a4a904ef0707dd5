/* cv2.resize of 8-bit RGB: nearest and linear to the bit, cubic within 1 level (OpenCV computes most
 * columns with floats, and the last ones of a row in fixed point).
 *
 *     linear   rows are interpolated horizontally into 16 bits and kept for the next row of the result, then
 *              vertically; coefficients have 11 bits. Half of both sides: means of 2 x 2 pixels
 *     cubic    the same with 4 taps, its own definition: of the columns' sums (Q11) 6 bits of the fraction are
 *              kept, (sum + 16) >> 5, and rows are (sum + 2^16) >> 17
 *
 * resize_taps.h has the coefficients, resize_loops.h the loops over pixels, resize_simd.h the same ones for x86-64.
 */
#ifndef RAYPIPE_RESIZE_H
#define RAYPIPE_RESIZE_H

#include "image.h"
#include "resize_simd.h"
#include "resize_taps.h"

enum { NEAREST = 0, LINEAR = 1, CUBIC = 2 };

#define ROW_PADDING 16 /* elements that vector code may write behind a row of intermediate results */

/* Rows of intermediate results that are still of use: the source's row `number` is in rows[number % taps]. */
typedef struct {
    int num_taps;
    int numbers[MAX_TAPS];
    int16_t *rows[MAX_TAPS];
} Ring;

static const int16_t *cached_row(
    Ring *ring, int number, const Image *from, const Taps *columns, int width, const Scratch *scratch)
{
    const int at = number % ring->num_taps;
    if (ring->numbers[at] != number) {
        const uint8_t *row = from->pixels + number * from->stride;
        if (ring->num_taps == 2)
            columns_by_linear(row, from->width, columns, width, ring->rows[at], scratch->simd);
        else
            columns_by_cubic(row, from->width, columns, width, ring->rows[at], scratch->simd);
        ring->numbers[at] = number;
    }
    return ring->rows[at];
}

/* By 2 taps (linear) or 4 (cubic) in each direction. */
static int interpolate(const Image *from, const Image *to, int num_taps, Scratch *scratch)
{
    const Axis across = axis_of(from->width, to->width), down = axis_of(from->height, to->height);
    const size_t num = (size_t)to->width * CHANNELS;
    const size_t row_size = (num + ROW_PADDING + 1) / 2 * 2; /* what is behind it is aligned to 4 bytes */
    uint8_t *work = work_memory(scratch, num_taps * row_size * sizeof(int16_t) + (size_t)to->width * sizeof(Taps));
    if (!work)
        return NO_MEMORY;
    Ring ring = {.num_taps = num_taps};
    for (int k = 0; k < num_taps; k++) {
        ring.numbers[k] = -1;
        ring.rows[k] = (int16_t *)work + k * row_size;
    }
    Taps *columns = (Taps *)((int16_t *)work + num_taps * row_size);
    for (int x = 0; x < to->width; x++)
        columns[x] = num_taps == 2 ? linear_column(&across, x) : cubic_taps(&across, x);
    for (int y = 0; y < to->height; y++) {
        const Taps taps = num_taps == 2 ? linear_taps(&down, y) : cubic_taps(&down, y);
        const int16_t *rows[MAX_TAPS] = {NULL};
        uint8_t *out = to->pixels + y * to->stride;
        for (int k = 0; k < num_taps; k++) {
            const int number = bound(taps.at + k - (num_taps == 2 ? 0 : 1), from->height);
            rows[k] = cached_row(&ring, number, from, columns, to->width, scratch);
        }
        if (num_taps == 2)
            rows_by_linear(rows, taps.coefficients, (int)num, out, scratch->simd);
        else
            rows_by_cubic(rows, taps.coefficients, (int)num, out, scratch->simd);
    }
    return DONE;
}

/* Marks the rows that resize() reads, of an image of this size. 0: it reads all, or most of them. */
static int mark_rows(const int64_t *params, int height, uint8_t *rows)
{
    if (params[2] != LINEAR || params[0] < 1 || params[0] >= height / 2)
        return 0;
    const Axis down = axis_of(height, (int)params[0]);
    memset(rows, 0, (size_t)height);
    for (int y = 0; y < down.result; y++) {
        const int at = linear_taps(&down, y).at;
        rows[bound(at, height)] = rows[bound(at + 1, height)] = 1;
    }
    return 1;
}

/* Means of 2 x 2 pixels. */
static void halve(const Image *from, const Image *to)
{
    for (int y = 0; y < to->height; y++) {
        const uint8_t *row = from->pixels + (ptrdiff_t)y * 2 * from->stride;
        uint8_t *out = to->pixels + y * to->stride;
        for (int x = 0; x < to->width; x++)
            for (int c = 0; c < CHANNELS; c++) {
                const uint8_t *first = row + 2 * x * CHANNELS + c, *second = first + from->stride;
                const int sum = first[0] + first[CHANNELS] + second[0] + second[CHANNELS];
                out[x * CHANNELS + c] = (uint8_t)((sum + 2) >> 2);
            }
    }
}

static int resize_nearest(const Image *from, const Image *to, Scratch *scratch)
{
    const Axis across = axis_of(from->width, to->width), down = axis_of(from->height, to->height);
    int32_t *offsets = (int32_t *)work_memory(scratch, (size_t)to->width * sizeof(int32_t));
    if (!offsets)
        return NO_MEMORY;
    for (int x = 0; x < to->width; x++)
        offsets[x] = bound(floor_of(x * across.scale), from->width) * CHANNELS;
    for (int y = 0; y < to->height; y++) {
        const uint8_t *row = from->pixels + bound(floor_of(y * down.scale), from->height) * from->stride;
        uint8_t *out = to->pixels + y * to->stride;
        for (int x = 0; x < to->width; x++)
            for (int c = 0; c < CHANNELS; c++)
                out[x * CHANNELS + c] = row[offsets[x] + c];
    }
    return DONE;
}

/* height, width, interpolation */
static int resize(Image *image, const int64_t *params, Scratch *scratch)
{
    Image result;
    const int64_t interpolation = params[2];
    if (interpolation < NEAREST || interpolation > CUBIC)
        return BAD_PARAMS;
    if (params[0] == image->height && params[1] == image->width)
        return DONE;
    int status = new_image(&result, params[0], params[1], scratch);
    if (status != DONE)
        return status;
    const int is_half = image->height == 2 * result.height && image->width == 2 * result.width;
    if (interpolation == NEAREST)
        status = resize_nearest(image, &result, scratch);
    else if (is_half && interpolation == LINEAR)
        halve(image, &result);
    else
        status = interpolate(image, &result, interpolation == CUBIC ? 4 : 2, scratch);
    *image = result;
    return status;
}
#endif
