/* Operations on the colors of each pixel: JITTER, GRAY, TABLE. docs/transforms.md defines them, in integers.
 *
 * JITTER and GRAY work on blocks of pixels that stay in the L1 cache, one plane for each channel. All of their
 * arithmetic fits 16 bits, and gives the integers of the definitions: comments say why. So plain loops become vector
 * instructions of any processor, and each is compiled twice where the processor may have AVX2.
 */
#ifndef RAYPIPE_COLOR_H
#define RAYPIPE_COLOR_H

#include "image.h"
#include "color_simd.h"
#include "versions.h"

#define BLOCK 512 /* pixels: 3 KiB as planes */
#define MAX_FACTOR (64 << 16) /* Q16; more would not fit 16 bits */
#define HUE_CIRCLE (6 << 16)  /* Q16 sextants */

enum { BRIGHTNESS = 0, CONTRAST = 1, SATURATION = 2, HUE = 3, NUM_JITTERS = 4 };

typedef struct {
    int16_t channels[CHANNELS][BLOCK];
} Planes;

#define PLANES_R(planes) ((planes)->channels[0])
#define PLANES_G(planes) ((planes)->channels[1])
#define PLANES_B(planes) ((planes)->channels[2])

/* (9798 R + 19235 G + 3735 B + 16384) >> 15, by the high and the low bytes of the coefficients: neither sum exceeds
 * 65535, and the low one's lowest byte carries nothing. */
INLINE int16_t gray_of(int16_t r, int16_t g, int16_t b)
{
    const uint16_t high = (uint16_t)(38 * r + 75 * g + 14 * b + 64);
    const uint16_t low = (uint16_t)(70 * r + 35 * g + 151 * b);
    return (int16_t)((uint16_t)(high + (low >> 8)) >> 7);
}

INLINE int16_t clip_16(int16_t value) { return value < 0 ? 0 : value > 255 ? 255 : value; }

/* (base * (65536 - factor) + x * factor + 32768) >> 16, which is base + (((x - base) * factor + 32768) >> 16). The
 * factor comes as whole * 65536 + part with a signed part. */
INLINE int16_t blend(int16_t x, int16_t base, int16_t whole, int16_t part)
{
    const int16_t distance = (int16_t)(x - base);
    const int16_t high = (int16_t)(((int32_t)distance * part) >> 16);
    const uint16_t low = (uint16_t)((uint32_t)distance * (uint32_t)part);
    return clip_16((int16_t)(base + distance * whole + high + (low >> 15)));
}

/* Brightness, about 0, and contrast, about the mean. */
INLINE void blend_base_body(Planes *planes, int num, int base, int factor)
{
    const int16_t whole = (int16_t)((factor + 32768) >> 16), part = (int16_t)(factor - whole * 65536);
    for (int c = 0; c < CHANNELS; c++) {
        /* By a pointer: an index of the array would be checked (-fsanitize=bounds), and no vector loop be made. */
        int16_t *restrict channel = planes->channels[c];
        for (int i = 0; i < num; i++)
            channel[i] = blend(channel[i], (int16_t)base, whole, part);
    }
}
VERSIONS(blend_base, (Planes * planes, int num, int base, int factor), (planes, num, base, factor))

/* Saturation, about the pixel's gray. */
INLINE void blend_gray_body(Planes *planes, int num, int factor)
{
    const int16_t whole = (int16_t)((factor + 32768) >> 16), part = (int16_t)(factor - whole * 65536);
    int16_t *restrict r = PLANES_R(planes), *restrict g = PLANES_G(planes), *restrict b = PLANES_B(planes);
    for (int i = 0; i < num; i++) {
        const int16_t gray = gray_of(r[i], g[i], b[i]);
        r[i] = blend(r[i], gray, whole, part);
        g[i] = blend(g[i], gray, whole, part);
        b[i] = blend(b[i], gray, whole, part);
    }
}
VERSIONS(blend_gray, (Planes * planes, int num, int factor), (planes, num, factor))

