/* Operations that move pixels: crop, pad, turn, affine, and dropout's boxes. Resizing is in resize.h.
 *
 * What each means is in raypipe/kernel/README.md, and in raypipe/kernel/reference.py by NumPy and OpenCV.
 */
#ifndef RAYPIPE_GEOMETRY_H
#define RAYPIPE_GEOMETRY_H

#include "image.h"
#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#endif

/* As cv2 numbers them. */
enum { BORDER_CONSTANT = 0, BORDER_REPLICATE, BORDER_REFLECT, BORDER_WRAP, BORDER_REFLECT_101 };

static inline int is_border(int64_t border) { return border >= BORDER_CONSTANT && border <= BORDER_REFLECT_101; }

/* Where a pixel outside of a side comes from; -1: it has the constant color. cv2.borderInterpolate, without loops. */
static inline int border_at(int64_t at, int side, int border)
{
    if (at >= 0 && at < side)
        return (int)at;
    if (border == BORDER_CONSTANT)
        return -1;
    if (border == BORDER_REPLICATE)
        return at < 0 ? 0 : side - 1;
    if (side == 1)
        return 0;
    const int64_t period = border == BORDER_WRAP ? side : 2 * (int64_t)side - (border == BORDER_REFLECT ? 0 : 2);
    at %= period;
    if (at < 0)
        at += period;
    return (int)(at < side ? at : border == BORDER_REFLECT ? period - 1 - at : period - at);
}

/* 0: not three bytes. */
static inline int read_color(const int64_t *params, uint8_t *color)
{
    for (int c = 0; c < CHANNELS; c++) {
        if (params[c] < 0 || params[c] > 255)
            return 0;
        color[c] = (uint8_t)params[c];
    }
    return 1;
}

static inline void fill(uint8_t *to, int64_t num, const uint8_t *color)
{
    for (int64_t x = 0; x < num; x++)
        for (int c = 0; c < CHANNELS; c++)
            to[x * CHANNELS + c] = color[c];
}

static inline int is_box(const int64_t *box, int64_t height, int64_t width)
{
    return box[0] >= 0 && box[1] >= 0 && box[2] >= 1 && box[3] >= 1 && box[0] < height && box[1] < width &&
           box[2] <= height - box[0] && box[3] <= width - box[1];
}

/* top, left, height, width: a view */
static int crop(Image *image, const int64_t *params, Scratch *scratch)
{
    (void)scratch;
    if (!is_box(params, image->height, image->width))
        return BAD_PARAMS;
    image->pixels += params[0] * image->stride + params[1] * CHANNELS;
    image->height = (int)params[2];
    image->width = (int)params[3];
    return DONE;
}

/* top, bottom, left, right, border, r, g, b */
static int pad(Image *image, const int64_t *params, Scratch *scratch)
{
    Image result;
    uint8_t color[CHANNELS];
    for (int side = 0; side < 4; side++)
        if (params[side] < 0 || params[side] > MAX_SIDE)
            return BAD_PARAMS;
    if (!is_border(params[4]) || !read_color(params + 5, color))
        return BAD_PARAMS;
    const int top = (int)params[0], left = (int)params[2], border = (int)params[4];
    const int status =
        new_image(&result, image->height + params[0] + params[1], image->width + params[2] + params[3], scratch);
    if (status != DONE)
        return status;
    const int right = left + image->width, num_behind = result.width - right;
    uint8_t *row = work_memory(scratch, (size_t)result.width * CHANNELS);
    if (!row)
        return NO_MEMORY;
    fill(row, result.width, color);
    for (int y = 0; y < result.height; y++) {
        uint8_t *to = result.pixels + y * result.stride;
        const int from_row = border_at(y - top, image->height, border);
        if (from_row < 0) {
            copy_row(to, row, result.width);
            continue;
        }
        const uint8_t *from = image->pixels + from_row * image->stride;
        copy_row(to + left * CHANNELS, from, image->width);
        if (border == BORDER_CONSTANT) {
            copy_row(to, row, left);
            copy_row(to + right * CHANNELS, row, num_behind);
            continue;
        }
        for (int x = left ? 0 : right; x < result.width; x = x + 1 == left ? right : x + 1)
            memcpy(to + x * CHANNELS, from + border_at(x - left, image->width, border) * CHANNELS, CHANNELS);
    }
    *image = result;
    return DONE;
}

