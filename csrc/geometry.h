/* Operations that move pixels: CROP, PAD, TURN, AFFINE, DROPOUT; resize.h has RESIZE. docs/transforms.md defines them. */
#ifndef RAYPIPE_GEOMETRY_H
#define RAYPIPE_GEOMETRY_H

#include "image.h"
#include "resize.h"

enum { BORDER_CONSTANT = 0, BORDER_REPLICATE = 1, BORDER_REFLECT = 2, BORDER_WRAP = 3, BORDER_REFLECT_101 = 4 };

/* Where a pixel at `at` of a side of `num` comes from; -1: from nowhere, it has the fill. */
static inline int64_t behind_border(int64_t at, int64_t num, int border)
{
    if (at >= 0 && at < num)
        return at;
    if (border == BORDER_CONSTANT)
        return -1;
    if (border == BORDER_REPLICATE)
        return at < 0 ? 0 : num - 1;
    if (num == 1)
        return 0;
    const int64_t period = border == BORDER_WRAP ? num : border == BORDER_REFLECT ? 2 * num : 2 * (num - 1);
    int64_t place = at % period;
    place += place < 0 ? period : 0;
    return place < num ? place : period - place - (border == BORDER_REFLECT);
}

static int is_fill(const int64_t *fill)
{
    for (int c = 0; c < CHANNELS; c++)
        if (fill[c] < 0 || fill[c] > 255)
            return 0;
    return 1;
}

/* top, left, height, width */
static int crop(Image *image, const int64_t *params, Scratch *scratch)
{
    if (scratch->num_params < 4)
        return BAD_PARAMS;
    const int64_t top = params[0], left = params[1], height = params[2], width = params[3];
    if (top < 0 || left < 0 || height < 1 || width < 1 || top > image->height || left > image->width ||
        height > image->height - top || width > image->width - left)
        return BAD_PARAMS;
    image->pixels += top * image->stride + left * CHANNELS;
    image->height = (int)height;
    image->width = (int)width;
    return DONE;
}

static void fill_row(uint8_t *row, int64_t num, const int64_t *fill)
{
    for (int64_t x = 0; x < num; x++)
        for (int c = 0; c < CHANNELS; c++)
            row[x * CHANNELS + c] = (uint8_t)fill[c];
}

/* top, bottom, left, right, border, r, g, b */
static int pad(Image *image, const int64_t *params, Scratch *scratch)
{
    Image result;
    if (scratch->num_params < 8)
        return BAD_PARAMS;
    for (int i = 0; i < 4; i++)
        if (params[i] < 0 || params[i] > MAX_SIDE)
            return BAD_PARAMS;
    const int64_t top = params[0], left = params[2], right = params[3], *fill = params + 5;
    if (params[4] < BORDER_CONSTANT || params[4] > BORDER_REFLECT_101 || !is_fill(fill))
        return BAD_PARAMS;
    const int border = (int)params[4];
    const int status = new_image(&result, image->height + top + params[1], image->width + left + right, scratch);
    if (status != DONE)
        return status;
    for (int y = 0; y < result.height; y++) {
        uint8_t *row = result.pixels + y * result.stride;
        const int64_t source_y = behind_border(y - top, image->height, border);
        if (source_y < 0) {
            fill_row(row, result.width, fill);
            continue;
        }
        const uint8_t *source = image->pixels + source_y * image->stride;
        memcpy(row + left * CHANNELS, source, (size_t)image->width * CHANNELS);
        for (int64_t x = 0; x < left + right; x++) {
            const int64_t at = x < left ? x : x + image->width;
            const int64_t source_x = behind_border(at - left, image->width, border);
            for (int c = 0; c < CHANNELS; c++)
                row[at * CHANNELS + c] = source_x < 0 ? (uint8_t)fill[c] : source[source_x * CHANNELS + c];
        }
    }
    *image = result;
    return DONE;
}

#ifdef HAS_X86_SIMD
/* The first pixels of a row that is turned round, five at a time; how many. Loads and stores stay in both rows. */
__attribute__((target("ssse3"))) static int reverse_ssse3(const uint8_t *from, int width, uint8_t *to)
{
    const __m128i order = _mm_setr_epi8(13, 14, 15, 10, 11, 12, 7, 8, 9, 4, 5, 6, 1, 2, 3, -1);
    int x = 0;
    for (; x + 6 <= width; x += 5) {
        const __m128i pixels = _mm_loadu_si128((const __m128i *)(from + (width - x) * CHANNELS - 16));
        _mm_storeu_si128((__m128i *)(to + x * CHANNELS), _mm_shuffle_epi8(pixels, order));
    }
    return x;
}
#endif

static void reverse_row(const uint8_t *from, int width, uint8_t *to, int simd)
{
    int x = 0;
#ifdef HAS_X86_SIMD
    if (simd >= SIMD_SSSE3)
        x = reverse_ssse3(from, width, to);
#endif
    (void)simd;
    for (; x < width; x++)
        memcpy(to + x * CHANNELS, from + (width - 1 - x) * CHANNELS, CHANNELS);
}