/* The channel for which `start` is 5 (R), 3 (G), 1 (B); the pixel's hue is (hue * 65536 + low) / 65536 / chroma.
 *
 * The definition rounds max * 65536 - t, with t = clamp(min(k, 4 chroma - k), 0, chroma) in Q16. Rounding keeps the
 * order, and leaves 0 and chroma as they are, so k and 4 chroma - k can be rounded before min and clamp. */
INLINE int16_t turned(int16_t max, int16_t chroma, int16_t hue, uint16_t low, int16_t start)
{
    const int16_t circle = (int16_t)(6 * chroma);
    int16_t k = (int16_t)(hue + start * chroma);
    k = (int16_t)(k - (k >= circle ? circle : 0));
    const int16_t up = (int16_t)(k + (low > 32768)), down = (int16_t)(4 * chroma - k - (low >= 32768));
    int16_t t = up < down ? up : down;
    t = t < 0 ? 0 : t;
    t = t > chroma ? chroma : t;
    return (int16_t)(max - t);
}

INLINE void turn_hue_body(Planes *planes, int num, int shift)
{
    const int16_t whole = (int16_t)(shift >> 16);
    const uint16_t part = (uint16_t)shift;
    int16_t *restrict r = PLANES_R(planes), *restrict g = PLANES_G(planes), *restrict b = PLANES_B(planes);
    for (int i = 0; i < num; i++) {
        const int16_t red = r[i], green = g[i], blue = b[i];
        const int16_t rg = red > green ? red : green, rg_min = red < green ? red : green;
        const int16_t max = rg > blue ? rg : blue, min = rg_min < blue ? rg_min : blue;
        const int16_t chroma = (int16_t)(max - min), circle = (int16_t)(6 * chroma);
        int16_t hue = (int16_t)(4 * chroma + red - green);
        hue = max == green ? (int16_t)(2 * chroma + blue - red) : hue;
        hue = max == red ? (int16_t)(green - blue) : hue;
        hue = (int16_t)(hue + (hue < 0 ? circle : 0));
        /* shift * chroma in Q16; hue < 6 chroma before, so < 12 chroma after. */
        const uint16_t high = (uint16_t)(((uint32_t)(uint16_t)chroma * part) >> 16);
        const uint16_t low = (uint16_t)((uint32_t)(uint16_t)chroma * part);
        hue = (int16_t)(hue + whole * chroma + high);
        hue = (int16_t)(hue - (hue >= circle ? circle : 0));
        r[i] = turned(max, chroma, hue, low, 5);
        g[i] = turned(max, chroma, hue, low, 3);
        b[i] = turned(max, chroma, hue, low, 1);
    }
}
VERSIONS(turn_hue, (Planes * planes, int num, int shift), (planes, num, shift))

INLINE void make_gray_body(Planes *planes, int num)
{
    int16_t *restrict r = PLANES_R(planes), *restrict g = PLANES_G(planes), *restrict b = PLANES_B(planes);
    for (int i = 0; i < num; i++)
        r[i] = g[i] = b[i] = gray_of(r[i], g[i], b[i]);
}
VERSIONS(make_gray, (Planes * planes, int num), (planes, num))

/* Of these pixels alone, not of those that fill the block up. */
INLINE void add_gray_body(const Planes *planes, int num, int64_t *total)
{
    const int16_t *r = PLANES_R(planes), *g = PLANES_G(planes), *b = PLANES_B(planes);
    int32_t sum = 0;
    for (int i = 0; i < num; i++)
        sum += gray_of(r[i], g[i], b[i]);
    *total += sum;
}
VERSIONS(add_gray, (const Planes *planes, int num, int64_t *total), (planes, num, total))