static void reverse_row(const uint8_t *from, int width, uint8_t *to)
{
    for (int x = 0; x < width; x++)
        memcpy(to + x * CHANNELS, from + (width - 1 - x) * CHANNELS, CHANNELS);
}

#if defined(__x86_64__) && defined(__GNUC__)
/* Five pixels at a time; the sixteenth byte is another one's, which the next store puts right. */
__attribute__((target("ssse3"))) static void reverse_row_ssse3(const uint8_t *from, int width, uint8_t *to)
{
    const __m128i order = _mm_setr_epi8(13, 14, 15, 10, 11, 12, 7, 8, 9, 4, 5, 6, 1, 2, 3, 0);
    int x = 0;
    for (; x + 6 <= width; x += 5) {
        const uint8_t *last = from + (width - x) * CHANNELS; /* the end of the five */
        const __m128i pixels = _mm_loadu_si128((const __m128i *)(last - 16));
        _mm_storeu_si128((__m128i *)(to + x * CHANNELS), _mm_shuffle_epi8(pixels, order));
    }
    reverse_row(from, width - x, to + x * CHANNELS);
}
#endif

static void reverse_columns(const uint8_t *from, int width, uint8_t *to, int simd)
{
#if defined(__x86_64__) && defined(__GNUC__)
    if (simd >= SIMD_SSSE3) {
        reverse_row_ssse3(from, width, to);
        return;
    }
#endif
    (void)simd;
    reverse_row(from, width, to);
}

#define TILE 32 /* pixels: rows and columns of a tile stay in the cache of the first level */

/* The transpose, of which rows or columns are reversed. */
static void transpose(const Image *from, const Image *to, int reverse_rows, int reverse_cols)
{
    for (int top = 0; top < to->height; top += TILE)
        for (int left = 0; left < to->width; left += TILE)
            for (int y = top; y < to->height && y < top + TILE; y++) {
                const int column = reverse_rows ? to->height - 1 - y : y;
                uint8_t *out = to->pixels + y * to->stride;
                for (int x = left; x < to->width && x < left + TILE; x++) {
                    const int row = reverse_cols ? to->width - 1 - x : x;
                    memcpy(out + x * CHANNELS, from->pixels + row * from->stride + column * CHANNELS, CHANNELS);
                }
            }
}

/* code: 4 transpose, then 2 upside down, then 1 the columns */
static int turn(Image *image, const int64_t *params, Scratch *scratch)
{
    Image result;
    if (params[0] < 0 || params[0] > 7)
        return BAD_PARAMS;
    const int code = (int)params[0], is_transposed = code & 4;
    if (code == 0)
        return DONE;
    const int status = new_image(&result, is_transposed ? image->width : image->height,
                                 is_transposed ? image->height : image->width, scratch);
    if (status != DONE)
        return status;
    if (is_transposed) {
        transpose(image, &result, code & 2, code & 1);
    } else {
        for (int y = 0; y < result.height; y++) {
            const uint8_t *from = image->pixels + (code & 2 ? image->height - 1 - y : y) * image->stride;
            uint8_t *to = result.pixels + y * result.stride;
            if (code & 1)
                reverse_columns(from, image->width, to, scratch->simd);
            else
                copy_row(to, from, image->width);
        }
    }
    *image = result;
    return DONE;
}

typedef struct {
    const Image *image;
    int border;
    uint8_t color[CHANNELS];
} Surface;