/* code: 4 transposes, then 2 turns upside down, then 1 turns left to right */
static int turn(Image *image, const int64_t *params, Scratch *scratch)
{
    Image result;
    if (scratch->num_params < 1 || params[0] < 0 || params[0] > 7)
        return BAD_PARAMS;
    const int transposes = params[0] & 4 ? 1 : 0, upside_down = params[0] & 2 ? 1 : 0, reverses = params[0] & 1;
    if (params[0] == 0)
        return DONE;
    const int height = transposes ? image->width : image->height, width = transposes ? image->height : image->width;
    const int status = new_image(&result, height, width, scratch);
    if (status != DONE)
        return status;
    for (int y = 0; y < height; y++) {
        const int source = upside_down ? height - 1 - y : y;
        uint8_t *row = result.pixels + y * result.stride;
        if (transposes) {
            const uint8_t *column = image->pixels + source * CHANNELS;
            for (int x = 0; x < width; x++)
                memcpy(row + x * CHANNELS, column + (reverses ? width - 1 - x : x) * image->stride, CHANNELS);
        } else if (reverses) {
            reverse_row(image->pixels + source * image->stride, width, row, scratch->simd);
        } else {
            memcpy(row, image->pixels + source * image->stride, (size_t)width * CHANNELS);
        }
    }
    *image = result;
    return DONE;
}

typedef struct {
    const Image *image;
    const int64_t *fill;
    int border;
} Surface;

static inline void pixel_of(const Surface *surface, int64_t x, int64_t y, int *pixel)
{
    const int64_t column = behind_border(x, surface->image->width, surface->border);
    const int64_t row = behind_border(y, surface->image->height, surface->border);
    for (int c = 0; c < CHANNELS; c++)
        pixel[c] = column < 0 || row < 0
                       ? (int)surface->fill[c]
                       : surface->image->pixels[row * surface->image->stride + column * CHANNELS + c];
}

/* the matrix of the inverse in Q32 (a, b, c, d, e, f), interpolation, border, r, g, b */
static int affine(Image *image, const int64_t *params, Scratch *scratch)
{
    Image result;
    if (scratch->num_params < 11)
        return BAD_PARAMS;
    for (int i = 0; i < 6; i++) { /* so that no sum overflows */
        const int64_t limit = (int64_t)1 << (i % 3 == 2 ? 52 : 44);
        if (params[i] < -limit || params[i] > limit)
            return BAD_PARAMS;
    }
    if ((params[6] != NEAREST && params[6] != LINEAR) || params[7] < BORDER_CONSTANT ||
        params[7] > BORDER_REFLECT_101 || !is_fill(params + 8))
        return BAD_PARAMS;
    const int status = new_image(&result, image->height, image->width, scratch);
    if (status != DONE)
        return status;
    const Surface surface = {image, params + 8, (int)params[7]};
    const int64_t half = (int64_t)1 << 31;
    for (int Y = 0; Y < result.height; Y++) {
        uint8_t *out = result.pixels + Y * result.stride;
        for (int X = 0; X < result.width; X++, out += CHANNELS) {
            const int64_t x = params[0] * X + params[1] * Y + params[2], y = params[3] * X + params[4] * Y + params[5];
            int a[CHANNELS], b[CHANNELS], c[CHANNELS], d[CHANNELS];
            if (params[6] == NEAREST) {
                pixel_of(&surface, (x + half) >> 32, (y + half) >> 32, a);
                for (int i = 0; i < CHANNELS; i++)
                    out[i] = (uint8_t)a[i];
                continue;
            }
            const int64_t left = x >> 32, top = y >> 32;
            const int right_part = (int)(x >> 22 & 1023), lower_part = (int)(y >> 22 & 1023);
            if (left >= 0 && top >= 0 && left + 1 < image->width && top + 1 < image->height) {
                const uint8_t *at = image->pixels + top * image->stride + left * CHANNELS;
                for (int i = 0; i < CHANNELS; i++) {
                    a[i] = at[i];
                    b[i] = at[CHANNELS + i];
                    c[i] = at[image->stride + i];
                    d[i] = at[image->stride + CHANNELS + i];
                }
            } else {
                pixel_of(&surface, left, top, a);
                pixel_of(&surface, left + 1, top, b);
                pixel_of(&surface, left, top + 1, c);
                pixel_of(&surface, left + 1, top + 1, d);
            }
            for (int i = 0; i < CHANNELS; i++) {
                const int upper = a[i] * (1024 - right_part) + b[i] * right_part;
                const int lower = c[i] * (1024 - right_part) + d[i] * right_part;
                out[i] = (uint8_t)((upper * (1024 - lower_part) + lower * lower_part + (1 << 19)) >> 20);
            }
        }
    }
    *image = result;
    return DONE;
}

static int64_t within(int64_t at, int64_t end) { return at < 0 ? 0 : at > end ? end : at; }

/* r, g, b, number of boxes, (top, left, bottom, right) of each */
static int dropout(Image *image, const int64_t *params, Scratch *scratch)
{
    if (scratch->num_params < 4 || !is_fill(params) || params[3] < 0 || params[3] > (scratch->num_params - 4) / 4)
        return BAD_PARAMS;
    const int status = make_writable(image, scratch);
    if (status != DONE)
        return status;
    for (int64_t number = 0; number < params[3]; number++) {
        const int64_t *box = params + 4 + 4 * number;
        const int64_t left = within(box[1], image->width), right = within(box[3], image->width);
        for (int64_t y = within(box[0], image->height); y < within(box[2], image->height); y++)
            fill_row(image->pixels + y * image->stride + left * CHANNELS, right - left, params);
    }
    return DONE;
}
#endif