/* Pixels into planes, filled up to a multiple of 16 with black. */
static void unpack(const uint8_t *pixels, int num, Planes *planes, int simd)
{
    int i = 0;
#ifdef HAS_AVX2
    if (simd == SIMD_AVX2)
        i = unpack_avx2(pixels, num, PLANES_R(planes), PLANES_G(planes), PLANES_B(planes));
#endif
    (void)simd;
    for (; i < num; i++)
        for (int c = 0; c < CHANNELS; c++)
            planes->channels[c][i] = pixels[i * CHANNELS + c];
    for (; i % 16; i++)
        for (int c = 0; c < CHANNELS; c++)
            planes->channels[c][i] = 0;
}

static void pack(const Planes *planes, int num, uint8_t *pixels, int simd)
{
    int i = 0;
#ifdef HAS_AVX2
    if (simd == SIMD_AVX2)
        i = pack_avx2(PLANES_R(planes), PLANES_G(planes), PLANES_B(planes), num, pixels);
#endif
    (void)simd;
    for (; i < num; i++)
        for (int c = 0; c < CHANNELS; c++)
            pixels[i * CHANNELS + c] = (uint8_t)planes->channels[c][i];
}

/* An image whose rows follow each other, in blocks, is one long row. */
typedef struct {
    int num_rows;
    int64_t width;
} Rows;

static Rows rows_of(const Image *from, const Image *to)
{
    const ptrdiff_t bytes = (ptrdiff_t)from->width * CHANNELS;
    if (from->stride == bytes && to->stride == bytes)
        return (Rows){1, (int64_t)from->height * from->width};
    return (Rows){from->height, from->width};
}

/* Where a pointwise operation writes: over the image, or into memory of this thread's. */
static int result_of(const Image *image, Image *result, Scratch *scratch)
{
    *result = *image;
    return image->writable ? DONE : new_image(result, image->height, image->width, scratch);
}

typedef struct {
    int order[NUM_JITTERS];
    int values[NUM_JITTERS]; /* by the operation */
    int mean;                /* contrast's */
} Jitter;

/* Operations first … last - 1 on each block; returns the sum of gray behind them if it is asked for. */
static int64_t jitter_rows(
    const Image *from, const Image *to, const Jitter *jitter, int first, int last, int sums, int simd)
{
    const Rows rows = rows_of(from, to);
    Planes planes;
    int64_t total = 0;
    for (int y = 0; y < rows.num_rows; y++)
        for (int64_t x = 0; x < rows.width; x += BLOCK) {
            const int num = rows.width - x < BLOCK ? (int)(rows.width - x) : BLOCK, filled = (num + 15) / 16 * 16;
            unpack(from->pixels + y * from->stride + x * CHANNELS, num, &planes, simd);
            for (int i = first; i < last; i++) {
                const int operation = jitter->order[i], value = jitter->values[operation];
                if (operation == BRIGHTNESS)
                    blend_base(simd, &planes, filled, 0, value);
                else if (operation == CONTRAST)
                    blend_base(simd, &planes, filled, jitter->mean, value);
                else if (operation == SATURATION)
                    blend_gray(simd, &planes, filled, value);
                else
                    turn_hue(simd, &planes, filled, value);
            }
            if (sums)
                add_gray(simd, &planes, num, &total);
            if (first < last)
                pack(&planes, num, to->pixels + y * to->stride + x * CHANNELS, simd);
        }
    return total;
}

/* Reads the params; operations that change nothing are left out, with contrast's pass. Returns how many stay, or -1. */
static int read_jitter(const int64_t *params, int num_params, Jitter *jitter)
{
    int num = 0;
    if (num_params < 2 * NUM_JITTERS)
        return -1;
    for (int i = 0; i < NUM_JITTERS; i++) {
        const int64_t value = params[NUM_JITTERS + i];
        if (value < 0 || (i == HUE ? value >= HUE_CIRCLE : value > MAX_FACTOR))
            return -1;
        jitter->values[i] = (int)value;
    }
    for (int i = 0; i < NUM_JITTERS; i++) {
        if (params[i] < -1 || params[i] >= NUM_JITTERS)
            return -1;
        if (params[i] >= 0 && jitter->values[params[i]] != (params[i] == HUE ? 0 : 65536))
            jitter->order[num++] = (int)params[i];
    }
    return num;
}