/* A pixel of an image without end. */
static inline const uint8_t *pixel_at(const Surface *surface, int64_t x, int64_t y)
{
    const int column = border_at(x, surface->image->width, surface->border);
    const int row = border_at(y, surface->image->height, surface->border);
    if (row < 0 || column < 0)
        return surface->color;
    return surface->image->pixels + row * surface->image->stride + column * CHANNELS;
}

/* Its color between pixels: x and y in Q32, of which 10 bits of the fraction count. */
static inline void interpolate_at(const Surface *surface, int64_t x, int64_t y, uint8_t *to)
{
    const int64_t column = x >> 32, row = y >> 32;
    const int fx = (int)(x >> 22 & 1023), fy = (int)(y >> 22 & 1023);
    const Image *image = surface->image;
    const uint8_t *p00, *p01, *p10, *p11;
    if (column >= 0 && row >= 0 && column + 1 < image->width && row + 1 < image->height) {
        p00 = image->pixels + row * image->stride + column * CHANNELS;
        p01 = p00 + CHANNELS;
        p10 = p00 + image->stride;
        p11 = p10 + CHANNELS;
    } else if (surface->border == BORDER_CONSTANT &&
               (column < -1 || row < -1 || column >= image->width || row >= image->height)) {
        memcpy(to, surface->color, CHANNELS);
        return;
    } else {
        p00 = pixel_at(surface, column, row);
        p01 = pixel_at(surface, column + 1, row);
        p10 = pixel_at(surface, column, row + 1);
        p11 = pixel_at(surface, column + 1, row + 1);
    }
    const int w11 = fx * fy, w01 = (fx << 10) - w11, w10 = (fy << 10) - w11, w00 = (1 << 20) - w11 - w01 - w10;
    for (int c = 0; c < CHANNELS; c++)
        to[c] = (uint8_t)((p00[c] * w00 + p01[c] * w01 + p10[c] * w10 + p11[c] * w11 + (1 << 19)) >> 20);
}

/* Pixels of a row: x and y are those of its first, and grow by dx and dy from one to the next. */
static void interpolate_row(const Surface *surface, uint64_t x, uint64_t y, uint64_t dx, uint64_t dy, int width,
                            uint8_t *to)
{
    for (int column = 0; column < width; column++, to += CHANNELS) {
        interpolate_at(surface, (int64_t)x, (int64_t)y, to);
        x += dx;
        y += dy;
    }
}

#if defined(__x86_64__) && defined(__GNUC__)
/* The same. Weights are products, so rows of the image are summed first, and then the two sums, without rounding.
 * A load of 8 bytes has the two neighbors and the start of a third pixel, which is to be one of the row, too. */
__attribute__((target("avx2"))) static void interpolate_row_avx2(const Surface *surface, uint64_t x, uint64_t y,
                                                                 uint64_t dx, uint64_t dy, int width, uint8_t *to)
{
    const Image *image = surface->image;
    const uint64_t num_columns = image->width > 2 ? (uint64_t)image->width - 2 : 0;
    const uint64_t num_rows = image->height > 1 ? (uint64_t)image->height - 1 : 0;
    /* a byte of a pixel beside the same one of its neighbor, as words */
    const __m256i neighbors = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, -1, 3, -1, 1, -1, 4, -1, 2, -1, 5, -1, -1, -1, -1, -1));
    const __m128i half = _mm_set1_epi32(1 << 19);
    const __m128i lowest = _mm_setr_epi8(0, 4, 8, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
    for (int column = 0; column < width; column++, to += CHANNELS, x += dx, y += dy) {
        const uint64_t from_column = (uint64_t)((int64_t)x >> 32), from_row = (uint64_t)((int64_t)y >> 32);
        if (from_column >= num_columns || from_row >= num_rows) {
            interpolate_at(surface, (int64_t)x, (int64_t)y, to);
            continue;
        }
        const int fx = (int)(x >> 22 & 1023), fy = (int)(y >> 22 & 1023);
        const uint8_t *upper = image->pixels + (int64_t)from_row * image->stride + (int64_t)from_column * CHANNELS;
        const __m256i bytes =
            _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadl_epi64((const __m128i *)upper)),
                                    _mm_loadl_epi64((const __m128i *)(upper + image->stride)), 1);
        const __m256i sums = _mm256_madd_epi16(_mm256_shuffle_epi8(bytes, neighbors),
                                               _mm256_set1_epi32(fx << 16 | (1024 - fx)));
        const __m128i sum = _mm_add_epi32(_mm_mullo_epi32(_mm256_castsi256_si128(sums), _mm_set1_epi32(1024 - fy)),
                                          _mm_mullo_epi32(_mm256_extracti128_si256(sums, 1), _mm_set1_epi32(fy)));
        const __m128i rounded = _mm_srli_epi32(_mm_add_epi32(sum, half), 20);
        const uint32_t pixel = (uint32_t)_mm_cvtsi128_si32(_mm_shuffle_epi8(rounded, lowest));
        memcpy(to, &pixel, CHANNELS);
    }
}
#endif

