/* The loops of a resize, over a row of the source and over rows of intermediate results: they define its arithmetic.
 * resize_simd.h has the same by vector instructions. */
#ifndef RAYPIPE_RESIZE_LOOPS_H
#define RAYPIPE_RESIZE_LOOPS_H

#include "resize_taps.h"

/* A row of the source, columns from `first` on, as 15 bits: OpenCV drops the others before it goes on. */
static void linear_columns(const uint8_t *row, int second, const Taps *columns, int first, int width, int16_t *to)
{
    for (int x = first; x < width; x++) {
        const uint8_t *pixel = row + columns[x].at * CHANNELS;
        const int a = columns[x].coefficients[0], b = columns[x].coefficients[1];
        for (int c = 0; c < CHANNELS; c++)
            to[x * CHANNELS + c] = (int16_t)((pixel[c] * a + pixel[second + c] * b) >> 4);
    }
}

static void linear_rows(const int16_t *above, const int16_t *below, int a, int b, int first, int num, uint8_t *to)
{
    for (int i = first; i < num; i++)
        to[i] = (uint8_t)(((above[i] * a >> 16) + (below[i] * b >> 16) + 2) >> 2);
}

/* Intermediate results of cubic lose 5 of their bits, rounded: 16 bits hold what overshoots, 19,400 at most. */
static void cubic_columns(const uint8_t *row, int source, const Taps *columns, int first, int end, int16_t *to)
{
    for (int x = first; x < end; x++)
        for (int c = 0; c < CHANNELS; c++) {
            int sum = 0;
            for (int k = 0; k < 4; k++)
                sum += row[bound(columns[x].at - 1 + k, source) * CHANNELS + c] * columns[x].coefficients[k];
            to[x * CHANNELS + c] = (int16_t)((sum + 16) >> 5);
        }
}

static void cubic_rows(const int16_t *const *rows, const int16_t *coefficients, int first, int num, uint8_t *to)
{
    for (int i = first; i < num; i++) {
        int sum = 1 << 16;
        for (int k = 0; k < 4; k++)
            sum += rows[k][i] * coefficients[k];
        to[i] = clip(sum >> 17);
    }
}
#endif