static int jitter(Image *image, const int64_t *params, Scratch *scratch)
{
    Jitter jitter;
    Image result;
    const int num = read_jitter(params, scratch->num_params, &jitter);
    if (num <= 0)
        return num ? BAD_PARAMS : DONE;
    const int status = result_of(image, &result, scratch);
    if (status != DONE)
        return status;
    const int64_t num_pixels = (int64_t)image->height * image->width;
    /* A pass goes up to the next contrast, whose mean it sums. */
    for (int first = 0, known = 0, last; first < num; first = last, known = 1) {
        for (last = first + known; last < num && jitter.order[last] != CONTRAST; last++)
            ;
        const int64_t total = jitter_rows(image, &result, &jitter, first, last, last < num, scratch->simd);
        jitter.mean = (int)((2 * total + num_pixels) / (2 * num_pixels));
        if (first < last)
            *image = result;
    }
    return DONE;
}

static int gray(Image *image, const int64_t *params, Scratch *scratch)
{
    Image result;
    Planes planes;
    (void)params;
    const int status = result_of(image, &result, scratch);
    if (status != DONE)
        return status;
    const Rows rows = rows_of(image, &result);
    for (int y = 0; y < rows.num_rows; y++)
        for (int64_t x = 0; x < rows.width; x += BLOCK) {
            const int num = rows.width - x < BLOCK ? (int)(rows.width - x) : BLOCK;
            unpack(image->pixels + y * image->stride + x * CHANNELS, num, &planes, scratch->simd);
            make_gray(scratch->simd, &planes, (num + 15) / 16 * 16);
            pack(&planes, num, result.pixels + y * result.stride + x * CHANNELS, scratch->simd);
        }
    *image = result;
    return DONE;
}

INLINE void solarize_body(const uint8_t *from, uint8_t *to, int64_t num, uint8_t threshold)
{
    for (int64_t i = 0; i < num; i++)
        to[i] = from[i] >= threshold ? (uint8_t)(255 - from[i]) : from[i];
}
VERSIONS(solarize, (const uint8_t *from, uint8_t *to, int64_t num, uint8_t threshold), (from, to, num, threshold))

/* 48 bytes are whole pixels and whole vectors. */
INLINE void posterize_body(const uint8_t *from, uint8_t *to, int64_t num, const uint8_t *masks)
{
    int64_t i = 0;
    for (; i + 48 <= num; i += 48)
        for (int j = 0; j < 48; j++)
            to[i + j] = from[i + j] & masks[j];
    for (int j = 0; i < num; i++, j++)
        to[i] = from[i] & masks[j];
}
VERSIONS(posterize, (const uint8_t *from, uint8_t *to, int64_t num, const uint8_t *masks), (from, to, num, masks))

static int table(Image *image, const int64_t *params, Scratch *scratch)
{
    Image result;
    uint8_t masks[48];
    if (scratch->num_params < 4 || (params[0] != 0 && params[0] != 1))
        return BAD_PARAMS;
    for (int c = 0; c < CHANNELS; c++)
        if (params[1 + c] < 0 || params[1 + c] > (params[0] == 0 && c == 0 ? 256 : 255))
            return BAD_PARAMS;
    if (params[0] == 0 && params[1] == 256) /* no byte is that large */
        return DONE;
    for (int i = 0; i < 48; i++)
        masks[i] = (uint8_t)params[1 + i % CHANNELS];
    const int status = result_of(image, &result, scratch);
    if (status != DONE)
        return status;
    const Rows rows = rows_of(image, &result);
    for (int y = 0; y < rows.num_rows; y++) {
        const uint8_t *from = image->pixels + y * image->stride;
        uint8_t *to = result.pixels + y * result.stride;
        if (params[0] == 0)
            solarize(scratch->simd, from, to, rows.width * CHANNELS, (uint8_t)params[1]);
        else
            posterize(scratch->simd, from, to, rows.width * CHANNELS, masks);
    }
    *image = result;
    return DONE;
}
#endif