/* a, b, c, d, e, f, interpolation, border, r, g, b. Sums wrap around, as NumPy's do. */
static int affine(Image *image, const int64_t *params, Scratch *scratch)
{
    Image result;
    Surface surface = {.image = image};
    if ((params[6] != 0 && params[6] != 1) || !is_border(params[7]) || !read_color(params + 8, surface.color))
        return BAD_PARAMS;
    surface.border = (int)params[7];
    const int status = new_image(&result, image->height, image->width, scratch);
    if (status != DONE)
        return status;
    void (*interpolate)(const Surface *, uint64_t, uint64_t, uint64_t, uint64_t, int, uint8_t *) = interpolate_row;
#if defined(__x86_64__) && defined(__GNUC__)
    if (scratch->simd == SIMD_AVX2)
        interpolate = interpolate_row_avx2;
#endif
    for (int row = 0; row < result.height; row++) {
        uint8_t *to = result.pixels + row * result.stride;
        uint64_t x = (uint64_t)params[1] * (uint64_t)row + (uint64_t)params[2];
        uint64_t y = (uint64_t)params[4] * (uint64_t)row + (uint64_t)params[5];
        const uint64_t dx = (uint64_t)params[0], dy = (uint64_t)params[3];
        if (params[6] == 1) {
            interpolate(&surface, x, y, dx, dy, result.width, to);
            continue;
        }
        for (int column = 0; column < result.width; column++, to += CHANNELS) {
            const int64_t half = (int64_t)1 << 31;
            const int64_t at_x = (int64_t)(x + (uint64_t)half) >> 32, at_y = (int64_t)(y + (uint64_t)half) >> 32;
            memcpy(to, pixel_at(&surface, at_x, at_y), CHANNELS);
            x += dx;
            y += dy;
        }
    }
    *image = result;
    return DONE;
}

/* r, g, b, number of boxes, then top, left, bottom, right of each, clipped to the image */
static int dropout(Image *image, const int64_t *params, Scratch *scratch)
{
    uint8_t color[CHANNELS];
    if (!read_color(params, color) || params[3] < 0 || params[3] > (scratch->num_params - 4) / 4)
        return BAD_PARAMS;
    const int status = make_writable(image, scratch);
    if (status != DONE)
        return status;
    for (int64_t hole = 0; hole < params[3]; hole++) {
        const int64_t *box = params + 4 + 4 * hole;
        const int64_t top = box[0] < 0 ? 0 : box[0], left = box[1] < 0 ? 0 : box[1];
        const int64_t bottom = box[2] > image->height ? image->height : box[2];
        const int64_t right = box[3] > image->width ? image->width : box[3];
        for (int64_t y = top; y < bottom && left < right; y++)
            fill(image->pixels + y * image->stride + left * CHANNELS, right - left, color);
    }
    return DONE;
}
#endif
